"""Trials: the run itself and its candidates, each as a configuration that trains some steps."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator, Mapping

from hpcgen.config.loader import Run, with_values
from hpcgen.config.overrides import override
from hpcgen.config.run import RunConfig
from hpcgen.errors import ConfigErrors, HpcgenError, Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.environment import stage_environment
from hpcgen.planning.kind import Stage
from hpcgen.planning.layouts.name import layout_name
from hpcgen.planning.paths import absolute_paths
from hpcgen.version import __version__
from trainer.contract.code import user_code
from trainer.contract.code.imports import named
from trainer.contract.config import TrainerConfig, to_dict
from trainer.contract.config.resolve import resolve
from trainer.contract.model.layout import Layout
from trainer.contract.problem import in_yaml
from trainer.contract.rules.engine import TRAINING, facts_of
from trainer.contract.trials import TrialConfig, trial_key

SECTIONS = ("model", "parallelism", "training", "optimizer")
"""Sections whose keys a candidate may change."""

UNUSED = {
    "training": ("train_iters", "rampup_batch_size", "eval_iters", "eval_interval", "seed"),
    "optimizer": ("lr", "min_lr", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"),
}
"""Keys on which neither the time of a step nor its memory depends."""

OF_DATA = ("sft", "reset_attention_mask", "reset_position_ids", "eod_mask_loss", "num_workers")
"""Keys of the section `data` on which the time of a step depends."""


def make_trials(
    stage: Stage, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig
) -> tuple[TrialConfig, ...]:
    """The trials of a job of `stage`: the candidates of the run file, and the run itself, each once.

    Raises:
        ConfigErrors: candidates have mistakes or break rules. Lists all of them.
    """
    environment, own_name = _environment(stage, run, config), _name(trainer)
    made = {}
    for text, candidate in (*_candidates(run, trainer).items(), ("", run)):
        of_candidate = absolute_paths(candidate.config, candidate.directory)
        resolved = resolve(_with_sections(trainer, of_candidate))
        variables = _environment(stage, candidate, of_candidate)
        key = trial_key(_deciding(resolved), variables, _place(run, config, allocation), _steps(config))
        name = _name(resolved)
        made[key] = TrialConfig(
            # candidates may also differ in other keys than those of layouts
            name=f"{name}, {text}" if text and name == own_name else name,
            key=key,
            overrides=tuple(shlex.split(text)),
            trainer=resolved,
            environment=_differences(environment, variables),
        )
    return tuple(made.values())


def changes(overrides: tuple[str, ...]) -> dict[str, object]:
    """The values of assignments, by their dotted paths.

    Raises:
        HpcgenError: an assignment is malformed, or is not of one of SECTIONS.
    """
    values = {}
    for assignment in overrides:
        path, equals, _ = assignment.partition("=")
        if not equals:
            raise HpcgenError(f"{assignment} is no assignment", "write KEY=VALUE")
        if path.partition(".")[0] not in SECTIONS or "." not in path:
            raise HpcgenError(
                f"{path} cannot differ between candidates", f"change keys of {', '.join(SECTIONS)}"
            )
        values[path] = override(RunConfig, assignment).get(path)
    return values


def _candidates(run: Run, trainer: TrainerConfig) -> dict[str, Run]:
    """The runs of the candidates, by their text.

    Raises:
        ConfigErrors: candidates have mistakes or break rules. Lists all of them.
    """
    runs: dict[str, Run] = {}
    mistakes: list[Problem] = []
    for index, text in enumerate(run.config.tune.candidates):
        place = f"tune.candidates[{index}]"
        try:
            runs[text] = with_values(run, changes(_words(text)), place)
        except HpcgenError as error:
            mistakes += (dataclasses.replace(mistake, where=place) for mistake in error.mistakes)
        else:
            mistakes += _broken_rules(_with_sections(trainer, runs[text].config), place)
    if mistakes:
        raise ConfigErrors(mistakes)
    return runs


def _words(text: str) -> tuple[str, ...]:
    """The assignments of a candidate.

    Raises:
        HpcgenError: quotes do not match, or there is none.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise HpcgenError(f"{text!r} cannot be split into words ({error})") from error
    if not words:
        raise HpcgenError("has no assignment", "write one, such as training.micro_batch_size=2")
    return words


def _broken_rules(trainer: TrainerConfig, place: str) -> Iterator[Problem]:
    """Yields the rules that a candidate breaks, with their values."""
    facts = facts_of(trainer)
    for rule in TRAINING:
        for violation in rule(facts):
            subject = f"{violation.path} = {in_yaml(facts.value_at(violation.path))}"
            yield dataclasses.replace(
                violation, where=place, subject=subject, hint="", candidates=(), settings=()
            )


def _with_sections(trainer: TrainerConfig, config: RunConfig) -> TrainerConfig:
    """The training with the sections of a candidate, before their defaults are resolved."""
    vocab_size = (
        config.model.vocab_size or trainer.model.vocab_size
    )  # the tokenizer's, if the run file has none
    return dataclasses.replace(
        trainer,
        model=dataclasses.replace(config.model, vocab_size=vocab_size),
        parallelism=config.parallelism,
        training=config.training,
        optimizer=config.optimizer,
    )


def _environment(stage: Stage, run: Run, config: RunConfig) -> dict[str, str]:
    return {variable.name: variable.value for variable in stage_environment(stage, run, config)}


def _differences(of_job: Mapping[str, str], of_trial: Mapping[str, str]) -> dict[str, str]:
    """The variables to change for a trial in a job. Those that the trial does not have are empty."""
    names = sorted({*of_job, *of_trial})
    return {name: of_trial.get(name, "") for name in names if of_job.get(name) != of_trial.get(name)}


def _deciding(trainer: TrainerConfig) -> dict[str, object]:
    """The values of a training on which the time of a step and its memory depend."""
    sections = to_dict(trainer)
    values: dict[str, object] = {name: sections[name] for name in ("device", "world_size")}
    for name in SECTIONS:
        unused = UNUSED.get(name, ())
        values[name] = {key: value for key, value in sections[name].items() if key not in unused}
    return values | {"data": {key: sections["data"][key] for key in OF_DATA}, "code": code_hashes(trainer)}


def code_hashes(trainer: TrainerConfig) -> dict[str, dict[str, str]]:
    """Hashes of the user's own code, as far as this machine has it."""
    with contextlib.suppress(OSError):
        return {path: code.hashes() for path, code in user_code.read(named(trainer).values()).items()}
    return {}


def _place(run: Run, config: RunConfig, allocation: Allocation) -> tuple[object, ...]:
    """The nodes and the software of a job."""
    container = config.container.image or run.cluster.container.image
    software = container, run.cluster.python, run.cluster.code_dir, __version__
    return run.cluster.node_type, allocation.nodes, allocation.ntasks_per_node, *software


def _steps(config: RunConfig) -> tuple[int, int]:
    return config.tune.warmup_steps, config.tune.steps


def _name(trainer: TrainerConfig) -> str:
    layout = Layout.make(trainer.model, trainer.parallelism, trainer.training, trainer.world_size)
    assert layout is not None  # the rules have accepted it
    return layout_name(layout, trainer.training)
