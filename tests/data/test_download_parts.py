"""Incomplete downloads: they continue after a kill or a full disk, and two processes never write one file."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import zstandard

from hpcgen.data import part
from hpcgen.data.http import Web
from hpcgen.errors import HpcgenError
from hpcgen.files import host_tag, publish
from tests.data.downloads import CONTENT, PATH, become_another_process, fetch, names, wanted
from tests.http_server import Server, cut, stall
from tests.patience import wait_until

PROGRAM = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from hpcgen.data import part
    from hpcgen.data.retries import RetryPolicy
    from hpcgen.data.stores.base import Wanted
    from hpcgen.data.stores.http import Http
    from hpcgen.data.transfer import fetched
    from hpcgen.files import host_tag, publish
    part.SYNC_INTERVAL = 50_000
    url, target, size = sys.argv[1:]
    wanted = Wanted(name="part.jsonl.zst", url=url, size=int(size), sha256=None)
    with fetched(wanted, Path(target), Http(RetryPolicy(read_timeout_s=30))) as content:
        publish(content.file, Path(target))
    """
)


def start(server: Server, target: Path) -> subprocess.Popen[bytes]:
    arguments = [server.url + PATH, str(target), str(len(CONTENT))]
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments])


def killed_after(num_bytes: int, server: Server, target: Path) -> int:
    """Kills a download that has noted so many bytes; how many it noted."""
    process = start(server, target)

    def noted() -> int:
        sizes = [json.loads(path.read_bytes())["size"] for path in target.parent.glob(".*.part.json")]
        return sizes[-1] if sizes else 0

    wait_until(lambda: noted() >= num_bytes, interval_s=0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return noted()


@pytest.mark.process
def test_after_a_kill_the_download_continues_where_it_was(tmp_path: Path, server: Server, web: Web) -> None:
    server.behaviours[PATH] = [stall(200_000, 20), stall(0, 20)]
    server.etags[PATH] = '"stalled"'
    target = tmp_path / "part.jsonl.zst"
    kept = killed_after(150_000, server, target)
    assert len(names(tmp_path)) == 2
    assert not target.exists()
    # killed again, before anything new came: the beginning is kept once, not twice
    server.behaviours[PATH] = [stall(0, 20)]
    second = start(server, target)
    old = names(tmp_path)
    while len(server.asked(PATH)) < 2 or names(tmp_path) == old:
        assert second.poll() is None
        time.sleep(0.005)
    second.kill()
    second.wait()
    assert len(names(tmp_path)) == 2
    server.behaviours.clear()
    steps: list[int] = []
    fetch(wanted(server, sha256=None), target, web, steps.append)
    assert server.requests[-1].headers["range"] == f"bytes={kept}-"
    assert target.read_bytes() == CONTENT
    assert sum(steps) == len(CONTENT)
    assert names(tmp_path) == ["part.jsonl.zst"]


@pytest.mark.process
def test_leftovers_of_other_content_are_discarded(tmp_path: Path, server: Server, web: Web) -> None:
    server.behaviours[PATH] = [stall(200_000, 20)]
    target = tmp_path / "part.jsonl.zst"
    kept = killed_after(150_000, server, target)
    server.files[PATH] = zstandard.compress(random.Random(9).randbytes(300_000))  # with another ETag
    server.behaviours.clear()
    fetch(wanted(server, size=None, sha256=None), target, web)
    assert server.requests[-1].headers["range"] == f"bytes={kept}-"
    assert target.read_bytes() == server.files[PATH]
    assert names(tmp_path) == ["part.jsonl.zst"]


@pytest.mark.process
def test_random_kills_and_copies_end_in_the_same_file(tmp_path: Path, server: Server) -> None:
    server.etags[PATH] = '"one"'
    target = tmp_path / "part.jsonl.zst"
    random_numbers = random.Random(11)
    for _ in range(2):
        server.behaviours[PATH] = [cut(random_numbers.randrange(10_000, 90_000)) for _ in range(3)]
        runs = [start(server, target) for _ in range(2)]
        time.sleep(random_numbers.uniform(0.15, 0.5))
        for run in runs:
            run.kill()
            run.wait()
        assert not target.exists() or target.read_bytes() == CONTENT
    server.behaviours.clear()
    runs = [start(server, target) for _ in range(3)]
    assert [run.wait() for run in runs] == [0] * 3
    assert target.read_bytes() == CONTENT
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["part.jsonl.zst"]


def test_two_processes_never_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where every lock seems free, as on a file system that keeps locks to each node."""
    monkeypatch.setattr("fcntl.flock", lambda file, operation: None)
    monkeypatch.setattr("socket.gethostname", lambda: "node-1")
    with part.partial_file(tmp_path / "x", "http://a") as first:
        first.write(b"first")
        first.save_state()
        monkeypatch.setattr("socket.gethostname", lambda: "node-2")
        become_another_process()
        with part.partial_file(tmp_path / "x", "http://a") as second:
            assert second.size == 5  # copied
            second.write(b" and second")
            first.write(b", still")
            publish(second.file, tmp_path / "x")
        assert (tmp_path / "x").read_bytes() == b"first and second"
        publish(first.file, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"first, still"
    assert names(tmp_path) == ["x"]


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    host = host_tag()
    for name in ("x", "done", "waiting"):
        (tmp_path / f".{name}.{host}00000000.part").write_bytes(b"of this host")
        (tmp_path / f".{name}.{host}00000000.part.json").write_bytes(b"{}")
        (tmp_path / f".{name}.0123456700000000.part").write_bytes(b"of another host")
    (tmp_path / "done").write_bytes(b"by another process")
    with part.partial_file(tmp_path / "x", "http://a") as mine:
        mine.write(b"content")
        publish(mine.file, tmp_path / "x")
    of_another = [f".{name}.0123456700000000.part" for name in ("done", "waiting", "x")]
    to_go_on_with = [f".waiting.{host}00000000.part", f".waiting.{host}00000000.part.json"]
    assert names(tmp_path) == sorted([*of_another, *to_go_on_with, "done", "x"])
    for name in of_another:
        os.utime(tmp_path / name, (0, 0))  # not written to for a long time
    become_another_process()
    with part.partial_file(tmp_path / "x", "http://a"):
        pass
    assert names(tmp_path) == sorted([of_another[1], *to_go_on_with, "done", "x"])


def test_a_folder_is_scanned_once_for_any_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir, looks = os.scandir, list[object]()

    def counting(path: object) -> object:
        looks.append(path)
        return scandir(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", counting)
    for number in range(5):
        target = tmp_path / "flat" / f"{number}.jsonl"
        with contextlib.suppress(HpcgenError), part.partial_file(target, "http://a") as broken:
            broken.write(b"half")
            raise HpcgenError("the server breaks off")
        with part.partial_file(target, "http://a") as whole:
            assert whole.size == 4  # its own part is known without a look
            publish(whole.file, target)
    assert len(looks) == 1
    monkeypatch.undo()
    assert names(tmp_path / "flat") == [f"{number}.jsonl" for number in range(5)]


def test_a_part_whose_owner_starts_again_while_it_is_copied_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with part.partial_file(tmp_path / "x", "http://a") as owner:
        owner.write(b"old content")
        owner.save_state()
        reads = part._read_state

        def restarted_after_the_first_look(path: Path) -> object:
            note = reads(path)
            if owner.size == len(b"old content"):
                owner.restart()
            return note

        monkeypatch.setattr(part, "_read_state", restarted_after_the_first_look)
        become_another_process()
        with part.partial_file(tmp_path / "x", "http://a") as copy:
            assert copy.size == 0


@pytest.mark.process
def test_a_full_disk_publishes_nothing(tmp_path: Path, server: Server) -> None:
    program = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2)\n" + PROGRAM
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    arguments = [server.url + PATH, str(tmp_path / "x.jsonl.zst"), str(len(CONTENT))]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "File too large" in done.stderr
    assert names(tmp_path) == []
