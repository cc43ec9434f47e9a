"""library_path: what a task finds in LD_LIBRARY_PATH, run as the script would start it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcgen.planning.runtimes import CONTAINER_NAME
from hpcgen.slurm.rendering.script import render_stage
from tests.patience import PATIENCE_S
from tests.runs import minimal_run, planned, write_yaml

PYXIS = """\
srun() {
    while [[ $1 == --* ]]; do shift; done
    env LD_LIBRARY_PATH=/image/lib "$@"
}
"""
PLAIN = 'srun() { "$@"; }\n'
APPTAINER = """\
#!/bin/bash
while [[ $1 == -* || $1 == exec ]]; do shift; done
shift
exec env LD_LIBRARY_PATH=/image/lib "$@"
"""
ENROOT = f"""\
#!/bin/bash
while [[ $1 != {CONTAINER_NAME} ]]; do shift; done
shift
exec env LD_LIBRARY_PATH=/image/lib "$@"
"""
"""Stand-ins: the image has a value of its own."""


@pytest.mark.process
@pytest.mark.parametrize(
    ("runtime", "stand_in", "expected"),
    [
        ("pyxis", PYXIS, "/opt/efa/lib:/opt/ofi/lib:/image/lib"),
        ("enroot", PLAIN, "/opt/efa/lib:/opt/ofi/lib:/image/lib"),
        ("apptainer", PLAIN, "/opt/efa/lib:/opt/ofi/lib:/image/lib"),
        ("ce", PYXIS, "/opt/efa/lib:/opt/ofi/lib:/image/lib"),
        ("none", PLAIN, "/opt/efa/lib:/opt/ofi/lib"),
    ],
    ids=["pyxis", "enroot", "apptainer", "ce", "none"],
)
def test_a_task_has_the_directories_in_front_of_the_images(
    tmp_path: Path, runtime: str, stand_in: str, expected: str
) -> None:
    suffix = "sif" if runtime == "apptainer" else "sqsh"
    container = {"runtime": runtime, "image": None if runtime == "none" else f"/images/gpt.{suffix}"}
    own = {"library_path": ["/opt/efa/lib", "/opt/ofi/lib"], "container": container}
    write_yaml(tmp_path / "site.yaml", {"extends": "local", **own})
    values = minimal_run(cluster="./site.yaml", paths={"run_dir": str(tmp_path)})
    script = render_stage(planned(tmp_path, values), "train").text
    begin = script.index("container=(")
    lines = script[begin : script.index("\nstep=(")]
    task = 'srun "${container[@]}" env A=1 printenv LD_LIBRARY_PATH'
    for name, program in (("enroot", ENROOT), ("apptainer", APPTAINER)):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    text = f"unset LD_LIBRARY_PATH\nPATH={tmp_path}:$PATH image=x\n"
    text += f"export ENROOT_DATA_PATH={tmp_path} SLURM_STEP_ID=0 SLURM_LOCALID=0\n{stand_in}{lines}\n{task}\n"
    found = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert (found.stdout, found.stderr) == (f"{expected}\n", "")


def test_only_stages_with_gpus_have_it(tmp_path: Path) -> None:
    write_yaml(tmp_path / "site.yaml", {"extends": "local", "library_path": ["/opt/efa/lib"]})
    plan = planned(tmp_path, minimal_run(cluster="./site.yaml"), ["train", "tensorboard"])
    assert "/opt/efa/lib" in render_stage(plan, "train").text
    assert "/opt/efa/lib" not in render_stage(plan, "tensorboard").text
