"""Tasks of EleutherAI's lm-eval, by name or from files. Imports lm-eval only if there are tasks."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from trainer.contract.errors import TrainerError
from trainer.contract.evaluation import is_task_file
from trainer.contract.problem import Problem
from trainer.contract.spelling import did_you_mean
from trainer.contract.task_files import group_in, hashes

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

KEY = "evaluation.tasks"
"""Key of the run file."""

FEWSHOT_SEED, NUMPY_SEED, PYTHON_SEED = 1234, 1234, 0
"""Seeds of lm-eval's own command: the choice of examples, and draws in the code of tasks."""


@dataclass(frozen=True)
class Tasks:
    """Loaded tasks and groups of tasks, by name."""

    tasks: dict[str, Any]
    groups: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each task file and of what it includes and runs, by path."""

    def reset(self, num_fewshot: int | None) -> None:
        """Set the number of examples and the seed of their choice, as lm-eval's own command does.

        A task that sets zero examples, since it cannot have any, keeps them.
        """
        random.seed(PYTHON_SEED)
        numpy.random.seed(NUMPY_SEED)
        for task in self.tasks.values():
            default = task.get_config("num_fewshot")
            if default is None or (num_fewshot is not None and default != 0):
                task.set_config(key="num_fewshot", value=num_fewshot or 0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)


def load_tasks(names: Sequence[str]) -> tuple[Tasks, list[Problem]]:
    """Load tasks and their datasets. The second result is a line for each task that cannot be loaded.

    Raises:
        TrainerError: lm-eval is not installed.
    """
    _prepare_library()
    tasks = Tasks({}, {})
    missing = [name for name in names if is_task_file(name) and not Path(name).is_file()]
    problems = [_problem(f"{name}: no such file") for name in missing]
    files = [name for name in names if is_task_file(name) and name not in missing]
    tasks.files.update(hashes(map(Path, files)))
    groups = {name: group for name in files if (group := group_in(Path(name))) is not None}
    manager = _manager(list(groups), include_defaults=not all(map(is_task_file, names)))
    problems += [
        _unknown(name, manager) for name in names if not is_task_file(name) and name not in manager.task_index
    ]
    if problems:  # loading downloads datasets, so mistakes in names come first
        return tasks, problems
    for name in names:
        try:
            try:
                loaded = manager.load([groups.get(name, name)])
            except KeyError:  # the group in a file may refer to tasks of lm-eval, whose index takes seconds
                manager = _manager(list(groups), include_defaults=True)
                loaded = manager.load([groups.get(name, name)])
        except Exception as error:  # a task may run any code
            problems.append(_problem(f"{name} cannot be loaded: {_reason(error, name)}"))
            continue
        if twice := sorted(loaded["tasks"].keys() & tasks.tasks.keys()):
            reason = f"{name} contains {twice[0]}, which another entry contains. Remove one of them"
            problems.append(_problem(reason))
        problems += [
            _problem(
                f"{name}: the metric of {task} runs code that the model has written, which is not safe. Remove it"
            )
            for task, found in loaded["tasks"].items()
            if getattr(found, "UNSAFE_CODE", False)
        ]
        tasks.tasks.update(loaded["tasks"])
        tasks.groups.update(loaded["groups"])
    return tasks, problems


def _prepare_library() -> None:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        import lm_eval.tasks  # noqa: F401
    except ModuleNotFoundError as error:
        raise TrainerError(
            f"{KEY} needs lm-eval, but {error.name} is not installed. Install it with: pip install 'hpcgen[eval]'"
        ) from error


def _manager(group_files: Sequence[str], *, include_defaults: bool) -> TaskManager:
    from lm_eval.tasks import TaskManager

    # lm-eval 0.4.13 loads a group only by its name, from an index of the directory with its file and its tasks.
    directories: list[str | Path] = list(dict.fromkeys(Path(file).absolute().parent for file in group_files))
    return TaskManager(include_path=directories, include_defaults=include_defaults)


def _problem(reason: str, hint: str = "") -> Problem:
    return Problem("", reason, hint, where=KEY)


def _unknown(name: str, manager: TaskManager) -> Problem:
    suggestion = did_you_mean(name, manager.all_tasks, most=3)
    others = "name a task, a group or a tag of `lm-eval ls tasks`, or the path of a task file"
    return _problem(f"lm-eval has no task {name!r}", suggestion or others)


def _reason(error: Exception, name: str) -> str:
    """Describe why a task cannot be loaded, and what to do if its dataset is not on this machine."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if not any("Offline" in type(each).__name__ or isinstance(each, ConnectionError) for each in causes):
        return text
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return (
        f"its dataset is not in {home} (HF_HOME), and there is no network ({text}). On a node with network, run "
        f"`HF_HOME=DIRECTORY python -m trainer.evaluate --download {name}` with a directory that all nodes see. Set "
        "evaluation.hf_home to it"
    )
