"""`python -m trainer.health.nccl_test`: tests the allocation with an all-reduce, and names weak nodes and causes.

Exit status: 0 good or a warning, 1 too slow or hung, 2 an invalid configuration or launch.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.contract.config import ConfigError, read_as
from trainer.contract.errors import TrainerError
from trainer.contract.files.run_directory import publish
from trainer.contract.health import NcclTestConfig
from trainer.contract.wording import binary_size, counted, duration, rate_text
from trainer.distributed.rendezvous import Ranks, find_ranks
from trainer.distributed.slurm_job import node_name
from trainer.health import all_reduce_perf
from trainer.health.bandwidth import Sample, measure_all_reduce
from trainer.health.diagnosis import Diagnosis, Group, Limits, find_weak_nodes
from trainer.health.fabric import Fabric
from trainer.health.judgement import (
    Entry,
    Layout,
    Verdict,
    baseline_key,
    judge,
    make_layout,
    read_baseline,
    record_baseline,
    select,
)
from trainer.health.meeting import Meeting, MissingRanksError
from trainer.health.settings import configuration_files, explain, explain_host, nccl_settings
from trainer.health.writing import measure_writes

PROGRAM = "nccl-test"
JOB_BEGAN = "TRAINER_JOB_BEGAN"
"""Variable with the time in seconds since 1970 at which the job began."""


def main() -> int:
    """Parse the arguments and run the test. Returns the exit status."""
    arguments = _parser().parse_args()
    ranks = None
    try:
        config = read_as(NcclTestConfig, arguments.config)
        ranks = find_ranks(os.environ)
        return run(
            config,
            ranks,
            os.environ,
            result=arguments.result,
            perf_output=arguments.all_reduce_perf_output,
            record=arguments.record_baseline,
            with_profile_figures=arguments.profile_figures,
        )
    except TrainerError as error:
        if not isinstance(error, MissingRanksError) or ranks is None or ranks.rank == 0:
            print(f"{PROGRAM}: ERROR: {error}", file=sys.stderr)
        return error.exit_code


def run(
    config: NcclTestConfig,
    ranks: Ranks,
    environ: Mapping[str, str],
    *,
    result: Path,
    perf_output: Path | None = None,
    record: bool = False,
    with_profile_figures: bool = False,
) -> int:
    """Run the test with the other ranks and write the result. Returns the exit status, the same on every rank.

    `perf_output` is the output of all_reduce_perf, used instead of a measurement. `record` makes the bandwidth the
    cluster's baseline. `with_profile_figures` also measures what a cluster profile says about start-up and storage.

    Raises:
        ConfigError: the baseline cannot be read.
        TrainerError: ranks are missing or do not match the configuration, or a rank cannot import the trainer or write.
    """
    if ranks.world_size != config.nodes * config.ranks_per_node:
        planned = f"{counted(config.nodes, 'node')} x {counted(config.ranks_per_node, 'rank')}"
        raise TrainerError(f"the test was planned for {planned}. Launch this number of tasks", where=ranks)
    if ranks.world_size == 1:
        raise TrainerError("a single rank cannot test communication. Use two GPUs or more")
    node = node_name(environ)
    if with_profile_figures:
        _import_trainer()
    with Meeting(ranks, node, environ, config.timeout_s, PROGRAM) as meeting:
        test = NcclTest(config, meeting, environ, result)
        if with_profile_figures:
            test.measure_profile_figures()
        samples = test.given(perf_output) if perf_output else test.measured()
        status = test.conclude(samples, "all_reduce_perf" if perf_output else "torch.distributed", record)
        # All ranks wait until rank 0 has written, since the first nonzero exit status ends the step.
        [agreed, *_] = meeting.gather("status", status)
        test.close()
        return int(agreed)


class NcclTest:
    """One test. Every rank runs it; only rank 0 prints and writes."""

    def __init__(
        self, config: NcclTestConfig, meeting: Meeting, environ: Mapping[str, str], result: Path
    ) -> None:
        self._config = config
        self._environ = environ
        self._result = result
        self._meeting = meeting
        self._fabric = Fabric(config.device, meeting)
        settings = nccl_settings(environ, configuration_files(environ))
        found = [
            *explain(settings, config.environment, config.nics),
            *explain_host(settings, config.nics),
        ]
        self._causes = _by_text(meeting.gather("surroundings", [meeting.node, found]))
        if meeting.ranks.rank == 0:
            # Settings that differ between ranks can make NCCL hang.
            meeting.on_hang = lambda line: self._print_causes()
        # All ranks use the layout by rank 0's settings.
        layout = make_layout(config.nodes, config.ranks_per_node, settings)
        [values, *_] = meeting.gather("layout", asdict(layout))
        self._layout = Layout(**values)
        self._profile_figures: dict[str, float | None] | None = None

    def measure_profile_figures(self) -> None:
        """Measure what a cluster profile says about start-up and storage. All ranks have met."""
        began = self._environ.get(JOB_BEGAN)
        startup_s = round(time.time() - float(began), 1) if began else None
        scratch, shared = Path(tempfile.gettempdir()), self._result.parent
        device, meeting = self._config.device, self._meeting
        storage = measure_writes(shared, meeting, device, "writing to the run directory")
        local = measure_writes(scratch, meeting, device, "writing to scratch", is_local=True)
        self._profile_figures = {
            "startup_s": startup_s,
            "storage_write_gb_s": storage,
            "scratch_write_gb_s": local,
        }
        if startup_s is not None:
            self._print(f"start-up until all ranks have imported the trainer and met: {duration(startup_s)}")
        self._print(f"writing to {shared}: {rate_text(storage)} GB/s for all nodes together")
        self._print(f"writing to {scratch}: {rate_text(local)} GB/s on the slowest node")

    def given(self, perf_output: Path) -> list[Sample]:
        """Samples from the output of all_reduce_perf."""
        try:
            text = perf_output.read_text(errors="replace")
        except OSError as error:
            raise TrainerError(str(error), where=perf_output) from error
        return all_reduce_perf.parse(text, self._meeting.ranks.world_size)

    def measured(self) -> list[Sample]:
        """Samples measured with torch.distributed over all ranks."""
        samples = []
        for size in self._config.sizes_bytes:
            with self._meeting.step(f"all nodes, {binary_size(size)}"):
                samples.append(self._measure(self._fabric.world(), size))
        return samples

    def conclude(self, samples: Sequence[Sample], tool: str, record: bool) -> int:
        """Compare the bandwidth, diagnose problems and write the result. Returns the exit status."""
        config, layout = self._config, self._layout
        self._print(f"{layout}, {tool}, {self._fabric.software}; nodes {', '.join(self._fabric.nodes)}")
        self._table(samples)
        judged = samples[-1]
        key = baseline_key(config, layout)
        threshold = select(config.thresholds, layout, config.gpus_per_node, config.nvlink_nodes)
        baseline = self._baseline().get(key)
        verdict = judge(judged.busbw_gb_s, threshold, None if record else baseline, config)
        self._print(_sentence(judged, verdict))
        if threshold is None:
            self._print(f"no threshold is known for {config.node_type}: {layout}")
        ok = verdict.status != "bad" and all(sample.correct for sample in samples)
        for sample in samples:
            if not sample.correct:
                self._print(
                    f"FAIL: sums of {binary_size(sample.size_bytes)} are wrong, so data is corrupted in transit"
                )
        diagnosis = Diagnosis()
        if verdict.status in ("bad", "warning"):
            diagnosis = self._diagnose(judged.size_bytes, verdict)
        elif verdict.status == "unknown" and layout.nodes > 1 and config.device == "cuda":
            # Without limits, nodes can only be compared with each other. Skip CPU nodes, which differ when busy.
            diagnosis = self._diagnose(judged.size_bytes, verdict)
            ok = ok and not (diagnosis.weak or diagnosis.remarks)
        if verdict.status != "good":
            self._print_causes()
        if verdict.status == "unknown" and ok:
            ok = self._record(key, judged, forced=record)
        self._write(samples, tool, verdict, diagnosis, ok)
        self._print("passed" if ok else "FAILED")
        return 0 if ok else 1

    def close(self) -> None:
        """Destroy the process groups."""
        self._fabric.close()

    def _measure(self, group: Any, size: int) -> Sample:
        return measure_all_reduce(group, size, self._fabric.device, self._config.iterations)

    def _baseline(self) -> dict[str, Entry]:
        """Baseline as read by rank 0, so that all ranks compare with the same values."""
        path = Path(self._config.baseline)
        mine: list[Any] = ["", {}]
        if self._meeting.ranks.rank == 0:
            try:
                mine[1] = {key: asdict(entry) for key, entry in read_baseline(path).items()}
            except ConfigError as error:
                mine[0] = str(error)
        problem, entries = self._meeting.gather("baseline", mine)[0]
        if problem:
            raise ConfigError(problem)
        return {key: Entry(**{**entry, "nodes": tuple(entry["nodes"])}) for key, entry in entries.items()}

    def _diagnose(self, size: int, verdict: Verdict) -> Diagnosis:
        config, layout = self._config, self._layout

        def limit(nodes: int) -> float | None:
            collnet = layout.collnet and nodes > 1
            part = Layout(
                nodes=nodes, ranks_per_node=layout.ranks_per_node, nvls=layout.nvls, collnet=collnet
            )
            threshold = select(config.thresholds, part, config.gpus_per_node, config.nvlink_nodes)
            return threshold.fail_below_gb_s if threshold else None

        def measure(purpose: str, groups: Sequence[Group]) -> list[float]:
            with self._meeting.step(f"{purpose}, {binary_size(size)}"):
                return self._fabric.measure_groups(
                    groups, lambda group: self._measure(group, size).busbw_gb_s
                )

        limits = Limits(
            deficit=config.fail_deficit,
            alone_gb_s=limit(1),
            pair_gb_s=limit(2),
            together_gb_s=verdict.warn_below_gb_s or verdict.fail_below_gb_s,
        )
        found = find_weak_nodes(self._fabric.nodes, config.ranks_per_node, limits, measure)
        for purpose, group, busbw in found.measured:
            self._print(f"  {' + '.join(group)}: {rate_text(busbw)} GB/s ({purpose})")
        for weak in found.weak:
            self._print(
                f"WEAK NODE {weak.node}: {weak.reason}. hpcgen's stage node-health examines it further"
            )
        for remark in found.remarks:
            self._print(remark)
        if found.weak:
            self._print(f"to run without weak nodes: --exclude={','.join(weak.node for weak in found.weak)}")
        return found

    def _print_causes(self) -> None:
        for text, nodes in self._causes.items():
            where = "every node" if len(nodes) == len(self._fabric.nodes) else ", ".join(nodes)
            self._print(f"POSSIBLE CAUSE: {text}; on {where}")

    def _record(self, key: str, judged: Sample, forced: bool) -> bool:
        """Record the bandwidth as baseline. Refuses if settings may have reduced it, unless `forced`."""
        path = self._config.baseline
        if self._causes and not forced:
            self._print(
                "FAIL: there is nothing to compare with, and the settings above reduce bandwidth. The result is not "
                f"recorded as baseline; --record-baseline records it anyway ({path})"
            )
            return False
        if self._meeting.ranks.rank == 0:
            entry = Entry(
                busbw_gb_s=round(judged.busbw_gb_s, 6),
                recorded=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                job=os.environ.get("SLURM_JOB_ID", "none"),
                nodes=tuple(self._fabric.nodes),
                software=self._fabric.software,
            )
            try:
                record_baseline(Path(path), key, entry)
            except OSError as error:
                raise TrainerError(f"the baseline cannot be written: {error}", where=path) from error
        reason = (
            "as requested" if forced else "there was nothing to compare with, so check that it is plausible"
        )
        self._print(
            f"recorded {rate_text(judged.busbw_gb_s)} GB/s as this cluster's baseline in {path}: {reason}"
        )
        return True

    def _write(
        self, samples: Sequence[Sample], tool: str, verdict: Verdict, diagnosis: Diagnosis, ok: bool
    ) -> None:
        if self._meeting.ranks.rank != 0:
            return
        result = {
            "ok": ok,
            "tool": tool,
            "software": self._fabric.software,
            "layout": asdict(self._layout),
            "nodes": list(self._fabric.nodes),
            "samples": [asdict(sample) for sample in samples],
            "verdict": asdict(verdict),
            "weak_nodes": [asdict(weak) for weak in diagnosis.weak],
            "remarks": diagnosis.remarks,
            "groups": [
                {"purpose": purpose, "nodes": list(group), "busbw_gb_s": busbw}
                for purpose, group, busbw in diagnosis.measured
            ],
            "settings": [{"text": text, "nodes": nodes} for text, nodes in self._causes.items()],
            "profile_figures": self._profile_figures,
        }
        publish(self._result, json.dumps(result, indent=1) + "\n")

    def _table(self, samples: Sequence[Sample]) -> None:
        self._print(f"{'size':>10} {'time':>12} {'algbw':>10} {'busbw':>10}")
        for sample in samples:
            self._print(
                f"{binary_size(sample.size_bytes):>10} {sample.time_s * 1e3:>9.3f} ms "
                f"{rate_text(sample.algbw_gb_s):>10} {rate_text(sample.busbw_gb_s):>10} GB/s"
            )

    def _print(self, line: str) -> None:
        if self._meeting.ranks.rank == 0:
            print(f"{PROGRAM}: {line}", flush=True)


def _import_trainer() -> None:
    """Import what a training job imports, which belongs to its start-up.

    Raises:
        TrainerError: a module is missing.
    """
    try:
        importlib.import_module("trainer.train")
    except ImportError as error:
        raise TrainerError(f"the trainer cannot be imported: {error}") from error


def _by_text(found: Sequence[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Nodes of each finding, in order."""
    nodes: dict[str, list[str]] = {}
    for node, texts in found:
        for text in texts:
            if node not in nodes.setdefault(text, []):
                nodes[text].append(node)
    return nodes


