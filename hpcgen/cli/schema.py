"""hpcgen schema: print the JSON Schema of a run file, a cluster profile or a node type."""

from __future__ import annotations

import click

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.node_type import NodeType
from hpcgen.config.run import RunConfig
from hpcgen.config.schema import schema_text

KINDS = {"run": RunConfig, "cluster": ClusterConfig, "node-type": NodeType}
"""Argument of the command -> class of the file."""


@click.command("schema")
@click.argument("kind", type=click.Choice(list(KINDS)), default="run")
def command(kind: str) -> None:
    click.echo(schema_text(KINDS[kind]))
