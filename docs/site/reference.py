"""The generated pages of the reference, as Markdown: keys, commands and variables, from the code that defines them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from hpcgen.cli.main import cli
from hpcgen.config import spellings
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.fields import text_of
from hpcgen.config.keys import field_docs, inner_class
from hpcgen.config.loader import load_cluster_run
from hpcgen.config.node_type import NodeType
from hpcgen.config.run import RunConfig
from hpcgen.run_plan.explanation import explain
from trainer.contract.config import Range, field_hints

LONGEST_OPTION = 40
"""Characters of an option with its choices; a longer list of choices goes into the meaning."""

NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", Any: "anything"}


def run_file() -> str:
    """Every key of a run file."""
    return _sections(RunConfig)


def cluster_profile() -> str:
    """Every key of a cluster profile."""
    return _sections(ClusterConfig)


def node_type() -> str:
    """Every key of a node type."""
    return _sections(NodeType)


def _sections(cls: type) -> str:
    """A table for the keys of `cls`, and one for each class that its values have."""
    return "\n".join(_section(cls, "", {})) + "\n"


def _section(cls: type, path: str, seen: dict[type, str]) -> Iterator[str]:
    """The table of `cls` at the key `path`, and those below it; `seen` has the key at which a class was shown."""
    seen[cls] = path
    docs, hints = field_docs(cls), field_hints(cls)
    yield from (f"## `{path}`" if path else "## Top level", "")
    if path:
        yield from (escaped(" ".join((cls.__doc__ or "").split())), "")
    yield from ("| key | type | default | meaning |", "| --- | --- | --- | --- |")
    below: dict[type, str] = {}
    for field in dataclasses.fields(cls):
        key = f"{path}.{field.name}" if path else field.name
        inner = inner_class(hints[field.name])
        if inner is None:
            kind, default = escaped(type_name(hints[field.name])), _default(field)
        else:
            place = seen.get(inner) or below.setdefault(inner, key)
            kind = f"{_plural(hints[field.name])}[{place}](#{anchor(place)})"
            default = _section_default(field)
        yield f"| {code(field.name)} | {kind} | {default} | {escaped(docs[field.name])} |"
    yield ""
    for inner, place in below.items():
        if inner not in seen:
            yield from _section(inner, place, seen)


def _plural(hint: Any) -> str:
    """Prefix for the link to a section: one section, or one for each entry of a list or mapping."""
    origins = {typing.get_origin(part) for part in (hint, *typing.get_args(hint))}
    if tuple in origins:
        return "list of "
    return "mapping of names to " if dict in origins else "section "


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return code(json.dumps(field.default))
    if field.default_factory is not dataclasses.MISSING:
        return code(json.dumps(field.default_factory()))
    return "required"


def _section_default(field: dataclasses.Field[Any]) -> str:
    if field.default is None:
        return code("null")
    return "required" if field.default_factory is field.default is dataclasses.MISSING else ""


def type_name(hint: Any) -> str:
    """The type of a key in words: "integer, at least 1, or null"."""
    if hasattr(hint, "__metadata__"):
        return _constrained(typing.get_args(hint)[0], hint.__metadata__)
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(code(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        words = [type_name(argument) for argument in arguments if argument is not type(None)]
        return " or ".join(words) + (", or `null`" if type(None) in arguments else "")
    if origin is tuple:
        entries = [argument for argument in arguments if argument is not Ellipsis]
        if Ellipsis in arguments:
            return f"list of: {type_name(entries[0])}"
        return f"list of {len(entries)}: {type_name(entries[0])}"
    if origin is dict:
        return f"mapping of {type_name(arguments[0])} to {type_name(arguments[1])}"
    return NAMES[hint]


def _constrained(base: Any, constraints: tuple[Any, ...]) -> str:
    words = [type_name(base)]
    for constraint in constraints:
        if isinstance(constraint, Range):
            words += _range(constraint)
        elif text := text_of(constraint):
            words = [text.meaning]
    return ", ".join(words)


def _range(limits: Range) -> Iterator[str]:
    """Limits in words, without the technical upper bound of integers."""
    for words, limit in (
        ("at least", limits.at_least),
        ("greater than", limits.above),
        ("at most", limits.at_most),
        ("less than", limits.below),
    ):
        if limit is not None and limit < 2**53:
            yield f"{words} {limit:g}"


def commands() -> str:
    """Every command with its arguments and options."""
    context = click.Context(cli, info_name="hpcgen", **cli.context_settings)
    return "\n".join(_command(cli, context)) + "\n"


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    children = list(_children(command, context))
    if context.parent is not None:
        usage = " ".join([context.command_path, *_usage(command, context)])
        yield from (f"{'#' * (context.command_path.count(' ') + 1)} `{context.command_path}`", "")
        yield from ("```text", usage, "```", "", _help(command), "")
    if not children:
        yield from ("| option | meaning |", "| --- | --- |")
        yield from (
            f"| {code(option)} | {escaped(meaning)} |" for option, meaning in _options(command, context)
        )
        yield ""
    for child, below in children:
        yield from _command(child, below)


def _usage(command: click.Command, context: click.Context) -> Iterator[str]:
    """The pieces of the usage line; an argument with many choices goes by its name."""
    if any(isinstance(each, click.Option) for each in command.params):
        yield "[OPTIONS]"
    for each in command.params:
        if isinstance(each, click.Argument):
            yield (
                _name(each) + "..." * (each.nargs == -1) if _has_choices(each) else each.make_metavar(context)
            )
    if isinstance(command, click.Group):
        yield command.subcommand_metavar or ""


def _options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Each argument with choices, and each option, with its meaning."""
    for each in command.get_params(context):
        record = each.get_help_record(context)
        choices = f"One of {', '.join(each.type.choices)}." if isinstance(each.type, click.Choice) else ""
        if isinstance(each, click.Argument):
            if choices:
                yield _name(each), choices
        elif record:
            option, meaning = record
            if choices and len(option) > LONGEST_OPTION:
                option, meaning = ", ".join(each.opts) + " " + _name(each), f"{meaning} {choices}"
            yield option, meaning


