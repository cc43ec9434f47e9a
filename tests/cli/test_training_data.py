"""Pairs that training could not use are refused before a job is queued: documents without ends, and empty splits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Ended, hpcgen
from tests.data import pairs
from tests.runs import minimal_run, write_yaml

EOD = 256
SEPARATE = {"reset_attention_mask": True}
TRAINING = [("validate",), ("render", "train", "-o", "x.sh"), ("submit", "train", "--dry-run")]


def run_file(folder: Path, **data: Any) -> None:
    values = {"tokenizer": {"kind": "bytes"}, "split": "90,5,5", **data}
    write_yaml(folder / "run.yaml", minimal_run(data=values))


def ended(*words: str) -> Ended:
    return hpcgen(*words, "-c", "run.yaml")


@pytest.mark.parametrize("words", TRAINING, ids=" ".join)
def test_documents_without_ends_are_refused(workplace: Path, words: tuple[str, ...]) -> None:
    pairs.write(workplace / "ended", [[1, 2, EOD]] * 50)
    pairs.write(workplace / "endless", [[], *[[number % 200, 7] for number in range(300)]])
    run_file(workplace, datasets=[{"prefix": "ended"}, {"prefix": "endless"}], eod_mask_loss=True)
    found = ended(*words)
    assert found.status == 2
    assert (
        f"data.eod_mask_loss = true needs documents that end with the token {EOD}, but none of the first 99 of "
        f"{workplace}/endless does. The first ends with 7; set data.eod_id to the end-of-document token of the pair"
    ) in found.stderr


@pytest.mark.parametrize("words", TRAINING, ids=" ".join)
def test_texts_without_ends_of_documents_are_refused(workplace: Path, words: tuple[str, ...]) -> None:
    pairs.write(workplace / "pair", [[1, 2, EOD]] * 50)
    pairs.write(workplace / "text", [[1, 2]] * 3)
    run_file(workplace, datasets=[{"prefix": "pair"}], **SEPARATE)
    text = ("--set", "evaluation.data=[{name: text, prefix: text}]")
    every = ("--set", "checkpoint.save_interval=10", "--set", "evaluation.every=10")
    assert ended(*words, *text).status == 0
    found = ended(*words, *text, *every)
    assert found.status == 2
    assert f"none of the first 3 of {workplace}/text does. The first ends with 2" in found.stderr
    assert ended(*words, *text, *every, "--set", "data.reset_attention_mask=false").status == 0


@pytest.mark.parametrize(
    ("documents", "data"),
    [
        ([[1, 2, EOD]] * 50, SEPARATE),
        ([[1, 2, 9]] * 50, {**SEPARATE, "eod_id": 9}),
        ([[1, 2], *[[1, 2, EOD]] * 50], SEPARATE),
        ([[1, 2]] * 50, {}),
    ],
)
def test_documents_that_training_can_use(
    workplace: Path, documents: list[list[int]], data: dict[str, Any]
) -> None:
    pairs.write(workplace / "pair", documents)
    run_file(workplace, datasets=[{"prefix": "pair"}], **data)
    for words in TRAINING:
        assert ended(*words).status == 0


def test_the_last_sentence_ends_a_document(workplace: Path) -> None:
    pairs.write_sequences(workplace / "pair", [[[1, 2], [3, EOD]]] * 50)
    run_file(workplace, datasets=[{"prefix": "pair"}], **SEPARATE)
    assert ended("validate").status == 0
    pairs.write_sequences(workplace / "pair", [[[1, EOD], [3, 4]]] * 50)
    assert "none of the first 50 of" in ended("validate").stderr


@pytest.mark.parametrize("words", TRAINING, ids=" ".join)
def test_a_split_without_validation_documents_is_refused(workplace: Path, words: tuple[str, ...]) -> None:
    pairs.write(workplace / "small", [[1, 2]] * 5)
    pairs.write(workplace / "large", [[1, 2]] * 20)
    run_file(workplace, datasets=[{"prefix": "small"}, {"prefix": "large"}], split="99990,8,2")
    found = ended(*words)
    assert found.status == 2
    assert (
        "data.split = 99990,8,2 leaves no document for valid: the largest pair has 20 documents; use larger shares, "
        "such as 90,5,5, or use fewer pairs (data.corpus.num_output_files), or set training.eval_iters: 0"
    ) in found.stderr
    assert hpcgen(*words, "-c", "run.yaml", "--set", "data.split=90,5,5").status == 0
    assert hpcgen(*words, "-c", "run.yaml", "--set", "training.eval_iters=0").status == 0


def test_the_split_of_a_corpus_that_is_not_prepared_yet(workplace: Path) -> None:
    """The documents of a small corpus are counted, so that training is not queued after the stage that makes it."""
    (workplace / "text").mkdir()
    (workplace / "text/a.jsonl").write_text("".join(json.dumps({"text": "x"}) + "\n" for _ in range(20)))
    corpus = {"directory": "data", "source": {"directory": "text"}}
    run_file(workplace, corpus=corpus, split="98,1,1")
    assert ended("data", "plan").status == 0
    both = ("submit", "prepare", "train", "--dry-run")
    found = ended(*both)
    assert found.status == 2
    assert (
        "leaves no document for valid: the largest pair has 20 documents; use larger shares" in found.stderr
    )
    assert hpcgen(*both, "-c", "run.yaml", "--set", "data.split=90,5,5").status == 0
    assert ended("submit", "prepare", "--dry-run").status == 0
    few = hpcgen(
        *both, "-c", "run.yaml", "--set", "data.split=90,5,5", "--set", "data.corpus.num_output_files=20"
    )
    assert "the largest pair has 1 document; use fewer pairs" in few.stderr


def test_the_corpus_s_own_end_of_document_cannot_differ(workplace: Path) -> None:
    corpus = {"directory": "data", "source": {"directory": "text"}}
    run_file(workplace, corpus=corpus, eod_id=5, **SEPARATE)
    found = ended("validate")
    assert found.status == 2
    assert (
        "data.eod_id = 5 differs from the token 256 of data.tokenizer, with which the documents of"
        in found.stderr
    )
    assert hpcgen("validate", "-c", "run.yaml", "--set", "data.eod_id=256").status == 0
