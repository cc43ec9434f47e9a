"""Documents that do not see each other: masks, positions and losses, at every layout."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.process_groups_config import ProcessGroupCollection

from tests.trainer.forked import run_ranks
from tests.trainer.inference.models import build_chunk
from tests.trainer.runs import (
    DEEPSEEK,
    EOD,
    GPT,
    LLAMA,
    QWEN,
    Run,
    environment,
    finished,
    free_port,
    gpt_config,
    run,
)
from trainer.contract import config as configuration
from trainer.contract.batch_size import Batch
from trainer.contract.config import BlendConfig, TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.contract.resolve import resolve
from trainer.data import documents, loader
from trainer.distributed import groups
from trainer.distributed.sequence import zigzag_positions
from trainer.model import custom, layers, packing
from trainer.model.initialization import initialize_by_name

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults

LENGTH = 64
SEPARATE = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True, "eod_id": EOD}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
LAYOUTS = [
    pytest.param(TP2_SP, 2, id="TP2+SP"),
    pytest.param(PP2, 2, id="PP2"),
    pytest.param(CP2, 2, id="CP2"),
    pytest.param(PP2 | {"virtual_pipeline_model_parallel_size": 2}, 2, id="VPP2", marks=pytest.mark.slow),
    pytest.param(PP2 | CP2, 4, id="PP2xCP2", marks=pytest.mark.slow),
    pytest.param(TP2_SP | CP2, 4, id="TP2xCP2", marks=pytest.mark.slow),
]


def sample(*lengths: int, seed: int = 0) -> list[int]:
    """Documents of these lengths with random tokens. Each ends with the end-of-document token."""
    random = numpy.random.default_rng([seed, *lengths])
    return [token for length in lengths for token in [*random.integers(0, 500, length - 1).tolist(), EOD]]


def documents_config(
    prefix: str, directory: Path, model: dict[str, Any] = GPT, **data: Any
) -> dict[str, Any]:
    config = gpt_config(prefix, directory, model)
    config["data"] |= data or SEPARATE
    config["optimizer"]["lr"] = 1e-3  # does not amplify rounding as 1e-2 does
    return config


# What Megatron-LM does

FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


@pytest.mark.parametrize("lengths", [(64,), (10, 54), (1, 1, 30, 32), (63, 1), (20, 70)])
@pytest.mark.parametrize("flags", [(i & 1, i & 2, i & 4) for i in range(8)])
def test_masks_and_positions_are_those_of_megatron_lm(
    flags: tuple[int, int, int], lengths: tuple[int, ...]
) -> None:
    tokens = torch.tensor(sample(*lengths)[:LENGTH])
    reset_position_ids, reset_attention_mask, eod_mask_loss = map(bool, flags)
    hidden, loss_mask, position_ids = _get_ltor_masks_and_position_ids(
        tokens, EOD, reset_position_ids, reset_attention_mask, eod_mask_loss, True
    )
    data = BlendConfig(eod_id=EOD, **dict(zip(FLAGS, map(bool, flags), strict=True)))
    item = {"tokens": tokens, "labels": tokens.roll(-1), "loss_mask": torch.ones(LENGTH)}
    packed = loader._packed([item], data, None)
    assert torch.equal(packed.fields[2][0].float(), loss_mask)
    if reset_position_ids:
        assert torch.equal(packed.fields[3][0], position_ids)
    else:
        assert len(packed.fields) == 3
    if reset_attention_mask:
        assert packed.boundaries is not None
        mask = layers._mask(
            LENGTH, 0, 1, None, tuple(packed.boundaries.tolist()), torch.float32, torch.device("cpu")
        )
        assert torch.equal(mask[0, 0] == -math.inf, hidden[0])
    else:
        assert packed.boundaries is None


def test_a_window_and_documents_both_hide_keys() -> None:
    boundaries = documents.boundaries(documents.first_tokens(torch.tensor([sample(6, 10)]), EOD))
    mask = layers._mask(16, 0, 1, 4, tuple(boundaries.tolist()), torch.float32, torch.device("cpu"))
    visible = [set(numpy.flatnonzero(row == 0).tolist()) for row in mask[0, 0].numpy()]
    assert visible[5] == {2, 3, 4, 5}
    assert visible[7] == {6, 7}
    assert visible[12] == {9, 10, 11, 12}


# Training


@pytest.fixture(scope="module")
def single(short_documents: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(documents_config(short_documents, tmp_path_factory.mktemp("single")))


@pytest.fixture(scope="module")
def single_qwen(short_documents: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(documents_config(short_documents, tmp_path_factory.mktemp("qwen"), QWEN))


def assert_same_curve(found: Run, reference: Run) -> None:
    numpy.testing.assert_allclose(found.steps, reference.steps, rtol=5e-7, atol=0)


@pytest.mark.process
@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
def test_documents_train_alike_at_every_layout(
    layout: dict[str, Any], world_size: int, short_documents: str, tmp_path: Path, single: Run
) -> None:
    config = documents_config(short_documents, tmp_path)
    assert_same_curve(finished(config | {"world_size": world_size, "parallelism": layout}), single)


@pytest.mark.process
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [pytest.param(TP2_SP | CP2, 4, id="TP2xCP2", marks=pytest.mark.slow), LAYOUTS[2]],
)
def test_documents_with_a_window_train_alike(
    layout: dict[str, Any], world_size: int, short_documents: str, tmp_path: Path, single_qwen: Run
) -> None:
    config = documents_config(short_documents, tmp_path, QWEN)
    assert_same_curve(finished(config | {"world_size": world_size, "parallelism": layout}), single_qwen)


MOE = LLAMA | {"num_moe_experts": 4, "moe_router_topk": 2}
MLA = LLAMA | {
    "num_query_groups": 4,
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
}


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(MLA, TP2_SP, id="MLA-TP2+SP", marks=pytest.mark.slow),
        pytest.param(MLA, CP2, id="MLA-CP2"),
        pytest.param(MOE, CP2, id="MoE-CP2", marks=pytest.mark.slow),
        pytest.param(MOE, {"expert_model_parallel_size": 2}, id="MoE-EP2"),
    ],
)
def test_documents_with_latent_attention_and_experts_train_alike(
    model: dict[str, Any], layout: dict[str, Any], short_documents: str, tmp_path: Path
) -> None:
    alone, shared = (
        documents_config(short_documents, tmp_path / name, model) for name in ("alone", "shared")
    )
    assert_same_curve(finished(shared | {"world_size": 2, "parallelism": layout}), finished(alone))


@pytest.mark.process
@pytest.mark.parametrize(
    "training",
    [
        pytest.param({"micro_batch_size": 2}, id="microbatch"),
        pytest.param({"recompute_granularity": "selective"}, id="selective"),
        pytest.param(
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
            id="full",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_documents_train_alike_with_other_settings(
    training: dict[str, Any], short_documents: str, tmp_path: Path, single: Run
) -> None:
    config = documents_config(short_documents, tmp_path)
    config["training"] |= training
    assert_same_curve(finished(config), single)


@pytest.mark.process
def test_each_key_changes_the_losses(short_documents: str, tmp_path: Path) -> None:
    def first_loss(name: str, **data: Any) -> float:
        config = documents_config(short_documents, tmp_path / name, eod_id=EOD, **data)
        config["training"]["train_iters"] = 1
        config["optimizer"]["lr_warmup_iters"] = 0
        return finished(config).steps[0][1]

    losses = [first_loss("none"), *(first_loss(flag, **{flag: True}) for flag in FLAGS)]
    assert len(set(losses)) == len(losses)


@pytest.mark.process
def test_a_resumed_run_repeats_the_losses_exactly(short_documents: str, tmp_path: Path, single: Run) -> None:
    config = documents_config(short_documents, tmp_path)
    config["training"]["train_iters"] = 3
    config["optimizer"]["lr_decay_iters"] = 6
    finished(config)
    config["training"]["train_iters"] = 6
    assert finished(config).steps == single.steps

    config["data"]["eod_mask_loss"] = False
    config["training"]["train_iters"] = 7
    refused = run(config)
    assert refused.statuses == (2,)
    assert "data.eod_mask_loss: true -> false" in refused.log


@pytest.mark.process
def test_a_corpus_with_another_end_of_document_is_refused(short_documents: str, tmp_path: Path) -> None:
    config = documents_config(short_documents, tmp_path)
    config["data"]["eod_id"] = 998
    refused = run(config)
    assert refused.statuses == (2,)
    assert "ends with the token 998 (data.eod_id); the first ends with 999" in refused.log


# Logits


def logits(config: dict[str, Any], directory: Path, samples: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits [b, S, vocabulary] of samples at the layout of `config`."""
    directory.mkdir(parents=True)
    files = [directory / "config.json", directory / "samples.json", directory / "found"]
    files[0].write_text(json.dumps(config))
    files[1].write_text(json.dumps(samples))
    files[2].mkdir()
    port = free_port()
    environments = [environment(rank, config["world_size"], port) for rank in range(config["world_size"])]
    for done in run_ranks(["-m", "tests.trainer.logits", *map(str, files)], environments):
        assert done.returncode == 0, done.stderr
    parts = [torch.load(path) for path in sorted(files[2].glob("*.pt"))]
    size = sum(len(part["positions"]) for part in parts if part["tp"] == 0)
    rows = [
        torch.cat([part["logits"] for part in parts if torch.equal(part["positions"], positions)], dim=2)
        for positions in (part["positions"] for part in parts if part["tp"] == 0)
    ]
    order = torch.cat([part["positions"] for part in parts if part["tp"] == 0])
    assert size == len(order.unique())
    return torch.cat(rows, dim=1)[:, order.argsort()]


