"""Weights & Biases: the numbers of metrics.jsonl in a W&B run that all attempts share. Evaluations have another run.

Only rank 0 uses it, and no job depends on it: an unreachable service, a missing library or a dead process only
result in a line in the log. The key stays in the environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.contract.config import TrainerConfig, to_dict
from trainer.contract.files.regular_file import read_text
from trainer.contract.files.run_directory import RunDirectory, publish
from trainer.metrics.console import Log

API_KEY_VARIABLE = "WANDB_API_KEY"

INIT_TIMEOUT_S = 60
"""Timeout at the start, during which the other ranks wait (seconds)."""

FINISH_TIMEOUT_S = 60
"""Timeout of the last upload (seconds). The rest stays in the files."""

AXIS = "iteration"
"""Custom x axis. W&B's own step can only grow, but a run may resume from an older checkpoint."""


class Experiment:
    """This attempt's part of the W&B run."""

    def __init__(self, wandb_run: Any, log: Log, sync_command: str | None) -> None:
        """`wandb_run` is the result of wandb.init. `sync_command` is the command that uploads an offline run."""
        self._run, self._log, self._sync_command = wandb_run, log, sync_command
        wandb_run.define_metric(AXIS)
        wandb_run.define_metric("*", step_metric=AXIS)

    def scalars(self, iteration: int, values: dict[str, float]) -> None:
        """Record numbers by name. Does not wait for the service."""
        with self._errors_logged():
            if self._run is not None:
                self._run.log({AXIS: iteration, **values})

    def close(self) -> None:
        """Upload the rest, for a limited time."""
        with self._errors_logged():
            if self._run is not None:
                self._run.finish()
        if self._sync_command is not None:
            self._log.line(f"Weights & Biases: to upload this run: {self._sync_command}")

    @contextlib.contextmanager
    def _errors_logged(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # no error of W&B may end the training
            self._run = None
            self._log.line(f"Weights & Biases: nothing is recorded from here on: {_message(error)}")


def open_experiment(config: TrainerConfig, run: RunDirectory, log: Log) -> Experiment | None:
    """Start or resume the W&B run of training. Returns None, with a line in the log, if that fails."""
    logging = config.logging
    identity = {
        "project": logging.wandb_project,
        "entity": logging.wandb_entity,
        "name": logging.wandb_exp_name or config.name,
        "id": run_id(run),
        "config": to_dict(config),
    }
    return open_run(run.root, identity, log)


def open_run(directory: Path, identity: dict[str, Any], log: Log) -> Experiment | None:
    """Start or resume a W&B run. Returns None, with a line in the log, if that fails.

    `identity` has the arguments of wandb.init that identify and describe the run. W&B's files are written to a
    subdirectory of `directory`.
    """
    try:
        import wandb
    except ImportError as error:
        log.line(
            f"Weights & Biases is not used: {error}. Install wandb (the extra hpcgen[wandb]), "
            "or set logging.wandb_project = null"
        )
        return None
    requested = os.environ.get("WANDB_MODE") or ("online" if os.environ.get(API_KEY_VARIABLE) else "offline")
    for mode in dict.fromkeys((requested, "offline")):
        try:
            if mode != requested:
                wandb.teardown()  # otherwise the failed start still occupies the run ID
            return _start(wandb, directory, identity, log, mode)
        except Exception as error:  # no error of W&B may end the training
            log.line(f"Weights & Biases ({mode}) cannot be used: {_message(error)}")
    return None


def run_id(run: RunDirectory) -> str:
    """W&B ID of this run. The first attempt chooses it at random, and all later ones reuse it."""
    try:
        known = read_text(run.wandb_id).strip()
    except FileNotFoundError:
        known = ""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", known):
        known = uuid.uuid4().hex[:12]
        publish(run.wandb_id, f"{known}\n")
    return known


def _start(wandb: Any, directory: Path, identity: dict[str, Any], log: Log, mode: str) -> Experiment:
    started = wandb.init(
        **identity,
        resume="allow",
        dir=directory,
        mode=mode,
        allow_val_change=True,  # a later attempt may have other settings
        settings=wandb.Settings(
            console="off",  # the job has its own log
            quiet=True,
            disable_git=True,
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
        ),
    )
    if mode != "offline":
        log.line(f"Weights & Biases: {started.url or mode}")
        return Experiment(started, log, sync_command=None)
    reason = "" if os.environ.get(API_KEY_VARIABLE) else f" ({API_KEY_VARIABLE} is not set)"
    sync_command = f"wandb sync {shlex.quote(str(directory / 'wandb'))}"
    log.line(f"Weights & Biases: offline{reason}; to upload this run: {sync_command}")
    return Experiment(started, log, sync_command)


def _message(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    key = os.environ.get(API_KEY_VARIABLE)
    return text.replace(key, "***") if key else text
