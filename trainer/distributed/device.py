"""Makes Megatron-Core, which uses CUDA in many places, run on a CPU.

Call `prepare` before megatron.core is imported, since Core binds some CUDA functions at import. If CUDA is available,
nothing is replaced. Each stand-in names the place in Core that needs it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

from trainer.contract.errors import TrainerError

FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "full", "full_like", "linspace", "ones", "ones_like"),
    *("rand", "rand_like", "randint", "randn", "randn_like", "tensor", "zeros", "zeros_like"),
)


def prepare(device: str) -> None:
    """Prepare this process to compute on `device`, "cuda" or "cpu".

    Raises:
        TrainerError: `device` is "cuda" but torch sees no GPU.
    """
    if device == "cpu":
        hide_gpus()
        stand_in_for_cuda()
        return
    import torch

    if not torch.cuda.is_available():
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
        raise TrainerError(
            f"rank {rank} on {socket.gethostname()}: device = 'cuda', but torch {torch.__version__} "
            "sees no GPU. Check the node's GPUs, the container's driver and that this torch is built for CUDA"
        )


def hide_gpus() -> None:
    """Hide the GPUs from torch and Core. Call this before any library asks CUDA for its devices, which it does once."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def make_deterministic() -> None:
    """Make every library choose kernels with bitwise reproducible results. Call this before they are first used.

    Sources: Megatron-LM arguments.py (deterministic_mode), torch.use_deterministic_algorithms.
    """
    import torch

    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")  # a tree's shape may differ from run to run
    torch.use_deterministic_algorithms(True)


def stand_in_for_cuda() -> None:
    """Replace the CUDA functions that Megatron-Core uses with CPU versions. Does nothing if CUDA is available."""
    import torch

    if torch.cuda.is_available() or getattr(torch.cuda, "is_replaced_by_cpu", False):
        return
    _hide_kernels()
    _replace_factories(torch)
    _replace_tensor_methods(torch)
    _replace_random_state(torch)
    _replace_streams(torch)
    _replace_collectives(torch)
    # Core's jit_fuser is torch.compile, which would need a C++ compiler and take 2 s to import.
    torch.compile = lambda model=None, **_: model if model is not None else (lambda function: function)
    _skip_compiler(torch)
    torch.cuda.is_replaced_by_cpu = True


def _hide_kernels() -> None:
    """Hide libraries whose kernels need a GPU. Core would use them if it could import them."""
    for library in ("transformer_engine", "apex", "amp_C"):
        sys.modules.setdefault(library, None)  # type: ignore[arg-type]  # None makes an import fail
    # megatron-core 0.17 and later import this module of Triton kernels even if Triton is missing.
    paged_stash = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    for name in ("GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel"):
        setattr(paged_stash, name, None)
    sys.modules[paged_stash.__name__] = paged_stash


def _replace_factories(torch: Any) -> None:
    """Replace tensor factories. schedules.py and the optimizer pass device="cuda"; RoPE requests pinned memory."""

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def create(*args: Any, **kwargs: Any) -> Any:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return create

    # torch lists the factories to which `with torch.device(...)` applies when it is first used. It must list the
    # originals, which these call; otherwise transformers loads models with uninitialized buffers.
    with torch.device("cpu"):
        torch.empty(0)
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    # Core passes the "device number" only to factories, so it may be a device.
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.set_device = lambda device: None


def _replace_tensor_methods(torch: Any) -> None:
    """Replace `.cuda()`, and `.type()`, whose result megatron.core.optimizer compares with torch.cuda names."""
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    to, tensor_type = torch.Tensor.to, torch.Tensor.type

    def to_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return to(self, *("cpu" if _is_cuda(value) else value for value in args), **kwargs)

    def type_as_core_names_it(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = tensor_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(answer, str) and caller.startswith("megatron.core.optimizer"):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.to = to_cpu
    torch.Tensor.type = type_as_core_names_it


def _replace_random_state(torch: Any) -> None:
    """Replace CUDA's generators with the CPU's. tensor_parallel/random.py forks them for dropout."""
    generator = torch.default_generator
    torch.cuda.default_generators = {torch.device("cpu"): generator}
    torch.cuda._lazy_call = lambda function, **kwargs: function()
    # Not torch.manual_seed, which also seeds CUDA and so would call itself.
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = generator.manual_seed
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device="cpu": generator.get_state()
        module.set_rng_state = lambda state, device="cpu": generator.set_state(state)


def _replace_streams(torch: Any) -> None:
    """Replace streams, events and profiler ranges. They only order or mark work on a GPU, so here they do nothing."""

    class Stream:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Callable[..., Stream]:
            return lambda *args, **kwargs: self  # such as the event of record_event, for which experts wait

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream)  # a CPU has one stream

        def __hash__(self) -> int:
            return hash(Stream)

    torch.cuda.Stream = torch.cuda.Event = Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda device=None: None
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda message="": None


def _replace_collectives(torch: Any) -> None:
    """Replace the collectives with which experts exchange different numbers of tokens (moe/token_dispatcher.py).

    Core passes these numbers as tensors if it need not copy them from a GPU. gloo only gathers equal parts, and does
    not reduce and scatter different ones.
    """
    distributed = torch.distributed
    exchange, gather = distributed.all_to_all_single, distributed.all_gather

    def exchange_parts(
        output: Any,
        part: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return exchange(
            output, part, _as_list(output_split_sizes), _as_list(input_split_sizes), group, async_op
        )

    def gather_parts(parts: list[Any], part: Any, group: Any = None, async_op: bool = False) -> Any:
        if len({each.shape for each in parts}) == 1:
            return gather(parts, part, group, async_op)
        padded = part.new_zeros(max(len(each) for each in parts), *part.shape[1:])
        padded[: len(part)] = part
        received = [torch.empty_like(padded) for _ in parts]
        gather(received, padded, group)
        for each, found in zip(parts, received, strict=True):
            each.copy_(found[: len(each)])
        return None

    def reduce_scatter_parts(
        output: Any, parts: list[Any], op: Any = distributed.ReduceOp.SUM, group: Any = None
    ) -> None:
        total = torch.cat(parts)
        distributed.all_reduce(total, op, group)
        output.copy_(total.split([len(part) for part in parts])[distributed.get_rank(group)])

    distributed.all_to_all_single = exchange_parts
    distributed.all_gather, distributed.reduce_scatter = gather_parts, reduce_scatter_parts


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if hasattr(sizes, "tolist") else sizes


def _skip_compiler(torch: Any) -> None:
    """Keep torch's compiler from being imported, which takes a sixth of the CPU time of a short run.

    torch marks some methods of optimizers as never compiled, and the first call of one imports the compiler to do so
    (torch/_compile.py).
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(torch.optim.Optimizer, name)
        if (marked := getattr(method, "__wrapped__", None)) is not None:
            setattr(marked, "__dynamo_disable", marked)


def _is_cuda(value: Any) -> bool:
    import torch

    return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
