"""Measures `hpcgen render train` for 175B on 16 nodes, compared with a floor: importing the libraries that it needs.

    python -m benchmarks.render [--runs 15] [--json]

Both are complete processes and run alternately. CPU seconds are compared, of which other work on the machine takes
little. Look at the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FLOOR = (sys.executable, "-c", "import click, jinja2; from pydantic import TypeAdapter")
HPCGEN = (sys.executable, "-c", "from hpcgen.cli.main import main; main()")
"""Program that does what the installed script `hpcgen` does."""
RUN = """\
name: gpt-175b
cluster: azure-ndv5
preset: 175b
paths: {run_dir: /lustre/runs/gpt-175b}
slurm: {train: {nodes: 16, time: 2-00:00:00}}
data: {datasets: [{prefix: /lustre/data/corpus}]}
training: {train_iters: 100000}
"""


def seconds(command: tuple[str, ...], byte_code: Path) -> float:
    """CPU seconds of a process with its byte code in the given directory, independent of this environment."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(byte_code)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run, byte_code = Path(directory) / "run.yaml", Path(directory) / "byte_code"
        run.write_text(RUN)
        render = (*HPCGEN, "render", "train", "-c", str(run))
        seconds(FLOOR, byte_code), seconds(render, byte_code)  # writes the byte code, fills the page cache
        pairs = [(seconds(FLOOR, byte_code), seconds(render, byte_code)) for _ in range(arguments.runs)]
    floor, rendering = (statistics.median(column) for column in zip(*pairs, strict=True))
    result = {"floor_s": floor, "render_s": rendering, "ratio": rendering / floor}
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"floor {floor:.3f} s, render {rendering:.3f} s, ratio {rendering / floor:.2f}")


if __name__ == "__main__":
    main()
