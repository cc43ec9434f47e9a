"""Settings of slurm.conf that a run depends on, compared with what its jobs ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.doctor.check import Check
from hpcgen.planning.request import OLDEST_SLURM
from hpcgen.run_plan.plan import Plan
from hpcgen.run_plan.stage import StagePlan
from hpcgen.slurm.programs import Settings
from hpcgen.text import counted, duration

LEAST_KILL_WAIT_S = 10
"""Ranks agree for up to 3.5 s after TERM, and then end their step."""
LONG_SILENCE_S = 600
"""Timeout of a dead node above which a job keeps it for long. Slurm's default is 300 s."""
ADMIN = "Ask the admins"


def checks(settings: Settings, plan: Plan) -> Iterator[Check]:
    """Yields a check of each setting that matters to the stages of the plan."""
    stages = tuple(plan.stages.values())
    yield _version(settings, plan)
    yield _kill_wait(settings, stages)
    yield _requeue(settings, stages)
    yield _prolog(settings)
    yield from _arrays(settings, plan)
    yield _accounting(settings)
    yield _dead_nodes(settings)
    yield _limits(settings)
    yield _preemption(settings, stages)
    yield from _privacy(settings, plan)
    yield from _gpus(settings, stages)
    yield from _segments(settings, stages)
    yield from _masks(settings, stages)


def version_of(settings: Settings) -> str:
    """Slurm's version, such as 25.11.1; "" if it is unknown."""
    found = re.match(r"\d+\.\d+(\.\d+)?", settings.get("SLURM_VERSION", ""))
    return found[0] if found else ""


def seconds(value: str) -> int | None:
    """The number in a value such as "30 sec"; None without one."""
    found = re.match(r"\d+", value)
    return int(found[0]) if found else None


def _version(settings: Settings, plan: Plan) -> Check:
    name, version, expected = "Slurm version", version_of(settings), plan.run.cluster.slurm_version
    if not version:
        return Check(name, "skipped", "scontrol does not say it")
    if version < OLDEST_SLURM:
        fix = f"{ADMIN} for Slurm {OLDEST_SLURM} or newer."
        return Check(name, "failed", f"{version}, and the scripts need {OLDEST_SLURM} or newer", fix)
    if expected and not f"{version}.".startswith(f"{expected}."):
        fix = f'Set slurm_version: "{version}" in the profile, so that options are checked against it.'
        return Check(name, "warning", f"{version}, and the profile says {expected}", fix)
    return Check(name, "ok", version)


def _kill_wait(settings: Settings, stages: tuple[StagePlan, ...]) -> Check:
    name, wait = "Slurm KillWait", seconds(settings.get("KillWait", ""))
    if wait is None:
        return Check(name, "skipped", "scontrol does not say it")
    lead = max((stage.signal_lead_s for stage in stages), default=0)
    warned = f"; jobs are warned {duration(lead)} before their time limit" if lead else ""
    if wait < LEAST_KILL_WAIT_S:
        fix = f"{ADMIN} for 30. Until then, end a run with hpcgen stop, which does not depend on it."
        return Check(name, "warning", f"{wait} s between TERM and KILL, too short for a save{warned}", fix)
    return Check(name, "ok", f"{wait} s{warned}")


def _requeue(settings: Settings, stages: tuple[StagePlan, ...]) -> Check:
    name, value = "Slurm JobRequeue", settings.get("JobRequeue", "")
    asked = all("--requeue" in stage.directives for stage in stages)
    if value == "0" and not asked:
        fix = "Remove --no-requeue from extra_directives."
        return Check(
            name, "warning", "0, and the jobs do not ask for --requeue, so they end at failures", fix
        )
    return Check(name, "ok", f"{value or 'unknown'}; the jobs ask for --requeue themselves")


def _prolog(settings: Settings) -> Check:
    name, flags, prolog = "Slurm PrologFlags", settings.get("PrologFlags", ""), settings.get("Prolog", "")
    names = {flag.lower() for flag in flags.split(",")}
    if prolog and not names & {"alloc", "contain", "x11"}:
        fix = f"{ADMIN} for PrologFlags=Alloc. Otherwise the first step waits for the prolog on each node."
        return Check(name, "warning", f"none, and Prolog = {prolog} runs only with the first step", fix)
    return Check(name, "ok", flags or "none, and no Prolog")


def _arrays(settings: Settings, plan: Plan) -> Iterator[Check]:
    most, assumed = seconds(settings.get("MaxArraySize", "")), plan.run.cluster.max_array_size
    if most is None:
        yield Check("Slurm MaxArraySize", "skipped", "scontrol does not say it")
    elif most < assumed:
        fix = f"Set max_array_size: {most} in the profile."
        yield Check("Slurm MaxArraySize", "failed", f"{most}, and the profile says {assumed}", fix)
    else:
        yield Check("Slurm MaxArraySize", "ok", str(most))
    jobs = seconds(settings.get("MaxJobCount", ""))
    tasks = sum(
        stage.allocation.array.num_tasks if stage.allocation.array else 1 for stage in plan.stages.values()
    )
    if jobs is not None and tasks > jobs:
        fix = "Use fewer tasks: slurm.STAGE.num_tasks."
        yield Check(
            "Slurm MaxJobCount", "failed", f"{jobs}, and the stages have {counted(tasks, 'task')}", fix
        )
    elif jobs is not None:
        yield Check("Slurm MaxJobCount", "ok", str(jobs))


