"""Why activations are not offloaded: Megatron-Core may read a tensor before its copy to the host is complete.

Once test_gradients_are_wrong_if_copies_take_as_long_as_they_may fails, Megatron-Core waits for the copy. Then
docs/long-context.md#offloading-activations and the rule activation-offload of `hpcgen lint` are out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults

TOKENS = 16


class LateStream:
    """A stream that runs each copy as late as CUDA may: when the stream that computes waits for it."""

    def __init__(self) -> None:
        self.copies: list[Callable[[], object]] = []

    def run(self, count: int) -> None:
        """Runs the first `count` copies, once each."""
        for index in range(count):
            copy, self.copies[index] = self.copies[index], lambda: None
            copy()

    def wait_event(self, event: LateEvent) -> None:
        self._wait(event.stream, event.count)

    def wait_stream(self, stream: LateStream) -> None:
        self._wait(stream, len(stream.copies))

    def _wait(self, stream: LateStream, count: int) -> None:
        if self is COMPUTE:
            stream.run(count)
        else:
            self.copies.append(lambda: stream.run(count))


class LateEvent:
    """The copies that a stream had received when the event was recorded."""

    def __init__(self, external: bool = False) -> None:
        self.stream, self.count = COMPUTE, 0

    def record(self, stream: LateStream) -> None:
        self.stream, self.count = stream, len(stream.copies)


COMPUTE = LateStream()


@pytest.fixture
def late_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams with copies of undefined order, in place of the CPU's, which copy at once."""
    current, copy_at_once = [COMPUTE], torch.Tensor.copy_

    @contextmanager
    def use(stream: LateStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if current[-1] is not COMPUTE:
            kept = source.detach()
            current[-1].copies.append(lambda: copy_at_once(target, kept))
            return target.fill_(float("nan"))
        return copy_at_once(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    for name, value in {"Stream": LateStream, "Event": LateEvent, "stream": use}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron-Core's groups of one rank, and what its offloading needs of CUDA and Transformer Engine."""
    monkeypatch.setattr(offload.PipelineOffloadManager, "OFFLOAD_MGR", None)
    monkeypatch.setattr(transformer_engine, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    is_activation = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
    name = "_can_manage_tensor_for_offload"  # in 0.19: whether a tensor is on a GPU
    monkeypatch.setattr(offload.ChunkOffloadHandler, name, is_activation, raising=False)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def gradients(**settings: Any) -> torch.Tensor:
    """The gradients of the first step of a tiny GPT."""
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        **settings,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), 64, TOKENS, position_embedding_type="rope")
    tokens = torch.randint(64, (1, TOKENS))
    future = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    model(tokens, torch.arange(TOKENS)[None], future, labels=tokens).mean().backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


OFFLOADED = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["core_attn"],
    "min_offloaded_tensor_size": 1,
}


def test_gradients_are_right_if_each_copy_is_immediate() -> None:
    torch.testing.assert_close(gradients(**OFFLOADED), gradients())


def test_gradients_are_wrong_if_copies_take_as_long_as_they_may(late_streams: None) -> None:
    assert gradients().isfinite().all()
    assert gradients(**OFFLOADED).isnan().any()


def test_gradients_are_right_if_each_reload_waits(
    late_streams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reload = offload.ChunkOffloadHandler.reload

    def wait_and_reload(handler: Any, *arguments: Any) -> torch.Tensor:
        torch.cuda.current_stream().wait_stream(handler.d2h_stream)
        return reload(handler, *arguments)

    monkeypatch.setattr(offload.ChunkOffloadHandler, "reload", wait_and_reload)
    torch.testing.assert_close(gradients(**OFFLOADED), gradients())
