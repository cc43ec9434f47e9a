"""Programs of examples/deepspeed as processes of a Python that has DeepSpeed.

The environment variable DEEPSPEED_PYTHON names this Python. Install deepspeed, transformers, trl, peft, accelerate and
datasets in the versions of enroot/deepspeed.txt, and PyTorch; a GPU is not needed:

    make test-deepspeed DEEPSPEED_PYTHON=/path/of/its/python

DeepSpeed compiles its communication for CPUs at the first start, into ~/.cache/torch_extensions.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runs import free_port

EXAMPLES = Path(__file__).parents[2] / "examples/deepspeed"
PYTHON = os.environ.get("DEEPSPEED_PYTHON", "")
needs_deepspeed = pytest.mark.skipif(
    not PYTHON, reason="DEEPSPEED_PYTHON is not set to a Python with DeepSpeed"
)
LIMIT_S = 1200
CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 20, "warmup_num_steps": 2}},
}


def run_python(*words: str | Path, cwd: Path = EXAMPLES) -> subprocess.CompletedProcess[str]:
    """The result of one process."""
    return subprocess.run(
        [PYTHON, *words],
        cwd=cwd,
        env=os.environ | CPU,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def run_ranks(ranks: int, log: Path, *words: str | Path) -> str:
    """Output of rank 0 of a program that ran on all ranks."""
    common = os.environ | CPU | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(ranks):
        with log.with_suffix(f".{rank}").open("w") as output:
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            processes.append(
                subprocess.Popen(
                    [PYTHON, *words], cwd=EXAMPLES, env=environment, stdout=output, stderr=subprocess.STDOUT
                )
            )
    try:
        statuses = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    texts = [log.with_suffix(f".{rank}").read_text() for rank in range(ranks)]
    assert not any(statuses), "\n".join(text[-3000:] for text in texts)
    return texts[0]


def pretrain(
    folder: Path, name: str, zero: dict[str, Any], steps: int, ranks: int = 2, **settings: Any
) -> dict[int, float]:
    """Losses of the steps of pretrain.py, which resumes if the folder has checkpoints of this name."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps(CONFIG | {"zero_optimization": zero} | settings))
    output = run_ranks(
        ranks,
        folder / name,
        "pretrain.py",
        f"--deepspeed_config={file}",
        f"--model={folder / 'model'}",
        "--from-pretrained",
        f"--data={folder / 'tokens'}",
        "--seq-length=64",
        f"--steps={steps}",
        "--save-every=4",
        f"--checkpoints={folder / 'checkpoints' / name}",
    )
    return losses(output)


def losses(output: str) -> dict[int, float]:
    """The loss of each step in the output of pretrain.py."""
    found = re.findall(r"step (\d+) of \d+, loss ([\d.]+)", output)
    return {int(step): float(loss) for step, loss in found}


def copy_checkpoints(folder: Path, source: str, target: str) -> Path:
    """A copy of the checkpoints of one name under another."""
    checkpoints = folder / "checkpoints"
    shutil.copytree(checkpoints / source, checkpoints / target)
    return checkpoints / target
