"""hpcgen cluster: list, show and check cluster profiles."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcgen.cli.found import list_found
from hpcgen.cli.lazy import CommandGroup
from hpcgen.cli.options import complete_clusters, json_option, warn
from hpcgen.config.node_types import find_node_type
from hpcgen.config.profiles import cluster_names, find_cluster, load_cluster, read_profile, unknown_cluster
from hpcgen.errors import ConfigErrors, HpcgenError

if TYPE_CHECKING:
    from hpcgen.config.profiles import Profile

_name_argument = click.argument("name", shell_complete=complete_clusters)


command = CommandGroup("cluster")


@command.command("list")
@json_option
def list_clusters(as_json: bool) -> None:
    """List the available profiles and their files."""
    list_found(
        cluster_names(),
        find_cluster,
        lambda name: {"description": load_cluster(name)[0].description},
        "hpcgen cluster check",
        as_json,
    )


@command.command("show")
@_name_argument
@json_option
def show(name: str, as_json: bool) -> None:
    """Show every value of profile NAME and where it is set.

    Includes the profiles that it extends. Values that are not set and have no default are omitted; with --json
    they are null.
    """
    file, profile = _read(name)
    config, node_type = profile.config, profile.node_type
    values = dict(_leaves(dataclasses.asdict(config)))
    places = {path: profile.document.origin(path) or "default" for path in values}
    node_file = str(find_node_type(config.node_type, sites=profile.sites))
    if as_json:
        leaves = {path: {"value": value, "origin": places[path]} for path, value in values.items()}
        described = {"name": config.node_type, "file": node_file, "description": node_type.description}
        click.echo(
            json.dumps({"name": name, "file": str(file), "values": leaves, "node_type": described}, indent=1)
        )
        return
    click.echo(click.style(name, bold=True) + f": {config.description}")
    rows = {path: _shown(value) for path, value in values.items() if value not in (None, (), {}, "")}
    for section, named in (("partitions", config.partitions), ("qos", config.qos)):
        for name, limits in named.items():
            if not any(dataclasses.astuple(limits)):
                path = f"{section}.{name}"
                rows[path], places[path] = "no limits", profile.document.origin(path) or "default"
    width = max(map(len, rows))
    for path, text in rows.items():
        click.echo(f"{path:<{width}}  {text}" + click.style(f"  [{places[path]}]", dim=True))
    click.echo(f"\n{click.style('node type', bold=True)} {config.node_type}: {node_type.description}")
    click.echo(click.style(node_file, dim=True))


@command.command("check")
@_name_argument
def check(name: str) -> None:
    """Check profile NAME and its node type.

    Reports all mistakes in keys and values, or else all broken rules, and exits with status 2 if there are any. Prints
    the same warnings as hpcgen render does for this profile.
    """
    from hpcgen.run_plan.profile import profile_mistakes, profile_warnings  # the other commands need no plan

    file, profile = _read(name)
    if mistakes := profile_mistakes(profile):
        raise ConfigErrors(mistakes)
    warn(profile_warnings(name, Path.cwd()))
    click.echo(f"{name} is valid: {file}, node type {profile.config.node_type}")


def _read(name: str) -> tuple[Path, Profile]:
    """The profile's file and its content.

    Raises:
        HpcgenError: the profile does not exist, or see `read_profile`.
    """
    file = find_cluster(name)
    if file is None:
        problem = unknown_cluster("name", name, directory=Path.cwd())
        raise HpcgenError(f"{name if name.isprintable() else ascii(name)} {problem.reason}", problem.hint)
    return file, read_profile(name)


def _leaves(values: dict[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted path and value of every leaf, including empty and null values."""
    for key, value in values.items():
        path = f"{section}{key}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
