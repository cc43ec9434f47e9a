from __future__ import annotations

import sys

import pytest
import tokenizers

from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.inspection import Bin, decode, draw_png, inspect_pair, read_document
from hpcgen.data.pair import as_prefix, as_prefixes, open_pair
from hpcgen.errors import HpcgenError
from tests.data.conftest import HARD_TEXTS
from tests.data.pairs import write, write_sequences
from trainer.contract.files.index_header import bin_path, idx_path


def test_lengths_and_where_they_are(tmp_path):
    prefix = write(tmp_path / "x", [[1, 2, 3], [], [4], [5] * 8, [6, 7, 8]])
    found, _ = inspect_pair(prefix)
    assert (found.documents, found.sequences, found.tokens, found.empty_documents) == (5, 4, 15, 1)
    assert (found.shortest, found.shortest_document) == (1, 2)
    assert (found.longest, found.longest_document) == (8, 3)
    assert found.mean_length == 15 / 4
    assert found.percentiles == {1: 1, 5: 1, 25: 1, 50: 3, 75: 3, 95: 8, 99: 8}
    assert found.histogram == (Bin(1, 1, 1, 1), Bin(2, 3, 2, 6), Bin(4, 7, 0, 0), Bin(8, 15, 1, 8))


def test_a_pair_of_empty_documents(tmp_path):
    found, pair = inspect_pair(write(tmp_path / "x", [[], []]))
    assert (found.documents, found.tokens, found.longest, found.histogram) == (2, 0, 0, ())
    assert read_document(pair, 1, TokenizerConfig(kind="bytes")).text == ""


def test_a_document_of_several_sequences(tmp_path):
    found, pair = inspect_pair(
        write_sequences(tmp_path / "x", [[[1, 2], [3, 4, 5]], [], [[70000]]], vocab_size=70001)
    )
    assert (found.documents, found.sequences, found.tokens, found.dtype) == (3, 3, 6, "int32")
    assert [read_document(pair, number, None).ids for number in range(3)] == [[1, 2, 3, 4, 5], [], [70000]]


def test_documents_are_counted_from_both_ends(tmp_path):
    _, pair = inspect_pair(write(tmp_path / "x", [[1], [2, 2], [3]]))
    assert [read_document(pair, number, None).ids for number in (0, -1, -3)] == [[1], [3], [1]]
    assert read_document(pair, -2, None).number == 1
    for number in (3, -4):
        with pytest.raises(HpcgenError, match=f"no document {number}; use 0 to 2, or -3 to -1 from the end"):
            read_document(pair, number, None)


def text_comes_back(prefix, config, encode, end):
    pair = open_pair(write(prefix, [encode(text) for text in HARD_TEXTS], vocab_size=50257))
    decoded = [read_document(pair, number, config).text for number in range(len(HARD_TEXTS))]
    return decoded == [text + end for text in HARD_TEXTS]


def test_text_is_decoded_completely(tmp_path, gpt2_reference, trained):
    def by(library, eod):
        return lambda text: [*library.encode(text, add_special_tokens=False).ids, eod]

    kind = TokenizerConfig(kind="bytes")
    assert text_comes_back(tmp_path / "b", kind, lambda text: [*text.encode(), 256], "<eod>")
    assert text_comes_back(tmp_path / "g", TokenizerConfig(), by(gpt2_reference, 50256), "<|endoftext|>")
    library = tokenizers.Tokenizer.from_str(trained["byte-level"].to_str())
    library.decoder = tokenizers.decoders.ByteLevel()
    library.save(str(tmp_path / "t.json"))
    of_file = TokenizerConfig(kind="huggingface", tokenizer_file=str(tmp_path / "t.json"))
    assert text_comes_back(tmp_path / "h", of_file, by(library, 1), "</s>")


def test_special_tokens_are_shown_and_half_characters_marked(trained_config):
    assert decode([256, 104, 105, 256], TokenizerConfig(kind="bytes")) == "<eod>hi<eod>"
    assert decode([0xE4, 0xBD, 65], TokenizerConfig(kind="bytes")) == "\ufffdA"
    assert "</s>" in decode([1, 5], trained_config("byte-level"))


@pytest.mark.parametrize("kind", ["gpt2", "bytes"])
def test_an_id_of_another_tokenizer_is_reported(kind):
    with pytest.raises(HpcgenError, match=r"id 70000 is outside the tokenizer's range 0 to \d+; give the"):
        decode([1, 70000], TokenizerConfig(kind=kind))


def test_a_damaged_index_is_refused(tmp_path):
    prefix = write(tmp_path / "x", [[1, 2], [3], [4]])
    content = bytearray(idx_path(prefix).read_bytes())
    content[34] = 7
    idx_path(prefix).write_bytes(content)
    with pytest.raises(HpcgenError, match=r"x\.idx: sequence 1 .* run hpcgen data verify for details"):
        inspect_pair(prefix)


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    found, _ = inspect_pair(write(tmp_path / "x", [[1] * length for length in range(1, 60)]))
    draw_png(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[1:4] == b"PNG"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx", "x.png"]


def test_the_picture_needs_matplotlib(tmp_path, monkeypatch):
    found, _ = inspect_pair(write(tmp_path / "x", [[1]]))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(HpcgenError, match="pip install matplotlib"):
        draw_png(found, tmp_path / "x.png")


def test_names_that_a_shell_gives_are_prefixes(tmp_path):
    prefix = write(tmp_path / "x", [[1]])
    beside = tmp_path / "x.record.json"
    assert as_prefixes([bin_path(prefix), idx_path(prefix), beside, tmp_path / "y"]) == [
        prefix,
        tmp_path / "y",
    ]
    dotted = write(tmp_path / "z.bin", [[1]])
    assert as_prefix(dotted) == dotted
