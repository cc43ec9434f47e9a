"""The parts of a script's launch. Each is carried over, listed or refused; none is lost in silence."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcgen.check.lint.job import ALL_ARGUMENTS, Job
from hpcgen.check.lint.launch import Launch, Option, mpi_call_of
from hpcgen.check.lint.mpi import MPI_LAUNCHERS
from hpcgen.check.lint.sbatch import Directive
from hpcgen.check.lint.script import SHELLS, Assignment, Command
from hpcgen.check.lint.words import Word
from hpcgen.check.migration.leftover import Carried
from hpcgen.config.slurm import PASSED_ON
from hpcgen.redaction import SECRET, SECRET_VALUE

WHY = {
    r"mem(-per-(cpu|gpu))?": "slurm.{stage}.mem sets the memory; by default, exclusive jobs get all of it",
    r"cpus-per-(task|gpu)|core-spec|thread-spec": "slurm.{stage}.cpus_per_task sets the CPUs of a task; its default is "
    "an equal share of the node's CPUs",
    r"nodes|ntasks(-per-\w+)?|nodelist|relative": "the run file starts {layout}",
    r"gpus(-per-\w+)?|gres": "the job gets the GPUs of its nodes as in the cluster profile",
    r"(gpu|cpu|mem|tres|accel)-bind|gres-flags|distribution|hint|threads-per-core|extra-node-info|exact": (
        "hpcgen binds each task to its share of the node's CPUs (cluster profile)"
    ),
    r"exclusive|oversubscribe|overcommit|overlap": "the cluster profile decides whether jobs share nodes",
    r"mpi|resv-ports": "the tasks find each other by MASTER_ADDR and MASTER_PORT, without MPI; for a program with MPI, "
    "Slurm's default (MpiDefault) must fit",
    r"environment": "it starts the step in a container: set container.image and container.runtime",
    r"container.*": "the section container sets the image, mounts and working directory, and nothing else of pyxis",
    r"no-requeue": "the job requeues itself after a failure; slurm.{stage}.max_restarts = 0 turns that off",
    r"signal": "slurm.{stage}.signal_lead_s sets when the program is asked to save and stop",
    r"output|error|input": "the log is {stage}-%j.log in the run directory",
    r"kill-on-bad-exit|no-kill|wait": "one failed rank ends the step (--kill-on-bad-exit=1)",
    r"job-name": "it is not a valid name of a run; use --name",
    "|".join(("time", *PASSED_ON)): "the job's own directive decides; set slurm.{stage}",
    r"export": "tasks get the environment of the job; set variables in environment",
    r"open-mode": "the log is appended to after a requeue",
    r"chdir": "{directory}",
}
"""Names of options of sbatch and srun -> where they go, or why a run file does not need them."""

DIRECTORY = {
    "run": "set program.directory; its default is the directory of the run file",
    "train": "relative paths start at the directory of the run file",
}
"""Stage -> where a change of the directory goes."""
_WHY_OF_STEP = "hpcgen starts the step with its own options"
_WHY_OF_JOB = "a run file has no key for it"
_WHY_OF_SHELL = "the run file starts the program without it; to keep it, begin program.command with it"
_WHY_OF_LOGIN = (
    "it reads /etc/profile and ~/.bash_profile; put what the program needs from them into the prologue of a site "
    "template (templates/README.md)"
)
_WHY_OF_MPI = "hpcgen starts the tasks with srun and its own options"
LAUNCH = "torch.distributed.launch"

_EVALUATES = ("eval", "source", ".")
_PYTHON = re.compile(r"(^|/)python[\d.]*$|^\$\{?\w*PYTHON\w*\}?$")
_USUAL_STARTERS = re.compile(
    r"-m|-u|torch\.distributed\.run|torchrun|python3?|accelerate|launch|deepspeed|composer|tune|run|axolotl|train"
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the launch, and what to say if nothing carries it over."""

    thing: object
    """The directive, option or word of the script."""
    line: int
    what: str
    why: str


def list_unclaimed(job: Job, launch: Launch, carried: Carried, stage: str, layout: str) -> None:
    """Lists every part of the launch that nothing has claimed."""
    for part in _parts(job, launch, stage, layout):
        if not carried.is_claimed(part.thing):
            carried.leave(part.line, part.what, part.why)


def _parts(job: Job, launch: Launch, stage: str, layout: str) -> Iterator[Part]:
    for directive in job.script.directives:
        why = _why(directive.name, _WHY_OF_JOB, stage, layout)
        yield Part(thing=directive, line=directive.line, what=text_of(directive), why=why)
    for option in launch.step.options if launch.step else ():
        why = _why(option.name, _WHY_OF_STEP, stage, layout)
        yield Part(thing=option, line=option.word.line, what=f"srun {option_text(option)}", why=why)
    for mpi_option in launch.mpi.options if launch.mpi else ():
        what = f"mpirun {shown_words((mpi_option.word, *mpi_option.values))}"
        why = f"{_WHY_OF_MPI}: {layout}"
        yield Part(thing=mpi_option, line=mpi_option.word.line, what=what, why=why)
    for option in launch.options:
        text = option_text(option)
        what = f"{launch.launcher} {text[1:] if launch.launcher == 'python' else text}"
        yield Part(thing=option, line=option.word.line, what=what, why="the run file has no key for it")
    yield from _starters(job, launch)
    yield from _login_shells(job, launch)


