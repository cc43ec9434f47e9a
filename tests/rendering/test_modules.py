"""The modules of a profile: jobs load them with the real environment-modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgen import load_run, plan, render
from tests.runs import minimal_run, write_yaml
from tests.standins import Batch, batch

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not Path("/usr/share/modules/init/bash").exists(), reason="environment-modules is not installed"
    ),
]

PYTHON = """\
#!/bin/sh
echo "tools are in $TOOLS_HOME, $TOOLS_KIND"
"""


def job(directory: Path, *modules: str) -> Batch:
    """A job of a profile with these modules. Its task prints what they set."""
    (directory / "runs").mkdir()
    (directory / "modulefiles/tools").mkdir(parents=True)
    (directory / "modulefiles/tools/1.2").write_text(
        "#%Module\nsetenv TOOLS_HOME /opt/tools\nsetenv TOOLS_KIND theirs\n"
    )
    python = directory / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    profile = {"extends": "local", "python": str(python), "modules": list(modules)}
    write_yaml(directory / "site.yaml", profile | {"environment": {"TOOLS_KIND": "ours"}})
    values = minimal_run(cluster="./site.yaml", paths={"run_dir": "runs"})
    script = render(plan(load_run(write_yaml(directory / "run.yaml", values)), ["nccl-test"]), "nccl-test")
    return batch(script, directory, environment={"MODULEPATH": str(directory / "modulefiles")})


def test_a_job_loads_the_modules_before_its_variables(tmp_path: Path) -> None:
    assert "tools are in /opt/tools, ours" in job(tmp_path, "tools/1.2").log


def test_a_module_that_is_missing_ends_the_job(tmp_path: Path) -> None:
    done = job(tmp_path, "tools/1.2", "tools/1.3")
    assert (done.status, "tools are in" in done.log) == (1, False), done.log
    assert done.log.splitlines()[-1].endswith(
        "ERROR: module load tools/1.3 failed (above): correct modules of the cluster profile"
    )
