"""Rules about parts of the shipped script that a site's script has lost, changed or overwritten."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.comparison import LAUNCH, MAIN, Comparison, site_rule
from hpcgen.check.lint.rule import Hit
from hpcgen.check.lint.script import Assignment, Script
from hpcgen.text import few

MOST_NAMES = 4


@site_rule("directive-lost", "a planned `#SBATCH` line is gone or changed")
def directive_lost(both: Comparison) -> Iterator[Hit]:
    """The job would get different resources, or end differently, than planned."""
    fix = "keep {{ super() }} in block directives, and set values in the cluster profile or the run file"
    site = both.site
    for name, value in both.shipped.options.items():
        planned = f"--{name}={value}" if value else f"--{name}"
        if name not in site.options:
            yield Hit.at(0, f"#SBATCH {planned} is missing", fix)
        elif site.options[name] != value and name != "comment":  # which a site may replace
            why = f"--{name}={site.options[name]} overrides {planned}: sbatch uses the last one"
            yield Hit.at(site.option_line(name), why, fix)


@site_rule("directive-form", "a `#SBATCH` line with a backslash, `'` or ` #`")
def directive_form(both: Comparison) -> Iterator[Hit]:
    """sbatch reads a backslash as an escape even within quotes, and ` #` ends the line."""
    for number, line in both.new_lines.items():
        if line.startswith("#SBATCH") and (
            "\\" in line or "'" in line or " #" in re.sub(r'"[^"]*"', "", line)
        ):
            why = "sbatch does not read a backslash, a quote or a # like bash"
            yield Hit.at(number, why, "write --option=value, or --option={{ value | directive }}")


@site_rule("setting-lost", "a setting that hpcgen planned is gone or changed")
def setting_lost(both: Comparison) -> Iterator[Hit]:
    """All functions of the script read the settings. A changed setting contradicts the plan."""
    texts = {item.text for item in _top_level(both.site)}
    first = _first_function(both.shipped)
    settings = [item for item in _top_level(both.shipped) if not item.append and item.line < first]
    lost = [item.name for item in settings if item.text not in texts]
    if lost:
        yield Hit.at(
            0,
            f"not set as planned: {few(lost, MOST_NAMES)}",
            "keep {{ super() }} in block settings, and change values in the run file",
        )
    scalars = {item.name for item in settings if item.items is None}
    for item in both.own(both.site.assigned):
        if item.name in scalars and not item.is_local and both.runs_in_job(item):
            yield Hit.at(
                item.line,
                f"this changes the setting {item.name}",
                "set the value in the run file or the cluster profile, or use another name",
            )


@site_rule("option-lost", "an array of options loses its words")
def option_lost(both: Comparison) -> Iterator[Hit]:
    """Without these words, tasks run outside the container, on other CPUs, or without their environment."""
    arrays: dict[str, list[str]] = {}
    for item in _top_level(both.shipped):
        if item.items is not None:
            arrays.setdefault(item.name, []).extend(item.written)
    for item in both.own(both.site.assigned):
        planned = arrays.get(item.name)
        if planned is None or item.append or item.indexed or item.is_local or not both.runs_in_job(item):
            continue
        words = item.written or ()
        if f'"${{{item.name}[@]}}"' not in words:
            lost = [word for word in planned if word not in words]
            why = f"{item.name}=(...) replaces the array" + (
                f"; lost: {few(lost, MOST_NAMES)}" if lost else ""
            )
            yield Hit.at(item.line, why, f"append with {item.name}+=(...)")


@site_rule("variable-lost", "a planned environment variable is gone")
def variable_lost(both: Comparison) -> Iterator[Hit]:
    """The environment of a node type makes jobs fast and safe. Without it, the image's values apply."""
    exported = {item.name for item in both.site.assigned if item.exported}
    planned = list(dict.fromkeys(item.name for item in both.shipped.assigned if item.exported))
    lost = [name for name in planned if name not in exported]
    if lost:
        fix = "keep {{ super() }} in block environment, and set values in the cluster profile's `environment`"
        yield Hit.at(0, f"not exported: {few(lost, MOST_NAMES)}", fix)
    for call in both.own(both.site.commands):
        removes = call.written[0] == "unset" or (call.written[0] == "export" and "-n" in call.written)
        taken = [word for word in call.written[1:] if word in planned]
        if removes and taken and both.runs_in_job(call):
            yield Hit.at(
                call.line,
                f"this removes {few(taken, MOST_NAMES)} from the environment",
                "set the value in the cluster profile's `environment`",
            )


