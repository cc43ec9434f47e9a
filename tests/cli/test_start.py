"""Work of a command before and next to its purpose. It is counted, because times differ between machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import big_run, write_yaml

pytestmark = pytest.mark.process

COUNT = """
import atexit, collections, json, sys
import click, jinja2
from pydantic import TypeAdapter

counts = collections.Counter(methods=0, yaml=0)

def hook(event, arguments):
    if event == "compile" and "dataclasses" in sys._getframe(1).f_code.co_filename:
        counts["methods"] += 1
    elif event == "open" and str(arguments[0]).endswith(".yaml"):
        counts["yaml"] += 1

def report():
    counts["modules"] = sum(name.partition(".")[0] in ("hpcgen", "trainer") for name in sys.modules)
    print(json.dumps(counts), file=sys.stderr)

sys.addaudithook(hook)
atexit.register(report)
from hpcgen.cli.main import main
main()
"""


def counted(directory: Path, *arguments: str) -> dict[str, int]:
    found = subprocess.run(
        [sys.executable, "-c", COUNT, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    counts: dict[str, int] = json.loads(found.stderr.splitlines()[-1])
    return counts


def test_rendering_imports_and_reads_no_more_than_it_needs(tmp_path: Path) -> None:
    """With these counts, rendering takes 1.5 times the bare imports (python -m benchmarks.render).

    `methods` counts what `dataclass` compiles: a class that every command imports should be a `record`. `yaml` counts
    the run file, its preset, the profile, and the node type with two that it extends and its fabric. `modules` leaves
    no room for those of other stages, of DeepSpeed or of Hugging Face's families.
    """
    write_yaml(tmp_path / "run.yaml", big_run())
    counts = counted(tmp_path, "render", "train", "-c", "run.yaml")
    assert counts["methods"] == 0
    assert counts["yaml"] == 7
    assert counts["modules"] <= 188


def test_help_imports_no_command(tmp_path: Path) -> None:
    assert counted(tmp_path, "--help")["modules"] <= 16
