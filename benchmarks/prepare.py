"""Runs `hpcgen data prepare` on files and measures it, for benchmarks.data."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgen.config.corpus import CorpusConfig, CorpusJob
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.listed_files import ManifestFile
from hpcgen.data.manifest import Manifest, manifest_path, write_manifest

TOKENIZER = TokenizerConfig()
"""GPT-2's BPE."""
LINE = b'{"text": "a tiny document"}\n'

JSON_LINES = (".jsonl", ".jsonl.zst", ".jsonl.gz")
"""Suffixes of files that can be joined by their bytes."""


@dataclass(frozen=True)
class Run:
    """A run of `hpcgen data prepare`."""

    text_mb: float
    seconds: float
    """Time of the task, including the start of its workers."""
    start_seconds: float
    """Time of the task with a corpus of tiny files."""
    rate: float
    cpu_s_per_gb: float
    peak_mib: float
    """Memory of the largest process."""


def run_prepare(files: list[Path], directory: Path, num_cores: int) -> Run:
    """Run the command on `num_cores` cores, in a new directory."""
    tiny = directory / "tiny"
    tiny.mkdir(parents=True)
    for number in range(num_cores):
        (tiny / f"{number}.jsonl").write_bytes(LINE)
    start, _, start_usage = prepare_once(sorted(tiny.iterdir()), directory / "start", num_cores)
    seconds, size, usage = prepare_once(files, directory / "corpus", num_cores)
    cpu = without_start(usage.ru_utime + usage.ru_stime, start_usage.ru_utime + start_usage.ru_stime)
    return Run(
        text_mb=size / 1e6,
        seconds=seconds,
        start_seconds=start,
        rate=size / 1e6 / without_start(seconds, start),
        cpu_s_per_gb=cpu / size * 1e9,
        peak_mib=usage.ru_maxrss / 1024,
    )


def join(files: list[Path], folder: Path, shares: list[float]) -> list[Path]:
    """Joins consecutive files into one file for each share. Compressed files may have several frames."""
    suffixes = {suffix for path in files for suffix in JSON_LINES if path.name.endswith(suffix)}
    if len(suffixes) > 1:
        raise SystemExit(f"FILES must have one suffix, not {', '.join(sorted(suffixes))}")
    folder.mkdir()
    sizes = itertools.accumulate(path.stat().st_size for path in files)
    ends = [share * sum(path.stat().st_size for path in files) for share in itertools.accumulate(shares)]
    targets = [folder / f"{number}{suffix}" for number in range(len(shares)) for suffix in suffixes]
    for path, end in zip(files, sizes, strict=True):
        index = min(sum(end > bound for bound in ends), len(targets) - 1)
        with path.open("rb") as source, targets[index].open("ab") as target:
            shutil.copyfileobj(source, target)
    return [target for target in targets if target.exists()]


def prepare_once(files: list[Path], directory: Path, num_cores: int) -> tuple[float, int, Any]:
    """Time in seconds, bytes of JSON Lines, and the resource usage of all processes."""
    directory.mkdir()
    corpus = CorpusConfig(directory=str(directory), num_output_files=len(files), verify_fraction=0)
    listed = [
        ManifestFile(
            name=f"{number:04d}-{path.name}",
            split="corpus",
            size=path.stat().st_size,
            modified_ns=path.stat().st_mtime_ns,
            path=str(path),
        )
        for number, path in enumerate(files)
    ]
    write_manifest(Manifest("benchmark", listed), manifest_path(directory))
    job = directory / "corpus.json"
    job.write_text(json.dumps(dataclasses.asdict(CorpusJob(corpus=corpus, tokenizer=TOKENIZER))))
    command = [sys.executable, "-m", "hpcgen", "data", "prepare", "-c", str(job), "--json"]
    allowed = sorted(os.sched_getaffinity(0))[:num_cores]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, preexec_fn=lambda: os.sched_setaffinity(0, allowed)
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"hpcgen data prepare failed: {output.decode()}")
    report = json.loads(output)
    return report["seconds"], report["counts"]["text_bytes"], usage


def without_start(whole: float, start: float) -> float:
    """Time of the work without the start-up, but at least half of `whole`, since the start-up time varies."""
    return whole - min(start, whole / 2)