@site_rule("function-lost", "a function of the shipped script is missing")
def function_lost(both: Comparison) -> Iterator[Hit]:
    """The script calls the function: the job would end with `command not found`, or continue without it."""
    for name in both.shipped.functions:
        if name not in both.site.functions:
            yield Hit.at(
                0,
                f"function {name} is missing",
                f"keep {{{{ super() }}}} in the block that defines {name}, or define it",
            )


@site_rule("overwritten", "a site's function or variable that has no effect")
def overwritten(both: Comparison) -> Iterator[Hit]:
    """The libraries come after the site's code, and bash silently uses the last definition."""
    for function in both.site.definitions:
        last = both.site.functions[function.name]
        if last is not function and both.is_own_function(function):
            source = "the site" if both.is_own_function(last) else "a library"
            why = (
                f"{source} also defines {function.name}, on line {last.line}, and the last definition is used"
            )
            yield Hit.at(
                function.line,
                why,
                "rename the function, or replace launch, site_prologue, prepare_node or site_epilogue",
            )
    later = {
        item.name: item.line
        for item in _top_level(both.site)
        if not item.append and item.line not in both.own_lines
    }
    for item in both.own(_top_level(both.site)):
        if item.line < later.get(item.name, 0) and item.line in both.own_lines:
            why = f"a library sets {item.name} on line {later[item.name]}, so this has no effect"
            yield Hit.at(item.line, why, "change the variable in function site_prologue")


@site_rule("unknown-command", "a function that this script does not have")
def unknown_command(both: Comparison) -> Iterator[Hit]:
    """bash would fail with `command not found`. A script contains only the libraries that its stage needs."""
    for call in both.own(both.site.commands):
        name = call.written[0]
        if name in both.vocabulary and name not in both.site.functions:
            yield Hit.at(
                call.line,
                f"this stage has no function {name}",
                "remove the call, or put it into the template of a stage that has the function",
            )


@site_rule("step-lost", "`main` omits a step or changes the order")
def step_lost(both: Comparison) -> Iterator[Hit]:
    """Each step of main relies on earlier ones, and only the last one requeues the job or reports its failure."""
    planned, found = _steps(both.shipped, both.shipped), _steps(both.site, both.shipped)
    main = both.own_functions.get(MAIN)
    if main is None or not planned:
        return
    missing = [name for name in planned if name not in found]
    fix = "keep the steps of `hpcgen templates override STAGE --block main` in their order, with your own between them"
    if missing:
        yield Hit.at(main.line, f"main does not call {few(missing, MOST_NAMES)}", fix)
    elif name := _out_of_order(planned, found):
        yield Hit.at(main.line, f"main calls {name} too early or too late", fix)
    last = [call for call in both.site.calls_of(MAIN) if not call.in_branch and not call.in_subshell][-1:]
    if planned[-1] not in missing and (not last or last[0].written[0] != planned[-1]):
        yield Hit.at(last[0].line if last else main.line, f"main does not end with {planned[-1]}", fix)


def _steps(script: Script, shipped: Script) -> list[str]:
    """The shipped functions that main calls, in order, directly or through functions of the site."""

    def calls(function: str, above: tuple[str, ...]) -> Iterator[str]:
        for call in script.calls_of(function):
            for word in call.written:
                if word in shipped.functions:
                    yield word
                elif word in script.functions and word not in above:
                    yield from calls(word, (*above, word))

    return list(calls(MAIN, (MAIN,)))


def _out_of_order(planned: list[str], found: list[str]) -> str:
    """The first step that is out of order; "" if none is."""
    position = 0
    for name in planned:
        if name not in found[position:]:
            return name
        position = found.index(name, position) + 1
    return ""


@site_rule("launch-words", "`launch` omits planned words")
def launch_words(both: Comparison) -> Iterator[Hit]:
    """Without these words, the tasks lack options, the container or the environment, or run a different command."""
    launch = both.own_functions.get(LAUNCH)
    if launch is None:
        return
    planned = {item.name for item in both.shipped.reads if item.function == LAUNCH}
    used = {item.name for item in both.site.reads if both.is_in_launch(item)}
    lost = ['"$@"' if name == "@" else f'"${{{name}[@]}}"' for name in sorted(planned - used)]
    if lost:
        yield Hit.at(
            launch.line,
            f"launch does not use {', '.join(lost)}",
            'run_step srun "${step[@]}" "${container[@]}" env "${task_environment[@]}" "$@"',
        )


def _top_level(script: Script) -> Iterator[Assignment]:
    return (item for item in script.assignments if not item.function)


def _first_function(script: Script) -> int:
    """The line of the first function. Settings are above it, and variables of libraries below."""
    return min((function.line for function in script.definitions), default=0)
