"""Versions of the libraries of a run, and a check that they can be imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

from trainer.distributed import device


def print_versions() -> int:
    """Print the versions on one line. Returns 0, or 1 with a message if a module cannot be imported."""
    for module in ("torch", "megatron.core", "trainer.train"):
        try:
            importlib.import_module(module)
            device.stand_in_for_cuda()  # directly after torch, as in a run
        except Exception as error:  # an import can fail in any way: a missing library, a CUDA mismatch
            print(f"trainer: cannot import {module}: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
    print(" ".join(f"{name} {version}" for name, version in versions().items()))
    return 0


def versions() -> dict[str, str]:
    """Versions of the imported libraries, by name."""
    return {
        "trainer": distribution_version("hpcgen"),
        "megatron-core": sys.modules["megatron.core"].__version__,
        "torch": sys.modules["torch"].__version__,
        "transformer-engine": distribution_version("transformer-engine", missing="none"),
    }


def distribution_version(name: str, missing: str = "unknown") -> str:
    """Version of a distribution, or `missing` if it is not installed, such as a trainer that runs from plain files."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return missing
