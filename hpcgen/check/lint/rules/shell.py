"""Shell mistakes. shellcheck finds many more of this kind."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.script import Command, Count, Script


@rule("syntax", "error", "bash rejects the script", source="man bash")
def syntax(job: Job) -> Iterator[Hit]:
    """bash stops at this line, in the middle of the job. Until it is corrected, no rule can check the commands.

    A script with a placeholder such as <name> is read as if it contained the value. The text of a `bash -c` is parsed
    once more by that bash, so it needs its own quotes around (, |, ; and blanks.
    """
    error = job.script.error
    if error and error.is_placeholder:
        yield Hit.at(error.line, error.reason, "write the value")
    elif error and not error.is_ours:
        yield Hit.at(
            error.line,
            f"bash stops here: {error.reason}",
            "correct this line, or an earlier quote or block that is not closed",
        )
    for error in job.script.text_errors:
        yield Hit.at(
            error.line,
            f"the text of bash -c is not valid: {error.reason}",
            r"quote the value within the text, for example \"([0]*3+[1]*58)\"",
        )


@rule("unreadable", "note", "hpcgen cannot read the script")
def unreadable(job: Job) -> Iterator[Hit]:
    """bash accepts the script, but hpcgen's parser does not: only the directives were checked."""
    if job.script.error and job.script.error.is_ours:
        yield Hit.at(
            job.script.error.line,
            f"hpcgen cannot read this: {job.script.error.reason}",
            "write it in a simpler way",
        )


@rule("not-a-shell-script", "note", "only the directives were read")
def not_a_shell_script(job: Job) -> Iterator[Hit]:
    """sbatch accepts scripts for any interpreter. hpcgen reads only shell commands."""
    if not job.script.is_shell:
        yield Hit.at(
            1,
            f"{job.script.interpreter} runs this script, not a shell: only its directives were read",
            "no action needed, or start the program from a shell script",
        )


@rule("array-in-sh", "note", "sh may have no arrays", source="POSIX, Shell Command Language; dash(1)")
def array_in_sh(job: Job) -> Iterator[Hit]:
    """#!/bin/sh is dash on Debian and Ubuntu, which refuses arrays and ends the job. On RHEL and SLES it is bash."""
    arrays = [item.line for item in job.script.assignments if item.items is not None and item.outer is None]
    if job.script.interpreter in ("sh", "dash", "ash") and arrays:
        yield Hit.at(
            arrays[0], f"{job.script.interpreter} may have no arrays", "#!/bin/bash in the first line"
        )


@rule("export-words", "error", "export of an unquoted value with blanks", source="man bash, export")
def export_words(job: Job) -> Iterator[Hit]:
    """export OPTS=--a --b sets OPTS to --a and fails on --b. export K=a b also exports b."""
    set_here = {item.name for item in job.script.assignments} | {use.name for use in job.script.uses}
    for command in job.script.commands:
        if command.name != "export" or not any("=" in word.text for word in command.words):
            continue
        for before, word in zip(command.words[1:], command.words[2:], strict=False):
            is_name = re.fullmatch(r"[A-Za-z_]\w*", word.text)
            if "=" not in before.text or "=" in word.text or word.text.startswith("$"):
                continue
            if not is_name or (word.text not in set_here and not word.text.isupper()):
                name = before.text.partition("=")[0]
                yield Hit.at(word.line, f"the value of {name} ends at the blank", "quote the value")


@rule(
    "similar-name", "warning", "a variable is never set, but a similar name is", source="man bash, PARAMETERS"
)
def similar_name(job: Job) -> Iterator[Hit]:
    """$exit_code is empty if exitcode was set: a missing underscore can hide a failure."""
    set_here = job.script.names_set
    alike = {name.replace("_", ""): name for name in set_here if name}
    reported = set()
    for use in job.script.uses:
        other = alike.get(use.name.replace("_", ""))
        if (
            other
            and not use.guarded
            and use.name not in set_here
            and use.name not in reported
            and len(use.name) > 3
        ):
            reported.add(use.name)
            yield Hit.at(use.line, f"nothing sets {use.name}; {other} is set", f"${other}")


@rule(
    "setting-overwritten",
    "warning",
    "a setting from the environment is overwritten",
    source="man bash, Parameter Expansion",
)
def setting_overwritten(job: Job) -> Iterator[Hit]:
    """IMAGE=${IMAGE:-default} allows a choice at submission. A later IMAGE=... overrides it.

    A comment such as `IMAGE=a.sqsh sbatch job.sh` promises the same choice.
    """
    choices = _documented(job.script)
    for assignment in job.script.assignments:
        word = assignment.value
        if word is None or assignment.append or assignment.outer is not None:
            continue
        if re.match(rf'"?\$\{{{assignment.name}(:?[-=?])', word.source):
            choices.setdefault(assignment.name, assignment.line)
        elif (
            assignment.name in choices
            and not assignment.conditional
            and assignment.name not in word.variables
        ):
            yield Hit.at(
                assignment.line,
                f"line {choices[assignment.name]} takes {assignment.name} from the environment, and this overwrites it",
                f"{assignment.name}=${{{assignment.name}:-...}}, or another name",
            )


def _documented(script: Script) -> dict[str, int]:
    """Variables that comments set before sbatch -> the first line of such a comment."""
    found: dict[str, int] = {}
    for number, line in enumerate(script.lines, start=1):
        if command := re.match(r"\s*#(?!SBATCH)[^#]*?((?:\b[A-Za-z_]\w*=\S+\s+)+)sbatch\b", line):
            for name in re.findall(r"(\w+)=", command[1]):
                found.setdefault(name, number)
    return found


@rule("terminal", "note", "the command needs a terminal", source="clear(1), tput(1), stty(1)")
def terminal(job: Job) -> Iterator[Hit]:
    """A job has no terminal. `clear` and `tput` fail without TERM, and `stty` always fails. With set -e, the failure
    ends the script."""
    for command in job.script.commands:
        is_terminal = command.name in ("clear", "reset", "stty", "tput") and command.status == "plain"
        if is_terminal and "errexit" in job.script.shell_options and job.script.is_batch:
            yield Hit.at(
                command.line,
                f"a job has no terminal: `{command.name}` can fail, which ends the script (set -e)",
                "remove it",
            )


@rule(
    "count-stops",
    "error",
    "counting from 0 ends the script",
    source="man bash, ((expression)), let and set -e",
)
def count_stops(job: Job) -> Iterator[Hit]:
    """((failed++)) has the value of failed before it counts. The value 0 is status 1, and set -e ends the script there.

    The assignment failed=$((failed + 1)) has status 0. Reported are variables that the script sets only to 0.
    """
    script = job.script
    is_enabled = script.enabled("errexit")
    for count in script.counts:
        calls = script.called_in.get(count.function, []) if count.function else [count]
        is_unchecked = all(call.status == "plain" and is_enabled(call.line) for call in (count, *calls))
        is_read = calls and count.outer is None and not count.in_background
        if is_read and is_unchecked and _begins_at_0(script, count):
            step = {"++": " + 1", "--": " - 1"}.get(count.operator)
            yield Hit.at(
                count.line,
                f"`{count.text}` has the value 0 if {count.name} is 0. This is status 1, so set -e ends the script",
                f"{count.name}=$(({count.name}{step}))" if step else f"{count.name}=0",
                cause=count.name,
            )


def _begins_at_0(script: Script, count: Count) -> bool:
    """True if a variable certainly is 0 when the script first counts it: the script sets it only to 0, and every count
    of it is alike."""
    if count.operator == "=":
        return True
    counts = [other for other in script.counts if other.name == count.name]
    values = [item.value for item in script.assignments_by_name.get(count.name, ())]
    num_set = sum(item.name == count.name for item in script.assigned)
    is_always_0 = bool(values) and all(value and value.known and value.text == "0" for value in values)
    are_alike = {(other.operator, other.status) for other in counts} == {(count.operator, "plain")}
    return is_always_0 and are_alike and num_set == len(values) + len(counts)


@rule("default-model", "warning", "an unknown size trains another model", source="man bash, case")
def default_model(job: Job) -> Iterator[Hit]:
    """If the *) branch of a case sets a model's sizes, a misspelled name trains the wrong model."""
    for branches in job.script.cases:
        sizes = {
            "NUM_LAYERS",
            "HIDDEN_SIZE",
            "NUM_HEADS",
            "NUM_ATTENTION_HEADS",
            "NLAYERS",
            "NHIDDEN",
            "N_LAYERS",
            "N_EMBD",
        }
        if len(branches) < 2 or branches[-1].patterns != ("*",) or branches[-1].leaves:
            continue
        if {name.upper() for name in branches[-1].assigned} & sizes and branches[0].assigned & branches[
            -1
        ].assigned:
            yield Hit.at(
                branches[-1].line,
                "any unknown name trains this model",
                '*) echo "unknown size" >&2; exit 1 ;;',
            )


@rule(
    "subprocess-unchecked",
    "warning",
    "a failed command is not noticed",
    source="Python, subprocess.run, check and shell",
)
def subprocess_unchecked(job: Job) -> Iterator[Hit]:
    """subprocess.run(..., shell=True) without check=True continues after a failure, and splits paths at blanks."""
    for command in job.script.commands:
        for number, line in enumerate(command.here_document.split("\n"), start=command.here_line):
            if re.search(r"subprocess\.(run|call)\(.*shell=True", line) and "check=True" not in line:
                yield Hit.at(
                    number, "a failure of this command is not noticed", "subprocess.run([...], check=True)"
                )


@rule(
    "marker-after-failure", "warning", "a success marker is written after a failure", source="man bash, Lists"
)
def marker_after_failure(job: Job) -> Iterator[Hit]:
    """A marker that is written even after a failure makes the next run skip work that was never done."""
    if "errexit" in job.script.shell_options:
        return
    before: Command | None = None
    for command in job.script.commands:
        marker = (
            re.search(
                r"(^|[/._-])(done|success|complete[d]?|finished)\b", command.words[-1].text, re.IGNORECASE
            )
            if command.words
            else None
        )
        is_touch = (
            command.name == "touch" and marker and command.status == "plain" and not command.conditional
        )
        follows = (
            before is not None
            and before.status in ("plain", "ignored", "piped")
            and before.function == command.function
        )
        if (
            is_touch
            and follows
            and before is not None
            and before.name not in ("echo", "mkdir", "exit", "touch", "set", "wait")
        ):
            yield Hit.at(
                command.line,
                f"this is written even if {before.name} on line {before.line} failed",
                f"{before.name} ... && touch ...",
            )
        before = command
