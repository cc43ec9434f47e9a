"""The steps, programs and resources of a job, which the rules check."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hpcgen.check.lint.launch import (
    Launch,
    Option,
    Step,
    launch_of,
    mpi_call_of,
    program_of,
    step_of,
    unwrapped,
)
from hpcgen.check.lint.mpi import MpiCall
from hpcgen.check.lint.script import Assignment, Command, Script
from hpcgen.check.lint.words import Word
from hpcgen.config.fields import seconds
from hpcgen.config.sbatch_options import release_with

MAX_INLINED = 5
"""Maximum depth of functions that are followed to the command they run."""


ALL_ARGUMENTS = ('"$@"', "$@", '"${@}"', "${@}")


_TEST_PROGRAMS = re.compile(r"(^|/)\w+_perf(_mpi)?$")

_AIDS = frozenset((
    ".", ":", "[", "awk", "cat", "cd", "chmod", "chown", "conda", "cp", "curl", "date", "dcgmi", "declare", "df",
    "docker", "du", "echo", "enroot", "env", "exit", "export", "false", "find", "free", "getent", "git", "grep", "head",
    "hostname", "ibstat", "id", "ip", "kill", "killall", "ln", "ls", "lscpu", "mkdir", "ml", "module", "mount", "mv",
    "nvidia-smi", "ping", "pip", "pip3", "pkill", "podman", "printenv", "printf", "ps", "ray", "rm", "rocm-smi",
    "rsync", "sbcast", "scp", "sed", "set", "sleep", "sort", "source", "sudo", "ssh", "sysctl", "tar", "tee", "test",
    "touch", "trap", "true", "ulimit", "umask", "uname", "unset", "unzip", "uv", "wait", "wc", "wget", "whoami",
))  # fmt: skip
"""Commands that inspect, copy, clean up or serve other programs, and are never the work of a job."""
_RUN_OTHERS = ("bash", "sh", "eval", "sbatch", "make", "xargs", "ssh")
"""Commands that may start anything."""
_AID_SCRIPTS = re.compile(
    r"(^|[/_.-])(setup|prepare|install|download|clean\w*|check|health\w*|preflight|info|debug|copy|stage|sync|cache|warm\w*|"
    r"import|pull|ray|serv\w*|start|stop|kill|monitor\w*|watch\w*|test|bench\w*|env\w*)([_.-]|$)",
    re.IGNORECASE,
)


@dataclass(frozen=True, eq=False)
class Job:
    """A script, with everything derived from it for the rules. A job equals only itself."""

    script: Script

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Every call of srun, directly or through a function."""
        found = (
            step_of(command, words, background)
            for command in self.script.commands
            if not command.dead
            for words, background in _resolved(self.script, command)
        )
        return tuple(step for step in found if step and not _is_passed_on(step.program))

    @cached_property
    def mpi_calls(self) -> tuple[tuple[Command, MpiCall], ...]:
        """Every call of mpirun, directly, within a step or through a function, with its command."""
        found = []
        for command in self.script.commands:
            for words, background in _resolved(self.script, command):
                step = step_of(command, words, background)
                if call := mpi_call_of(step.program if step else words):
                    found.append((command, call))
        return tuple(found)

    @cached_property
    def mpi_settings(self) -> tuple[Assignment, ...]:
        """Variables that calls of mpirun set for their ranks."""
        return tuple(
            Assignment(name=name, line=value.line, value=value, conditional=command.conditional)
            for command, call in self.mpi_calls
            for name, value in call.environment
            if value is not None and not command.dead
        )

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """Every Python program that is started, inside or outside of steps."""
        steps = {id(step.command): step for step in self.steps}
        calls = {id(command): call for command, call in self.mpi_calls}
        found: list[Launch] = []
        for command in self.script.commands:
            outer = None if command.outer is None else self.script.commands[command.outer]
            if command.dead or any(outer is launch.command for launch in found):
                continue  # "$@" in sh -c '...; exec "$@"', which was already followed
            for words, background in _resolved(self.script, command):
                step = step_of(command, words, background)
                program = step.program if step else words
                around = [id(one) for one in self._enclosing(command)]
                step = next((steps[one] for one in around if one in steps), step)
                mpi = next((calls[one] for one in around if one in calls), None)
                if launch := launch_of(command, step, program, mpi):
                    found.append(launch)
        return tuple(found)

    @cached_property
    def trainings(self) -> tuple[Launch, ...]:
        """Launches of training programs."""
        return tuple(launch for launch in self.launches if launch.trains)

    @cached_property
    def megatron(self) -> tuple[Launch, ...]:
        """Launches of Megatron-LM."""
        return tuple(launch for launch in self.launches if launch.is_megatron)

    @cached_property
    def like_megatron(self) -> tuple[Launch, ...]:
        """Launches of Megatron-LM and its relatives, for rules about options that all of them have."""
        return tuple(launch for launch in self.launches if launch.is_like_megatron)

    @cached_property
    def work_steps(self) -> tuple[Step, ...]:
        """Steps that do the work of the job, as opposed to checks, copies and queries of versions."""
        working = {
            id(launch.step.command)
            for launch in self.launches
            if launch.step and (launch.trains or not launch.is_module or not _asks(launch))
        }
        found = []
        for step in self.steps:
            program = step.program[0].text if step.program else ""
            alone = step.option("ntasks")
            if alone and alone.value and alone.value.number == 1 and len(self.steps) > 1:
                continue
            if id(step.command) in working or _TEST_PROGRAMS.search(program):
                found.append(step)
        return tuple(found)

    @cached_property
    def parallel_steps(self) -> tuple[Step, ...]:
        """Steps with several tasks in a job with GPUs, for any program.

        Excludes checks, copies and servers, and steps in the background or with --overlap, which run next to other
        steps.
        """
        return tuple(
            step
            for step in self.steps
            if self._has_gpus(step)
            and self.has_many_tasks(step)
            and not step.background
            and not step.option("overlap", "no-kill")
            and not self.is_aid(step)
        )

    @cached_property
    def work(self) -> tuple[Command, ...]:
        """The commands of the script whose failure is a failure of the job, in order.

        These are trainings and work steps. Without any, they are single-task programs in steps, and parallel steps.
        """
        commands = [step.command for step in self.work_steps]
        commands += [launch.step.command if launch.step else launch.command for launch in self.trainings]
        if not commands:
            commands = [launch.step.command for launch in self.launches if launch.step and not _asks(launch)]
            commands += [step.command for step in self.parallel_steps]
        chosen = {id(self.outermost(command)) for command in commands}
        return tuple(
            command for command in self.script.commands if id(command) in chosen and not command.dead
        )

    def is_replaced(self, assignment: Assignment) -> bool:
        """True if the script certainly assigns the variable again before anything uses it."""
        if assignment.function or assignment.outer is not None:
            return False
        following = min(
            (
                later.line
                for later in self.script.assignments_by_name.get(assignment.name, ())
                if later.line > assignment.line
                and later.value is not None
                and not (later.append or later.conditional or later.dead or later.function)
                and later.outer is None
            ),
            default=None,
        )
        return following is not None and not any(
            bisect_right(lines, assignment.line) < bisect_right(lines, following)
            for lines in (self._start_lines, self._use_lines.get(assignment.name, ()))
        )

    @cached_property
    def _start_lines(self) -> Sequence[int]:
        """The lines, in order, of commands that start programs, which may read any variable."""
        starts = {id(launch.command) for launch in self.launches} | {id(step.command) for step in self.steps}
        starts |= {id(command) for command, _ in self.mpi_calls}
        return sorted(
            command.line
            for command in self.script.commands
            if id(command) in starts or command.name in self.script.functions or command.name in _RUN_OTHERS
        )

    @cached_property
    def _use_lines(self) -> Mapping[str, Sequence[int]]:
        """Variable -> the lines of its uses, in order."""
        found: dict[str, list[int]] = {}
        for use in sorted(self.script.uses, key=lambda use: use.line):
            found.setdefault(use.name, []).append(use.line)
        return found

    def outermost(self, command: Command) -> Command:
        """The top-level command that runs a command in the text of a `bash -c`."""
        return [command, *self._enclosing(command)][-1]

    def _enclosing(self, command: Command) -> Iterator[Command]:
        """The commands whose `bash -c` texts contain a command, from the inside out."""
        while command.outer is not None:
            command = self.script.commands[command.outer]
            yield command

    def _has_gpus(self, step: Step) -> bool:
        return self.uses_gpus or step.option("gpus", "gpus-per-node", "gpus-per-task") is not None

    def has_many_tasks(self, step: Step) -> bool:
        """True if a step certainly has more than one task."""
        return (self.num_tasks(step) or 0) > 1 or (self.tasks_per_node(step) or 0) > 1

    def is_aid(self, step: Step) -> bool:
        """True if a step only inspects, copies, cleans up or serves, or its program is unknown."""
        index = next(index for index, found in enumerate(self.script.commands) if found is step.command)
        inner = [found for found in self.script.commands if found.outer == index]
        if inner:
            # a script from a here-document may end with exit, which is not its program
            last = next((found for found in reversed(inner) if found.name != "exit"), inner[-1])
            is_sure = last.conditional == step.command.conditional and last.name not in self.script.functions
            return not is_sure or last.name in _AIDS or _is_aid_script(last.words)
        program = program_of(step.program)
        if not program or any(word.text == "-c" for word in program[1:2]):
            return True
        name = program[0].text.rpartition("/")[2]
        return name in _AIDS or _is_aid_script(program)

    # ---- resources ----

    def number(self, option: str) -> int | None:
        """The integer value of a directive."""
        value = self.script.options.get(option, "")
        return int(value) if re.fullmatch(r"\d{1,9}", value, re.ASCII) else None

    @cached_property
    def time_limit_s(self) -> int | None:
        """The time limit from --time in seconds; None if there is no --time, or if it is UNLIMITED."""
        value = self.script.options.get("time", "")
        if re.fullmatch(r"\d{1,9}", value, re.ASCII):
            return 60 * int(value)
        is_time = re.fullmatch(r"\d{1,9}(-\d{1,9}(:\d{1,9}){0,2}|(:\d{1,9}){1,2})", value, re.ASCII)
        return seconds(value) if is_time else None

    @cached_property
    def nodes(self) -> int | None:
        """Number of nodes according to the directives; None if unknown."""
        tasks, per_node = self.number("ntasks"), self.number("ntasks-per-node")
        if nodes := self.number("nodes"):
            return nodes
        if "nodes" not in self.script.options and tasks and per_node and tasks % per_node == 0:
            return tasks // per_node
        return None

    @cached_property
    def is_multi_node(self) -> bool:
        """True if the job certainly has several nodes."""
        return (self.nodes or 0) > 1

    @cached_property
    def may_be_multi_node(self) -> bool:
        """True if the job has several nodes, or their number may be given on sbatch's command line."""
        if "nodes" in self.script.options or self.nodes:
            return self.nodes != 1
        given = [option for launch in self.launches if (option := launch.option("nnodes"))]
        return any(option.text != "1" for option in given)

    @cached_property
    def oldest_slurm(self) -> str:
        """The oldest Slurm release with all options of the script; "" if any release may have them."""
        given = [*self.script.options.items()]
        given += [(option.name, option.text) for step in self.steps for option in step.options]
        return max((release_with(name, value) for name, value in given), default="")

    @cached_property
    def gpus_per_node(self) -> int | None:
        """GPUs per node according to the directives; None if unknown."""
        for option in ("gpus-per-node", "gres"):
            for part in self.script.options.get(option, "").split(","):
                found = re.fullmatch(r"(?:gres/)?(?:gpu:)?(?:[A-Za-z][\w.-]*:)?(\d{1,3})", part)
                if found and (option != "gres" or "gpu" in part):
                    return int(found[1])
        per_task, tasks = self.number("gpus-per-task"), self.ntasks_per_node
        if per_task and tasks:
            return per_task * tasks
        total, nodes = self.number("gpus"), self.nodes
        return total // nodes if total and nodes else None

    @property
    def uses_gpus(self) -> bool:
        """True if a directive requests GPUs."""
        options = self.script.options
        asked = any(name in options for name in ("gpus", "gpus-per-node", "gpus-per-task"))
        return asked or "gpu" in options.get("gres", "")

    @cached_property
    def ntasks_per_node(self) -> int | None:
        """Tasks per node according to the directives; 1 by default."""
        tasks, per_node, nodes = self.number("ntasks"), self.number("ntasks-per-node"), self.nodes
        if per_node:
            return per_node
        if tasks is not None and nodes:
            return -(-tasks // nodes)
        return 1 if "ntasks" not in self.script.options else None

    def num_tasks(self, step: Step) -> int | None:
        """Number of tasks of a step; None if unknown."""
        option = step.option("ntasks")
        if option and option.value:
            return option.value.number
        if tasks := self.number("ntasks"):
            return tasks
        nodes, per_node = self.num_nodes(step), self.tasks_per_node(step)
        return nodes * per_node if nodes and per_node else None

    @cached_property
    def requeues(self) -> bool:
        """True if the job can be requeued, by --requeue or scontrol."""
        return "requeue" in self.script.options or any(
            command.name == "scontrol" and any(word.text == "requeue" for word in command.words)
            for command in self.script.commands
        )

    @property
    def sets_tasks(self) -> bool:
        """True if a directive sets the number of tasks."""
        return not {"ntasks", "ntasks-per-node"}.isdisjoint(self.script.options)

    def tasks_per_node(self, step: Step) -> int | None:
        """Actual number of tasks per node of a step.

        If directives set the number of tasks, srun ignores its own --ntasks-per-node without --ntasks or --nodes
        (Slurm, src/srun/opt.c: "can't honor --ntasks-per-node").
        """
        option, tasks, nodes = step.option("ntasks-per-node"), step.option("ntasks"), self.num_nodes(step)
        wanted = option.value.number if option and option.value else None
        if tasks and tasks.value:
            number = tasks.value.number
            return -(-number // nodes) if number and nodes else wanted
        if option and (step.option("nodes") or not self.sets_tasks):
            return wanted
        return self.ntasks_per_node

    def num_nodes(self, step: Step) -> int | None:
        """Number of nodes of a step; None if unknown."""
        option = step.option("nodes")
        return option.value.number if option and option.value else self.nodes

    def world_size(self, launch: Launch) -> tuple[int, int] | None:
        """Number of nodes, and of ranks per node; None if unknown."""
        if launch.launcher == "torchrun":
            nodes, ranks = launch.option("nnodes"), launch.option("nproc-per-node")
            num_nodes = _number(nodes, self.nodes, "SLURM_")
            per_node = _number(ranks, self.gpus_per_node, "SLURM_GPUS")
            return (num_nodes, per_node) if num_nodes and per_node else None
        if launch.mpi is not None:
            return self._mpi_world(launch.mpi)
        if launch.step is None:
            return None
        tasks, nodes_ = self.num_tasks(launch.step), self.nodes
        if tasks and nodes_ and tasks % nodes_ == 0:
            return nodes_, tasks // nodes_
        return None

    def starts_per_node(self, launch: Launch) -> int | None:
        """How often srun or mpirun starts a launcher on each node; None if unknown, or without both."""
        if launch.mpi is not None:
            world = self._mpi_world(launch.mpi)
            return world[1] if world else None
        step = launch.step
        return None if step is None or step.is_open else self.tasks_per_node(step)

    def _mpi_world(self, call: MpiCall) -> tuple[int, int] | None:
        """Number of nodes, and of ranks per node, of a call of mpirun; None if unknown."""
        ranks, per_node, nodes = call.num_ranks, call.ranks_per_node, self.nodes
        if ranks and per_node and ranks % per_node == 0:
            return ranks // per_node, per_node
        if per_node and nodes and not ranks:
            return nodes, per_node
        return (nodes, ranks // nodes) if ranks and nodes and ranks % nodes == 0 else None

    def exported(self, name: str) -> Assignment | None:
        """The last unconditional export of a variable that is never unset."""
        found = [item for item in self.script.settings(name) if not item.conditional]
        return found[-1] if found and name not in self.script.unset else None

    def exported_text(self, name: str) -> str | None:
        """The value of an unconditionally exported variable; None if unknown."""
        item = self.exported(name)
        return item.value.text if item and item.value and item.value.known and item.value.certain else None


def _number(option: Option | None, otherwise: int | None, prefix: str) -> int | None:
    """The number in a launcher's option, or the job's if the option is missing or a Slurm variable."""
    word = option.value if option else None
    if word is None or any(name.startswith(prefix) for name in word.variables):
        return (word.number if word else None) or otherwise
    # a default that the environment can override is most likely overridden
    return None if word.assumed else word.number


def _is_aid_script(words: Sequence[Word]) -> bool:
    """True if the first words name a script for preparation, checks or cleanup."""
    return any(_AID_SCRIPTS.search(word.text) for word in words[:2])


def _is_passed_on(program: Sequence[Word]) -> bool:
    """True if the program comes from the arguments of a function, so that only the call names it."""
    return bool(program) and program[0].source in ALL_ARGUMENTS


def _asks(launch: Launch) -> bool:
    return bool({word.text for word in launch.arguments} & {"--version", "--versions", "--help"})


def _resolved(script: Script, command: Command, depth: int = 0) -> Iterator[tuple[tuple[Word, ...], bool]]:
    """The commands behind wrappers and functions that run their arguments, and whether they run in the background."""
    words = unwrapped(_with_positional(script, command))
    function = script.functions.get(words[0].text) if words and depth < MAX_INLINED else None
    own = script.commands_by_function.get(function.name, []) if function else []
    bodies = [found for found in own if any(word.source in ALL_ARGUMENTS for word in found.words)]
    if not bodies:
        yield words, command.background
        return
    for body in bodies:
        shifted = sum(_shift(found) for found in own if found.name == "shift" and found.line <= body.line)
        # run() { eval "$@"; }
        own_words = body.words[1:] if body.name == "eval" else body.words
        called = replace(
            command,
            words=_inlined(own_words, words[1 + shifted :]),
            background=command.background or body.background,
            outer=None,
        )
        for found, background in _resolved(script, called, depth + 1):
            yield found, background or called.background


def _inlined(words: Sequence[Word], arguments: Sequence[Word]) -> tuple[Word, ...]:
    """The words of a command with "$@" replaced by `arguments`."""
    found: list[Word] = []
    for word in words:
        found += arguments if word.source in ALL_ARGUMENTS else [word]
    return tuple(found)


def _shift(command: Command) -> int:
    """Number of arguments that a `shift` drops."""
    return (command.words[1].number or 1) if len(command.words) > 1 else 1


def _with_positional(script: Script, command: Command) -> tuple[Word, ...]:
    """The words of a command, with "$@" replaced.

    The arguments come from `bash -c TEXT NAME ARGUMENTS`, or from the call of a script that a here-document has
    written.
    """
    outer = None if command.outer is None else script.commands[command.outer]
    if outer is None or not any(word.source in ALL_ARGUMENTS for word in command.words):
        return command.words
    if outer.file_text is not None:
        return _inlined(command.words, outer.file_arguments)
    texts = [word.text for word in outer.words]
    start = next(
        (i for i, text in enumerate(texts) if re.fullmatch(r"-\w*c", text) and "sh" in texts[i - 1]), None
    )
    if start is None or "@" in outer.words[start + 1].variables:  # "$@" of the script, in double quotes
        return command.words
    return _inlined(command.words, outer.words[start + 3 :])
