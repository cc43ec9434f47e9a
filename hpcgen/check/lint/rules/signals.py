"""Signals and traps: what reaches the training, and what they interrupt."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.mpi import STEP_PROGRAMS
from hpcgen.check.lint.reader import read
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.script import Command, Script

_ONLY_SAYS = frozenset((
    "echo", "printf", "date", "sleep", "true", ":", "wait", "sync", "hostname", "nvidia-smi", "squeue", "sacct", "[",
    "test", "return", "free", "df",
))  # fmt: skip
"""Commands that send no signal, write no file and do not change the rest of the script."""
_FORWARDS = frozenset((
    "kill", "pkill", "killall", "scancel", "scontrol", "sbatch", "touch", "source", ".", "eval", "ssh", "xargs",
))  # fmt: skip
"""Commands elsewhere in the script that may notify the training after the trap has run."""


@rule(
    "signal-not-forwarded",
    "warning",
    "the training never gets the warning",
    source="Slurm, man sbatch, --signal: with B: no other process is signaled",
)
def signal_not_forwarded(job: Job) -> Iterator[Hit]:
    """B: sends the signal to the batch shell only. If the trap only prints, the training gets no warning.

    The training's own signal handler never runs. Only reported if every command of the trap is known to have no other
    effect. A trap that sends a signal, requeues the job, writes a file, sets a variable or exits is not reported.
    """
    signal = signal_of(job)
    if not signal or "B" not in signal[0]:
        return
    traps = [
        command
        for command in job.script.commands
        if command.name == "trap" and len(command.words) > 2 and signal[1] in _signals(command)
    ]
    elsewhere = any(map(_forwards, job.script.commands)) or _goes_on(job)
    if elsewhere or not all(
        trap.words[1].known and _only_says(job.script, trap.words[1].text) for trap in traps
    ):
        return
    runs_on = any(launch.step is None or launch.step.background for launch in job.trainings)
    if traps and runs_on:
        yield Hit.at(
            traps[0].line,
            f"the trap for {signal[1]} forwards nothing: the batch shell gets the signal, and the training does not",
            f"srun ... & pid=$!, and trap 'kill -{signal[1]} \"$pid\"' {signal[1]}",
        )


def _goes_on(job: Job) -> bool:
    """True if the script does more work after its last training, as when a trap interrupts a wait."""
    last = max((job.outermost(launch.command).end for launch in job.trainings), default=0)
    usual = _ONLY_SAYS | {"exit", "kill", "trap"}
    commands = job.script.commands
    at_exit = any(command.name == "trap" and command.words[-1].text in ("EXIT", "0") for command in commands)
    after = [command.name for command in commands if command.line > last and not command.function]
    return at_exit or not usual.issuperset(after)


def _forwards(command: Command) -> bool:
    asks = command.name == "scontrol" and "show" in [word.text for word in command.words]
    looks = command.name == "kill" and [word.text for word in command.words[1:2]] == ["-0"]
    return command.name in _FORWARDS and not asks and not looks


def _only_says(script: Script, text: str) -> bool:
    """True if the text of a trap, including the functions it calls, only prints and waits."""
    handler = read(f"{text}\n")
    if not handler.commands or handler.assignments or handler.error or _writes(text):
        return False
    return all(
        command.name in _ONLY_SAYS or _function_only_says(script, command.name)
        for command in handler.commands
    )


def _function_only_says(script: Script, name: str) -> bool:
    function = script.functions.get(name)
    own = script.commands_by_function.get(name, [])
    if function is None or not own or any(item.function == name for item in script.assignments):
        return False
    return all(command.name in _ONLY_SAYS for command in own) and not _writes(function.text)


def _writes(text: str) -> bool:
    """True if a redirection goes to a file."""
    return bool(re.search(r">(?!\s*(&\s*[12]|/dev/(null|stderr|stdout)))", text))


@rule("kill-srun", "warning", "killing srun kills the tasks at once", source="measured on Slurm 22.05")
def kill_srun(job: Job) -> Iterator[Hit]:
    """On SIGTERM, SIGHUP or SIGINT, srun kills every task with SIGKILL: a training saves no checkpoint.

    srun forwards SIGUSR1 and SIGUSR2 to the tasks of all nodes. Other programs, such as servers, are not reported.
    """
    pids = pids_of_trainings(job)
    handlers = {
        command.words[1].text: command.words[2:]
        for command in job.script.commands
        if command.name == "trap" and len(command.words) > 2
    }
    for command in job.script.commands:
        at_exit = all(word.text in ("EXIT", "0") for word in handlers.get(command.function, ()))
        if command.name == "kill" and not (command.function and at_exit):
            options = [word.text for word in command.words[1:] if word.text.startswith("-")]
            kills = _is_deadly(options) and any(pids & set(word.variables) for word in command.words)
        else:
            at_exit = all(word.text in ("EXIT", "0") for word in command.words[2:])
            kills = command.name == "trap" and not at_exit and _kills_in_trap(command, pids)
        if kills:
            yield Hit.at(
                command.line,
                "this signal makes srun kill the training with SIGKILL before it can save a checkpoint",
                "send srun -USR2, which it forwards",
            )


def pids_of_trainings(job: Job) -> set[str]:
    """Variables that contain the process ID of an srun that runs a training."""
    training = {id(launch.step.command) for launch in job.trainings if launch.step}
    starts = {(command.line, False) for command in job.script.commands if command.background}
    for step in job.steps:
        if step.background:
            starts -= {(step.line, False)}
            starts.add((step.line, id(step.command) in training))
    pids = set()
    for assignment in job.script.assignments:
        before = sorted(start for start in starts if start[0] <= assignment.line)
        is_pid = assignment.value and assignment.value.source.strip('"') in ("$!", "${!}")
        if is_pid and before and before[-1][1]:
            pids.add(assignment.name)
    return pids


def _kills_in_trap(command: Command, pids: set[str]) -> bool:
    return any(
        found[2] in pids and _is_deadly(found[1].split())
        for found in re.finditer(r"\bkill\s+((?:-\S+\s+)*)[\"']?\$\{?(\w+|!)", command.words[1].text)
    )


def _is_deadly(options: list[str]) -> bool:
    """True if kill with these options sends TERM (the default), HUP or INT."""
    text = " ".join(options).upper().replace("SIG", "")
    return not options or bool(re.fullmatch(r"-(S )?(TERM|HUP|INT|15|1|2)( --)?", text))


@rule("wait-interrupted", "warning", "the trap ends the wait", source="man bash, SIGNALS")
def wait_interrupted(job: Job) -> Iterator[Hit]:
    """A trap interrupts `wait`, which returns at once: the script continues while the step is still saving."""
    traps = [command for command in job.script.commands if command.name == "trap" and len(command.words) > 2]
    in_trap = any(re.search(r"\bwait\b", command.words[1].text) for command in traps)
    waits = [command for command in job.script.commands if command.name == "wait"]
    signals = {word.text for command in traps for word in command.words[2:]} - {"EXIT", "ERR", "0"}
    background = any(step.background for step in job.work_steps)
    if background and signals and len(waits) == 1 and not waits[0].in_loop and not in_trap:
        yield Hit.at(
            waits[0].line,
            "when the trap runs, this wait returns, and the script ends while the step is still saving",
            'while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done',
        )


MIN_SIGNAL_LEAD_S = 60


def signal_of(job: Job) -> tuple[str, str, int] | None:
    """--signal: its prefix ("B", "R" or ""), the name of the signal, and the seconds before the limit."""
    value = job.script.options.get("signal")
    if value is None:
        return None
    prefix, _, rest = value.rpartition(":")
    name, _, lead = rest.partition("@")
    name = {"10": "USR1", "12": "USR2", "15": "TERM"}.get(name, name.upper().removeprefix("SIG"))
    return prefix.upper(), name, int(lead) if lead.isdigit() else MIN_SIGNAL_LEAD_S


@rule(
    "signal-to-steps",
    "warning",
    "the signal before the time limit kills the training",
    source="measured on Slurm 22.05; PyTorch, torch/distributed/run.py, --signals-to-handle",
)
def signal_to_steps(job: Job) -> Iterator[Hit]:
    """Without B:, the signal goes to every process of every step and kills those that do not handle it.

    By default, torchrun handles only TERM, INT, HUP and QUIT (--signals-to-handle). A shell between srun and the
    training dies as well, unless the training is the last command of a -c text, which bash executes in place of itself.
    The task then ends, and Slurm with proctrack/cgroup kills what is left of it.
    """
    signal = signal_of(job)
    if signal is None or "B" in signal[0]:
        return
    for launch in job.trainings:
        if launch.step is None and launch.mpi is None:
            continue  # Slurm signals no process of the batch shell
        handled = signal[1] in _HANDLED_BY_TORCHRUN or launch.option("signals-to-handle") is not None
        if launch.launcher != "python" and not handled:
            victim = launch.launcher
            fix = f"--signal=B:{signal[1]}@..., and a trap that writes a file the training looks for"
        elif signal[1] not in _NOT_DEADLY and not _survives(job, launch.command, signal[1]):
            victim = "the shell that starts the training"
            fix = f"trap : {signal[1]} at the start of that shell's text, so that only the training reacts"
        else:
            continue
        yield Hit.at(
            job.script.option_line("signal"),
            f"--signal without B: sends {signal[1]} to every process of the step, which kills {victim}",
            fix,
        )
        return


_HANDLED_BY_TORCHRUN = ("TERM", "CONT", "INT", "HUP", "QUIT")
_NOT_DEADLY = ("CONT", "INT", "QUIT")
"""Signals that do not end a shell while it waits for a program."""


def _survives(job: Job, command: Command, signal: str) -> bool:
    """True if no shell between srun and a command dies of a signal."""
    if command.outer is None or command.words[0].text == "exec":
        return True
    outer = job.script.commands[command.outer]
    own = [other for other in job.script.commands if other.outer == command.outer]
    if any(other.name == "trap" and signal in _signals(other) for other in own):
        return True
    # bash executes the last command of a -c text in place of itself
    return outer.name not in STEP_PROGRAMS or (own[-1] is command and outer.file_text is None)


def _signals(trap: Command) -> set[str]:
    return {word.text.upper().removeprefix("SIG") for word in trap.words[2:]}


@rule(
    "signal-not-trapped",
    "error",
    "the signal before the time limit kills the batch script",
    source="Slurm, man sbatch, --signal; measured on 22.05",
)
def signal_not_trapped(job: Job) -> Iterator[Hit]:
    """B: sends the signal to the batch shell only. Without a trap, the shell dies, and the job ends early.

    A script that sources others is not reported: the trap may be there.
    """
    signal = signal_of(job)
    if not signal or "B" not in signal[0] or job.script.error is not None:
        return
    elsewhere = any(
        command.words[0].text in ("exec", "source", ".")
        for command in job.script.commands
        if len(command.words) > 1
    )
    if signal[1] not in _trapped(job) and not elsewhere:
        yield Hit.at(
            job.script.option_line("signal"),
            f"the script has no trap for {signal[1]}, so the batch shell dies {signal[2]} s before the time limit",
            f"trap '...' {signal[1]}, with srun in the background and a wait after it",
        )


def _trapped(job: Job) -> set[str]:
    """Signals that the script traps, without SIG."""
    traps = (_signals(command) for command in job.script.commands if command.name == "trap")
    return set().union(*traps)


@rule(
    "signal-not-to-script",
    "warning",
    "the signal does not reach the script",
    source="Slurm, man sbatch, --signal; measured on 22.05",
)
def signal_not_to_script(job: Job) -> Iterator[Hit]:
    """Without B:, Slurm sends the signal to the steps. The batch shell does not get it, so its trap does not run.

    A training that the batch shell starts without srun does not get it either.
    """
    signal = signal_of(job)
    if signal is None or "B" in signal[0]:
        return
    own = {
        word.text.upper().removeprefix("SIG")
        for command in job.script.commands
        if command.name == "trap" and command.outer is None
        for word in command.words[2:]
    }
    elsewhere = any(
        command.name in ("kill", "scancel") and any(word.source in _OWN_PROCESSES for word in command.words)
        for command in job.script.commands
    )
    if signal[1] in own and not elsewhere:
        yield Hit.at(
            job.script.option_line("signal"),
            f"the trap for {signal[1]} does not run: without B:, Slurm signals the steps, not the batch shell",
            f"--signal=B:{signal[1]}@{signal[2]}, with srun in the background and a wait after it",
        )
    elif job.trainings and not (job.steps or job.mpi_calls or elsewhere):
        yield Hit.at(
            job.script.option_line("signal"),
            f"no process gets {signal[1]}: without B:, Slurm signals only steps, and this script starts none",
            "start the training with srun",
        )


_OWN_PROCESSES = (
    "$$",
    '"$$"',
    "0",
    "$SLURM_JOB_ID",
    '"$SLURM_JOB_ID"',
    "${SLURM_JOB_ID}",
    '"${SLURM_JOB_ID}"',
)
"""Process IDs and names with which a script signals its own shell."""


@rule(
    "signal-too-late",
    "warning",
    "the signal leaves no time for a checkpoint",
    source="Slurm, man sbatch, --signal; measured on 22.05",
)
def signal_too_late(job: Job) -> Iterator[Hit]:
    """Between the signal and the time limit, the running step must end and a checkpoint must be written.

    A good lead is 60 s plus twice the slowest step and save. Slurm may send the signal up to ten seconds early.
    """
    signal = signal_of(job)
    if signal and job.trainings and signal[2] < MIN_SIGNAL_LEAD_S:
        yield Hit.at(
            job.script.option_line("signal"),
            f"{signal[2]} s before the time limit is too late for a checkpoint",
            f"at least @{MIN_SIGNAL_LEAD_S}: 60 s + 2 x (slowest step + slowest save)",
        )


@rule("foreground-step", "error", "the trap does not run before the step ends", source="man bash, SIGNALS")
def foreground_step(job: Job) -> Iterator[Hit]:
    """bash runs a trap only after the foreground command ends. If that command is srun, this is too late.

    With srun in the background and `wait`, the trap runs at once. The same holds for a training without srun.
    """
    signal = signal_of(job)
    if not signal or "B" not in signal[0] or signal[1] not in _trapped(job):
        return
    commands = [step.command for step in job.work_steps if not step.background]
    commands += [launch.command for launch in job.trainings if launch.step is None]
    for command in commands:
        if not command.background and command.outer is None and command.words[0].text != "exec":
            name = command.name
            yield Hit.at(
                command.line,
                f"{name} runs in the foreground, so bash runs the trap for {signal[1]} only after {name} ends",
                f'{name} ... & pid=$!, then: while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done',
            )
