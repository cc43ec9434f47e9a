"""Renders a template with values."""

from __future__ import annotations

from collections.abc import Mapping

from hpcgen.errors import HpcgenError
from hpcgen.slurm.rendering.environment import ShellEnvironment
from hpcgen.slurm.rendering.template_errors import template_errors


def render_template(environment: ShellEnvironment, name: str, context: Mapping[str, object]) -> str:
    """The template's text with these values, ending with a newline.

    Raises:
        HpcgenError: a template is missing, unreadable or invalid, or a value is undefined or cannot be written where
            the template puts it. The message has the template's file and line.
    """
    with template_errors(environment.directories, name, context):
        text = environment.get_template(name).render(context)
    control = next((character for character in text if character < " " and character not in "\n\t"), None)
    if control is not None:
        line = text[: text.index(control)].count("\n") + 1
        raise HpcgenError(f"{name}: line {line} of the rendered text has the control character {control!r}")
    return text if text.endswith("\n") else text + "\n"
