"""Scripts for sites that are not Azure: they have nothing of Azure, and a reason for what differs from Azure's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcgen.config.loader import Run, load_run
from hpcgen.config.node_types import load_with_files, set_by
from hpcgen.run_plan.explanation import explain
from hpcgen.run_plan.plan import plan
from hpcgen.slurm.rendering.script import render_stage
from tests.cli.command import hpcgen
from tests.rendering.golden import GOLDEN, OTHER_SITES
from tests.selection import select

EACH = pytest.mark.parametrize("case", OTHER_SITES)
OF_SITES = {"settings", "environment", "the container", "the job's files", "lib/node-environment.sh"}
"""Parts of a script that depend on the site; its directives and its header come before the first part."""


@pytest.fixture(autouse=True)
def no_configuration_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("HPCGEN_SITE", raising=False)


def site_run(case: str) -> Run:
    return load_run(GOLDEN / case / "run.yaml")


def on_azure(run: Run) -> Run:
    """A run on NDv5 with the same kind of container."""
    container = run.cluster.container
    image = [f"container.image={container.image}"] if container.image else []
    given = ["cluster=azure-ndv5", f"container.runtime={container.runtime}", *image]
    assert run.file is not None
    return load_run(run.file, given)


def script(run: Run) -> str:
    return render_stage(plan(run, ["train"], exists=lambda path: True), "train").text


def parts(text: str) -> dict[str, str]:
    """The parts of a script by their headings."""
    _, *rest = re.split(r"^# ==== (.*) ====\n", text, flags=re.MULTILINE)
    names = (re.split("[:,]", heading)[0] for heading in rest[::2])
    return dict(zip(names, rest[1::2], strict=True))


@EACH
def test_what_differs_from_azure_has_a_reason_that_explain_prints(case: str) -> None:
    run = site_run(case)
    here, azure = parts(script(run)), parts(script(on_azure(run)))
    assert {name for name in here.keys() | azure.keys() if here.get(name) != azure.get(name)} <= OF_SITES
    explained = {variable.name: variable for variable in explain("train", run).variables}
    own = set(here["environment"].splitlines()) - set(azure["environment"].splitlines())
    exports = [re.match(r" +export (\w+)=", line) for line in own]
    different = {export[1] for export in exports if export}
    assert different
    for name in different:
        assert explained[name].why
        assert explained[name].origin
        assert f"# {explained[name].why} (" in here["environment"]
    others = [line for line, export in zip(own, exports, strict=True) if export is None]
    assert all(re.match(r" +(local \w+=|run_environment_script |# The nodes' own)", line) for line in others)


@EACH
def test_no_variable_is_azures(case: str) -> None:
    run = site_run(case)
    azure = load_with_files("ndv5")
    of_azure = {
        name: fact.value
        for name, fact in azure.config.environment.items()
        if set_by(azure.document, f"environment.{name}.value") == "ndv5"
    }
    assert {"NCCL_TOPO_FILE", "UCX_NET_DEVICES", "NCCL_PXN_DISABLE"} < of_azure.keys()
    own = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}  # each site names its interface
    if case == "alps-gh200":
        own.add("NCCL_PXN_DISABLE")  # for a reason of its own
    assert not {variable.name for variable in explain("train", run).variables} & (of_azure.keys() - own)
    assert not re.search(r"/opt/microsoft|mlx5_ib|/nvme$|azure", script(run))


@EACH
def test_cluster_check_doubts_at_most_the_runtime(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN / case)  # where topologies/ is
    checked = hpcgen("cluster", "check", "./site.yaml")
    doubts = [
        line for line in checked.stderr.splitlines() if "container.runtime = ce was not run" not in line
    ]
    assert (checked.status, doubts) == (0, [])


@pytest.mark.process
@pytest.mark.parametrize("case", select(OTHER_SITES, ("alps-gh200", "gcp-a3-mega")))
def test_lint_finds_nothing(case: str, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(script(site_run(case)))
    found = hpcgen("lint", str(tmp_path / "train.sh"))
    assert (found.status, found.stdout) == (0, "")
