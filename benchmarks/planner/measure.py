"""Measures our own cases (benchmarks.planner_cases) for benchmarks.planner, on one to four GPUs.

    python -m benchmarks.planner.measure --gpu-model "H100 SXM 80 GB" [--only PATTERN ...] [--steps N]

Cases that need fewer GPUs than there are run at the same time, on random documents. Each result becomes a row of
data/own.csv, in place of an earlier one. Exit status 1 if a run failed.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks import runs, train
from benchmarks.documents import write_corpus
from benchmarks.planner_cases import CASES
from benchmarks.train_cases import Case
from trainer.calibration.machine import machine

COLUMNS = ("case", "gpu", "step_s", "allocated_gib", "reserved_gib", "machine", "date", "versions")
NUM_TOKENS = 3_000_000
FILE = Path(__file__).with_name("data") / "own.csv"


def main() -> int:
    """Run the cases, those with the same number of GPUs side by side."""
    options = parser()
    arguments = options.parse_args()
    runs.end_like_ctrl_c()
    gpus = runs.count_gpus(options)
    cases = [
        case
        for case in CASES
        if case.gpus <= gpus and any(fnmatch.fnmatch(case.name, only) for only in arguments.only)
    ]
    facts = {"gpu": arguments.gpu_model, **machine("cuda")}
    failed: list[str] = []
    table = threading.Lock()

    def measure(case: Case, place: int) -> None:
        try:
            row = facts | {"case": case.name} | measured(case, place, arguments)
        except train.FAILURES as error:
            failed.append(case.name)
            print(f"{case.name}: {train.described(error)}", flush=True)
            return
        with table:
            print(json.dumps(row), flush=True)
            write(arguments.out, row)

    with tempfile.TemporaryDirectory() as scratch:
        arguments.corpus = write_corpus(Path(scratch).resolve() / "corpus", NUM_TOKENS)
        for count in sorted({case.gpus for case in cases}):
            runs.side_by_side(measure, [case for case in cases if case.gpus == count], gpus // count)
    return int(bool(failed))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.planner.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--gpu-model", required=True, help="gpu_model of the node types with these GPUs")
    options.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="patterns for names")
    options.add_argument("--steps", type=int, default=10, help="number of timed steps per case")
    options.add_argument("--out", type=Path, default=FILE, metavar="FILE", help="table of the results")
    options.set_defaults(one_rank=False)
    return options


def measured(case: Case, place: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Time and memory of a case on the GPUs of a place."""
    options = argparse.Namespace(**vars(arguments), environment=runs.gpus_at(place, case.gpus))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        config = train.configuration(case, arguments.corpus, Path(scratch).resolve() / "run")
        result = train.run_trainer(case, config, options)
    return {
        "step_s": round(result["step_s"], 5),
        "allocated_gib": round(result["peak_memory_gib"], 2),
        "reserved_gib": round(result["peak_reserved_gib"], 2),
    }


def write(file: Path, row: dict[str, Any]) -> None:
    """Put a row into the table, which is in the order of the cases."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if file.exists():
        with file.open(encoding="utf-8", newline="") as lines:
            rows = {(each["gpu"], each["case"]): each for each in csv.DictReader(lines)}
    versions = " ".join(f"{name} {version}" for name, version in row["versions"].items())
    rows[row["gpu"], row["case"]] = row | {"versions": versions}
    order = [case.name for case in CASES]
    new = file.with_name(f"{file.name}.new")
    with new.open("w", encoding="utf-8", newline="") as lines:
        table = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows[key] for key in sorted(rows, key=lambda key: (key[0], order.index(key[1]))))
    new.replace(file)


if __name__ == "__main__":
    sys.exit(main())
