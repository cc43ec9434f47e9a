"""Runs Megatron-LM's pretrain_gpt.py on CPUs with gloo, for tests of the exchange of checkpoints.

usage: python tests/trainer/megatron_lm_driver.py CHECKOUT [pretrain_gpt.py's arguments]

CHECKOUT is Megatron-LM's source; megatron.core is the installed one, so the versions should be the same. The ranks
are in the environment, as torchrun sets them. Beyond the trainer's own stand-ins for CUDA, megatron.training needs
what is here.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import os
import queue
import runpy
import sys
import time
import types
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

TENSOR_TYPES = {
    "FloatTensor": "float32",
    "DoubleTensor": "float64",
    "BFloat16Tensor": "bfloat16",
    "HalfTensor": "float16",
    "IntTensor": "int32",
    "LongTensor": "int64",
    "ByteTensor": "uint8",
}
"""The names of CUDA tensors that megatron.training calls, and their dtypes."""


class Anything:
    """A decorator, type or function of Triton that is used at import but never called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, key: Any) -> Anything:
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Anything()


def main(checkout: Path, arguments: list[str]) -> None:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    # Last, so that megatron.core is the installed one: both are parts of the namespace package megatron.
    sys.path += [str(checkout)]
    sys.path.insert(0, str(ROOT))
    from trainer.distributed import device

    device.stand_in_for_cuda()
    if not hasattr(typing, "override"):  # Python 3.11, where later versions want 3.12
        typing.override = lambda function: function  # type: ignore[attr-defined]
    import_with_fake_triton("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    stand_in_for_gpus()
    stand_in_for_core()
    sleep_after_steps()
    sys.argv = [str(checkout / "pretrain_gpt.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def import_with_fake_triton(module: str) -> None:
    """Imports a module with Triton kernels, where Triton is not installed. torch must not see the fake Triton."""
    triton, language = (types.ModuleType(name) for name in ("triton", "triton.language"))
    for fake in (triton, language):
        fake.__getattr__ = Anything().__getattr__  # type: ignore[method-assign]
        fake.__spec__ = importlib.util.spec_from_loader(fake.__name__, None)
    triton.language, triton.__version__ = language, "0.0"  # type: ignore[attr-defined]
    sys.modules |= {"triton": triton, "triton.language": language}
    importlib.import_module(module)
    del sys.modules["triton"], sys.modules["triton.language"]


def sleep_after_steps() -> None:
    """Sleeps STEP_S seconds after each step of the optimizer, for tests that interrupt a run."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    step_s = float(os.environ.get("STEP_S", 0))
    register_optimizer_step_post_hook(lambda *_: time.sleep(step_s))


def stand_in_for_gpus() -> None:
    """The functions of torch.cuda that megatron.training uses."""
    import torch

    def tensor(dtype: torch.dtype, values: Any = ()) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    cuda: Any = torch.cuda
    # initialize.py asserts that there is a GPU; Core and torch must not believe it.
    cuda.is_available = lambda: sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.training")
    cuda.device_count = lambda: 8
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
        total_memory=2**36, multi_processor_count=1, name="cpu", major=9, minor=0
    )
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda device=None: 0)
    cuda.memory_stats = lambda device=None: collections.defaultdict(int)
    cuda.reset_peak_memory_stats = lambda device=None: None
    cuda.Event.elapsed_time = lambda self, other: 0.0
    for name, dtype in TENSOR_TYPES.items():
        setattr(cuda, name, functools.partial(tensor, getattr(torch, dtype)))
    init_process_group = torch.distributed.init_process_group

    def without_device(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
        init_process_group(*args, **kwargs)

    torch.distributed.init_process_group = without_device


def stand_in_for_core() -> None:
    """The parts of Core that need a compiler, a GPU or another process."""
    import megatron.core.optimizer as core_optimizer
    from megatron.core.datasets import utils
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from trainer.model import experts
    from trainer.optimizer import build as optimizer

    local_layer = gpt_layer_specs.get_gpt_layer_local_spec

    def stored_as_on_gpus(num_experts: int | None = None, *args: Any, **kwargs: Any) -> Any:
        layer = local_layer(num_experts, *args, **kwargs)
        if issubclass(layer.submodules.self_attention.module, MLASelfAttention):
            complete_latent_attention(layer)
        if num_experts is not None:
            experts.store_as_transformer_engine(layer)
        return layer

    gpt_layer_specs.get_gpt_layer_local_spec = stored_as_on_gpus

    if core_optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer._stand_in_for_fused_adam()
    filesystem_async._results_queue = queue.Queue()
    utils.compile_helpers = lambda: None  # the wheel holds them
    if importlib.util.find_spec("megatron.legacy") is not None:
        from megatron.legacy import fused_kernels

        fused_kernels.load = lambda args: None


def complete_latent_attention(layer: Any) -> None:
    """Gives Core's local latent attention what it lacks: values of another width than keys, and one naming."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from trainer.model.attention import latent

    class Attention(DotProductAttention):
        def __init__(
            self, config: Any, *args: Any, k_channels: Any = None, v_channels: int = 0, **kwargs: Any
        ):
            super().__init__(config, *args, **kwargs)
            width = v_channels or config.v_head_dim  # the base class builds it without channels first
            self.hidden_size_per_partition = width * self.num_attention_heads_per_partition

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    layer.submodules.self_attention.submodules.core_attention = Attention
    layer.submodules.sharded_state_dict_keys_map = latent.NAMES


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
