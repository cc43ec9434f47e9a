"""Groups of commands: subcommands are imported on first use, and missing packages are named with their extra."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from hpcgen.text import did_you_mean, nearest


class CommandGroup(click.Group):
    """A group of commands that names the extra to install if a subcommand's package is missing."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the subcommand. A missing package of an extra is reported as a mistake, without a traceback."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            from hpcgen.install.extras import missing_package

            mistake = missing_package(error, f"{ctx.command_path} {ctx.invoked_subcommand}")
            if mistake is None:
                raise
            raise mistake from error


class LazyGroup(CommandGroup):
    """A group with its commands in named sections of the help, each imported on first use.

    `sections` maps a heading to command names and their modules. A module defines one command as `command`, or
    several by name as `commands`. The first sentence of a command's help is its summary. `elsewhere` maps names that
    users try to the command that they mean.
    """

    def __init__(
        self,
        *args: Any,
        sections: Mapping[str, Mapping[str, str]],
        elsewhere: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._elsewhere = elsewhere or {}
        self._sections = sections
        self._modules = {name: module for section in sections.values() for name, module in section.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All command names, without importing any module."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command."""
        if cmd_name not in self._modules:
            return None
        module = importlib.import_module(self._modules[cmd_name])
        commands: Mapping[str, click.Command] = getattr(module, "commands", {})
        command: click.Command = commands[cmd_name] if commands else module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a list of commands per section, with the summaries of all sections in one column."""
        width = max(map(len, self._modules))
        for heading, names in self._sections.items():
            commands = {name: self.get_command(ctx, name) for name in names}
            rows = [
                (f"{name:<{width}}", command.get_short_help_str(limit=formatter.width - width - 6))
                for name, command in commands.items()
                if command is not None
            ]
            with formatter.section(heading):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command; the error for an unknown name suggests the nearest one."""
        if args and args[0] not in self._modules and not args[0].startswith("-"):
            ctx.fail(f"no such command {args[0]!r}; {self._hint(args[0])}")
        return super().resolve_command(ctx, args)

    def _hint(self, name: str) -> str:
        """What to use in place of the unknown command `name`."""
        meant = name if name in self._elsewhere else nearest(name, [*self._modules, *self._elsewhere])
        if meant is not None and meant in self._elsewhere:
            return f"use {self._elsewhere[meant]}"
        return did_you_mean(name, self._modules) or f"commands are {', '.join(self._modules)}"
