"""Weights & Biases: the same numbers as in metrics.jsonl, in one of its runs over all lives of ours.

Rank 0 alone talks to it, and training never depends on it: a service that cannot be reached, a library that is
missing and a process that died each cost a line in the log. The key stays in the environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import uuid
from collections.abc import Iterator
from typing import Any

from trainer.contract.config import TrainerConfig, to_dict
from trainer.contract.run_directory import RunDirectory, publish
from trainer.metrics.console import Log

KEY = "WANDB_API_KEY"

INIT_TIMEOUT_S = 60
"""The other ranks wait this long at the start when the service does not answer."""

FINISH_TIMEOUT_S = 60
"""What is not uploaded by then stays in the files."""

AXIS = "iteration"
"""Our own axis. W&B's step only grows, and a run that walks back to an older checkpoint does not."""


class Experiment:
    """This life's part of the W&B run."""

    def __init__(self, wandb_run: Any, log: Log, sync_command: str | None) -> None:
        """`wandb_run` is what wandb.init gave; `sync_command` uploads it, when it does not do so itself."""
        self._run, self._log, self._sync_command = wandb_run, log, sync_command
        wandb_run.define_metric(AXIS)
        wandb_run.define_metric("*", step_metric=AXIS)

    def scalars(self, iteration: int, values: dict[str, float]) -> None:
        """Records numbers under their names. Does not wait for the service."""
        with self._harmless():
            if self._run is not None:
                self._run.log({AXIS: iteration, **values})

    def close(self) -> None:
        """Hands over what is left, for a limited time."""
        with self._harmless():
            if self._run is not None:
                self._run.finish()
        if self._sync_command is not None:
            self._log.line(f"Weights & Biases: to upload this run: {self._sync_command}")

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, it is not worth the training
            self._run = None
            self._log.line(f"Weights & Biases: nothing more is recorded there: {_in_words(error)}")


def open_experiment(config: TrainerConfig, run: RunDirectory, log: Log) -> Experiment | None:
    """Starts, or goes on with, the W&B run; None, with a line in the log, when that cannot be."""
    try:
        import wandb
    except ImportError as error:
        log.line(
            f"no Weights & Biases: {error}; install wandb (the extra hpcgen[wandb]), "
            "or set logging.wandb_project = null"
        )
        return None
    asked = os.environ.get("WANDB_MODE") or ("online" if os.environ.get(KEY) else "offline")
    for mode in dict.fromkeys((asked, "offline")):
        try:
            if mode != asked:
                wandb.teardown()  # or the id counts as in use by the start that failed
            return _start(wandb, config, run, log, mode)
        except Exception as error:  # the network, the key, the library: none of it is worth the training
            log.line(f"Weights & Biases ({mode}) cannot be used: {_in_words(error)}")
    return None


def run_id(run: RunDirectory) -> str:
    """The id that all lives of this run have at W&B; the first of them draws it."""
    try:
        known = run.wandb_id.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        known = ""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", known):
        known = uuid.uuid4().hex[:12]
        publish(run.wandb_id, f"{known}\n")
    return known


def _start(wandb: Any, config: TrainerConfig, run: RunDirectory, log: Log, mode: str) -> Experiment:
    logging = config.logging
    started = wandb.init(
        project=logging.wandb_project,
        entity=logging.wandb_entity,
        name=logging.wandb_exp_name or config.name,
        id=run_id(run),
        resume="allow",
        dir=run.root,
        mode=mode,
        config=to_dict(config),
        allow_val_change=True,  # a later life may have other settings
        settings=wandb.Settings(
            console="off",  # the job's log is there already
            quiet=True,
            disable_git=True,
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
        ),
    )
    if mode != "offline":
        log.line(f"Weights & Biases: {started.url or mode}")
        return Experiment(started, log, sync_command=None)
    why = "" if os.environ.get(KEY) else f" ({KEY} is not set)"
    sync_command = f"wandb sync {shlex.quote(str(run.root / 'wandb'))}"
    log.line(f"Weights & Biases: offline{why}; to upload this run: {sync_command}")
    return Experiment(started, log, sync_command)


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    key = os.environ.get(KEY)
    return text.replace(key, "***") if key else text
