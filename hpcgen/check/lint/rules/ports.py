"""Ports of the rendezvous."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence

from hpcgen.check.lint.arithmetic import Refused
from hpcgen.check.lint.filters import Unknown
from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Step
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.sample import Effort, Sample
from hpcgen.check.lint.script import Assignment
from hpcgen.check.lint.words import Word

FIRST_EPHEMERAL_PORT, LAST_EPHEMERAL_PORT = 32768, 60999
"""Linux, net.ipv4.ip_local_port_range: ports for outgoing connections."""


MIN_PORT, MAX_PORT = 1024, 65535
"""Ports that a program may use without being root."""
MIN_JOB_ID, MAX_JOB_ID = 10_000, 67_108_863
"""The job IDs of a cluster (slurm.conf, FirstJobId and MaxJobId). The first few thousand are soon behind it."""
MIN_GPUS_OF_A_NODE = 4
"""Minimum number of GPUs that nodes for training usually have."""
DEFAULT_MAX_TASK_ID = 1000
MAX_PORTS = 20
"""Maximum number of ports of a script that are computed for sample jobs."""
GOOD_PORT = "MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))"


_OTHER_ASSIGNMENT = re.compile(
    r"\s*(?:export\s+)?(?:printf\s+-v\s+MASTER_PORT\s+([^;|]+)|let\s+[\"']?MASTER_PORT=([^\"';]+)"
    r"|\(\(\s*MASTER_PORT\s*=(?!=)(.+)\)\))"
)
"""printf -v, let and (( )), which assign a port as well."""


def _ports(job: Job) -> Iterator[tuple[int, Word | None, Assignment | None]]:
    """Every port of a rendezvous: its line, its value, and the assignment of the value."""
    for assignment in job.script.assignments:
        if assignment.name == "MASTER_PORT" and not job.is_replaced(assignment):
            yield assignment.line, assignment.value, assignment
    for number, line in enumerate(job.script.lines, start=1):
        if found := _OTHER_ASSIGNMENT.match(line):
            source = f"$(printf {found[1]})" if found[1] else f"$(({found[2] or found[3]}))"
            yield number, Word(text=source, known=False, line=number, source=source), None
    for launch in job.launches:
        for name in ("master-port", "rdzv-endpoint", "main-process-port"):
            option = launch.option(name)
            if option and option.value and not launch.option("standalone"):
                yield option.value.line, option.value, None


def _port(word: Word | None) -> int | None:
    """The number at the end of a word: 29500, host:29500."""
    found = re.search(r"(?:^|:)(\d{2,5})$", word.text) if word else None
    return int(found[1]) if found else None


def _has_no_port(word: Word | None) -> bool:
    """True if a word is a host without a port: node1, $(hostname)."""
    return word is not None and bool(
        re.fullmatch(r"\"?(\$\(hostname[^:)]*\)|[A-Za-z][\w.-]*)\"?", word.source)
    )


@rule(
    "fixed-port",
    "warning",
    "two jobs can use the same port",
    source="PyTorch, torch/distributed/run.py, Stacked single-node",
)
def fixed_port(job: Job) -> Iterator[Hit]:
    """With a fixed port, two jobs on one node collide: one fails to start, or joins the other.

    A port computed from the job ID differs between jobs. Jobs with exclusive nodes are not reported. Jobs with four to
    seven GPUs per node get a note, since these may be all GPUs of the node. torchrun uses port 29400 if --rdzv_endpoint
    has none.
    """
    if not job.script.is_batch or _has_exclusive_nodes(job):
        return
    if job.launches and all(launch.option("standalone") for launch in job.launches):
        return
    reported: set[int] = set()
    for line, word, assignment in _ports(job):
        port = 29400 if assignment is None and _has_no_port(word) else _port(word)
        if port is None or word is None or port in reported:
            continue
        is_own = (
            not word.variables if assignment else not any("PORT" in name.upper() for name in word.variables)
        )
        if is_own:
            reported.add(port)
            yield Hit.at(
                line,
                f"every job of this script uses port {port}, and two jobs can share a node",
                GOOD_PORT,
                severity="note" if _num_gpus(job) >= MIN_GPUS_OF_A_NODE else None,
            )


def _has_exclusive_nodes(job: Job) -> bool:
    """True if the directives keep other jobs of this script off the nodes."""
    gpus = _num_gpus(job)
    if job.script.options.get("dependency") == "singleton":
        return True
    return (
        "exclusive" in job.script.options or gpus >= 8 or (job.is_multi_node and gpus >= MIN_GPUS_OF_A_NODE)
    )


def _num_gpus(job: Job) -> int:
    """GPUs that the job requests on a node, as far as known."""
    return job.gpus_per_node or job.number("gpus") or 0


@rule(
    "port-of-each-task",
    "error",
    "every task picks a different port",
    source="PyTorch, torch.distributed, environment variable initialization",
)
def port_of_each_task(job: Job) -> Iterator[Hit]:
    """A random MASTER_PORT in the shell of a task differs from task to task, so the ranks never connect.

    Choose the port in the batch shell, or compute it from the job ID.
    """
    meets = [item for item in job.script.assignments if item.name == "MASTER_ADDR" and item.value]
    if not any(re.search(r"scontrol|NODELIST", item.value.source) for item in meets if item.value):
        return  # each task may be a separate world
    if any(item.name == "RANDOM" for item in job.script.assignments):
        return  # with the same seed, tasks draw the same number
    if any(launch.option("standalone") for launch in job.launches):
        return  # torchrun does not read MASTER_PORT
    inside = {name for step in job.steps if job.has_many_tasks(step) for name in _called_in(job, step)}
    steps = [step.command for step in job.steps if job.has_many_tasks(step) and _is_literal(step)]
    for item in job.script.assignments:
        if item.name != "MASTER_PORT" or item.value is None or not _is_random(job, item.value):
            continue
        outer = None if item.outer is None else job.script.commands[item.outer]
        in_text = outer is not None and not item.conditional and any(outer is command for command in steps)
        if in_text or (item.outer is None and item.function in inside and _runs_always(job, item)):
            yield Hit.at(
                item.line,
                "every task of the step picks a different MASTER_PORT, so the ranks never connect",
                f"export {GOOD_PORT} before srun",
            )


def _called_in(job: Job, step: Step) -> Iterator[str]:
    """The functions of the script that the text of `srun bash -c` calls."""
    for command in job.script.commands:
        outer = None if command.outer is None else job.script.commands[command.outer]
        if outer is step.command and command.name in job.script.functions and not command.conditional:
            yield command.name


def _is_literal(step: Step) -> bool:
    """True if the shell of the task, not the batch shell, expands the text of `bash -c`."""
    texts = [word.source for word in step.program]
    return any(
        re.fullmatch(r"-\w*c", flag) and text.startswith("'") for flag, text in itertools.pairwise(texts)
    )


def _is_random(job: Job, word: Word) -> bool:
    """True if every evaluation of a word yields a different number."""
    source = word.source
    called = [name for name in job.script.functions if re.search(rf"\$\(\s*{re.escape(name)}\b", source)]
    for name in called:
        own = [
            found for command in job.script.commands if command.function == name for found in command.words
        ]
        source += " ".join(found.source for found in own)
    kept = "MASTER_PORT" in word.source or re.search(r"random-source|SLURM_JOB", source)
    return not kept and bool(re.search(r"\bshuf\b|\bRANDOM\b|\bbind\(\(", source))


def _runs_always(job: Job, item: Assignment) -> bool:
    """True if an assignment in a function is unconditional."""
    body = job.script.lines[job.script.functions[item.function].line : item.line]
    return not any(
        re.search(r"\b(if|case|elif|while|for)\b|&&|\|\|", line.partition("#")[0]) for line in body
    )


@rule("ephemeral-port", "warning", "the port may be taken", source="Linux, net.ipv4.ip_local_port_range")
def ephemeral_port(job: Job) -> Iterator[Hit]:
    """The kernel uses ports 32768 to 60999 for outgoing connections, so the job's port may be in use.

    The rule computes the ports of sample jobs from job IDs and $RANDOM: arithmetic, expr, cut, tail, awk, shuf and
    others, also through variables.
    """
    for line, word, outcomes in _computed_ports(job):
        ports = [found for _, found in outcomes if isinstance(found, int)]
        is_fixed = len(set(ports)) == 1
        if not all(map(_is_valid, ports)):
            continue  # port-range reports it
        if not ports or (word and word.assumed and is_fixed) or (not is_fixed and _looks_for_free_ports(job)):
            continue
        least, greatest = min(ports), max(ports)
        if greatest >= FIRST_EPHEMERAL_PORT and least <= LAST_EPHEMERAL_PORT:
            which = f"the port {least}" if is_fixed else f"a port between {least} and {greatest}"
            yield Hit.at(
                line,
                f"{which} may be in use: the kernel assigns {FIRST_EPHEMERAL_PORT} to {LAST_EPHEMERAL_PORT} to clients",
                f"a port below {FIRST_EPHEMERAL_PORT}: {GOOD_PORT}",
            )


def _looks_for_free_ports(job: Job) -> bool:
    looks = re.compile(r"(^|[\s(|;!])(ss|netstat|lsof|nc)\s+-")
    return any(looks.search(line) for line in job.script.lines if not line.lstrip().startswith("#"))


@rule("port-range", "error", "some jobs get no valid port", source="man bash, ARITHMETIC EVALUATION; ip(7)")
def port_range(job: Job) -> Iterator[Hit]:
    """Ports end at 65535, and those below 1024 need root. A number with a leading zero is octal for bash.

    The rule computes the ports of sample jobs, as in ephemeral-port. This is only a warning if some job IDs yield a
    valid port.
    """
    for line, _, outcomes in _computed_ports(job):
        bad = [(job_id, found) for job_id, found in outcomes if not _is_valid(found)]
        if not bad:
            continue
        # the job of a cluster that has been in use for some time
        job_id, found = max(bad, key=lambda outcome: (outcome[0] < MAX_JOB_ID // 10, outcome[0]))
        is_fixed = len({str(outcome) for _, outcome in outcomes}) == 1
        is_random = len({job_id for job_id, _ in outcomes}) == 1
        who = "every job" if is_fixed else "a job" if is_random else f"job {job_id}, for example,"
        yield Hit.at(
            line,
            f"{who} gets no port: {found}"
            if isinstance(found, Refused)
            else f"{who} gets port {found}, and ports are {MIN_PORT} to {MAX_PORT}",
            GOOD_PORT,
            severity="warning" if len(bad) < len(outcomes) else None,
        )


def _is_valid(found: int | Refused) -> bool:
    return isinstance(found, int) and MIN_PORT <= found <= MAX_PORT


_Outcomes = Sequence[tuple[int, int | Refused]]
"""IDs of sample jobs, each with its port or the reason why it has none."""


@functools.lru_cache(maxsize=1)  # two rules read them, one after the other
def _computed_ports(job: Job) -> tuple[tuple[int, Word | None, _Outcomes], ...]:
    """Lines and values of the first ports, with their outcomes, which are empty if only a run can tell."""
    effort = Effort()
    return tuple(
        (line, word, _outcomes(job, word, effort, is_endpoint=assignment is None))
        for line, word, assignment in itertools.islice(_ports(job), MAX_PORTS)
    )


def _outcomes(job: Job, word: Word | None, effort: Effort, *, is_endpoint: bool) -> _Outcomes:
    if word is None or not word.certain:
        return ()
    outcomes: list[tuple[int, int | Refused]] = []

    def outcome(job_id: int, *, greatest: bool) -> int | Refused:
        sample = _sample(job, job_id, effort, greatest=greatest)
        return _outcome(sample, word, is_endpoint=is_endpoint)

    try:
        job_ids = _job_ids(job, word)
        ends = [outcome(job_ids[0], greatest=end) for end in (False, True)]
        for job_id in job_ids:
            # the last draw differs from the first only if the port is random
            for greatest in (False, True)[: len(set(map(str, ends)))]:
                outcomes.append((job_id, outcome(job_id, greatest=greatest)))
    except Unknown:
        return ()
    return () if {str(outcome) for _, outcome in outcomes} == {"0"} else outcomes  # 0: any free port


def _outcome(sample: Sample, word: Word, *, is_endpoint: bool) -> int | Refused:
    try:
        text = sample.text_after_colon(word.text) if is_endpoint else sample.text(word.text)
    except Refused as refused:
        return refused
    if not re.fullmatch(r"-?\d{1,20}", text, re.ASCII):
        raise Unknown
    return int(text)


def _sample(job: Job, job_id: int, effort: Effort, *, greatest: bool) -> Sample:
    environment = dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_ARRAY_JOB_ID"), str(job_id))
    if (array := job.script.options.get("array")) is not None:
        indices = [int(number) for number in re.findall(r"\d{1,9}", re.split("[:%]", array)[0])]
        task_id = (max if greatest else min)(indices or [0, DEFAULT_MAX_TASK_ID])
        environment |= {"SLURM_ARRAY_TASK_ID": str(task_id)}
    return Sample(job.script, environment, greatest=greatest, effort=effort)


_ENDS = (
    "0000", "0001", "0008", "0009", "0010", "0089", "0123", "0777", "0800", "0999", "1000", "1023", "1024", "5000",
    "9000", "9999", "00000", "00009", "00080", "01023", "08999", "32767", "32768", "61000", "65535", "65536", "99999",
)  # fmt: skip
"""The last digits of job IDs where a computation can go wrong."""


def _job_ids(job: Job, word: Word) -> list[int]:
    """Job IDs with extreme digits, and with extreme remainders for the numbers of a computation."""
    texts = [word.text, *(item.value.text for item in job.script.assignments if item.value)]
    if not any("SLURM_" in text for text in texts):
        return [MIN_JOB_ID]
    found = {MIN_JOB_ID, 12_345, 65_535, 65_536, 99_999, 100_000, 999_999, MAX_JOB_ID}
    found |= {int(start + end) for start in ("1", "9", "123", "481") for end in _ENDS}
    for number in {int(digits) for text in texts for digits in re.findall(r"\b\d{2,8}\b", text)}:
        for multiple in {
            number * (job_id // number) for job_id in (2 * number, 1_234_567, MAX_JOB_ID) if number
        }:
            found |= {multiple - 1, multiple, multiple + 1}
    return sorted(job_id for job_id in found if MIN_JOB_ID <= job_id <= MAX_JOB_ID)
