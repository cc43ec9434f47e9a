"""Rules about variables that nothing sets and exports that do not reach the tasks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.comparison import Comparison, site_rule
from hpcgen.check.lint.rule import Hit
from hpcgen.check.lint.script import Place, Script, Use

_SHELL = re.compile(
    r"[@*#?$!_-]|\d+|BASH\w*|CDPATH|COLUMNS|DIRSTACK|EPOCH\w+|EUID|FUNCNAME|GROUPS|HISTCMD|HOME|HOSTNAME|HOSTTYPE|IFS|LINENO|LINES"
    r"|LOGNAME|MACHTYPE|OLDPWD|OPTARG|OPTERR|OPTIND|OSTYPE|PATH|PIPESTATUS|PPID|PS4|PWD|RANDOM|REPLY|SECONDS|SHELL|SHELLOPTS|SHLVL"
    r"|SRANDOM|UID|USER"
)
"""Variables that bash or the login sets."""
_SLURM = re.compile(r"SLURMD?_\w+")
_LOADERS = frozenset(("source", ".", "eval", "module", "ml", "conda", "mamba", "micromamba", "spack"))
"""Commands that may set environment variables (in upper case) that the script does not mention."""
_HOST_ONLY = re.compile(
    r"(?:SLURM|SLURMD|SBATCH|SRUN|SQUEUE|ENROOT|PYXIS|LMOD|MODULE)\w*|(?:LD_LIBRARY_|MAN|INFO)?PATH|BASH_ENV|LANG|LC_\w+"
)
"""Variables that a container must not take from the host, or does not need."""


@site_rule("unset-variable", "a variable is never set")
def unset_variable(both: Comparison) -> Iterator[Hit]:
    """The script runs under `set -u`: bash ends the job at an unset variable. Unset arrays expand to nothing."""
    known = _Known(both)
    reported = set()
    for use in both.own(both.site.reads):
        if use.guarded or known.has(use) or (use.name, use.line) in reported:
            continue
        reported.add((use.name, use.line))
        fix = f"set it in the code above, or write ${{{use.name}-}} if it may be unset"
        why = f"nothing sets {use.name}"
        if use.name == "SLURM_RESTART_COUNT":
            why, fix = (
                "Slurm sets SLURM_RESTART_COUNT only for a requeued job",
                "write ${SLURM_RESTART_COUNT:-0}",
            )
        elif use.name.startswith("SLURM_ARRAY_"):
            why = f"Slurm sets {use.name} only in job arrays, and this job is not one"
        elif both.shell_of(use) == "node":
            why = f"this function runs on each node, in a shell without the script's variable {use.name}"
            fix = "use an exported variable, set it in the function, or use $scratch or $node"
        yield Hit.at(use.line, why, fix)


class _Known:
    """The variables that are certainly set."""

    def __init__(self, both: Comparison) -> None:
        self._both, self._script = both, both.site
        script = both.site
        local = {(item.name, item.definition) for item in script.assigned if item.is_local}
        values = (item for item in script.assigned if item.is_local or not item.is_declared)
        places: list[tuple[str, Place]] = [(item.name, item) for item in values]
        places += _named_by_calls(script)
        self._global = {name for name, place in places if (name, place.definition) not in local}
        self._local: dict[str, set[str]] = {name: set() for name in script.functions}
        for name, place in places:
            if place.function:
                self._local[place.function].add(name)
        on_nodes = (name for function in both.remote for name in self._local.get(function, ()))
        self._on_nodes = {item.name for item in script.assigned if item.exported}.union(on_nodes)
        self._loads = any(call.written[0] in _LOADERS for call in both.own(script.commands))
        self._is_array = "array" in both.shipped.options
        self._secrets = {
            word for item in script.assigned if item.name == "secrets" for word in item.written or ()
        }

    def has(self, use: Use) -> bool:
        """True if a variable is certainly set at an expansion."""
        name = use.name
        if not name or _SHELL.fullmatch(name) or name in self._secrets:
            return True
        if _SLURM.fullmatch(name) and name != "SLURM_RESTART_COUNT":
            return self._is_array or not name.startswith("SLURM_ARRAY_")
        if self._loads and name.isupper() and not name.startswith("SLURM_"):
            return True
        if self._is_handled(use):
            return True
        function = use.function
        if self._both.shell_of(use) == "node":
            return name in self._on_nodes
        return name in self._global or any(name in self._local[caller] for caller in self._callers(function))

    def _is_handled(self, use: Use) -> bool:
        """True if the same function tests the variable, or disables `set -u` above."""
        definition = use.definition
        if any(
            other.guarded and other.name == use.name and other.definition == definition
            for other in self._script.reads
        ):
            return True
        switches = [
            call.written[1]
            for call in self._script.commands
            if call.definition == definition
            and call.offset < use.offset
            and call.written[0] == "set"
            and len(call.written) > 1
            and re.fullmatch(r"[-+]\w*u\w*", call.written[1])
        ]
        return bool(switches) and switches[-1].startswith("+")

    def _callers(self, function: str) -> set[str]:
        """A function and its callers, whose local variables are visible in it."""
        found, new = {function} - {""}, [function]
        while new:
            for call in self._script.called_in.get(new.pop(), ()):
                caller = call.function
                if caller and caller not in found:
                    found.add(caller)
                    new.append(caller)
        return found


def _named_by_calls(script: Script) -> Iterator[tuple[str, Place]]:
    """Variables that a function sets by name, from its first argument: `printf -v "$1"`."""
    setters = {call.function for call in script.commands if call.written[:3] == ("printf", "-v", '"$1"')}
    for call in script.commands:
        if call.written[0] in setters and len(call.written) > 1:
            yield call.written[1], call


@site_rule("container-env", "an exported variable whose value the image may replace", severity="warning")
def container_env(both: Comparison) -> Iterator[Hit]:
    """In a container, the image's value of a variable wins unless the container's options list the variable."""
    words = [
        word
        for item in both.site.assigned
        if item.name in ("container", "step")
        for word in item.written or ()
    ]
    named = {
        name
        for word in words
        if word.startswith(("--container-env=", "--env="))
        for name in word.partition("=")[2].split(",")
    }
    if not named:
        return
    passed = {
        word.partition("=")[0].lstrip('"')
        for item in both.site.assigned
        if item.name == "task_environment"
        for word in item.written or ()
    }
    for item in both.own(both.site.assigned):
        is_lost = item.exported and not item.is_local and item.name not in named | passed
        if is_lost and not _HOST_ONLY.fullmatch(item.name) and both.runs_in_job(item):
            why = f"{item.name} is exported, but not listed in the container options"
            fix = (
                "set it in the cluster profile's `environment`, or pass it to the tasks in site_prologue: "
                f'task_environment+=("{item.name}=${item.name}")'
            )
            yield Hit.at(item.line, why, fix)


@site_rule("export-local", "an export ends with its function")
def export_local(both: Comparison) -> Iterator[Hit]:
    """In a function, `declare -x` and `local -x` create a local variable: later commands do not get it."""
    for item in both.own(both.site.assigned):
        if item.exported and item.is_local and both.runs_in_job(item):
            yield Hit.at(
                item.line,
                f"{item.name} is exported only until the function ends",
                f"write export {item.name}=..., or declare -gx",
            )
