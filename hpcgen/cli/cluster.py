"""hpcgen cluster: list, show and check cluster profiles."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcgen.cli.found import list_found
from hpcgen.cli.lazy import CommandGroup
from hpcgen.cli.options import complete_clusters, json_option, override_option, warn
from hpcgen.config.directories import is_below
from hpcgen.config.node_types import find_node_type
from hpcgen.config.profiles import (
    cluster_names,
    find_cluster,
    load_cluster,
    read_profile,
    unknown_cluster,
)
from hpcgen.errors import ConfigErrors, HpcgenError
from hpcgen.resources import shipped

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
@click.option("--run", "runs", is_flag=True, help="Also submit one small job that measures, and wait for it.")
@click.option("--write", is_flag=True, help="With --run: write the measured figures into the profile.")
@click.option("--nodes", type=click.IntRange(min=1), help="With --run: number of nodes.  [default: 2]")
@click.option("--partition", metavar="NAME", help="With --run: partition of the job.")
@click.option(
    "--run-dir",
    metavar="DIR",
    help="With --run: directory for script, log and results, on the storage for runs.  [default: runs/NAME]",
)
@override_option
def check(
    name: str,
    runs: bool,
    write: bool,
    nodes: int | None,
    partition: str | None,
    run_dir: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Check profile NAME and its node type.

    Reports all mistakes in keys and values, or else all broken rules, and exits with status 2 if there are any. Prints
    the same warnings as hpcgen render does for this profile.

    With --run, the stage nccl-test then runs on two nodes. It starts the container, imports the trainer, writes to the
    run directory and to scratch, and measures the bandwidth between the GPUs, or between CPUs on nodes without GPUs.
    Ctrl-C cancels the job. Exits with status 1 if it fails.
    """
    from hpcgen.run_plan.profile import profile_mistakes, profile_warnings  # the other commands need no plan

    options = {
        "--write": write,
        "--nodes": nodes,
        "--partition": partition,
        "--run-dir": run_dir,
        "--set": overrides,
    }
    if not runs and (given := [option for option, value in options.items() if value]):
        raise HpcgenError(f"{', '.join(given)}: only with --run", "add --run, which submits a job")
    file, profile = _read(name)
    if mistakes := profile_mistakes(profile):
        raise ConfigErrors(mistakes)
    if write:
        _require_writable(name, file)
    warn(warnings := profile_warnings(name, Path.cwd()))
    click.echo(f"{name} is valid: {file}, node type {profile.config.node_type}")
    if runs:
        from hpcgen.cli.cluster_run import run_job

        run_job(name, file, profile, nodes or 2, partition, run_dir, overrides, warnings, write=write)


@command.command("upgrade")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--write", is_flag=True, help="Replace the file. The old one is kept as FILE.orig.")
def upgrade(file: Path, write: bool) -> None:
    """Write the profile or node type FILE in today's form.

    In a profile, options in extra_directives become keys. A node type extends a base type and keeps only the facts
    that differ. Comments and order stay. Prints the difference, and changes nothing without --write. The facts of the
    file are the same before and after; otherwise nothing is written.
    """
    from hpcgen.cli.cluster_upgrade import upgrade_file

    upgrade_file(file, write=write)


def _require_writable(name: str, file: Path) -> None:
    """Checks that figures can be written into the profile, before a job measures them.

    Raises:
        HpcgenError: hpcgen ships the profile, or this user may not write it.
    """
    if is_below(file, shipped("clusters")):
        hint = f"write a profile of your own, with extends: {file.stem}"
        raise HpcgenError(f"--write: {name} is a profile that hpcgen ships", hint)
    if not os.access(file, os.W_OK) or not os.access(file.parent, os.W_OK):
        raise HpcgenError("--write: this user may not write it", "run without --write", where=file)


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
