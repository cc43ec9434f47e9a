"""hpcgen schema: print the JSON Schema of a run file or a cluster profile."""

from __future__ import annotations

import click

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.run import RunConfig
from hpcgen.config.schema import schema_text


@click.command("schema")
@click.argument("kind", type=click.Choice(["run", "cluster"]), default="run")
def command(kind: str) -> None:
    described = {"run": RunConfig, "cluster": ClusterConfig}[kind]
    click.echo(schema_text(described))
