"""Checkpoints and data on storage: how fast file systems are, how often to save, and how much space a run needs."""

from __future__ import annotations

import math

from hpcgen.config.tokenizer import id_bytes
from hpcgen.planning import checkpointing
from trainer.contract.config import CheckpointConfig, TrainerConfig
from trainer.contract.record import record

GPU_HOURS_BETWEEN_FAILURES = 54 * 24 * 16_384 / 419
"""Mean GPU-hours between failures that end a job, if the profile has no figure of its own.

Llama 3 405B was interrupted 419 times without a plan in 54 days on 16,384 H100s (arXiv 2407.21783, section 3.3.4)."""
WRITE_SLOWDOWN = 0.011
"""Part of the time of a save in the background that training loses, in addition to the copy to the host. Measured: GPT
1.3B on an H200 lost 0.99 s in a save of 21 s, of which the copy took 0.75 s (docs/performance.md, "Checkpoints")."""
COPY_GB_S = 24.5
"""Rate at which a rank copies its part of a checkpoint to host memory, in the same save: 18.4 GB in 0.75 s."""
TIB = 1024**4
IDX_HEADER_BYTES = 42
IDX_DOCUMENT_BYTES = 20
"""A document in an .idx file, if it is one sequence: length (4), offset (8) and index (8)."""
DOCUMENT_TOKENS = 1_000
"""Assumed tokens of a document. Web pages have about as many, books and source files more."""
JSONL_TOKEN_BYTES = 4.3
"""JSON Lines per token: 2.7 TB for the 627e9 tokens of SlimPajama."""
COMPRESSED_TOKEN_BYTES = 1.43
"""JSON Lines in .zst files per token: SlimPajama has 895 GB (huggingface.co/datasets/cerebras/SlimPajama-627B)."""


@record
class Tier:
    """A performance tier of Azure Managed Lustre. Its bandwidth grows with its size."""

    name: str
    mb_s_per_tib: int
    smallest_tib: int
    """Smallest size, of which other sizes are multiples."""
    largest_tib: int
    """Largest size without a support request."""

    def gb_s(self, tib: int) -> float:
        """The bandwidth of a file system of `tib` TiB."""
        return tib * self.mb_s_per_tib / 1000

    def fitting_tib(self, size: float) -> int:
        """The smallest size with room for `size` bytes, at most the largest one."""
        count = max(1, math.ceil(size / TIB / self.smallest_tib))
        return min(count * self.smallest_tib, self.largest_tib)


LUSTRE_TIERS = (
    Tier("AMLFS 40", 40, 48, 768),
    Tier("AMLFS 125", 125, 16, 128),
    Tier("AMLFS 250", 250, 8, 128),
    Tier("AMLFS 500", 500, 4, 128),
)
"""Source: Microsoft Learn, "Create an Azure Managed Lustre file system by using the Azure portal", section "Throughput
configurations" (November 2024). Up to 2.5 PB on request."""
BLOB_GB_S = {"blob, large regions": 7.5, "blob, other regions": 3.125}
"""Default maximum ingress of a standard storage account: 60 Gb/s in the regions that Microsoft lists, otherwise 25.
Source: Microsoft Learn, "Scalability and performance targets for standard storage accounts"."""


