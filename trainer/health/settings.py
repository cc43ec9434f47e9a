"""Finds possible causes of a low bandwidth in NCCL's settings, its configuration files and the host."""

from __future__ import annotations

import os
import pwd
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FEW_CHANNELS = 16
"""Approximate number of channels that NVLink needs. NCCL itself uses 16 to 32 on Hopper."""
DEFAULT_BUFFER_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Setting:
    """A variable that NCCL reads, and its origin."""

    name: str
    value: str
    origin: str


Judge = Callable[[str, Sequence[str]], "str | None"]


def nccl_settings(environ: Mapping[str, str], files: Sequence[tuple[str, str]]) -> dict[str, Setting]:
    """Effective NCCL_ variables. The environment takes precedence, then the files (name, text) in order."""
    found = {
        name: Setting(name, value, "environment")
        for name, value in environ.items()
        if name.startswith("NCCL_") or name == "CUDA_LAUNCH_BLOCKING"
    }
    for origin, text in files:
        for line in text.split("\n"):
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                found.setdefault(name.strip(), Setting(name.strip(), value.strip(), origin))
    return found


def configuration_files(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """NCCL's existing configuration files with their text, in order of precedence.

    NCCL takes the home directory from the password database, not from HOME.
    """
    own = environ.get("NCCL_CONF_FILE")
    paths = [Path(own)] if own else [_home() / ".nccl.conf"]
    found = []
    for path in (*paths, Path("/etc/nccl.conf")):
        try:
            found.append((str(path), path.read_text(errors="replace")))
        except OSError:
            continue
    return found


def _home() -> Path:
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a container without this user
        return Path("/nonexistent")


def explain(
    settings: Mapping[str, Setting], planned: Mapping[str, str], nics: Sequence[str]
) -> Iterator[str]:
    """Describe settings that are known to reduce bandwidth, and settings that differ from the node type's."""
    for name, setting in sorted(settings.items()):
        if planned.get(name) == setting.value:
            continue  # a setting that harms other node types may be right for this one
        if (judge := _HARMFUL.get(name)) and (reason := judge(setting.value, nics)):
            yield f"{name}={setting.value} ({setting.origin}): {reason}"
        elif name in planned:
            yield f"{name}={setting.value} ({setting.origin}), but the node type sets {planned[name]}"
    for name in sorted(planned.keys() - settings.keys()):
        if name.startswith("NCCL_"):
            yield f"{name} is not set in the task, but the node type sets {planned[name]}"


def explain_host(
    settings: Mapping[str, Setting], nics: Sequence[str], root: Path = Path("/")
) -> Iterator[str]:
    """Describe an unreadable topology file, limits on pinned memory, and NICs that are missing or down."""
    topology = settings.get("NCCL_TOPO_FILE")
    if topology and not os.access(topology.value, os.R_OK):
        yield f"NCCL_TOPO_FILE={topology.value} cannot be read, so NCCL pairs GPUs with the wrong NICs"
    if not nics:
        return
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY:
        yield f"memlock is {locked // 1024} kB, but InfiniBand pins memory and needs unlimited"
    for name in nics:
        port = root / "sys/class/infiniband" / name / "ports/1"
        state, physical = _word(port / "state"), _word(port / "phys_state")
        if not state:
            yield f"NIC {name} is missing"
        elif (state, physical) != ("ACTIVE", "LinkUp"):
            yield f"NIC {name} is {state}, {physical}"


def _word(path: Path) -> str:
    """Last word of a file: "ACTIVE" for "4: ACTIVE". Empty if there is no such file."""
    try:
        return path.read_text().strip().rpartition(" ")[2]
    except OSError:
        return ""


def _small(limit: int, reason: str) -> Judge:
    def judge(value: str, nics: Sequence[str]) -> str | None:
        return reason if value.isdigit() and int(value) < limit else None

    return judge


def _one_of(values: Sequence[str], reason: str) -> Judge:
    def judge(value: str, nics: Sequence[str]) -> str | None:
        return reason if value.upper() in values else None

    return judge


def _always(reason: str) -> Judge:
    def judge(value: str, nics: Sequence[str]) -> str | None:
        return reason if value else None

    return judge


def _restricts_nics(value: str, nics: Sequence[str]) -> str | None:
    """Check NCCL_IB_HCA: a list of name prefixes. A leading "=" means exact names, a leading "^" all other NICs."""
    exactly, others = "=" in value[:2], value.startswith("^")
    wanted = [word.partition(":")[0] for word in value.lstrip("^=").split(",") if word]

    def chosen(nic: str) -> bool:
        return any(nic == word or (not exactly and nic.startswith(word)) for word in wanted) != others

    used = sum(map(chosen, nics))
    return f"uses {used} of {len(nics)} NICs" if used < len(nics) else None


_DISABLED = ("1", "TRUE", "YES", "Y")
_HARMFUL: dict[str, Judge] = {
    "NCCL_MAX_NCHANNELS": _small(FEW_CHANNELS, "few channels leave links idle"),
    "NCCL_MAX_CTAS": _small(FEW_CHANNELS, "few channels leave links idle"),
    "NCCL_NTHREADS": _small(256, "few threads per channel cannot saturate a link"),
    "NCCL_BUFFSIZE": _small(DEFAULT_BUFFER_BYTES, "buffers below the default of 4 MiB stall the pipeline"),
    "NCCL_P2P_DISABLE": _one_of(_DISABLED, "GPUs of a node communicate through host memory, not NVLink"),
    "NCCL_P2P_LEVEL": _one_of(("LOC", "0"), "GPUs of a node communicate through host memory, not NVLink"),
    "NCCL_SHM_DISABLE": _one_of(_DISABLED, "traffic within a node that is not on NVLink uses the network"),
    "NCCL_IB_DISABLE": _one_of(_DISABLED, "nodes communicate over Ethernet, not InfiniBand"),
    "NCCL_NET": _one_of(("SOCKET",), "nodes communicate over TCP, not InfiniBand"),
    "NCCL_NET_GDR_LEVEL": _one_of(("LOC", "0"), "NICs copy through host memory, without GPUDirect RDMA"),
    "NCCL_IB_HCA": _restricts_nics,
    "NCCL_ALGO": _always("forces an algorithm that NCCL would otherwise choose"),
    "NCCL_PROTO": _always("forces a protocol that NCCL would otherwise choose"),
    "CUDA_LAUNCH_BLOCKING": _one_of(("1",), "the host waits for every kernel"),
}
