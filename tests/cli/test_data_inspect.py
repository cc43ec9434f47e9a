from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import hpcgen
from tests.cli.test_data_status import RUN
from tests.data.pairs import write

EOD = 256


@pytest.fixture(autouse=True)
def pair(workplace: Path) -> None:
    texts = [b"x", b"", b"hello \x1b[31mworld\n", b"y" * 3000]
    write(workplace / "x", [[*text, EOD] if text else [] for text in texts])
    (workplace / "run.yaml").write_text(RUN)


def test_the_contents_of_a_pair(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    told = hpcgen("data", "inspect", "x.bin")
    assert told.stdout == (
        "x.bin, .idx  (uint16)\n"
        "documents  4 (1 empty), 3 sequences\n"
        "tokens     3,021, mean 1,007.0 per document\n"
        "shortest   2 (document 0)\n"
        "longest    3,001 (document 3)\n"
        "lengths    1% 2, 5% 2, 25% 2, 50% 18, 75% 3,001, 95% 3,001, 99% 3,001"
        "  (percentiles)\n"
        "\n"
        "tokens per document  documents  share  share of tokens\n"
        "             2 to 3          1  33.3%             0.1%  ████████████████████████\n"
        "             4 to 7          0   0.0%             0.0%\n"
        "            8 to 15          0   0.0%             0.0%\n"
        "           16 to 31          1  33.3%             0.6%  ████████████████████████\n"
        "           32 to 63          0   0.0%             0.0%\n"
        "          64 to 127          0   0.0%             0.0%\n"
        "         128 to 255          0   0.0%             0.0%\n"
        "         256 to 511          0   0.0%             0.0%\n"
        "       512 to 1,023          0   0.0%             0.0%\n"
        "     1,024 to 2,047          0   0.0%             0.0%\n"
        "     2,048 to 4,095          1  33.3%            99.3%  ████████████████████████\n"
    )


@pytest.mark.parametrize("tokenizer", [("--tokenizer", "bytes"), ("-c", "run.yaml")])
def test_the_text_of_a_document_cannot_control_the_terminal(tokenizer):
    told = hpcgen("data", "inspect", "x", "--document", 2, *tokenizer)
    ids = " ".join(str(number) for number in (*b"hello \x1b[31mworld\n", EOD))
    assert told.stdout == f"document 2: 18 tokens\nids {ids}\nhello \\x1b[31mworld\n<eod>\n"


def test_a_long_document_is_shortened_unless_requested_in_full():
    told = hpcgen("data", "inspect", "x", "--document", -1, "--tokenizer", "bytes").stdout
    assert "... and 2,901 more ids (--whole)" in told
    assert told.endswith(f"{'y' * 2000} ... and 1,005 more characters (--whole)\n")
    whole = hpcgen("data", "inspect", "x", "--document", -1, "--tokenizer", "bytes", "--whole").stdout
    assert whole.endswith(f"{'y' * 3000}<eod>\n")
    found = json.loads(
        hpcgen("data", "inspect", "x", "--document", -1, "--tokenizer", "bytes", "--json").stdout
    )
    assert found["document"] == {"number": 3, "ids": [*b"y" * 3000, EOD], "text": "y" * 3000 + "<eod>"}


def test_a_document_without_a_tokenizer_shows_its_ids():
    told = hpcgen("data", "inspect", "x", "--document", 0)
    assert (told.status, told.stdout) == (0, "document 0: 2 tokens\nids 120 256\n")
    assert "to show the text, add --tokenizer" in told.stderr


def test_json_and_picture():
    pytest.importorskip("matplotlib")
    told = hpcgen("data", "inspect", "x", "--json", "--png", "x.png")
    found = json.loads(told.stdout)
    assert (found["documents"], found["percentiles"]["50"], found["histogram"][0]["tokens"]) == (4, 18, 2)
    assert told.stderr == "wrote x.png\n"
    assert Path("x.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", "--document", 4), "x: there is no document 4; use 0 to 3, or -4 to -1 from the end"),
        (("y",), "cannot read the dataset y"),
        (("x", "--tokenizer", "bytes", "-c", "run.yaml"), "--tokenizer and -c both name a tokenizer"),
        (("x", "--document", 0, "--tokenizer", "none.json"), "cannot read the tokenizer file none.json"),
        (("x", "--png", "no/where/x.png"), "/no does not exist"),
    ],
)
def test_mistakes_are_reported(arguments, message):
    told = hpcgen("data", "inspect", *arguments)
    assert (told.status, told.stdout) == (2, "")
    assert message in told.stderr
