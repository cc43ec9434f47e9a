"""Groups of commands: subcommands are imported on first use, and errors say what to type or to install."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import click


class CommandGroup(click.Group):
    """A group of commands whose errors say what to type, and which extra to install if a package is missing."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the subcommand. A missing package of an extra is reported as a mistake, without a traceback."""
        try:
            with _unknown_options():
                return super().invoke(ctx)
        except ModuleNotFoundError as error:
            from hpcgen.install.extras import missing_package

            mistake = missing_package(error, f"{ctx.command_path} {ctx.invoked_subcommand}")
            if mistake is None:
                raise
            raise mistake from error

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the options of the group itself."""
        with _unknown_options():
            return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command; the error for an unknown name says what to use."""
        if args and args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            from hpcgen.cli.unknown import unknown_command

            ctx.fail(f"no such command {args[0]!r}; {unknown_command(ctx, args[0])}")
        return super().resolve_command(ctx, args)


@contextlib.contextmanager
def _unknown_options() -> Iterator[None]:
    """Turns Click's error for an unknown option into one that says what to use."""
    try:
        yield
    except click.NoSuchOption as error:
        from hpcgen.cli.unknown import unknown_option

        raise click.UsageError(unknown_option(error.option_name, error.ctx), error.ctx) from error


class LazyGroup(CommandGroup):
    """A group with its commands in named sections of the help, each imported on first use.

    `sections` maps a heading to command names and their modules. A module defines one command as `command`, or
    several by name as `commands`. The first sentence of a command's help is its summary.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Mapping[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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