def _starters(job: Job, launch: Launch) -> Iterator[Part]:
    """Yields the words in front of the program, other than options."""
    prefix, starting = launch_prefix(launch)
    for words, name, why in (
        (mpi_prefix(launch), "mpirun", _WHY_OF_MPI),
        (prefix, launch.launcher or launch.program, "the launcher starts the program"),
        *(
            (words, f"the shell that starts {launch.program}", _WHY_OF_SHELL)
            for words in shell_prefixes(job, launch)
        ),
    ):
        if words:
            what = f"{shown_words(words)} in front of {name}"
            yield Part(thing=words[0], line=words[0].line, what=what, why=why)
    for word in starting:
        if word.text == LAUNCH:
            why = "it gives the program --local-rank; torchrun sets only the variable LOCAL_RANK"
            yield Part(thing=word, line=word.line, what=word.text, why=why)
        elif not _USUAL_STARTERS.fullmatch(word.text):
            why = "the profile's python starts the program"
            yield Part(thing=word, line=word.line, what=word.text, why=why)


def _login_shells(job: Job, launch: Launch) -> Iterator[Part]:
    """Yields the options that make the script, or a shell that starts the program, read the login files."""
    shebang = job.script.lines[0]
    if re.match(r"#!.*\s(-\w*l\w*|--login)(\s|$)", shebang):
        yield Part(thing=shebang, line=1, what=shebang.strip(), why=_WHY_OF_LOGIN)
    for words in _shell_calls(job, launch):
        names = [word.text.rpartition("/")[2] for word in words]
        first = next((index for index, name in enumerate(names) if name in SHELLS), len(words))
        for word in itertools.takewhile(lambda word: word.text.startswith("-"), words[first + 1 :]):
            if re.fullmatch(r"-\w*l\w*|--login", word.text):
                yield Part(thing=word, line=word.line, what=f"{names[first]} {word.text}", why=_WHY_OF_LOGIN)


def _why(name: str, otherwise: str, stage: str, layout: str) -> str:
    found = next((why for pattern, why in WHY.items() if re.fullmatch(pattern, name)), otherwise)
    return found.format(stage=stage, layout=layout, directory=DIRECTORY[stage])


def text_of(directive: Directive) -> str:
    """A directive as on a command line."""
    return f"--{directive.name}" + (f"={directive.value}" if directive.value is not None else "")


def option_text(option: Option) -> str:
    """An option of srun or of a launcher, without the value of a secret."""
    if option.value is None:
        return f"--{option.name}"
    is_hidden = SECRET.search(option.name.replace("-", "_")) or is_secret(option.text)
    return f"--{option.name}={'...' if is_hidden else option.text}"


def shown_words(words: Sequence[Word]) -> str:
    """Words for a message, with dots in place of secrets."""
    texts = [re.sub(r"\s+", " ", word.text) for word in words]
    secret = hold_secrets([word.text for word in words])
    return " ".join(_hidden(text) if hides else text for text, hides in zip(texts, secret, strict=True))


def _hidden(text: str) -> str:
    name, equals, _ = text.partition("=")
    return f"{name}=..." if equals and not SECRET_VALUE.search(name) else "..."


def brief(words: tuple[Word, ...]) -> str:
    """Words for a message, without the end of a long text."""
    text = shown_words(words)
    return text if len(text) <= 160 else f"{text[:157]}..."


def is_secret(text: str) -> bool:
    """True if a word contains a secret, such as WANDB_API_KEY=abc or --api-key=abc."""
    name, equals, value = text.partition("=")
    return bool((equals and _holds_secret(name, value)) or SECRET_VALUE.search(text))


def hold_secrets(texts: Sequence[str]) -> list[bool]:
    """True for each word that contains a secret. The word after an option such as --api-key does."""
    return [
        is_secret(text)
        or (before.startswith("-") and text[:1] not in ("-", "") and _holds_secret(before, text))
        for before, text in zip(("", *texts), texts, strict=False)
    ]


def _holds_secret(name: str, value: str) -> bool:
    """True if the name of a variable or option says that its value is a secret."""
    if not re.fullmatch(r"-{0,2}\w[\w-]*", name) or not SECRET.search(name.replace("-", "_")):
        return False
    if not name.startswith("-"):
        return True
    # an option such as --eos-token has a text of the vocabulary, and a value such as $KEY is not the secret itself
    is_token = name.lower().endswith("token")
    return bool(re.fullmatch(r"(?=.*\d)[\w.-]{16,}", value)) if is_token else "$" not in value


# ---- the commands and words of the launch ----


def _all_words(launch: Launch) -> tuple[Word, ...]:
    """The words of the command that starts the program, without srun."""
    step = launch.step
    words = step.program if step and launch.command is step.command else launch.command.words
    # launch.words has the arguments of functions and texts in place of "$@", but not the wrappers in front
    starts = (index for index, word in enumerate(words) if word is launch.words[0])
    return words[: next(starts, 0)] + launch.words


