"""`python -m trainer.data.dataset_check PREFIX...`: reads .bin/.idx pairs with Megatron-Core's own reader.

Prints a JSON object per line: first {"megatron_core": "0.16.1"}, then one for each prefix, either {"prefix", "error"}
or {"prefix", "documents", "sequences", "tokens", "dtype", "read"}. `read` lists some documents, including the first and
the last, as {"document", "tokens", "sha256"}, where the hash is of the token IDs as little-endian int64.
`hpcgen data verify` runs this and compares. Exit status 3 means that megatron-core cannot be imported.
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
"""Exit status if megatron-core cannot be imported."""


def main() -> int:
    """Parse the arguments and print the results. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.data.dataset_check", description="Reads datasets."
    )
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="path of a pair, without suffix")
    parser.add_argument(
        "--documents", type=int, default=100, help="number of documents to read from each pair"
    )
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        device.prepare("cpu")  # needs no GPU, so it must not reserve one
        import megatron.core
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    except Exception as error:  # an import can fail in any way: a missing library, a CUDA mismatch
        print(f"cannot import megatron.core: {type(error).__name__}: {error}", file=sys.stderr)
        return CANNOT_IMPORT
    print(json.dumps({"megatron_core": megatron.core.__version__}))
    for prefix in arguments.prefixes:
        try:
            found = check(IndexedDataset(prefix), arguments.documents)
        except Exception as error:  # Core raises AssertionError, numpy ValueError
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"prefix": prefix, **found}), flush=True)
    return 0


def check(dataset: Any, num_documents: int) -> dict[str, Any]:
    """Count the contents of an IndexedDataset, and hash some of its documents."""
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
    """The first document, the last, and some random ones between them, the same each time."""
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
