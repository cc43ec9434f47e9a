"""hpcgen completion: print shell completion scripts."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from hpcgen.cli.main import cli


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """For bash, add this line to ~/.bashrc: eval "$(hpcgen completion bash)" """
    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(cli, {}, "hpcgen", "_HPCGEN_COMPLETE").source())
