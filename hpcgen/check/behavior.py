"""Rules about effects of a site's code on traps, the status of the job, and its log."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator

from hpcgen.check.comparison import LAUNCH, MAIN, Comparison, site_rule
from hpcgen.check.lint.rule import Hit
from hpcgen.check.lint.script import Command
from hpcgen.redaction import SECRET, SECRET_VALUE

RUN_STEP = "run_step"
_SIGNALS = {"0": "EXIT", "12": "USR2", "15": "TERM"}
_ENDS = frozenset(("exit", "die"))


@site_rule("launch-foreground", "`launch` does not use `run_step`")
def launch_foreground(both: Comparison) -> Iterator[Hit]:
    """bash runs a trap only after the foreground command ends: the checkpoint would be too late."""
    launch = both.own_functions.get(LAUNCH)
    if launch is None:
        return
    calls = [call for call in both.site.commands if both.is_in_launch(call)]
    fix = 'run_step srun "${step[@]}" "${container[@]}" env "${task_environment[@]}" "$@"'
    direct = [call for call in calls if _is_srun(call, limited=False) and not _is_run_by_step(both, call)]
    for call in direct:
        yield Hit.at(call.line, "srun runs without run_step, so no trap runs until it ends", fix)
    if not direct and not any(RUN_STEP in call.written and not call.in_subshell for call in calls):
        why = "launch does not call run_step in the script's shell (a pipeline runs in a subshell)"
        yield Hit.at(launch.line, why, fix)


def _is_srun(call: Command, *, limited: bool) -> bool:
    """True if a command is srun, possibly behind env, exec and similar. With `limited`, not behind timeout."""
    for word in call.written:
        if word.rpartition("/")[2] == "srun":
            return not (limited and call.written[0] == "timeout")
        is_prefix = word in ("exec", "command", "env", "time", "nice", "timeout", "builtin")
        if not is_prefix and not re.match(r"-|\w+=|\d", word):
            return False
    return False


def _is_run_by_step(both: Comparison, call: Command) -> bool:
    """True if run_step runs the function that contains a command, and so puts it in the background."""
    name = call.function
    return any(
        RUN_STEP in caller.written[:1] and name in caller.written
        for caller in both.site.called_in.get(name, ())
    )


@site_rule("step-foreground", "a foreground step without a timeout")
def step_foreground(both: Comparison) -> Iterator[Hit]:
    """No trap runs until the step ends. A node that hangs would block the job until its time limit."""
    for call in both.own(both.site.commands):
        in_epilogue = both.shell_of(call) == "apart" and not call.in_subshell  # the epilogue has a timeout
        if (
            not _is_srun(call, limited=True)
            or both.is_in_launch(call)
            or in_epilogue
            or _is_run_by_step(both, call)
        ):
            continue
        if call.in_background:
            continue
        yield Hit.at(
            call.line,
            "srun runs in the foreground without a timeout",
            "use each_node SECONDS COMMAND, or run_step timeout SECONDS srun ...",
        )


@site_rule("trap-kept", "a trap of the script is replaced")
def trap_kept(both: Comparison) -> Iterator[Hit]:
    """The traps for TERM and USR2 save a checkpoint and requeue the job. EXIT requeues it if the prologue fails, and
    runs the epilogue."""
    of_job = {"TERM", "USR2", *(("EXIT",) if "run_epilogue" in both.site.functions else ())}
    for call in both.own(both.site.commands):
        if call.written[0] != "trap" or len(call.written) < 3 or call.written[1] in ("-p", "-l"):
            continue
        signals = {_SIGNALS.get(word, word.upper().removeprefix("SIG")) for word in call.written[2:]}
        shell = both.shell_of(call)
        lost = sorted(signals & ({"EXIT"} if shell == "prologue" else of_job if shell == "job" else set()))
        if lost:
            yield Hit.at(
                call.line,
                f"this replaces the script's trap for {', '.join(lost)}",
                "set the trap in a subshell, or use site_epilogue",
            )


@site_rule("no-errexit", "`set -e` in the job's shell")
def no_errexit(both: Comparison) -> Iterator[Hit]:
    """The script checks exit statuses itself. Under `set -e`, the first failure ends the job without `conclude`."""
    for call in both.own(both.site.commands):
        options = call.written[1:] if call.written[0] == "set" else ()
        turns_on = any(re.fullmatch(r"-\w*e\w*", word) for word in options) or _has_option(options, "errexit")
        if turns_on and both.shell_of(call) == "job":
            yield Hit.at(
                call.line,
                f"`{' '.join(call.written)}` ends the job at the first failure",
                "remove it, and write `|| die MESSAGE` after a command that must not fail",
            )


@site_rule("no-exit", "the job always exits here")
def no_exit(both: Comparison) -> Iterator[Hit]:
    """Later steps, such as `launch`, `conclude` or the requeue, never run."""
    hooks = {"", *both.shipped.functions}
    for call in both.own(both.site.commands):
        name = call.function
        ends = call.written[0] in _ENDS or (call.written[0] == "return" and name == MAIN)
        if (
            ends
            and name in hooks
            and not call.in_branch
            and both.shell_of(call) in ("job", "prologue", "node")
        ):
            yield Hit.at(call.line, f"`{call.written[0]}` always runs", "make it conditional")


@site_rule("status-kept", "the status of the job's work is replaced")
def status_kept(both: Comparison) -> Iterator[Hit]:
    """`conclude` reads rc. With a wrong rc, failed training could count as a success, or finished training be
    requeued."""
    calls = both.site.calls_of(MAIN)
    launches = [call for call in calls if LAUNCH in call.written]
    for item in both.own(both.site.assigned):
        after_launch = any(call.line == item.line for call in launches) and item.text == "rc=$?"
        restores = re.fullmatch(r'rc="?\$\{?[A-Za-z_]\w*\}?"?', item.text)
        if (
            item.name == "rc"
            and not item.is_local  # which would be another variable
            and not after_launch
            and not restores
            and both.shell_of(item) == "job"
        ):
            yield Hit.at(item.line, "this replaces rc, the status of the launch", "use another name")
    setters = {RUN_STEP, *(name for name in both.site.functions if _sets_status(both, name))}
    restored = [
        item.offset
        for item in both.site.assigned
        if item.name == "rc" and item.function == MAIN and item.text != "rc=$?"
    ]
    for call in both.own(calls):
        is_after = bool(launches) and call.offset > launches[0].offset and LAUNCH not in call.written
        if is_after and call.written[0] in setters and not any(offset > call.offset for offset in restored):
            yield Hit.at(
                call.line,
                f"{call.written[0]} replaces rc, the status of the launch",
                "save and restore it: status=$rc before, rc=$status after",
            )


def _sets_status(both: Comparison, name: str) -> bool:
    """True if a function runs a step that sets rc."""
    steps = any(
        call.written[0] in (RUN_STEP, "each_node")
        for call in both.site.calls_of(name)
        if not call.in_subshell
    )
    definition = both.site.functions[name].offset
    return steps and not any(
        item.name == "rc" and item.definition == definition for item in both.site.assigned
    )


@site_rule("container-option-twice", "a pyxis option is given twice")
def container_option_twice(both: Comparison) -> Iterator[Hit]:
    """pyxis silently uses the last one: a second --container-mounts hides the corpus and the checkpoints."""
    planned = {
        word.partition("=")[0]
        for item in both.shipped.assigned
        if item.name in ("container", "step")
        for word in item.written or ()
        if re.match(r"--(no-)?container-", word)
    }
    for item in both.own(both.site.assigned):
        for word in item.written or () if item.name in ("container", "step") and item.append else ():
            if word.partition("=")[0] in planned:
                yield Hit.at(item.line, _twice(word), "set it in the cluster profile's `container`")
    for call in both.own(both.site.commands):
        for word in call.written if "srun" in call.written and '"${container[@]}"' in call.written else ():
            if word.partition("=")[0] in planned:
                yield Hit.at(call.line, _twice(word), "set it in the cluster profile's `container`")


def _twice(word: str) -> str:
    return f"a second {word.partition('=')[0]} overrides the planned one"


# ---- what the log and the script show ----


@site_rule("no-trace", "`set -x` or similar")
def no_trace(both: Comparison) -> Iterator[Hit]:
    """Tracing prints every command with its values, including secrets, to a log that others may read."""
    for command in both.with_values.commands:
        words = tuple(word.text for word in command.words)
        is_shell = re.fullmatch(r"bash|sh", command.name)
        options = words[1:] if command.name == "set" or is_shell else ()
        traces = any(re.fullmatch(r"-\w*x\w*", word) for word in options) or _has_option(options, "xtrace")
        if traces and command.line in both.own_lines:
            yield Hit.at(
                command.line,
                f"`{' '.join(words[:4])}` prints every command with its values",
                "remove it, and use `say` for log messages",
            )


@site_rule("no-environment-dump", "all environment variables are printed")
def no_environment_dump(both: Comparison) -> Iterator[Hit]:
    """The variables include tokens of the submitting shell, and others may read the log."""
    filtered = {
        id(line[0])
        for line in both.with_values.pipelines
        if len(line) > 1 and line[1].name in ("grep", "awk", "sed")
    }
    for command in both.with_values.commands:
        words = tuple(word.text for word in command.words)
        prints = words in (("env",), ("printenv",), ("set",), ("export",), ("declare",)) or (
            len(words) == 2
            and words[0] in ("export", "declare", "typeset")
            and re.fullmatch(r"-[px]+", words[1])
        )
        if prints and command.line in both.own_lines and id(command) not in filtered:
            yield Hit.at(
                command.line,
                f"`{' '.join(words)}` prints every variable",
                "print only the variables you need: printenv NAME",
            )


@site_rule("no-secret", "a secret in the script")
def no_secret(both: Comparison) -> Iterator[Hit]:
    """Slurm keeps the script and shows it to others: scontrol write batch_script."""
    fix = "list it in the run file's `secrets`, or read it from a file with mode 0600"
    found: dict[int, str] = {}
    for item in both.own(item for item in both.with_values.assigned if item.outer is None):
        is_literal = item.value and item.value.text and item.value.known and not item.value.variables
        if is_literal and SECRET.search(item.name):
            found[item.line] = item.name
        for word in item.written or ():
            name, equals, value = word.strip('"').partition("=")
            if equals and value and "$" not in value and SECRET.search(name):
                found[item.line] = name
    for line, name in found.items():
        yield Hit.at(line, f"the script contains the value of {name}", fix)
    for line in sorted(both.own_lines - found.keys()):
        if SECRET_VALUE.search(both.new_lines.get(line, "")):
            yield Hit.at(line, "this line contains an access token or a password", fix)


@site_rule("unprintable", "an invisible character")
def unprintable(both: Comparison) -> Iterator[Hit]:
    """Control characters and characters that reverse the text direction make a script look different."""
    for number, line in both.new_lines.items():
        for character in line:
            if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp") and character != "\t":
                yield Hit.at(number, f"this line contains the character {character!a}", "remove it")
                break


def _has_option(options: tuple[str, ...], name: str) -> bool:
    """True if `-o NAME` is among the options of set."""
    return any(
        re.fullmatch(r"-\w*o", word) and following == name for word, following in itertools.pairwise(options)
    )
