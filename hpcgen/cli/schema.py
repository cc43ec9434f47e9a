"""hpcgen schema: print the JSON Schema of a run file, a cluster profile, a node type or the defaults."""

from __future__ import annotations

import click

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.defaults import Defaults
from hpcgen.config.node_type import NodeType
from hpcgen.config.run import RunConfig
from hpcgen.config.schema import schema_text

KINDS = {"run": RunConfig, "cluster": ClusterConfig, "node-type": NodeType, "defaults": Defaults}
"""Argument of the command -> class of the file."""


@click.command("schema")
@click.argument("kind", type=click.Choice(list(KINDS)), default="run")
def command(kind: str) -> None:
    click.echo(schema_text(KINDS[kind]))
