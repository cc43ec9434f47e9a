"""Output files of users: replaced atomically, through links, into devices; no directory is made unasked."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hpcgen.errors import HpcgenError
from hpcgen.files import replace_text, shared_as_directory, write_output, write_text


def test_a_file_is_replaced_not_written_over(tmp_path):
    target = tmp_path / "a"
    target.write_text("old")
    with target.open() as reader:
        write_output(target, "new", 0o755)
        assert reader.read() == "old"
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o100
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    "write", [replace_text, lambda *args: write_text(*args, 0o644), lambda *args: write_output(*args, 0o755)]
)
def test_a_write_protected_file_is_not_replaced(tmp_path, write):
    """A rename needs only the directory. Root respects the mode as well."""
    target, link = tmp_path / "a", tmp_path / "link"
    target.write_text("precious")
    target.chmod(0o444)
    link.symlink_to("a")
    for path in (target, link):
        with pytest.raises(
            HpcgenError, match=rf"is write-protected; to replace it, run chmod u\+w {target}$"
        ):
            write(path, "new")
    assert target.read_text() == "precious"
    target.chmod(0o600)
    write(target, "new")
    assert target.read_text() == "new"


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_its_file_is_replaced(tmp_path, there):
    (tmp_path / "folder").mkdir()
    real, link = tmp_path / "folder/real", tmp_path / "link"
    if there:
        real.write_text("old")
    link.symlink_to("folder/real")
    write_output(link, "new", 0o644)
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["real"]


def test_a_pipe_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_output(pipe, "script", 0o755)
    reader.join()
    assert read == ["script"]
    assert pipe.is_fifo()


def test_a_device_is_written_to():
    write_output(Path("/dev/null"), "x", 0o755)
    assert Path("/dev/null").is_char_device()
    with pytest.raises(HpcgenError, match=r"^/dev/full: cannot be written \(No space left on device\)$"):
        write_output(Path("/dev/full"), "x", 0o755)
    assert Path("/dev/full").is_char_device()


def test_no_directory_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("gone/real")
    for target in (Path("a/b/c"), Path("link")):
        with pytest.raises(HpcgenError, match=rf"{tmp_path}/(a|gone) does not exist; create it first$"):
            write_output(target, "x", 0o644)
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_paths_that_cannot_be_files(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for name in ("loop", "file/x", "."):
        with pytest.raises(HpcgenError, match="cannot be written"):
            write_output(tmp_path / name, "x", 0o644)
    assert (tmp_path / "loop").is_symlink()


def test_hpcgens_own_files_create_their_directory(tmp_path):
    write_text(tmp_path / "jobs/1/trainer.json", "{}", 0o660)
    assert (tmp_path / "jobs/1/trainer.json").read_text() == "{}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of another user")
@pytest.mark.parametrize("exists", [True, False])
def test_an_output_does_not_replace_the_target_of_another_users_link(tmp_path: Path, exists: bool) -> None:
    """As of a report.html that a member of the run's group placed."""
    link, victim = tmp_path / "report.html", tmp_path / "victim"
    if exists:
        victim.write_text("precious")
    link.symlink_to(victim)
    os.lchown(link, 65534, 65534)
    with pytest.raises(HpcgenError, match=r"report\.html is a symbolic link that user nobody placed"):
        write_output(link, "new", 0o644)
    assert victim.exists() == exists
    assert not exists or victim.read_text() == "precious"


def test_a_file_in_a_shared_directory_is_the_groups_as_well(tmp_path: Path) -> None:
    for mode, expected in ((0o2770, 0o660), (0o770, 0o644), (0o700, 0o644)):
        tmp_path.chmod(mode)
        with shared_as_directory(tmp_path):
            write_text(tmp_path / "report.html", "x", 0o666)
        assert (tmp_path / "report.html").stat().st_mode & 0o777 == expected
