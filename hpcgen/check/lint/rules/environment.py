"""Environment variables: unknown names, harmful values, and secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import ALL_ARGUMENTS, Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.rules.steps import SHORT_JOB_S
from hpcgen.check.lint.script import Assignment, switched
from hpcgen.check.lint.words import PLACEHOLDER
from hpcgen.config import known_variables as variables
from hpcgen.config.variable_values import value_mistake
from hpcgen.redaction import SECRET_VALUE
from hpcgen.text import counted


def _environment(job: Job) -> Iterator[Assignment]:
    """Every variable that commands get: exports, NAME=value before a command, and options of mpirun."""
    yield from (assignment for assignment in job.script.exports if not job.is_replaced(assignment))
    for command in job.script.commands:
        yield from command.environment
    yield from job.mpi_settings


def _is_on(assignment: Assignment) -> bool:
    return (
        bool(assignment.value)
        and assignment.value is not None
        and assignment.value.text in ("1", "true", "TRUE")
    )


@rule(
    "misspelt-variable",
    "error",
    "nothing reads this variable",
    source="NCCL user guide, Environment Variables; PyTorch, ProcessGroupNCCL.hpp",
)
def misspelt_variable(job: Job) -> Iterator[Hit]:
    """Nothing reports a misspelled variable: NCCL never reads it, and the job runs without the setting.

    This is only a warning if the correct name is also set or if there is no correct name, because another program may
    read the variable. A variable that the script itself reads is not reported.
    """
    own = {use.name for use in job.script.uses}
    for assignment in _environment(job):
        name, right = assignment.name, variables.right_name(assignment.name)
        reads = "neither NCCL nor PyTorch reads" if variables.is_checked(name) else "nothing reads"
        if right and not job.script.settings(right):
            yield Hit.at(assignment.line, f"{reads} {name}", right)
        elif right:
            why = f"{reads} {name}; {right} is set too"
            yield Hit.at(assignment.line, why, "remove it", severity="warning")
        elif (advice := variables.unread(name)) is not None and name not in own:
            why = f"neither NCCL nor PyTorch reads {name}{advice and f': {advice}'}"
            yield Hit.at(assignment.line, why, "remove it, unless your program reads it", severity="warning")


@rule(
    "renamed-variable",
    "note",
    "an old name of a PyTorch variable",
    source="PyTorch 2.2, torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp",
)
def renamed_variable(job: Job) -> Iterator[Hit]:
    """Since 2.2, PyTorch's settings for NCCL begin with TORCH_NCCL_. The old names still work, with a warning.

    Older releases read only the old names. Not reported: a script that exports both names. The effect of
    NCCL_ASYNC_ERROR_HANDLING is the default since 2.2.
    """
    for assignment in _environment(job):
        new = variables.RENAMED.get(assignment.name)
        if new and not job.script.settings(new):
            yield Hit.at(
                assignment.line,
                f"since PyTorch 2.2, {assignment.name} is called {new}",
                f"{new}; for older releases, export both",
            )


@rule(
    "nccl-debug-level",
    "error",
    "NCCL_DEBUG has no such level",
    source="NCCL user guide, NCCL_DEBUG; NCCL, src/debug.cc",
)
def nccl_debug_level(job: Job) -> Iterator[Hit]:
    """The levels are VERSION, WARN, INFO and TRACE. Any other value, such as ERROR, disables all messages.

    A warning for NCCL_DEBUG_SUBSYS, which takes subsystems such as INIT and NET, and ignores other names.
    """
    for assignment in _environment(job):
        word = assignment.value
        if assignment.name == "NCCL_DEBUG_SUBSYS" and word is not None and word.known:
            names = [
                name for name in word.text.lstrip("^").split(",") if name.upper() not in variables.SUBSYSTEMS
            ]
            for name in filter(None, names):
                yield Hit.at(
                    assignment.line,
                    f"NCCL has no subsystem {name}, so it ignores this",
                    "use NCCL_DEBUG for the level"
                    if name.upper() in variables.DEBUG_LEVELS
                    else "INIT,ENV,NET",
                    severity="warning",
                )
        is_word = assignment.name == "NCCL_DEBUG" and word is not None and word.known and word.text != ""
        if is_word and word is not None and word.text.upper() not in variables.DEBUG_LEVELS:
            yield Hit.at(
                assignment.line, f"NCCL_DEBUG has no level {word.text}, so NCCL prints nothing", "WARN"
            )


_OTHER_RULES = ("CUDA_LAUNCH_BLOCKING", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS")
"""Variables whose values have a rule of their own."""


@rule(
    "variable-value",
    "error",
    "a value that its program does not accept",
    source="NCCL, src/misc/param.cc and src/graph/paths.cc; libfabric, fi_info -e; UCX, ucx_info -f",
)
def variable_value(job: Job) -> Iterator[Hit]:
    """NCCL, UCX and libfabric rarely report a wrong value: they ignore it, or read only its beginning.

    NCCL reads 4M as 4. A blank in a list of devices becomes part of a name. NCCL_IB_TIMEOUT has five bits.
    """
    for assignment in _environment(job):
        name, word = assignment.name, assignment.value
        if word is None or not word.known or name in _OTHER_RULES:
            continue
        form = variables.form_of(name)
        if mistake := value_mistake(form, word.text):
            why, fix = f"{name} is {word.text}, which {mistake[0]}", mistake[1]
            yield Hit.at(assignment.line, why, fix, severity="warning" if form == "path" else None)


@rule(
    "nccl-debug-flood",
    "warning",
    "NCCL floods the log",
    source="NCCL user guide, NCCL_DEBUG and NCCL_DEBUG_FILE",
)
def nccl_debug_flood(job: Job) -> Iterator[Hit]:
    """With INFO, each rank writes hundreds of lines, which hide other messages and load the log's file system.

    NCCL_DEBUG_FILE writes them to other files. Not reported: NCCL_DEBUG_SUBSYS with only INIT, ENV or BOOTSTRAP.
    """
    subsystems = [item.value for item in _environment(job) if item.name == "NCCL_DEBUG_SUBSYS"]
    if subsystems and all(word and _QUIET.issuperset(word.text.upper().split(",")) for word in subsystems):
        return
    has_ranks = job.trainings or job.parallel_steps or any(map(job.has_many_tasks, job.work_steps))
    if not has_ranks or not job.script.is_batch or job.nodes == 1 or job.script.settings("NCCL_DEBUG_FILE"):
        return
    for assignment in _environment(job):
        word = assignment.value
        is_verbose = word is not None and word.text.upper() in ("INFO", "TRACE")
        if assignment.name == "NCCL_DEBUG" and is_verbose and not assignment.conditional:
            yield Hit.at(
                assignment.line,
                "every rank writes hundreds of NCCL lines into the job's log",
                "NCCL_DEBUG=WARN, or NCCL_DEBUG_FILE=/shared/nccl/%h.%p.log",
            )


_QUIET = frozenset(("INIT", "ENV", "BOOTSTRAP"))
"""Subsystems of NCCL that only print at the start."""


@rule("few-nics", "warning", "most InfiniBand devices stay idle", source="NCCL user guide, NCCL_IB_HCA")
def few_nics(job: Job) -> Iterator[Hit]:
    """NCCL uses only the devices in NCCL_IB_HCA. Nodes with 8 GPUs usually have one per GPU.

    A note for an exact list, such as =mlx5_0, which is rarely copied from elsewhere.
    """
    for assignment in _environment(job):
        word = assignment.value
        if assignment.name != "NCCL_IB_HCA" or word is None or not word.known:
            continue
        devices = word.text.removeprefix("=").split(",")
        # mlx5 is a prefix of all names; mlx5_0 is one name
        names = [device.partition(":")[0] for device in devices]
        exact = all(re.search(r"(?<!^mlx)\d$", name) for name in names) and not word.text.startswith("^")
        if exact and 2 * len(devices) < (job.gpus_per_node or 8):
            yield Hit.at(
                assignment.line,
                f"NCCL may use {counted(len(devices), 'InfiniBand device')} for all GPUs of a node",
                "remove it, or use a prefix of all names (mlx5_ib)",
                severity="note" if word.text.startswith("=") else None,
            )


@rule(
    "transport-off",
    "note",
    "a fast transport of NCCL is disabled",
    source="NCCL user guide, NCCL_P2P_DISABLE and NCCL_IB_DISABLE",
)
def transport_off(job: Job) -> Iterator[Hit]:
    """NCCL_P2P_DISABLE disables NVLink and NCCL_IB_DISABLE InfiniBand. Both are for debugging, not for training.

    Not reported if FI_*, NCCL_NET or NCCL_NET_PLUGIN is set: a plugin such as aws-ofi-nccl then carries the traffic.
    """
    reasons = {
        "NCCL_P2P_DISABLE": ("GPUs of a node communicate through host memory instead of NVLink", "NVLink"),
        "NCCL_IB_DISABLE": ("nodes communicate over TCP instead of InfiniBand or RoCE", "InfiniBand or RoCE"),
    }
    if any(re.match(r"FI_|NCCL_NET(_PLUGIN)?$", assignment.name) for assignment in _environment(job)):
        return
    for assignment in _environment(job) if job.trainings else ():
        if assignment.name in reasons and _is_on(assignment) and not assignment.conditional:
            if assignment.name == "NCCL_IB_DISABLE" and job.nodes == 1:
                continue
            why, hardware = reasons[assignment.name]
            yield Hit.at(assignment.line, why, f"remove {assignment.name} on nodes with {hardware}")


_DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": (r"[1-9]\d*", "every launch of a kernel waits for its end"),
    "HIP_LAUNCH_BLOCKING": (r"[1-9]\d*", "every launch of a kernel waits for its end"),
    "AMD_SERIALIZE_KERNEL": (r"[1-9]\d*", "every launch of a kernel waits for its end"),
    "TORCH_DISTRIBUTED_DEBUG": (r"(?i)detail", "another collective checks every collective"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (r".+", "every tensor is allocated by the driver"),
}
"""Variable for debugging -> its harmful values, and their effect."""


@rule(
    "debugging-left-on",
    "warning",
    "a setting for debugging slows the training",
    source="CUDA, Environment Variables; PyTorch, torch.distributed, TORCH_DISTRIBUTED_DEBUG",
)
def debugging_left_on(job: Job) -> Iterator[Hit]:
    """CUDA_LAUNCH_BLOCKING=1 and similar settings find the place of an error, and cost much of the speed.

    Not reported: jobs with a --time of at most ten minutes, and jobs that are called debug or test. A note if the
    comment above calls it a workaround.
    """
    limit_s = job.time_limit_s
    is_trial = any(re.search("debug|test", job.script.options.get(name, "")) for name in _NAMES_OF_JOBS)
    if not (job.trainings or job.parallel_steps) or is_trial or (limit_s and limit_s <= SHORT_JOB_S):
        return
    for assignment in _environment(job):
        pattern, effect = _DEBUGGING.get(assignment.name, ("", ""))
        word = assignment.value
        if effect and word and word.known and re.fullmatch(pattern, word.text) and not assignment.conditional:
            why = f"{assignment.name}={word.text} is for debugging: {effect}"
            above = job.script.lines[assignment.line - 2] if assignment.line > 1 else ""
            is_workaround = re.match(r"\s*#.*(workaround|do ?n.?t remove|do not remove|\bhangs?\b)", above)
            yield Hit.at(assignment.line, why, "remove it", severity="note" if is_workaround else None)


_NAMES_OF_JOBS = ("job-name", "partition", "qos")


@rule(
    "gloo-interface",
    "error",
    "gloo does not find the interface",
    source="gloo, transport/tcp/device.cc, lookupAddrForIface; measured with PyTorch 2.13",
)
def gloo_interface(job: Job) -> Iterator[Hit]:
    """GLOO_SOCKET_IFNAME takes full names of interfaces. gloo does not know the ^ and = of NCCL_SOCKET_IFNAME.

    It fails with "Unable to find address for" that name.
    """
    for assignment in _environment(job):
        word = assignment.value
        if assignment.name == "GLOO_SOCKET_IFNAME" and word and word.text.startswith(("=", "^")):
            yield Hit.at(
                assignment.line,
                f"gloo looks for an interface named {word.text}",
                "the full name that `ip -br link` shows, without ^ or =",
            )


@rule(
    "collnet-with-sharp", "error", "too many groups request SHARP", source="Megatron-Core, parallel_state.py"
)
def collnet_with_sharp(job: Job) -> Iterator[Hit]:
    """With --use-sharp, Megatron-Core sets NCCL_COLLNET_ENABLE only while it creates the one group that may use SHARP.

    If the variable is exported for the entire job, every group requests the switch's few resources.
    """
    for launch in job.megatron:
        for assignment in job.script.settings("NCCL_COLLNET_ENABLE") if "use-sharp" in launch.flags else ():
            if _is_on(assignment):
                yield Hit.at(
                    assignment.line,
                    "NCCL_COLLNET_ENABLE=1 makes every group request SHARP, not only the one for --use-sharp",
                    "remove it",
                )


@rule("flight-recorder", "note", "the flight record of a hang is empty", source="PyTorch, FlightRecorder.hpp")
def flight_recorder(job: Job) -> Iterator[Hit]:
    """TORCH_NCCL_DUMP_ON_TIMEOUT writes the collectives that TORCH_NCCL_TRACE_BUFFER_SIZE keeps.

    Older releases of PyTorch keep none by default. Newer ones call the setting TORCH_FR_BUFFER_SIZE.
    """
    sizes = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
    for assignment in job.script.settings("TORCH_NCCL_DUMP_ON_TIMEOUT"):
        if _is_on(assignment) and not any(job.script.settings(name) for name in sizes):
            yield Hit.at(
                assignment.line,
                "older releases of PyTorch keep no collectives to dump by default",
                "export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 as well",
            )


@rule(
    "offline-hub",
    "note",
    "ranks contact the hub",
    source="Hugging Face, huggingface_hub, Environment variables, HF_HUB_OFFLINE",
)
def offline_hub(job: Job) -> Iterator[Hit]:
    """Every rank looks up a tokenizer by its name on the hub: a thousand requests while GPUs wait."""
    for launch in job.megatron:
        flag = launch.flags.get("tokenizer-model")
        word = flag.value if flag else None
        is_name = (
            word and word.known and re.fullmatch(r"[\w.-]+/[\w.-]+", word.text) and word.text[0] not in "./"
        )
        if flag and is_name and not job.exported("HF_HUB_OFFLINE"):
            yield Hit.at(
                flag.line,
                f"every rank requests {word.text if word else ''} from the hub",
                "export HF_HUB_OFFLINE=1, and use a copy on storage",
            )


# ---- secrets: no message may contain a value ----

_NAME_OF_SECRET = re.compile(
    r"(?<!EOS_)(?<!BOS_)(?<!PAD_)(?<!UNK_)(?<!MASK_)(?<!STOP_)(?<!IMAGE_)"
    r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|PRIVATE_KEY|ACCESS_KEY)$",
    re.IGNORECASE,
)
"""Variables that contain a secret. TOKEN_DISPATCHER, PAD_TOKEN, CREDENTIALS (a file) and PASSWORD_FILE do not."""


@rule(
    "secret-in-script",
    "error",
    "a secret is written in the script",
    source="Slurm, scontrol write batch_script",
)
def secret_in_script(job: Job) -> Iterator[Hit]:
    """Slurm keeps the script and shows it (scontrol write batch_script). Copies end up in repositories and mail."""
    from_elsewhere = "read it from the environment, or from a file with mode 0600"
    for assignment in (*job.script.assignments, *(item for item in _environment(job) if not item.exported)):
        word = assignment.value
        if word is None or not word.known or len(word.text) < 8 or PLACEHOLDER.search(word.text):
            continue
        if _NAME_OF_SECRET.search(assignment.name) and not re.search(r"(^|[/.])[\w./-]*/", word.text):
            yield Hit.at(
                assignment.line,
                f"the script contains the value of {assignment.name}",
                from_elsewhere,
            )
    for number, line in enumerate(job.script.lines, start=1):
        if SECRET_VALUE.search(line) and not line.lstrip().startswith("#"):
            yield Hit.at(
                number,
                "this line contains an access token or a password",
                from_elsewhere,
            )


_WITHOUT_PROCESS = frozenset((
    "export", "local", "declare", "readonly", "echo", "printf", "test", "[", "unset", "printenv", "source", ".",
    "set", "read", "eval", "grep", "cat", "chmod", "ls", "rm", "cp",
))  # fmt: skip
"""Commands that start no process, or whose arguments are files."""


@rule("secret-argument", "error", "a secret is a command's argument", source="proc(5)")
def secret_argument(job: Job) -> Iterator[Hit]:
    """Every user of a node can see the arguments of a program with ps, and Slurm records the arguments of a step.

    Arguments of a function of the script are not reported, unless it passes all of them ("$@") to a program.
    """
    forwarding = {
        command.function
        for command in job.script.commands
        if command.name not in _WITHOUT_PROCESS
        and any(word.source in ALL_ARGUMENTS for word in command.words)
    }
    inner = job.script.functions.keys() - forwarding
    for command in job.script.commands:
        if command.name in _WITHOUT_PROCESS or (command.words and command.words[0].text in inner):
            continue
        for word in command.words[1:]:
            names = [name for name in word.variables if _NAME_OF_SECRET.search(name)]
            checks = re.search(r"\$\{\w+[-+?:]", word.source)
            if (
                names
                and not checks
                and word.line <= command.end
                and f"${names[0]}" in word.source.replace("{", "")
            ):
                yield Hit.at(
                    word.line,
                    f"{command.name} gets ${names[0]} as an argument, which ps shows to every user",
                    "pass it in the environment",
                )


@rule("trace-with-secrets", "error", "set -x writes secrets into the log", source="man bash, set")
def trace_with_secrets(job: Job) -> Iterator[Hit]:
    """set -x writes every command with expanded values, so tokens that the script uses appear in the log.

    In the text of `bash -c`, it applies to that shell only. Not reported: a variable whose only value is a placeholder.
    """
    switches = sorted(_trace_switches(job))
    touched = {(item.line, item.name) for item in job.script.assignments}
    touched |= {(item.line, item.name) for item in job.script.uses}
    for line, name in sorted(touched):
        before = [switch for switch in switches if switch[0] <= line <= switch[3]]
        if _NAME_OF_SECRET.search(name) and before and before[-1][1] and not _is_left_open(job, name):
            yield Hit.at(
                before[-1][0],
                f"set -x writes the value of {name} into the log",
                f"{_without_trace(before[-1][2])} (line {before[-1][0]}), or `set +x` before line {line}",
            )
            return


def _is_left_open(job: Job, name: str) -> bool:
    """True if a script sets a variable only to placeholders, such as API_KEY=YOUR_KEY."""
    values = [item.value for item in job.script.assignments_by_name.get(name, ())]
    return bool(values) and all(
        value and value.known and not value.assumed and PLACEHOLDER.search(value.text) for value in values
    )


def _without_trace(switch: str) -> str:
    """The advice for removing tracing from a line that enables it."""
    return f"remove `{switch}`" if switch in ("set -x", "set -o xtrace") else f"remove the x from `{switch}`"


def _trace_switches(job: Job) -> Iterator[tuple[int, bool, str, int]]:
    """Lines that turn tracing on or off, their text, and the last line of the shell that they apply to."""
    last = len(job.script.lines)
    if re.match(r"#!.*\s-\w*x", job.script.lines[0]):
        yield 1, True, job.script.lines[0].strip(), last
    for command in job.script.commands:
        end = last if command.outer is None else job.script.commands[command.outer].end
        texts = [word.text for word in command.words]
        for name, is_on in switched(texts[1:]) if command.name == "set" else ():
            if name == "xtrace":
                yield command.line, is_on, " ".join(texts), end


@rule("environment-in-log", "note", "the log shows all environment variables", source="man env")
def environment_in_log(job: Job) -> Iterator[Hit]:
    """env without a command prints every variable, including tokens of the submitting shell."""
    for command in job.script.commands:
        texts = [word.text for word in command.words]
        prints_all = texts in (["env"], ["printenv"], ["export", "-p"], ["declare", "-x"], ["declare", "-px"])
        prints_all = prints_all or (texts[:1] == ["srun"] and texts[-1:] == ["env"])
        prints_all = prints_all and command.status in ("plain", "ignored")
        echoed = command.name == "echo" and re.search(r"\$\((printenv|env)\)", " ".join(texts))
        if prints_all or echoed:
            yield Hit.at(
                command.line,
                "this prints every variable, including tokens of the submitting shell",
                "print only the variables you need: env | grep ^NCCL_",
            )
