"""Figures for Prometheus: a text file that is replaced with each line of the log, and an HTTP port if asked for.

The text format is simple enough to be written here, so images need no library for it. Where Megatron-LM's exporter has
the figure, the name is its own (its docs/user-guide/observability/metrics.md).
"""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.contract.config import NAMED_SPLIT, TrainerConfig
from trainer.contract.files.hashing import sha256
from trainer.contract.files.run_directory import RunDirectory, publish
from trainer.distributed import slurm_job
from trainer.metrics.console import Log

CLOSE_S = 5.0
"""Timeout of the last write, so that hanging storage does not block the end of a run (seconds)."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GB_PER_GIB = 2**30 / 1e9


class Figure(NamedTuple):
    """A metric of Prometheus and the number that it shows."""

    name: str
    kind: str
    """gauge, counter or summary."""
    help: str
    source: str
    """Name of the number, as boards get it."""
    factor: float = 1.0
    labels: str = ""

    def family(self) -> str:
        """The name that the lines HELP and TYPE have: that of a summary has no suffix."""
        return re.sub("_(sum|count)$", "", self.name) if self.kind == "summary" else self.name


def _evaluation_loss(split: str) -> Figure:
    return Figure(
        "hpcgen_training_evaluation_loss",
        "gauge",
        "Loss of the last evaluation",
        f"{split}/loss",
        labels=f',split="{_escaped(split)}"',
    )


def _escaped(text: str) -> str:
    """Text of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


FIGURES = (
    Figure("hpcgen_training_iteration", "gauge", "Completed steps", "iteration"),
    Figure("hpcgen_training_iterations", "gauge", "Steps of the run", "train_iters"),
    Figure("hpcgen_training_updated_timestamp_seconds", "gauge", "Unix time of these figures", "time"),
    *(
        Figure(
            f"megatron_training_step_duration_ms_{part}",
            "summary",
            "Duration of the steps of this attempt, without evaluations and saves",
            source,
        )
        for part, source in (("sum", "steps_ms"), ("count", "steps"))
    ),
    Figure("megatron_training_loss", "gauge", "Training loss in nats per token", "train/loss"),
    Figure(
        "megatron_training_grad_norm", "gauge", "Norm of all gradients before clipping", "train/grad_norm"
    ),
    Figure("megatron_training_learning_rate", "gauge", "Learning rate of the last step", "train/lr"),
    Figure(
        "megatron_training_tokens_per_sec", "gauge", "Tokens per second of all ranks", "train/tokens_per_s"
    ),
    Figure(
        "megatron_training_throughput_tflops",
        "gauge",
        "FLOPs that the model needs, in 10^12 per second and device",
        "train/model_tflops_per_device",
    ),
    Figure(
        "megatron_training_memory_allocated_gb",
        "gauge",
        "Peak memory of rank 0 in GB",
        "train/peak_memory_gib",
        GB_PER_GIB,
    ),
    Figure("hpcgen_training_mfu_ratio", "gauge", "Model FLOPs utilization", "train/mfu"),
    Figure("hpcgen_training_data_wait_seconds", "gauge", "Wait for samples per step", "train/data_wait_s"),
    Figure(
        "hpcgen_training_consumed_tokens_total",
        "counter",
        "Tokens that were trained on",
        "train/consumed_tokens",
    ),
    Figure(
        "hpcgen_training_checkpoint_stall_seconds", "gauge", "Stall of the last save", "checkpoint/stall_s"
    ),
    _evaluation_loss("valid"),
    _evaluation_loss("test"),
)
"""The figures that are shown once they are known, with those of one name next to each other. Those of named validation
sets follow."""


NAMED = "hpcgen_training_metric"
"""Name of all further losses and of the metrics of the user, with labels for the name and the split."""


def _named(source: str) -> Figure:
    split, _, name = source.rpartition("/")
    text = "Further losses, and metrics of the user"
    return Figure(NAMED, "gauge", text, source, labels=f',name="{name}",split="{split}"')


