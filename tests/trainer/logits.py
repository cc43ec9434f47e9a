"""`python -m tests.trainer.logits CONFIG SAMPLES OUTPUT`: logits of samples, on the ranks of any layout.

SAMPLES is a JSON file with a list of token lists of seq_length + 1 tokens. Each rank with logits writes those of its
part of the sequence and the vocabulary to OUTPUT, a directory, as RANK.pt with the positions of the sequence.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.contract import config as configuration
from trainer.contract.config.resolve import resolve
from trainer.contract.model.batch_size import Batch
from trainer.distributed import device
from trainer.distributed.rendezvous import find_ranks


def main() -> int:
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from trainer.data.loader import data_iterators
    from trainer.data.microbatch import MicroBatch
    from trainer.distributed import groups
    from trainer.distributed.sequence import zigzag_positions
    from trainer.model import build, kernels

    path, samples, output = map(Path, sys.argv[1:])
    config = resolve(configuration.read(path))
    ranks = find_ranks(os.environ)
    found = groups.initialize(config, ranks, os.environ)
    model = build.build_model(config, found, kernels.choose(config))
    for chunk in model:
        chunk.eval()
    tokens = [torch.tensor(sample) for sample in json.loads(samples.read_text())]
    dataset = [{"tokens": t[:-1], "labels": t[1:], "loss_mask": torch.ones(len(t) - 1)} for t in tokens]
    size = config.training.global_batch_size

    def step(batches: Iterator[MicroBatch], chunk: torch.nn.Module) -> Any:
        batch = next(batches)
        logits = chunk(batch.tokens, batch.position_ids, batch.boundaries)
        return logits, lambda result, non_loss_data: result.detach().clone()

    with torch.no_grad():
        iterators = data_iterators(model, dataset, config, found, [Batch(0, size)])
        logits = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=model,
            num_microbatches=size // config.training.micro_batch_size,
            seq_length=config.model.seq_length,
            micro_batch_size=config.training.micro_batch_size,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if found.pp.rank() == found.pp.size() - 1:
        positions = zigzag_positions(config.model.seq_length, found.cp.rank(), found.cp.size())
        torch.save(
            {"logits": torch.cat(logits), "positions": positions, "tp": found.tp.rank()},
            output / f"{ranks.rank}.pt",
        )
    groups.finalize()
    return 0


if __name__ == "__main__":
    device.prepare("cpu")
    sys.exit(main())
