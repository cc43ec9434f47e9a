"""The commit of the user's code. A hostile repository runs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from trainer.contract.code import user_code
from trainer.metrics import repository

pytestmark = pytest.mark.process


def git(directory: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=me", "-c", "user.email=me@example.com")
    done = subprocess.run(
        ("git", "-C", directory, *identity, *arguments), capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    """A repository whose subdirectory `layers` has code."""
    layers = tmp_path / "repository" / "layers"
    layers.mkdir(parents=True)
    (layers / "mine.py").write_text("import parts\n\ndef rate(iteration, optimizer):\n    return 1\n")
    (layers / "parts.py").write_text("SIZE = 1\n")
    git(layers.parent, "init", "--quiet")
    git(layers, "add", ".")
    git(layers, "commit", "--quiet", "--message=one")
    return layers


def described(layers: Path) -> repository.CodeDirectory:
    [found] = repository.directories(user_code.read([f"{layers}/mine.py:rate"]).values())
    return found


def test_the_commit_and_the_difference_from_it(committed: Path) -> None:
    found = described(committed)
    assert (found.commit, found.diff) == (git(committed, "rev-parse", "HEAD"), b"")
    (committed / "parts.py").write_text("SIZE = 2")
    (committed / "mine.py").write_text("import parts, new\n")
    (committed / "new.py").write_text("SIZE = 3\n")
    (committed / "unrelated.txt").write_text("password\n")
    found = described(committed)
    assert set(found.hashes) == {"mine.py", "new.py", "parts.py"}
    assert b"password" not in found.diff
    edited = {name: (committed / name).read_bytes() for name in found.hashes}
    git(committed, "stash", "--quiet", "--include-untracked")
    (committed / "diff").write_bytes(found.diff)
    git(committed.parent, "apply", "--directory=layers", "layers/diff")
    assert {name: (committed / name).read_bytes() for name in found.hashes} == edited


HOSTILE = """
[core]
    fsmonitor = {canary}
    pager = {canary}
    editor = {canary}
    hooksPath = {hooks}
    sshCommand = {canary}
    alternateRefsCommand = {canary}
    repositoryformatversion = 1
[extensions]
    partialClone = origin
[remote "origin"]
    url = ext::{canary} %S
    promisor = true
[protocol "ext"]
    allow = always
[diff]
    external = {canary}
[diff "evil"]
    command = {canary}
    textconv = {canary}
[filter "evil"]
    clean = {canary}
    smudge = {canary}
    process = {canary}
    required = true
[alias]
    rev-parse = !{canary}
    cat-file = !{canary}
[gpg]
    program = {canary}
"""


@pytest.mark.parametrize("missing_object", [False, True])
def test_a_hostile_repository_runs_nothing(
    committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing_object: bool
) -> None:
    canary, sung = tmp_path / "canary", tmp_path / "sung"
    canary.write_text(f"#!/bin/sh\ntouch {sung}\n")
    canary.chmod(0o755)
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for hook in ("post-index-change", "reference-transaction", "fsmonitor-watchman", "post-checkout"):
        shutil.copy(canary, hooks / hook)
    head, blob = git(committed, "rev-parse", "HEAD", "HEAD:./parts.py").split()
    top = committed.parent
    (top / ".gitattributes").write_text("* filter=evil diff=evil\n")
    with (top / ".git/config").open("a") as config:
        config.write(HOSTILE.format(canary=canary, hooks=hooks))
    if missing_object:
        (top / ".git/objects" / blob[:2] / blob[2:]).unlink()
    (committed / "parts.py").write_text("SIZE = 2\n")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(canary))
    monkeypatch.setenv("GIT_SSH_COMMAND", str(canary))
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert described(committed).commit in (head, None)
    assert missing_object or b"+SIZE = 2\n" in described(committed).diff
    assert not sung.exists()


def test_without_git_or_a_repository_there_is_no_commit(
    committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(committed, elsewhere)
    assert described(elsewhere).commit is None
    git(elsewhere, "init", "--quiet")
    assert described(elsewhere).commit is None  # nothing is committed
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    assert described(committed).commit is None
    assert set(described(committed).hashes) == {"mine.py", "parts.py"}


def test_git_that_hangs_is_given_up(committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "TIMEOUT_S", 0.2)
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert described(committed).commit is None