class Prometheus:
    """Shows the newest numbers of rank 0. A thread writes the file, so that a step never waits for the storage."""

    def __init__(
        self, path: Path, labels: str, train_iters: int, log: Log, *, keep: bool, names: Sequence[str] = ()
    ) -> None:
        """`keep`: leave the file at the end. A node's exporter would show it for ever. `names`: further losses, and
        metrics of the user."""
        self._path, self._labels, self._log, self._keep = path, labels, log, keep
        self._names = frozenset(names)
        self._values: dict[str, float] = {"train_iters": train_iters}
        self._iteration = 0
        self._text = ""
        self._has_news, self._closed = threading.Event(), False
        self._server: http.server.ThreadingHTTPServer | None = None
        self.port: int | None = None
        self._thread = threading.Thread(target=self._write_all, name=path.name, daemon=True)
        self._thread.start()

    def serve(self, address: str, port: int) -> None:
        """Answer at http://ADDRESS:PORT/metrics. If the port is taken, the log says so and training continues."""
        try:
            self._server = http.server.ThreadingHTTPServer((address, port), _handler(lambda: self._text))
        except OSError as error:
            self._log.line(f"no figures at logging.prometheus_port = {port}: {error.strerror}")
            return
        self.port = self._server.server_port
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def scalars(self, iteration: int, values: dict[str, float]) -> None:
        """Show numbers by name. They replace earlier ones."""
        newest = self._values | values
        if "train/step_time_s" in values:
            steps = max(1, iteration - self._iteration) if self._iteration else 1
            newest["steps"] = newest.get("steps", 0) + steps
            newest["steps_ms"] = newest.get("steps_ms", 0.0) + steps * values["train/step_time_s"] * 1e3
            self._iteration = iteration
        newest |= {"iteration": self._iteration, "time": time.time()}
        self._values = newest  # a new object, since the thread may be reading the one before
        self._has_news.set()

    def close(self) -> None:
        """Wait for at most CLOSE_S until the file is written, or removed."""
        self._closed = True
        self._has_news.set()
        self._thread.join(CLOSE_S)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _write_all(self) -> None:
        has_warned = is_last = False
        while not is_last:
            self._has_news.wait()
            self._has_news.clear()
            is_last = self._closed
            self._text = text(self._values, self._labels, self._names)
            try:
                if self._keep:
                    publish(self._path, self._text)
                else:  # the node's exporter is another user
                    publish(self._path, self._text, 0o644, ignores_umask=True)
            except OSError as error:
                if not has_warned:
                    self._log.line(f"{self._path}: {error.strerror}. Figures for Prometheus are missing")
                has_warned = True
        if not self._keep:
            with contextlib.suppress(OSError):
                self._path.unlink()


def text(values: Mapping[str, float], labels: str, names: Collection[str] = ()) -> str:
    """The figures in Prometheus' text format, with those of further losses and metrics that `names` has."""
    lines: list[str] = []
    before = ""
    splits = (name.removesuffix("/loss") for name in values if name.endswith("/loss"))
    named = (split for split in splits if split.startswith(NAMED_SPLIT))
    further = (source for source in values if source.rpartition("/")[2] in names)
    for figure in (*FIGURES, *map(_evaluation_loss, named), *map(_named, further)):
        if figure.source not in values:
            continue
        if (name := figure.family()) != before:
            lines += [f"# HELP {name} {figure.help}", f"# TYPE {name} {figure.kind}"]
        before = name
        lines.append(
            f"{figure.name}{{{labels}{figure.labels}}} {_number(values[figure.source] * figure.factor)}"
        )
    return "".join(f"{line}\n" for line in lines)


def open_prometheus(
    config: TrainerConfig, run: RunDirectory, log: Log, names: Sequence[str] = ()
) -> Prometheus:
    """Start to show figures, as the configuration asks. `names` are further losses, and metrics of the user."""
    logging = config.logging
    labels = f'run="{_escaped(config.name)}",slurm_job="{_escaped(slurm_job.job_id())}"'
    directory = logging.prometheus_directory
    path = run.root / RunDirectory.PROMETHEUS if directory is None else Path(directory, _shared_name(config))
    board = Prometheus(path, labels, config.training.train_iters, log, keep=directory is None, names=names)
    if logging.prometheus_port is not None:
        board.serve(logging.prometheus_address, logging.prometheus_port)
    return board


def _shared_name(config: TrainerConfig) -> str:
    """Name of the file in a directory of all runs on a node. Runs may share their name, but not their directory."""
    digest = sha256(os.fsencode(config.run_dir))
    return f"{config.name}-{digest[:8]}.prom"


def _number(value: float) -> str:
    """A number as Prometheus reads it: NaN, +Inf, or digits."""
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(repr(value), repr(value))


def _handler(newest: Callable[[], str]) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        """Answers with the newest figures."""

        timeout = 10  # a client that sends nothing

        def do_GET(self) -> None:
            is_known = self.path.partition("?")[0] == "/metrics"
            body = newest().encode() if is_known else b"the figures are at /metrics\n"
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the log is the run's."""

    return Handler
