"""The job that checks nodes: the stage node-health with the paths of a run, and what its reports say.

The job's own checks (templates/lib/node-check.sh, trainer/health/node.py) judge each node. Here, the versions of the
nodes are compared with each other, and their clocks with that of the batch script.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcgen.config.slurm import PASSED_ON
from hpcgen.doctor.check import Check
from hpcgen.errors import HpcgenError
from hpcgen.run_plan.plan import Plan
from hpcgen.slurm.programs import ask_node_names
from hpcgen.text import counted, few
from trainer.contract.files.regular_file import read_text
from trainer.contract.record import replaced

STAGE = "node-health"
TIME_LIMIT = "30:00"
CLOCK_S = 1.0
"""Difference from the batch script's clock that matters: make and rsync compare times of files."""
HANG_TOGETHER = frozenset(("driver", "cuda", "nccl", "nccl-plugin", "libfabric", "ofed"))
"""Software whose versions must be equal: nodes that chose different transports wait forever (NVIDIA/nccl#1634)."""
NOTHING = "nothing"

Facts = Mapping[str, str]


def overrides(nodes: str, plan: Plan) -> list[str]:
    """Assignments for the job: its nodes (a number, or a list of names), and the partition and account of the run.

    Raises:
        HpcgenError: Slurm does not understand the list of nodes.
    """
    section = f"slurm.{STAGE.replace('-', '_')}"
    found = [f"{section}.time={TIME_LIMIT}"]
    for stage in plan.stages.values():
        settings = {name: getattr(stage.allocation.settings, name) for name in PASSED_ON.values()}
        found += [f"{section}.{name}={value}" for name, value in settings.items() if value is not None]
    if nodes.isdecimal():
        return [*found, f"{section}.nodes={nodes}"]
    names, problem = ask_node_names(nodes)
    if problem:
        raise HpcgenError(f"--nodes {nodes}: {problem}", "give a number, or a list such as ndv5-[1-4]")
    directives = json.dumps([f"--nodelist={nodes}"])
    return [*found, f"{section}.nodes={len(names)}", f"{section}.extra_directives={directives}"]


def with_paths(health: Plan, plan: Plan) -> Plan:
    """The plan of the job, which also checks on each node the paths that the stages of `plan` need."""
    stage = health.stages[STAGE]
    of_run = [path for other in plan.stages.values() for path in other.required_everywhere()]
    required = tuple(dict.fromkeys((*stage.required, *of_run)))
    return replaced(health, stages={STAGE: replaced(stage, required=required)})


def checks(reports: Path, nodes: Sequence[str]) -> Iterator[Check]:
    """Yields what the reports of the job say about each node, and about their differences."""
    for node in nodes:
        yield from _node(reports, node)
    yield from _container_step(reports.parent, reports)
    facts = {node: found for node in nodes if (found := _facts(reports / f"{node}-facts"))}
    yield from compare(facts)
    yield from _clocks(facts, _lines(reports / "clock"))


def _node(reports: Path, node: str) -> Iterator[Check]:
    parts = {part: _report(reports / f"{node}-{part}.json") for part in ("host", "container")}
    if parts["host"] is None:
        fix = "See whether Slurm has it (scontrol show node), and whether it mounts the storage of the run directory."
        yield Check(node, "failed", "no report: it is down, or does not see the run directory", fix)
        return
    bad = [finding for part in parts.values() if part for finding in part]
    for check, expected, found in bad:
        fix = f"Correct the node, or exclude it: sbatch --exclude={node}."
        yield Check(f"{node}: {check}", "failed", f"expected {expected}, found {found}", fix)
    if not bad and parts["container"] is None:
        fix = "See the end of the job's log: the step with the ranks of this node did not report."
        yield Check(node, "failed", "the host is good, and its ranks did not report", fix)
    elif not bad:
        yield Check(node, "ok", "devices, memory, scratch, paths and GPUs are as expected")


def _report(path: Path) -> list[tuple[str, str, str]] | None:
    """The findings of a report; None without a valid one."""
    try:
        found = json.loads(read_text(path))["findings"]
        return [(str(each["check"]), str(each["expected"]), str(each["found"])) for each in found]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _container_step(job: Path, reports: Path) -> Iterator[Check]:
    name, words = "container step", " ".join(_lines(reports / "container-step")).split()
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        yield Check(name, "skipped", "the job uses no container, or did not come to it")
    elif words[0] == "0":
        yield Check(name, "ok", f"a single task ran in the container after {words[1]} s")
    elif words[0] in ("124", "137"):
        fix = "Compare the versions that hpcgen doctor names with those known to hang, or set mpi: none in the profile."
        yield Check(name, "failed", f"a single task did not end in {words[1]} s: it hangs", fix)
    else:
        yield Check(
            name,
            "failed",
            f"a single task ended with status {words[0]}",
            f"Read the job's log in {job.parent.parent}.",
        )


def _facts(path: Path) -> Facts:
    return dict(line.partition(" ")[::2] for line in _lines(path))


def _lines(path: Path) -> list[str]:
    try:
        return read_text(path, errors="replace")[: 1 << 16].splitlines()
    except OSError:
        return []


def compare(facts: Mapping[str, Facts]) -> Iterator[Check]:
    """Yields each version that is not the same on all nodes, with the odd nodes."""
    names = dict.fromkeys(name for found in facts.values() for name in found if name != "clock")
    equal = []
    for name in names:
        values = {node: found.get(name, NOTHING) for node, found in facts.items()}
        usual, _ = Counter(values.values()).most_common(1)[0]
        odd = [node for node in values if values[node] != usual]
        if not odd:
            equal.append(name)
            continue
        others = few([f"{node} has {values[node]}" for node in odd])
        found = f"{others}; {counted(len(values) - len(odd), 'other node')}: {usual}"
        fix = f"Install the same on all nodes, or exclude the odd ones: sbatch --exclude={','.join(odd)}."
        yield Check(f"same {name}", "failed" if name in HANG_TOGETHER else "warning", found, fix)
    if len(facts) > 1 and equal:
        yield Check("same versions", "ok", f"on {counted(len(facts), 'node')}: {', '.join(equal)}")


def _clocks(facts: Mapping[str, Facts], window: Sequence[str]) -> Iterator[Check]:
    """Compares each clock with the batch script's before and after the nodes read theirs."""
    try:
        first, last = (float(time) for time in window)
        clocks = {node: float(found["clock"]) for node, found in facts.items()}
    except (ValueError, KeyError):
        yield Check("clocks", "skipped", "the nodes did not report their time")
        return
    off = {node: max(first - clock, clock - last) for node, clock in clocks.items()}
    if late := [node for node in off if off[node] > CLOCK_S]:
        shown = few([f"{node} is off by at least {off[node]:.1f} s" for node in late])
        yield Check("clocks", "failed", shown, "Ask the admins to synchronize the clocks (chrony, NTP).")
    elif clocks:
        yield Check("clocks", "ok", f"none differs by more than {last - first + CLOCK_S:.1f} s")
