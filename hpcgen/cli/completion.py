"""hpcgen completion: what a shell needs to complete hpcgen's commands and options."""

from __future__ import annotations

import click


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of SHELL: eval "$(hpcgen completion bash)" in ~/.bashrc."""
    from click.shell_completion import get_completion_class

    from hpcgen.cli.main import cli

    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(cli, {}, "hpcgen", "_HPCGEN_COMPLETE").source())
