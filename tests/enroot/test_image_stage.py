"""The image stage: the content of its script, its options, and a build on a real Slurm."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from hpcgen.config.image import Check
from hpcgen.errors import ConfigErrors
from hpcgen.slurm.rendering.script import render_stage
from tests.enroot.conftest import ENROOT, STAND_IN, ImageBuild, code_directory
from tests.runs import minimal_run, planned
from tests.slurm.cluster import SlurmCluster, missing_slurm

IMAGE = {"output": "/shared/images/hpc.sqsh", "code": "/shared/code/hpcgen-0.1.0-abc"}


def script(folder: Path, **sections: Any) -> str:
    values = {"image": IMAGE, "cluster": "azure-ndv5", **sections}
    return render_stage(planned(folder, minimal_run(**values), ("image",)), "image").text


def options(text: str) -> str:
    """The recipe's options, as the script sets them."""
    found = re.search(r"^task=\((.*?)\)$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return f" {' '.join(found[1].split())}"


def carried(text: str) -> dict[str, str]:
    """The files that the script writes into the node's scratch."""
    found = re.finditer(
        r'^    write_file "\$scratch"/(\S+) <<\'(\w+)\'\n(.*?)^\2$', text, re.MULTILINE | re.DOTALL
    )
    return {match[1]: match[3] for match in found}


def test_the_script_carries_the_recipe_as_it_is(tmp_path: Path) -> None:
    files = carried(script(tmp_path))
    assert set(files) == {"build-image.sh", "install-inside.sh", "health_check.py", "ndv5-topo.xml"}
    for name in ("build-image.sh", "install-inside.sh", "health_check.py", "topology/ndv5-topo.xml"):
        assert files[Path(name).name] == (ENROOT / name).read_text()


def test_deepspeed_brings_its_list_of_packages(tmp_path: Path) -> None:
    image = {**IMAGE, "deepspeed": True, "megatron_deepspeed": "/shared/Megatron-DeepSpeed"}
    text = script(tmp_path, image=image)
    assert carried(text)["deepspeed.txt"] == (ENROOT / "deepspeed.txt").read_text()
    line = options(text)
    assert " --megatron-deepspeed=/shared/Megatron-DeepSpeed " in line
    assert " --deepspeed" in line.replace("--deepspeed.txt", "")


def test_the_topology_is_that_of_the_node_type(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("extends: azure-ndv5\nnode_type: ndv4\n")
    text = script(tmp_path, cluster=str(site))
    assert "ndv4-topo.xml" in carried(text)
    assert "\ntopology=ndv4-topo.xml\n" in text


def test_options_are_those_of_the_recipe(tmp_path: Path) -> None:
    image = {
        **IMAGE,
        "base": "nvcr.io#nvidia/pytorch:25.04-py3",
        "packages": ["zstd", "perftest"],
        "doca": "2.9.1",
    }
    line = options(script(tmp_path, image=image))
    for word in (
        "--output=/shared/images/hpc.sqsh",
        "'--base=nvcr.io#nvidia/pytorch:25.04-py3'",
        "--code=/shared/code/hpcgen-0.1.0-abc",
        "--package=zstd --package=perftest",
        "--doca=2.9.1",
    ):
        assert f" {word}" in line


def test_need_is_what_the_recipe_can_check(tmp_path: Path) -> None:
    every = list(get_args(Check))
    assert f"readonly checks=({' '.join(every)})" in (ENROOT / "build-image.sh").read_text()
    line = options(script(tmp_path, image={**IMAGE, "need": every}))
    assert f"'--need={','.join(every)}'" in line
    with pytest.raises(ConfigErrors, match=r"image.need = \[\] is empty"):
        script(tmp_path, image={**IMAGE, "need": []})


def test_an_empty_package_list_is_passed_on(tmp_path: Path) -> None:
    assert "--package=none" in options(script(tmp_path, image={**IMAGE, "packages": []}))


def test_the_image_is_the_one_that_jobs_use(tmp_path: Path) -> None:
    image = {"code": IMAGE["code"]}
    text = script(tmp_path, image=image, container={"image": "/shared/images/used.sqsh"})
    assert "--output=/shared/images/used.sqsh" in options(text)


def test_it_runs_on_one_node_without_container_and_devices(tmp_path: Path) -> None:
    text = script(tmp_path)
    assert "#SBATCH --nodes=1\n" in text
    assert "--container-image" not in text
    assert "--gpus-per-node" not in text
    assert "export NVIDIA_VISIBLE_DEVICES=void" in text
    assert "export MELLANOX_VISIBLE_DEVICES=void" in text


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"image": {"code": "/c"}}, "image.output"),
        ({"image": {"output": "/i.sqsh"}}, "image.code"),
        ({"image": {**IMAGE, "megatron_deepspeed": "/m"}}, "image.megatron_deepspeed"),
        ({"image": {**IMAGE, "megatron_core": "0.16.1"}}, "contains its own Megatron-Core"),
    ],
)
def test_missing_settings_are_reported(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigErrors, match=re.escape(said)):
        script(tmp_path, **sections)


