"""One rank of a training run with poisoned steps. test_poison.py runs it; it checks the result of each step.

Every poison is put in by a hook of torch on this rank alone, at a place that a seeded generator chooses.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from trainer.contract import config as configuration
from trainer.distributed import device

device.prepare("cpu")

import torch  # noqa: E402

from trainer.contract.config.resolve import resolve  # noqa: E402
from trainer.contract.errors import NonFiniteError  # noqa: E402
from trainer.contract.model.batch_size import Batches  # noqa: E402
from trainer.data.datasets import build_datasets  # noqa: E402
from trainer.data.loader import data_iterators  # noqa: E402
from trainer.distributed import groups, rendezvous  # noqa: E402
from trainer.faults.best import BestWatch  # noqa: E402
from trainer.faults.spikes import MIN_LOSSES, SpikeWatch  # noqa: E402
from trainer.loss import Objective  # noqa: E402
from trainer.model import experts, kernels  # noqa: E402
from trainer.model.build import build_model  # noqa: E402
from trainer.optimizer.build import build_optimizer  # noqa: E402
from trainer.optimizer.schedule import Schedule  # noqa: E402
from trainer.step import StepResult, TrainingState, Vote, train_step  # noqa: E402

POISONS = 20
KINDS = {"activation": math.nan, "gradient": math.nan, "infinite gradient": math.inf}


class Training:
    """The state of the loop, advanced one step at a time."""

    def __init__(self, path: Path) -> None:
        self.config = resolve(configuration.read(path))
        self.ranks = rendezvous.find_ranks(os.environ)
        self.groups = groups.initialize(self.config, self.ranks, os.environ)
        model = build_model(self.config, self.groups, kernels.choose(self.config))
        optimizer = build_optimizer(self.config, model)
        spikes = SpikeWatch(self.config.training.loss_spike_factor, self.config.training.skip_loss_spikes)
        schedule = Schedule(self.config.optimizer, optimizer, self.config.training.train_iters)
        self.state = TrainingState(
            model,
            optimizer,
            schedule,
            spikes,
            Objective(self.config, model),
            BestWatch(self.config.training),
            experts.routers(model),
        )
        cache = Path(self.config.run_dir) / "index-cache"
        datasets = build_datasets(self.config, cache, self.config.model.padded_vocab_size, is_needed=True)
        batches = Batches(self.config.training)
        self.batches = data_iterators(model, datasets["train"], self.config, self.groups, batches)

    def step(self) -> StepResult:
        return train_step(self.state, self.batches, self.config, self.groups, Vote)

    def frozen(self) -> list[torch.Tensor]:
        """Everything that an update changes."""
        optimizers = getattr(self.state.optimizer, "chained_optimizers", [self.state.optimizer])
        moments = [
            t for each in optimizers for state in each.optimizer.state.values() for t in state.values()
        ]
        weights = [weight for chunk in self.state.model for weight in chunk.parameters()]
        masters = [weight for each in optimizers for weight in each.get_parameters()]
        biases = experts.expert_biases(self.state.routers)
        everything = weights + masters + moments + biases
        tensors = (tensor for tensor in everything if isinstance(tensor, torch.Tensor))
        return [tensor.detach().clone() for tensor in tensors]

    @contextlib.contextmanager
    def poisoned(self, kind: str, choose: random.Random) -> Iterator[None]:
        chunk = choose.choice(self.state.model)
        if kind == "activation":
            layers = [module for name, module in chunk.named_modules() if name.endswith(".mlp")]
            layer = choose.choice(layers)
            handle = layer.register_forward_hook(lambda m, i, output: (output[0] * math.nan, *output[1:]))
        else:
            matrices = [
                weight
                for name, weight in chunk.named_parameters()
                if ("linear" in name or "router" in name) and "bias" not in name
            ]
            handle = choose.choice(matrices).register_hook(lambda gradient: gradient * KINDS[kind])
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def scaled_loss(self, factor: float) -> Iterator[None]:
        """Scale the loss on all ranks, as a batch of garbage would."""
        handles = [
            chunk.register_forward_hook(lambda m, i, output: output * factor) for chunk in self.state.model
        ]
        yield
        for handle in handles:
            handle.remove()


def poison(training: Training) -> None:
    shared = random.Random(7)
    for number in range(POISONS):
        for _ in range(shared.randint(1, 3)):
            assert not training.step().skipped
        rank, kind = shared.randrange(training.ranks.world_size), shared.choice(list(KINDS))
        before, iteration = training.frozen(), training.state.iteration
        is_mine = rank == training.ranks.rank
        with training.poisoned(kind, random.Random(number)) if is_mine else contextlib.nullcontext():
            result = step_or_error(training)
        if isinstance(result, NonFiniteError):
            assert f"at iteration {iteration + 1} " in str(result)
            assert re.search(r"(on|in the shard of) ranks? \d", str(result))
            assert training.state.iteration == iteration
        else:  # to a scaled loss, a gradient that is not finite says no more than that the scale is too large
            assert training.config.training.precision == "fp16", f"{kind} on rank {rank} was not noticed"
            assert (result.skipped, result.grad_norm) == (True, None)
        assert_same(before, training.frozen())


def step_or_error(training: Training) -> StepResult | NonFiniteError:
    try:
        return training.step()
    except NonFiniteError as error:
        return error


def spike(training: Training) -> None:
    for _ in range(MIN_LOSSES):
        assert training.step().spike is None
    before = training.frozen()
    for is_left_out in (True, False):  # skip_loss_spikes is 1
        with training.scaled_loss(1e4):
            result = training.step()
        assert result.spike is not None
        assert result.spike > 100
        assert result.skipped is is_left_out
        if is_left_out:
            assert_same(before, training.frozen())
    assert training.step().spike is None


def assert_same(before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


if __name__ == "__main__":
    training = Training(Path(sys.argv[1]))
    poison(training)
    # In fp16 such a loss overflows before it is a spike.
    if (
        training.config.training.precision != "fp16"
        and training.groups.dp.size() == training.ranks.world_size
    ):
        spike(training)
    groups.finalize()
