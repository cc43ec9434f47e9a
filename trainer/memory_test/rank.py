"""`python -m trainer.memory_test.rank`: a process that measures one rank."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from trainer.contract.config import TrainerConfig, read_as
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import TrainerError
from trainer.contract.files.run_directory import publish
from trainer.contract.memory_test import MemoryTestConfig, StageMemory
from trainer.contract.model.layout import model_parallel_size
from trainer.distributed import device, one_rank
from trainer.distributed.rendezvous import Ranks
from trainer.metrics.console import quiet_libraries

MICROBATCHES_PER_STAGE = 3
"""Microbatches for each pipeline stage. This is more than any schedule has in flight (`microbatches_in_flight` in
hpcgen.planning.memory.stages), so that further ones would only take time. CUDA graphs need memory for each of them."""


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
        one_rank.replace_collectives()
        from trainer.memory_test.measuring import measure  # imports megatron.core: after the lines above

        measured = dataclasses.replace(
            measured, **measure(trainer, Ranks(rank, arguments.device, trainer.world_size, "the memory test"))
        )
        publish(arguments.result, json.dumps(dataclasses.asdict(measured)))
    except TrainerError as error:
        print(f"memory-test: stage {arguments.stage}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def prepared(config: TrainerConfig) -> TrainerConfig:
    """The training to measure, without what needs other processes, and without needless microbatches."""
    stages, training = config.parallelism.pipeline_model_parallel_size, config.training
    smallest = training.micro_batch_size * config.world_size // model_parallel_size(config.parallelism)
    batch_size = training.global_batch_size
    if training.cuda_graph_impl == "none":
        batch_size = min(batch_size, MICROBATCHES_PER_STAGE * stages * smallest)
    return resolve(
        dataclasses.replace(
            config,
            training=dataclasses.replace(training, global_batch_size=batch_size),
            parallelism=dataclasses.replace(config.parallelism, use_sharp=False, tp_comm_overlap=False),
            data=dataclasses.replace(config.data, num_workers=0),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
