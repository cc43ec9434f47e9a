"""The last lines of logs, and logs that grow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcgen.logs.lines import parse_line
from hpcgen.runs.attempts import JobAttempt
from hpcgen.runs.log_files import LogFile
from hpcgen.runs.log_lines import Follower, last_lines

ATTEMPT = JobAttempt(job="7", restart=0, stage="train", began=0.0, events=())


def texts(entries: list) -> list[str]:
    return [entry.line.text for entry in entries]


def test_lines_of_several_files_are_in_time_order(tmp_path: Path) -> None:
    times = ["2026-11-26T10:00:0{}+0000 a", "no time", "2026-11-26T10:00:0{}+0000 b"]
    files = []
    for rank, seconds in enumerate([(1, 5), (3, 4)]):
        first, plain, second = times
        (tmp_path / str(rank)).write_text(
            f"{first.format(seconds[0])}{rank}\n{plain} {rank}\n{second.format(seconds[1])}{rank}\n"
        )
        files.append(LogFile(path=tmp_path / str(rank), rank=rank))
    found = texts(last_lines(files, ATTEMPT, 9, is_last=True))
    assert [text.rpartition(" ")[2] for text in found] == ["a0", "0", "a1", "1", "b1", "b0"]
    assert texts(last_lines(files, ATTEMPT, 2, is_last=True)) == found[-2:]
    assert [
        entry.line.rank
        for entry in last_lines(files, ATTEMPT, 9, is_last=True, shows=lambda line: line.rank == 1)
    ] == [1, 1, 1]


@pytest.mark.parametrize(
    ("line", "rank", "text"),
    [
        ("3: step 1", 3, "step 1"),
        ("003: step 1", 3, "step 1"),
        ("[rank7]: step 1", 7, "step 1"),
        ("1: [default0]:[rank12]:[E817 17:40:34.2 x.cpp:1] y", 12, "[E817 17:40:34.2 x.cpp:1] y"),
        ("[1,5]<stderr>: step 1", 5, "step 1"),
        ("(Worker pid=99, ip=10.0.0.1) step 1", None, "step 1"),
        ("2: \r10%|#\r20%|##", 2, "20%|##"),
        ("0: \x1b[31mValueError\x1b[0m: bad", 0, "ValueError: bad"),
        ("12:30:01 step 1", None, "12:30:01 step 1"),
    ],
)
def test_prefixes_of_launchers_name_the_rank(line: str, rank: int | None, text: str) -> None:
    found = parse_line(line)
    assert (found.rank, found.text) == (rank, text)


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-11-26T15:48:34+0000 hpcgen: x", 1_795_708_114.0),
        ("2026-11-26T15:48:34.250+00:00 trainer: x", 1_795_708_114.25),
        ("[2026-11-26 15:48:34Z] x", 1_795_708_114.0),
        ("2026-13-26T15:48:34+0000 x", None),
        ("no time", None),
    ],
)
def test_the_time_of_a_line(text: str, time: float | None) -> None:
    assert parse_line(text).time == time


def test_lines_without_a_time_at_the_end_of_a_file_are_as_late_as_its_last_change(tmp_path: Path) -> None:
    (tmp_path / "rank").write_text("2026-11-26T10:00:01+0000 began\niteration 1\niteration 2\n")
    (tmp_path / "job").write_text("2026-11-26T10:00:05+0000 waits\n2026-11-26T10:00:09+0000 ends\n")
    os.utime(tmp_path / "rank", (0, parse_line("2026-11-26T10:00:07+0000").time or 0))
    files = [LogFile(path=tmp_path / "rank", rank=0), LogFile(path=tmp_path / "job")]
    found = texts(last_lines(files, ATTEMPT, 4, is_last=True))
    assert [text.split()[-2:] for text in found][1:] == [
        ["iteration", "1"], ["iteration", "2"], ["2026-11-26T10:00:09+0000", "ends"]
    ]  # fmt: skip


def test_the_last_line_of_a_rank_may_be_far_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("3: the only one\n" + "0: x\n" * 60_000)
    [entry] = last_lines([LogFile(path=path)], ATTEMPT, 5, is_last=True, shows=lambda line: line.rank == 3)
    assert entry.line.text == "the only one"


def test_a_log_is_followed_while_it_grows_and_is_truncated_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    follower = Follower(lambda: [LogFile(path=path)], 0.0)
    assert follower.poll() == []
    with (path).open("a") as log:
        log.write("1: one\n2: two")
    assert texts(follower.poll()) == ["one"]
    with (path).open("a") as log:
        log.write(" and a half\n")
    assert texts(follower.poll()) == ["two and a half"]
    path.write_text("anew\n")
    assert texts(follower.poll()) == ["anew"]
    with (path).open("a") as log:
        log.write("last of the old file\n")
    path.rename(tmp_path / "log.1")
    path.write_text("first of the new file\n")
    assert texts(follower.poll()) == ["last of the old file", "first of the new file"]
    path.unlink()
    assert follower.poll() == []
    follower.close()


def test_logs_that_appear_are_followed_from_their_beginning(tmp_path: Path) -> None:
    files: list[LogFile] = []
    follower = Follower(lambda: files, 0.0)
    assert follower.poll() == []
    for rank, second in [(0, 2), (1, 1)]:
        (tmp_path / str(rank)).write_text(f"2026-11-26T10:00:0{second}+0000 rank {rank}\n")
        files.append(LogFile(path=tmp_path / str(rank), rank=rank))
    assert [entry.line.rank for entry in follower.poll()] == [1, 0]
    follower.close()
