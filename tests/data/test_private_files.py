"""Leftovers of killed runs are removed, and files that others are writing are kept."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpcgen.files import host_tag, private_file, publish, sweep

WRITER = """
import sys, time
from pathlib import Path
from hpcgen.files import private_file
with private_file(Path(sys.argv[1])) as file:
    print("writing", flush=True)
    time.sleep(600)
"""


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.process
def test_leftovers_of_killed_processes_are_removed_and_files_of_running_ones_kept(tmp_path):
    target, other = tmp_path / "a.jsonl", tmp_path / "a.jsonl.record.json"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        for path in (target, target, other)
    ]
    try:
        for writer in writers:
            assert writer.stdout.readline() == b"writing\n"
        for dead in (writers[0], writers[2]):
            dead.kill()
            dead.wait()
        assert len(names(tmp_path)) == 3
        with private_file(target) as file:  # sweeps what is dead of its own target
            assert len(names(tmp_path)) == 3
            file.write(b"content")
            publish(file, target)
        assert len(names(tmp_path)) == 3
        sweep([other, tmp_path / "no/directory/at all"])
        assert len([name for name in names(tmp_path) if name.endswith(".tmp")]) == 1
        assert target.read_bytes() == b"content"
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    sweep([target])
    assert names(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize("age_days", [0, 2])
def test_files_of_other_hosts_stay_for_a_day(tmp_path, age_days):
    """A lock that looks free may be known to the other host only."""
    path = tmp_path / f".a.{host_tag()}01234567.tmp"
    other = path.with_name(path.name.replace(host_tag(), "f" * 8))
    for file in (path, other):
        file.touch()
        now = file.stat().st_mtime
        os.utime(file, (now, now - age_days * 86400))
    sweep([tmp_path / "a"])
    assert names(tmp_path) == ([] if age_days else [other.name])


FILLS_THE_DISK = """
import resource, sys
from pathlib import Path
from hpcgen.files import private_file
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    with private_file(Path(sys.argv[1])) as file:
        file.write(b"x" * 100)
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.process
def test_a_file_that_cannot_be_written_on_close_is_removed(tmp_path):
    """The end of the file is still in a buffer. The limit simulates a full disk."""
    command = [sys.executable, "-c", FILLS_THE_DISK, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "File too large\n"
    assert names(tmp_path) == []


def test_only_private_files_are_swept(tmp_path):
    mine = [
        ".a.tmp",
        ".a.1.tmp",
        "a.0123456789abcdef.tmp",
        ".b.0123456789abcdef.tmp",
        ".a.0123456789abcdef.tmp.gz",
    ]
    for name in mine:
        (tmp_path / name).touch()
    sweep([tmp_path / "a"])
    assert names(tmp_path) == sorted(mine)
