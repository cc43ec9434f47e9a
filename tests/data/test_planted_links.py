"""A member of the group that shares a corpus plants links: no stage reads or writes through one, and each names it."""

from __future__ import annotations

import dataclasses
import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from hpcgen.data.progress import progress_path
from hpcgen.data.stages import configuration, units
from hpcgen.data.task import make_unit, run_task
from hpcgen.errors import HpcgenError
from tests.data.data_runs import documents, json_lines
from tests.data.downloads import corpus_job, manifest_of
from tests.http_server import Server

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of another user"),
]

NOBODY = 65534
STAGES: tuple[Any, ...] = ("download", "extract", "concat", "tokenize", "prepare")
LINES = json_lines(documents(20))


EXAMPLES = [
    ("download", "download/sub/deep"),
    ("extract", "download/sub/deep/b.jsonl.gz"),
    ("concat", "extract/sub/deep/b.jsonl"),
    ("prepare", "tokens"),
]


@pytest.mark.parametrize("only", [EXAMPLES, pytest.param(None, marks=pytest.mark.slow)], ids=["few", "all"])
def test_no_part_of_a_path_below_the_corpus_is_a_link_of_another_user(
    server: Server, tmp_path: Path, only: list[tuple[str, str]] | None
) -> None:
    """Tries each directory that a stage writes to, and each file that it reads. Every second link is broken."""
    files = {"sub/deep/a.jsonl": LINES, "sub/deep/b.jsonl.gz": gzip.compress(LINES)}
    job, manifest = corpus_job(tmp_path, server), manifest_of(server, files)
    corpus = dataclasses.replace(job.corpus, num_output_files=1, verify_fraction=0)
    job = dataclasses.replace(job, corpus=corpus, share="group")
    tried = []
    for stage in STAGES:
        made = units(stage, job, manifest)
        outputs = {job.directory / name for unit in made for name in unit.files}
        inputs = {item.path for unit in made for item in unit.inputs}
        directories = {path.parent for path in (*outputs, progress_path(job.directory, stage, 0, 1))}
        for place in sorted({*map_parents(directories | inputs, job.directory)}):
            name = place.relative_to(job.directory).as_posix()
            if only is not None and (stage, name) not in only:
                continue
            target = tmp_path / ("victim", "missing")[len(tried) % 2]
            link = plant(place, target, job.directory)
            before = contents(target)
            with pytest.raises(HpcgenError, match=f"{link} is a symbolic link that user .* placed"):
                raise_first(run_task(stage, job, manifest, workers=1).errors)
            assert contents(target) == before, place
            restore(link)
            tried.append((stage, name))
        for unit in made:
            make_unit(unit, lambda step: None, lambda: 1, job=job, settings_hash=configuration(stage, job))
    assert {*EXAMPLES} <= {*tried}


def test_a_link_of_the_owner_or_in_a_private_corpus_is_followed(server: Server, tmp_path: Path) -> None:
    job, manifest = corpus_job(tmp_path, server), manifest_of(server, {"sub/a.jsonl": LINES})
    for share, owner in (("group", 0), ("private", NOBODY)):
        place = tmp_path / share
        place.mkdir()
        own = dataclasses.replace(
            job, corpus=dataclasses.replace(job.corpus, directory=str(tmp_path / f"c-{share}")), share=share
        )
        own.directory.mkdir()
        (own.directory / "download").symlink_to(place)
        os.lchown(own.directory / "download", owner, owner)
        [unit] = units("download", own, manifest)
        make_unit(unit, lambda step: None, lambda: 1, job=own, settings_hash="")
        assert (place / "sub/a.jsonl").read_bytes() == LINES


def map_parents(paths: set[Path], root: Path) -> set[Path]:
    """The paths below `root`, and their parents below it."""
    return {place for path in paths for place in (path, *path.parents) if root in place.parents}


def plant(place: Path, target: Path, root: Path) -> Path:
    """Puts another user's link to `target` in place of a directory or file, which it sets aside. Returns the link."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(place):
        place.rename(place.with_name(f"{place.name}.aside"))
    if target.name == "victim" and not target.exists():
        target.mkdir()
        for name in ("a.jsonl", "b.jsonl.gz", "corpus-00000-of-00001.bin", "precious"):
            (target / name).write_text("precious")
    place.symlink_to(target)
    os.lchown(place, NOBODY, NOBODY)
    return place


def restore(link: Path) -> None:
    """Undoes `plant`."""
    link.unlink()
    aside = link.with_name(f"{link.name}.aside")
    if aside.exists():
        aside.rename(link)


def contents(directory: Path) -> dict[str, bytes]:
    """What is below a directory, which may be missing."""
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def raise_first(errors: tuple[str, ...]) -> None:
    """Raises the first error of a task: those of its units are reported, not raised."""
    for error in errors:
        raise HpcgenError(error)
