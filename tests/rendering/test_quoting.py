"""Hostile values through every construct that writes one: bash gets the value unchanged, or it is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcgen.errors import HpcgenError
from hpcgen.rendering.filters import heredoc, shell_word
from tests.rendering.scripts import HOSTILE_WORDS, UNPRINTABLE, arguments, rendered

LIBRARY = {
    "library.j2": "{% macro word(value) %}{{ value }}{% endmacro %}\n{% set greeting = 'it is ok' %}\n"
}

# name -> the template, which shows `value` once
CONSTRUCTS = {
    "name": "show {{ value }}\n",
    "attribute": "show {{ plan.value }}\n",
    "item": "show {{ mapping['value'] }}\n",
    "condition": "show {{ value if value is defined else 'no' }}\n",
    "or": "show {{ nothing or value }}\n",
    "if": "{% if value is string %}\nshow {{ value }}\n{% else %}\nshow no\n{% endif %}\n",
    "for": "show{% for word in [value] %} {{ word }}{% endfor %} \n\n",
    "items": "{% for name, word in mapping | items %}\nshow {{ word }}\n{% endfor %}\n",
    "set": "{% set word = value %}\nshow {{ word }}\n",
    "set text": "{% set text %}{{ value }}{% endset %}\nshow {{ text }}\n",
    "with": "{% with word = value %}\nshow {{ word }}\n{% endwith %}\n",
    "macro": "{% macro word(value) %}{{ value }}{% endmacro %}\nshow {{ word(value) }}\n",
    "macro in a macro": "{% macro inner(v) %}{{ v }}{% endmacro %}\n"
    "{% macro outer(v) %}{{ inner(v) }}{% endmacro %}\nshow {{ outer(value) }}\n",
    "macro's default": "{% macro word(v=value) %}{{ v }}{% endmacro %}\nshow {{ word() }}\n",
    "call": "{% macro wrap() %}show {{ caller() }}{% endmacro %}\n"
    "{% call wrap() %}{{ value }}{% endcall %}\n\n",
    "call's argument": "{% macro wrap() %}show {{ caller(value) }}{% endmacro %}\n"
    "{% call(word) wrap() %}{{ word }}{% endcall %}\n\n",
    "import": '{% import "library.j2" as library %}\nshow {{ library.word(value) }}\n',
    "from import": '{% from "library.j2" import word as w %}\nshow {{ w(value) }}\n',
    "include": '{% include "shown.j2" %}\n',
    "block": "{% block shown %}\nshow {{ value }}\n{% endblock %}\n",
    "self": "{% block shown %}\nshow {{ value }}\n{% endblock %}\n"
    "{% if false %}\n{{ self.shown() }}\n{% endif %}\n",
    "super": '{% extends "parent.j2" %}\n{% block shown %}\n{{ super() }}\n{% endblock %}\n',
    "replaced block": '{% extends "parent.j2" %}\n{% block shown %}\nshow {{ value }}\n{% endblock %}\n',
    "in $( )": 'show "$(printf %s {{ value }})"\n',
    "in an array": 'words=(\n    {{ value }}\n)\nshow "${words[@]}"\n',
    "assignment": 'word={{ value }}\nshow "$word"\n',
    "export": 'export {{ "NAME" | variable }}={{ value }}\nshow "$NAME"\n',
    "here-string": 'show "$(cat <<<{{ value }})"\n',
    "continued line": "show \\\n    {{ value }}\n",
}
OTHERS = {
    **LIBRARY,
    "shown.j2": "show {{ value }}\n",
    "parent.j2": "{% block shown %}\nshow {{ value }}\n{% endblock %}\n",
}


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_every_hostile_value_is_one_unchanged_argument(construct: str, tmp_path: Path) -> None:
    scripts = [shown(CONSTRUCTS[construct], value, tmp_path) for value in HOSTILE_WORDS]
    assert arguments("".join(scripts), tmp_path) == list(HOSTILE_WORDS)


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_a_value_without_a_form_is_refused_where_it_stands(construct: str, tmp_path: Path) -> None:
    others = [] if construct == "if" else [None, True, [], {}, b"x", object(), float("nan")]
    for value in (*UNPRINTABLE, *others):
        with pytest.raises(HpcgenError, match=r"\.j2:\d+: "):
            shown(CONSTRUCTS[construct], value, tmp_path)


def shown(template: str, value: object, directory: Path) -> str:
    return rendered(
        directory / "templates",
        template,
        OTHERS,
        value=value,
        plan=SimpleNamespace(value=value),
        mapping={"value": value},
        nothing=False,
    )


def test_literals_are_quoted_too(tmp_path: Path) -> None:
    """Without care Jinja writes a literal when it compiles, past the quoting and escaped for HTML."""
    script = rendered(
        tmp_path / "t",
        '{% import "library.j2" as library %}\nshow {{ "$(>canary) & <it\'s>" }} {{ library.greeting }}\n',
        LIBRARY,
    )
    assert arguments(script, tmp_path) == ["$(>canary) & <it's>", "it is ok"]


def test_numbers_and_paths(tmp_path: Path) -> None:
    script = rendered(
        tmp_path / "t", "show {{ i }} {{ f }} {{ g }} {{ p }}\n", i=-3, f=1e-4, g=2.5, p=Path("/a b/c")
    )
    assert arguments(script, tmp_path) == ["-3", "0.0001", "2.5", "/a b/c"]


def test_a_word_stays_a_word_next_to_text(tmp_path: Path) -> None:
    script = rendered(tmp_path / "t", "show --a={{ a }}/{{ b }}.log {{ a }}{{ b }}\n", a="x y", b="$z")
    assert arguments(script, tmp_path) == ["--a=x y/$z.log", "x y$z"]


def test_plain_words_stay_readable() -> None:
    assert [shell_word(word) for word in ("/mnt/data", "--nodes=2", "gpu:h100:8", "a-b_c.d", 8)] == [
        "/mnt/data", "--nodes=2", "gpu:h100:8", "a-b_c.d", "8",
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["if", "done", "select", "PATH=x", "PATH+=x"])
def test_words_that_bash_reads_as_syntax_are_quoted(word: str, tmp_path: Path) -> None:
    """As a command they would be a keyword or an assignment, which this handler does not see."""
    script = 'command_not_found_handle() { show "$1"; }\n' + rendered(
        tmp_path / "t", "{{ word }}\n", word=word
    )
    assert arguments(script, tmp_path) == [word]


@pytest.mark.parametrize("value", HOSTILE_WORDS)
def test_a_comment_stays_a_comment(value: str, tmp_path: Path) -> None:
    script = rendered(
        tmp_path / "t", "# {{ value | comment }}\nshow done # {{ value | comment }}\n", value=value
    )
    assert script == f"# {value}\nshow done # {value}\n"
    assert arguments(script, tmp_path) == ["done"]


@pytest.mark.parametrize(
    "text", [*HOSTILE_WORDS, "two\nlines\n", '{"a": "$(>canary)"}\n', "END_OF_TEXT\nEND_OF_TEXT_2\n>canary\n"]
)
def test_a_here_document_holds_its_text_exactly(text: str, tmp_path: Path) -> None:
    script = rendered(tmp_path / "t", "cat >text {{ text | heredoc }}\nshow after\n", text=text)
    assert arguments(script, tmp_path) == ["after"]
    newline = "" if not text or text.endswith("\n") else "\n"
    assert (tmp_path / "text").read_text(encoding="utf-8") == text + newline


@pytest.mark.parametrize("value", [2, -2, 10**30])
def test_integers_have_a_place_in_expressions(value: int, tmp_path: Path) -> None:
    text = (
        "if ((1 < {{ n | integer }})) || [[ 1 -lt {{ n | integer }} ]]\n"
        'then show "more: {{ n | integer }}"; else show {{ n }}; fi\n'
    )
    assert arguments(rendered(tmp_path / "t", text, n=value), tmp_path)[0].endswith(str(value))


@pytest.mark.parametrize("value", ["2", "a[$(>canary)]", 2.0, True, None])
def test_only_whole_numbers_pass_as_integers(value: object, tmp_path: Path) -> None:
    with pytest.raises(HpcgenError, match=r"it\.j2:1: .*is not a whole number"):
        rendered(tmp_path, "((1 < {{ n | integer }}))\n", n=value)


@pytest.mark.parametrize("name", ["", "1A", "A B", "A-B", "A=1", "x[$(>canary)]", "A\n", "ä"])
def test_only_names_pass_as_variables(name: str, tmp_path: Path) -> None:
    with pytest.raises(HpcgenError, match=r"it\.j2:1: .*is not the name of a shell variable"):
        rendered(tmp_path, "export {{ name | variable }}=1\n", name=name)


def test_raw_is_shell_code(tmp_path: Path) -> None:
    script = rendered(tmp_path / "t", "{{ code | raw }}\n", code="show one\n\tshow 'two  words'")
    assert arguments(script, tmp_path) == ["one", "two  words"]


@pytest.mark.parametrize("filter_name", ["comment", "directive", "heredoc", "raw", "variable"])
@pytest.mark.parametrize("value", ["a\0b", "a\x1bb", "a\rb", "a\u2028b", None, True, ["x"]], ids=ascii)
def test_every_filter_refuses_what_has_no_form(filter_name: str, value: object, tmp_path: Path) -> None:
    before = {"comment": "# ", "directive": "#SBATCH --x="}.get(filter_name, "cat ")
    with pytest.raises(HpcgenError, match=r"it\.j2:1: "):
        rendered(tmp_path, f"{before}{{{{ value | {filter_name} }}}}\n", value=value)


PRINTABLE = st.text(
    st.characters(exclude_categories=("C", "Z")) | st.sampled_from(" '\"\\$`#;&|<>(){}[]*?~!=-")
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PRINTABLE, min_size=1, max_size=40))
def test_any_printable_text_is_one_unchanged_argument(tmp_path: Path, words: list[str]) -> None:
    script = rendered(tmp_path / "t", "show{% for word in words %} {{ word }}{% endfor %} \n\n", words=words)
    assert arguments(script, tmp_path) == words


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_is_quoted_or_refused(text: str) -> None:
    try:
        word = shell_word(text)
    except HpcgenError:
        assert not text.isprintable()
    else:
        assert text.isprintable()
        assert "\n" not in word


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["END_OF_TEXT", "_2", "_3", "\n", " ", "x"]), max_size=12).map("".join))
def test_the_delimiter_of_a_here_document_is_not_in_its_text(text: str) -> None:
    first, *_, last = str(heredoc(text)).split("\n")
    assert first == f"<<'{last}'"
    assert last not in text


def test_a_value_with_its_own_quoting_is_still_quoted(tmp_path: Path) -> None:
    """A class may have an `__html__` that Jinja would trust, or a `str()` of its own."""

    class Sly(str):
        def __html__(self) -> str:
            return "; >canary"

        def __str__(self) -> str:
            return "; >canary"

    assert arguments(rendered(tmp_path / "t", "show {{ value }}\n", value=Sly("$x")), tmp_path) == ["$x"]


def test_bash_accepts_every_script(tmp_path: Path) -> None:
    for template in CONSTRUCTS.values():
        script = shown(template, "it's $(>canary)", tmp_path)
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
