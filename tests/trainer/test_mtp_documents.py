"""Multi-token prediction (MTP) within separate documents: its losses, at every layout, and without other documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor

from tests.trainer.document_runs import CP2, LAYOUTS, PP2, documents_config, sample
from tests.trainer.inference.models import ONE
from tests.trainer.runs import DEEPSEEK_V3, EOD, LLAMA, Run, finished
from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.data import documents
from trainer.distributed import groups
from trainer.inference.groups import open_groups
from trainer.model import build
from trainer.model.core_config import transformer_config
from trainer.model.initialization import initialize_by_name
from trainer.model.kernels import TORCH
from trainer.model.multi_token import PredictingModel

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]  # Core warns about its own defaults

PREDICTING = LLAMA | {"mtp_num_layers": 2}


def numbers(result: Run) -> list[tuple[float, ...]]:
    """Main loss, losses of the MTP layers and gradient norm of each step."""
    names = ("loss", "mtp_1_loss", "mtp_2_loss", "grad_norm")
    return [tuple(event[name] for name in names) for event in result.events if event["event"] == "step"]


@pytest.fixture(scope="module")
def single(short_documents: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(documents_config(short_documents, tmp_path_factory.mktemp("single"), PREDICTING))


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param(*LAYOUTS[0].values, id="TP2+SP", marks=pytest.mark.slow),
        LAYOUTS[1],
        *(pytest.param(*each.values, id=each.id, marks=pytest.mark.slow) for each in LAYOUTS[2:]),
        pytest.param(
            PP2 | {"pipeline_model_parallel_layout": "Et*4|mmL"}, 2, id="PP2-layout", marks=pytest.mark.slow
        ),
        pytest.param(
            {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Et*3|tmm|L"},
            3,
            id="PP3-before-loss",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_all_losses_and_norms_are_those_of_a_single_process(
    layout: dict[str, Any], world_size: int, short_documents: str, tmp_path: Path, single: Run
) -> None:
    config = documents_config(short_documents, tmp_path, PREDICTING)
    result = finished(config | {"world_size": world_size, "parallelism": layout})
    numpy.testing.assert_allclose(numbers(result), numbers(single), rtol=5e-7)


@pytest.mark.parametrize(
    "training",
    [
        pytest.param({"micro_batch_size": 4}, id="microbatch", marks=pytest.mark.slow),
        pytest.param(
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            id="full",
        ),
    ],
)
def test_all_losses_and_norms_are_those_of_other_settings(
    training: dict[str, Any], short_documents: str, tmp_path: Path, single: Run
) -> None:
    config = documents_config(short_documents, tmp_path, PREDICTING)
    config["training"] |= training
    numpy.testing.assert_allclose(numbers(finished(config)), numbers(single), rtol=5e-7)


@pytest.mark.slow
def test_latent_attention_and_experts_train_alike(short_documents: str, tmp_path: Path) -> None:
    alone, shared = (
        documents_config(short_documents, tmp_path / name, DEEPSEEK_V3) for name in ("alone", "shared")
    )
    shared |= {"world_size": 2, "parallelism": CP2}
    numpy.testing.assert_allclose(numbers(finished(shared)), numbers(finished(alone)), rtol=5e-7)


# One sample


@pytest.fixture
def chunk(tmp_path: Path) -> Iterator[PredictingModel]:
    """A Llama with two MTP layers on one rank."""
    document = documents_config("/none", tmp_path, PREDICTING)
    config = resolve(configuration.from_dict(TrainerConfig, document, "test"))
    collection = open_groups(config, ONE)
    [chunk] = build.build_chunks(config, transformer_config(config, TORCH), collection, TORCH)
    assert isinstance(chunk, PredictingModel)
    initialize_by_name(chunk, 1, 0.1, PREDICTING["num_layers"], collection)
    yield chunk
    groups.finalize()


def mtp_losses(
    chunk: PredictingModel, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, list[float]]:
    """Losses [layer, s] of a sample that Core differentiates, and the sum and the number of each layer's."""
    sequence = torch.tensor([[*tokens, 0]])
    inputs, labels = sequence[:, :-1], sequence[:, 1:]
    found = []

    def recorded(hidden_states: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        found.append(losses[0].detach())
        return hidden_states

    monkeypatch.setattr(MTPLossAutoScaler, "apply", recorded)
    boundaries = documents.boundaries(documents.first_tokens(inputs, EOD))
    positions, mask = torch.arange(len(tokens))[None], (inputs != EOD).float()
    chunk(inputs, positions, boundaries, labels=labels, loss_mask=mask)
    weight = chunk.config.mtp_loss_scaling_factor / chunk.config.mtp_num_layers
    return torch.stack(found) / weight, torch.stack(chunk.losses()).tolist()


def test_a_loss_does_not_depend_on_other_documents(
    chunk: PredictingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples are A B, A B', B A and A alone, where A has 24 tokens, and B and B' 40."""
    a, b, other_b = sample(24), sample(40), sample(40, seed=1)
    with_b, with_other_b, after_b, alone = (
        mtp_losses(chunk, tokens, monkeypatch) for tokens in (a + b, a + other_b, b + a, a)
    )
    assert torch.equal(with_b[0][:, :24], with_other_b[0][:, :24])
    torch.testing.assert_close(after_b[0][:, 40:], alone[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(with_b[0][:, :24], alone[0], rtol=1e-6, atol=1e-6)
    for layer, row in enumerate(with_b[0], 1):
        last = 24 - layer - 1  # the first token whose target would be in the next document
        assert row[:last].all()
        assert not row[last:24].any()


def test_only_tokens_with_a_target_in_their_document_count(
    chunk: PredictingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer predicts from all tokens of a document but the last two, the second from all but three."""
    losses, (sum_1, number_1, sum_2, number_2) = mtp_losses(chunk, sample(1, 2, 24, 37), monkeypatch)
    assert (number_1, number_2) == (22 + 35, 21 + 34)
    assert [int(row.count_nonzero()) for row in losses] == [number_1, number_2]
    assert [sum_1, sum_2] == pytest.approx(losses.sum(1).tolist(), rel=1e-6)


def test_tokens_with_a_target_are_those_of_core_in_packed_sequences() -> None:
    tokens = torch.tensor([sample(1, 2, 30, 31), sample(33, 31)])
    boundaries = documents.boundaries(documents.first_tokens(tokens, EOD))
    after, mask = documents.tokens_after(boundaries, 2, 64), torch.ones(1, 128)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=boundaries)
    for layer in range(1, 4):
        mask, _ = roll_tensor(mask, shifts=-1, dims=-1, packed_seq_params=packed)
        assert torch.equal((after >= layer).float(), mask.view(2, 64))
