"""Commands of a user who has no access to a corpus: one line with the path and its owner, and no traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Generator
from pathlib import Path

import pytest

from hpcgen.cli.main import main
from hpcgen.config import document
from hpcgen.resources import shipped
from tests.cli.command import hpcgen
from tests.runs import minimal_run, write_yaml

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]

NOBODY = 65534
MODULES = Path("/usr/share/modules/init/bash")


@pytest.fixture
def open_path() -> Generator[Path]:
    """A directory that other users can enter. They cannot enter pytest's own, and perhaps not TMPDIR."""
    with tempfile.TemporaryDirectory(prefix="hpcgen-access-", dir="/tmp") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@pytest.fixture
def workplace(open_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`open_path` as the working directory, and as the home of the user."""
    monkeypatch.chdir(open_path)
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(open_path))
    return open_path


@pytest.fixture
def closed(workplace: Path) -> Path:
    """A directory in the working directory that other users cannot enter."""
    path = workplace / "closed"
    path.mkdir(mode=0o700)
    return path


@pytest.mark.parametrize("command", ["validate", "render train", "data plan", "data verify", "data status"])
def test_a_private_corpus_of_another_user_is_named(command: str, workplace: Path) -> None:
    (workplace / "text").mkdir()
    (workplace / "text/a.jsonl").write_text('{"text": "some words"}\n')
    corpus = workplace / "corpus"
    data = {
        "corpus": {"directory": str(corpus), "source": {"directory": "text"}},
        "tokenizer": {"kind": "bytes"},
    }
    run = write_yaml(workplace / "run.yaml", minimal_run(data=data, paths={"run_dir": "run"}))
    assert hpcgen("data", "plan", "-c", run).status == 0
    hpcgen(
        *command.split(), "-c", run
    )  # imports what the command needs: the other user may not see Python's library
    assert corpus.stat().st_mode & 0o777 == 0o700
    status, printed = as_nobody([*command.split(), "-c", str(run)], workplace / "printed")
    assert status == 2
    assert f"{corpus}/manifest.jsonl" in printed
    assert "Permission denied" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cluster", "closed/mine.yaml"),
        ("data.datasets", "[{prefix: closed/pair, weight: 1}]"),
        ("data.corpus.directory", "closed/corpus"),
        ("checkpoint.load", "closed/checkpoints"),
    ],
)
def test_what_a_closed_directory_holds_is_not_said_to_be_missing(
    key: str, value: str, workplace: Path, closed: Path
) -> None:
    data: dict[str, object] = {"mock": True}
    if key == "data.corpus.directory":
        data = {
            "corpus": {"directory": "made", "source": {"directory": "text"}},
            "tokenizer": {"kind": "bytes"},
        }
    elif key == "data.datasets":
        data = {}
    run = write_yaml(workplace / "run.yaml", minimal_run(data=data, paths={"run_dir": "run"}))
    words = ["validate", "-c", str(run), "--set", f"{key}={value}"]
    hpcgen(*words)  # imports what the command needs
    status, printed = as_nobody(words, workplace / "printed")
    assert status == 2, printed
    assert f"Permission denied: ask root, who owns {closed}, for access" in printed
    assert "does not exist" not in printed
    assert "no such file" not in printed


@pytest.mark.parametrize(
    ("words", "status"), [("cluster show closed/mine.yaml", 2), ("validate -c program.yaml", 0)]
)
def test_profiles_and_scripts_in_a_closed_directory_are_not_said_to_be_missing(
    words: str, status: int, workplace: Path, closed: Path
) -> None:
    values = {"name": "p", "cluster": "local", "paths": {"run_dir": "run"}}
    write_yaml(workplace / "program.yaml", {**values, "program": {"command": ["closed/train.py"]}})
    hpcgen(*words.split())  # imports what the command needs
    ended, printed = as_nobody(words.split(), workplace / "printed")
    assert (ended, "does not exist" in printed) == (status, False), printed
    assert f"Permission denied: ask root, who owns {closed}, for access" in printed


@pytest.mark.parametrize(
    ("mode", "of_nobody", "hint"),
    [
        (0o700, False, "cannot be read; ask root, who owns it, for access"),
        (0o300, True, "cannot be read; chmod u+rx {path}"),
        (0o777, False, "all users can write to it; ask root, who owns it, to run chmod o-w {path}"),
        (0o777, True, "all users can write to it; run chmod o-w {path}"),
    ],
)
def test_only_the_owner_of_a_directory_is_told_to_change_its_mode(
    mode: int, of_nobody: bool, hint: str, open_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(open_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(open_path))
    path = open_path / "hpcgen/clusters"
    write_yaml(path / "mine.yaml", {"extends": "local"})
    hpcgen("cluster", "check", "mine")  # imports what the command needs
    path.chmod(mode)
    os.chown(path, NOBODY if of_nobody else 0, -1)
    status, printed = as_nobody(["cluster", "check", "mine"], open_path / "printed")
    assert (status, hint.format(path=path) in printed) == (2, True), printed


@pytest.fixture
def site_of_lp(open_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site's directory that belongs to neither root nor the user."""
    site = open_path / "site"
    write_yaml(site / "clusters/orion.yaml", {"extends": "uni"})
    write_yaml(site / "clusters/uni.yaml", {"extends": "local"})
    write_yaml(site / "presets/ours.yaml", {**document.read(shipped("presets") / "tiny.yaml").values})
    write_yaml(site / "defaults.yaml", {"cluster": "orion", "account": "common"})
    home = open_path / "home"
    home.mkdir()
    for path in (site, *site.rglob("*"), home):
        os.chown(path, NOBODY if path == home else 7, -1)
    monkeypatch.chdir(home)
    monkeypatch.setenv("HPCGEN_SITE", str(site))
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(home))
    return site


