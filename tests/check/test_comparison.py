"""The reader of a site's scripts: words as written for most rules, values only in what the site wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hpcgen.check.comparison import Comparison
from hpcgen.check.lint.reader import read
from hpcgen.check.lint.script import Assignment, Command, Place, Script
from hpcgen.check.scripts import compare
from tests.rendering.golden import GOLDEN

ODD = r"""#!/bin/bash
words=(one "two three" "${words[@]}") ; words+=(four)
outer() {
    local -r name=$1 other
    inner() { printf '%s\n' "${name:-none}" "$((count + 1))" >"$log"; }
    if [[ $name == a ]]; then return 0; elif (( count )); then inner & fi
    for item in "${words[@]}"; do export LAST=$item; done
    ( cd "$name" && inner ) | grep -c x || true
}
case ${1-} in
    -x | --trace) flag=yes ;;
    *) read -r flag <<<"$2" ;;
esac
value=$(outer "$flag"); map[key]=$value
KEY=1 env -u OTHER outer 'a b' "$value"
"""


def in_the_file(places: tuple[Any, ...]) -> Iterator[Any]:
    """The places outside the text of a `bash -c`, which is read only with values."""
    return (place for place in places if place.outer is None)


def position(place: Place) -> tuple[object, ...]:
    return place.line, place.offset, place.function, place.in_subshell, place.in_background


def command(found: Command) -> tuple[object, ...]:
    return (*position(found), found.in_branch, found.written, found.end, found.background, found.redirections)


def assignment(found: Assignment) -> tuple[object, ...]:
    named = (found.name, found.text, found.written, found.append, found.indexed)
    return (*position(found), *named, found.exported, found.is_local, found.is_declared)


FACTS: dict[str, Callable[[Script], Any]] = {
    "commands": lambda script: [command(found) for found in in_the_file(script.commands)],
    "assignments": lambda script: [assignment(found) for found in in_the_file(script.assigned)],
    "reads": lambda script: sorted(
        (*position(found), found.name) for found in {*in_the_file(script.uses), *in_the_file(script.operands)}
    ),
    "functions": lambda script: [
        (*position(found), found.name, found.text, found.end) for found in script.definitions
    ],
    "statements": lambda script: script.statements,
    "directives": lambda script: script.directives,
}


@pytest.mark.parametrize(
    "text",
    [
        ODD,
        *(
            (GOLDEN / name).read_text()
            for name in ("azure-ndv5-pyxis/train.sbatch", "azure-ndv5-pyxis/run.sbatch")
        ),
    ],
    ids=["odd", "train", "run"],
)
def test_reading_words_as_written_finds_the_same_as_reading_with_values(text: str) -> None:
    with_values, as_written = read(text), read(text, follows_values=False)
    for fact, of in FACTS.items():
        assert of(as_written) == of(with_values), fact
    assert len(as_written.commands) > 10


def test_words_as_written_have_no_values_and_shells_in_shells_are_not_read() -> None:
    script = read("option=-x\nset $option\nbash -c 'set -x'\n", follows_values=False)
    assert [command.written for command in script.commands] == [
        ("set", "$option"),
        ("bash", "-c", "set -x"),
    ]
    assert not any(word.known for command in script.commands for word in command.words)


SHIPPED = "#!/bin/bash\nsay() {\n    echo hello\n}\ntrace() {\n    set -x\n}\n"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        pytest.param(lambda text: f"{text}option=-x\nset $option\n", 9, id="a value of the site"),
        pytest.param(lambda text: f"{text}bash -c 'set -x'\n", 8, id="a shell in the site's shell"),
        pytest.param(
            lambda text: f"{text}own() {{\n    :\n    set -x\n}}\n", 10, id="a function of the site"
        ),
        # these lines alone have a syntax error, so the complete script is read
        pytest.param(
            lambda text: text.replace("hello\n}", "hello\n}; set -x"), 4, id="behind a shipped function"
        ),
        pytest.param(
            lambda text: f"{text}trace() {{ :; }}; set -x; say() {{\n    :\n}}\n", 8, id="before a function"
        ),
    ],
)
def test_rules_about_values_see_what_the_site_wrote(change: Callable[[str], str], line: int) -> None:
    script = change(SHIPPED)
    found = {(finding.rule, finding.line) for finding in compare(script, SHIPPED)}
    assert ("no-trace", line) in found
    assert not any(rule == "no-trace" and other != line for rule, other in found)


def test_only_the_sites_lines_are_read_with_values() -> None:
    """Their line numbers stay. Reading the rest as well would take most of the time of all rules."""
    both = Comparison(f"{SHIPPED}set -e\n", SHIPPED, frozenset())
    assert [(command.line, command.written) for command in both.with_values.commands] == [(8, ("set", "-e"))]
    behind = Comparison(SHIPPED.replace("hello\n}", "hello\n}; set -e"), SHIPPED, frozenset())
    assert [command.line for command in behind.with_values.commands] == [3, 4, 6]
