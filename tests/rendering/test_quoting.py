"""Hostile values through every construct that writes one: bash gets the value unchanged, or it is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcgen.errors import HpcgenError
from hpcgen.slurm.rendering.filters import heredoc, shell_word
from hpcgen.slurm.rendering.settings import Setting
from tests.rendering.scripts import HOSTILE_WORDS, UNPRINTABLE, arguments, rendered

# name -> the template, which shows `value` once; in block settings
CONSTRUCTS = {
    "name": "word={{ value }}\n",
    "attribute": "word={{ plan.value }}\n",
    "item": "word={{ mapping['value'] }}\n",
    "condition": "word={{ value if value is defined else 'no' }}\n",
    "or": "word={{ nothing or value }}\n",
    "if": "{% if value is string %}\nword={{ value }}\n{% else %}\nword=no\n{% endif %}\n",
    "for": "{% for each in [value] %}\nword={{ each }}\n{% endfor %}\n",
    "items": "{% for name, each in mapping | items %}\nword={{ each }}\n{% endfor %}\n",
    "set": "{% set each = value %}\nword={{ each }}\n",
    "include": '{% include "shown.j2" %}\n',
    "export": 'export {{ "word" | variable }}={{ value }}\n',
    "array": "words=({% for each in [value] %} {{ each }}{% endfor %} )\nword=${words[0]}\n",
    "array of lines": "words=(\n    {{ value }}\n)\nword=${words[0]}\n",
}
OTHERS = {"shown.j2": "{% block settings %}\nword={{ value }}\n{% endblock %}\n"}


@pytest.mark.process
@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_every_hostile_value_is_one_unchanged_argument(construct: str, tmp_path: Path) -> None:
    scripts = [shown(CONSTRUCTS[construct], value, tmp_path) for value in HOSTILE_WORDS]
    assert arguments("".join(scripts), tmp_path) == list(HOSTILE_WORDS)


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_a_value_that_cannot_be_quoted_is_refused_at_its_place(construct: str, tmp_path: Path) -> None:
    others = [] if construct == "if" else [None, True, [], {}, b"x", object(), float("nan")]
    for value in (*UNPRINTABLE, *others):
        with pytest.raises(HpcgenError, match=r"\.j2:\d+: "):
            shown(CONSTRUCTS[construct], value, tmp_path)


def shown(template: str, value: object, directory: Path) -> str:
    return rendered(
        directory / "templates",
        f'{{% block settings %}}\n{template}{{% endblock %}}\nshow "$word"\n',
        OTHERS,
        value=value,
        plan=SimpleNamespace(value=value),
        mapping={"value": value},
        nothing=False,
    )


def in_settings(directory: Path, text: str, **values: object) -> str:
    """The text of a template's block settings."""
    return rendered(directory / "t", f"{{% block settings %}}\n{text}{{% endblock %}}\n", **values)


@pytest.mark.process
def test_literals_are_quoted_too(tmp_path: Path) -> None:
    """Without care Jinja writes a literal when it compiles, past the quoting and escaped for HTML."""
    script = in_settings(tmp_path, 'word={{ "$(>canary) & <it\'s>" }}\n') + 'show "$word"\n'
    assert arguments(script, tmp_path) == ["$(>canary) & <it's>"]


@pytest.mark.process
def test_numbers_and_paths(tmp_path: Path) -> None:
    text = "words=( {{ i }} {{ f }} {{ g }} {{ p }} )\n"
    script = in_settings(tmp_path, text, i=-3, f=1e-4, g=2.5, p=Path("/a b/c")) + 'show "${words[@]}"\n'
    assert arguments(script, tmp_path) == ["-3", "0.0001", "2.5", "/a b/c"]


@pytest.mark.process
def test_a_word_stays_a_word_next_to_text(tmp_path: Path) -> None:
    script = in_settings(tmp_path, "word=--a={{ a }}/{{ b }}.log\n", a="x y", b="$z") + 'show "$word"\n'
    assert arguments(script, tmp_path) == ["--a=x y/$z.log"]


@pytest.mark.process
@pytest.mark.parametrize("value", [*HOSTILE_WORDS, 7, tuple(HOSTILE_WORDS), ()])
def test_a_setting_is_one_assignment(value: str | int | tuple[str, ...], tmp_path: Path) -> None:
    script = in_settings(tmp_path, "{{ setting | assignment }}\n", setting=Setting("word", value))
    expected = list(map(str, value)) if isinstance(value, tuple) else [str(value)]
    assert arguments(script + 'show "${word[@]}"\n', tmp_path) == expected


