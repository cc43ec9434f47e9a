"""Who may import whom, and what the command may cost to start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import big_run, write_yaml

CHECKOUT = Path(__file__).parents[1]
HEAVY = {"torch", "submitit", "rich", "numpy", "gigatoken", "tokenizers", "megatron"}


def test_import_linters_contracts_are_kept() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    found = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 broken" in found.stdout


def heavy_modules(program: str, cwd: Path) -> set[str]:
    """Which of the heavy modules a program has imported when it ends, however it ends."""
    text = (
        f"import atexit, sys\natexit.register(lambda: print('\\0', *sys.modules, file=sys.stderr))\n{program}"
    )
    environment = {**os.environ, "XDG_CONFIG_HOME": str(cwd)}
    found = subprocess.run(
        [sys.executable, "-c", text], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    modules = found.stderr.rpartition("\0")[2].split()
    assert "hpcgen" in modules, found.stderr
    return HEAVY & set(modules)


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
def test_what_is_typed_often_starts_fast(program: str, tmp_path: Path) -> None:
    write_yaml(tmp_path / "run.yaml", big_run())
    assert heavy_modules(program, tmp_path) == set()


def test_the_contract_needs_the_standard_library_alone() -> None:
    modules = sorted(
        f"trainer.contract.{file.stem}" for file in (CHECKOUT / "trainer" / "contract").glob("[a-z]*.py")
    )
    assert "trainer.contract.config" in modules
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
    assert {name for name in imported if name.startswith("trainer.")} == {*modules, "trainer.contract"}
