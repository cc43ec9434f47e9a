"""A training program without hpcgen, for stage run with launcher torchrun: it saves checkpoints, resumes, and stops.

Every rank fits the same line by gradient descent and averages the gradients. `program_torchrun.yaml` runs it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    """Trains until --steps, or until the stop file exists."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--stop-file", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds to sleep in each step")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(dist.get_rank())
    weight, start = load(options.checkpoints)
    say(f"resuming from step {start}" if start else "starting from step 0")
    for step in range(start + 1, options.steps + 1):
        inputs = torch.randn(64)
        gradient = (2 * (weight - 3.0) * inputs**2).mean()
        dist.all_reduce(gradient)
        weight -= 0.05 * gradient / dist.get_world_size()
        time.sleep(options.step_s)
        must_stop = is_asked_to_stop(options.stop_file)
        if must_stop or step % options.save_every == 0 or step == options.steps:
            save(options.checkpoints, step, weight)
            say(f"step {step}, weight {weight.item():.4f}, saved")
        if must_stop:
            break
    dist.destroy_process_group()


def is_asked_to_stop(stop_file: Path) -> bool:
    """Returns the same answer on every rank: rank 0 looks for the file."""
    flag = torch.tensor(int(dist.get_rank() == 0 and stop_file.exists()))
    dist.broadcast(flag, src=0)
    return bool(flag)


def save(directory: Path, step: int, weight: torch.Tensor) -> None:
    """Writes a checkpoint on rank 0. The rename makes it complete or absent."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        part = directory / "part.pt"
        torch.save({"step": step, "weight": weight}, part)
        part.rename(directory / f"step_{step}.pt")
    dist.barrier()


def load(directory: Path) -> tuple[torch.Tensor, int]:
    """The newest checkpoint and its step; a new weight and 0 if there is none."""
    found = [(int(path.stem.removeprefix("step_")), path) for path in directory.glob("step_*.pt")]
    if not found:
        return torch.zeros(()), 0
    step, path = max(found)
    return torch.load(path)["weight"], step


def say(message: str) -> None:
    """Prints a message on rank 0."""
    if dist.get_rank() == 0:
        print(message, flush=True)


if __name__ == "__main__":
    main()
