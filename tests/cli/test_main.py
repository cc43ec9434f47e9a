"""The help, exit statuses and error messages of the command."""

from __future__ import annotations

import importlib
import os
import pkgutil
import pty
import re
import subprocess
import sys

import click
import pytest

import hpcgen as package
from hpcgen import api
from hpcgen import cli as commands
from hpcgen.cli.main import SECTIONS, cli, main
from hpcgen.errors import JobFailed
from hpcgen.stages import STAGES
from tests.cli.command import hpcgen
from tests.runs import minimal_run, write_yaml

COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}


@pytest.fixture
def run_file(workplace):
    return write_yaml(workplace / "run.yaml", minimal_run())


def modules_of_commands():
    """The modules and packages in hpcgen/cli that define a command."""
    names = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    return [name for name in names if hasattr(importlib.import_module(f"hpcgen.cli.{name}"), "command")]


def groups(group=cli, words=()):
    """The words and the click.Group of hpcgen and of each of its command groups."""
    yield words, group
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from groups(command, (*words, name))


def summaries(text):
    """The sections of a help text after its options: heading -> command -> summary."""
    sections = {}
    for heading, rows in re.findall(r"^(\w+):\n((?:  .+\n)+)", text, re.MULTILINE):
        lines = [re.fullmatch(r"  (\S+) +(\S.*)", row) for row in rows.splitlines()]
        sections[heading] = dict(line.groups() for line in lines)
    del sections["Options"]
    return sections


def test_each_command_is_in_a_section_of_the_help():
    found = hpcgen("--help")
    assert (found.status, found.stderr) == (0, "")
    sections = summaries(found.stdout)
    assert list(sections) == ["Start", "Run", "Data", "Inspect", "Operate", "Cluster"]
    listed = [name.replace("-", "_") for section in sections.values() for name in section]
    assert sorted(listed) == sorted(modules_of_commands())


GROUPS = {" ".join(("hpcgen", *words)): (words, group) for words, group in groups()}


@pytest.mark.parametrize(("words", "group"), GROUPS.values(), ids=GROUPS)
def test_no_summary_is_cut_at_80_columns(words, group, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = hpcgen(*words, "--help")
    rows = {name: text for section in summaries(found.stdout).values() for name, text in section.items()}
    assert sorted(rows) == sorted(group.list_commands(click.Context(group)))
    for summary in rows.values():
        assert re.search(r"[^.]\.$", summary)
    assert max(map(len, found.stdout.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = hpcgen(name, "--help")
    assert found.status == 0
    assert re.match(rf"Usage: hpcgen {name} .*\n\n  {re.escape(COMMANDS[name].summary)}\n", found.stdout)
    assert max(map(len, found.stdout.splitlines())) <= 80


def test_version():
    assert hpcgen("--version").stdout == f"hpcgen, version {package.__version__}\n"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("rendr", "did you mean render?"),
        ("preset", "did you mean presets?"),
        ("eval", "use hpcgen submit evaluate"),
        ("plan", "use hpcgen layouts"),
        ("xyz", "commands are init, presets, "),
    ],
)
def test_an_unknown_command(word, hint):
    found = hpcgen(word)
    assert (found.status, found.stdout) == (2, "")
    assert f"no such command '{word}'; {hint}" in found.stderr


@pytest.mark.parametrize("stage", [stage for stage in STAGES.values() if stage.name not in COMMANDS])
def test_a_stage_in_place_of_a_command(stage):
    assert stage.start_command in hpcgen(stage.name).stderr


def test_a_command_that_is_an_option_of_another():
    found = hpcgen("checkpoint", "verify")
    assert found.status == 2
    assert "no such command 'verify'; use hpcgen checkpoint inspect --verify" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["submit", "trian"], "did you mean train?"),
        (["render", "trian"], "did you mean train?"),
        (["submit", "nccl-test"], "use hpcgen render nccl-test"),
        (["data", "status", "tokenise"], "did you mean tokenize?"),
        (["data", "status", "--missing", "prepar"], "did you mean prepare?"),
        (["validate", "trian"], "did you mean train?"),
        (["validate", "moe.yaml"], "to name the run file, use -c moe.yaml"),
        (["data", "status", "train"], "stages are download, extract, concat, tokenize, prepare"),
    ],
)
def test_an_unknown_stage(arguments, hint, run_file):
    found = hpcgen(*arguments, "-c", run_file)
    assert (found.status, found.stdout) == (2, "")
    assert found.stderr.endswith(f"; {hint}\n")


