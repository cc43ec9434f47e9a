"""Texts are predicted as documents were in training: the loss is that of training's own validation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.trainer.chat_pairs import chat_config, random_chats, write_chats
from tests.trainer.document_runs import LENGTH, SEPARATE, documents_config, sample
from tests.trainer.evaluate import parts
from tests.trainer.runs import DEEPSEEK_V3, EOD, GPT, QWEN, Run, finished
from trainer.contract.config import BlendConfig
from trainer.contract.errors import TrainerError
from trainer.contract.evaluation import EvaluationSettings, TextResult
from trainer.distributed import groups
from trainer.inference import generate, load_model
from trainer.metrics.console import Log

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore"),  # Megatron-Core warns about its own defaults
]

DOCUMENTS = [24, 40, 64, 10, 54, 128, 1, 1, 30, 32, 63, 1, 200, 56, 1]
"""Lengths of the documents of a text. The windows of each are parts of training's samples of 64 tokens."""

UNPADDED = {"vocab_size": 1024}
"""Training's loss includes the padding of the vocabulary, so there is none."""


def write_pair(prefix: Path, *documents: list[int]) -> str:
    """A pair with one entry in its index, since Core shuffles them. The tokens tell where documents end."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    tokens = numpy.array([token for document in documents for token in document])
    builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def documents_of_text() -> list[list[int]]:
    return [sample(length, seed=number) for number, length in enumerate(DOCUMENTS)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a text of eleven samples and one more token, for the last target."""
    assert sum(DOCUMENTS) == 11 * LENGTH + 1
    return write_pair(tmp_path_factory.mktemp("text") / "text", *documents_of_text())


def trained(corpus: str, text: str, directory: Path, model: dict[str, Any], **data: Any) -> Run:
    """A run of two steps that ends with the loss of all samples of the text."""
    config = documents_config(corpus, directory, model | UNPADDED, **data)
    del config["data"]["datasets"], config["data"]["split"]
    config["data"] |= {"train": [{"prefix": corpus}], "valid": [{"prefix": text}]}
    config["training"] |= {"train_iters": 2, "eval_interval": 2, "eval_iters": 11}
    config["training"] |= {"micro_batch_size": 1, "global_batch_size": 1}
    config["optimizer"]["lr"] = 1e-2
    return finished(config)


def evaluated(run: Run, run_dir: Path, text: str, world_size: int = 1, **settings: Any) -> TextResult:
    data = [{"name": "text", "prefix": text}]
    config = parts.configuration(run.checkpoints, run_dir, world_size, data=data, **settings)
    [result] = parts.evaluated(config, iteration=2)[0].data
    return result


@pytest.fixture(scope="module")
def separate(short_documents: str, text: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(short_documents, text, tmp_path_factory.mktemp("separate"), GPT)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        pytest.param(GPT, {"eod_mask_loss": True}, id="ends", marks=pytest.mark.slow),
        pytest.param(GPT, {"eod_mask_loss": True, "reset_position_ids": True}, id="positions"),
        pytest.param(
            QWEN,
            {"eod_mask_loss": True, "reset_attention_mask": True},
            id="separate-window",
            marks=pytest.mark.slow,
        ),
        pytest.param(DEEPSEEK_V3, SEPARATE, id="separate-experts-latents"),
    ],
)
def test_the_loss_is_that_of_validation_in_training(
    model: dict[str, Any], data: dict[str, Any], short_documents: str, text: str, tmp_path: Path
) -> None:
    run = trained(short_documents, text, tmp_path / "run", model, **data | {"eod_id": EOD})
    [(_, _, loss)] = run.evaluations
    result = evaluated(run, tmp_path, text)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.tokens == sum(DOCUMENTS) - len(DOCUMENTS)
    assert result.separate_documents is bool(data.get("reset_attention_mask"))


def test_the_loss_of_chats_is_that_of_validation_in_training(text: str, tmp_path: Path) -> None:
    """Only answers are predicted, and chats do not see each other. A text has no loss mask, and no border of chats."""
    chats = random_chats(12, seed=5)
    held_out = write_chats(tmp_path / "held-out", chats)
    config = chat_config(write_chats(tmp_path / "chats", random_chats(20)), tmp_path / "run", GPT | UNPADDED)
    config["data"] |= {"valid": [{"prefix": held_out}], "sft_packing": False}
    config["training"] |= {"train_iters": 2, "eval_interval": 2, "eval_iters": len(chats)}
    config["training"] |= {"micro_batch_size": 1, "global_batch_size": 1}
    run = finished(config)
    [(_, _, loss)] = run.evaluations
    for world_size in (1, 2):
        result = evaluated(run, tmp_path / str(world_size), held_out, world_size)
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert result.tokens == sum(sum(mask[1:]) for _, mask in chats)
        assert result.answers_only
    of_text = evaluated(run, tmp_path / "text", text)
    assert not of_text.answers_only
    assert of_text.separate_documents
    output = {"name": "held-out.mask", "size": 1, "sha256": "0" * 64, "modified_ns": None}
    (tmp_path / "held-out.record.json").write_text(json.dumps({"outputs": [output]}))
    with pytest.raises(AssertionError, match=r"held-out\.mask: its SHA-256 is not the one"):
        evaluated(run, tmp_path / "changed", held_out)


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        pytest.param(1, {"batch_size": 1}, id="one"),
        pytest.param(2, {}, id="replicas"),
        pytest.param(2, {"tensor_model_parallel_size": 2}, id="TP2", marks=pytest.mark.slow),
        pytest.param(2, {"pipeline_model_parallel_size": 2}, id="PP2"),
    ],
)
def test_every_layout_computes_the_loss_of_validation(
    world_size: int, sizes: dict[str, int], separate: Run, text: str, tmp_path: Path
) -> None:
    [(_, _, loss)] = separate.evaluations
    assert evaluated(separate, tmp_path, text, world_size, **sizes).loss == pytest.approx(loss, rel=1e-6)