@pytest.mark.parametrize(
    "image",
    [
        {"output": "/shared/a b.sqsh"},
        {"output": "relative.sqsh"},
        {"output": "/shared/../x.sqsh"},
        {"output": "/shared/x.img"},
        {"code": "/shared/$(touch x)"},
        {"packages": ["zstd; rm -rf /"]},
        {"packages": ["--allow-remove-essential"]},
        {"doca": "newest"},
        {"megatron_core": "0.16.1 evil"},
        {"base": "nvcr.io#NVIDIA/pytorch:1"},
    ],
)
def test_values_that_the_recipe_does_not_support_are_refused(tmp_path: Path, image: dict[str, Any]) -> None:
    with pytest.raises(ConfigErrors, match=f"image.{next(iter(image))}"):
        script(tmp_path, image={**IMAGE, **image})


@pytest.mark.skipif(missing_slurm() is not None, reason=missing_slurm() or "")
def test_rendered_and_submitted_it_makes_the_image(tmp_path: Path) -> None:
    """The real Slurm and the real recipe, with a stand-in for enroot instead of a container."""
    (tmp_path / "bin").mkdir()
    shutil.copy(STAND_IN, tmp_path / "bin/enroot")
    for name in ("run", "scratch"):
        (tmp_path / name).mkdir()
    profile = tmp_path / "cluster.yaml"
    profile.write_text(f"extends: local\npython: {sys.executable}\nscratch: {tmp_path / 'scratch'}\n")
    build = ImageBuild(tmp_path, str(STAND_IN), "")
    overrides = {
        "cluster": str(profile),
        "image": {"output": str(build.output), "code": str(code_directory(tmp_path))},
        "paths": {"run_dir": str(tmp_path / "run")},
    }
    text = render_stage(planned(tmp_path, minimal_run(**overrides), ("image",)), "image").text
    with SlurmCluster() as cluster:
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        job = cluster.sbatch(text, "--export=ALL,PATH=" + path, cwd=tmp_path)
        state = cluster.wait(job)
    log = (tmp_path / "run" / f"image-{job}.log").read_text()
    assert state == "COMPLETED", log
    assert build.is_whole()
    assert build.fits_its_record()
    assert build.recorded()["sha256"] == hashlib.sha256(build.output.read_bytes()).hexdigest()
    assert [path.name for path in build.output.parent.iterdir() if path.name.startswith(".")] == []
    assert list((tmp_path / "scratch").iterdir()) == []


def test_the_command_line_renders_it(tmp_path: Path) -> None:
    """For a cluster alone: no run file, no model."""
    given = [f"--set=image.{key}={value}" for key, value in IMAGE.items()]
    command = [sys.executable, "-m", "hpcgen", "render", "image", "--cluster", "azure-ndv5", *given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)
