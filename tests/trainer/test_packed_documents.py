"""Documents as packed sequences for Transformer Engine, and attentions that ignore their boundaries."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from tests.trainer.document_runs import LENGTH, Rank, sample
from tests.trainer.inference.models import build_chunk
from tests.trainer.runs import EOD, LLAMA
from trainer.contract.errors import TrainerError
from trainer.data import documents
from trainer.distributed import groups
from trainer.distributed.sequence import zigzag_positions
from trainer.model import custom, packing
from trainer.model.attention import core
from trainer.model.initialization import initialize_by_name

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults


def attend_by_piece(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: packing.Pieces
) -> torch.Tensor:
    """Attention with a causal mask that is aligned with the last key of each piece, one piece at a time."""
    results = []
    bounds = [each.tolist() for each in (pieces.cu_seqlens_q, pieces.cu_seqlens_kv)]
    for first, end, first_key, end_key in zip(
        bounds[0][:-1], bounds[0][1:], bounds[1][:-1], bounds[1][1:], strict=True
    ):
        assert end - first <= pieces.max_seqlen_q
        assert end_key - first_key <= pieces.max_seqlen_kv
        q, k, v = (
            x.transpose(0, 1) for x in (query[first:end], key[first_key:end_key], value[first_key:end_key])
        )
        mask = torch.ones(end - first, end_key - first_key, dtype=torch.bool).tril(
            end_key - first_key - (end - first)
        )
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        results.append(attended.transpose(0, 1).flatten(1))
    assert key.shape[0] == bounds[1][-1]
    return torch.cat(results)


def attend_with_transformer_engine(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: packing.Pieces
) -> torch.Tensor:
    from transformer_engine.pytorch import DotProductAttention

    attention = DotProductAttention(
        query.shape[1], query.shape[2], num_gqa_groups=key.shape[1], attention_dropout=0.0
    )
    on_gpu = [x.to("cuda", torch.bfloat16) for x in (query, key, value)]
    pieces = dataclasses.replace(
        pieces, cu_seqlens_q=pieces.cu_seqlens_q.cuda(), cu_seqlens_kv=pieces.cu_seqlens_kv.cuda()
    )
    return attention(*on_gpu, **pieces.arguments()).to(query)


@pytest.mark.parametrize(
    ("attend", "tolerance"),
    [
        pytest.param(attend_by_piece, 1e-7, id="by-piece"),
        pytest.param(
            attend_with_transformer_engine,
            2e-2,
            id="transformer-engine",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(
                    not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None,
                    reason="needs a CUDA device and Transformer Engine",
                ),
            ],
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(10, 54), (64,), (1, 1, 30, 32), (8,) * 8])
def test_packed_attention_is_masked_attention(
    size: int,
    lengths: tuple[int, ...],
    attend: packing.Attend,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = torch.tensor([sample(*lengths), sample(33, 31)])
    boundaries = documents.boundaries(documents.first_tokens(tokens, EOD))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(LENGTH, 2, heads, 64, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    mask = core._mask(LENGTH, 0, 1, None, tuple(boundaries.tolist()), torch.float64, torch.device("cpu"))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (query, key, value)), attn_mask=mask, enable_gqa=True
    )
    expected = expected.permute(2, 0, 1, 3).flatten(2)
    order = [zigzag_positions(LENGTH, rank, size) for rank in range(size)]
    monkeypatch.setattr(packing, "gather_from_sequence_parallel_region", lambda x, group: everything[id(x)])
    found = torch.empty_like(expected)
    for rank, positions in enumerate(order):
        parts = [x[positions].contiguous() for x in (query, key, value)]
        everything = {
            id(part): whole[torch.cat(order)] for part, whole in zip(parts[1:], (key, value), strict=True)
        }
        group: Any = Rank(rank, size)
        found[positions] = packing.attend_packed(*parts, boundaries, group, attend)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((each * weights).sum(), (query, key, value)) for each in (found, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=4 * tolerance)


@pytest.fixture
def chunk() -> Iterator[torch.nn.Module]:
    """A Llama on one rank, with the trainer's attention for CPUs."""
    _, chunk = build_chunk(LLAMA | {"padded_vocab_size": 1024, "vocab_size": 1000})
    collection = ProcessGroupCollection.use_mpu_process_groups()
    initialize_by_name(chunk, 1, 0.02, LLAMA["num_layers"], collection)
    yield chunk
    groups.finalize()


class TEAttention(torch.nn.Module):
    """Transformer Engine's attention, in torch, with the constructor and the forward pass that the trainer uses."""

    def __init__(self, config: Any, **arguments: Any) -> None:
        super().__init__()
        self.exchange: tuple[Any, ...] = ("by default",)

    def set_context_parallel_group(self, *exchange: Any) -> None:
        self.exchange = exchange

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any) -> Any:
        assert self.exchange == (None, None, None)
        assert arguments.pop("qkv_format") == "thd"
        assert arguments.pop("attn_mask_type") == "padding_causal"
        return attend_by_piece(query, key, value, packing.Pieces(**arguments, keys=()))


@pytest.mark.process
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_core_gives_packed_attention_the_boundaries(
    recompute: str | None, chunk: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.extensions import transformer_engine

    class CoreTEAttention(TEAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("Core's own forward pass is not used")

    monkeypatch.setattr(transformer_engine, "TEDotProductAttention", CoreTEAttention)
    monkeypatch.delitem(sys.modules, "trainer.model.packed_attention", raising=False)
    from trainer.model.packed_attention import PackedAttention

    tokens = torch.tensor([sample(10, 54), sample(33, 31)])
    boundaries = documents.boundaries(documents.first_tokens(tokens, EOD))
    positions = torch.arange(LENGTH).expand(2, -1)
    expected = chunk(tokens, positions, boundaries)
    expected.sum().backward()
    gradient = chunk.embedding.word_embeddings.weight.grad.clone()
    chunk.zero_grad()

    for layer in chunk.decoder.layers:
        attention = layer.self_attention
        collection = ProcessGroupCollection.use_mpu_process_groups()
        attention.core_attention = PackedAttention(chunk.config, pg_collection=collection)
        attention.checkpoint_core_attention = recompute == "selective"
    if recompute == "full":
        chunk.config.recompute_granularity, chunk.config.recompute_method = "full", "uniform"
        chunk.config.recompute_num_layers = 2
    custom.refuse_wrong_parts(chunk, separate_documents=True)
    chunk.train()
    found = chunk(tokens, positions, boundaries)
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    rounding = 1e-5 * float(gradient.abs().max())
    torch.testing.assert_close(chunk.embedding.word_embeddings.weight.grad, gradient, rtol=0, atol=rounding)


@pytest.mark.parametrize("place", ["self_attention.core_attention", "self_attention"])
def test_an_attention_that_ignores_boundaries_is_refused(place: str, chunk: torch.nn.Module) -> None:
    custom.refuse_wrong_parts(chunk, separate_documents=True)
    chunk.decoder.layers[1].set_submodule(place, torch.nn.Identity())
    custom.refuse_wrong_parts(chunk, separate_documents=False)
    with pytest.raises(TrainerError, match="Identity does not separate documents"):
        custom.refuse_wrong_parts(chunk, separate_documents=True)


def test_without_boundaries_each_sample_is_one_document() -> None:
    query, key, value = (torch.randn(16, 3, 2, 8) for _ in range(3))
    alone: Any = Rank(0, 1)
    found = packing.attend_packed(query, key, value, None, alone, attend_by_piece)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(found, expected.permute(2, 0, 1, 3).flatten(2))
