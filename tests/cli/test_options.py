"""Commands name themselves and quote paths in the next command that they print."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from hpcgen.cli.options import program, run_arguments, short_path
from tests.cli.command import hpcgen


def test_the_command_is_named_as_the_user_can_call_it(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = workplace / ".venv/bin/hpcgen"
    called.parent.mkdir(parents=True)
    shutil.copy(sys.executable, called)
    monkeypatch.setattr(sys, "argv", [".venv/bin/hpcgen"])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert program() == ".venv/bin/hpcgen"
    monkeypatch.setenv("PATH", str(called.parent))
    assert program() == "hpcgen"


def test_a_path_below_the_working_directory_is_relative(workplace: Path) -> None:
    assert short_path(workplace / "examples/a b") == "'examples/a b'"
    assert short_path(Path("/elsewhere/run")) == "/elsewhere/run"


@pytest.mark.parametrize(
    "command", [("validate", "train"), ("render", "train"), ("submit", "train"), ("validate",)]
)
def test_an_assignment_without_an_equals_sign_is_named(command: tuple[str, ...]) -> None:
    """Not the value behind it, which would be an unknown stage or argument."""
    ended = hpcgen(*command, "--set", "slurm.train.nodes", "4", "--set", "training.seed")
    assert ended.status == 2
    assert "--set slurm.train.nodes: expected KEY.KEY=VALUE" in ended.stderr
    assert "--set training.seed: expected KEY.KEY=VALUE" in ended.stderr
    assert "'4'" not in ended.stderr


def test_the_options_of_a_call_are_repeated_for_the_next_command() -> None:
    """A value that may be a secret is not."""
    overrides = (
        "data.corpus.sample_files=2",
        "name=a b",
        "data.corpus.source={url: {template: https://h/?sig=x}}",
    )
    assert run_arguments(Path("my runs/a.yaml"), overrides) == (
        "-c 'my runs/a.yaml' --set data.corpus.sample_files=2 --set 'name=a b' --set data.corpus.source=..."
    )
