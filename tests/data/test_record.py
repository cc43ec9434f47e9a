"""Publication: in an order that survives the loss of power, and nothing at all when the disk is full."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import pytest

from hpcgen.data.record import Counts, FileIdentity, Record, publish_unit, read_record, record_path
from hpcgen.files import private_file


def pair_record(tmp_path, content: bytes, seconds: float = 1.0) -> Record:
    names = ("a.bin", "a.idx")
    return Record(
        stage="prepare",
        configuration="settings",
        inputs=(FileIdentity("a.jsonl", 5, "0" * 64),),
        outputs=tuple(FileIdentity(name, len(content), sha256(content).hexdigest()) for name in names),
        counts=Counts(documents_in=3, documents_out=2, rejected=1),
        seconds=seconds,
    )


def publish_pair(tmp_path, content: bytes, seconds: float = 1.0, stale: Sequence[Path] = ()) -> Record:
    record = pair_record(tmp_path, content, seconds)
    with ExitStack() as stack:
        files = []
        for name in ("a.bin", "a.idx"):
            file = stack.enter_context(private_file(tmp_path / name))
            file.write(content)
            files.append((file, tmp_path / name))
        return publish_unit(files, record, tmp_path / "a", stale=stale)


def test_record_comes_back(tmp_path):
    record = publish_pair(tmp_path, b"new")
    assert read_record(tmp_path / "a") == record
    assert record.counts.balanced
    record_path(tmp_path / "a").write_text('{"stage": "prepare"}')
    assert read_record(tmp_path / "a") is None
    assert read_record(tmp_path / "b") is None


def test_order_on_the_disk(tmp_path, monkeypatch):
    """Synced before it is renamed; the old record and index gone for good before that; the new record last."""
    publish_pair(tmp_path, b"old")
    seen: list[str] = []
    fsync, rename, unlink = os.fsync, os.replace, os.unlink

    def name_of(path: object) -> str:
        name = Path(os.fsdecode(path)).name
        return name.rsplit(".", 2)[0].removeprefix(".") if name.endswith(".tmp") else name

    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (seen.append(f"sync {name_of(Path(f'/proc/self/fd/{fd}').readlink())}"), fsync(fd)),
    )
    monkeypatch.setattr(
        os, "replace", lambda old, new: (seen.append(f"place {name_of(new)}"), rename(old, new))
    )
    monkeypatch.setattr(os, "unlink", lambda path: (seen.append(f"remove {name_of(path)}"), unlink(path)))
    publish_pair(tmp_path, b"new")
    directory = tmp_path.name
    assert [step for step in seen if step != "remove .tmp"][:11] == [
        "sync a.bin",
        "sync a.idx",
        "sync a.record.json",
        "remove a.record.json",
        "remove a.idx",
        f"sync {directory}",
        "place a.bin",
        "place a.idx",
        f"sync {directory}",
        "place a.record.json",
        f"sync {directory}",
    ]


def test_the_same_work_is_not_published_twice(tmp_path):
    first = publish_pair(tmp_path, b"same")
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    publish_pair(tmp_path, b"same", seconds=2.0)
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before
    assert read_record(tmp_path / "a") == first
    (tmp_path / "a.bin").unlink()
    publish_pair(tmp_path, b"same", seconds=2.0)
    assert (tmp_path / "a.bin").read_bytes() == b"same"


def test_a_record_that_does_not_fit_on_the_disk_keeps_the_old_unit(tmp_path, monkeypatch):
    old = publish_pair(tmp_path, b"old")
    fsync, calls = os.fsync, []

    def full_at_the_third(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full_at_the_third)
    with pytest.raises(OSError, match="No space left"):
        publish_pair(tmp_path, b"new")
    assert read_record(tmp_path / "a") == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "a.record.json"]
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "a.idx").read_bytes() == b"old"


def test_a_damaged_output_is_rebuilt(tmp_path):
    """Made again it is the same work, but what lies there is not."""
    publish_pair(tmp_path, b"same")
    (tmp_path / "a.bin").write_bytes(b"sAme")
    record = publish_pair(tmp_path, b"same", seconds=2.0)
    assert (tmp_path / "a.bin").read_bytes() == b"same"
    assert read_record(tmp_path / "a") == record
    assert record.seconds == 2.0


def test_valid_outputs(tmp_path):
    """By length and time; by the hash where the time is another, which then is set right."""
    record, path = publish_pair(tmp_path, b"content"), tmp_path / "a.bin"
    published_ns = path.stat().st_mtime_ns
    files = ["a.bin", "a.idx"]
    assert [output.modified_ns for output in record.outputs] == [
        (tmp_path / x).stat().st_mtime_ns for x in files
    ]
    os.utime(path, ns=(1, 1))  # as cp leaves it
    assert record.has_valid_outputs(tmp_path, files)
    assert path.stat().st_mtime_ns == published_ns
    path.write_bytes(b"CONTENT")
    assert not record.has_valid_outputs(tmp_path, files)
    second = published_ns // 10**9 * 10**9  # as tar and some file systems keep it
    os.utime(path, ns=(second, second))
    assert record.has_valid_outputs(tmp_path, files)


@pytest.mark.parametrize("content", [b"old", b"new"], ids=["the-same", "another"])
def test_leftovers_of_an_older_version_are_removed(tmp_path, content):
    publish_pair(tmp_path, b"old")
    stale = [tmp_path / "a.rejects.jsonl", tmp_path / "b.record.json"]
    for path in (*stale, tmp_path / "other"):
        path.touch()
    publish_pair(tmp_path, content, stale=stale)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "a.record.json", "other"]


def test_leftovers_of_an_older_version_are_kept_while_the_disk_is_full(tmp_path, monkeypatch):
    publish_pair(tmp_path, b"old")
    rejects = tmp_path / "a.rejects.jsonl"
    rejects.touch()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        publish_pair(tmp_path, b"new", stale=[rejects])
    assert rejects.exists()


def test_documents_that_are_not_accounted_for_are_not_published(tmp_path):
    record = dataclasses.replace(pair_record(tmp_path, b""), counts=Counts(documents_in=3, documents_out=2))
    with pytest.raises(AssertionError, match="not accounted for"):
        publish_unit([], record, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_same_content():
    known = FileIdentity("a", 5, "1" * 64, 100)
    assert known.same_content(FileIdentity("a", 5, "1" * 64, 200))  # the hash decides
    assert not known.same_content(FileIdentity("a", 5, "2" * 64, 100))
    assert not known.same_content(FileIdentity("b", 5, "1" * 64, 100))
    assert not known.same_content(FileIdentity("a", 6))
    assert not known.same_content(FileIdentity("a", 5, None, 200))
    assert known.same_content(FileIdentity("a"))  # nothing is known that speaks against it


def test_counts_add_up():
    counts = Counts.total(
        [Counts(documents_in=5, documents_out=3, skipped=2), Counts(documents_in=1, rejected=1)]
    )
    assert counts == Counts(documents_in=6, documents_out=3, skipped=2, rejected=1)
    assert counts.balanced
    assert not Counts(documents_in=1).balanced
