"""The last lines of logs, and logs that grow."""

from __future__ import annotations

from pathlib import Path

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
