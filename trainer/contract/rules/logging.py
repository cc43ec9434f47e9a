"""Rules for logging and profiling. All are hpcgen's: the trainer would silently record nothing."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.problem import Problem
from trainer.contract.rules.facts import Facts, Rule, unread

LAST_PORT = 65_535


def profile_ends_after_its_start(facts: Facts) -> Iterator[Problem]:
    """profile_step_start < profile_step_end, and within the run."""
    start, end = facts.logging.profile_step_start, facts.logging.profile_step_end
    if start is None:
        reason = "has no effect, because logging.profile_step_start is null"
        yield from unread(
            facts,
            ["logging.profile_step_end", "logging.profile_ranks"],
            reason,
            about=("logging.profile_step_start",),
        )
    if start is not None and end is not None and end <= start:
        yield Problem(
            path="logging.profile_step_end",
            reason=f"must be greater than logging.profile_step_start = {start}",
            candidates=[start + 2],
            about=("logging.profile_step_start",),
        )
    last = facts.training.train_iters
    if start is not None and start >= last:
        yield Problem(
            path="logging.profile_step_start",
            reason=f"must be less than training.train_iters = {last}",
            candidates=[max(0, last - 2)],
            about=("training.train_iters",),
        )


def profiled_ranks_exist(facts: Facts) -> Iterator[Problem]:
    """profile_ranks are below the world size."""
    size = facts.world.size
    beyond = [rank for rank in facts.logging.profile_ranks if rank >= size]
    if facts.logging.profile_step_start is not None and beyond:
        yield Problem(
            path="logging.profile_ranks",
            reason=f"contains rank {beyond[0]}, but the last of {facts.world} is rank {size - 1}",
            candidates=[tuple(rank for rank in facts.logging.profile_ranks if rank < size) or (0,)],
        )


def memory_history_needs_profile(facts: Facts) -> Iterator[Problem]:
    """record_memory_history needs a profile."""
    if facts.logging.profile_step_start is None:
        reason = "is written at the end of a profile, but logging.profile_step_start is null"
        yield from unread(
            facts,
            ["logging.record_memory_history"],
            reason,
            "set logging.profile_step_start",
            about=("logging.profile_step_start",),
        )


def names_in_wandb_need_project(facts: Facts) -> Iterator[Problem]:
    """wandb_entity and wandb_exp_name need wandb_project."""
    if facts.logging.wandb_project is None:
        reason = "has no effect, because logging.wandb_project is null"
        keys = ["logging.wandb_entity", "logging.wandb_exp_name"]
        yield from unread(facts, keys, reason, "set logging.wandb_project", about=("logging.wandb_project",))


def figures_need_prometheus(facts: Facts) -> Iterator[Problem]:
    """prometheus_directory, prometheus_port and prometheus_address need prometheus, and an address needs a port."""
    if not facts.logging.prometheus:
        reason = "has no effect, because logging.prometheus is false"
        keys = ["logging.prometheus_directory", "logging.prometheus_port", "logging.prometheus_address"]
        yield from unread(facts, keys, reason, "set logging.prometheus: true", about=("logging.prometheus",))
    elif facts.logging.prometheus_port is None:
        reason = "has no effect, because logging.prometheus_port is null"
        keys = ["logging.prometheus_address"]
        yield from unread(
            facts, keys, reason, "set logging.prometheus_port", about=("logging.prometheus_port",)
        )
    elif facts.logging.prometheus_port > LAST_PORT:
        yield Problem(path="logging.prometheus_port", reason="is no port", hint="use at most 65535")


RULES: tuple[Rule, ...] = (
    profile_ends_after_its_start,
    profiled_ranks_exist,
    memory_history_needs_profile,
    names_in_wandb_need_project,
    figures_need_prometheus,
)

WARNINGS: tuple[Rule, ...] = ()

OF_MODEL: tuple[Rule, ...] = ()
