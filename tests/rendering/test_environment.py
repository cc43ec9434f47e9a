"""Loading of templates: the search order, ownership and permissions, and the messages for mistakes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hpcgen.errors import HpcgenError
from hpcgen.resources import shipped
from hpcgen.slurm.rendering import environment as environment_module
from hpcgen.slurm.rendering.environment import make_environment, render_template, template_origins
from tests.rendering.scripts import rendered, write_templates

AS_ROOT = os.geteuid() == 0
NOBODY = 65534


@pytest.fixture
def shipped_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small set of templates in place of the shipped ones."""
    directory = write_templates(
        tmp_path / "shipped",
        {
            "slurm/base.j2": "{% block head %}\n# shipped\n{% endblock %}\n"
            "{% block body %}\n{% endblock %}\n",
            "slurm/train.j2": '{% extends "slurm/base.j2" %}\n{% block body %}\ntrain\n{% endblock %}\n',
        },
    )
    monkeypatch.setattr(environment_module, "shipped", lambda folder: directory)
    return directory


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return write_templates(
        tmp_path / "site",
        {
            "slurm/train.j2": '{% extends "hpcgen/slurm/train.j2" %}\n'
            "{% block head %}\n{{ super() }}# site\n{% endblock %}\n"
        },
    )


@pytest.mark.usefixtures("shipped_templates")
def test_a_site_extends_the_template_of_the_same_name(site: Path) -> None:
    environment = make_environment([site])
    assert render_template(environment, "slurm/train.j2", {}) == "# shipped\n# site\ntrain\n"
    assert template_origins(environment, "slurm/train.j2") == (
        str(site / "slurm/train.j2"),
        "shipped:slurm/train.j2",
        "shipped:slurm/base.j2",
    )


@pytest.mark.usefixtures("shipped_templates")
def test_the_first_site_directory_wins_and_may_replace_the_base(site: Path, tmp_path: Path) -> None:
    team = write_templates(tmp_path / "team", {"slurm/base.j2": "# team\n{% block body %}\n{% endblock %}\n"})
    environment = make_environment([team, site])
    assert render_template(environment, "slurm/train.j2", {}) == "# team\ntrain\n"
    assert str(team / "slurm/base.j2") in template_origins(environment, "slurm/train.j2")


@pytest.mark.usefixtures("shipped_templates")
def test_origins_list_what_is_included(site: Path) -> None:
    text = '{% include "part.j2" %}\n{% include "absent.j2" ignore missing %}\n'
    write_templates(site, {"top.j2": text, "part.j2": "part\n"})
    environment = make_environment([site])
    names = ("top.j2", "part.j2")
    assert template_origins(environment, "top.j2") == tuple(str(site / name) for name in names)
    assert render_template(environment, "top.j2", {}) == "part\n"


@pytest.mark.usefixtures("shipped_templates")
def test_a_site_template_that_extends_itself_gets_a_hint(site: Path) -> None:
    write_templates(site, {"slurm/train.j2": '{% extends "slurm/train.j2" %}\n'})
    with pytest.raises(HpcgenError, match=r'extend "hpcgen/slurm/train\.j2"'):
        render_template(make_environment([site]), "slurm/train.j2", {})


def test_every_shipped_template_passes_the_check() -> None:
    environment = make_environment()
    directory = shipped("templates")
    names = [path.relative_to(directory).as_posix() for path in directory.rglob("*.j2")]
    assert names
    for name in names:
        environment.get_template(name)


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_template_directory_must_be_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HpcgenError, match=f"{name}: the template directory does not exist"):
        make_environment([tmp_path / name])


@pytest.mark.parametrize("name", ["", "slurm", "slurm/train.j2"])
def test_world_writable_templates_are_refused(name: str, site: Path) -> None:
    path = site / name
    path.chmod(path.stat().st_mode | 0o002)
    with pytest.raises(HpcgenError) as error:
        render_template(make_environment([site]), "slurm/train.j2", {})
    assert str(path) in str(error.value)
    assert f"chmod o-w {path}" in str(error.value)


def test_a_directory_that_everybody_can_replace_is_refused(site: Path) -> None:
    site.parent.chmod(0o777)
    with pytest.raises(HpcgenError, match=f"chmod o-w {site.parent}"):
        make_environment([site])
    site.parent.chmod(0o1777)
    make_environment([site])


def test_a_link_out_of_the_site_is_as_trusted_as_its_target(site: Path, tmp_path: Path) -> None:
    elsewhere = write_templates(tmp_path / "elsewhere", {"part.j2": "part\n"})
    (site / "part.j2").symlink_to(elsewhere / "part.j2")
    assert render_template(make_environment([site]), "part.j2", {}) == "part\n"
    elsewhere.chmod(0o777)
    with pytest.raises(HpcgenError, match=f"chmod o-w {elsewhere}"):
        render_template(make_environment([site]), "part.j2", {})


