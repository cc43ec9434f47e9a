"""The user's own dataset (`data.dataset`): map-style samples by number, or a stream of samples.

Both give a run one global sequence of samples. Every data-parallel rank reads its part of it, in every layout.
Map-style samples are shuffled in each epoch, so their position follows from the number of consumed samples. A stream is
read in its own order. Its position is its state in the checkpoint, or the number of samples to skip.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from trainer.contract.code import code_loading
from trainer.contract.config import TrainerConfig
from trainer.contract.resuming.sampling import SEEDS
from trainer.data.own_samples import Form, SampleError, described, digest, guarded

KEY = "data.dataset"


@dataclass(frozen=True)
class Refused:
    """A sample that cannot be used. Loader processes return it, since torch hides the message of their exceptions."""

    problem: str


@dataclass(frozen=True)
class Provider:
    """The user's function for one split."""

    function: Callable[..., Any]
    split: str
    config: TrainerConfig

    @property
    def name(self) -> str:
        """The function in messages."""
        return f"{KEY} = {self.config.data.dataset!r}"

    def samples(self) -> Any:
        """Call the function. Returns map-style samples, an iterable, or None.

        Raises:
            SampleError: it fails, or returns something else.
        """
        try:
            found = self.function(self.split, self.config)
        except Exception as error:
            raise SampleError(f"{self.name} fails for {self.split!r}: {described(error)}") from error
        if found is not None and not is_map_style(found) and not hasattr(found, "__iter__"):
            raise SampleError(
                f"{self.name} returns a {type(found).__name__} for {self.split!r}, which has neither __len__ and "
                "__getitem__ nor __iter__"
            )
        return found


def is_map_style(samples: Any) -> bool:
    """True for samples by number. Iterable datasets of torch inherit __getitem__, but no __len__."""
    return hasattr(samples, "__getitem__") and hasattr(samples, "__len__")


def has_state(samples: Any) -> bool:
    """True for a stream that can tell its position and return to it."""
    return hasattr(samples, "state_dict") and hasattr(samples, "load_state_dict")


@dataclass(frozen=True)
class Position:
    """Where a run is in its own dataset."""

    consumed: int = 0
    """Number of samples that the run has read."""
    first: int = 0
    """Number of the run's first sample of this dataset. Above 0 if the run began with other data."""
    state: dict[str, Any] | None = None
    """State of the stream before sample `consumed`; None if it has none."""


class MapSamples(torch.utils.data.Dataset[Any]):
    """Map-style samples by their number in the run."""

    def __init__(self, samples: Any, provider: Provider) -> None:
        self._samples, self.provider = samples, provider
        self._form = Form.of(provider.config)
        self._permutation: tuple[tuple[int, ...], Any] | None = None
        self.position = Position()
        self.length = len(samples)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor] | Refused:
        index = self.index(number)
        where = f"sample {number} of {self.provider.name} ({self.provider.split}, index {index})"
        try:
            return guarded(lambda: self._samples[index], self._form, where)
        except SampleError as error:
            return Refused(str(error))

    def index(self, number: int) -> int:
        """Index of a sample. Training shuffles each epoch, evaluations read in order."""
        first = self.position.first
        epoch, place = divmod(number - first, self.length)
        if self.provider.split != "train":
            return place
        words = (self.provider.config.training.seed, *divmod(first, SEEDS), epoch)
        if self._permutation is None or self._permutation[0] != words:
            # numpy never changes what RandomState draws
            self._permutation = words, numpy.random.RandomState(words).permutation(self.length)
        return int(self._permutation[1][place])


class StreamSamples:
    """A stream of samples in its own order."""

    length = None

    def __init__(self, provider: Provider, *, has_state: bool) -> None:
        """`has_state` is true if the stream can tell its position and return to it."""
        self.provider, self.has_state = provider, has_state
        self.position = Position()
        self._states: dict[int, Any] = {}

    def reader(self) -> StreamReader:
        """Start to read at the position, or at the beginning for evaluations.

        Raises:
            SampleError: the user's code fails.
        """
        samples, position = self.provider.samples(), self.position
        if position.state is None or not self.has_state:
            return StreamReader(self.provider, samples, position.first)
        _load_state(self.provider, samples, position.state)
        return StreamReader(self.provider, samples, position.consumed)

    def note(self, consumed: int, state: Any) -> None:
        """Remember the state of the stream before sample `consumed`."""
        self._states = {consumed: state}

    def state_at(self, consumed: int) -> Any:
        """The state before sample `consumed`, which is the last one noted or the one that the run began with."""
        return self.position.state if consumed == self.position.consumed else self._states.get(consumed)