def test_an_unknown_option(run_file):
    found = hpcgen("render", "train", "-c", run_file, "--outptu", "x")
    assert (found.status, found.stdout) == (2, "")
    assert "--output" in found.stderr


def test_a_missing_run_file():
    found = hpcgen("render", "train", "-c", "nothing.yaml")
    hint = "write a run file with hpcgen init, or name another with -c"
    assert (found.status, found.stdout, found.stderr) == (2, "", f"nothing.yaml: no such file; {hint}\n")


@pytest.mark.parametrize(
    "command", ["validate", "render train", "submit train", "env", "explain", "data plan", "data status"]
)
def test_every_command_reads_run_yaml_by_default(command, workplace):
    found = hpcgen(*command.split())
    assert found.status == 2
    assert found.stderr.startswith("run.yaml: no such file; write a run file with hpcgen init")


def test_a_bug_keeps_its_traceback(run_file, monkeypatch):
    def broken(*args, **kwargs):
        raise KeyError("ours")

    monkeypatch.setattr(api, "render", broken)
    with pytest.raises(KeyError, match="ours"):
        main(["render", "train", "-c", str(run_file)])


def test_a_job_that_failed_is_status_1(run_file, monkeypatch):
    def failed(*args, **kwargs):
        raise JobFailed("stage train failed")

    monkeypatch.setattr(api, "submit", failed)
    found = hpcgen("submit", "train", "-c", run_file, "--launcher", "local")
    assert (found.status, found.stdout) == (1, "")
    assert found.stderr.endswith("stage train failed\n")


def test_an_interrupt_is_status_130(run_file, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "plan", interrupted)
    found = hpcgen("render", "train", "-c", run_file)
    assert found.status == 130
    assert "interrupted" in found.stderr


@pytest.mark.process
def test_colors_are_for_terminals_only(run_file):
    command = [sys.executable, "-m", "hpcgen", "render", "train", "-c", run_file, "--set", "name=a b"]
    piped = subprocess.run(command, capture_output=True, check=False)
    assert piped.returncode == 2
    assert b"\x1b" not in piped.stderr
    ours, theirs = pty.openpty()
    on_terminal = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=False)
    os.close(theirs)
    text = os.read(ours, 10_000)
    os.close(ours)
    assert on_terminal.returncode == 2
    assert text.startswith(b"\x1b[31m")


@pytest.mark.process
@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_holds_for_terminals_too(run_file, no_color):
    """https://no-color.org: when it is set and not empty."""
    environment = {**os.environ, "NO_COLOR": no_color}
    for arguments in (["render", "train", "-c", run_file, "--set", "name=a b"], ["topology", "show", "ndv5"]):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "hpcgen", *arguments]
        subprocess.run(command, stdout=theirs, stderr=theirs, env=environment, check=False)
        os.close(theirs)
        text = os.read(ours, 200)
        os.close(ours)
        assert (b"\x1b[" in text) == (not no_color)


@pytest.mark.process
def test_python_m_hpcgen_is_the_same_command():
    found = subprocess.run(
        [sys.executable, "-m", "hpcgen", "--version"], capture_output=True, text=True, check=False
    )
    assert found.stdout == hpcgen("--version").stdout


@pytest.mark.parametrize(
    "prefix", ["/".join(["n" * 200] * 30), "file/x", "loop/x"], ids=["long", "file", "loop"]
)
def test_a_path_that_no_file_can_have_is_one_line(workplace, prefix):
    (workplace / "file").touch()
    (workplace / "loop").symlink_to("loop")
    values = minimal_run(data={"tokenizer": {"kind": "bytes"}, "datasets": [{"prefix": prefix}]})
    found = hpcgen("data", "verify", "-c", write_yaml(workplace / "run.yaml", values))
    assert found.status in (1, 2)
    assert prefix[:50] in found.stdout + found.stderr