def _name(parameter: click.Parameter) -> str:
    return str(parameter.human_readable_name).upper()


def _has_choices(parameter: click.Parameter) -> bool:
    return isinstance(parameter.type, click.Choice)


def _children(
    command: click.Command, context: click.Context
) -> Iterator[tuple[click.Command, click.Context]]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield child, click.Context(child, info_name=name, parent=context, **child.context_settings)


def _help(command: click.Command) -> str:
    """The help text; a paragraph that click leaves as it is (after a line with \\b) becomes a block."""
    paragraphs = inspect.cleandoc(command.help or "").replace("\f", "").split("\n\n")
    return "\n\n".join(
        f"```text\n{each[2:]}\n```" if each.startswith("\b\n") else escaped(" ".join(each.split()))
        for each in paragraphs
    )


def environment() -> str:
    """Every variable of a training job on NDv5 nodes, and what else jobs set."""
    run = load_cluster_run("azure-ndv5", "runs/azure-ndv5")
    explained = explain("train", run)
    lines = [
        "## Exported by a training job on NDv5",
        "",
        "The cluster profile is `azure-ndv5`.",
        "",
        "| variable | value | reason (layer; source) |",
        "| --- | --- | --- |",
        *(
            f"| {code(each.name)} | {code(each.value)} | {escaped(f'{each.why} ({each.layer}; {each.origin})')} |"
            for each in explained.variables
        ),
        "",
        "## Set when the job runs",
        "",
        "| variable | value |",
        "| --- | --- |",
        *(f"| {code(name)} | {escaped(how)} |" for name, how in explained.computed.items()),
    ]
    return "\n".join(lines) + "\n"


def other_names() -> str:
    """Names that other programs have for a key."""
    lines = ["| name | in a run file |", "| --- | --- |"]
    names = spellings.table("keys") | {
        f"{section}.{name}".lstrip("."): key
        for section, keys in spellings.sections("RunConfig").items()
        for name, key in keys.items()
    }
    for name, answer in sorted(names.items()):
        key = re.match(r"[\w.]+", answer)
        assert key is not None
        lines.append(f"| {code(name)} | {code(key[0])}{escaped(answer[key.end() :])} |")
    lines += [f"| {code(name)} | nothing: {reason} |" for name, reason in spellings.table("needless").items()]
    return "\n".join(lines) + "\n"


def code(text: object) -> str:
    """Inline code for a table."""
    return f"`{text}`".replace("|", "\\|")


def escaped(text: str) -> str:
    """Text with the characters of Markdown escaped, except in its inline code."""
    parts = re.split(r"(`[^`]*`)", text)
    plain = (re.sub(r"([\\*_<>\[\]])", r"\\\1", part) for part in parts[::2])
    return "".join(piece for pair in zip(plain, [*parts[1::2], ""], strict=True) for piece in pair).replace(
        "|", "\\|"
    )


def anchor(heading: str) -> str:
    """The anchor that Markdown gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


PAGES: dict[str, Callable[[], str]] = {
    "run-file": run_file,
    "cluster-profile": cluster_profile,
    "node-type": node_type,
    "commands": commands,
    "environment": environment,
    "spellings": other_names,
}
"""Page of docs/reference -> what follows its introduction."""