class StreamReader:
    """Reads a stream forward."""

    def __init__(self, provider: Provider, samples: Any, number: int) -> None:
        """`number` is that of the next sample."""
        self._provider, self._samples, self._next = provider, samples, number
        self._form = Form.of(provider.config)
        self._iterator: Iterator[Any] | None = None

    def read(self, number: int) -> dict[str, torch.Tensor]:
        """The sample with this number. Samples before it are skipped.

        Raises:
            SampleError: it cannot be used, or the stream has ended.
        """
        self.skip_to(number)
        where = f"sample {number} of {self._provider.name} ({self._provider.split})"
        return guarded(self._advance, self._form, where)

    def skip_to(self, number: int) -> None:
        """Read on until sample `number` is the next one."""
        while self._next < number:
            try:
                self._advance()
            except SampleError:
                raise
            except Exception as error:
                raise SampleError(
                    f"sample {self._next} of {self._provider.name} ({self._provider.split}) cannot be read: "
                    f"{described(error)}"
                ) from error

    def state(self) -> dict[str, Any]:
        """The state before the next sample, in plain values as in JSON.

        Raises:
            SampleError: the state has other values, which would change when they are loaded.
        """
        try:
            state = self._samples.state_dict()
        except Exception as error:
            raise SampleError(f"state_dict() of {self._provider.name} fails: {described(error)}") from error
        try:
            is_plain = isinstance(state, dict) and json.loads(json.dumps(state)) == state
        except (TypeError, ValueError, RecursionError):
            is_plain = False
        if not is_plain:
            raise SampleError(
                f"state_dict() of {self._provider.name} returns {_shown(state)}, which JSON cannot represent. Return a "
                "dictionary of texts, numbers, lists and dictionaries with texts as keys"
            )
        return dict(state)

    def _advance(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._samples)
        try:
            sample = next(self._iterator)
        except StopIteration:
            raise SampleError(
                f"does not exist: the stream ends after {self._next:,} samples. A stream must not end before the run: "
                "begin again in the function (while True), or return samples with __len__ and __getitem__"
            ) from None
        self._next += 1
        return sample


def _load_state(provider: Provider, samples: Any, state: Mapping[str, Any]) -> None:
    try:
        samples.load_state_dict(state)
    except Exception as error:
        raise SampleError(f"load_state_dict() of {provider.name} fails: {described(error)}") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


Samples = MapSamples | StreamSamples
"""Samples of a split."""


def open_samples(config: TrainerConfig, split: str) -> Samples | None:
    """The samples of a split; None if the user's function returns none.

    Raises:
        ConfigError: the function cannot be imported.
        SampleError: it fails, or there are no samples.
    """
    assert config.data.dataset is not None
    provider = Provider(code_loading.load(config.data.dataset, KEY), split, config)
    samples = provider.samples()
    if samples is None:
        return None
    if not is_map_style(samples):
        return StreamSamples(provider, has_state=has_state(samples))
    if not len(samples):
        raise SampleError(f"{provider.name} returns no samples for {split!r}")
    return MapSamples(samples, provider)


def first_digest(samples: Samples) -> str:
    """SHA-256 of the first sample of a dataset, which is read twice.

    Raises:
        SampleError: it cannot be used, or the user's code does not give the same sample each time.
    """
    one, other = (digest(_first_sample(samples)) for _ in range(2))
    if one != other:
        name, split = samples.provider.name, samples.provider.split
        raise SampleError(
            f"{name} gives another first sample for {split!r} each time. A run could not be repeated or resumed: seed "
            "random numbers with config.training.seed"
        )
    return one


def _first_sample(samples: Samples) -> dict[str, torch.Tensor]:
    if isinstance(samples, StreamSamples):
        return StreamReader(samples.provider, samples.provider.samples(), 0).read(0)
    found = samples[0]
    if isinstance(found, Refused):
        raise SampleError(found.problem)
    return found


def check_state(stream: StreamSamples) -> None:
    """Check that a stream with a state continues with the sample that follows. Reads two samples.

    Raises:
        SampleError: it does not, or the user's code fails.
    """
    provider = stream.provider
    reader = StreamReader(provider, provider.samples(), 0)
    reader.read(0)
    state = reader.state()
    again = provider.samples()
    _load_state(provider, again, json.loads(json.dumps(state)))
    expected, found = (digest(each.read(1)) for each in (reader, StreamReader(provider, again, 1)))
    if expected != found:
        raise SampleError(
            f"{provider.name} does not continue from its state: after the first sample, state_dict() returns "
            f"{_shown(state)}, and with this state, __iter__ does not begin with the second sample. Advance the "
            "position before each yield, not after it, and use no buffer that is not in the state. Or yield from the "
            "stream in a generator: a resumed run then reads it again and skips what was read"
        )
