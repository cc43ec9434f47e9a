"""Files in the place of a corpus's data: pointers of git-lfs, and pages and errors of web servers."""

from __future__ import annotations

import pytest

from hpcgen.data.first_documents import check_first_documents
from hpcgen.data.manifest import manifest_path, read_manifest
from hpcgen.errors import HpcgenError
from tests.data.data_runs import make_units, planned_corpus

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"
STAND_INS = {
    POINTER: "a Git LFS pointer, not the data that it points to; fetch it with git lfs pull, and run hpcgen data plan",
    b"<!DOCTYPE html>\n<title>503 Service": "a web page (it starts with '<!DOCTYPE html>\\n<title>503 Service')",
    b"\n<HTML lang=en>Sign in</HTML>": "a web page (it starts with '<HTML lang=en>Sign in</HTML>'); download",
    b'<?xml version="1.0"?><Error>': "a web page (it starts with '<?xml version=\"1.0\"?><Error>'); download",
}
"""Content of a file -> its description."""


@pytest.mark.parametrize("name", ["b.jsonl", "b.json", "b.jsonl.gz", "b.jsonl.zst", "b.parquet"])
@pytest.mark.parametrize("content", STAND_INS, ids=["pointer", "page", "login", "XML"])
def test_such_a_file_is_named_even_if_bad_documents_are_skipped(tmp_path, name, content):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / name).write_bytes(content)
    settings = {"bad_documents": "skip", "max_bad_fraction": 1.0, "num_output_files": 1}
    job = planned_corpus(tmp_path / "source", tmp_path / "out", [name], **settings)
    for stage in ("prepare",) if name.endswith(("jsonl", "json")) else ("prepare", "extract"):
        with pytest.raises(HpcgenError) as error:
            make_units(job, stage)
        assert str(error.value).startswith(f"{tmp_path}/source/{name}: the content is {STAND_INS[content]}")


def test_a_line_of_html_among_documents_is_a_bad_document(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.jsonl").write_bytes(b'{"text": "a"}\n<html>\n')
    settings = {"bad_documents": "skip", "max_bad_fraction": 1.0, "num_output_files": 1}
    make_units(planned_corpus(tmp_path / "source", tmp_path / "out", ["a.jsonl"], **settings), "prepare")
    assert (tmp_path / "out/tokens/corpus-00000-of-00001.rejects.jsonl").exists()


def test_pointers_among_other_files_are_found_before_a_job_is_queued(tmp_path):
    """After a partial `git lfs pull`. Of a corpus, only a few files are read before a job."""
    (tmp_path / "source").mkdir()
    names = [f"{letter}.jsonl" for letter in "abcdef"]
    for name in names:
        (tmp_path / "source" / name).write_bytes(
            POINTER if name in ("c.jsonl", "d.jsonl") else b'{"text": "a"}\n'
        )
    job = planned_corpus(tmp_path / "source", tmp_path / "out", names, num_output_files=1)
    with pytest.raises(HpcgenError) as error:
        check_first_documents(job, read_manifest(manifest_path(job.directory)))
    found = f"{tmp_path}/source/c.jsonl is a pointer of git-lfs, not the file itself. Fetch it: git lfs pull"
    assert str(error.value) == f"{found} (and 1 more pointer)"
