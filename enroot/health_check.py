#!/usr/bin/env python3
"""Lists what a container image or machine has for training, and what it needs but lacks.

It only uses the standard library, and runs without hpcgen, with or without GPUs:

    python3 health_check.py                          what is installed
    python3 health_check.py --need gpu,te,apex       exit status 1 if one of these is missing
    python3 health_check.py --json                   the results as JSON

Exit status: 0 nothing needed is missing, 1 something is, 2 usage error.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import ctypes.util
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import warnings
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

TOPOLOGY_FILE = "/opt/microsoft/ndv5-topo.xml"
# Relative to /. NVIDIA's images have UCX, SHARP and its NCCL plugin in HPC-X.
LIBRARY_FOLDERS = (
    *("opt/hpcx*/ucx/lib", "opt/hpcx*/sharp/lib", "opt/hpcx*/nccl_rdma_sharp_plugin/lib"),
    *("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/local/lib"),
)
# Texts in the errors of imports if no driver is mounted into the container, as on a node that builds images.
WITHOUT_DRIVER = ("libcuda.so", "libnvidia-ml.so", "NVIDIA driver", "No CUDA GPUs", "no NVIDIA")


class Missing(Exception):
    """A component is missing or does not work. The text says which."""


class Unproven(Exception):
    """A component is installed, but cannot be loaded without the GPU driver, which this machine lacks."""


class Finding(NamedTuple):
    """The result of one check."""

    name: str
    state: str
    """ok, missing, or installed (but not loadable without a driver)."""
    detail: str
    needed: bool

    @property
    def fails(self) -> bool:
        """True if the component is needed but missing."""
        return self.needed and self.state == "missing"


# ==== the checks: each returns one line, or raises Missing or Unproven ====


def driver() -> str:
    """The GPU driver."""
    if not _driver_shown():
        raise Missing("no GPU driver here (in a container: NVIDIA_VISIBLE_DEVICES and its hook)")
    program = shutil.which("nvidia-smi")
    if program is None:
        return "loaded; no nvidia-smi"
    asked = ("--query-gpu=driver_version", "--format=csv,noheader")
    result = subprocess.run((program, *asked), capture_output=True, text=True, timeout=60, check=False)
    if result.returncode != 0:
        raise Missing(f"nvidia-smi: {_first_line(result.stdout + result.stderr)}")
    return _first_line(result.stdout)


def gpu() -> str:
    """GPUs that PyTorch can use."""
    torch = _import("torch")
    if not torch.cuda.is_available():
        raise Missing("PyTorch sees no GPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{len(names)} x {', '.join(sorted(set(names)))}"


def torch() -> str:
    """PyTorch and the CUDA version that it is built for."""
    module = _import("torch")
    return f"{module.__version__}, CUDA {module.version.cuda or 'none (a CPU build)'}"


def te() -> str:
    """Transformer Engine for PyTorch."""
    _import("torch")
    _import("transformer_engine.pytorch")
    return _version("transformer-engine", "transformer_engine")


def apex() -> str:
    """NVIDIA's apex with the kernels that Megatron-Core calls."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        raise Missing("not installed; it is part of NVIDIA's image, and is NOT the apex of PyPI")
    folder = Path(next(iter(spec.submodule_search_locations or ()), ""))
    if not (folder / "multi_tensor_apply").is_dir():
        raise Missing(f"{folder} is PyPI's apex, another program: uninstall it and use NVIDIA's image")
    _import("torch")
    # Built from C++ and CUDA: fused Adam, fused LayerNorm, and in-place accumulation of weight gradients.
    kernels = ("amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda")
    if absent := [name for name in kernels if importlib.util.find_spec(name) is None]:
        raise Missing(f"apex is installed without its kernels {', '.join(absent)}: it was built without CUDA")
    for name in kernels:
        _import(name)
    return f"{_version('apex')} (NVIDIA's) with {', '.join(kernels)}"


def megatron_core() -> str:
    """Megatron-Core."""
    return str(_import("megatron.core").__version__)


def trainer() -> str:
    """hpcgen's trainer, which imports Megatron-Core and PyTorch."""
    if importlib.util.find_spec("trainer") is None:
        raise Missing("not installed, and not on PYTHONPATH")
    return _output(sys.executable, "-m", "trainer", "--versions")


