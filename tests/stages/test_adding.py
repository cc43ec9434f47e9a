"""Adding a stage: its row, its module and its template are all that hpcgen needs to know it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
MODULE = '''\
"""hello: a greeting from one node."""

from hpcgen.planning.kind import Stage, Work


class Hello(Stage):
    """A greeting."""

    def work(self, run, config, allocation, trainer):
        """Says hello."""
        return Work(values={"greeting": "hello"})


STAGES = (Hello.of("hello-node"),)
'''
ROW = """\
        StageRow(
            name="hello-node",
            summary="greet from one node",
            is_single_task=True,
            time_limit="5:00",
        ),
"""
TEMPLATE = """\
{% extends "slurm/base.sbatch.j2" %}

{% block main %}
main() {
{% if hooks %}
    run_epilogue_at_exit
{% endif %}
    begin
    set_environment
{% if hooks %}
    run_prologue
{% endif %}
    say "$greeting"
    prepare_nodes && launch "${task[@]}" --version || rc=$?
    remove_scratch
    conclude
}
conclude() { exit "$rc"; }
{% endblock %}
"""
RUN = """\
name: tiny
cluster: local
paths: {run_dir: runs/tiny}
slurm: {hello_node: {time: "3:00"}}
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2, seq_length: 32}
training: {micro_batch_size: 2, global_batch_size: 8, train_iters: 2}
optimizer: {lr: 1.0e-3}
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of hpcgen with one more stage."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("hpcgen", "trainer", "templates", "topologies", "enroot"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "hpcgen" / "stages" / "hello_node.py").write_text(MODULE)
    rows = copy / "hpcgen" / "config" / "stages.py"
    before, end, after = rows.read_text().partition("    )\n}\n")
    rows.write_text(before + ROW + end + after)
    (copy / "templates" / "slurm" / "hello-node.sbatch.j2").write_text(TEMPLATE)
    (copy / "run.yaml").write_text(RUN)
    return copy


def hpcgen(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(copy), "XDG_CONFIG_HOME": str(copy)}
    command = [sys.executable, "-m", "hpcgen", *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def test_it_is_rendered_for_a_cluster(copy: Path) -> None:
    found = hpcgen(copy, "render", "hello-node", "--cluster", "local")
    assert found.returncode == 0, found.stderr
    assert "#SBATCH --job-name=local-hello-node\n" in found.stdout
    assert "#SBATCH --time=00:05:00\n" in found.stdout
    assert "\ngreeting=hello\n" in found.stdout
    assert subprocess.run(["bash", "-n"], input=found.stdout, text=True, check=False).returncode == 0


def test_its_section_of_the_run_file_holds(copy: Path) -> None:
    found = hpcgen(copy, "render", "hello-node", "-c", "run.yaml")
    assert found.returncode == 0, found.stderr
    assert "#SBATCH --time=00:03:00\n" in found.stdout
    wrong = hpcgen(copy, "validate", "hello-node", "-c", "run.yaml", "--set", "slurm.hello_node.nods=1")
    assert wrong.returncode == 2
    assert "slurm.hello_node.nods" in wrong.stderr
    assert "did you mean nodes?" in wrong.stderr


def test_commands_and_files_name_it(copy: Path) -> None:
    assert "  hello-node   greet from one node\n" in hpcgen(copy, "render", "--help").stdout
    schema = json.loads(hpcgen(copy, "schema").stdout)
    section = schema["$defs"]["SlurmConfig"]["properties"]["hello_node"]
    assert section["description"] == "Resources to greet from one node."
    assert hpcgen(copy, "init", "new.yaml", "--cluster", "local").returncode == 0
    assert "  # Resources to greet from one node.\n  # hello_node: {}\n" in (copy / "new.yaml").read_text()
    assert "hello-node" in hpcgen(copy, "templates", "list").stdout
    refused = hpcgen(copy, "submit", "hello-node", "-c", "run.yaml")
    assert "use hpcgen render hello-node" in refused.stderr