def test_a_text_without_ends_of_documents_is_refused(separate: Run, corpus: str, tmp_path: Path) -> None:
    data = [{"name": "text", "prefix": corpus}]
    statuses, log = parts.finish(parts.configuration(separate.checkpoints, tmp_path, data=data))
    assert statuses == [2]
    assert f"evaluation.data[0]: {corpus}: none of its first 100 documents ends with the token 999" in log
    assert "Tokenize the text with it" in log


@pytest.fixture
def finalized() -> Iterator[None]:
    yield
    groups.finalize()


@pytest.mark.usefixtures("finalized")
def test_each_document_is_predicted_alone(separate: Run, tmp_path: Path) -> None:
    """Documents of any length and order, in the pair as many entries."""
    lengths = [2, 1, 65, 7, 64, 300, 128, 3, 66]
    documents = [sample(length, seed=number) for number, length in enumerate(lengths)]
    model, _ = load_model(separate.directory, tokenizer="bytes", device="cpu")
    losses = [loss for document in documents for loss in losses_alone(model, document)]
    forwards = evaluated(separate, tmp_path / "forwards", write_pair(tmp_path / "text", *documents))
    assert forwards.tokens == len(losses) == sum(lengths) - len(lengths)
    assert forwards.loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-6)
    reverse = write_pair(tmp_path / "reverse", *reversed(documents))
    assert evaluated(separate, tmp_path / "backwards", reverse).loss == pytest.approx(forwards.loss, rel=1e-6)


def losses_alone(model: Any, document: list[int]) -> list[float]:
    """Loss of each token of a document after the first, given those before it in its window of 64 tokens."""
    found: list[float] = []
    for first in range(0, len(document) - 1, LENGTH):
        window = document[first : first + LENGTH + 1]
        targets = torch.tensor(window[1:])
        found += torch.nn.functional.cross_entropy(
            model.logits(window[:-1]), targets, reduction="none"
        ).tolist()
    return found


def harness(model: Any, tokenizer: Any) -> Any:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'hpcgen[eval]')")
    from trainer.evaluate.harness import HarnessModel
    from trainer.evaluate.replicas import Replicas

    replicas = Replicas(model, tokenizer, 4, Log(False, progress=False))
    return HarnessModel(replicas, EvaluationSettings())


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, 0, metadata=("task", 0, 1)) for given in arguments]


TEXTS = ["a", "in the beginning", "x = 1"]


def log_likelihood(model: Any, context: list[int], tokens: list[int]) -> float:
    return -math.fsum(losses_alone(model, [*context, *tokens])[len(context) - 1 :])


@pytest.mark.usefixtures("finalized")
def test_texts_without_context_begin_as_documents_did_in_training(separate: Run) -> None:
    model, tokenizer = load_model(separate.directory, tokenizer="bytes", device="cpu")
    texts = [list(text.encode()) for text in TEXTS]
    end, rolling = [tokenizer.eod_id], requests("loglikelihood_rolling", *((text,) for text in TEXTS))

    found = harness(model, tokenizer).loglikelihood_rolling(rolling)
    assert found == pytest.approx([log_likelihood(model, each[:1], each[1:]) for each in texts], rel=1e-6)

    model.config = replace(model.config, data=replace(model.config.data, eod_mask_loss=False))
    found = harness(model, tokenizer).loglikelihood_rolling(rolling)
    expected = [
        log_likelihood(model, end, each[:1]) + log_likelihood(model, each[:1], each[1:]) for each in texts
    ]
    assert found == pytest.approx(expected, rel=1e-6)
    choices = harness(model, tokenizer).loglikelihood(
        requests("loglikelihood", *(("", text) for text in TEXTS[:2]))
    )
    assert [value for value, _ in choices] == pytest.approx(expected[:2], rel=1e-6)

    model.config = replace(model.config, data=BlendConfig(mock=True))
    found = harness(model, tokenizer).loglikelihood_rolling(rolling)
    assert found == pytest.approx([log_likelihood(model, end, each) for each in texts], rel=1e-6)
    spaces = requests("loglikelihood", (" ", "text"), ("", " text"))
    one, other = harness(model, tokenizer).loglikelihood(spaces)
    assert one == other


@pytest.mark.usefixtures("finalized")
def test_what_was_not_trained_is_refused(separate: Run) -> None:
    model, tokenizer = load_model(separate.directory, tokenizer="bytes", device="cpu")
    with pytest.raises(TrainerError, match=r"prompt 2 is empty, but .* data.reset_attention_mask = true"):
        list(generate(model, tokenizer, ["a", ""]))
    lm = harness(model, tokenizer)
    with pytest.raises(TrainerError, match="has not learned how likely a first token is"):
        lm.loglikelihood(requests("loglikelihood", ("", "text")))
    with pytest.raises(TrainerError, match="a question of the task task is empty"):
        lm.generate_until(requests("generate_until", ("", {"until": ["."], "max_gen_toks": 2})))
