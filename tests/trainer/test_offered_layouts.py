"""Layouts that the search offers for random runs: they are valid in hpcgen, Megatron-Core and Megatron-LM.

MEGATRON_LM is a checkout of Megatron-LM, of the version of the installed megatron-core. Without it, the slow tests
leave out its checks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcgen.config.loader import Run
from hpcgen.planning.layouts.result import RankedLayout, Search
from hpcgen.planning.layouts.search import RISK, SAME_SPEED, search, seconds
from hpcgen.planning.layouts.space import AXES, Space
from hpcgen.planning.memory import OTHER_GIB, estimate_stage
from hpcgen.planning.paths import absolute_paths
from hpcgen.planning.predicted_step import machine_of_run
from hpcgen.planning.request import make_allocation
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time import Machine, estimate_step_time
from hpcgen.run_plan.layouts.result import with_layout
from hpcgen.run_plan.training import plan_training, training_facts
from hpcgen.stages.train import TRAIN
from tests.planning.layouts.random_runs import random_run
from tests.trainer.core_groups import core_groups
from tests.trainer.single_rank import ON_CPU
from trainer.checkpoint.megatron_lm import common_state
from trainer.contract.config import TrainerConfig
from trainer.contract.rules.engine import ERRORS
from trainer.contract.rules.facts import Facts
from trainer.model.core_config import transformer_config

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults

ROOT = Path(__file__).parents[2]
MEGATRON_LM = os.environ.get("MEGATRON_LM", "")
QUICK = (3, 6, 101)
"""Seeds of runs whose search is short."""
MANY = [range(first, first + 50) for first in range(100, 600, 50)]
KERNELS = dataclasses.replace(ON_CPU, grouped_gemm=True)
MOST_RANKS = 1024
"""Largest number of ranks whose groups Megatron-Core makes here. It makes those of all ranks."""


def searched(run: Run, top: int = 3) -> tuple[Search, Facts, Machine]:
    """The search for the layouts of a run, with what it searched."""
    allocation = make_allocation(TRAIN, run.config, run.cluster, run.node_type)
    facts, problems = training_facts(run, absolute_paths(run.config, run.directory), allocation)
    assert not problems
    machine = machine_of_run(run, facts.training, allocation)
    return search(facts, machine, top=top), facts, machine


@pytest.mark.parametrize("seed", QUICK)
def test_offered_layouts_are_valid(seed: int, tmp_path: Path) -> None:
    checked(seed, tmp_path)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("seeds", MANY, ids=str)
def test_offered_layouts_of_many_runs_are_valid(seeds: range, tmp_path: Path) -> None:
    trainers = [trainer for seed in seeds for trainer in checked(seed, tmp_path / str(seed))]
    assert len(trainers) > len(seeds)
    if MEGATRON_LM:
        refused = refusals([*map(wanted, trainers)])
        assert [
            (str(each.parallelism), why) for each, why in zip(trainers, refused, strict=True) if why
        ] == []


def checked(seed: int, directory: Path) -> list[TrainerConfig]:
    """The training of a random run in each layout that the search offers, after checks by hpcgen and Megatron-Core."""
    directory.mkdir(exist_ok=True)
    source = random.Random(seed)
    run = random_run(directory, source)
    found, facts, machine = searched(run)
    trainers = [validated(run, offered) for offered in found.best]
    for trainer in trainers:
        transformer_config(trainer, KERNELS)
        if trainer.world_size <= MOST_RANKS:
            with core_groups(trainer.parallelism, trainer.world_size):
                pass
    check_left_out(found, facts, machine, source)
    return trainers


def validated(run: Run, offered: RankedLayout) -> TrainerConfig:
    """The resolved training of a run with a layout in its run file, which has no mistakes."""
    written = with_layout(run, offered)
    planned = plan_training(written, absolute_paths(written.config, written.directory), must_fit=True)
    assert not planned.errors
    assert planned.layout == offered.layout
    assert planned.trainer is not None
    return planned.trainer


def check_left_out(found: Search, facts: Facts, machine: Machine, source: random.Random) -> None:
    """Random layouts of the space that fit with 5% to spare are not faster than the best one."""
    for setup in sampled(facts, source):
        stages = range(setup.layout.pipeline_model_parallel_size)
        needed_gib = max(estimate_stage(setup, stage).total_gib for stage in stages)
        assert facts.device_memory_gib is not None
        if needed_gib <= 0.95 * (facts.device_memory_gib - OTHER_GIB):
            assert found.best, setup.layout
            slowest = (1 + RISK) * estimate_step_time(setup, machine).total  # as if it were risky
            assert seconds(found.best[0]) <= (1 + SAME_SPEED) * slowest, setup.layout


def sampled(facts: Facts, source: random.Random, number: int = 12) -> Iterator[Setup]:
    """Yields the setups of random valid layouts of a run."""
    space = Space(facts, AXES)
    layers = [*space.layers()]
    for _ in range(number):
        of_layers = [each for each in space.pipelines(source.choice(layers)) if each.layout]
        if not of_layers:
            continue
        pipeline = source.choice(of_layers)
        kinds = [[space.without_recomputation(pipeline)], *space.recomputed(pipeline)]
        chosen = source.choice(source.choice([ways for ways in kinds if ways]))
        if chosen.layout is not None and not any(True for rule in ERRORS for _ in rule(chosen)):
            yield Setup.of_facts(chosen, chosen.layout)


def wanted(trainer: TrainerConfig) -> dict[str, Any]:
    """Megatron-LM's names and values of a training's arguments."""
    axes, training = trainer.parallelism, trainer.training
    layout = axes.pipeline_model_parallel_layout
    chunks = None if layout else axes.virtual_pipeline_model_parallel_size
    return {
        **vars(common_state(trainer, 0, 0)["args"]),
        "world_size": trainer.world_size,
        "sequence_parallel": axes.sequence_parallel,
        "cp_comm_type": None if axes.cp_comm_type is None else [axes.cp_comm_type],
        "num_virtual_stages_per_pipeline_rank": chunks,
        "decoder_first_pipeline_num_layers": axes.num_layers_in_first_pipeline_stage,
        "decoder_last_pipeline_num_layers": axes.num_layers_in_last_pipeline_stage,
        "account_for_embedding_in_pipeline_split": axes.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": axes.account_for_loss_in_pipeline_split,
        "pipeline_model_parallel_layout": layout,
        "recompute_granularity": training.recompute_granularity,
        "recompute_method": training.recompute_method,
        "recompute_num_layers": training.recompute_num_layers,
        "recompute_modules": training.recompute_modules,
        "moe_grouped_gemm": trainer.model.num_moe_experts is not None,
        "lr": trainer.optimizer.lr,
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": trainer.model.vocab_size,
    }


def refusals(asked: Sequence[dict[str, Any]]) -> list[str]:
    """Why Megatron-LM refuses each set of arguments; empty if it accepts them."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/trainer/megatron_lm_arguments.py"), MEGATRON_LM],
        input="\n".join(map(json.dumps, asked)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]
