from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_configuration_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory and user configuration, in which no profiles and node types are found."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("HPCGEN_SITE", raising=False)
    monkeypatch.chdir(tmp_path)
