"""Real containers for the tests on Slurm: enroot as Azure's nodes have it, and an image that is made here.

The image is an empty tree: this machine's own programs and the Python of the tests are mounted into it, so that
nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.cluster import missing_slurm

ROOT = Path(__file__).parents[2]
PLUGIN = "PYXIS_PLUGIN"
"""Environment variable with the path of spank_pyxis.so, built for this machine's Slurm."""

# What the image sets: a variable that a job sets too, and the one by which NVIDIA's hooks know PyTorch's images.
IMAGE_ENVIRONMENT = "PYTORCH_VERSION=2.7\nNCCL_DEBUG=IMAGE\n"

# As a line of enroot.conf: what the environment leaves open. The first two are Azure CycleCloud's, which the job must
# overrule; the paths keep the tests to themselves; the registry of the tests speaks HTTP.
ENROOT = """\
#!/bin/bash
export ENROOT_MOUNT_HOME=${{ENROOT_MOUNT_HOME:-y}}
export ENROOT_ROOTFS_WRITABLE=${{ENROOT_ROOTFS_WRITABLE:-y}}
export ENROOT_DATA_PATH=${{ENROOT_DATA_PATH:-{directory}/data}}
export ENROOT_CACHE_PATH=${{ENROOT_CACHE_PATH:-{directory}/cache}}
export ENROOT_RUNTIME_PATH=${{ENROOT_RUNTIME_PATH:-{directory}/run}}
export ENROOT_CONFIG_PATH={directory}/config ENROOT_ALLOW_HTTP=y
exec {enroot} "$@"
"""
EXTRA_HOOKS = ("50-slurm-pmi.sh", "50-slurm-pytorch.sh")
"""Hooks that come with enroot and that only some sites install; Azure CycleCloud does."""


def missing_containers() -> str | None:
    """Why no container can be started through Slurm on this machine, in one line, or None when one can."""
    if (reason := missing_slurm()) is not None:
        return reason
    missing = [name for name in ("enroot", "mksquashfs") if shutil.which(name) is None]
    if not Path(os.environ.get(PLUGIN, "")).is_file():
        missing.append(f"{PLUGIN}=/path/of/spank_pyxis.so")
    return f"no containers on this machine (missing: {', '.join(missing)})" if missing else None


@dataclass(frozen=True)
class Node:
    """Container programs of the test node."""

    directory: Path

    @property
    def programs(self) -> Path:
        """The directory of its enroot."""
        return self.directory / "bin"

    @property
    def home(self) -> Path:
        """The user's home, with packages in ~/.local that would shadow the image's."""
        return self.directory / "home"

    @property
    def rootfs(self) -> Path:
        return self.directory / "rootfs"

    @property
    def image(self) -> Path:
        return self.directory / "empty.sqsh"


def make_node(directory: Path) -> Node:
    """A node with enroot as on Azure CycleCloud, and an image."""
    node = Node(directory)
    (node.home / ".local").mkdir(parents=True)
    node.programs.mkdir()
    program = node.programs / "enroot"
    program.write_text(ENROOT.format(directory=directory, enroot=shutil.which("enroot")))
    program.chmod(0o755)
    hooks = directory / "config/hooks.d"
    hooks.mkdir(parents=True)
    for hook in extra_hooks():
        shutil.copy(hook, hooks)
    make_rootfs(node.rootfs)
    subprocess.run(
        ["mksquashfs", node.rootfs, node.image, "-all-root", "-quiet"], check=True, capture_output=True
    )
    return node


def extra_hooks() -> list[Path]:
    """Installed extra hooks of enroot (share/enroot/hooks.d)."""
    share = Path(shutil.which("enroot") or "").resolve().parents[1] / "share"
    return sorted(path for name in EXTRA_HOOKS for path in share.glob(f"enroot/hooks.d/{name}"))


def make_rootfs(rootfs: Path) -> None:
    """An empty tree, with the links that this machine has in place of /bin, /lib and so on."""
    for name in ("etc", "tmp", "proc", "sys", "dev", "run", "var", "usr"):
        (rootfs / name).mkdir(parents=True)
    (rootfs / "etc/environment").write_text(IMAGE_ENVIRONMENT)
    for path in host_directories():
        if path.is_symlink():
            (rootfs / path.name).symlink_to(path.readlink())


def host_mounts() -> list[dict[str, object]]:
    """Entries of container.mounts that fill the image."""
    return [{"source": str(path), "read_only": True} for path in shown_of_host()]


def shown_of_host() -> list[Path]:
    """This machine's programs, the Python of the tests, and hpcgen."""
    python = dict.fromkeys((Path(sys.prefix), Path(sys.base_prefix), ROOT))
    programs = [path for path in host_directories() if not path.is_symlink()]
    return [*programs, *(path for path in python if not path.is_relative_to("/usr"))]


def host_directories() -> list[Path]:
    return [
        path for path in map(Path, ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")) if path.exists()
    ]