def test_plain_words_stay_readable() -> None:
    assert [shell_word(word) for word in ("/mnt/data", "--nodes=2", "gpu:h100:8", "a-b_c.d", 8)] == [
        "/mnt/data", "--nodes=2", "gpu:h100:8", "a-b_c.d", "8",
    ]  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("word", ["if", "done", "select", "PATH=x", "PATH+=x"])
def test_words_that_bash_reads_as_syntax_are_quoted(word: str, tmp_path: Path) -> None:
    """As a command they would be a keyword or an assignment, which this handler does not see."""
    command = in_settings(tmp_path, "{{ word }}\n", word=word)
    script = 'command_not_found_handle() { show "$1"; }\n' + command
    assert arguments(script, tmp_path) == [word]


@pytest.mark.process
@pytest.mark.parametrize("value", HOSTILE_WORDS)
def test_a_comment_stays_a_comment(value: str, tmp_path: Path) -> None:
    script = rendered(tmp_path / "t", "# {{ value | comment }}\nshow done\n", value=value)
    assert script == f"# {value}\nshow done\n"
    assert arguments(script, tmp_path) == ["done"]


@pytest.mark.process
@pytest.mark.parametrize(
    "text", [*HOSTILE_WORDS, "two\nlines\n", '{"a": "$(>canary)"}\n', "END_OF_TEXT\nEND_OF_TEXT_2\n>canary\n"]
)
def test_a_here_document_holds_its_text_exactly(text: str, tmp_path: Path) -> None:
    script = rendered(tmp_path / "t", "cat >text {{ text | heredoc }}\nshow after\n", text=text)
    assert arguments(script, tmp_path) == ["after"]
    newline = "" if not text or text.endswith("\n") else "\n"
    assert (tmp_path / "text").read_text(encoding="utf-8") == text + newline


@pytest.mark.parametrize("name", ["", "1A", "A B", "A-B", "A=1", "x[$(>canary)]", "A\n", "ä"])
def test_only_names_pass_as_variables(name: str, tmp_path: Path) -> None:
    with pytest.raises(HpcgenError, match=r"it\.j2:2: .*is not the name of a shell variable"):
        in_settings(tmp_path, "export {{ name | variable }}=1\n", name=name)


@pytest.mark.parametrize("filter_name", ["comment", "directive", "heredoc", "variable"])
@pytest.mark.parametrize("value", ["a\0b", "a\x1bb", "a\rb", "a\u2028b", None, True, ["x"]], ids=ascii)
def test_every_filter_refuses_invalid_values(filter_name: str, value: object, tmp_path: Path) -> None:
    before = {"comment": "# ", "directive": "#SBATCH --x=", "variable": "export "}.get(filter_name, "cat ")
    with pytest.raises(HpcgenError, match=r"it\.j2:2: "):
        in_settings(tmp_path, f"{before}{{{{ value | {filter_name} }}}}\n", value=value)


PRINTABLE = st.text(
    st.characters(exclude_categories=("C", "Z")) | st.sampled_from(" '\"\\$`#;&|<>(){}[]*?~!=-")
)


@pytest.mark.process
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PRINTABLE, min_size=1, max_size=40))
def test_any_printable_text_is_one_unchanged_argument(tmp_path: Path, words: list[str]) -> None:
    text = "words=({% for word in words %} {{ word }}{% endfor %} )\n"
    script = in_settings(tmp_path, text, words=words) + 'show "${words[@]}"\n'
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


@pytest.mark.process
def test_a_value_with_its_own_quoting_is_still_quoted(tmp_path: Path) -> None:
    """A class may have an `__html__` that Jinja would trust, or a `str()` of its own."""

    class Sly(str):
        def __html__(self) -> str:
            return "; >canary"

        def __str__(self) -> str:
            return "; >canary"

    script = in_settings(tmp_path, "word={{ value }}\n", value=Sly("$x")) + 'show "$word"\n'
    assert arguments(script, tmp_path) == ["$x"]


@pytest.mark.process
def test_bash_accepts_every_script(tmp_path: Path) -> None:
    for template in CONSTRUCTS.values():
        script = shown(template, "it's $(>canary)", tmp_path)
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
