"""Corpora for the tests: a directory of files, its manifest, and the stages run over it."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

from hpcgen.config.corpus import CorpusConfig, CorpusJob, SourceConfig
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.listed_files import ManifestFile
from hpcgen.data.manifest import Manifest, manifest_path, read_manifest, write_manifest
from hpcgen.data.stages import configuration, units
from hpcgen.data.task import TaskReport, make_unit, run_task
from hpcgen.data.unit import Unit

CHAIN = ("extract", "concat", "tokenize")


def documents(count: int, seed: int = 0) -> list[str]:
    """Texts of a few to a few hundred words, the same for the same seed."""
    choose = random.Random(seed)
    words = [
        "alpha",
        "bêta",
        "γάμμα",
        "delta\n",
        "\u2028",
        "x" * 40,
        "😀",
        '"quoted"',
        "back\\slash",
        "tab\t",
    ]
    return [" ".join(choose.choices(words, k=choose.randrange(3, 200))) for _ in range(count)]


def json_lines(texts: Sequence[str], *, last_newline: bool = True) -> bytes:
    """The texts as JSON Lines."""
    content = b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)
    return content if last_newline else content.removesuffix(b"\n")


def write_file(path: Path, content: bytes) -> Path:
    """Writes `content`, compressed as the suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".zst":
        content = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    elif path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    path.write_bytes(content)
    return path


def swapped_merges(merges: bytes) -> bytes:
    """GPT-2's merges with two of the first exchanged: the same ids exist, but words with "ere" have others."""
    lines = merges.split(b"\n")
    one, other = lines.index(b"r e"), lines.index(b"e r")
    lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


def planned_corpus(
    source: Path,
    directory: Path,
    names: Sequence[str],
    *,
    splits: Mapping[str, str] | None = None,
    tokenizer: TokenizerConfig | None = None,
    **settings: Any,
) -> CorpusJob:
    """The job of a corpus of `names` in `source`, whose manifest is written; `splits` names the split of each."""
    files = []
    for name in names:
        status = (source / name).stat()
        files.append(
            ManifestFile(
                name=name,
                split=splits[name] if splits else "corpus",
                size=status.st_size,
                modified_ns=status.st_mtime_ns,
                path=str(source / name),
            )
        )
    directory.mkdir(parents=True, exist_ok=True)
    write_manifest(Manifest("a test", files), manifest_path(directory))
    corpus = CorpusConfig(
        directory=str(directory),
        source=SourceConfig(directory=str(source)),
        **{"verify_fraction": 0, **settings},
    )
    return CorpusJob(corpus=corpus, tokenizer=tokenizer or TokenizerConfig(kind="bytes"))


def one_unit(job: CorpusJob, stage: Any, index: int = 0) -> Unit:
    """One unit of a stage."""
    return units(stage, job, read_manifest(manifest_path(job.directory)))[index]


def left_behind(directory: Path) -> list[str]:
    """Private files below `directory`: none, when nothing was killed."""
    return sorted(path.name for path in directory.rglob(".*.tmp"))


def published(directory: Path) -> list[str]:
    """Outputs and records below a corpus's directory; private files of somebody at work aside."""
    folders = ("download", "extract", "concat", "tokens")
    paths = (
        path
        for folder in folders
        for path in (directory / folder).rglob("*")
        if path.is_file() and not path.name.startswith(".")
    )
    return sorted(path.relative_to(directory).as_posix() for path in paths)


def write_job(job: CorpusJob, path: Path) -> Path:
    """The corpus.json that a job of an array is given."""
    path.write_text(json.dumps(dataclasses.asdict(job)))
    return path


def run_stages(job: CorpusJob, *stages: Any, num_tasks: int = 1, workers: int = 1) -> list[TaskReport]:
    """Runs every task of these stages; they must succeed."""
    manifest = read_manifest(manifest_path(job.directory))
    reports = []
    for stage in stages:
        for task_id in range(num_tasks):
            report = run_task(stage, job, manifest, task_id=task_id, num_tasks=num_tasks, workers=workers)
            assert not report.errors, report.errors
            reports.append(report)
    return reports


def make_units(job: CorpusJob, *stages: Any) -> None:
    """Makes every unit of these stages in this process, as a worker does: quicker than `run_stages`."""
    for stage in stages:
        settings = configuration(stage, job)
        for unit in units(stage, job, read_manifest(manifest_path(job.directory))):
            make_unit(unit, lambda step: None, lambda: 1, job=job, settings_hash=settings)


def pairs(directory: Path) -> dict[str, bytes]:
    """Every .bin and .idx of a corpus, by name."""
    return {
        path.name: path.read_bytes()
        for path in sorted((directory / "tokens").iterdir())
        if path.suffix in (".bin", ".idx")
    }
