"""Groups of commands: subcommands are imported when they are used, and missing packages are named with their extra."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from hpcgen.text import did_you_mean


class CommandGroup(click.Group):
    """A group that names the extra of hpcgen that its subcommand needs and the installation lacks."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the subcommand; a missing package of an extra is the user's mistake, without a traceback."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            from hpcgen.install.extras import missing_package

            mistake = missing_package(error, f"{ctx.command_path} {ctx.invoked_subcommand}")
            if mistake is None:
                raise
            raise mistake from error


class LazyGroup(CommandGroup):
    """A group whose subcommands are in the modules of `commands_in`, imported when they are used.

    A module has one as `command`, or several as `commands`, by name.
    """

    def __init__(self, *args: Any, commands_in: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules = commands_in

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, without importing what they name."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the subcommand."""
        if cmd_name not in self._modules:
            return None
        module = importlib.import_module(self._modules[cmd_name])
        commands: Mapping[str, click.Command] = getattr(module, "commands", {})
        command: click.Command = commands[cmd_name] if commands else module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the subcommand; an unknown one gets the nearest name as a hint."""
        if args and args[0] not in self._modules and not args[0].startswith("-"):
            hint = did_you_mean(args[0], self._modules) or f"commands are {', '.join(self._modules)}"
            ctx.fail(f"no such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)
