"""Measures the CPU time of `hpcgen layouts` for presets on several numbers of nodes, and prints a Markdown table.

    python -m benchmarks.planner.search_time [--preset NAME ...] [--nodes N ...] [--cluster NAME]

The time is that of the complete command, with its imports. It needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.planner.tables import Row, markdown
from hpcgen.config.presets import PRESETS


def main() -> None:
    arguments = parser().parse_args()
    rows = [
        _row(preset, nodes, arguments.cluster) for preset in arguments.preset for nodes in arguments.nodes
    ]
    print(markdown(rows))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--preset", nargs="+", choices=[*PRESETS], default=[*PRESETS], metavar="NAME")
    options.add_argument("--nodes", nargs="+", type=int, default=[16, 128, 2048], metavar="N")
    options.add_argument("--cluster", default="azure-ndv5", metavar="NAME", help="profile of the cluster")
    return options


def _row(preset: str, nodes: int, cluster: str) -> Row:
    with tempfile.TemporaryDirectory() as scratch:
        run = {
            "name": "search",
            "cluster": cluster,
            "preset": preset,
            "paths": {"run_dir": scratch},
            "slurm": {"train": {"nodes": nodes, "time": "1-00:00:00"}},
            "data": {"mock": True},
        }
        file = Path(scratch) / "run.yaml"
        file.write_text(json.dumps(run), encoding="utf-8")
        cpu_s, found = _timed([sys.executable, "-m", "hpcgen", "layouts", "-c", str(file), "--json"])
    search = found["nodes"][0] if found else {}
    best = search.get("layouts", [])
    return {
        "preset": preset,
        "GPUs": f"{nodes * 8:,}",
        "CPU s": f"{cpu_s:.1f}",
        "first layout": best[0]["name"] if best else "none",
    }


def _timed(command: list[str]) -> tuple[float, dict[str, Any] | None]:
    """CPU seconds of a command, and what it prints as JSON; None if it fails, such as with a batch that is too small
    for the GPUs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, json.loads(done.stdout) if done.returncode == 0 else None


if __name__ == "__main__":
    main()
