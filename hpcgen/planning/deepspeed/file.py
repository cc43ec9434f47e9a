"""DeepSpeed's configuration as a file.

Variables with known values are replaced. Those that only the job knows become shell expansions.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpcgen.config import program as programs
from hpcgen.config.program import DEEPSPEED_CONFIG, OF_A_RANK, VARIABLES
from hpcgen.errors import Problem
from hpcgen.planning.config_text import config_text

FILE = "ds_config.json"
CONFIG = "program.deepspeed.config"
KNOWN = tuple(name for name in VARIABLES if name not in (DEEPSPEED_CONFIG, *OF_A_RANK))
"""Variables that strings of the configuration can contain. All ranks of a node share one configuration."""

# Unprintable characters are refused in run files, so these cannot occur in a value. JSON escapes both.
_BEGIN, _END = "\ue000", "\ue001"
# In JSON: a backslash, a variable of the job, or a character that the shell would interpret in a here-document.
_SPECIAL = re.compile(r"\\\\|\\ue000(\w+)\\ue001|[$`\\]")


def config_with(config: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    """The configuration with the variables in `values` replaced. Variables of the job are marked."""

    def replaced(text: str) -> str:
        return "".join(
            values.get(part, f"{_BEGIN}{part}{_END}") if is_name else part
            for part, is_name in programs.parts(text)
        )

    return {key: _mapped(value, replaced) for key, value in config.items()}


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of plain data with `change` applied to each string."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list | tuple) else value


def config_files(config: Mapping[str, Any]) -> dict[str, str]:
    """The configuration as a file of the job. Empty if tasks write it, because it contains variables of the job."""
    text = config_text(config)
    return {} if _differs_between_nodes(text) else {FILE: text}


def _differs_between_nodes(text: str) -> bool:
    return any(found[1] for found in _SPECIAL.finditer(text))


def task_lines(config: Mapping[str, Any], in_the_job: Mapping[str, str], run_dir: str) -> tuple[str, ...]:
    """Shell code of a task that sets the variable DEEPSPEED_CONFIG to the path of the configuration.

    A configuration with variables of the job is written to the node's own disk, because it differs between nodes.
    """
    text = config_text(config)
    if not _differs_between_nodes(text):
        path = f"{shlex.quote(f'{run_dir}/jobs/')}$SLURM_JOB_ID/{FILE}"
        return (f"{DEEPSPEED_CONFIG}={path}",)

    def in_shell(found: re.Match[str]) -> str:
        return (
            in_the_job.get(found[1], "") if found[1] else "".join(f"\\{character}" for character in found[0])
        )

    text = _SPECIAL.sub(in_shell, text)
    return (
        "# DeepSpeed's configuration with this node's values",
        f'{DEEPSPEED_CONFIG}="$TMPDIR/ds_config-$SLURM_JOB_ID-$SLURM_PROCID.json"',
        f'cat >"${DEEPSPEED_CONFIG}" <<END_OF_CONFIG || exit',
        f"{text}END_OF_CONFIG",
    )


def variable_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields unknown variables, single braces and unprintable characters in strings of the configuration."""
    for path, text in _strings(config, CONFIG):
        if not text.isprintable():
            yield Problem(path, "contains an unprintable character", "remove it")
        for problem in programs.variable_problems(path, text, KNOWN):
            name = next((name for name in OF_A_RANK if f"{{{name}}}" in text), None)
            if name is None:
                yield problem
            else:
                reason = f"has {{{name}}}, but all ranks need the same configuration"
                yield Problem(path, reason, "use {SCRATCH}; DeepSpeed adds the rank to its own files")


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _strings(item, f"{path}[{index}]")
