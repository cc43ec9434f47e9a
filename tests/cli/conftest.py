"""An own working directory, without what is configured on this machine, and a run for reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorded_run import START, start, step, steps, write_run


@pytest.fixture(autouse=True)
def workplace(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("work")
    monkeypatch.chdir(directory)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("xdg")))
    for name in ("HPCGEN_TEMPLATES", "HPCGEN_SITE"):
        monkeypatch.delenv(name, raising=False)
    return directory


@pytest.fixture
def eventful(tmp_path: Path) -> Path:
    """A run of three attempts, with everything that the trainer records."""
    return write_run(
        tmp_path / "eventful",
        [
            start(),
            *steps(1, 120),
            {"event": "evaluation", "iteration": 100, "time": START + 200, "split": "valid", "loss": 3.25},
            {
                "event": "checkpoint",
                "iteration": 100,
                "time": START + 205,
                "path": "/runs/gpt/checkpoints/iter_0000100",
                "stall_s": 0.8,
                "write_s": 31.0,
                "bytes": 112_000_000_000,
                "asynchronous": True,
            },
            {"event": "stop", "iteration": 120, "time": START + 241, "reason": "SIGUSR2"},
            start(120, START + 541, checkpoint="/runs/gpt/checkpoints/iter_0000120"),
            step(121, loss=9.5, skipped=True),
            {
                "event": "spike",
                "iteration": 121,
                "time": START + 543,
                "loss": 9.5,
                "height": 3.1,
                "first_sample": 30720,
                "last_sample": 30975,
                "skipped": True,
            },
            step(122, grad_norm=None, skipped=True),
            {
                "event": "straggler",
                "iteration": 122,
                "time": START + 545,
                "rank": 13,
                "host": "ndv5-002",
                "slowdown": 1.43,
            },
            start(
                122,
                START + 900,
                checkpoint="/runs/gpt/checkpoints/iter_0000122",
                changed=[["optimizer.lr", 3e-4, 1e-4]],
                lost={"iteration": 124, "time": START + 560},
                passed_over=["/runs/gpt/checkpoints/iter_0000124: __0_0.distcp is missing. It was renamed"],
            ),
            *steps(123, 160),
        ],
    )