def _sentence(judged: Sample, verdict: Verdict) -> str:
    word = {"good": "good", "warning": "WARNING, low", "bad": "FAIL, too low", "unknown": "not compared"}
    text = f"{rate_text(judged.busbw_gb_s)} GB/s at {binary_size(judged.size_bytes)}: {word[verdict.status]}"
    if verdict.fail_below_gb_s is None:
        return text
    limits = [f"fail below {rate_text(verdict.fail_below_gb_s)}"]
    if verdict.warn_below_gb_s is not None:
        limits.insert(0, f"warn below {rate_text(verdict.warn_below_gb_s)}")
    if verdict.expected_gb_s is not None:
        limits.insert(0, f"expected {rate_text(verdict.expected_gb_s)}")
    return f"{text} ({', '.join(limits)}: {verdict.source})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.health.nccl_test",
        description="Tests the fabric with an all-reduce over all ranks.",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", required=True, help="configuration of the test"
    )
    parser.add_argument(
        "--result", type=Path, metavar="FILE", required=True, help="file for the result (JSON)"
    )
    parser.add_argument(
        "--all-reduce-perf-output",
        type=Path,
        metavar="FILE",
        help="use the output of NVIDIA's all_reduce_perf, and measure only to find weak nodes",
    )
    parser.add_argument(
        "--record-baseline", action="store_true", help="record this bandwidth as the cluster's baseline"
    )
    parser.add_argument(
        "--profile-figures",
        action="store_true",
        help="also measure the start-up time and the write rates of a cluster profile",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