def test_a_user_needs_no_rights_in_the_sites_directory(site_of_lp: Path, open_path: Path) -> None:
    words = "init {} --preset ours --run-dir {}"
    hpcgen(*words.format("root.yaml", "root").split())  # imports what the commands need
    for command in ("validate", "render node-health"):
        hpcgen(*command.split(), "-c", "root.yaml")
    status, printed = as_nobody(words.format("run.yaml", "nobody").split(), open_path / "printed")
    assert status == 0, printed
    status, printed = as_nobody(["render", "node-health", "-c", "run.yaml"], open_path / "printed")
    assert status == 0, printed
    assert "#SBATCH --account=common\n" in printed
    assert f"# profile: {site_of_lp}/clusters/orion.yaml, {site_of_lp}/clusters/uni.yaml, shipped:" in printed
    site_of_lp.chmod(0o775)
    status, printed = as_nobody(["validate", "-c", "run.yaml"], open_path / "printed")
    assert status == 2
    assert f"ask lp, who owns it, to run chmod g-w {site_of_lp}" in printed


@pytest.mark.skipif(not MODULES.is_file(), reason="environment-modules is not installed")
def test_the_module_file_of_the_guide_sets_the_site(open_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/admins.md").read_text(encoding="utf-8")
    [indented] = re.findall(r"```tcl\n(.*?) *```", guide, re.DOTALL)
    module = open_path / "modulefiles/hpcgen/0.2.0"
    module.parent.mkdir(parents=True)
    module.write_text(textwrap.dedent(indented))
    script = f"source {MODULES}; module use {open_path}/modulefiles; module load hpcgen || exit 1; "
    script += "echo $HPCGEN_SITE ${PATH%%:*}; module unload hpcgen; echo ${HPCGEN_SITE-gone}"
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(open_path)}
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["/sw/hpcgen/site", "/sw/hpcgen/0.2.0/bin", "gone"], done.stderr


def as_nobody(arguments: list[str], output: Path) -> tuple[int, str]:
    """Runs hpcgen in a fork of this process that is another user. Returns the status and what it printed."""
    output.touch()
    if (child := os.fork()) == 0:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        status = 1
        try:
            main(arguments)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output.read_text()
