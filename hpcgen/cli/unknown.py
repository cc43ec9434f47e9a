"""Unknown commands, stages and options: what to type in their place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from hpcgen.check.lint.sbatch import WITHOUT_VALUE
from hpcgen.cli import words
from hpcgen.config import spellings
from hpcgen.config.run import RunConfig
from hpcgen.config.spellings import names_in_section
from hpcgen.config.stages import stage_called
from hpcgen.config.unknown_keys import TRANSLATED_SECTIONS, other_name
from hpcgen.text import did_you_mean, misspelled, nearest, one_of

WORDS_OF_A_RUN = ("name", "cluster", "preset")
"""Keys outside of sections with a single word as their value."""


def unknown_command(context: click.Context, name: str) -> str:
    """Hint for the unknown command `name` in the group of `context`."""
    root, group = context.find_root().command, context.command
    assert isinstance(root, click.Group)
    assert isinstance(group, click.Group)
    known = group.list_commands(context)
    own = "" if group is root else str(context.info_name)
    if meaning := words.meaning(own, name) or words.file_meaning(name):
        return meaning
    stage = stage_called(name)
    if stage is not None and stage.name in known:
        return f"use {context.command_path} {stage.name}"
    # in a group, the name of a stage may have a different object: a download of what?
    if stage is not None and (group is root or not any(_groups_with(context, root, stage.name))):
        return words.meaning("", name)
    if found := list(_commands_called(context, root, name)):
        return f"use {one_of(found)}"
    if misspelled(name, known):
        return did_you_mean(name, known)
    others = [word for word in words.known_words(own) if len(word) >= spellings.SHORTEST]
    if re.fullmatch(rf"[\w-]{{{spellings.SHORTEST},}}", name) and (meant := nearest(name, others)):
        return f"if you mean {meant}, {words.meaning(own, meant)}"
    return did_you_mean(name, known) or f"commands are {', '.join(known)}"


def _commands_called(context: click.Context, root: click.Group, name: str) -> Iterator[str]:
    """The commands of hpcgen with this name. If no group is named, the commands of all groups are included."""
    if name in root.list_commands(context):
        yield f"hpcgen {name}"
    if context.command is root:
        yield from (f"hpcgen {group} {name}" for group in _groups_with(context, root, name))


def _groups_with(context: click.Context, root: click.Group, name: str) -> Iterator[str]:
    """The groups that have a command of this name."""
    for command in root.list_commands(context):
        group = root.get_command(context, command)
        if isinstance(group, click.Group) and name in group.list_commands(context):
            yield command


def unknown_stage(name: str, stages: Sequence[str]) -> str:
    """Hint for the unknown stage `name` of a command that accepts `stages`."""
    if Path(name).suffix in (".yaml", ".yml"):
        return f"to name the run file, use -c {name}"
    stage = stage_called(name)
    if stage is not None and stage.name in stages:
        return f"use {stage.name}"
    if stage is not None and not stage.by_submitit:
        return f"use {stage.start_command}"
    meaning = words.meaning("", name) if stage is None else ""
    if meaning.endswith(("STAGE", "STAGE...")):  # that is what was typed
        meaning = ""
    return did_you_mean(name, stages) or meaning or f"stages are {', '.join(stages)}"


def unknown_option(name: str, context: click.Context | None) -> str:
    """The error for the option `name`, which the command of `context` does not have."""
    if context is None:
        return f"no such option {name}"
    known = [option for parameter in context.command.params for option in parameter.opts if option[0] == "-"]
    meant = [each for each in words.OPTIONS.get(name, ()) if each.split()[0] in known]
    long = [option for option in known if option.startswith("--")]
    hint = f"use {meant[0]}" if meant else (did_you_mean(name, long) if len(name) > 2 else "")
    hint = (
        hint
        or _directive(name, context)
        or _key(name, known)
        or f"{context.command_path} --help lists the options"
    )
    return f"no such option {name}; {hint}"


def _directive(name: str, context: click.Context) -> str:
    """How to pass an option of sbatch that has no key, for the commands that write batch scripts."""
    option = words.SBATCH_OPTIONS.get(name, name).removeprefix("--")
    use = names_in_section("RunConfig", ("slurm", "train")).get(option.replace("-", "_"), "")
    if context.info_name not in ("submit", "render") or not use.endswith(f"extra_directives with --{option}"):
        return ""
    value = "" if option in WITHOUT_VALUE else "=VALUE"
    return f"use --set 'slurm.train.extra_directives=[--{option}{value}]'"


def _key(name: str, known: Sequence[str]) -> str:
    """The key of the run file with the option's name, for a command that reads or writes the run file."""
    if "--set" not in known:
        return ""
    key = words.SBATCH_OPTIONS.get(name, name).removeprefix("--").replace("-", "_")
    if instead := spellings.instead(key):
        return instead
    problem = None if "." in key else other_name(RunConfig, key, [key])
    if problem is None:
        return ""
    place = problem.meant.rpartition(".")[0]
    if place not in (*TRANSLATED_SECTIONS, "slurm.train", "paths") and problem.meant not in WORDS_OF_A_RUN:
        return ""
    if "--config" not in known:
        return f"in the run file, set {problem.hint.removeprefix('use ')}"
    return problem.hint.replace(problem.meant, f"--set {problem.meant}=VALUE")
