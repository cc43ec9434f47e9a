"""How long `hpcgen render train` takes for 175B on 16 nodes, beside the floor: importing what it is built on.

    python -m benchmarks.render [--runs 15] [--json]

Both are whole processes, taken in turn in one run, so that a busy machine slows both; compare the ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FLOOR = (sys.executable, "-c", "import click, jinja2; from pydantic import TypeAdapter")
RUN = """\
name: gpt-175b
cluster: azure-ndv5
preset: 175b
paths: {run_dir: /lustre/runs/gpt-175b}
slurm: {train: {nodes: 16, time: 2-00:00:00}}
data: {datasets: [{prefix: /lustre/data/corpus}]}
training: {train_iters: 100000}
"""


def seconds(command: tuple[str, ...]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run.yaml"
        run.write_text(RUN)
        render = (sys.executable, "-m", "hpcgen", "render", "train", "-c", str(run))
        seconds(FLOOR), seconds(render)  # byte code and page cache
        pairs = [(seconds(FLOOR), seconds(render)) for _ in range(arguments.runs)]
    floor, rendering = (statistics.median(column) for column in zip(*pairs, strict=True))
    result = {"floor_s": floor, "render_s": rendering, "ratio": rendering / floor}
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"floor {floor:.3f} s, render {rendering:.3f} s, ratio {rendering / floor:.2f}")


if __name__ == "__main__":
    main()
