"""Groups of commands: subcommands are imported on first use, and errors say what to type or to install."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class CommandGroup(click.Group):
    """A group of commands whose errors say what to type, and which extra to install if a package is missing."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the subcommand."""
        with _missing_extras(ctx), _unknown_options():
            return super().invoke(ctx)

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
        with _missing_extras(ctx, *args[:1]):  # importing the command may fail already
            return super().resolve_command(ctx, args)


@contextlib.contextmanager
def _missing_extras(ctx: click.Context, name: str = "") -> Iterator[None]:
    """Turns the error for a missing package of an extra into one that names the extra.

    `name` is the subcommand. Default: the one that is being invoked.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        from hpcgen.install.extras import missing_package

        mistake = missing_package(error, f"{ctx.command_path} {name or ctx.invoked_subcommand}")
        if mistake is None:
            raise
        raise mistake from error


@contextlib.contextmanager
def _unknown_options() -> Iterator[None]:
    """Turns Click's error for an unknown option into one that says what to use."""
    try:
        yield
    except click.NoSuchOption as error:
        from hpcgen.cli.unknown import unknown_option

        raise click.UsageError(unknown_option(error.option_name, error.ctx), error.ctx) from error


class Lazy(NamedTuple):
    """A command that is imported on first use."""

    module: str
    """Module that defines one command as `command`, or several by name as `commands`."""
    summary: str
    """The first paragraph of the command's help. The command itself has the others."""

    def load(self, name: str) -> click.Command:
        """Imports the command called `name`."""
        module = importlib.import_module(self.module)
        commands: Mapping[str, click.Command] = getattr(module, "commands", {})
        command = copy.copy(commands[name] if commands else module.command)
        command.help = "\n\n".join((self.summary, inspect.cleandoc(command.help or ""))).rstrip()
        return command


class LazyGroup(CommandGroup):
    """A group with its commands in named sections of the help, each imported on first use."""

    def __init__(self, *args: Any, sections: Mapping[str, Mapping[str, Lazy]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections
        self._lazy = {name: lazy for section in sections.values() for name, lazy in section.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All command names, without importing any module."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command."""
        return self._lazy[cmd_name].load(cmd_name) if cmd_name in self._lazy else None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes the names of commands with their summaries, and the options of the group."""
        names = [name for name in self._lazy if name.startswith(incomplete)]
        from click.shell_completion import CompletionItem

        items = [CompletionItem(name, help=self._lazy[name].summary) for name in names]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a list of commands per section, with the summaries of all sections in one column."""
        width = max(map(len, self._lazy))
        for heading, names in self._sections.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:<{width}}", self._lazy[name].summary) for name in names])
