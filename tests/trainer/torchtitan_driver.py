"""Runs torchtitan's training module on CPUs with gloo, for tests of stage run.

usage: python tests/trainer/torchtitan_driver.py [arguments of torchtitan.train]

The ranks are in the environment, as torchrun sets them. torchtitan 0.3.0 needs a GPU in four places:

- It imports Triton kernels (torchtitan/distributed/minimal_async_ep/kernels.py, line 10).
- Its device is "cuda" where torch finds no accelerator (torchtitan/tools/utils.py, line 55).
- The attention of its models is FlexAttention, which has no backward pass on CPUs in PyTorch 2.13.
- FSDP reduces its gradients with an operation that gloo lacks (torchtitan/distributed/fsdp.py, line 41).

It also calls torch.distributed.set_timeout after the first step, which PyTorch 2.13 does not have.
"""

from __future__ import annotations

import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.trainer.megatron_lm_driver import import_with_fake_triton, sleep_after_steps


def main() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # no C++ compiler is needed
    stand_in_for_gpus()
    import_with_fake_triton("torchtitan.distributed.minimal_async_ep.kernels")
    stand_in_for_flex_attention()
    reduce_with_sums()
    sleep_after_steps()
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)


def stand_in_for_gpus() -> None:
    """Makes the CPU torchtitan's device, with the functions of torch.cuda that it uses."""
    import torch
    import torch._utils

    distributed: Any = torch.distributed
    if not hasattr(distributed, "set_timeout"):
        distributed.set_timeout = lambda timeout, group=None: None
    cpu: Any = torch.cpu
    utils: Any = torch._utils
    utils._get_available_device_type = lambda: "cpu"
    utils._get_device_module = lambda device_type: cpu
    cpu.get_device_name = lambda device=None: "cpu"
    cpu.current_device = lambda: 0
    cpu.device_count = lambda: 1
    cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=2**36)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda device=None: None
    cpu.memory_stats = lambda device=None: {}


def stand_in_for_flex_attention() -> None:
    """Makes attention causal, without the limits of documents."""
    from torch.nn.functional import scaled_dot_product_attention
    from torchtitan.models.common.attention import FlexAttention

    def attention(q: Any, k: Any, v: Any, *, scale: Any, enable_gqa: bool, **_: Any) -> tuple[Any, None]:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None

    FlexAttention._compiled_flex_attn = staticmethod(attention)


def reduce_with_sums() -> None:
    """Makes FSDP divide gradients itself."""
    from torch.distributed.fsdp import FSDPModule

    module: Any = FSDPModule
    divide = module.set_gradient_divide_factor

    def set_factor(self: Any, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    module.set_gradient_divide_factor = set_factor


if __name__ == "__main__":
    main()
