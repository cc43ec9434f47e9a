"""Parses calls of srun and Python programs: options, launcher, program, arguments."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hpcgen.check.lint.mpi import MpiCall, mpi_call
from hpcgen.check.lint.sbatch import num_option_words, parse_options
from hpcgen.check.lint.script import Command
from hpcgen.check.lint.words import UNKNOWN, Word
from hpcgen.check.lint.wrappers import wrapped

# fmt: off
_WRAPPERS = {
    "command": 0, "exec": 0, "nohup": 0, "time": 0, "setsid": 0, "sudo": 0, "timeout": 1, "stdbuf": 0,
    "nice": 0, "ionice": 0, "numactl": 0, "taskset": 1, "chrt": 1, "env": 0,
}
"""Programs that run their arguments -> number of words between their options and the command."""
_OPTIONS_WITH_VALUE = frozenset((
    "-n", "-o", "-s", "-k", "--signal", "--kill-after", "-u", "-C", "--chdir", "-N", "-m", "-i", "-e",
    "--cpunodebind", "--membind", "--physcpubind", "--interleave", "--preferred",
))
_SHELLS = ("bash", "sh", "zsh")
_PYTHON = re.compile(r"(^|/)(python[\d.]*|torchrun)$")
_PROFILERS = ("nsys", "ncu", "dlprof", "rocprof", "py-spy", "gdb", "catchsegv", "unbuffer", "ch-run", "sarus")
"""Programs that run another program, which follows options that are not parsed."""
_EXEC = re.compile(r'''(?:^|[;&]\s*)exec( [^;&|<>()'`]*)? "\$@"$''')
"""The end of a `bash -c` text that runs its arguments, alone or through a wrapper such as enroot."""
_TORCHRUN_FLAGS = frozenset(("standalone", "no-python", "use-env", "run-path", "help", "version"))
_TRAINING_FILES = re.compile(
    r"(^|/)(?!(prepare|preprocess|test|eval|convert|download|tokenize)[\w-]*\.py$)"
    r"([\w-]*[_-])?((pre)?train|finetun|fine_tun|sft[_.-]|dpo[_.-]|grpo[_.-])[\w.-]*(?<!_test)\.py$"
    r"|(^|/)(\w+_)?train(ing)?/(main|run_recipe)\.py$"
)
_TRAINING_MODULES = re.compile(r"(^|[._])(pre)?train(er|ing)?(\.(train|main))?$|^open_lm\.main$")
OTHER_WORK = re.compile(
    r"(^|[._/-])(eval|infer|test|generat|convert|preprocess|prepare|bench|download|tokeni[sz]e|export|serve|score|embed|"
    r"predict|profile|all_?reduce)", re.IGNORECASE
)
"""Names of programs that do not train."""
_TRAINING_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "composer", "tune", "axolotl")
"""Launchers of training programs, unless the program's name indicates other work."""
_MEGATRON_OPTIONS = frozenset((
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "num-layers", "hidden-size", "num-attention-heads",
    "max-position-embeddings", "seq-length", "micro-batch-size", "global-batch-size", "train-iters", "lr-decay-iters",
    "lr-decay-style",
))
MIN_MEGATRON_OPTIONS = 6
"""Number of these options from which on a program counts as Megatron-LM or a relative."""
# fmt: on


