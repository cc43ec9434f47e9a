"""Names of environment variables that programs of a job read, and mistakes in them and in their values."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from hpcgen.config.variable_values import value_mistake
from hpcgen.errors import Problem
from hpcgen.text import nearest

WRONG_NAMES = {
    "NCCL_IB_QPS_PER_CONN": "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_MIN_CHANNELS": "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_CHANNELS": "NCCL_MAX_NCHANNELS",
    "NCCL_NCHANNELS": "NCCL_MIN_NCHANNELS",
    "NCCL_SOCKET_IF": "NCCL_SOCKET_IFNAME",
    "NCCL_IFNAME": "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCAS": "NCCL_IB_HCA",
    "NCCL_TOPOLOGY_FILE": "NCCL_TOPO_FILE",
    "NCCL_IB_RELAXED_ORDERING": "NCCL_IB_PCI_RELAXED_ORDERING",
    "NCCL_P2P_CHUNKSIZE": "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_AVOID_RECORD_STREAMS": "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "NCCL_DUMP_ON_TIMEOUT": "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "NCCL_TRACE_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "NCCL_HEARTBEAT_TIMEOUT_SEC": "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "GLOO_IFNAME": "GLOO_SOCKET_IFNAME",
    "UCX_NET_DEVICE": "UCX_NET_DEVICES",
    "UCX_TL": "UCX_TLS",
    "SHARP_COLL_ENABLE_SHARP": "SHARP_COLL_ENABLE_SAT",
    "SHARP_ENABLE_SAT": "SHARP_COLL_ENABLE_SAT",
    "CUDA_MAX_CONNECTIONS": "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_MAX_CONNECTION": "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_CUDA_ALLOCATOR_CONF": "PYTORCH_CUDA_ALLOC_CONF",
    "MASTER_ADDRESS": "MASTER_ADDR",
}
"""Name that nothing reads -> intended name."""

UNREAD = {
    **dict.fromkeys(
        ("NCCL_TIMEOUT", "NCCL_TIMEOUT_WAIT_SEC", "NCCL_SOCKET_TIMEOUT", "TORCH_NCCL_TIMEOUT"),
        "NCCL has no timeout; PyTorch's is an argument of init_process_group",
    ),
    "NCCL_CROSS_DC": "NCCL has no such setting",
    "MEGATRON_NUM_MICROBATCHES": "the number follows from --global-batch-size, --micro-batch-size and the layout",
}
"""Name that nothing reads -> explanation."""

RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
}
"""PyTorch variables that got a prefix in 2.2 -> their new names."""

PLUGIN_PREFIXES = (
    "NCCL_OFI_", "NCCL_FASTRAK_", "NCCL_GPUDIRECT", "NCCL_IBEXT_", "NCCL_SHARP_", "NCCL_UCX_", "NCCL_TESTS",
    "NCCL_TEST_", "NCCL_NETDEVS_", "NCCL_TUNER_", "NCCL_PROFILER_", "NCCL_RDMA_", "NCCL_INSPECTOR_",
    "NCCL_SHIMNET_", "NCCL_USE_SNAP",
)  # fmt: skip
"""Prefixes of variables of plugins and of nccl-tests, which are not checked. The last two are of GPUDirect-TCPXO."""

OPEN_PREFIXES = ("CUDA_", "FI_", "NVTE_", "OFI_NCCL_", "OMP_", "PYTORCH_", "SHARP_", "TORCH_FR_", "UCX_")
"""Prefixes of variables of which only the usual ones are known: other names may be correct, misspelled ones are not."""

BUILD_NAMES = frozenset((
    "NCCL_HOME", "NCCL_ROOT", "NCCL_ROOT_DIR", "NCCL_DIR", "NCCL_PATH", "NCCL_VERSION", "NCCL_INCLUDE_DIR",
    "NCCL_LIB_DIR", "NCCL_LIBRARY", "NCCL_INCLUDE", "NCCL_LIB", "NCCL_LIBRARIES", "NCCL_PREFIX",
))  # fmt: skip
"""Variables for compilers and scripts with NCCL's location or version."""


SUBSYSTEMS = frozenset((
    "INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "CALL", "PROXY", "NVLS", "BOOTSTRAP", "REG",
    "PROFILE", "RAS", "DESTROY", "ALL",
))  # fmt: skip
"""Valid names in NCCL_DEBUG_SUBSYS (NCCL user guide, NCCL_DEBUG_SUBSYS)."""
DEBUG_LEVELS = ("VERSION", "WARN", "INFO", "ABORT", "TRACE")
"""Valid values of NCCL_DEBUG."""


@functools.cache
def known() -> Mapping[str, str]:
    """Variable -> the form of its values (see known_variables.txt). Complete for names that `is_checked`."""
    text = (Path(__file__).parent / "known_variables.txt").read_text(encoding="utf-8")
    rows = (line.partition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: form for name, _, form in rows}


def right_name(name: str) -> str | None:
    """The intended name for a name that nothing reads; None if the name is correct or no name is similar."""
    if name in WRONG_NAMES:
        return WRONG_NAMES[name]
    is_open = name.startswith(OPEN_PREFIXES)
    if not (is_open or is_checked(name)) or name in UNREAD or name in known():
        return None
    return nearest(name, [each for each in known() if each.startswith(OPEN_PREFIXES) == is_open])


def unread(name: str) -> str | None:
    """Advice, possibly "", for a name that nothing reads and that resembles no other; None for other names."""
    is_unknown = is_checked(name) and name not in known()
    return UNREAD.get(name, "" if is_unknown and right_name(name) is None else None)


def is_checked(name: str) -> bool:
    """Returns True for the kinds of names that `known` covers completely: NCCL's, and PyTorch's for NCCL and gloo."""
    is_listed = name.startswith(("NCCL_", "TORCH_NCCL_")) or name.startswith("GLOO_SOCKET")
    return is_listed and not name.startswith(PLUGIN_PREFIXES) and name not in BUILD_NAMES


def form_of(name: str) -> str:
    """The form of a variable's values. Unknown variables have the form "text"."""
    return known().get(name, "text")


def name_mistake(name: str) -> Problem | None:
    """The problem of a variable that nothing reads; None if something may read it."""
    path = f"environment.{name}"
    if right := right_name(name):
        return Problem(path, "has no effect, because nothing reads it", f"did you mean {right}?")
    if name in UNREAD:
        return Problem(path, f"has no effect: {UNREAD[name]}", "remove it")
    return None


def value_mistake_of(name: str, value: str) -> Problem | None:
    """The problem of a value that the program of the variable does not accept; None if it may be correct."""
    path = f"environment.{name}"
    if name == "NCCL_DEBUG" and value.upper() not in DEBUG_LEVELS:
        close = next((level for level in DEBUG_LEVELS if value.upper().startswith(level)), "WARN")
        reason = f"is {value}, which is not a level, so NCCL prints nothing"
        return Problem(path, reason, f"did you mean {close}?")
    mistake = value_mistake(form_of(name), value)
    return Problem(path, f"is {value}, which {mistake[0]}", mistake[1]) if mistake else None
