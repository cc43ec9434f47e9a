"""What Megatron-Core's own reader finds in .bin/.idx pairs: `python -m trainer.data.dataset_check PREFIX...`

Prints a JSON object per line: first {"megatron_core": "0.16.1"}, then one for each prefix, either {"prefix", "error"}
or {"prefix", "documents", "sequences", "tokens", "dtype", "read"}. `read` holds some documents, the first and the last
among them: {"document", "tokens", "sha256"}, the hash of its ids as little-endian int64.
`hpcgen data verify` runs this and compares. Exit status 3 means that megatron-core cannot be imported here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterable
from typing import Any

from trainer.distributed import device
from trainer.metrics.console import quiet_libraries

CANNOT_IMPORT = 3
"""Exit status without megatron-core."""


def main() -> int:
    """Reads the arguments, prints what is found, and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.data.dataset_check", description="Reads datasets."
    )
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="path of a pair, without suffix")
    parser.add_argument("--documents", type=int, default=100, help="how many documents of each to read")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        device.prepare("cpu")  # no GPU is needed, and none is taken
        import megatron.core
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    except Exception as error:  # an import can fail in any way: a missing library, a CUDA mismatch
        print(f"cannot import megatron.core: {type(error).__name__}: {error}", file=sys.stderr)
        return CANNOT_IMPORT
    print(json.dumps({"megatron_core": megatron.core.__version__}))
    for prefix in arguments.prefixes:
        try:
            found = check(IndexedDataset(prefix), arguments.documents)
        except Exception as error:  # Core refuses by AssertionError, numpy by ValueError
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"prefix": prefix, **found}), flush=True)
    return 0


def check(dataset: Any, num_documents: int) -> dict[str, Any]:
    """Counts of an IndexedDataset, and the hashes of some of its documents."""
    index = dataset.index
    documents = len(index.document_indices) - 1
    return {
        "documents": documents,
        "sequences": len(dataset),
        "tokens": int(index.sequence_lengths.sum(dtype="int64")),
        "dtype": index.dtype.__name__,
        "read": [_read(dataset, number) for number in chosen(documents, num_documents)],
    }


def chosen(documents: int, how_many: int) -> list[int]:
    """The first, the last and some random ones between, always the same."""
    if documents <= how_many:
        return list(range(documents))
    return sorted(
        {0, documents - 1, *random.Random(documents).sample(range(documents), max(0, how_many - 2))}
    )


def _read(dataset: Any, number: int) -> dict[str, Any]:
    first, end = (int(dataset.index.document_indices[number + index]) for index in (0, 1))
    sequences: Iterable[Any] = (dataset[index] for index in range(first, end))
    digest, tokens = hashlib.sha256(), 0
    for sequence in sequences:
        digest.update(sequence.astype("<i8").tobytes())
        tokens += len(sequence)
    return {"document": number, "tokens": tokens, "sha256": digest.hexdigest()}


if __name__ == "__main__":
    sys.exit(main())