def mpi_prefix(launch: Launch) -> tuple[Word, ...]:
    """The words in front of mpirun."""
    words = _all_words(launch)
    names = (word.text.rpartition("/")[2] for word in words)
    end = next((index for index, name in enumerate(names) if name in MPI_LAUNCHERS), 0)
    return words[:end]


def command_words(launch: Launch) -> tuple[Word, ...]:
    """The complete command of a task, without mpirun, and without a builtin such as exec in front of it."""
    words = _all_words(launch)
    if call := mpi_call_of(words):
        words = call.program
    return _without_builtins(words)


def _without_builtins(words: tuple[Word, ...]) -> tuple[Word, ...]:
    while words and words[0].text in ("exec", "command", "builtin"):
        words = words[1:]
    return words


def program_words(launch: Launch) -> tuple[Word, ...]:
    """The program and its arguments, without what starts it."""
    own = {id(word) for option in launch.options for word in (option.word, option.value)}
    words = command_words(launch)
    first = max((index + 1 for index, word in enumerate(words) if id(word) in own), default=0)
    start = next((index for index in range(first, len(words)) if words[index].text == launch.program), first)
    return words[start:]


def launch_prefix(launch: Launch) -> tuple[tuple[Word, ...], tuple[Word, ...]]:
    """The words in front of the launcher, such as numactl, env A=B, a container or launch.sh, and the launcher."""
    own = {id(word) for option in launch.options for word in (option.word, option.value)}
    words = command_words(launch)
    start = len(words) - len(program_words(launch))
    end = next((index for index, word in enumerate(words) if id(word) in own), start)
    first = next((index for index in range(end) if _is_launcher(words[index].text, launch)), end)
    return words[:first], words[first:end]


def _is_launcher(text: str, launch: Launch) -> bool:
    """True if the launcher or the program begins with this word."""
    is_python = launch.launcher in ("python", "torchrun") and _PYTHON.search(text)
    names = (text, text.rpartition("/")[2]) if launch.launcher else ()
    return text == launch.program or launch.launcher in names or bool(is_python)


def own_commands(job: Job, launch: Launch) -> tuple[Command, ...]:
    """The command that starts the program, and the commands whose text or function contains it, innermost first."""
    commands = job.script.commands
    found = [launch.command]
    if launch.step and launch.step.command is not launch.command:
        found.append(launch.step.command)
    for command in found:  # grows while it is read
        outer = () if command.outer is None else (commands[command.outer],)
        calls = (call for call in commands if command.function and call.name == command.function)
        bodies = (body for body in commands if body.function == command.name != "" and is_body(body, job))
        around = (*outer, *calls, *bodies)
        found += [other for other in around if not any(other is known for known in found)]
    return tuple(found)


def _shell_calls(job: Job, launch: Launch) -> Iterator[tuple[Word, ...]]:
    """Yields the commands with a text or script that starts the program, without srun and mpirun."""
    own = own_commands(job, launch)
    outer = [job.script.commands[command.outer] for command in own if command.outer is not None]
    for command in own:
        if any(command is found for found in outer):
            is_step = launch.step is not None and launch.step.command is command
            words = launch.step.program if launch.step and is_step else command.words
            call = mpi_call_of(words)
            yield call.program if call else words


def shell_prefixes(job: Job, launch: Launch) -> Iterator[tuple[Word, ...]]:
    """Yields the words in front of each shell whose text starts the program, such as those of a container."""
    for words in _shell_calls(job, launch):
        names = (word.text.rpartition("/")[2] for word in words)
        starts = (index for index, name in enumerate(names) if name in SHELLS or name in _EVALUATES)
        if prefix := _without_builtins(words[: next(starts, 0)]):
            yield prefix


def is_within(command: Command | Assignment, launch: Launch, job: Job) -> bool:
    """True if program.command has the text or starts the script that contains the command."""
    outer = command.outer
    while outer is not None:
        if job.script.commands[outer] is launch.command:
            return True
        outer = job.script.commands[outer].outer
    return False


def is_body(command: Command, job: Job) -> bool:
    """True if a function's call completes a command with its arguments, so that the call is the command that counts."""
    takes_arguments = any(word.source in ALL_ARGUMENTS for word in command.words)
    return takes_arguments and any(call.name == command.function for call in job.script.commands if call.name)


def within_text(command: Command, job: Job, own: tuple[Command, ...]) -> bool:
    """True if a command is in the text of a `bash -c` or `eval` that starts the program."""
    return command.outer is not None and any(job.script.commands[command.outer] is found for found in own)


def changes_of_directory(job: Job, launch: Launch) -> Iterator[Command]:
    """Yields the script's cd commands in front of the program, including those in a text that starts the program."""
    own = own_commands(job, launch)
    for command in job.script.commands:
        if command is own[0]:
            return
        is_own = command.outer is None or within_text(command, job, own)
        if command.name in ("cd", "pushd") and len(command.words) > 1 and is_own and not command.dead:
            yield command
