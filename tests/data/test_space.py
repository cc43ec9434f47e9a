"""Checks of free space for the output of the stages: refused if it cannot fit, a warning if it may not."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcgen.config.corpus import CorpusConfig, CorpusJob, SourceConfig
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.free_space import FreeSpace, quotas
from hpcgen.data.listed_files import ManifestFile
from hpcgen.data.manifest import Manifest
from hpcgen.data.record import FileIdentity, Record, write_record
from hpcgen.data.space import Need, bounds_text, check_space, check_units, estimates
from hpcgen.data.stages import configuration, units
from hpcgen.errors import HpcgenError

TB = 10**12


def corpus_job(tmp_path: Path) -> CorpusJob:
    corpus = CorpusConfig(
        directory=str(tmp_path / "corpus"), num_output_files=4, source=SourceConfig(directory="/x")
    )
    return CorpusJob(corpus=corpus, tokenizer=TokenizerConfig())


def manifest(*sizes: int | None, suffix: str = ".jsonl.zst") -> Manifest:
    files = [
        ManifestFile(name=f"{number}{suffix}", split="corpus", size=size, url="https://a.example/x")
        for number, size in enumerate(sizes)
    ]
    return Manifest("test", files)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the file system tells: it is the one thing here that cannot be filled for a test."""

    def set_room(free_bytes: int, free_files: int = 10**9, total_files: int = 10**9) -> None:
        status = os.statvfs_result((4096, 1, 0, 0, free_bytes, total_files, 0, free_files, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda path: status)

    return set_room


def test_the_bounds_of_each_stage(tmp_path: Path) -> None:
    needs = estimates(corpus_job(tmp_path), manifest(TB, TB))
    assert {stage: bounds_text(need) for stage, need in needs.items()} == {
        "download": "2.0 TB",
        "extract": "4.0 to 16.0 TB",
        "concat": "4.0 to 16.0 TB",
        "tokenize": "1.4 to 15.2 TB",
        "prepare": "1.4 to 15.2 TB",
    }
    plain = estimates(corpus_job(tmp_path), manifest(TB, suffix=".jsonl"))
    assert bounds_text(plain["extract"]) == "0 B"
    assert bounds_text(plain["concat"]) == "1.0 TB"
    assert bounds_text(plain["prepare"]) == "350.0 to 950.0 GB"


def test_larger_ids_and_bytes_need_more(tmp_path: Path) -> None:
    job = corpus_job(tmp_path)
    of_bytes = CorpusJob(corpus=job.corpus, tokenizer=TokenizerConfig(kind="bytes"))
    assert estimates(of_bytes, manifest(TB, suffix=".jsonl"))["prepare"] == Need(1_600 * 10**9, 2_050 * 10**9)


def test_outputs_that_cannot_fit_are_refused_before_anything_is_written(tmp_path: Path, room: Any) -> None:
    room(3 * TB)
    job = corpus_job(tmp_path)
    assert check_space("download", job, manifest(TB, TB)) == []
    [warning] = check_space("prepare", job, manifest(TB, TB))
    assert warning == (
        f"prepare: will write about 1.4 to 15.2 TB in 10 files below {job.directory}; the file system of "
        f"{job.directory} has 3.0 TB left, so they may not fit"
    )
    [warning] = check_space("extract", job, manifest(TB, TB))
    assert warning.endswith("has 3.0 TB left, so they probably will not fit")
    with pytest.raises(
        HpcgenError,
        match=r"download, extract: will write about 6\.0 to 18\.0 TB in 8 files below .* \(at least 4\.0 TB\), but "
        r".* has only 3\.0 TB left; free some space, or",
    ):
        check_space(("download", "extract"), job, manifest(TB, TB))
    assert list(tmp_path.iterdir()) == []


def test_plain_files_that_are_joined_need_what_they_have(tmp_path: Path, room: Any) -> None:
    room(2 * TB - 1)
    with pytest.raises(
        HpcgenError, match=r"concat: will write about 2\.0 TB in 6 files .* \(at least 2\.0 TB\)"
    ):
        check_space("concat", corpus_job(tmp_path), manifest(TB, TB, suffix=".jsonl"))


@pytest.mark.parametrize("stage", ["extract", "concat"])
def test_parquet_may_shrink_to_few_lines(tmp_path: Path, room: Any, stage: str) -> None:
    """The lines of an encoding of repeated values may be shorter than it, so no size is certain."""
    room(TB)
    [warning] = check_space(stage, corpus_job(tmp_path), manifest(*[TB // 2] * 4, suffix=".parquet"))
    assert "probably will not fit" in warning


def test_lines_that_are_mostly_metadata_are_not_refused(tmp_path: Path, room: Any) -> None:
    """4 MB of JSON Lines became 57 kB of tokens: what the lines hold is not known before they are read."""
    room(100_000)
    [warning] = check_space("prepare", corpus_job(tmp_path), manifest(4_000_000, suffix=".jsonl"))
    assert "probably will not fit" in warning


def test_a_task_needs_room_for_its_own_share(tmp_path: Path, room: Any) -> None:
    room(TB)
    job, files = corpus_job(tmp_path), manifest(*[TB // 2] * 8)
    with pytest.raises(HpcgenError, match=r"4\.0 TB in 16 files"):
        check_space("download", job, files)
    assert check_space("download", job, files, task_id=3, num_tasks=4) == []


def test_finished_outputs_need_no_more_space(tmp_path: Path, room: Any) -> None:
    room(TB)
    job, files = corpus_job(tmp_path), manifest(*[TB // 2] * 3)
    for unit in units("download", job, files)[:2]:
        target = job.directory / unit.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            file.truncate(TB // 2)  # no block of it is written
        write_record(
            Record(
                stage="download",
                configuration=configuration("download", job),
                inputs=(FileIdentity(unit.inputs[0].name, TB // 2),),
                outputs=(FileIdentity(unit.name, TB // 2, "0" * 64),),
            ),
            target,
        )
    assert check_space("download", job, files) == []
    # what is left is taken from whoever has looked already: these records are not read again
    with pytest.raises(HpcgenError, match=r"at least 1\.5 TB"):
        check_units({"download": units("download", job, files)}, job, files)


def test_inodes_count_as_well(tmp_path: Path, room: Any) -> None:
    job, files = corpus_job(tmp_path), manifest(*[10] * 100)
    room(TB, free_files=150)
    with pytest.raises(
        HpcgenError, match=r"in 200 files below .* has only 150 files left; remove some files"
    ):
        check_space("download", job, files)
    room(TB, free_files=0, total_files=0)  # a file system that counts none
    assert check_space("download", job, files) == []


def test_unknown_sizes_make_it_a_guess(tmp_path: Path, room: Any) -> None:
    room(TB)
    assert check_space("download", corpus_job(tmp_path), manifest(10, None, 30)) == [
        "the corpus has 1 file of unknown size, so the space needed is a rough estimate"
    ]
    with pytest.raises(HpcgenError, match=r"3\.0 TB in 6 files"):
        check_space("download", corpus_job(tmp_path), manifest(TB, None, TB))


def test_the_real_file_system_has_room_for_little(tmp_path: Path) -> None:
    assert check_space("download", corpus_job(tmp_path), manifest(1, 2)) == []


def test_bounds_for_people() -> None:
    assert bounds_text(Need(999_000, 2_000_000)) == "999.0 kB to 2.0 MB"


# Lustre: a stand-in that prints the output of lfs of Lustre 2.12 to 2.15

LFS = r"""#!{python}
import sys
words = sys.argv[1:]
if words[:2] == ["project", "-d"]:
    print(" 110255 P " + words[2])
elif words[:2] == ["quota", "-u"]:
    print("Disk quotas for usr bob (uid " + words[2] + "):")
    print("     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace")
    print("    /mnt/lustre     308*    100     400 6d23h59m52s      3*      2       4 expired")
elif words[:2] == ["quota", "-g"]:
    print("Disk quotas for grp lab (gid " + words[2] + "):")
    print("     Filesystem  kbytes  bquota  blimit  bgrace   files  iquota  ilimit  igrace")
    print("    /mnt/lustre [1225350212] 0 0 -  714982       0       0       -")
    print("gid 500 is using default block quota setting")
elif words[:2] == ["quota", "-p"] and words[2] == "110255":
    print("Disk quotas for prj 110255 (pid 110255):")
    print("     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace")
    print("/mnt/lustre/projects/a-long-name")
    print("                1000000  2000000 3000000       -     700    1000       0       -")
else:
    sys.exit("unexpected: " + repr(words))
"""


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "lfs"
    program.parent.mkdir()
    program.write_text(LFS.replace("{python}", sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


@pytest.mark.process
def test_quotas_of_user_group_and_project(tmp_path: Path, lfs: Path) -> None:
    group = os.getegid()
    assert list(quotas(tmp_path, 1000)) == [
        FreeSpace("the quota of user 1000", (400 - 308) * 1024, 1),
        FreeSpace(f"the quota of group {group}", None, None),
        FreeSpace("the quota of project 110255", 2_000_000 * 1024, 300),
    ]
    assert list(quotas(tmp_path, 0)) == []  # quotas do not apply to root


@pytest.mark.process
def test_a_quota_refuses_what_the_file_system_would_take(
    tmp_path: Path, lfs: Path, monkeypatch: pytest.MonkeyPatch, room: Any
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    room(10 * TB)
    job = corpus_job(tmp_path)
    with pytest.raises(
        HpcgenError, match=r"100\.0 kB in 2 files below .*, but the quota of user 1000 has only 94\.2 kB left"
    ):
        check_space("download", job, manifest(100_000))


@pytest.mark.process
def test_without_lustre_no_quota_is_reported(
    tmp_path: Path, lfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lfs.write_text(
        "#!/bin/sh\necho 'lfs project: cannot get project: Inappropriate ioctl for device' >&2; exit 25\n"
    )
    assert list(quotas(tmp_path, 1000)) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(quotas(tmp_path, 1000)) == []
