"""Samples of the user's own dataset (`data.dataset`): their checks, and their form for the loader.

Shapes: s tokens of a sample (model.seq_length).
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from trainer.contract.config import TrainerConfig
from trainer.data.microbatch import OWN_POSITIONS

NAMES = ("tokens", "labels", "loss_mask", "position_ids")


class SampleError(Exception):
    """A sample cannot be used. The message says which, and why."""


@dataclass(frozen=True)
class Form:
    """The form that samples must have."""

    seq_length: int
    rows: int
    """Number of rows of the embedding, one for every token ID."""
    max_positions: int | None
    """Number of learned positions; None if the model does not read position_ids."""
    why_no_positions: str = ""
    """Why samples cannot have position_ids, after "but"."""

    @classmethod
    def of(cls, config: TrainerConfig) -> Form:
        """The form of the samples of a resolved configuration."""
        model = config.model
        assert model.padded_vocab_size is not None
        why = ""
        if config.data.reset_position_ids:
            why = "data.reset_position_ids = true computes them"
        elif model.position_embedding_type == "rope" and model.model_provider is None:
            why = "rotary embeddings do not read them"
        positions = model.max_position_embeddings or model.seq_length
        return cls(model.seq_length, model.padded_vocab_size, None if why else positions, why)

    def checked(self, sample: Any) -> dict[str, torch.Tensor]:
        """The sample as int64 tensors [s]: tokens, labels and loss_mask, and positions if the model reads them.

        Raises:
            SampleError: it has another form.
        """
        if not isinstance(sample, Mapping):
            raise SampleError(f"is a {type(sample).__name__}, not a mapping with {', '.join(NAMES)}")
        if unknown := [str(name) for name in sample if name not in NAMES]:
            raise SampleError(f"has {', '.join(unknown)}; known are {', '.join(NAMES)}")
        if "tokens" not in sample:
            raise SampleError("has no tokens")
        length = self.seq_length
        if "labels" in sample:
            tokens = self._ids("tokens", sample, length)
            labels = self._ids("labels", sample, length)
        else:
            both = self._ids("tokens", sample, length + 1)
            tokens, labels = both[:-1], both[1:]
        checked = {"tokens": tokens, "labels": labels, "loss_mask": torch.ones_like(tokens)}
        if "loss_mask" in sample:
            checked["loss_mask"] = self._within("loss_mask", sample, 2, "it must be 0 or 1")
        if "position_ids" in sample:
            if self.max_positions is None:
                raise SampleError(f"has position_ids, but {self.why_no_positions}")
            reason = f"the model has {self.max_positions:,} positions"
            checked[OWN_POSITIONS] = self._within("position_ids", sample, self.max_positions, reason)
        elif self.max_positions is not None:
            checked[OWN_POSITIONS] = torch.arange(length)
        return checked

    def _ids(self, name: str, sample: Mapping[str, Any], length: int) -> torch.Tensor:
        hint = "Set loss_mask to 0 where nothing is to be learned" if name == "labels" else ""
        reason = f"the embedding has {self.rows:,} rows (model.padded_vocab_size)"
        return self._within(name, sample, self.rows, reason, length, hint)

    def _within(
        self,
        name: str,
        sample: Mapping[str, Any],
        limit: int,
        reason: str,
        length: int | None = None,
        hint: str = "",
    ) -> torch.Tensor:
        """The values of a sample under `name`: `length` integers from 0 to `limit` - 1. Default: a length of s."""
        values, length = sample[name], length or self.seq_length
        # torch lacks some unsigned types, and warns of read-only arrays
        if isinstance(values, numpy.ndarray):
            values = torch.from_numpy(
                values.astype(numpy.int64) if values.dtype.kind in "iub" else values.copy()
            )
        if not isinstance(values, torch.Tensor):
            raise SampleError(f"has {name} of type {type(values).__name__}, not a tensor or a numpy array")
        is_mask = name == "loss_mask" and bool(((values == 0) | (values == 1)).all())  # often of floats
        if not is_mask and (values.is_floating_point() or values.is_complex()):
            raise SampleError(f"has {name} of type {values.dtype}, not integers")
        if list(values.shape) != [length]:
            without = ", since it has no labels" if length > self.seq_length else ""
            raise SampleError(f"has {name} of shape {list(values.shape)}, not [{length}]{without}")
        values = values.long().cpu()
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= limit:
            wrong = low if low < 0 else high
            place = int((values == wrong).nonzero()[0])
            raise SampleError(
                f"has {name}[{place}] = {wrong}, but {reason}" + (f". {hint}" if hint and low < 0 else "")
            )
        return values


def digest(sample: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of a checked sample."""
    found = hashlib.sha256()
    for name, values in sorted(sample.items()):
        found.update(name.encode() + values.numpy().tobytes())
    return found.hexdigest()


def guarded(read: Callable[[], Any], form: Form, where: str) -> dict[str, torch.Tensor]:
    """The checked sample that `read` returns. `where` names the sample in errors.

    Raises:
        SampleError: `read` fails, or the sample has another form.
    """
    try:
        return form.checked(read())
    except SampleError as error:
        raise SampleError(f"{where} {error}") from error
    except Exception as error:
        raise SampleError(f"{where} cannot be read: {described(error)}") from error


def described(error: BaseException) -> str:
    """An error in the user's code, with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{at}"
