"""Pairs that training could not use are refused before a job is queued: documents without ends, and empty splits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Ended, hpcgen
from tests.data import pairs
from tests.recorded_run import write_checkpoint
from tests.runs import minimal_run, write_yaml
from trainer.contract.files.hashing import file_sha256

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


@pytest.mark.parametrize("words", TRAINING, ids=" ".join)
def test_a_pair_that_is_not_as_recorded_is_refused(workplace: Path, words: tuple[str, ...]) -> None:
    pairs.write(workplace / "pair", [[1, 2, EOD]] * 50)
    mask = workplace / "pair.mask"
    mask.write_bytes(bytes([0, 1, 1]) * 50)
    files = [workplace / "pair.idx", mask]
    outputs = [
        {"name": file.name, "size": file.stat().st_size, "sha256": file_sha256(file)[0], "modified_ns": None}
        for file in files
    ]
    (workplace / "pair.record.json").write_text(json.dumps({"outputs": outputs}))
    run_file(workplace, datasets=[{"prefix": "pair"}], sft=True)
    assert ended(*words).status == 0
    mask.write_bytes(bytes([1, 0, 1]) * 50)
    found = ended(*words)
    assert found.status == 2
    assert (
        f"data.datasets[0].prefix = pair has {mask}, but its SHA-256 is not the one in its record in the "
        "same directory; make the pair again"
    ) in found.stderr


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


def made_with(folder: Path, prefix: str, tokenizer: str, *, by_0_2_0: bool = False) -> None:
    """A pair of 60 documents, with the record of this version or of an earlier one."""
    (folder / "text.jsonl").write_text('{"text": "Hello world"}\n' * 60)
    made = hpcgen("data", "tokenize", "text.jsonl", "--output-prefix", prefix, "--tokenizer", tokenizer)
    assert made.status == 0, made.stderr
    if by_0_2_0:
        record = folder / f"{prefix}.record.json"
        content = json.loads(record.read_text())
        del content["tokenizer"]
        record.write_text(json.dumps(content))


DIFFERENCES = {
    False: "its tokenizer has 50,257 ids, and data.tokenizer has 257",
    True: "its documents end with the id 50256, and those of data.tokenizer with 256",
}


@pytest.mark.parametrize("by_0_2_0", [False, True])
def test_pairs_of_another_tokenizer_are_refused(workplace: Path, by_0_2_0: bool) -> None:
    made_with(workplace, "own", "bytes", by_0_2_0=by_0_2_0)
    made_with(workplace, "other", "gpt2", by_0_2_0=by_0_2_0)
    pairs.write(workplace / "unknown", [[1, 2]] * 50)  # of Megatron-LM, for example
    for words in (*TRAINING, ("validate", "evaluate"), ("validate", "export")):
        options = ("--set", "evaluation.data=[{name: text, prefix: own}]", "--set", "export.directory=out")
        run_file(workplace, datasets=[{"prefix": "own"}, {"prefix": "unknown"}])
        assert ended(*words, *options).status == 0, ended(*words, *options).stderr
        if words[-1] == "evaluate":
            options = ("--set", "evaluation.data=[{name: text, prefix: other}]")
            key = "evaluation.data[0].prefix"
        else:
            run_file(workplace, datasets=[{"prefix": "unknown"}, {"prefix": "other"}])
            key = "data.datasets[1].prefix"
        found = ended(*words, *options)
        assert found.status == 2
        assert (
            f"{key} = other was made with a different tokenizer than data.tokenizer: {DIFFERENCES[by_0_2_0]}"
            in found.stderr
        )


def test_each_blend_is_compared(workplace: Path) -> None:
    """All mistakes at once."""
    made_with(workplace, "own", "bytes")
    made_with(workplace, "other", "gpt2")
    run_file(
        workplace,
        train=[{"prefix": "own"}],
        valid=[{"prefix": "other"}],
        test=[{"prefix": "other"}],
        split="99990,8,2",
    )
    found = ended("validate")
    assert "data.valid[0].prefix = other was made" in found.stderr
    assert "data.test[0].prefix = other was made" in found.stderr
    made_with(workplace, "tiny", "bytes")
    pairs.write(workplace / "tiny", [[1, 2, 3]])  # made again by another program, next to the old record
    run_file(workplace, datasets=[{"prefix": "tiny"}], split="1,0,0")
    found = ended("validate", "--set", "training.eval_iters=0")
    assert "SHA-256 is not the one in its record" in found.stderr
    assert "tokenizer" not in found.stderr
    (workplace / "tiny.record.json").unlink()
    assert ended("validate", "--set", "training.eval_iters=0").status == 0


def test_a_checkpoint_is_not_exported_with_another_tokenizer(workplace: Path) -> None:
    made_with(workplace, "own", "gpt2")
    write_checkpoint(
        workplace / "run/checkpoints", 5, data={"datasets": [{"prefix": str(workplace / "own")}]}
    )
    run_file(workplace, datasets=[{"prefix": "own"}])
    found = hpcgen("checkpoint", "export", "run", "--to", "out", "-c", "run.yaml")
    assert found.status == 2
    assert f"was trained with {workplace}/own, which was made with another tokenizer: its" in found.stderr
    assert not (workplace / "out").exists()


def test_chats_and_texts_are_not_confused(workplace: Path) -> None:
    """A named validation set may have the other kind."""
    for name in ("text", "chats", "truncated"):
        pairs.write(workplace / name, [[1, 2, 3]] * 50)
    (workplace / "chats.mask").write_bytes(b"\0\1\1" * 50)
    (workplace / "truncated.mask").write_bytes(b"\0\1\1" * 49)
    for words in TRAINING:
        run_file(workplace, datasets=[{"prefix": "text"}, {"prefix": "chats"}])
        found = ended(*words)
        assert found.status == 2
        assert (
            f"data.datasets[1].prefix = chats has a loss mask, {workplace}/chats.mask, so its documents are chats, but "
            "data.sft is false; set data.sft: true"
        ) in found.stderr
        run_file(workplace, datasets=[{"prefix": "text"}, {"prefix": "truncated"}], sft=True)
        found = ended(*words)
        assert found.status == 2
        assert (
            f"data.datasets[0].prefix = text has no loss mask, {workplace}/text.mask, so its" in found.stderr
        )
        assert f"{workplace}/truncated.mask, which has 147 bytes, but the pair has 150 tokens" in found.stderr
    pairs.write(workplace / "long", [[1] * 20] * 50)
    (workplace / "long.mask").write_bytes((b"\0" * 10 + b"\1" * 10) * 50)
    run_file(workplace, datasets=[{"prefix": "long"}], sft=True)
    assert ended("validate").status == 0
    short = ended("validate", "--set", "model.seq_length=16")
    assert (
        f"model.seq_length = 16 leaves nothing to learn of the first 50 chats of {workplace}/long"
        in short.stderr
    )
    pairs.write(workplace / "mostly", [[1] * 3, *[[1] * 20] * 49])
    (workplace / "mostly.mask").write_bytes(b"\0\1\1" + (b"\0" * 10 + b"\1" * 10) * 49)
    run_file(workplace, datasets=[{"prefix": "mostly"}], split="1,0,0", sft=True)
    few = ended("validate", "--set", "model.seq_length=16", "--set", "training.eval_iters=0")
    assert few.status == 2
    assert "only 1 of its 50 chats for train can be read with model.seq_length = 16: 49 have no" in few.stderr
    texts = {"name": "text", "datasets": [{"prefix": "text"}]}
    run_file(workplace, datasets=[{"prefix": "chats"}], sft=True, validation=[texts])
    assert "data.validation[0].datasets[0].prefix = text has no loss mask" in ended("validate").stderr
    run_file(workplace, datasets=[{"prefix": "chats"}], sft=True, validation=[texts | {"sft": False}])
    assert ended("validate").status == 0
