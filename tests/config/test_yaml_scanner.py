"""The tokens and marks of the fast scanner are those of ruamel's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.scanner import Scanner

from hpcgen.config.yaml_scanner import FastScanner

CHECKOUT = Path(__file__).parents[2]
LINES = (
    *(
        "# comment",
        "  # indented",
        "#",
        "a: 1 # after a value",
        "b: c#d",
        "text: |",
        "  # of the text",
        "  line",
    ),
    *(
        "folded: >-",
        "    # deeper",
        'quoted: "one',
        '  # two"',
        "'three # four': 5",
        "list:",
        "- 1 # one",
        "-  # two",
    ),
    *(
        "flow: [1, # one",
        "  2, # two",
        "\t# tab",
        "  ]",
        "plain: first",
        "  # ends it",
        "  second",
        "--- # next",
        "...",
    ),
    *(
        "? # key",
        ": # value",
        "%YAML 1.1",
        "%YAML 1.2",
        "&anchor # of nothing",
        "*anchor",
        "",
        "\u00e9: # \u00fc\u2028",
        "<<: {}",
    ),
)


def tokens(text: str, scanner: type[Scanner]) -> list[tuple[Any, ...]]:
    """Each token with its value and the positions of its ends, and then the error if there is one."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Scanner = scanner
    found: list[tuple[Any, ...]] = []
    try:
        for token in yaml.scan(text):
            ends = [(mark.index, mark.line, mark.column) for mark in (token.start_mark, token.end_mark)]
            found.append((type(token).__name__, getattr(token, "value", None), *ends))
    except MarkedYAMLError as error:
        found.append((str(error),))
    return found


@pytest.mark.parametrize("folder", ["topologies", "hpcgen/presets", "hpcgen/clusters", "examples"])
def test_files_have_the_tokens_of_ruamel(folder: str) -> None:
    files = sorted((CHECKOUT / folder).rglob("*.yaml"))
    assert files
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert len(tokens(text, FastScanner)) > 3
        assert tokens(text, FastScanner) == tokens(text, Scanner), file


@given(
    st.lists(st.sampled_from(LINES), max_size=12),
    st.sampled_from(("\n", "\r\n", "\r", "\x85", "\u2028")),
    st.sampled_from(("", "\ufeff")),
    st.booleans(),
)
def test_any_text_has_the_tokens_of_ruamel(lines: list[str], end: str, mark: str, ends: bool) -> None:
    text = mark + end.join(lines) + (end if ends else "")
    assert tokens(text, FastScanner) == tokens(text, Scanner)
