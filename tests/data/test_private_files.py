"""What killed runs leave behind is removed, and what others are writing is not."""

from __future__ import annotations

import subprocess
import sys

from hpcgen.files import private_file, publish, sweep

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


def test_leftovers_of_the_killed_go_and_files_of_the_living_stay(tmp_path):
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
