"""Corpora of chats: pairs with a loss mask, made by the real stages with real tokenizers."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from click.testing import CliRunner

from hpcgen.cli.main import cli
from hpcgen.config.corpus import ChatConfig, CorpusJob
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.chats import learned_tokens
from hpcgen.data.first_documents import check_first_documents
from hpcgen.data.jsonl import Texts
from hpcgen.data.manifest import manifest_path, read_manifest
from hpcgen.data.pair import open_pair
from hpcgen.data.record import Record, read_record
from hpcgen.data.stages import configuration
from hpcgen.data.task import make_unit
from hpcgen.data.tokenizer import load_tokenizer
from hpcgen.data.verification import Expected, verify
from hpcgen.errors import HpcgenError
from tests.data.chat_corpora import (
    CHATML,
    MARKED_CHATML,
    MISTRAL,
    chat,
    model_template,
    tool_chat,
    write_chats,
    write_tokenizer,
)
from trainer.chats.answers import Span, render_answers
from trainer.chats.chat import Chat, read_chat
from trainer.chats.errors import BadChatError
from trainer.chats.template import ChatTemplate
from trainer.contract.files.loss_mask import mask_path

from .data_runs import make_units, one_unit, planned_corpus, published

CHATS = [chat("Hi", f"Hello number {n}!", "2+2?", "4", system="Be brief.") for n in range(20)]


def corpus_of(
    folder: Path, documents: Sequence[Any], template: str | None = CHATML, **settings: Any
) -> CorpusJob:
    """A corpus of chats, planned, with a small tokenizer."""
    write_chats(folder / "source" / "chats.jsonl", documents)
    return job_of(folder, ["chats.jsonl"], template, **settings)


def job_of(folder: Path, names: Sequence[str], template: str | None = CHATML, **settings: Any) -> CorpusJob:
    file = write_tokenizer(folder / "tokenizer", template)
    tokenizer = TokenizerConfig(kind="huggingface", tokenizer_file=str(file), eod_token="<|endoftext|>")
    settings = {"chat": ChatConfig(), "verify_fraction": 1.0, **settings}
    return planned_corpus(folder / "source", folder / "corpus", names, tokenizer=tokenizer, **settings)


def prepared(job: CorpusJob) -> Record:
    """Makes the first unit of the stage prepare."""
    return make_unit(
        one_unit(job, "prepare"),
        lambda step: None,
        lambda: 1,
        job=job,
        settings_hash=configuration("prepare", job),
    )


def learned(job: CorpusJob, name: str = "corpus-00000-of-00001") -> list[tuple[str, list[str]]]:
    """The text of each chat of a pair, and its learned pieces."""
    prefix = job.directory / "tokens" / name
    pair = open_pair(prefix)
    mask = np.fromfile(mask_path(prefix), np.uint8)
    library = tokenizers.Tokenizer.from_file(str(job.tokenizer.tokenizer_file))
    found, position = [], 0
    for number in range(pair.num_documents):
        ids = pair.document(number)
        of_chat = mask[position : position + len(ids)]
        position += len(ids)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], of_chat, [0]]).astype(int)))
        spans = edges.reshape(-1, 2).tolist()
        pieces = [library.decode(ids[begin:end].tolist(), skip_special_tokens=False) for begin, end in spans]
        found.append((library.decode(ids.tolist(), skip_special_tokens=False), pieces))
    assert position == len(mask)
    return found


def problems(prefix: Path, record: Record | None) -> list[str]:
    """What `verify` finds."""
    report = verify({prefix: Expected(record=record, eod_id=0)}, megatron=False)
    return list(map(str, report.pairs[0].findings))


def test_answers_and_the_tokens_that_end_them_are_learned(tmp_path: Path) -> None:
    ended = {"prompt": "2+2=", "completion": "4<|endoftext|>"}  # the token at its end is not written twice
    job = corpus_of(tmp_path, [*CHATS[:2], {"prompt": "2+2=", "completion": "4"}, ended])
    record = prepared(job)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    rest = "<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert learned(job) == [
        (f"{text}Hello number 0!{rest}", ["Hello number 0!<|im_end|>", "4<|im_end|>"]),
        (f"{text}Hello number 1!{rest}", ["Hello number 1!<|im_end|>", "4<|im_end|>"]),
        *[("2+2=4<|endoftext|>", ["4<|endoftext|>"])] * 2,
    ]
    mask = np.fromfile(mask_path(job.directory / "tokens" / "corpus-00000-of-00001"), np.uint8)
    assert (record.counts.tokens, record.counts.learned) == (len(mask), int(mask.sum()))
    assert record.counts.verified == 4  # against the library tokenizers
    assert published(job.directory) == [
        f"tokens/corpus-00000-of-00001.{suffix}" for suffix in ("bin", "idx", "mask", "record.json")
    ]


def test_special_tokens_of_the_template_are_not_added_twice(tmp_path: Path) -> None:
    """The tokenizer's post-processor adds a beginning, and so does the template."""
    job = corpus_of(tmp_path, CHATS[:1], model_template("llama3"))
    path = Path(str(job.tokenizer.tokenizer_file))
    library = tokenizers.Tokenizer.from_file(str(path))
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", library.token_to_id("<bos>"))]
    )
    library.save(str(path))
    prepared(job)
    assert learned(job)[0][0].count("<bos>") == 1


