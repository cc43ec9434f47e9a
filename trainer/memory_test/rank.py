"""`python -m trainer.memory_test.rank`: a process that measures one rank."""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
from pathlib import Path

import torch

from trainer.contract.config import TrainerConfig, read_as
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import TrainerError
from trainer.contract.files.run_directory import publish
from trainer.contract.memory_test import MemoryTestConfig, StageMemory
from trainer.contract.model.batch_size import Batches
from trainer.contract.model.layout import model_parallel_size
from trainer.distributed import device, one_rank
from trainer.distributed.rendezvous import Ranks, select_gpu
from trainer.metrics.console import Log, quiet_libraries

STEPS = 3
"""Number of steps to run once CUDA graphs are recorded. The optimizer's state exists after the first step. The last
step is timed."""

MICROBATCHES_PER_STAGE = 3
"""Microbatches for each pipeline stage. This is more than any schedule has in flight (`microbatches_in_flight` in
hpcgen.planning.memory.stages), so that further ones would only take time. CUDA graphs need memory for each of them."""

GIB = 2**30


def main() -> int:
    """Parse the arguments, measure, and write a StageMemory as JSON. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.memory_test.rank", description="Measures the memory of one rank."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", required=True, help="configuration (JSON)")
    parser.add_argument("--stage", type=int, metavar="N", required=True, help="pipeline stage of the rank")
    parser.add_argument("--device", type=int, metavar="N", required=True, help="number of the GPU")
    parser.add_argument("--result", type=Path, metavar="FILE", required=True, help="file for the result")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        config = read_as(MemoryTestConfig, arguments.config)
        trainer = prepared(config.trainer)
        device.prepare(trainer.device)
        if trainer.training.deterministic_mode:
            device.make_deterministic()
        rank = config.rank_of_stage(arguments.stage)
        measured = StageMemory(
            stage=arguments.stage, rank=rank, estimated_gib=config.estimated_gib[arguments.stage]
        )
        measured = dataclasses.replace(
            measured, **measure(trainer, Ranks(rank, arguments.device, trainer.world_size, "the memory test"))
        )
        publish(arguments.result, json.dumps(dataclasses.asdict(measured)))
    except TrainerError as error:
        print(f"memory-test: stage {arguments.stage}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


class RandomSamples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples in the format of Megatron-Core's GPTDataset. Experts get about the same number of random tokens.

    All tokens are in the vocabulary shard of tensor-parallel rank 0, because no other rank computes their logits.
    """

    def __init__(self, config: TrainerConfig) -> None:
        rows = config.model.padded_vocab_size // config.parallelism.tensor_model_parallel_size
        self._length, self._rows = config.model.seq_length, min(rows, config.model.vocab_size)
        self._seed = config.training.seed

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._seed + index)
        text = torch.randint(self._rows, (self._length + 1,), generator=generator)
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": torch.ones(self._length)}


def prepared(config: TrainerConfig) -> TrainerConfig:
    """The training to measure: a few steps without what needs other processes, and without needless microbatches.

    The loss scale of fp16 starts at 1. With overflows, the optimizer would skip all steps and allocate no state.
    """
    stages, training = config.parallelism.pipeline_model_parallel_size, config.training
    smallest = training.micro_batch_size * config.world_size // model_parallel_size(config.parallelism)
    batch_size = training.global_batch_size
    if training.cuda_graph_impl == "none":
        batch_size = min(batch_size, MICROBATCHES_PER_STAGE * stages * smallest)
    return resolve(
        dataclasses.replace(
            config,
            training=dataclasses.replace(training, rampup_batch_size=None, global_batch_size=batch_size),
            parallelism=dataclasses.replace(config.parallelism, use_sharp=False, tp_comm_overlap=False),
            data=dataclasses.replace(config.data, num_workers=0),
            optimizer=dataclasses.replace(config.optimizer, initial_loss_scale=1.0, min_loss_scale=1.0),
        )
    )


def measure(config: TrainerConfig, ranks: Ranks) -> dict[str, float | str | None]:
    """Train a few steps as one rank, alone. Returns fields of StageMemory.

    Raises:
        TrainerError: the configuration does not fit this machine, or gradients overflow.
    """
    one_rank.replace_collectives()
    # These import megatron.core, so they must come after `device.prepare` and the line above.
    from trainer.data.loader import data_iterators, num_microbatches
    from trainer.distributed import groups
    from trainer.metrics.timers import Timers
    from trainer.model.cuda_graphs import WARMUP_STEPS, LayerGraphs
    from trainer.step import Vote, train_step
    from trainer.train import build_state

    if config.device == "cuda":
        select_gpu(ranks)
    one_rank.connect(ranks.rank, ranks.world_size)
    process_groups = groups.build(
        config.parallelism, timeout_minutes=config.training.distributed_timeout_minutes
    )
    log = Log(is_rank_0=False, progress=False)
    steps = STEPS if config.training.cuda_graph_impl == "none" else WARMUP_STEPS + STEPS
    training = dataclasses.replace(config.training, train_iters=steps)
    try:
        state = build_state(config, process_groups, log)
        timers = Timers(config.device)
        timers.attach(state.model, state.optimizer)
        samples = RandomSamples(config)
        iterators = data_iterators(state.model, samples, config, process_groups, Batches(training))
        batches = [iterator and timers.waited_for(iterator) for iterator in iterators]
        graphs = LayerGraphs(config, state, process_groups, log)
        for iteration in range(1, steps + 1):
            graphs.before(iteration)
            before = timers.totals()
            if train_step(state, batches, config, process_groups, Vote).skipped:
                raise TrainerError(
                    f"the gradients of step {iteration} overflow, so the optimizer has no state to measure"
                )
            torch.cuda.synchronize()
        graphs.close()
    except torch.OutOfMemoryError as error:
        asked = ". ".join(str(error).split(". ")[:2])
        return {"error": f"does not fit: {asked}", **_memory(config.device)}
    number = num_microbatches(config.training.global_batch_size, config, process_groups)
    return {"microbatch_s": (timers.totals() - before).compute_s / number, **_memory(config.device)}


def _memory(device_type: str) -> dict[str, float | None]:
    if device_type == "cpu":
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"in_use_gib": kib * 1024 / GIB}
    free, total = torch.cuda.mem_get_info()
    # torch keeps what it has reserved, and so the memory in use now is the largest.
    return {
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "in_use_gib": (total - free) / GIB,
        "device_gib": total / GIB,
    }


if __name__ == "__main__":
    sys.exit(main())
