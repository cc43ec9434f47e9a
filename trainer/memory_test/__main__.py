"""`python -m trainer.memory_test`: measures a rank of each pipeline stage, as many at once as the node has devices.

Prints a table and writes its figures to memory-test.json in the run directory. Exit status: 0 if all stages fit, 1
if one does not or came to no result, 2 for an invalid configuration.
"""

from __future__ import annotations

import argparse
import json
import queue
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.contract.config import from_dict, read_as
from trainer.contract.errors import Exit, TrainerError
from trainer.contract.files.regular_file import read_text
from trainer.contract.files.run_directory import publish
from trainer.contract.memory_test import RESULT, MemoryTestConfig, StageMemory, result_text
from trainer.contract.wording import counted

PROGRAM = "memory-test"


def main() -> int:
    """Parse the arguments, measure all stages and print the result. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.memory_test",
        description="Measures the memory that each pipeline stage of a training needs, on one node.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", required=True, help="configuration (JSON)")
    arguments = parser.parse_args()
    try:
        config = read_as(MemoryTestConfig, arguments.config)
        stages = run(config, arguments.config)
    except TrainerError as error:
        print(f"{PROGRAM}: ERROR: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{PROGRAM}: ERROR: cannot write {RESULT} or temporary files: {error}", file=sys.stderr)
        return Exit.FAULT
    if any(stage.error for stage in stages):
        print(f"{PROGRAM}: ERROR: {failure(stages)}", file=sys.stderr)
        return Exit.FAULT
    print(conclusion(stages), flush=True)
    return Exit.DONE


def run(config: MemoryTestConfig, path: Path) -> list[StageMemory]:
    """Measure every stage, print the table and write the result. An earlier result is deleted first, because it may
    belong to a different configuration.

    Raises:
        OSError: the result cannot be written.
    """
    result = Path(config.trainer.run_dir) / RESULT
    result.parent.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    stages = measure_all(config, path)
    print("\n".join(table(stages)), flush=True)
    publish(result, result_text(config.trainer.name, path, stages))
    return stages


def measure_all(config: MemoryTestConfig, path: Path) -> list[StageMemory]:
    """Measure every stage, each in a process of its own."""
    number = config.trainer.parallelism.pipeline_model_parallel_size
    devices: queue.SimpleQueue[int] = queue.SimpleQueue()
    for device in range(config.at_once):
        devices.put(device)
    print(
        f"{PROGRAM}: {config.trainer.name}: a training on {counted(config.trainer.world_size, 'rank')} with "
        f"{counted(number, 'pipeline stage')}; one rank per stage is measured",
        flush=True,
    )

    def measure(stage: int) -> StageMemory:
        device = devices.get()
        try:
            measured = _measure(config, path, stage, device)
            print(f"{PROGRAM}: stage {stage}: {measured.error or 'measured'}", flush=True)
            return measured
        finally:
            devices.put(device)

    with ThreadPoolExecutor(config.at_once) as threads:
        return list(threads.map(measure, range(number)))


def _measure(config: MemoryTestConfig, path: Path, stage: int, device: int) -> StageMemory:
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "stage.json"
        arguments = ["--config", str(path), "--stage", str(stage), "--device", str(device)]
        command = [sys.executable, "-m", "trainer.memory_test.rank", *arguments, "--result", str(result)]
        status = subprocess.run(command, check=False).returncode
        if result.exists():
            return from_dict(StageMemory, json.loads(read_text(result)), where=f"stage {stage}")
    ended = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return StageMemory(
        stage=stage,
        rank=config.rank_of_stage(stage),
        estimated_gib=config.estimated_gib[stage],
        error=f"its process ended with {ended} (above)",
    )


def table(stages: list[StageMemory]) -> list[str]:
    """The figures in columns, with a heading. `-` stands for what was not measured."""
    heading = ("stage", "rank", "estimated", "allocated", "in use", "of GiB", "s per microbatch")
    rows = [heading] + [
        (
            str(stage.stage),
            str(stage.rank),
            _rounded(stage.estimated_gib, 1),
            _rounded(stage.allocated_gib, 1),
            _rounded(stage.in_use_gib, 1),
            _rounded(stage.device_gib, 1),
            _rounded(stage.microbatch_s, 4),
        )
        for stage in stages
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _rounded(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def failure(stages: list[StageMemory]) -> str:
    """The stages that do not fit, and the stages without a result."""
    full = [str(stage.stage) for stage in stages if stage.error and stage.in_use_gib is not None]
    lost = [str(stage.stage) for stage in stages if stage.in_use_gib is None]
    reasons = [f"stages without a result: {', '.join(lost)}"] if lost else []
    if full:
        advice = "use more pipeline stages, a smaller micro_batch_size or recomputation"
        reasons.append(f"stages that do not fit: {', '.join(full)} ({advice})")
    return "; ".join(reasons)


def conclusion(stages: list[StageMemory]) -> str:
    """The conclusion from the figures, in one line."""
    fullest = max(stages, key=lambda stage: stage.in_use_gib or 0.0)
    of = f" of {fullest.device_gib:.1f}" if fullest.device_gib else ""
    return (
        f"{PROGRAM}: {'every stage fits' if fullest.device_gib else 'every stage ran'}; the fullest is stage "
        f"{fullest.stage} with {fullest.in_use_gib:.1f}{of} GiB in use. NCCL's buffers are not included"
    )


if __name__ == "__main__":
    sys.exit(main())
