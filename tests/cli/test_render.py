from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import hpcgen, listing
from tests.runs import big_run, minimal_run, write_yaml


@pytest.fixture
def run_file(workplace: Path) -> Path:
    return write_yaml(workplace / "run.yaml", big_run())


def test_standard_output_is_the_script_and_nothing_else(run_file):
    found = hpcgen("render", "train", "-c", run_file)
    assert found.status == 0
    assert found.stdout.startswith("#!/bin/bash -p\n#SBATCH --job-name=big\n")
    assert found.stdout.endswith("\n")
    assert [line for line in found.stderr.splitlines() if "storage_write_gb_s" not in line] == [
        "warning: /shared/data/pile.idx was not checked, because this machine has no /shared",
        "warning: /shared/data/pile.bin was not checked, because this machine has no /shared",
        "warning: run directory /shared/runs/big does not exist. Create it before sbatch, "
        "or the job fails without a log",
    ]


def test_a_run_directory_that_is_there_needs_no_warning(workplace):
    (workplace / "runs").mkdir()
    run_file = write_yaml(workplace / "run.yaml", minimal_run(paths={"run_dir": "runs"}))
    assert hpcgen("render", "train", "-c", run_file).stderr == ""


def test_rendering_writes_nothing(workplace, run_file):
    before = listing(workplace)
    hpcgen("render", "train", "-c", run_file)
    assert listing(workplace) == before


def test_overrides_are_rendered(run_file):
    found = hpcgen("render", "train", "-c", run_file, "--set", "slurm.train.nodes=32", "--set", "name=other")
    assert "#SBATCH --nodes=32\n" in found.stdout
    assert "#SBATCH --job-name=other\n" in found.stdout


def test_a_file_gets_the_same_script(workplace, run_file):
    (workplace / "out").mkdir()
    found = hpcgen("render", "train", "-c", run_file, "-o", "out/job.sbatch")
    assert (found.status, found.stdout) == (0, "")
    assert found.stderr.endswith("wrote out/job.sbatch\n")
    assert (workplace / "out/job.sbatch").read_text() == hpcgen("render", "train", "-c", run_file).stdout
    assert (workplace / "out/job.sbatch").stat().st_mode & 0o100
    assert sorted(listing(workplace)) == ["out", "out/job.sbatch", "run.yaml"]


def test_a_file_is_replaced_atomically(workplace, run_file):
    script = workplace / "job.sbatch"
    script.write_text("old")
    with script.open() as reader:
        assert hpcgen("render", "train", "-c", run_file, "-o", script).status == 0
        assert reader.read() == "old"  # who had opened it reads on in the old one
    script.write_text("old")
    assert hpcgen("render", "train", "-c", run_file, "-o", script, "--set", "model.num_layers=0").status == 2
    assert script.read_text() == "old"
    assert sorted(listing(workplace)) == ["job.sbatch", "run.yaml"]


def test_a_mistyped_directory_is_not_made(workplace, run_file):
    found = hpcgen("render", "train", "-c", run_file, "-o", "nope/x/job.sbatch")
    assert found.status == 2
    assert found.stderr.endswith(
        f"nope/x/job.sbatch: cannot be written, because {workplace}/nope does not exist; create it first\n"
    )
    assert sorted(listing(workplace)) == ["run.yaml"]


def test_a_dash_is_standard_output(workplace, run_file):
    assert hpcgen("render", "train", "-c", run_file, "-o", "-") == hpcgen("render", "train", "-c", run_file)
    assert sorted(listing(workplace)) == ["run.yaml"]


def test_a_full_device_is_reported_and_kept(run_file):
    found = hpcgen("render", "train", "-c", run_file, "-o", "/dev/full")
    assert found.status == 2
    assert found.stderr.endswith("/dev/full: cannot be written (No space left on device)\n")
    assert Path("/dev/full").is_char_device()


def test_a_file_that_cannot_be_written(workplace, run_file):
    (workplace / "file").touch()
    found = hpcgen("render", "train", "-c", run_file, "-o", "file/job.sbatch")
    assert found.status == 2
    assert "file/job.sbatch: cannot be written" in found.stderr


@pytest.mark.parametrize(
    "mistake",
    ["name=a b", "model.num_layers=0", "nonsense=1", "slurm.train.nodes=3", "paths.run_dir=~/x", "nonsense"],
)
def test_a_mistake_exits_with_2_and_writes_nothing(workplace, run_file, mistake):
    before = listing(workplace)
    found = hpcgen("render", "train", "-c", run_file, "-o", "job.sbatch", "--set", mistake)
    assert (found.status, found.stdout) == (2, "")
    assert found.stderr
    assert "Traceback" not in found.stderr
    assert listing(workplace) == before


@pytest.mark.process
def test_site_templates(workplace, run_file):
    site = workplace / "site/slurm/train.sbatch.j2"
    site.parent.mkdir(parents=True)
    site.write_text(
        '{% extends "hpcgen/slurm/train.sbatch.j2" %}\n'
        "{% block site %}\nsite_prologue() { module load site; }\n{% endblock %}\n"
    )
    found = hpcgen("render", "train", "-c", run_file, "--templates", "site")
    assert "\nsite_prologue() { module load site; }\n" in found.stdout
    assert f"# templates: {workplace}/site/slurm/train.sbatch.j2 sha256 " in found.stdout
    site.write_text("{{ nothing }}\n")
    found = hpcgen("render", "train", "-c", run_file, "--templates", "site")
    assert (found.status, found.stdout) == (2, "")
    assert "train.sbatch.j2:1" in found.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    "command", [("render", "train", "-o", "job.sbatch"), ("submit", "train", "--dry-run")]
)
def test_a_template_that_bash_cannot_read_writes_nothing(workplace, run_file, command):
    site = workplace / "site/slurm/base.sbatch.j2"
    site.parent.mkdir(parents=True)
    site.write_text(
        '{% extends "hpcgen/slurm/base.sbatch.j2" %}\n'
        "{% block site %}\nif [[ -e /shared ]]; then\n    say there\n{% endblock %}\n"
    )
    before = listing(workplace)
    found = hpcgen(*command, "-c", run_file, "--templates", "site")
    assert (found.status, found.stdout) == (2, "")
    assert f"{site}:3: the script has a syntax error: `if` statement must end with `fi`" in found.stderr
    assert listing(workplace) == before


@pytest.mark.process
def test_a_closed_pipe_prints_no_traceback(run_file):
    """hpcgen render ... | head -1"""
    command = f"{sys.executable} -m hpcgen render train -c {run_file} | head -c 10"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert found.stdout == "#!/bin/bas"
    assert "Traceback" not in found.stderr
    assert "Exception" not in found.stderr
