"""The section notify: its mistakes, and the space that is too little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcgen import plan
from hpcgen.errors import ConfigErrors
from tests.runs import loaded, minimal_run

TOKEN = "Zq7" * 12


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([], "notify.command is empty"),
        (["./tell.sh"], "notify.command[0] is a relative path"),
        (["curl", f"https://hooks.slack.com/services/T0/B0/{TOKEN}"], "notify.command contains a secret"),
        (["send", "--api-key", TOKEN], "notify.command contains a secret"),
    ],
)
def test_mistakes_in_the_command(tmp_path: Path, command: list[str], said: str) -> None:
    with pytest.raises(ConfigErrors) as found:
        plan(loaded(tmp_path, minimal_run(notify={"command": command})))
    assert said in str(found.value)
    assert TOKEN not in str(found.value)


@pytest.mark.parametrize(("keys", "expected"), [({}, 1), ({"disk_low_gb": 2.5}, 3)])
def test_a_disk_is_low_below_two_checkpoints(tmp_path: Path, keys: dict[str, Any], expected: int) -> None:
    """A tiny model needs less than 1 GB."""
    planned = plan(loaded(tmp_path, minimal_run(notify={"command": ["tell"], **keys})))
    assert planned.stages["train"].values["notify_disk_low_gb"] == expected
