"""Templates that are refused when loaded, with file and line, for any values."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgen.errors import HpcgenError
from tests.rendering.scripts import rendered

# The construct, on line 2 of a template, in block settings -> a part of the reason.
REFUSED = {
    # text joined past the quoting
    "x={{ 'a' ~ v }}": "Concat is not allowed in an expression",
    "x={{ v + 'a' }}": "Add is not allowed in an expression",
    "x={{ '%s' % v }}": "Mod is not allowed in an expression",
    "x={{ n * 2 }}": "Mul is not allowed in an expression",
    "x={{ v[1:] }}": "Slice is not allowed in an expression",
    "x={{ v.upper() }}": "Call is not allowed in an expression",
    "x={{ self.settings() }}": "Call is not allowed in an expression",
    "x={{ v | safe }}": "filter safe is not allowed here",
    "x={{ v | join(' ') }}": "filter join is not allowed here",
    "x={{ v | comment | variable }}": "Filter is not allowed in an expression",
    "{% set w = v | comment %}": "Filter is not allowed in an expression",
    "{% if v | comment %}\n{% endif %}": "Filter is not allowed in an expression",
    "{% filter comment %}{{ v }}{% endfilter %}": "FilterBlock is not allowed in a template",
    "{% autoescape false %}{{ v }}{% endautoescape %}": "is not allowed in a template",
    "{% macro m() %}{% endmacro %}": "Macro is not allowed in a template",
    "{% set w %}x{% endset %}": "AssignBlock is not allowed in a template",
    "{% include v %}": "literal string",
    "{% trans %}x{% endtrans %}": "unknown tag 'trans'",
    # places with other rules
    'x="{{ v }}"': "quoted automatically",
    "x='{{ v }}'": "quoted automatically",
    "x='\n{{ v }}\n'": "quoted automatically",
    'x="a $y {{ v }} b"': "quoted automatically",
    "x=$(({{ v }}))": "quoted automatically",
    "x=$(echo {{ v }})": "quoted automatically",
    "x=`echo {{ v }}`": "quoted automatically",
    "x=${y:-{{ v }}}": "quoted automatically",
    "x[{{ v }}]=1": "quoted automatically",
    "eval {{ v }}": "quoted automatically",
    "x=1 eval {{ v }}": "quoted automatically",
    "trap {{ v }} EXIT": "quoted automatically",
    "x=\\{{ v }}": "quoted automatically",
    "x={{ v | directive }}": "filter directive is not allowed here",
    "x={{ v | comment }}": "filter comment is not allowed here",
    "# {{ v }}": "{{ value | comment }}",
    "#SBATCH --x={{ v }}": "{{ value | directive }}",
    "{% if v %}'{% endif %}{{ v }}": "quoted automatically",
    "x='": "not closed at the end of block settings",
    "x=${#v} {# a note #}": "{% raw %}",
}  # fmt: skip


@pytest.mark.parametrize("construct", REFUSED)
def test_refused_with_file_and_line(construct: str, tmp_path: Path) -> None:
    template = f"{{% block settings %}}\n{construct}\n{{% endblock %}}\n"
    with pytest.raises(HpcgenError) as error:
        rendered(tmp_path, template, v="v", n=1)
    location, _, reason = str(error.value).partition(": ")
    path, _, line = location.rpartition(":")
    assert path == str(tmp_path / "it.j2")
    assert 1 <= int(line) <= 1 + len(template.splitlines())
    assert REFUSED[construct] in reason


INSTEAD = {
    "cd {{ run_dir }}": 'read the shell variable "$run_dir"',
    "say {{ nodes }}": 'read the shell variable "$nodes"',
    "run {{ python }} -m trainer": 'read the shell variable "${task[@]}"',
}


@pytest.mark.parametrize("block", ["site", "main"])
@pytest.mark.parametrize("construct", INSTEAD)
def test_a_value_in_shell_code_names_the_variable_to_read(construct: str, block: str, tmp_path: Path) -> None:
    template = f"{{% block {block} %}}\nlaunch() {{\n    {construct}\n}}\n{{% endblock %}}\n"
    with pytest.raises(HpcgenError) as error:
        rendered(tmp_path, template, run_dir="/run", nodes=1, python="python3")
    assert str(error.value).startswith(f"{tmp_path}/it.j2:3: ")
    assert INSTEAD[construct] in str(error.value)


@pytest.mark.parametrize("text", ["show lost\n", "{{ v }}\n", '{% include "base.j2" %}\n'])
def test_text_outside_the_blocks_of_a_child_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(HpcgenError, match=r"it\.j2:\d: Jinja drops this text"):
        rendered(tmp_path, '{% extends "base.j2" %}\n' + text, {"base.j2": "show base\n"}, v="v")


def test_logic_is_allowed_anywhere(tmp_path: Path) -> None:
    text = "{% block main %}\nmain() {\n{% if n > 0 and v is defined %}\n    begin\n{% endif %}\n}\n{% endblock %}\n"
    assert rendered(tmp_path, text, n=1, v="v") == "main() {\n    begin\n}\n"
