from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hpcgen.cli.data import command
from hpcgen.errors import HpcgenError


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"body": "Hello world"}\n{"body": ""}\n')
    return path


def run(*arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)


def test_tokenize_reports_what_it_wrote(tmp_path, corpus):
    prefix = tmp_path / "x"
    result = run("tokenize", corpus, "--output-prefix", prefix, "--json-key", "body")
    assert result.stdout == (
        f"{prefix}.bin, .idx  (76 bytes, uint16)\n"
        "documents  2 read, 2 written, 1 empty\n"
        "tokens     3 in 1 sequences, each ended by 50256\n"
        "input      37 bytes of JSON Lines, encoded with gigatoken\n"
    )
    assert result.stderr == ""
    assert (tmp_path / "x.bin").read_bytes() == b"".join(i.to_bytes(2, "little") for i in (15496, 995, 50256))


def test_tokenize_as_json(tmp_path, corpus):
    options = ("--json-key", "body", "--tokenizer", "bytes", "--drop-empty", "--json", "--workers", 1)
    report = json.loads(run("tokenize", corpus, "--output-prefix", tmp_path / "x", *options).stdout)
    assert report["tokens"] == 12
    assert report["documents"] == report["sequences"] == 1
    assert report["documents_read"] == 2


def test_tokenize_forced_to_a_library(tmp_path, corpus):
    options = ("--json-key", "body", "--backend", "tokenizers", "--json")
    result = run("tokenize", corpus, "--output-prefix", tmp_path / "x", *options)
    assert json.loads(result.stdout)["backend"] == "tokenizers"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "corpus.jsonl:1: no key 'text' among 'body'"),
        (("--tokenizer", "gpt3"), "cannot read the tokenizer file gpt3"),
        (("--vocab-file", "v.json"), "tokenizer.merges_file is needed beside its other half"),
        (("--tokenizer", "bytes", "--eod-token", "x"), "tokenizer.eod_token is not read"),
    ],
)
def test_mistakes_are_told(tmp_path, corpus, options, message):
    with pytest.raises(HpcgenError, match=message):
        run("tokenize", corpus, "--output-prefix", tmp_path / "x", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_sample(tmp_path):
    path = tmp_path / "sample.jsonl.zst"
    result = run("sample", path, "--max-mb", 0.2)
    assert result.stdout.startswith(f"{path}  (")
    assert json.loads(run("sample", path, "--max-mb", 0.2, "--json").stdout)["path"] == str(path)


def test_the_module_is_cheap_to_import():
    heavy = "{'numpy', 'rich', 'gigatoken', 'tokenizers', 'msgspec', 'zstandard', 'pydantic', 'hpcgen.data'}"
    program = f"import sys, hpcgen.cli.data; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
