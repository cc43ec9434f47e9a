from __future__ import annotations

import json

import pytest
import zstandard

from hpcgen.data.sample import write_sample
from hpcgen.errors import HpcgenError


def documents(path):
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().decompress(data)
    return [json.loads(line) for line in data.decode().removesuffix("\n").split("\n")]


def test_the_same_bytes_each_time(tmp_path):
    first = write_sample(tmp_path / "a.jsonl.zst", max_mb=0.5)
    write_sample(tmp_path / "b.jsonl.zst", max_mb=0.5)
    assert (tmp_path / "a.jsonl.zst").read_bytes() == (tmp_path / "b.jsonl.zst").read_bytes()
    assert first.text_bytes <= 500_000
    assert first.text_bytes > 400_000


def test_sources_and_docstrings_in_order(tmp_path):
    report = write_sample(tmp_path / "a.jsonl", max_mb=1)
    written = documents(tmp_path / "a.jsonl")
    texts = {document["source"]: document["text"] for document in written}
    assert len(written) == len(texts) == report.documents
    assert sum(len(text.encode()) for text in texts.values()) == report.text_bytes
    assert "class ABCMeta(type):" in texts["abc.py"]
    assert "Metaclass for defining Abstract Base Classes" in texts["abc.py#docstrings"]
    assert "class ABCMeta(type):" not in texts["abc.py#docstrings"]
    assert all(texts.values())
    modules = [source.removesuffix("#docstrings") for source in texts]
    assert modules == sorted(modules)


def test_a_file_with_other_content_is_not_overwritten(tmp_path):
    path = tmp_path / "a.jsonl"
    report = write_sample(path, max_mb=0.1)
    before = path.stat()
    assert write_sample(path, max_mb=0.1) == report
    assert path.stat().st_ino == before.st_ino
    with pytest.raises(HpcgenError, match=r"a\.jsonl already exists with different content; .* --overwrite"):
        write_sample(path, max_mb=0.05)
    write_sample(path, max_mb=0.05, overwrite=True)
    assert path.stat().st_size < before.st_size


@pytest.mark.parametrize(
    ("name", "max_mb", "message"),
    [
        ("a.txt", 1.0, r"a\.txt: the name must end in \.jsonl or \.jsonl\.zst"),
        ("a.jsonl", 0.000001, "--max-mb = 1e-06 is too small for the first document; use a larger value"),
        ("a.jsonl/b.jsonl", 0.1, r"cannot write .*b\.jsonl"),
    ],
)
def test_mistakes(tmp_path, name, max_mb, message):
    if "/" in name:
        (tmp_path / "a.jsonl").write_text("a file, not a folder")
    with pytest.raises(HpcgenError, match=message):
        write_sample(tmp_path / name, max_mb=max_mb)