@dataclass(frozen=True)
class Option:
    """One option of srun or of a launcher."""

    name: str
    value: Word | None
    word: Word

    @property
    def text(self) -> str:
        """The value as text; "" without a value."""
        return self.value.text if self.value else ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of srun."""

    command: Command
    options: tuple[Option, ...]
    program: tuple[Word, ...]
    """The command of the step, without srun and its options."""
    background: bool
    is_open: bool
    """True if options may come from an unknown variable."""

    def option(self, *names: str) -> Option | None:
        """The last option with one of these names."""
        return next((option for option in reversed(self.options) if option.name in names), None)

    def all(self, name: str) -> list[Option]:
        """All options with this name."""
        return [option for option in self.options if option.name == name]

    @property
    def line(self) -> int:
        """The line of the call of srun."""
        return self.command.line

    @property
    def has_container(self) -> bool:
        """True if pyxis starts a container for the step."""
        return self.option("container-image", "container-name") is not None


@dataclass(frozen=True, kw_only=True)
class Flag:
    """An option of a Python program, with the words after it."""

    name: str
    values: tuple[Word, ...]
    word: Word

    @property
    def value(self) -> Word | None:
        """The first word after the option."""
        return self.values[0] if self.values else None

    @property
    def line(self) -> int:
        """The line of the option."""
        return self.word.line


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A Python program with its launcher and arguments."""

    command: Command
    step: Step | None
    """The step that the program runs in."""
    mpi: MpiCall | None = None
    """The call of mpirun that starts it."""
    launcher: str
    """torchrun, accelerate, deepspeed, composer, tune, axolotl, or python."""
    options: tuple[Option, ...]
    """Options of the launcher."""
    program: str
    """Path of a script, or name of a module."""
    is_module: bool
    arguments: tuple[Word, ...]
    words: tuple[Word, ...]
    """The complete command, as far as functions and "$@" of the script were followed."""
    environment: frozenset[str]
    """Variables that `env`, mpirun or an assignment before the command sets for it."""

    def option(self, *names: str) -> Option | None:
        """The last of the launcher's options with one of these names (dashes, not underscores)."""
        return next((option for option in reversed(self.options) if option.name in names), None)

    @property
    def line(self) -> int:
        """The line of the command."""
        return self.command.line

    @cached_property
    def flags(self) -> dict[str, Flag]:
        """The program's options by name without dashes. The last one wins, as in argparse."""
        return {flag.name: flag for flag in _flags(self.arguments)}

    @cached_property
    def is_open(self) -> bool:
        """True if arguments may come from an unknown variable."""
        return bool(self.holders)

    @cached_property
    def holders(self) -> tuple[Word, ...]:
        """Variables that may contain more arguments: $@, $EXTRA_ARGS."""
        return tuple(word for word in self.arguments if _holds_arguments(word))

    @cached_property
    def trains(self) -> bool:
        """True if the program trains, and does more than print its version or help."""
        asked = {word.text for word in self.arguments} & {"--version", "--versions", "--help", "-h"}
        pattern = _TRAINING_MODULES if self.is_module else _TRAINING_FILES
        likely = self.launcher in _TRAINING_LAUNCHERS and not OTHER_WORK.search(self.program)
        return not asked and (likely or bool(pattern.search(self.program)))

    @property
    def is_megatron(self) -> bool:
        """True if the program is one of Megatron-LM's pretrain programs. Megatron-DeepSpeed has other options."""
        is_deepspeed = self.launcher == "deepspeed" or {"deepspeed", "deepspeed_config"} & self.flags.keys()
        return not is_deepspeed and bool(re.search(r"(^|/)pretrain_\w+\.py$", self.program))

    @cached_property
    def is_like_megatron(self) -> bool:
        """True if the program is Megatron-LM or takes its options: Megatron-DeepSpeed, a fork, a finetuning program."""
        return self.is_megatron or len(_MEGATRON_OPTIONS & self.flags.keys()) >= MIN_MEGATRON_OPTIONS


def unwrapped(words: tuple[Word, ...]) -> tuple[Word, ...]:
    """A command without prefixes such as `timeout 300` and `env A=b`."""
    while words and (name := words[0].text.rpartition("/")[2]) in _WRAPPERS:
        index = 1
        while index < len(words) and (
            words[index].text.startswith("-")
            or (name == "env" and re.match(r"\w+=|\$\{\w+\[@\]\}", words[index].text))
        ):
            index += 2 if words[index].text in _OPTIONS_WITH_VALUE else 1
        words = words[index + _WRAPPERS[name] :]
    # sh -c '...; exec [WRAPPER...] "$@"' NAME COMMAND...
    if len(words) > 4 and words[1].text == "-c" and (handed_on := _EXEC.search(words[2].text)):
        wrapper = (replace(words[2], text=text) for text in (handed_on[1] or "").split())
        return unwrapped((*wrapper, *words[4:]))
    return words