@record(kw_only=True)
class SaveCosts:
    """Costs of a save and of a failure in seconds, and how often jobs fail."""

    stall_s: float
    """Time that training loses to a save."""
    latency_s: float
    """Time from the start of a save until a later attempt can use it."""
    restart_s: float
    """Time from a failure to the next step."""
    between_failures_s: float
    """Mean time between failures of the job."""

    def lost(self, interval_s: float) -> float:
        """The part of the time that is lost to saves and failures if training saves every `interval_s` seconds.

        Includes the steps that are repeated after a failure, also those during a save that did not end. A save waits
        for the one before it. Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
        restart dumps" (2006).
        """
        mean = self.between_failures_s
        after_failure = (self.restart_s + self.latency_s - self.stall_s) / mean
        segment = max(interval_s + self.stall_s, self.latency_s) / mean
        if segment + after_failure > 100:  # far more failures than saves
            return 1.0
        return 1 - interval_s / (mean * math.exp(after_failure) * math.expm1(segment))

    @property
    def best_interval_s(self) -> float:
        """The interval that loses least.

        Daly's estimate, a refinement of J. W. Young's sqrt(2 x stall x mean time between failures) (1974). Saves are
        written one at a time, so no interval is shorter than a save.
        """
        stall, mean = self.stall_s, self.between_failures_s
        if stall >= 2 * mean:
            return max(mean, self.latency_s)
        ratio = math.sqrt(stall / (2 * mean))
        best = math.sqrt(2 * stall * mean) * (1 + ratio / 3 + ratio**2 / 9) - stall
        return max(best, self.latency_s)


def save_costs(
    trainer: TrainerConfig, save_s: float, startup_s: float, gpu_hours_between_failures: float | None
) -> SaveCosts:
    """The costs of the saves and failures of a run whose checkpoint takes `save_s` to write.

    Args:
        trainer: the resolved training run.
        save_s: seconds to write a checkpoint. Loading is assumed to take as long.
        startup_s: seconds from the start of a job to its first step, without loading.
        gpu_hours_between_failures: default: GPU_HOURS_BETWEEN_FAILURES.
    """
    copy_s = checkpointing.staged_bytes(trainer) / (COPY_GB_S * 1e9)
    stall_s = copy_s + WRITE_SLOWDOWN * save_s if trainer.checkpoint.async_save else save_s
    hours = (gpu_hours_between_failures or GPU_HOURS_BETWEEN_FAILURES) / trainer.world_size
    return SaveCosts(
        stall_s=min(stall_s, save_s),
        latency_s=save_s,
        restart_s=startup_s + save_s,
        between_failures_s=3600 * hours,
    )


def save_interval_s(checkpoint: CheckpointConfig, step_s: float, limit_s: int = 0) -> float:
    """Seconds between the saves of a resolved run: by steps or by the clock, whichever comes first.

    Each job ends with a save, at the latest after `limit_s` seconds, if there is a limit.
    """
    by_clock = 60 * (checkpoint.save_interval_minutes or math.inf)
    by_steps = checkpoint.save_interval * step_s if checkpoint.save_interval else math.inf
    return min(by_clock, by_steps, limit_s or math.inf)


def saves_by_steps(checkpoint: CheckpointConfig, step_s: float) -> bool:
    """True if save_interval comes before save_interval_minutes."""
    if checkpoint.save_interval is None:
        return False
    return checkpoint.save_interval * step_s <= save_interval_s(checkpoint, step_s)


def kept_checkpoints(checkpoint: CheckpointConfig, num_steps: int, num_saves: int) -> int:
    """The largest number of checkpoints on storage at one time. An old one is removed when a new one is complete."""
    if checkpoint.keep_last is None:
        return num_saves
    forever = num_steps // checkpoint.keep_every if checkpoint.keep_every else 0
    return min(checkpoint.keep_last + 1 + forever, num_saves) + checkpoint.keep_best


@record(kw_only=True)
class DataSize:
    """Bytes of a corpus on its way to training."""

    compressed: float
    jsonl: float
    bin: int
    idx: int


def data_size(tokens: int, vocab_size: int) -> DataSize:
    """The size of a corpus of `tokens` tokens. Sizes of text are those of SlimPajama with GPT-2's vocabulary."""
    return DataSize(
        compressed=COMPRESSED_TOKEN_BYTES * tokens,
        jsonl=JSONL_TOKEN_BYTES * tokens,
        bin=tokens * id_bytes(vocab_size),
        idx=IDX_HEADER_BYTES + IDX_DOCUMENT_BYTES * (tokens // DOCUMENT_TOKENS),
    )