def test_generation_blocks_and_beginnings_agree(tmp_path: Path) -> None:
    found = []
    for template in (CHATML, MARKED_CHATML):
        folder = tmp_path / str(len(found))
        job = corpus_of(folder, CHATS, template)
        prepared(job)
        found.append(learned(job))
    assert found[0] == found[1]


def test_every_chat_goes_to_its_output_with_its_mask(tmp_path: Path) -> None:
    """Through prepare, and through extract, concat and tokenize, in three outputs, packed or not."""
    documents = [*CHATS, {"text": "bad"}]
    (tmp_path / "source").mkdir()
    lines = "".join(json.dumps(document) + "\n" for document in documents).encode()
    (tmp_path / "source" / "chats.jsonl.gz").write_bytes(gzip.compress(lines))
    settings: dict[str, Any] = {"num_output_files": 3, "bad_documents": "skip", "max_bad_fraction": 0.5}
    job = job_of(tmp_path, ["chats.jsonl.gz"], **settings)
    record = prepared(job)
    assert (record.counts.documents_out, record.counts.rejected) == (20, 1)
    assert record.reject_kinds == {"no chat": 1}
    outputs = [f"corpus-{index:05d}-of-00003" for index in range(3)]
    whole = corpus_of(tmp_path / "whole", CHATS)
    prepared(whole)
    expected = learned(whole)
    assert [learned(job, name) for name in outputs] == [expected[index::3] for index in range(3)]

    chain = dataclasses.replace(
        job, corpus=dataclasses.replace(job.corpus, directory=str(tmp_path / "chain"))
    )
    manifest = Path(job.directory / "manifest.jsonl")
    (tmp_path / "chain").mkdir()
    (tmp_path / "chain" / "manifest.jsonl").write_bytes(manifest.read_bytes())
    make_units(chain, "extract", "concat", "tokenize")
    for name in outputs:
        for suffix in (".bin", ".idx", ".mask"):
            made = [folder.directory / "tokens" / (name + suffix) for folder in (job, chain)]
            assert made[0].read_bytes() == made[1].read_bytes()


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_parquet_files(tmp_path: Path) -> None:
    """Structs of a column have the keys of all rows, so keys without a value do not count."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    documents = [*CHATS[:3], tool_chat(), tool_chat()]
    for number, key in enumerate(("city", "town"), 3):  # the struct of the arguments has both
        documents[number]["messages"][1]["tool_calls"][0]["function"]["arguments"] = {key: "Oslo"}
    write_chats(tmp_path / "lines" / "source" / "chats.jsonl", documents)
    (tmp_path / "rows" / "source").mkdir(parents=True)
    columns = {"messages": [document["messages"] for document in documents], "id": [1, 2, 3, 4, 5]}
    columns["tools"] = [json.dumps(document.get("tools", [])) for document in documents]
    parquet.write_table(pa.table(columns), tmp_path / "rows" / "source" / "chats.parquet")
    template = model_template("qwen2_5")
    lines = job_of(tmp_path / "lines", ["chats.jsonl"], template)
    rows = job_of(tmp_path / "rows", ["chats.parquet"], template)
    prepared(lines)
    prepared(rows)
    expected = learned(lines)
    assert [pieces[0] for _, pieces in expected[3:]] == [
        f'<tool_call>\n{{"name": "rain", "arguments": {{"{key}": "Oslo"}}}}\n</tool_call><|im_end|>'
        for key in ("city", "town")
    ]
    assert learned(rows) == expected
    shutil.rmtree(rows.directory / "tokens")
    make_units(rows, "extract", "concat", "tokenize")
    assert learned(rows) == expected


@pytest.mark.parametrize(
    ("documents", "template", "message"),
    [
        (
            [*CHATS[:2], {"text": "a"}],
            CHATML,
            r"chats\.jsonl:3: missing key 'messages', 'conversations', or 'prompt' and 'completion'",
        ),
        ([chat("a", "\nb")], CHATML, r"chats\.jsonl:1: an answer shares a token with the text around it"),
        (
            [chat("a", "b", "c", "d")],
            model_template("phi3"),
            r"tokenizer_config\.json: .* the chat is .*chats\.jsonl:1",
        ),
        ([{"prompt": "", "completion": "b"}], CHATML, "all of the 2 tokens of 1 chat would be learned"),
        (CHATS, None, r"tokenizer has no chat template"),
        (CHATS, "{{ strftime_now('%d') }}", r"data\.corpus\.chat\.date"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(
    tmp_path: Path, documents: list[Any], template: str | None, message: str
) -> None:
    with pytest.raises(HpcgenError, match=message):
        prepared(corpus_of(tmp_path, documents, template))
    assert published(tmp_path / "corpus") == []


def test_bad_chats_are_skipped_and_counted(tmp_path: Path) -> None:
    bad = [chat("a", ""), chat("a", "\nb"), {"messages": [{"role": "human", "content": "a"}]}, "text"]
    job = corpus_of(tmp_path, [CHATS[0], *bad, CHATS[1]], bad_documents="skip", max_bad_fraction=1.0)
    record = prepared(job)
    merged = "an answer shares a token with the text around it"
    assert record.reject_kinds == dict.fromkeys(
        ("empty answer", merged, "unknown role", "not a JSON object"), 1
    )
    rejects = (job.directory / "tokens/corpus-00000-of-00001.rejects.jsonl").read_text().splitlines()
    assert {json.loads(line)["line"] for line in rejects} == {2, 3, 4, 5}
    whole = corpus_of(tmp_path / "good", [CHATS[0], CHATS[1]])
    prepared(whole)
    assert learned(job) == learned(whole)


def test_the_date_of_a_template_is_that_of_the_run_file(tmp_path: Path) -> None:
    template = CHATML.replace("{% for", "Today is {{ strftime_now('%d %B %Y') }}.{% for", 1)
    job = corpus_of(tmp_path, CHATS[:1], template, chat=ChatConfig(date="2026-03-09"))
    prepared(job)
    assert learned(job)[0][0].startswith("Today is 09 March 2026.<|im_start|>")


def test_other_settings_make_the_pairs_stale(tmp_path: Path) -> None:
    """The template's text, its special tokens and the date decide the tokens."""
    job = corpus_of(tmp_path, CHATS[:1])
    found = {configuration("prepare", job)}
    own = tmp_path / "own.jinja"
    own.write_text(MARKED_CHATML)
    for chat_of in (None, ChatConfig(date="2026-03-09"), ChatConfig(chat_template_file=str(own))):
        changed = dataclasses.replace(job, corpus=dataclasses.replace(job.corpus, chat=chat_of))
        found.add(configuration("prepare", changed))
    write_tokenizer(tmp_path / "tokenizer", CHATML, eos_token="</s>")
    found.add(configuration("prepare", job))
    assert len(found) == 5


