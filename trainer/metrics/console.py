"""Console output: lines from rank 0 on stdout, or a progress bar if stderr is a terminal."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

from trainer.contract.wording import duration


def quiet_libraries() -> None:
    """Hide advice to install CUDA libraries, and deprecation warnings from megatron.core and torch."""
    warnings.filterwarnings("ignore", module=r"(megatron\.core|torch)\b")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)


class Log:
    """Prints lines on rank 0. Does nothing on other ranks."""

    def __init__(self, is_rank_0: bool, progress: bool) -> None:
        self._is_rank_0 = is_rank_0
        self._wants_bar = progress and is_rank_0 and sys.stderr.isatty()
        self._bar: Any = None
        self._total = 0
        self._further: Sequence[str] = ()
        self._first: tuple[int, float] | None = None

    def line(self, text: str) -> None:
        """Print one line to stdout and flush it."""
        if self._bar is not None:
            self._bar.write(text)
        elif self._is_rank_0:
            sys.stdout.write(
                f"{text}\n"
            )  # in one piece: srun --label would put the line's end on a line of its own
            sys.stdout.flush()

    def start(self, iteration: int, total: int, further: Sequence[str] = ()) -> None:
        """Start the progress display at `iteration` of `total`. Lines also show the numbers `further` if they exist."""
        self._total, self._further = total, further
        if self._wants_bar:
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=iteration, unit="it", dynamic_ncols=True)

    def step(self, iteration: int, values: dict[str, Any]) -> None:
        """Show the values that `Metrics.step` recorded."""
        if self._bar is not None:
            self._bar.update(iteration - self._bar.n)
            self._bar.set_postfix_str(f"loss {values['loss']:.4f}, {values['tokens_per_s']:,.0f} tokens/s")
            return
        further = "".join(f", {name} {values[name]:.4f}" for name in self._further if name in values)
        norm = "overflow" if values["grad_norm"] is None else f"{values['grad_norm']:.4f}"
        mfu = f", MFU {values['mfu']:.1%}" if "mfu" in values else ""
        load = (
            f", expert load {values['moe_min_load']:.2f} to {values['moe_max_load']:.2f}"
            if "moe_max_load" in values
            else ""
        )
        full = f", samples {values['packing_efficiency']:.1%} full" if "packing_efficiency" in values else ""
        if "moe_dropped" in values:
            load += f", {values['moe_dropped']:.1%} dropped"
        self.line(
            f"iteration {iteration}/{self._total}: loss {values['loss']:.6f}{further}, "
            f"grad norm {norm}, lr {values['lr']:.3e}, {values['step_time_s']:.3f} s, "
            f"{values['tokens_per_s']:,.0f} tokens/s, "
            f"{values['model_tflops_per_device']:.4g} TFLOP/s per device{mfu}{load}{full}, "
            f"{values['peak_memory_gib']:.2f} GiB{self._remaining(iteration, values['step_time_s'])}"
        )

    def _remaining(self, iteration: int, step_time_s: float) -> str:
        """Estimated remaining time, from the pace since this attempt's first line, including saves and evaluations."""
        if iteration >= self._total:
            return ""
        now = time.monotonic()
        if self._first is None:  # earlier times, such as the first step's, are not representative
            self._first = (iteration, now)
        else:
            first, then = self._first
            step_time_s = (now - then) / (iteration - first)
        return f", {duration(round((self._total - iteration) * step_time_s))} left"

    def close(self) -> None:
        """Close the progress bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
