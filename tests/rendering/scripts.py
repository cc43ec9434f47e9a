"""Templates written, rendered and run by bash, as the tests need them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from hpcgen.slurm.rendering.environment import make_environment, render_template
from tests.patience import PATIENCE_S

CANARY = "canary"

# Each would create the file `canary` if bash ever ran a part of it, or would come out as another text.
HOSTILE_WORDS = (
    "plain",
    "",
    " ",
    "two words",
    "$(>canary)",
    "`>canary`",
    "'; >canary; '",
    '"; >canary; "',
    "a'; echo foo; >canary #",
    "; >canary",
    "&& >canary",
    "| >canary",
    "> canary",
    "$HOME",
    "${HOME}",
    "$'\\x41'",
    "a[$(>canary)]",
    "back\\slash",
    "\\",
    "\\'; >canary #",
    "..",
    "../../etc/passwd",
    "-rf",
    "--option=x",
    "*",
    "[a-z]?",
    "{a,b}",
    "~",
    "~root",
    "#not a comment",
    "!!",
    "a=b",
    "=b",
    "if",
    "END_OF_TEXT",
    "&lt;&amp;",
    "{{ 7 }}",
    "{% raw %}",
    "größe-日本-🚀",
)
UNPRINTABLE = (
    "a\nb",
    "a\n>canary\n",
    "a\rb",
    "a\0b",
    "\x1b[31m",
    "a\x7f",
    "a\x85b",
    "a\u2028b",
    "\u202eabc",
    "\ud800",
)


def write_templates(directory: Path, templates: Mapping[str, str]) -> Path:
    for name, text in templates.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory


def rendered(
    directory: Path, template: str, others: Mapping[str, str] | None = None, **values: object
) -> str:
    """The rendered text of a template in the (site) directory, with other templates next to it."""
    write_templates(directory, {"it.j2": template, **(others or {})})
    return render_template(make_environment([directory]), "it.j2", values)


def arguments(script: str, directory: Path) -> list[str]:
    """Runs a script that calls `show ARGUMENT...`, and gives the arguments of all its calls.

    It runs in the directory, and fails the test when a planted command did.
    """
    text = "show() { (($#)) && printf '%s\\0' \"$@\"; }\n" + script
    (directory / "script.sh").write_text(text, encoding="utf-8")
    result = subprocess.run(
        ["bash", "script.sh"], cwd=directory, capture_output=True, check=False, timeout=PATIENCE_S
    )
    assert not (directory / CANARY).exists(), text
    assert result.stderr == b"", result.stderr
    return result.stdout.decode().split("\0")[:-1]