def nccl() -> str:
    """The NCCL that PyTorch uses."""
    torch = _import("torch")
    if not torch.distributed.is_nccl_available():
        raise Missing("this PyTorch is built without NCCL")
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def ucx() -> str:
    """UCX, which MPI and SHARP use."""
    path = _library("libucp.so")
    if path is None:
        raise Missing("no libucp.so")
    version = ctypes.CDLL(path).ucp_get_version_string
    version.restype = ctypes.c_char_p
    return f"{version().decode()} ({path})"


def sharp() -> str:
    """NCCL's SHARP plugin and SHARP itself: reductions in the switches."""
    plugin, library = _library("libnccl-net.so"), _library("libsharp_coll.so")
    if plugin is None or library is None:
        absent = [
            name for name, path in (("libnccl-net.so", plugin), ("libsharp_coll.so", library)) if not path
        ]
        raise Missing(f"no {' and no '.join(absent)}; needed for SHARP only")
    return f"{plugin}, {library}"


def infiniband() -> str:
    """InfiniBand devices that this process sees."""
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if not devices:
        raise Missing("no device (in a container: MELLANOX_VISIBLE_DEVICES and its hook)")
    if not list(Path("/dev/infiniband").glob("uverbs*")):
        raise Missing(f"{len(devices)} in /sys, but no /dev/infiniband/uverbs*: verbs cannot be used")
    return f"{len(devices)}: {' '.join(devices)}"


def zstd() -> str:
    """The zstd program, for compressed corpora."""
    program = shutil.which("zstd")
    if program is None:
        raise Missing("no program zstd")
    return _output(program, "--version")


def topology() -> str:
    """The NCCL topology file of the node type."""
    path = os.environ.get("NCCL_TOPO_FILE") or TOPOLOGY_FILE
    try:
        root = xml.etree.ElementTree.parse(path).getroot()
    except FileNotFoundError:
        raise Missing(
            f"{path}: no such file; without it, NCCL pairs GPUs with the wrong NICs on NDv5"
        ) from None
    except (OSError, xml.etree.ElementTree.ParseError) as error:
        raise Missing(f"{path}: {error}") from error
    # A GPU is a PCI device of class 3D controller, a NIC one of class InfiniBand controller.
    classes = [device.get("class", "") for device in root.iter("pci")]
    gpus, nics = (sum(one.startswith(prefix) for one in classes) for prefix in ("0x0302", "0x0207"))
    if root.tag != "system" or not gpus:
        raise Missing(f"{path} describes no GPU")
    return f"{path}: {gpus} GPUs, {nics} NICs"


def deepspeed() -> str:
    """DeepSpeed, the kernels compiled at its installation, and the packages that are used with it."""
    torch = _import("torch")
    version = str(_import("deepspeed").__version__)
    facts = _import("deepspeed.git_version_info")
    kernels = [name for name, is_installed in facts.installed_ops.items() if is_installed]
    built_for = facts.torch_info.get("version", "0.0")
    if kernels and not torch.__version__.startswith(built_for):
        raise Missing(
            f"{version} has kernels for PyTorch {built_for}, and this is {torch.__version__}: install it again"
        )
    companions = ("transformers", "trl", "peft", "accelerate", "datasets")
    others = [f"{name} {_version(name, name)}" for name in companions]
    compiled = ", ".join(sorted(kernels)) or "none (the first job compiles them)"
    return f"{version}, {', '.join(others)}; kernels: {compiled}"


def memlock() -> str:
    """The limit on memory that a process may pin. InfiniBand needs it to be unlimited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY:
        raise Missing(f"{limit // 1024} kB (ulimit -l); InfiniBand needs unlimited")
    return "unlimited"


CHECKS: dict[str, Callable[[], str]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(driver, gpu, torch, te, apex, megatron_core, trainer),
        *(nccl, ucx, sharp, infiniband, zstd, topology, memlock, deepspeed),
    )
}


# ==== searching and importing ====


@functools.cache
def _attempt(name: str) -> ModuleType | Exception:
    """The module, or the error of its import. Cached, so that a failed import is not repeated."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # an import can fail in any way: a missing library, a CUDA mismatch
        return error


