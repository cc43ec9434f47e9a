"""The files in enroot/: clean shell code, one set of pins, and the topology that hpcgen generates."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from hpcgen.config.image import ImageConfig
from tests.enroot.conftest import ENROOT

SCRIPTS = sorted(path.relative_to(ENROOT).as_posix() for path in ENROOT.rglob("*.sh"))


def test_the_scripts_are_all_here() -> None:
    assert SCRIPTS == ["build-image.sh", "hooks.d/50-ndv5.sh", "install-hooks.sh", "install-inside.sh"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_bash_can_read_it_and_it_is_executable(script: str) -> None:
    subprocess.run(["bash", "-n", ENROOT / script], check=True)
    assert os.access(ENROOT / script, os.X_OK)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(
        ["shellcheck", "--norc", *SCRIPTS], cwd=ENROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_topology_is_the_generated_one() -> None:
    """After a change of the node type: hpcgen topology xml ndv5 > enroot/topology/ndv5-topo.xml"""
    done = subprocess.run(
        [sys.executable, "-m", "hpcgen", "topology", "xml", "ndv5"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ENROOT / "topology/ndv5-topo.xml").read_text() == done.stdout


def default(text: str, name: str) -> str:
    found = re.search(rf"^(?:readonly default_|ARG ){name}=(.*)$", text, re.MULTILINE | re.IGNORECASE)
    assert found, name
    return found[1].strip("'\"()")


def test_one_set_of_pins() -> None:
    script, docker = (ENROOT / "build-image.sh").read_text(), (ENROOT / "Dockerfile").read_text()
    assert default(script, "base") == ImageConfig().base == default(docker, "base").replace("/", "#", 1)
    for name in ("megatron_core", "packages"):
        assert default(script, name) == default(docker, name)
    assert not re.search(r":latest\b", docker)


def test_deepspeeds_packages_are_pinned_with_hashes() -> None:
    lines = [line for line in (ENROOT / "deepspeed.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(
        re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*( --hash=sha256:[0-9a-f]{64})+", line) for line in lines
    )
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted(set(names))
    assert {"deepspeed", "transformers", "trl", "peft", "accelerate", "datasets"} <= set(names)
    # the image's own
    assert not {"torch", "apex", "triton", "numpy"} & set(names)


def test_a_megatron_core_that_the_trainer_takes() -> None:
    pinned = default((ENROOT / "build-image.sh").read_text(), "megatron_core")
    declared = re.search(r'"megatron-core>=(\S+),<(\S+)"', (ENROOT.parent / "pyproject.toml").read_text())
    assert declared
    lowest, pin, above = (
        [int(part) for part in text.split(".")] for text in (declared[1], pinned, declared[2])
    )
    assert lowest <= pin < above


def test_dockers_user_is_not_root() -> None:
    users = re.findall(r"^USER (\S+)$", (ENROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert users[-1] not in ("0", "root")


def test_the_dockerignore_allows_everything_that_the_dockerfile_mounts() -> None:
    ignored = (ENROOT / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    root = ENROOT.parent
    assert all((root / name).exists() for name in kept)
    pyproject = (root / "pyproject.toml").read_text()
    # what building a wheel of the checkout reads
    for name in ("README.md", "LICENSE", "hpcgen", "trainer", "templates", "topologies", "enroot"):
        assert name in kept
        assert name in pyproject


def test_no_secret_and_no_credential_is_asked_for() -> None:
    for path in (path for path in ENROOT.rglob("*") if path.is_file()):
        text = path.read_text()
        assert not re.search(r"(?i)(api[_-]?key|token|password|secret)\s*=", text), path