def program_of(words: tuple[Word, ...]) -> tuple[Word, ...]:
    """A command without the wrappers, containers and environments around it."""
    while (inner := wrapped(unwrapped(words))) != words:
        words = inner
    return words


def mpi_call_of(words: tuple[Word, ...]) -> MpiCall | None:
    """The call of mpirun in a command, behind wrappers, containers and environments."""
    while words:
        words = unwrapped(words)
        inner = wrapped(words)
        if (call := mpi_call(words)) or inner == words:
            return call
        words = inner
    return None


def step_of(command: Command, words: tuple[Word, ...], background: bool) -> Step | None:
    """The step that a command starts; None if it is not srun."""
    if not words or words[0].text.rpartition("/")[2] != "srun":
        return None
    rest = words[1:]
    is_open = False
    options: list[Option] = []
    while rest:
        texts = [word.text for word in rest]
        length = num_option_words(texts)
        for argument in parse_options(texts[:length]):
            word = rest[argument.index]
            options.append(
                Option(argument.name, _value_word(argument.value, word, rest, argument.index), word)
            )
        rest = rest[length:]
        # a variable among the options, which may contain more options
        if not (rest and not rest[0].known and re.match(r"\$\{?\w+", rest[0].text) and len(rest) > 1):
            break
        is_open = True
        rest = rest[1:]
    return Step(command=command, options=tuple(options), program=rest, background=background, is_open=is_open)


def _value_word(value: str | None, word: Word, rest: Sequence[Word], index: int) -> Word | None:
    if value is None:
        return None
    if word.text.endswith(value) and (
        (word.text.startswith("--") and "=" in word.text) or len(word.text) > 2
    ):
        source = word.source.partition("=")[2] or word.source
        known = word.known or not UNKNOWN.search(value)
        return Word(
            text=value,
            known=known,
            line=word.line,
            source=source,
            variables=word.variables,
            certain=word.certain,
            assumed=word.assumed,
        )
    return rest[index + 1]


def launch_of(
    command: Command, step: Step | None, program: tuple[Word, ...], outer_mpi: MpiCall | None = None
) -> Launch | None:
    """The Python program that a command starts; None for other programs.

    `outer_mpi` is the call of mpirun whose `bash -c` text contains the command.
    """
    mpi = mpi_call_of(program) or outer_mpi
    names = {item.name for item in command.environment}
    names |= {name for name, _ in mpi.environment} if mpi else set()
    names |= {found[1] for word in program if (found := re.match(r"([A-Za-z_]\w*)=", word.text))}
    words = program_of(program)
    if step is not None or mpi is not None:
        words = program_of(_without_script(words))
    if words and words[0].text.rpartition("/")[2] in _PROFILERS:
        python = [index for index, word in enumerate(words) if _PYTHON.search(word.text)]
        words = words[python[0] :] if python else ()
    if not words:
        return None
    name = words[0].text.rpartition("/")[2]
    launcher, rest = _launcher(name, words)
    if not launcher:
        return None
    options, rest = _launcher_options(launcher, rest)
    is_module = any(option.name in ("m", "module") for option in options)
    if not rest:
        return None
    return Launch(
        command=command,
        step=step,
        mpi=mpi,
        launcher=launcher,
        options=options,
        program=rest[0].text,
        is_module=is_module,
        arguments=rest[1:],
        words=program,
        environment=frozenset(names),
    )