def _accounting(settings: Settings) -> Check:
    name, kind = "Slurm accounting", settings.get("AccountingStorageType", "").rpartition("/")[2]
    if kind in ("", "none", "(null)"):
        kept = settings.get("MinJobAge", "unknown")
        return Check(
            name, "ok", f"none: Slurm forgets a job after MinJobAge = {kept}; hpcgen reads the run directory"
        )
    enforced = settings.get("AccountingStorageEnforce", "")
    return Check(name, "ok", kind + (f", enforces {enforced}" if enforced not in ("", "none") else ""))


def _dead_nodes(settings: Settings) -> Check:
    name, wait = "Slurm SlurmdTimeout", seconds(settings.get("SlurmdTimeout", ""))
    if wait is None:
        return Check(name, "skipped", "scontrol does not say it")
    if wait == 0 or wait > LONG_SILENCE_S:
        found = (
            "0: Slurm never notices a dead node" if wait == 0 else f"{wait} s until a dead node is noticed"
        )
        fix = "Set preflight.node_health or preflight.spare_nodes, so that the job checks its nodes itself."
        return Check(name, "warning", found, fix)
    return Check(name, "ok", f"{wait} s until a dead node is noticed")


def _limits(settings: Settings) -> Check:
    """The jobs ask for --propagate=NONE, so the limits of the submitting shell never apply."""
    value = settings.get("PropagateResourceLimits", "")
    return Check(
        "Slurm resource limits",
        "ok",
        f"PropagateResourceLimits = {value or 'unknown'}; jobs use --propagate=NONE",
    )


def _preemption(settings: Settings, stages: tuple[StagePlan, ...]) -> Check:
    name, kind, mode = "Slurm preemption", settings.get("PreemptType", ""), settings.get("PreemptMode", "")
    if kind in ("", "preempt/none") or mode.upper() in ("", "OFF"):
        return Check(name, "ok", "off")
    if "SUSPEND" in mode.upper() and any(stage.kind.trains for stage in stages):
        fix = f"{ADMIN} for a partition or QOS without suspension. Suspended ranks exceed the timeout of collectives."
        return Check(name, "failed", f"{mode}: jobs are suspended, and training then hangs", fix)
    parameters = settings.get("PreemptParameters", "")
    if "send_user_signal" in parameters:
        return Check(name, "ok", f"{mode}, with a warning (send_user_signal)")
    fix = (
        f"{ADMIN} for PreemptParameters=send_user_signal with a GraceTime longer than one step and one save. Otherwise "
        "a preempted run repeats the steps since its last checkpoint."
    )
    return Check(name, "warning", f"{mode}, without a warning before it", fix)


def _privacy(settings: Settings, plan: Plan) -> Iterator[Check]:
    hidden = settings.get("PrivateData", "").lower().split(",")
    if "jobs" not in hidden:
        yield Check("Slurm PrivateData", "ok", settings.get("PrivateData") or "none")
    elif plan.config.share == "group":
        fix = "Agree with the group on who trains in the directory: only the trainer's lock keeps two jobs apart."
        yield Check("Slurm PrivateData", "warning", "hides the jobs of other members of a shared run", fix)
    else:
        yield Check("Slurm PrivateData", "ok", f"{settings['PrivateData']}; your own jobs are visible")


def _gpus(settings: Settings, stages: tuple[StagePlan, ...]) -> Iterator[Check]:
    if not any(stage.device == "cuda" and stage.allocation.gres != "none" for stage in stages):
        return
    kinds, select = settings.get("GresTypes", "").lower().split(","), settings.get("SelectType", "")
    if "gpu" not in kinds:
        fix = (
            "Set gres: none in the profile if whole nodes are allocated, or ask the admins for GresTypes=gpu."
        )
        yield Check(
            "Slurm GPUs", "failed", f"GresTypes = {settings.get('GresTypes') or 'none'}, without gpu", fix
        )
    elif select == "select/linear":
        fix = "Set gres: none in the profile: select/linear allocates whole nodes."
        yield Check("Slurm GPUs", "warning", "SelectType = select/linear", fix)
    else:
        yield Check("Slurm GPUs", "ok", f"GresTypes = {settings.get('GresTypes')}")


def _segments(settings: Settings, stages: tuple[StagePlan, ...]) -> Iterator[Check]:
    segments = [stage.allocation.segment for stage in stages if stage.allocation.segment]
    if not segments:
        return
    plugin = settings.get("TopologyPlugin", "")
    if plugin == "topology/block":
        yield Check("Slurm topology", "ok", f"{plugin}, with segments of {counted(segments[0], 'node')}")
    else:
        fix = f"Remove segment, or {ADMIN.lower()} for TopologyPlugin=topology/block."
        yield Check(
            "Slurm topology", "failed", f"{plugin or 'unknown'}, and segment needs topology/block", fix
        )


def _masks(settings: Settings, stages: tuple[StagePlan, ...]) -> Iterator[Check]:
    plugins = settings.get("TaskPlugin", "")
    if any(stage.allocation.cpu_masks for stage in stages) and not re.search("affinity|cgroup", plugins):
        fix = f"{ADMIN} for TaskPlugin=task/affinity,task/cgroup. Until then, ranks move between sockets."
        yield Check(
            "Slurm TaskPlugin", "warning", f"{plugins or 'none'}: the CPU masks of ranks have no effect", fix
        )
