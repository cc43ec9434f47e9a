"""Documents that do not see each other: masks, positions and losses, at every layout."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from tests.trainer.document_runs import CP2, LAYOUTS, LENGTH, SEPARATE, TP2_SP, Rank, documents_config, sample
from tests.trainer.forked import run_ranks
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
from trainer.contract.config import BlendConfig, TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.model.batch_size import Batch
from trainer.data import documents, loader
from trainer.data.microbatch import MicroBatch
from trainer.model.attention import core

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults

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
        mask = core._mask(
            LENGTH, 0, 1, None, tuple(packed.boundaries.tolist()), torch.float32, torch.device("cpu")
        )
        assert torch.equal(mask[0, 0] == -math.inf, hidden[0])
    else:
        assert packed.boundaries is None


def test_a_window_and_documents_both_hide_keys() -> None:
    boundaries = documents.boundaries(documents.first_tokens(torch.tensor([sample(6, 10)]), EOD))
    mask = core._mask(16, 0, 1, 4, tuple(boundaries.tolist()), torch.float32, torch.device("cpu"))
    visible = [set(numpy.flatnonzero(row == 0).tolist()) for row in mask[0, 0].numpy()]
    assert visible[5] == {2, 3, 4, 5}
    assert visible[7] == {6, 7}
    assert visible[12] == {9, 10, 11, 12}


# Training


@pytest.fixture(scope="module")
def single(short_documents: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(documents_config(short_documents, tmp_path_factory.mktemp("single")))


@pytest.fixture(scope="module")
def single_with_window(short_documents: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(documents_config(short_documents, tmp_path_factory.mktemp("window"), QWEN))


def assert_same_curve(found: Run, reference: Run) -> None:
    numpy.testing.assert_allclose(found.steps, reference.steps, rtol=5e-7, atol=0)


@pytest.mark.process
@pytest.mark.parametrize(
    ("layout", "world_size"),
    # test_mtp_documents.py trains at PP2, and test_a_document_does_not_see_its_neighbors has logits of CP2
    [LAYOUTS[0], *(pytest.param(*each.values, id=each.id, marks=pytest.mark.slow) for each in LAYOUTS[1:])],
)
def test_documents_train_alike_at_every_layout(
    layout: dict[str, Any], world_size: int, short_documents: str, tmp_path: Path, single: Run
) -> None:
    config = documents_config(short_documents, tmp_path)
    assert_same_curve(finished(config | {"world_size": world_size, "parallelism": layout}), single)


@pytest.mark.slow  # the logits of qwen-CP2 below
@pytest.mark.process
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [pytest.param(TP2_SP | CP2, 4, id="TP2xCP2"), LAYOUTS[2]],
)
def test_documents_with_a_window_train_alike(
    layout: dict[str, Any], world_size: int, short_documents: str, tmp_path: Path, single_with_window: Run
) -> None:
    config = documents_config(short_documents, tmp_path, QWEN)
    assert_same_curve(
        finished(config | {"world_size": world_size, "parallelism": layout}), single_with_window
    )


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
        pytest.param(MLA, CP2, id="MLA-CP2", marks=pytest.mark.slow),
        pytest.param(MOE, CP2, id="MoE-CP2", marks=pytest.mark.slow),
        pytest.param(MOE, {"expert_model_parallel_size": 2}, id="MoE-EP2", marks=pytest.mark.slow),
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
        pytest.param({"micro_batch_size": 4}, id="microbatch"),
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
        config = documents_config(short_documents, tmp_path / name, eod_id=EOD if data else None, **data)
        config["training"]["train_iters"] = 1
        config["optimizer"]["lr_warmup_iters"] = 0
        return finished(config).steps[0][1]

    losses = [first_loss("none"), *(first_loss(flag, **{flag: True}) for flag in FLAGS)]
    assert len(set(losses)) == len(losses)


@pytest.mark.process
def test_a_resumed_run_repeats_the_losses_exactly(short_documents: str, tmp_path: Path, single: Run) -> None:
    config = documents_config(short_documents, tmp_path)
    config["training"]["train_iters"] = 2
    config["optimizer"]["lr_decay_iters"] = 4
    finished(config)
    config["training"]["train_iters"] = 4
    assert finished(config).steps == single.steps

    config["data"]["eod_mask_loss"] = False
    config["training"]["train_iters"] = 5
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

LATENT = DEEPSEEK | {"mtp_num_layers": None}


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
    ("model", "layout", "world_size"),
    [
        pytest.param(GPT, {}, 1, id="gpt"),
        pytest.param(QWEN, {}, 1, id="qwen"),
        pytest.param(LATENT, {}, 1, id="latent"),
        pytest.param(LATENT, CP2, 2, id="latent-CP2"),
        *(pytest.param(QWEN, *each.values, id=f"qwen-{each.id}", marks=each.marks) for each in LAYOUTS),
    ],
)
def test_a_document_does_not_see_its_neighbors(
    layout: dict[str, Any], world_size: int, model: dict[str, Any], short_documents: str, tmp_path: Path
) -> None:
    """The samples are A B, A B', A C D, B A and A alone, where A, B and B' have 24, 40 and 40 tokens."""
    a, b, other_b = sample(24), sample(40), sample(40, seed=1)
    samples = [a + b, a + other_b, a + sample(8, 32), b + a]
    config = documents_config(short_documents, tmp_path / "run", model)
    config |= {"world_size": world_size, "parallelism": layout}
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


@pytest.mark.process
def test_loader_processes_hand_over_the_microbatches_that_were_collated_one_by_one() -> None:
    """Two samples each: with boundaries in different places, in the last load fewer, and with a batch that grows."""

    def microbatches(num_workers: int) -> list[MicroBatch]:
        data = SEPARATE | {"mock": True, "num_workers": num_workers, "eod_id": EOD}
        document = gpt_config("x", Path("x")) | {"data": data}
        document["training"] |= {"micro_batch_size": 2, "global_batch_size": 8}
        config: Any = resolve(configuration.from_dict(TrainerConfig, document, "test"))
        groups: Any = SimpleNamespace(dp=Rank(0, 1), cp=Rank(1, 2))
        return list(loader.micro_batches(dataset, config, groups, [Batch(0, 4), *steps]))

    generator = numpy.random.default_rng(1)
    steps = [Batch(first, 8) for first in range(4, 44, 8)]
    dataset: Any = []
    for _ in range(44):
        tokens = torch.tensor(generator.choice([1, 2, 3, EOD], LENGTH))
        mask = torch.tensor(generator.integers(0, 2, LENGTH))
        dataset.append({"tokens": tokens, "labels": tokens.roll(-1), "loss_mask": mask})
    together, alone = microbatches(1), microbatches(0)
    assert len(together) == len(alone) == 22  # loads of 8, 8 and 6
    for one, other in zip(together, alone, strict=True):
        for name in ("tokens", "labels", "loss_mask", "position_ids", "boundaries"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        assert one.tokens.is_contiguous()


def test_long_samples_are_handed_over_one_by_one() -> None:
    def number(**model: int) -> int:
        document = gpt_config("x", Path("x")) | {"data": {"mock": True}}
        document["model"] |= model
        return loader.micro_batches_per_load(configuration.from_dict(TrainerConfig, document, "test"))

    assert (number(), number(seq_length=8192), number(seq_length=131072)) == (8, 2, 1)
