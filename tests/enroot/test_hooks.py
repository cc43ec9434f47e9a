"""The files that an admin installs: the hook as enroot runs it, the files it reads, and install-hooks.sh."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.enroot.conftest import ENROOT, executable

HOOK = ENROOT / "hooks.d/50-ndv5.sh"
INSTALL = ENROOT / "install-hooks.sh"
DOMAINS = ("0001", "0002", "0003", "0008", "0009", "000a", "000b", "000c")
TOPOLOGY = "opt/microsoft/ndv5-topo.xml"

# The two functions of enroot's src/common.sh that the hook calls.
COMMON = """\
common::log() { printf '[%s] %s\\n' "$1" "$2" >&2; }
common::err() { common::log ERROR "$1"; exit 1; }
"""


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The files of a healthy NDv5 node, and a container that requests all of its GPUs."""
    for domain in DOMAINS:
        (tmp_path / f"proc/driver/nvidia/gpus/{domain}:00:00.0").mkdir(parents=True)
    for number in range(8):
        (tmp_path / f"sys/class/infiniband/mlx5_ib{number}").mkdir(parents=True)
    (tmp_path / TOPOLOGY).parent.mkdir(parents=True)
    (tmp_path / TOPOLOGY).write_text("<system/>")
    (tmp_path / "rootfs").mkdir()
    (tmp_path / "environment").write_text("NVIDIA_VISIBLE_DEVICES=all\nMELLANOX_VISIBLE_DEVICES=all\n")
    (tmp_path / "common.sh").write_text(COMMON)
    return tmp_path


def hook(node: Path, **environment: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [HOOK],
        env={
            "PATH": os.environ["PATH"],
            "ENROOT_LIBRARY_PATH": str(node),
            "ENROOT_ROOTFS": str(node / "rootfs"),
            "ENROOT_ENVIRON": str(node / "environment"),
            "NDV5_HOOK_ROOT": str(node),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


def test_a_good_node_passes_in_silence(node: Path) -> None:
    assert hook(node) == (0, [])


def test_no_infiniband(node: Path) -> None:
    shutil.rmtree(node / "sys/class/infiniband")
    status, [line] = hook(node)
    assert status == 1
    assert "shows no InfiniBand device" in line
    assert hook(node, NDV5_HOOK="off") == (0, [])


def test_no_topology_file(node: Path) -> None:
    (node / TOPOLOGY).unlink()
    status, [line] = hook(node)
    assert status == 1
    assert "/opt/microsoft/ndv5-topo.xml is neither in the image nor on" in line


def test_the_images_own_topology_file_is_enough(node: Path) -> None:
    (node / TOPOLOGY).unlink()
    (node / "rootfs" / TOPOLOGY).parent.mkdir(parents=True)
    (node / "rootfs" / TOPOLOGY).write_text("<system/>")
    assert hook(node) == (0, [])


def test_a_container_without_adapters_is_warned(node: Path) -> None:
    status, [line] = hook(node, MELLANOX_VISIBLE_DEVICES="void")
    assert (status, line.startswith("[WARN]")) == (0, True)


@pytest.mark.parametrize("devices", ["void", "none", "0", "0,1"])
def test_other_containers_pass(node: Path, devices: str) -> None:
    shutil.rmtree(node / "sys")
    assert hook(node, NVIDIA_VISIBLE_DEVICES=devices) == (0, [])


def test_other_nodes_pass(node: Path) -> None:
    shutil.rmtree(node / "sys")
    (node / "proc/driver/nvidia/gpus/000c:00:00.0").rmdir()
    assert hook(node) == (0, [])


def test_a_container_without_devices_passes(node: Path) -> None:
    shutil.rmtree(node / "sys")
    (node / "environment").write_text("")
    assert hook(node) == (0, [])


def test_the_files_agree_on_the_topology_file() -> None:
    environment = (ENROOT / "environ.d/50-ndv5.env").read_text().splitlines()
    assert f"NCCL_TOPO_FILE=/{TOPOLOGY}" in environment
    mounts = [line.split() for line in (ENROOT / "mounts.d/50-ndv5.fstab").read_text().splitlines()]
    [mount] = [mount for mount in mounts if mount[0] == f"/{TOPOLOGY}"]
    assert mount[1] == f"/{TOPOLOGY}"
    assert {"ro", "nofail", "x-create=file"} <= set(mount[3].split(","))
    assert mount[5] == "-1"  # before hooks


# ==== installing ====


def install(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [INSTALL, *arguments],
        env={"PATH": os.environ["PATH"], "HOME": "/nowhere", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_installed_and_removed(tmp_path: Path) -> None:
    assert install(str(tmp_path / "etc")).returncode == 0
    names = {
        path.relative_to(tmp_path / "etc").as_posix()
        for path in (tmp_path / "etc").rglob("*")
        if path.is_file()
    }
    assert names == {"environ.d/50-ndv5.env", "mounts.d/50-ndv5.fstab", "hooks.d/50-ndv5.sh"}
    assert os.access(tmp_path / "etc/hooks.d/50-ndv5.sh", os.X_OK)
    assert install(str(tmp_path / "etc")).returncode == 0  # again
    assert install(str(tmp_path / "etc"), "--remove").returncode == 0
    assert not [path for path in (tmp_path / "etc").rglob("*") if path.is_file()]


def test_user_means_enroots_user_directory(tmp_path: Path) -> None:
    assert install("user", ENROOT_CONFIG_PATH=str(tmp_path / "enroot")).returncode == 0
    assert (tmp_path / "enroot/hooks.d/50-ndv5.sh").is_file()


@pytest.mark.parametrize("arguments", [(), ("here",), ("user", "system"), ("--bogus",)])
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    done = install(*arguments)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_the_real_enroot_runs_the_hook(node: Path) -> None:
    enroot = shutil.which("enroot")
    if enroot is None:
        pytest.skip("enroot is not installed here")
    rootfs = node / "data/box"
    for name in ("etc", "usr", "bin", "lib", "lib64", "tmp", "proc", "sys", "dev"):
        (rootfs / name).mkdir(parents=True)
    (rootfs / "etc/environment").write_text("NVIDIA_VISIBLE_DEVICES=void\nMELLANOX_VISIBLE_DEVICES=void\n")
    assert install("user", ENROOT_CONFIG_PATH=str(node / "config")).returncode == 0
    # enroot's own hooks run first and would look for devices: they get void, and this hook gets all.
    executable(node / "config/hooks.d/40-all.sh", '#!/bin/bash\nsed -i s/=void/=all/ "$ENROOT_ENVIRON"\n')
    shutil.rmtree(node / "sys")
    done = subprocess.run(
        [enroot, "start", "box", "/bin/true"],
        env={
            **os.environ,
            "ENROOT_CONFIG_PATH": str(node / "config"),
            "ENROOT_DATA_PATH": str(node / "data"),
            "ENROOT_RUNTIME_PATH": str(node / "run"),
            "NDV5_HOOK_ROOT": str(node),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "shows no InfiniBand device" in done.stderr
    assert "50-ndv5.sh exited with return code 1" in done.stderr