def test_a_mask_is_removed_when_the_corpus_has_no_chats_any_more(tmp_path: Path) -> None:
    job = corpus_of(tmp_path, [chat("a", "b", text="a text")])
    prepared(job)
    plain = dataclasses.replace(job, corpus=dataclasses.replace(job.corpus, chat=None))
    prepared(plain)
    assert not any(name.endswith(".mask") for name in published(job.directory))


def test_verification_of_masks(tmp_path: Path) -> None:
    job = corpus_of(tmp_path, CHATS)
    prepared(job)
    prefix = job.directory / "tokens" / "corpus-00000-of-00001"
    record = read_record(prefix)
    assert problems(prefix, record) == []
    path = Path(mask_path(prefix))
    mask = bytearray(path.read_bytes())
    mask[5] = 2
    path.write_bytes(mask)
    byte, digest = problems(prefix, record)
    assert "byte 5 is 2" in byte
    assert "SHA-256" in digest
    path.write_bytes(mask[:-1])
    assert any("bytes, but the pair has" in problem for problem in problems(prefix, record))
    path.unlink()
    assert [problem for problem in problems(prefix, record) if "is missing" in problem]


def test_a_named_template_must_be_chosen(tmp_path: Path) -> None:
    job = corpus_of(tmp_path, CHATS[:1])
    templates = [{"name": "default", "template": CHATML}, {"name": "rag", "template": MARKED_CHATML}]
    write_tokenizer(tmp_path / "tokenizer", None, chat_template=templates)
    with pytest.raises(HpcgenError, match="several chat templates: default, rag"):
        prepared(job)
    chosen = dataclasses.replace(job.corpus, chat=ChatConfig(chat_template="rag"))
    prepared(dataclasses.replace(job, corpus=chosen))


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_exports_carry_the_mask(tmp_path: Path) -> None:
    """As the column that TRL reads, in rows of one chat. Another mask is noticed."""
    parquet = pytest.importorskip("pyarrow.parquet")
    from hpcgen.data.export import export_pairs, plan_export
    from hpcgen.data.export_verification import verify_export

    job = corpus_of(tmp_path, CHATS)
    prepared(job)
    prefix = job.directory / "tokens" / "corpus-00000-of-00001"
    shards = plan_export({prefix: read_record(prefix)}, tmp_path / "out", "parquet", None)
    export_pairs(shards, workers=1)
    rows = parquet.read_table(tmp_path / "out" / shards[0].file).to_pydict()
    pair, mask = open_pair(prefix), np.fromfile(mask_path(prefix), np.uint8)
    assert rows["input_ids"] == [pair.document(number).tolist() for number in range(20)]
    assert [value for row in rows["assistant_masks"] for value in row] == mask.tolist()
    assert verify_export(tmp_path / "out", workers=1).pairs[0].findings == []
    with pytest.raises(HpcgenError, match="rows of 8 tokens would cut chats"):
        plan_export({prefix: None}, tmp_path / "other", "parquet", 8)
    mask[0] = 1
    mask.tofile(mask_path(prefix))
    [finding] = verify_export(tmp_path / "out", workers=1).pairs[0].findings
    assert "differs from the pair" in finding.reason


