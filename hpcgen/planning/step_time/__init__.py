"""Prediction of the time of a training step, term by term.

| term | module |
| --- | --- |
| facts of the machine, and constants with their sources | `machine`, `measurements` |
| matrix products, attention and memory-bound kernels | `kernels` |
| parts of a layer: products with their transfers, attention, MLP and experts | `work`, `linear`, `attention`, `mlp` |
| recomputation, and waiting for the host | `layer`, `host` |
| what frozen weights save | `frozen` |
| embedding, logits, loss and MTP layers | `output` |
| what does not depend on the pipeline, computed once for several layouts | `parts` |
| transfers between GPUs | `collectives` |
| the schedule of the pipeline | `pipeline` |
| reduction of gradients and gathering of weights | `data_parallel` |
| update of the weights | `optimizer` |
| the complete step | `estimate`, `result` |
| bytes that GPUs send | `traffic` |
"""

from hpcgen.planning.step_time.estimate import estimate_step_time, schedule, transfers
from hpcgen.planning.step_time.machine import Machine
from hpcgen.planning.step_time.result import Schedule, StageTime, StepTime

__all__ = ["Machine", "Schedule", "StageTime", "StepTime", "estimate_step_time", "schedule", "transfers"]
