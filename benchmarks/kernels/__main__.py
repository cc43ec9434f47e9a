"""Measures the kernels of a GPU into a table, from which hpcgen predicts the time of a step.

    python -m benchmarks.kernels --gpu-model "H100 SXM 80 GB" --out FILE [--only SECTION ...]

FILE is a table for topologies/kernels; topologies/README.md describes the rows. `trainer.calibration` measures them, on
all GPUs of this machine. Sections that are not measured this time keep their rows. Rows that failed are printed.
Requires Transformer Engine. With --device cpu, a few tiny rows show that the program works.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import typing
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.kernels import shapes
from hpcgen.planning.step_time.measurements import text_of
from trainer.contract.calibration import CalibrationConfig, Section
from trainer.contract.config.document import to_dict

HOURS_S = 4 * 3600.0


def main() -> int:
    """Measure the sections and put them into the table."""
    options = parser()
    arguments = options.parse_args()
    runs.end_like_ctrl_c()
    gpus = runs.count_gpus(options) if arguments.device == "cuda" else 2
    jobs = shapes.jobs(gpus, arguments.power_seconds) if arguments.device == "cuda" else shapes.TINY
    chosen = arguments.only or typing.get_args(Section)
    config = CalibrationConfig(
        device=arguments.device,
        domain_size=gpus,
        jobs=tuple(job for job in jobs if job.section in chosen),
        budget_s=HOURS_S,
        row_s=arguments.seconds,
    )
    with tempfile.TemporaryDirectory() as scratch:
        file, result = Path(scratch) / "config.json", Path(scratch) / "result.json"
        file.write_text(json.dumps(to_dict(config)))
        command = ["-m", "trainer.calibration", "--config", str(file), "--result", str(result)]
        print(runs.run(command, Path(scratch) / "log", gpus), end="", flush=True)
        add(arguments.out, arguments.gpu_model, json.loads(result.read_text()))
    return 0


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
        choices=typing.get_args(Section),
        metavar="SECTION",
        help="sections to measure. Default: all",
    )
    options.add_argument("--seconds", type=float, default=0.3, help="time per row")
    options.add_argument("--power-seconds", type=float, default=120, help="time per load")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return options


def add(out: Path, gpu_model: str, measured: dict[str, Any]) -> None:
    """Put measured sections into the table."""
    table = json.loads(out.read_text()) if out.exists() else {}
    rows = {name: value for name, value in measured.items() if name in typing.get_args(Section)}
    table |= {"gpu_model": gpu_model, "measured": measured["measured"]} | rows
    new = out.with_name(f"{out.name}.new")
    new.write_text(text_of(table))
    new.replace(out)


if __name__ == "__main__":
    sys.exit(main())