def _without_script(words: tuple[Word, ...]) -> tuple[Word, ...]:
    """The program behind `./launch.sh train.py`, where the script sets the rank's variables first."""
    script = words
    if words and words[0].text.rpartition("/")[2] in _SHELLS:
        script = words[1:]
        while script and re.fullmatch(r"-[a-bd-z]+", script[0].text):  # bash -x launch.sh
            script = script[1:]
    if len(script) < 2 or script[0].text.startswith("-"):
        return words
    name = script[0].text
    is_script = name.endswith(".sh") or script is not words
    # bind.sh --cpu=exclusive -- python train.py
    options = [*itertools.takewhile(lambda word: word.text.startswith("-"), script[1:])]
    if options and options[-1].text == "--" and len(script) > len(options) + 1:
        script = (script[0], *script[len(options) + 1 :])
    if is_script and script[1].text.endswith(".py"):
        return (replace(script[0], text="python"), *script[1:])
    is_wrapper = is_script or "/" in name or not script[0].known
    return script[1:] if is_wrapper and _PYTHON.search(script[1].text) else words


def _launcher(name: str, words: tuple[Word, ...]) -> tuple[str, tuple[Word, ...]]:
    if name == "torchrun":
        return "torchrun", words[1:]
    if name == "accelerate" and len(words) > 1 and words[1].text == "launch":
        return "accelerate", words[2:]
    if name in ("deepspeed", "composer"):
        return name, words[1:]
    if (name, words[1].text if len(words) > 1 else "") in (("tune", "run"), ("axolotl", "train")):
        return name, words[2:]
    if name.endswith(".py"):
        return "python", words
    if re.fullmatch(r"python[\d.]*|\$\{?(\w+_)?PYTHON(_?(BIN|CMD|EXE\w*|PATH))?\}?", name):
        rest = words[1:]
        for index, word in enumerate(rest[:4]):
            following = rest[index + 1].text if index + 1 < len(rest) else ""
            if word.text == "-m" and following in ("torch.distributed.run", "torch.distributed.launch"):
                return "torchrun", rest[index + 2 :]
        return "python", rest
    return "", ()


def _launcher_options(launcher: str, words: tuple[Word, ...]) -> tuple[tuple[Option, ...], tuple[Word, ...]]:
    """The launcher's options, and the program with its arguments."""
    options: list[Option] = []
    index = 0
    while index < len(words) and words[index].text.startswith("-"):
        word = words[index]
        name, equals, value = word.text.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if name in ("m", "module"):
            options.append(Option(name, None, word))
            index += 1
            if launcher == "python":
                break
            continue
        takes = not equals and (launcher != "python" or name in ("W", "X", "c"))
        takes = takes and name not in _TORCHRUN_FLAGS
        following = words[index + 1] if takes and index + 1 < len(words) else None
        given = _value_word(value, word, words, index) if equals else following
        options.append(Option(name, given, word))
        index += 2 if following is not None else 1
    return tuple(options), words[index:]


def _holds_arguments(word: Word) -> bool:
    names = r"\$(@|\*|\{?\w*(ARGS|OPTS|OPTIONS|FLAGS|EXTRA|PARAMS|CMD)\w*)"
    return not word.known and bool(re.match(names, word.text, re.IGNORECASE))


def _flags(arguments: Sequence[Word]) -> Iterator[Flag]:
    name: str | None = None
    holder: Word | None = None
    values: list[Word] = []
    for word in arguments:
        if re.match(r"--[A-Za-z]", word.text):
            if name is not None and holder is not None:
                yield Flag(name=name, values=tuple(values), word=holder)
            text, equals, value = word.text[2:].partition("=")
            name, holder, values = text, word, []
            if equals:
                values = [found for found in [_value_word(value, word, (), 0)] if found]
        elif name is not None and not _holds_arguments(word):
            values.append(word)
    if name is not None and holder is not None:
        yield Flag(name=name, values=tuple(values), word=holder)
