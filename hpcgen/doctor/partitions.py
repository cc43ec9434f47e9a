"""The partition of a job: its state, its limits, and whether it has enough nodes of the right kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from hpcgen.config.fields import seconds
from hpcgen.doctor.check import Check
from hpcgen.run_plan.stage import StagePlan
from hpcgen.text import counted, one_of

Row = Mapping[str, str]
"""Keys and values of a line of `scontrol show ... --oneliner`."""

_STATES = {
    "drained": {"DRAIN", "DRAINED", "DRAINING"},
    "in maintenance": {"MAINT", "MAINTENANCE"},
    "reserved": {"RESERVED"},
    "down": {"DOWN", "FAIL", "FAILING", "FUTURE", "INVAL", "INVALID_REG", "NOT_RESPONDING", "UNKNOWN"},
}
"""Problem of a node on which no job starts -> its states."""
_SWITCHED = {"POWER", "POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "POWER_DOWN", "POWER_UP"}
"""States of nodes that the cloud switches on for a job. They do not respond until they have started."""
UNLIMITED = frozenset(("UNLIMITED", "NONE", "INFINITE", ""))


def rows(lines: Sequence[str]) -> list[Row]:
    """The lines of `scontrol show partition --oneliner` or of nodes."""
    return [
        dict(re.findall(r"(\S+?)=(.*?)(?=\s+[A-Za-z][\w:/]*=|\s*$)", line)) for line in lines if "=" in line
    ]


def checks(stage: StagePlan, partitions: Sequence[Row], nodes: Sequence[Row]) -> Iterator[Check]:
    """Yields checks of the partition that a stage asks for; the default one if it asks for none."""
    asked = stage.allocation.settings.partition
    names = (
        asked.split(",")
        if asked
        else [row["PartitionName"] for row in partitions if row.get("Default") == "YES"]
    )
    if not names:
        fix = "Set slurm.defaults.partition, or slurm.partition in the profile."
        yield Check("partition", "failed", "none is given, and Slurm has no default partition", fix)
    for name in names:
        row = next((row for row in partitions if row.get("PartitionName") == name), None)
        if row is None:
            known = one_of([row["PartitionName"] for row in partitions if "PartitionName" in row])
            yield Check(
                f"partition {name}", "failed", "Slurm has no such partition", f"Use {known or 'another one'}."
            )
        else:
            yield from _state(name, row)
            yield from _limits(name, row, stage)
            yield _nodes(name, row, stage, nodes)


def _state(name: str, row: Row) -> Iterator[Check]:
    if row.get("State", "UP") != "UP":
        yield Check(
            f"partition {name}",
            "failed",
            f"its state is {row['State']}",
            "Use another one, or ask the admins.",
        )


def _limits(name: str, row: Row, stage: StagePlan) -> Iterator[Check]:
    allocation = stage.allocation
    most, time = row.get("MaxTime", ""), allocation.settings.time
    if time and most not in UNLIMITED and seconds(time) > seconds(most):
        fix = f"Use at most {most}: slurm.{stage.kind.section}.time."
        yield Check(f"partition {name}: time", "failed", f"{time}, and MaxTime is {most}", fix)
    for key, sign in (("MaxNodes", 1), ("MinNodes", -1)):
        limit = row.get(key, "")
        if limit.isdecimal() and sign * (allocation.num_job_nodes - int(limit)) > 0:
            found = f"{allocation.num_job_nodes}, and {key} is {limit}"
            fix = f"Change slurm.{stage.kind.section}.nodes, or use another partition."
            yield Check(f"partition {name}: nodes", "failed", found, fix)
    for key, setting in (
        ("AllowAccounts", allocation.settings.account),
        ("AllowQos", allocation.settings.qos),
    ):
        allowed = row.get(key, "ALL")
        if setting and allowed != "ALL" and setting not in allowed.split(","):
            yield Check(
                f"partition {name}: {key}",
                "failed",
                f"{setting} is not one of {allowed}",
                "Use one of these.",
            )


def _nodes(name: str, row: Row, stage: StagePlan, nodes: Sequence[Row]) -> Check:
    """Compares the nodes of the partition with what the job asks of each."""
    title, needed = f"partition {name}: nodes", stage.allocation.num_job_nodes
    own = [node for node in nodes if name in node.get("Partitions", "").split(",")]
    if not own:
        return Check(
            title, "skipped", f"Slurm does not show its nodes ({row.get('TotalNodes', 'unknown')} in all)"
        )
    total = row.get("TotalNodes", "")
    hidden = max(0, int(total) - len(own)) if total.isdecimal() else 0
    gpus = stage.allocation.gpus_per_node if stage.device == "cuda" and stage.allocation.gres != "none" else 0
    fitting = [node for node in own if _gpus(node) >= gpus]
    has_reservation = stage.allocation.settings.reservation is not None
    states = [_state_of(node, has_reservation=has_reservation) for node in fitting]
    counts = Counter(states)
    usable = counts[""] + counts["switched off or starting"]
    others = [f"{counts[word]} {word}" for word in ("switched off or starting", *_STATES) if counts[word]]
    others += (
        [f"{hidden} that Slurm does not show, such as cloud nodes that are switched off"] if hidden else []
    )
    has = f"with {counted(gpus, 'GPU')}" if gpus else "of any kind"
    found = f"{counted(usable, 'usable node')} {has} of {len(own) + hidden}"
    found += f" ({', '.join(others)})" * bool(others) + f"; the job needs {needed}"
    if len(fitting) + hidden < needed:
        fix = "Use another partition, fewer nodes, or correct gpus_per_node of the node type."
        return Check(title, "failed", found, fix)
    if usable + hidden < needed:
        return Check(title, "warning", found, _advice(counts))
    return Check(title, "ok", found)


def _advice(counts: Counter[str]) -> str:
    """Advice if too few nodes are usable now."""
    advice = "Wait for the nodes (sinfo -R says why they are down), or use fewer."
    if counts["reserved"] or counts["in maintenance"]:
        advice += (
            " scontrol show reservation lists reservations; slurm.defaults.reservation names that of a job."
        )
    return advice


def _state_of(node: Row, *, has_reservation: bool) -> str:
    """The problem of a node; "" if jobs start on it now or after those that run there."""
    text = node.get("State", "")
    states = set(re.findall("[A-Z_]+", text)) | ({"NOT_RESPONDING"} if "*" in text else set())
    if states & _SWITCHED:
        states.discard("NOT_RESPONDING")
    if has_reservation:
        states -= _STATES["reserved"] | _STATES["in maintenance"]
    found = [word for word, names in _STATES.items() if states & names]
    return found[0] if found else "switched off or starting" if states & _SWITCHED else ""


def _gpus(node: Row) -> int:
    """Number of GPUs in a value such as gpu:h100:8(S:0-1),shard:4."""
    return sum(int(count) for count in re.findall(r"\bgpu(?::[A-Za-z][^:,(]*)?:(\d+)", node.get("Gres", "")))