def test_tokenizers_that_treat_the_beginning_of_a_text_differently(tmp_path: Path) -> None:
    """Llama 2's and Mistral's tokenizers put a space before each text, so that pieces have other tokens."""
    job = corpus_of(tmp_path, CHATS, MISTRAL)
    path = Path(str(job.tokenizer.tokenizer_file))
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE.from_file(*sentence_pieces(tmp_path), byte_fallback=True, unk_token="<unk>")
    )
    library.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    library.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    library.add_special_tokens(["<unk>", "<bos>", "<eos>", "<|endoftext|>"])
    library.save(str(path))
    prepared(job)
    text, pieces = learned(job)[0]
    assert pieces == [" Hello number 0!<eos>", " 4<eos>"]
    assert text.startswith("<bos> [INST] Be brief.")


def sentence_pieces(folder: Path) -> tuple[str, str]:
    """vocab.json and merges.txt of a small vocabulary with ▁ in place of spaces, and a token for each byte."""
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "l", "o", "e", "H", "▁H", "lo"]
    files = folder / "vocab.json", folder / "merges.txt"
    files[0].write_text(json.dumps({token: number for number, token in enumerate(vocabulary)}))
    files[1].write_text("▁ H\nl o\n")
    return str(files[0]), str(files[1])


def command(*arguments: Any) -> str:
    """The output of `hpcgen data`."""
    done = CliRunner().invoke(cli, ["data", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_chat_is_shown_with_what_is_learned(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "model")
    write_chats(tmp_path / "chats.jsonl", CHATS)
    prefix = tmp_path / "out" / "chats"
    arguments = ("--tokenizer", file, "--eod-token", "<|endoftext|>", "--chat")
    written = command("tokenize", tmp_path / "chats.jsonl", "--output-prefix", prefix, *arguments)
    mask = np.fromfile(mask_path(prefix), np.uint8)
    assert f"learned    {mask.sum():,} tokens ({mask.mean():.1%}); {prefix}.mask" in written
    shown = command("inspect", prefix, "--tokenizer", file, "--chat", "19")
    assert shown.splitlines()[0].startswith("chat 19: ")
    assert "<|im_start|>assistant\n⟦Hello number 19!<|im_end|>⟧\n<|im_start|>user\n" in shown
    assert "⟦" in command("inspect", prefix, "--chat")  # IDs
    assert "of 40 answers" in command("inspect", prefix)
    found = json.loads(command("inspect", prefix, "--tokenizer", file, "--chat", "0", "--json"))
    assert (found["learned"], found["answers"]) == (int(mask.sum()), 40)
    chat_of = found["chat"]
    assert [piece["text"] for piece in chat_of["pieces"] if piece["learned"]] == [
        "Hello number 0!<|im_end|>",
        "4<|im_end|>",
    ]
    assert sum(len(piece["ids"]) for piece in chat_of["pieces"]) == chat_of["tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chat", "--tokenizer", "gpt2"], "needs a tokenizer with tokens that end a turn"),
        (["--chat-date", "2026-01-02"], "--chat-date has no effect without --chat"),
        ([], "for a corpus of chats, set data.corpus.chat: {}"),
    ],
)
def test_options_for_chats(tmp_path: Path, arguments: list[str], message: str) -> None:
    path = write_chats(tmp_path / "chats.jsonl", CHATS[:1])
    done = CliRunner().invoke(
        cli, ["data", "tokenize", str(path), "--output-prefix", str(tmp_path / "x"), *arguments]
    )
    assert message in str(done.exception)


