"""What a template may not say: refused when it is loaded, with file and line, whatever the values are."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import jinja2
import pytest

from hpcgen.errors import HpcgenError
from hpcgen.rendering.environment import make_environment
from tests.rendering.scripts import CANARY, rendered

# The construct, on line 2 of its template -> a part of the reason.
REFUSED = {
    # text joined past the quoting
    "{{ 'a' ~ v }}": "side by side",
    "{{ m(v) ~ v }}": "side by side",
    "{{ v + 'a' }}": "arithmetic",
    "{{ m(v) + v }}": "arithmetic",
    "{{ '%s' % v }}": "arithmetic",
    "{{ n * 2 }}": "arithmetic",
    "{{ -n }}": "arithmetic",
    "{{ v[1:] }}": "slice",
    "{{ '{}'.format(v) }}": "only macros",
    "{{ v.upper() }}": "only macros",
    "{{ m(v).replace('a', v) }}": "only macros",
    "{{ [m(v), v] | join(' ') }}": "no filter join",
    "{{ v | safe }}": "no filter safe",
    "{{ v | tojson }}": "no filter tojson",
    "{{ v | replace('a', 'b') }}": "no filter replace",
    "{{ v | format(v) }}": "no filter format",
    "{{ {'a': v} | xmlattr }}": "no filter xmlattr",
    "{{ v | e }}": "no filter e;",
    "{{ v | raw | raw }}": "last thing",
    "{{ m(v | raw) }}": "last thing",
    "{% set w = v | comment %}": "last thing",
    "{% set w | comment %}x{% endset %}": "a filter on",
    "{% filter upper %}{{ v }}{% endfilter %}": "{% filter %}",
    "{% autoescape false %}{{ v }}{% endautoescape %}": "autoescape",
    "{% set ns.x = v %}": "attribute cannot be set",
    "{{ m(*[v]) }}": "name the arguments",
    "{{ range(3) }}": "only macros",
    "{{ loop.cycle('a') }}": "only macros",
    "{% trans %}x{% endtrans %}": "unknown tag 'trans'",
    "{% do v %}": "unknown tag 'do'",
    "{% for x in [v] recursive %}{% endfor %}": "recursive",
    "{% include [v] %}": "one literal text",
    "{% import v as w %}": "one literal text",
    "{% if v %}{% extends 'x' %}{% endif %}": "stands alone",
    # places with other rules
    'show "{{ v }}"': '" quotes',
    'show "a $x {{ v }} b"': '" quotes',
    "show '{{ v }}'": "' quotes",
    "show $'{{ v }}'": "$' quotes",
    'show $"{{ v }}"': '" quotes',
    "show `echo {{ v }}`": "` quotes",
    "show ${x:-{{ v }}}": "${ }",
    'show "${x#{{ v }}}"': "${ }",
    "show \"${x#'a'}\"": "variable",
    "show $(({{ v }}))": "| integer",
    "(({{ v }} > 1))": "| integer",
    "((x > $(echo {{ v }})))": "| integer",
    "show ${a[{{ v }}]}": "| integer",
    "a[{{ v }}]=1": "| integer",
    "a[1 + {{ v }}]=1": "| integer",
    "show \\{{ v }}": "right after \\",
    "show ${{ v }}": "right after $",
    "{{ v }}=1": "| variable",
    "{{ v }}[0]=1": "| variable",
    "show {{ n }}>file": "file descriptor",
    "# {{ v }}": "| comment",
    "show # {{ v }}": "| comment",
    "#{{ v | comment }}": "right after #",
    "show {{ v }}# {{ v | comment }}": "may or may not",
    "show {{ v | comment }}": "this is code",
    "show {{ v | directive }}": "this is code",
    "#SBATCH --x={{ v }}": "| directive",
    "#SBATCH --x={{ v | comment }}": "| directive",
    "#SBATCH -p {{ v | directive }}": "option of its own",
    "#SBATCH {{ v | directive }}": "option of its own",
    '#SBATCH --x="{{ v | directive }}"': "no quotes",
    "#PBS -N {{ v | comment }}": "| directive",
    "cat <<EOF\n{{ v }}\nEOF": "here-document",
    "cat <<-'EOF'\n\t{{ v | variable }}\n\tEOF": "here-document",
    "cat {{ v | heredoc }} >file": "end the line",
    "cat <{{ v | heredoc }}": "after a blank",
    "show \"$(cat {{ v | heredoc }}\n)\"": "outside of ( )",
    # commands that evaluate their arguments
    "eval {{ v }}": "second time",
    "let x={{ v }}": "second time",
    "trap {{ v }} EXIT": "second time",
    "bash -c {{ v }}": "second time",
    "bash -euc echo{{ v }}": "second time",
    "[[ {{ v }} -eq 1 ]]": "second time",
    "[[ 1 -lt {{ v }} ]]": "second time",
    "[ -v {{ v }} ]": "second time",
    "unset {{ v }}": "second time",
    "read -r {{ v }}": "second time",
    "export {{ v }}": "second time",
    "declare -i x={{ v }}": "second time",
    "printf -v {{ v }} x": "second time",
    "echo >&{{ v }}": "second time",
    # text whose meaning depends on the branch taken
    "show {% if v %}'{% endif %}{{ v }}": "different quoting",
    "show {% for x in v %}\"{% endfor %}{{ v }}": "different quoting",
    "show {% if v %}\\{% endif %}{{ v }}": "middle of a token",
    "{% if v %}a{% endif %}# it's {{ v }}": "may or may not",
    "show {{ self.b() }}\n{% block b %}\n{% endblock %}": "whole lines",
    "show ${#v} {{ v }} {# a note #}": "{% raw %}",
    "show '": "still open",
    "cat <<EOF": "still open",
    "{% macro open() %}'{% endmacro %}": "still open",
    "{% set w %}\\{% endset %}": "middle of a token",
    "{% block b %}show '{% endblock %}": "still open",
    "{% block b %}show a{% endblock %}": "middle of a line",
    "show {% block b %}\n{% endblock %}": "whole lines",
    "'{% include 'x' %}'": "whole lines",
}  # fmt: skip


@pytest.mark.parametrize("construct", REFUSED)
def test_refused_with_file_and_line(construct: str, tmp_path: Path) -> None:
    template = f"{{% macro m(v) %}}{{{{ v }}}}{{% endmacro %}}\n{construct}\n"
    with pytest.raises(HpcgenError) as error:
        rendered(tmp_path, template, v="v", n=1)
    location, _, reason = str(error.value).partition(": ")
    path, _, line = location.rpartition(":")
    assert path == str(tmp_path / "it.j2")
    assert 2 <= int(line) <= 1 + len(template.splitlines())
    assert REFUSED[construct] in reason


@pytest.mark.parametrize(
    "text",
    [
        "show lost\n",
        "{{ v }}\n",
        "{% if v %}\n{% block b %}\n{% endblock %}\n{% endif %}\n",
        '{% include "base.j2" %}\n',
    ],
)
def test_text_beside_the_blocks_of_a_child_is_refused(text: str, tmp_path: Path) -> None:
    """Jinja drops it without a word."""
    with pytest.raises(HpcgenError, match=r"it\.j2:2: never written, as the template extends"):
        rendered(tmp_path, '{% extends "base.j2" %}\n' + text, {"base.j2": "show base\n"}, v="v")


def test_a_mistake_in_an_included_file_names_that_file(tmp_path: Path) -> None:
    with pytest.raises(HpcgenError, match=r"part\.j2:3: a value within \" quotes"):
        rendered(tmp_path, '{% include "part.j2" %}\n', {"part.j2": '\n\nshow "{{ v }}"\n'}, v="v")


@pytest.mark.parametrize(
    "template",
    [
        "show '{# {{ v }} #}'\n",
        "show '{% raw %}{{ v }}{% endraw %}'\n",
        "show 'it'\\''s' \"a 'b' \\\" $(echo \"c d\") `x`\" {{ v }}\n",
        "show ${x:-\"a}b\"} {% raw %}${#x}{% endraw %} $# $$'a' $(( (1 + 2) * 3 )) $((10#$x)) {{ v }}\n",
        "case $x in\na | b) ;;\n(c) show {{ v }} ;; # it's fine\nesac\n",
        "f() { (cd /; show {{ v }}); } # don't\n",
        "cat <<EOF <<-'TWO' # it's\n'\nEOF\n\"\n\tTWO\nshow {{ v }}\n",
        "[[ $x =~ ^(a|b)$ && $x == {{ v }} ]] || show 'x'\n",
        "while read -r x; do show {{ v }}; done < <(echo {{ v }}) >{{ v }}\n",
        "bash -c 'echo \"$1\"' name {{ v }} # let it be\n",
        "local_x={{ v }} env {{ v }}\nlocal y={{ v }}\nexport Y={{ v }}\n",
        "#SBATCH --a={% if v %}b{% endif %}\n#SBATCH --a={{ v | directive }}/{{ v | directive }}\n",
        "# a{% if v %}, b{% endif %} {{ v | comment }}\nshow {{ v }}\n",
        "show a\\ {{ v }} \\\n    {{ v }}\n",
    ],
)
def test_ordinary_shell_is_accepted(template: str, tmp_path: Path) -> None:
    rendered(tmp_path, template, v="it")


FRAGMENTS = (
    *(
        "'",
        '"',
        "\\",
        "`",
        "$(",
        "(",
        ")",
        "$((",
        "((",
        "))",
        "${X:-",
        "${X#",
        "}",
        "$",
        "$$",
        "$'",
        '$"',
        "#",
    ),
    *(
        " ",
        " ",
        "\n",
        ";",
        "|",
        "&",
        ">",
        "<",
        "<<<",
        "<<EOF\n",
        "<<-'EOF'\n",
        "\nEOF\n",
        "echo ",
        "a",
        "A=",
        "a[",
    ),
    *("]", "[[ ", " ]]", " -eq ", "case a in a)", ";;", "esac", "if :; then ", "; fi", "f() ", "{ ", "; }"),
    *("eval ", "export ", "read ", "let ", "bash -c "),
    *(
        "{{ v }}",
        "{{ v }}",
        "{{ v }}",
        "{{ v }}",
        "{{ v | comment }}",
        "{{ v | heredoc }}",
        "{{ w }}",
        "{{ m(v) }}",
    ),
    *(
        "{% if true %}",
        "{% if false %}",
        "{% else %}",
        "{% endif %}",
        "{% for i in [1, 2] %}",
        "{% endfor %}",
    ),
    *("{% set w %}", "{% endset %}", "{% macro m(v) %}", "{% endmacro %}"),
)
BREAKING_OUT = (
    *("'; >canary; '", '"; >canary; "', "$(>canary)", "`>canary`", "a[$(>canary)]", "; >canary #"),
    "\\'; >canary #",
    *("x}; >canary; {", "x)); >canary; ((", ") >canary", "&& >canary", " >canary "),
)  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_no_value_runs_from_any_accepted_template(seed: int, tmp_path: Path) -> None:
    """Random shell text around values: what is not refused, and is sound bash, never runs a value.

    The template itself cannot make the file: it has no command and no name for that.
    """
    choose = random.Random(seed)
    environment = make_environment()
    scripts: list[str] = []
    while len(scripts) < 60:
        source = "".join(choose.choices(FRAGMENTS, k=choose.randint(2, 12))) + "\n"
        try:
            template = environment.from_string(source)
            scripts += [
                template.render(v=value) for value in choose.sample(BREAKING_OUT, 3) if "{{ v" in source
            ]
        except (jinja2.TemplateError, HpcgenError, RecursionError):
            continue
    for script in scripts:
        (tmp_path / "script.sh").write_text(script, encoding="utf-8")
        subprocess.run(
            ["timeout", "5", "bash", "script.sh"],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        assert not (tmp_path / CANARY).exists(), script