@pytest.mark.process
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(GPT, id="gpt"),
        pytest.param(QWEN, id="qwen"),
        pytest.param(DEEPSEEK | {"mtp_num_layers": None}, id="latent"),
    ],
)
@pytest.mark.parametrize(("layout", "world_size"), [pytest.param({}, 1, id="one"), *LAYOUTS])
def test_a_document_does_not_see_its_neighbors(
    layout: dict[str, Any], world_size: int, model: dict[str, Any], short_documents: str, tmp_path: Path
) -> None:
    """The samples are A B, A B', A C D, B A and A alone, where A, B and B' have 24, 40 and 40 tokens."""
    a, b, other_b = sample(24), sample(40), sample(40, seed=1)
    samples = [a + b, a + other_b, a + sample(8, 32), b + a]
    config = documents_config(short_documents, tmp_path / "run", model)
    config |= {"world_size": world_size, "parallelism": layout}
    config["training"] |= {"micro_batch_size": 2}
    together = logits(config, tmp_path / "together", [[*each, 0] for each in samples])
    assert torch.equal(together[1, :24], together[0, :24])
    assert torch.equal(together[2, :24], together[0, :24])
    assert not torch.allclose(together[1, 24:], together[0, 24:], atol=1e-2)

    config["model"]["max_position_embeddings"] = LENGTH
    config["model"]["seq_length"] = 24
    config |= {"world_size": 1, "parallelism": {}}
    config["training"] |= {"global_batch_size": 1, "micro_batch_size": 1}
    alone = logits(config, tmp_path / "alone", [[*a, 0]])
    rounding = 1e-6 * float(alone.abs().max())  # other kernels for other lengths
    numpy.testing.assert_allclose(together[0, :24], alone[0], rtol=0, atol=rounding)
    numpy.testing.assert_allclose(together[3, 40:], alone[0], rtol=0, atol=rounding)


# Packing for Transformer Engine


class Rank:
    """A context-parallel rank, in place of its process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def test_the_chunks_of_a_rank_share_a_loader() -> None:
    fields = {name: torch.tensor(sample(64)) for name in ("tokens", "labels", "loss_mask")}
    config: Any = resolve(
        configuration.from_dict(
            TrainerConfig,
            gpt_config("x", Path("x")) | {"data": {"mock": True, "num_workers": 0} | SEPARATE},
            "test",
        )
    )
    groups: Any = SimpleNamespace(dp=Rank(0, 1), cp=Rank(0, 1))
    chunks: Any = [None, None]
    dataset: Any = [fields, fields]
    first, second = loader.data_iterators(chunks, dataset, config, groups, [Batch(0, 2)])
    assert first is not None
    assert second is not None
    assert all(one is other for one, other in zip(first, second, strict=True))


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
    mask = layers._mask(LENGTH, 0, 1, None, tuple(boundaries.tolist()), torch.float64, torch.device("cpu"))
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
