"""Imports that commands avoid, so that they start fast. import-linter checks the layers (make check)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from hpcgen.cli.checkpoint import SECTIONS as CHECKPOINT
from hpcgen.cli.data import SECTIONS as DATA
from hpcgen.cli.main import SECTIONS
from tests.runs import big_run, write_yaml

pytestmark = pytest.mark.process

CHECKOUT = Path(__file__).parents[1]
HEAVY = {"torch", "submitit", "rich", "numpy", "gigatoken", "tokenizers", "megatron"}
WORK = (
    "hpcgen.check.",
    "hpcgen.config.loader.",
    "hpcgen.planning.",
    "hpcgen.run_plan.",
    "hpcgen.stages.",
    "jinja2.",
    "pydantic.",
)
"""Modules, or packages of them, with which commands do their work. The dot ends the name."""
NOT_RENDERED = {
    "pydantic",  # a correct run file needs none of it
    *("urllib.request", "http.client", "ssl", "socket", "logging", "concurrent.futures"),
    *(
        "trainer.contract.files.checkpoint_files",
        "trainer.contract.resuming.provenance",
        "trainer.contract.files.run_directory",
    ),  # the first job has no checkpoint
}
"""Modules that cost `hpcgen render` milliseconds each and that a correct first job does not need."""


def test_the_guide_has_the_layers_that_are_checked() -> None:
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    [contract] = [
        each for each in settings["tool"]["importlinter"]["contracts"] if each.get("containers") == ["hpcgen"]
    ]
    layers = " -> ".join(layer.replace(" | ", ", ") for layer in contract["layers"])
    guide = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"import-linter checks the layers: {layers}. " in " ".join(guide.split())


def imported_modules(program: str, cwd: Path) -> set[str]:
    """The modules that a program has imported when it ends, however it ends."""
    text = (
        f"import atexit, sys\natexit.register(lambda: print('\\0', *sys.modules, file=sys.stderr))\n{program}"
    )
    environment = {**os.environ, "XDG_CONFIG_HOME": str(cwd)}
    found = subprocess.run(
        [sys.executable, "-c", text], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    modules = found.stderr.rpartition("\0")[2].split()
    assert "hpcgen" in modules, found.stderr
    return set(modules)


@pytest.mark.parametrize(
    "program",
    [
        "import hpcgen.cli.main",
        "from hpcgen import load_run, plan, render, submit",
        "from hpcgen.cli.main import main; main(['--help'])",
        "from hpcgen.cli.main import main; main(['render', 'train', '-c', 'run.yaml'])",
        "from hpcgen.cli.main import main; main(['validate', '-c', 'run.yaml'])",
        "from hpcgen.cli.main import main; main(['init', 'new.yaml'])",
    ],
)
def test_frequent_commands_start_fast(program: str, tmp_path: Path) -> None:
    write_yaml(tmp_path / "run.yaml", big_run())
    assert imported_modules(program, tmp_path) & HEAVY == set()


def test_help_imports_nothing_that_commands_do_their_work_with(tmp_path: Path) -> None:
    groups = {(): SECTIONS, ("data",): DATA, ("checkpoint",): CHECKPOINT}
    words = [(*group, name) for group, table in groups.items() for names in table.values() for name in names]
    program = (
        "import contextlib\nfrom hpcgen.cli.main import main\n"
        f"for words in {words}:\n"
        "    with contextlib.suppress(SystemExit):\n        main([*words, '--help'])\n"
    )
    modules = imported_modules(program, tmp_path)
    assert "hpcgen.cli.checkpoint.prune" in modules
    assert modules & HEAVY == set()
    assert [name for name in modules if f"{name}.".startswith(WORK)] == []


@pytest.mark.parametrize("command", ["render", "validate", "explain"])
def test_a_first_job_imports_what_it_needs(command: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()  # as hpcgen init does
    write_yaml(tmp_path / "run.yaml", big_run(paths={"run_dir": "run"}))
    arguments = ["render", "train"] if command == "render" else [command]
    program = f"from hpcgen.cli.main import main; main({[*arguments, '-c', 'run.yaml']})"
    modules = imported_modules(program, tmp_path)
    assert "hpcgen.run_plan.plan" in modules
    assert modules & NOT_RENDERED == set()


def test_the_contract_needs_only_the_standard_library() -> None:
    files = (CHECKOUT / "trainer" / "contract").rglob("*.py")
    paths = (file.parent if file.stem == "__init__" else file.with_suffix("") for file in files)
    modules = sorted(".".join(path.relative_to(CHECKOUT).parts) for path in paths)
    assert "trainer.contract.config.model" in modules
    program = (
        f"import sys; sys.path.insert(0, {str(CHECKOUT)!r}); before = set(sys.modules); "
        f"import {', '.join(modules)}; print(*(set(sys.modules) - before))"
    )
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False
    )
    assert found.stderr == ""
    imported = set(found.stdout.split())
    assert {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names) == {"trainer"}
    # The other packages of the trainer would bring torch sooner or later.
    assert {name for name in imported if name.startswith("trainer.")} == set(modules)