@pytest.mark.usefixtures("shipped_templates")
def test_ones_own_group_writable_templates_are_trusted(site: Path) -> None:
    for path in (site, site / "slurm", site / "slurm/train.j2"):
        path.chmod(path.stat().st_mode | 0o020)
    assert "train" in render_template(make_environment([site]), "slurm/train.j2", {})


@pytest.mark.skipif(not AS_ROOT, reason="only root can give a file to another user")
@pytest.mark.usefixtures("shipped_templates")
def test_a_strangers_group_writable_template_needs_a_trusted_group(site: Path) -> None:
    path = site / "slurm/train.j2"
    path.chmod(0o664)
    os.chown(path, NOBODY, shutil._get_gid("adm") or 0)
    with pytest.raises(HpcgenError, match=r"group adm can write.*trusted_groups"):
        render_template(make_environment([site]), "slurm/train.j2", {})
    assert "train" in render_template(make_environment([site], trusted_groups=["adm"]), "slurm/train.j2", {})


@pytest.mark.usefixtures("shipped_templates")
def test_an_unreadable_template_is_not_skipped(site: Path) -> None:
    path = site / "slurm/train.j2"
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(HpcgenError, match=f"{path}: the template is a broken symbolic link"):
        render_template(make_environment([site]), "slurm/train.j2", {})
    path.unlink()
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(HpcgenError, match=f"{path}: the template is not UTF-8 at byte 5"):
        render_template(make_environment([site]), "slurm/train.j2", {})
    path.unlink()
    path.mkdir()
    with pytest.raises(HpcgenError, match=f"{path}: cannot read the template: Is a directory"):
        render_template(make_environment([site]), "slurm/train.j2", {})


@pytest.mark.skipif(AS_ROOT, reason="root reads everything")
def test_a_template_without_read_permission_is_not_skipped(site: Path) -> None:
    (site / "slurm").chmod(0)
    with pytest.raises(HpcgenError, match="cannot read the template: Permission denied"):
        render_template(make_environment([site]), "slurm/train.j2", {})


MISTAKES = {
    "{% if %}\n": r"it\.j2:2: Expected an expression",
    "x={{ nodse }}\n": r"it\.j2:2: `x=\{\{ nodse \}\}`: 'nodse' is undefined; did you mean nodes\?",
    "x={{ nodes.x }}\n": r"it\.j2:2: .*no attribute 'x'",
    "{% for x in nodes %}\n{% endfor %}\n": r"it\.j2:2: .*not iterable",
    "{% for x in nodes | items %}\n{% endfor %}\n": r"it\.j2:2: .*not a mapping",
    "x={{ name[0] }}\n": r"it\.j2:2: .*a string has no item 0",
    '{% include "absent.j2" %}\n': r"it\.j2:2: .*template 'absent\.j2' does not exist in .*",
    "\nx={{ items }}\n": r"it\.j2:3: `x=\{\{ items \}\}`: \['a'\] \(list\) cannot be written .*loop over lists",
    "x={{ line }}\n": r"it\.j2:2: `.*`: 'a\\nb' contains the unprintable character '\\n'; remove it",
    "\x1b[0m\n": r"it\.j2: line 1 of the rendered text has the control character '\\x1b'",
}


@pytest.mark.parametrize("template", MISTAKES)
def test_mistakes_are_one_message_with_file_and_line(template: str, tmp_path: Path) -> None:
    values = {"nodes": 2, "name": "x", "items": ["a"], "line": "a\nb"}
    if "nodse" in template:
        values = {"nodes": 2}
    with pytest.raises(HpcgenError, match=MISTAKES[template]):
        rendered(tmp_path, f"{{% block settings %}}\n{template}{{% endblock %}}\n", **values)


def test_a_missing_template_says_where_it_was_looked_for(site: Path) -> None:
    with pytest.raises(HpcgenError, match=rf"template 'nothing\.j2' does not exist in {site}, "):
        render_template(make_environment([site]), "nothing.j2", {})


def test_a_defect_behind_a_value_keeps_its_traceback(tmp_path: Path) -> None:
    class Broken:
        @property
        def value(self) -> str:
            raise ValueError("our own mistake")

    with pytest.raises(ValueError, match="our own mistake"):
        rendered(tmp_path, "# {{ plan.value | comment }}\n", plan=Broken())


def test_the_same_input_gives_the_same_text(tmp_path: Path) -> None:
    template = "{% block environment %}\n{% for k, v in d | items %}\nexport {{ k | variable }}={{ v }}\n{% endfor %}\n"
    template += "{% endblock %}\n"
    texts = {rendered(tmp_path / str(i), template, d={"B": "1 2", "A": "$x"}) for i in range(3)}
    assert texts == {"export B='1 2'\nexport A='$x'\n"}


def test_layout_is_what_the_template_shows(tmp_path: Path) -> None:
    template = "a\n    {% if x %}\n    # {{ x | comment }}\n    {% endif %}\n\nc\n"
    assert rendered(tmp_path, template, x="y") == "a\n    # y\n\nc\n"