def test_a_template_is_refused_before_a_job_is_queued(tmp_path: Path) -> None:
    job = corpus_of(tmp_path, [chat("a", "b", "c", "d")], model_template("qwen3"))
    with pytest.raises(HpcgenError, match=r"does not show where answers begin and end.*chats\.jsonl:1"):
        check_first_documents(job, read_manifest(manifest_path(job.directory)))


def test_masks_of_ones_stop_a_unit_at_its_first_block(tmp_path: Path) -> None:
    """Not at its end: 200 chats of 40 kB are two blocks, and the second is not JSON."""
    corpus_of(tmp_path, [{"prompt": "", "completion": "b " * 20_000}] * 200)
    with (tmp_path / "source" / "chats.jsonl").open("a") as file:
        file.write("not JSON\n")
    job = job_of(tmp_path, ["chats.jsonl"], verify_fraction=0.0)
    with pytest.raises(HpcgenError, match=r"all of the .* tokens of \d+ chats would be learned"):
        prepared(job)


def test_masks_are_those_of_character_offsets(tmp_path: Path) -> None:
    """An independent way to the mask: the library tokenizers says which characters a token has."""
    file = write_tokenizer(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(file))
    loaded = load_tokenizer(TokenizerConfig(kind="huggingface", tokenizer_file=str(file), eod_token="<eos>"))
    template = ChatTemplate("chatml", CHATML, special_tokens={}, added_tokens=("<|im_end|>",))
    choose = random.Random(0)
    parts = ["hello", " ", "\n", "\n\n", "é", "😀", "system\n", "<|im_end|>", "Oslo", ".", "  x", "İ"]
    texts, answers = list[str](), list[list[Span]]()
    for _ in range(300):
        turns = [
            "".join(choose.choices(parts, k=choose.randrange(1, 8))) for _ in range(choose.choice((2, 4)))
        ]
        try:
            read = read_chat(chat(*turns))
            assert isinstance(read, Chat)
            text, spans = render_answers(template, read)
        except BadChatError:  # an answer of spaces or special tokens
            continue
        texts.append(text)
        answers.append(spans)
    lines = np.arange(len(texts))
    mask, wrong = learned_tokens(loaded.encode, Texts(texts, lines, [], answers), *loaded.encode(texts))
    begin = num_wrong = 0
    for index, (text, spans) in enumerate(zip(texts, answers, strict=True)):
        offsets = library.encode(text, add_special_tokens=False).offsets
        end = begin + len(offsets)
        inside = [any(first <= a and b <= last for first, last in spans) for a, b in offsets]
        crosses = any(a < border < b for a, b in offsets for span in spans for border in span)
        assert crosses == (index in wrong), text
        num_wrong += crosses
        if not crosses:
            assert mask[begin:end].tolist() == inside, text
        begin = end
    assert 5 < num_wrong < len(texts) / 2
