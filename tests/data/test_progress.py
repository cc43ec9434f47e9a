"""Progress on a terminal and in a log."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from hpcgen.cli.data import progress as module
from hpcgen.cli.data.progress import lines
from hpcgen.data.progress import Progress

from .data_runs import documents, json_lines, planned_corpus, write_file, write_job


def test_lines_of_a_log(monkeypatch, capsys):
    clock = iter([100.0, 101.0, 120.0, 121.0, 140.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    show = lines(15.0)
    progress = Progress("tokenize", 3, 32, units=72, units_done=10, bytes=30 * 10**9, bytes_done=12 * 10**9)
    show(progress)
    progress.bytes_new, progress.documents, progress.tokens = 2 * 10**9, 1_234_567, 890_123_456
    show(progress)
    show(progress)
    progress.failed, progress.bytes_done, progress.bytes_new = 1, progress.bytes, 20 * 10**9
    show(progress)
    assert capsys.readouterr().err.splitlines() == [
        "tokenize: 10 of 72 files, 12.0 GB of 30.0 GB, 1,234,567 documents, 890,123,456 tokens, 100.0 MB/s, 3 min left",
        "tokenize: 10 of 72 files, 30.0 GB of 30.0 GB, 1,234,567 documents, 890,123,456 tokens, 1 failed, 500.0 MB/s",
    ]


@pytest.mark.process
def test_a_bar_on_a_terminal(tmp_path):
    write_file(tmp_path / "source/a.jsonl.zst", json_lines(documents(50)))
    job = planned_corpus(tmp_path / "source", tmp_path / "corpus", ["a.jsonl.zst"])
    arguments = [
        sys.executable,
        "-m",
        "hpcgen",
        "data",
        "extract",
        "-c",
        write_job(job, tmp_path / "corpus.json"),
    ]
    parent, child = pty.openpty()
    done = subprocess.run(
        arguments,
        stdout=subprocess.PIPE,
        stderr=child,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm"},
        check=True,
    )
    os.close(child)
    seen = os.read(parent, 1 << 20).decode()
    os.close(parent)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert re.search(r"━+ +0% 0/1 file", plain)
    assert re.search(r"━+ +100% 1/1 file · [\d.]+ kB · [\d.]+ MB/s · 50 docs", plain)
    assert done.stdout.startswith(b"extract task 0 of 1: 1 made")
