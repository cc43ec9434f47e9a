"""`python -m trainer.inference`: continues prompts from a file or a terminal.

With several ranks (torchrun, srun), every rank runs the same command. Rank 0 reads the prompts and writes the results.
Ranks beyond TP x PP hold further replicas of the model, which share the prompts of a file.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.chats.prompts import Texts
from trainer.contract.errors import Exit, ReportedByRank0Error, TrainerError
from trainer.distributed.rendezvous import Ranks, find_ranks
from trainer.faults.stopping import announce, leave
from trainer.inference.arguments import generation_options, parser, texts_of_file
from trainer.inference.checkpoint import find_checkpoint
from trainer.inference.start import prepare_device
from trainer.inference.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from trainer.inference.session import Session

BROKEN_PIPE = 141
"""Exit status if the reader of the results has gone, as of a process that SIGPIPE ends."""


def main() -> int:
    """Parse the arguments and generate. Returns the exit status."""
    arguments = parser().parse_args()
    try:
        ranks = find_ranks(os.environ)
        with _same_on_all_ranks():
            found = _early_texts(arguments, ranks)
        session = _open_session(arguments, ranks)
        with _same_on_all_ranks():
            if arguments.prompts is None:
                session.converse()
            else:
                session.answer(found)
        session.end()
    except TrainerError as error:
        announce(error, None)
        leave(error.exit_code)
    except ReportedByRank0Error:
        leave(Exit.FAULT)
    except KeyboardInterrupt:
        leave(130)
    except BrokenPipeError:
        os._exit(BROKEN_PIPE)  # flushing would fail again
    return Exit.DONE


def _open_session(arguments: argparse.Namespace, ranks: Ranks) -> Session:
    with _same_on_all_ranks():
        generation_options(arguments)  # refuse wrong options before the weights are read
        found = find_checkpoint(arguments.checkpoint)
        tokenizer = load_tokenizer(arguments.tokenizer, arguments.eod_token)
        pipeline = arguments.pipeline_model_parallel_size
        tensor = arguments.tensor_model_parallel_size or max(1, ranks.world_size // pipeline)
        if ranks.world_size % (tensor * pipeline):
            raise TrainerError(
                f"TP x PP = {tensor} x {pipeline} = {tensor * pipeline}, but the number of ranks is {ranks.world_size} "
                f"(from {ranks.source}). Launch a multiple of {tensor * pipeline} ranks, or set "
                "--tensor-model-parallel-size and --pipeline-model-parallel-size to fit"
            )
        if arguments.prompts is None and ranks.world_size != tensor * pipeline:
            raise TrainerError("several replicas of a model need a file with prompts. Name it with --prompts")
    gc.disable()  # imported objects are never garbage, and scanning them takes a fifth of the import time
    device = prepare_device(arguments.device)
    from trainer.inference.session import Session  # imports megatron.core: after `prepare_device`

    gc.freeze()
    gc.enable()
    session = Session.load(found, tokenizer, arguments, ranks, device=device, tensor_parallel=tensor)
    model = session.model
    with _same_on_all_ranks():
        tokenizer.check_fits(model.vocab_size)
    if model.why_slow and ranks.rank == 0:
        print(model.why_slow, file=sys.stderr)
    return session


@contextlib.contextmanager
def _same_on_all_ranks() -> Iterator[None]:
    """Mark errors that every rank raises, so that only rank 0 reports them."""
    try:
        yield
    except TrainerError as error:
        raise error.on_all_ranks() from error


def _early_texts(arguments: argparse.Namespace, ranks: Ranks) -> Texts | None:
    """The prompts before the weights are read, so that mistakes in them cost no time. None if only rank 0 has them."""
    if arguments.prompts is None or (arguments.prompts == "-" and ranks.world_size > 1):
        return None
    return texts_of_file(arguments)


# Nothing may run at import, since spawned processes import this module again.
if __name__ == "__main__":
    sys.exit(main())
