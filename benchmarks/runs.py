"""Code that the benchmarks share: configurations, processes and metrics of runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
TAIL = 4000
"""Number of characters to show from the end of a failed program's output."""

Item = TypeVar("Item")
Result = TypeVar("Result")

_over = threading.Event()
"""Set when the benchmark has failed or is ending, so that its threads end too."""


class RunError(SystemExit):
    """A program failed. If not caught, the benchmark ends with this message."""


# Before


def end_like_ctrl_c() -> None:
    """Make SIGTERM and SIGHUP end this program like Ctrl-C, including the processes that it started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def count_gpus(options: argparse.ArgumentParser) -> int:
    """Number of GPUs that torch sees. Exits with a message if there are none."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        options.exit(2, f"{options.prog}: needs a GPU, but torch sees none\n")
    return count


def comparison_options(description: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark that compares trainings: --steps, --json and --cpu."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--steps", type=int, default=10, help="number of timed steps of each training")
    options.add_argument("--json", action="store_true", help="print one JSON object for each training")
    options.add_argument("--cpu", action="store_true", help="train a tiny shape on a CPU")
    return options


def print_comparison(
    results: Sequence[dict[str, Any]],
    baseline: dict[str, Any],
    line: Callable[[dict[str, Any], dict[str, Any]], str],
    as_json: bool,
) -> None:
    """Print each result as JSON, or as the `line` that compares it with the baseline."""
    for result in results:
        print(json.dumps(result) if as_json else line(result, baseline), flush=True)


def one_gpu(index: int) -> dict[str, str]:
    """Environment in which only this GPU is visible. `index` counts the GPUs that are visible here."""
    return gpus_at(index, 1)


def gpus_at(place: int, count: int) -> dict[str, str]:
    """Environment in which only `count` GPUs are visible: the first ones at place 0, the next ones at place 1, ..."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    indices = range(place * count, (place + 1) * count)
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen.split(",")[i] if seen else str(i) for i in indices)}


def configuration(
    name: str, run_dir: Path, device: str, world_size: int = 1, **sections: dict[str, Any]
) -> dict[str, Any]:
    """Configuration for `python -m trainer` with these sections. By default without evaluation and TensorBoard."""
    base: dict[str, dict[str, Any]] = {
        "parallelism": {},
        "training": {"eval_iters": 0},
        "logging": {"tensorboard": False},
    }
    merged = {key: base.get(key, {}) | sections.get(key, {}) for key in base | sections}
    top = {"name": name, "run_dir": str(run_dir.resolve()), "device": device, "world_size": world_size}
    return top | merged


def corpus_section(prefix: Path, split: str = "1,0,0") -> dict[str, Any]:
    """The section `data` for a .bin/.idx pair."""
    return {"datasets": [{"prefix": str(prefix.resolve())}], "split": split}


def write_config(config: dict[str, Any]) -> Path:
    """Create the run directory and write the configuration to it."""
    file = Path(config["run_dir"]) / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(config))
    return file


# Running


def train(config: dict[str, Any], environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run the trainer with one process per rank until it ends. Returns its steps.

    Raises:
        RunError: the trainer failed.
    """
    file = write_config(config)
    command = ["-m", "trainer", "--config", str(file)]
    run(command, file.with_name("log"), config["world_size"], environment)
    return steps(read_record(file.parent))


def run(
    command: list[str],
    log: Path,
    ranks: int = 1,
    environment: dict[str, str] | None = None,
) -> str:
    """Run `python COMMAND` on all ranks until it ends. Returns their output.

    Raises:
        RunError: a rank failed, which ends the others. The message has the end of their output.
    """
    with started(command, log, ranks, environment) as processes:
        while (status := status_of(processes)) is None:
            pause(0.1)
    if status:
        raise failure(log, status)
    return log.read_text(errors="replace")


def pause(seconds: float) -> None:
    """Wait for some seconds.

    Raises:
        RunError: the benchmark is ending.
    """
    if _over.wait(seconds):
        raise RunError("stopped because the benchmark is ending")


@contextlib.contextmanager
def started(
    command: list[str],
    log: Path,
    ranks: int = 1,
    environment: dict[str, str] | None = None,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start `python COMMAND` with one process per rank. On exit, kill them and their children.

    This does not use torchrun, whose ranks have separate sessions and continue when it is killed.
    """
    common = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("w") as output:
            for rank in range(ranks):
                process = subprocess.Popen(
                    [sys.executable, *command],
                    cwd=ROOT,
                    env=os.environ
                    | common
                    | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    | (environment or {}),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                processes.append(process)
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()


def free_port() -> int:
    """A free port of this host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def status_of(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Status of a failed process, 0 if all have ended, or None while they run."""
    statuses = [process.poll() for process in processes]
    return next((status for status in statuses if status), None if None in statuses else 0)


def failure(log: Path, status: int) -> RunError:
    """The error for a program that ended with `status`."""
    return RunError(f"status {status}, and the end of {log}:\n{log.read_text(errors='replace')[-TAIL:]}")


def side_by_side(work: Callable[[Item, int], Result], items: Iterable[Item], places: int) -> list[Result]:
    """Call `work(item, place)` for all items, one at a time on each place. If one fails, all end."""
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for place in range(places):
        free.put(place)

    def work_at_a_place(item: Item) -> Result:
        place = free.get()
        try:
            return work(item, place)
        finally:
            free.put(place)

    with ThreadPoolExecutor(places) as pool:
        futures = [pool.submit(work_at_a_place, item) for item in items]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            _over.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


# After


def read_record(run_dir: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's metrics.jsonl, which may still be growing."""
    metrics = run_dir / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps(record: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The step events of a record."""
    return [event for event in record if event["event"] == "step"]
