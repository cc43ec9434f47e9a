"""The stage train: runs the trainer on every GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping

from hpcgen.config.cluster import price_per_gpu_hour
from hpcgen.config.container import is_image_file
from hpcgen.config.directories import measured_places
from hpcgen.config.loader import Run
from hpcgen.config.node_type import NodeType
from hpcgen.config.run import RunConfig
from hpcgen.config.stages import MACHINE_FILE, TRAINER_FILE
from hpcgen.errors import Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.config_text import config_text
from hpcgen.planning.inputs import Input, blend_files, checkpoints
from hpcgen.planning.kind import ONE_THREAD, Export, Stage, Work
from hpcgen.planning.node_check import preflight
from hpcgen.planning.notification import notification
from hpcgen.planning.paths import checkpoint_directory, import_files, trainer_data
from hpcgen.planning.resuming import resumption_of, weights_read
from hpcgen.planning.software import runtime
from hpcgen.stages.evaluate import EVALUATE
from hpcgen.stages.prompts import prompt_files, prompt_problems
from trainer.contract.config import ParallelismConfig, TrainerConfig, fingerprint
from trainer.contract.config.answers import MAX_PROMPTS

BLACKWELL = 10.0
"""Compute capability of the first Blackwell GPUs."""


class Train(Stage):
    """Runs the training."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Runs the trainer on the data blend with the run's checkpoints."""
        data, checkpoint = trainer_data(config), config.checkpoint
        saved = checkpoint_directory(config)
        return Work(
            arguments=("-m", "trainer"),
            inputs=(
                *blend_files(config),
                *map(Input, import_files(config)),
                *_answers_inputs(config),
                *([checkpoints(checkpoint.load)] if checkpoint.load else []),
            ),
            reads=weights_read(config),
            writes=tuple(filter(None, (data.cache_dir, config.logging.prometheus_directory))),
            large=(saved,),
            files={**trainer_files(trainer), **_machine_file(run, allocation)},
            values={
                "train_iters": config.training.train_iters,
                "fingerprint": "" if trainer is None else fingerprint(trainer),
                "max_restarts": allocation.max_restarts,
                **({"chain": allocation.settings.chain} if allocation.settings.chain else {}),
                "checkpoints": saved,
                **({"evaluation_every": config.evaluation.every} if config.evaluation.every else {}),
                **preflight(run, config, allocation),
                **notification(config, trainer),
            },
        )

    def problems(self, run: Run, config: RunConfig, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields changes that the trainer would refuse when it resumes, and training that would be lost."""
        if (prompts := config.answers.prompts) is not None:
            yield from prompt_problems(config, prompts, "answers.prompts", MAX_PROMPTS)
        if trainer is not None:
            if (resumption := resumption_of(trainer)) is not None:
                yield from resumption.problems(run.config)
            yield from _image_problems(run, config, trainer)

    def warnings(self, run: Run, config: RunConfig, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields warnings about a run that has already finished, rotary frequencies, and names that are left over."""
        if trainer is not None and (resumption := resumption_of(trainer)) is not None:
            yield from resumption.warnings()

    def queued_stage(self, config: RunConfig) -> Stage | None:
        """The stage evaluate if `evaluation.every` is set, otherwise None."""
        return EVALUATE if config.evaluation.every is not None else None

    def job_name(self, run_name: str) -> str:
        """The name of the run."""
        return run_name

    def spare_nodes(self, config: RunConfig) -> int:
        """The number of spare nodes that can replace bad ones."""
        return config.preflight.spare_nodes

    def exports(self, run: Run, config: RunConfig) -> Iterator[Export]:
        """Yields variables for offline mode and threads, and on GPUs for the layout and the flight recorder."""
        yield ONE_THREAD
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            yield Export(name, "1", "Keeps ranks from contacting the Hugging Face Hub while GPUs wait.")
        if run.node_type.device == "cuda":
            yield from _exports_of_gpus(config, run.node_type)

    def environment_advice(self, run: Run, given: Mapping[str, str]) -> Iterator[Problem]:
        """Yields warnings about variables that conflict with the layout or with SHARP."""
        if run.node_type.device != "cuda":
            return
        overlaps = _overlaps(run.config.parallelism) and _is_before_blackwell(run.node_type)
        if overlaps and given.get("CUDA_DEVICE_MAX_CONNECTIONS", "1") != "1":
            reason = "is not 1, so TP or CP communication can be delayed by compute on GPUs before Blackwell"
            yield Problem("environment.CUDA_DEVICE_MAX_CONNECTIONS", reason, "remove it")
        if given.get("NCCL_COLLNET_ENABLE", "0") != "0":
            reason = "is removed by Megatron-Core, which allows only one process group to use SHARP"
            yield Problem(
                "environment.NCCL_COLLNET_ENABLE", reason, "remove it and set parallelism.use_sharp"
            )


def _answers_inputs(config: RunConfig) -> tuple[Input, ...]:
    prompts = config.answers.prompts
    return prompt_files(config, prompts) if prompts is not None else ()


def _image_problems(run: Run, config: RunConfig, trainer: TrainerConfig) -> Iterator[Problem]:
    """Yields what the image lacks of an FP8 recipe or a cross entropy, if the record next to the image knows."""
    image = config.container.image or run.cluster.container.image or ""
    training = trainer.training
    asks = training.fp8 is not None or training.cross_entropy_fusion_impl == "te"
    if not asks or runtime(config, run.cluster) == "none" or not is_image_file(image):
        return
    from hpcgen.planning import image_record  # few runs need it

    yield from image_record.fp8_problems(image, training)
    yield from image_record.cross_entropy_problems(image, trainer)


def trainer_files(trainer: TrainerConfig | None) -> dict[str, str]:
    """The trainer's configuration as a job file."""
    return {} if trainer is None else {TRAINER_FILE: config_text(trainer)}


def _machine_file(run: Run, allocation: Allocation) -> dict[str, str]:
    """The nodes of a job with GPUs as a job file. With it, a report can compare the steps with the prediction, and a
    ledger knows what the job holds and costs."""
    if run.node_type.device != "cuda":
        return {}
    machine: dict[str, object] = {
        "node_type": run.cluster.node_type,
        "gpus_per_node": allocation.ntasks_per_node,
        "nvlink_nodes": allocation.nvlink_nodes,
    }
    if (price := price_per_gpu_hour(allocation.settings, run.cluster)) is not None:
        machine |= {"price_per_gpu_hour": price, "currency": run.cluster.currency}
    if run.cluster.gpu_idle_limit_s is not None:
        machine["gpu_idle_limit_s"] = run.cluster.gpu_idle_limit_s
    places = measured_places(run.cluster_name, run.cluster_files)
    if measured := [str(path) for path in places if os.path.lexists(path)]:
        machine["measured"] = measured
    return {MACHINE_FILE: f"{json.dumps(machine)}\n"}


def _overlaps(parallelism: ParallelismConfig) -> bool:
    """Returns True if TP or CP communication must be scheduled ahead of compute."""
    return parallelism.tensor_model_parallel_size > 1 or parallelism.context_parallel_size > 1


def _is_before_blackwell(node_type: NodeType) -> bool:
    """Returns True if the GPUs are older than Blackwell, or unknown."""
    capability = node_type.compute_capability
    return capability is None or float(capability) < BLACKWELL


def _exports_of_gpus(config: RunConfig, node_type: NodeType) -> Iterator[Export]:
    if config.training.deterministic_mode:
        why = "training.deterministic_mode requires a fixed order of additions."
        yield Export("NCCL_ALGO", "Ring", why, "Megatron-LM, arguments.py")
        yield Export("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", why, "Megatron-LM, arguments.py")
        yield Export("CUBLAS_WORKSPACE_CONFIG", ":4096:8", why, "NVIDIA cuBLAS, reproducibility")
    if _overlaps(config.parallelism) and _is_before_blackwell(node_type):
        why = "Before Blackwell, keeps communication ahead of compute with TP or CP (Megatron-LM, arguments.py)."
        yield Export("CUDA_DEVICE_MAX_CONNECTIONS", "1", why, "Megatron-LM, arguments.py")
    pytorch = "PyTorch documentation, ProcessGroupNCCL environment variables"
    why = "With the trace buffer, a hung collective leaves a record for every rank."
    yield Export("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", why, pytorch)
    why = "Number of collectives kept for the record of a hung collective."
    yield Export("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000", why, pytorch)
    record = f"{config.paths.run_dir}/stacks/flight-record-"
    why = "Prefix of the files with the last collectives of a hung job (NCCL's flight recorder)."
    yield Export("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", record, why, pytorch)


TRAIN = Train.of("train")
STAGES = (TRAIN,)
