"""Measures the kernels of a GPU into a table, from which hpcgen predicts the time of a step.

    python -m benchmarks.kernels --gpu-model "H100 SXM 80 GB" --out FILE [--only SECTION ...] [--corpus CORPUS]

FILE is a table for topologies/kernels; topologies/README.md describes the rows. It is written after every section.
Sections that are not measured this time keep their rows. With several GPUs, the jobs of a section run side by side. The
section `host` trains on CORPUS, the path of a .bin/.idx pair without its extension. Rows that failed are printed.
Requires Transformer Engine. With --device cpu, a few tiny jobs show that the program works. Exit status 1 if a row
failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.kernels import host
from benchmarks.kernels.section import NAMES as SINGLE_GPU
from benchmarks.machine import machine

Row = dict[str, Any]
LOADS = ("fp8_products", "bf16_products", "attention", "memory")


def main() -> int:
    """Measure the sections one after another."""
    options = parser()
    arguments = options.parse_args()
    sections = arguments.only or [name for name in SECTIONS if name != "host" or arguments.corpus]
    if "host" in sections and not arguments.corpus:
        options.error("the section host needs --corpus")
    runs.end_like_ctrl_c()
    gpus = runs.count_gpus(options) if arguments.device == "cuda" else 2
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        arguments.scratch = Path(scratch)
        for name in sections:
            started = time.monotonic()
            rows = SECTIONS[name](name, gpus, arguments)
            errors = [row for row in rows if "error" in row]
            add(arguments, name, [row for row in rows if "error" not in row])
            for row in errors:
                print(json.dumps(row), flush=True)
            failed |= bool(errors)
            took = time.monotonic() - started
            print(f"{name}: {len(rows) - len(errors)} rows, {len(errors)} failed, {took:.0f} s", flush=True)
    return int(failed)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--gpu-model", required=True, help="gpu_model of the node types with this GPU")
    options.add_argument("--out", type=Path, required=True, metavar="FILE", help="the table")
    options.add_argument(
        "--only",
        nargs="+",
        choices=list(SECTIONS),
        metavar="SECTION",
        help="sections to measure. Default: all",
    )
    options.add_argument("--corpus", type=Path, help="prefix of a .bin/.idx pair")
    options.add_argument("--seconds", type=float, default=0.3, help="time per row")
    options.add_argument("--power-seconds", type=float, default=120, help="time per load")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return options


def single_gpu(name: str, gpus: int, arguments: argparse.Namespace) -> list[Row]:
    """Rows of a section whose jobs need one GPU each."""

    def measure(part: int, place: int) -> list[Row]:
        file = arguments.scratch / f"{name}-{part}"
        command = ["-m", "benchmarks.kernels.section", name, str(file), "--part", str(part)]
        command += ["--parts", str(gpus), "--seconds", str(arguments.seconds), "--device", arguments.device]
        return completed(command, file, 1, runs.one_gpu(place))

    parts = runs.side_by_side(measure, range(gpus), gpus)
    # Each part has every n-th job, so this is the order of the jobs.
    return [row for rows in itertools.zip_longest(*parts) for row in rows if row is not None]


def completed(command: list[str], file: Path, ranks: int, environment: dict[str, str]) -> list[Row]:
    """Run a program that writes rows to `file`. If it fails, its error is one more row."""
    try:
        runs.run(command, file.with_suffix(".log"), ranks, environment)
        error: list[Row] = []
    except runs.RunError as reason:
        error = [{"error": str(reason)}]
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines] + error


def collectives(name: str, gpus: int, arguments: argparse.Namespace) -> list[Row]:
    """Rows of transfers between the GPUs, alone and next to products. One process measures both."""
    if gpus < 2:
        return []
    file = arguments.scratch / name
    command = ["-m", "benchmarks.kernels.collectives", str(file), "--device", arguments.device]
    rows = completed(command, file, gpus, {})
    add(arguments, "beside", [without_section(row) for row in rows if row.get("section") == "beside"])
    return [without_section(row) for row in rows if row.get("section") != "beside"]


def without_section(row: Row) -> Row:
    """The row without the name of its section."""
    return {key: value for key, value in row.items() if key != "section"}


def host_times(name: str, gpus: int, arguments: argparse.Namespace) -> list[Row]:
    """Rows of the time for which the host is busy with a layer."""
    jobs = host.jobs(gpus) if arguments.device == "cuda" else []
    work = [(index, case) for index, job in enumerate(jobs) for case in host.cases(job)]
    times: dict[int, list[float]] = {index: [] for index in range(len(jobs))}
    errors: dict[int, str] = {}
    for count in (1, 2):
        some = [each for each in work if each[1].gpus == count]

        def measure(each: tuple[int, Any], place: int, count: int = count) -> float | str:
            index, case = each
            scratch = arguments.scratch / f"{name}-{index}-{case.model['num_layers']}"
            scratch.mkdir()
            try:
                return host.step_s(case, arguments.corpus, scratch / "run", runs.gpus_at(place, count))
            except (runs.RunError, OSError, ValueError) as error:
                return str(error)

        results = runs.side_by_side(measure, some, gpus // count) if some else []
        for (index, _), result in zip(some, results, strict=True):
            if isinstance(result, str):
                errors[index] = result
            else:
                times[index].append(result)
    return [
        job | {"error": errors[index]} if index in errors else host.row(job, times[index])
        for index, job in enumerate(jobs)
    ]


def power(name: str, gpus: int, arguments: argparse.Namespace) -> list[Row]:
    """Rows of power and clock. First of idle GPUs, then of one load on each."""
    if arguments.device == "cpu":
        return []

    def measure(load: str, place: int) -> list[Row]:
        file = arguments.scratch / f"{name}-{load}"
        seconds = 10 if load == "idle" else arguments.power_seconds
        command = ["-m", "benchmarks.kernels.power", load, str(file), "--seconds", str(seconds)]
        return completed(command, file, 1, runs.one_gpu(place))

    return [row for rows in runs.side_by_side(measure, ("idle",), 1) for row in rows] + [
        row for rows in runs.side_by_side(measure, LOADS[:gpus], gpus) for row in rows
    ]


def add(arguments: argparse.Namespace, name: str, rows: list[Row]) -> None:
    """Put the rows of a section into the table."""
    table = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    table |= {"gpu_model": arguments.gpu_model, "measured": machine(arguments.device), name: rows}
    new = arguments.out.with_name(f"{arguments.out.name}.new")
    new.write_text(text_of(table))
    new.replace(arguments.out)


def text_of(table: dict[str, Any]) -> str:
    """The table as JSON with one row per line."""
    parts = []
    for key, value in table.items():
        if isinstance(value, list) and value:
            lines = ",\n".join(f"    {json.dumps(shortened(row))}" for row in value)
            parts.append(f"  {json.dumps(key)}: [\n{lines}\n  ]")
        else:
            parts.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def shortened(row: Row) -> Row:
    """The row with four significant digits."""
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


SECTIONS: dict[str, Callable[[str, int, argparse.Namespace], list[Row]]] = {
    **dict.fromkeys(SINGLE_GPU, single_gpu),
    "collectives": collectives,
    "host": host_times,
    "power": power,
}

if __name__ == "__main__":
    sys.exit(main())