def _import(name: str) -> ModuleType:
    found = _attempt(name)
    if isinstance(found, ModuleType):
        return found
    if isinstance(found, ModuleNotFoundError) and found.name and name.startswith(found.name):
        raise Missing(f"no module {found.name}")
    message = f"cannot import {name}: {type(found).__name__}: {_first_line(str(found))}"
    if not _driver_shown() and any(sign in str(found) for sign in WITHOUT_DRIVER):
        raise Unproven(f"installed, but {name} only loads with the GPU driver")
    raise Missing(message)


@functools.cache
def _driver_shown() -> bool:
    return Path("/proc/driver/nvidia/version").exists() and any(Path("/dev").glob("nvidia[0-9]*"))


def _version(distribution: str, module: str = "") -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(_import(module), "__version__", "?")) if module else "?"


def _library(name: str) -> str | None:
    """The path of a shared library, as the loader or NCCL would find it. `name` ends in .so."""
    given = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    usual = (path for pattern in LIBRARY_FOLDERS for path in sorted(Path("/").glob(pattern)))
    for folder in (*given, *usual):
        if found := sorted(folder.glob(f"{name}*")):
            return str(found[0])
    # The loader's cache has a name such as libucp.so.0, which CDLL accepts.
    return ctypes.util.find_library(name.removeprefix("lib").removesuffix(".so"))


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(str(error)) from error
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        if not _driver_shown() and any(sign in lines[-1] for sign in WITHOUT_DRIVER):
            raise Unproven("installed, but only runs with the GPU driver")
        raise Missing(f"status {done.returncode}: {lines[-1]}")
    return _first_line(done.stdout)


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0]


# ==== the command ====


def examine(name: str, needed: bool) -> Finding:
    """Runs one check."""
    try:
        return Finding(name, "ok", CHECKS[name](), needed)
    except Unproven as reason:
        return Finding(name, "installed", str(reason), needed)
    except Missing as reason:
        return Finding(name, "missing", str(reason), needed)
    except Exception as error:  # a broken check is reported, and the others still run
        return Finding(name, "missing", f"{type(error).__name__}: {_first_line(str(error))}", needed)


def table(findings: list[Finding], color: bool) -> str:
    """The findings as text, one per line."""
    codes = {"ok": "32", "installed": "33", "missing": "2", "MISSING": "1;31"}
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        state = "MISSING" if finding.fails else finding.state
        padded = f"{state:9}"
        shown = f"\033[{codes[state]}m{padded}\033[0m" if color else padded
        lines.append(f"{finding.name:{width}}  {shown}  {finding.detail}")
    return "\n".join(lines)


def _needed(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in CHECKS]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)} (known names: {', '.join(CHECKS)})")
    return names


def main() -> int:
    """Checks everything, prints it and returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Lists what this image or machine has for training.",
        epilog=f"NAMES: {', '.join(CHECKS)}. Exit status 1 if something needed is missing, 2 for a usage error.",
    )
    parser.add_argument(
        "--need", metavar="NAMES", type=_needed, default=[], help="required components: gpu,te,..."
    )
    parser.add_argument("--only", action="store_true", help="check only the components in --need")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--save",
        metavar="FILE",
        type=Path,
        help="also write a line 'NAME DETAIL' for each component that is ok",
    )
    arguments = parser.parse_args()
    names = arguments.need if arguments.only and arguments.need else CHECKS
    # Output and warnings of imported modules are not findings.
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        findings = [examine(name, name in arguments.need) for name in names]
    if arguments.json:
        document = {finding.name: {**finding._asdict(), "fails": finding.fails} for finding in findings}
        print(json.dumps({"ok": not any(finding.fails for finding in findings), "found": document}, indent=1))
    else:
        print(table(findings, color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    if arguments.save:
        there = [f"{one.name} {one.detail}\n" for one in findings if one.state == "ok"]
        arguments.save.write_text("".join(there), encoding="utf-8")
    failing = [finding.name for finding in findings if finding.fails]
    if failing:
        print(f"health_check: missing: {', '.join(failing)}", file=sys.stderr)
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
