"""A planted token is in nothing that hpcgen shows or packs. For notifications, see tests/slurm/test_notify.py."""

from __future__ import annotations

import json
import stat
import tarfile
from pathlib import Path

import pytest

from hpcgen.api import plan
from hpcgen.config.loader import load_run
from hpcgen.runs import resuming
from hpcgen.runs.attempts import read_attempts
from hpcgen.runs.failed import failed_text
from hpcgen.runs.latest import NOTHING
from hpcgen.runs.secrets import secrets_of
from hpcgen.runs.state import state_of
from hpcgen.slurm.submission import submission_file
from tests.cli.command import hpcgen
from tests.logs.logged_run import write_failed_run
from tests.runs import minimal_run, write_yaml

pytestmark = pytest.mark.process

TOKEN = "Zq7" * 12
OWN_FORM = "correct horse battery"
"""A secret that only its variable shows to be one."""
NAMED = "zebra-horse-42"
"""A secret that only `secrets` of the run file shows to be one."""
KEY = "\n".join(["MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSj", TOKEN, "q83vEjRWeJCrze8="])
PEM = f"-----BEGIN PRIVATE KEY-----\n{KEY}\n-----END PRIVATE KEY-----"
PLANTED = (
    f"requests.exceptions.HTTPError: 401 for https://me:{TOKEN}@example.org/a?sig={TOKEN}",
    f"environment: {{'HF_TOKEN': 'hf_{TOKEN}', 'WANDB_API_KEY': '{TOKEN}'}}",
    f"Authorization: Bearer {TOKEN}, {OWN_FORM}",
    f"assembled the passphrase: {NAMED}",
    *PEM.splitlines(),
)
HIDDEN = (TOKEN, OWN_FORM, NAMED, *KEY.splitlines())


@pytest.fixture
def leaky_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a failed run whose files have secrets in all places."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SITE_TOKEN", OWN_FORM)
    monkeypatch.setenv("LAB_PASSPHRASE", NAMED)
    run = write_failed_run(tmp_path / "gpt")
    text = "\n".join(PLANTED)
    log = run / "train-7.log"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join((*lines[:-3], *(f"2: {line}\n" for line in PLANTED), *lines[-3:])))
    (run / "FAILED").write_text(text)
    with (run / "jobs/7/events.jsonl").open("a") as events:
        end = {"event": "end", "time": 2e9, "job": "7", "restart": 0, "stage": "train"}
        events.write(
            json.dumps({**end, "verdict": "failed", "status": "1", "reason": text.replace("\n", " ")}) + "\n"
        )
    (run / "jobs/7/submission.json").write_text(json.dumps({"secrets": ["LAB_PASSPHRASE"]}))
    (run / "jobs/7/trainer.json").write_text(json.dumps({"secret": TOKEN, "texts": PLANTED}))
    (run / "jobs/7/nodes-0").mkdir()
    (run / "jobs/7/nodes-0/n1-host.json").write_text(json.dumps({"said": text}))
    (run / "stacks").mkdir()
    (run / "stacks/rank-0.json").write_text(json.dumps({"text": text}))
    (run / "metrics.jsonl").write_text(
        json.dumps({"event": "stop", "iteration": 1, "time": 2e9, "reason": text}) + "\n"
    )
    (run / "checkpoints").mkdir()
    (run / "checkpoints/weights.distcp").write_bytes(b"\0" * 100)
    return run


@pytest.mark.parametrize(
    "command",
    [["status"], ["status", "--json"], ["logs"], ["logs", "--json"], ["doctor"], ["doctor", "--json"]],
    ids=" ".join,
)
def test_no_view_shows_a_token(leaky_run: Path, command: list[str]) -> None:
    found = hpcgen(command[0], leaky_run, *command[1:])
    shown = found.stdout + found.stderr
    assert [each for each in HIDDEN if each in shown] == []
    assert found.stdout


def test_jobs_record_the_names_of_secrets_and_views_hide_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_PASSPHRASE", NAMED)
    file = write_yaml(tmp_path / "run.yaml", minimal_run(secrets=["LAB_PASSPHRASE"]))
    planned = plan(load_run(file), ["train"])
    job = tmp_path / "run/jobs/7"
    job.mkdir(parents=True)
    for name, text in submission_file(planned, planned.stages["train"]).items():
        assert NAMED not in text
        (job / name).write_text(text)
    assert NAMED in secrets_of(tmp_path / "run")
    (job / "submission.json").write_text('{"secrets": 7}')  # damaged, or of another version
    assert NAMED not in secrets_of(tmp_path / "run")


def test_the_reader_of_failed_hides_secrets(leaky_run: Path) -> None:
    """hpcgen sweep, its results, resume and report show this text."""
    text = failed_text(leaky_run)
    assert text
    state, word = state_of(leaky_run, NOTHING, now=2e9)
    assert state == "failed"
    assert word
    shown = (text, word, resuming.failure(leaky_run))
    assert [each for each in HIDDEN for one in shown if each in one] == []


def test_the_reader_of_events_hides_what_looks_like_a_secret(leaky_run: Path) -> None:
    """Events of a private run can have it. `hpcgen stop` prints the reason."""
    reason = read_attempts(leaky_run)[-1].reason
    assert "[redacted]" in reason
    assert TOKEN not in reason


def test_a_bundle_has_what_shows_the_failure_and_no_secret(leaky_run: Path) -> None:
    found = hpcgen("bundle", leaky_run, "-o", "sent.tar.gz")
    assert found.status == 0, found.stderr
    assert "\n  checkpoints: data, checkpoints and other directories are never packed\n" in found.stdout
    packed = Path("sent.tar.gz")
    assert stat.S_IMODE(packed.stat().st_mode) == 0o600
    with tarfile.open(packed) as archive:
        files = {
            member.name.removeprefix("gpt-bundle/"): archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive
        }
    for name, content in files.items():
        text = f"{name} {content.decode()}"
        assert [each for each in HIDDEN if each in text] == [], name
    expected = ("FAILED", "metrics.jsonl", "stacks/rank-0.json", "logs/train-7-restart-0-0.log")
    of_the_job = ("events.jsonl", "submission.json", "trainer.json", "nodes-0/n1-host.json")
    assert {"contents.json", "summary.json", *expected, *(f"jobs/7/{name}" for name in of_the_job)} == set(
        files
    )
    assert b"example.org" in files["logs/train-7-restart-0-0.log"]
    contents = json.loads(files["contents.json"])
    assert {each["name"] for each in contents["files"]} == set(files) - {"contents.json"}
    [failure] = json.loads(files["summary.json"])["failures"].values()
    assert failure["kind"]


def test_a_bundle_has_the_only_line_of_a_log_and_no_torn_one(leaky_run: Path) -> None:
    (leaky_run / "train-7.log").write_text("slurmstepd: error: no room for the job\n")
    line = "a line\n"
    (leaky_run / "heartbeat").write_text(f"{TOKEN}\n" + line * ((1 << 20) // len(line) - 1))
    assert hpcgen("bundle", leaky_run).status == 0
    with tarfile.open("gpt-bundle.tar.gz") as archive:
        log, beats = (
            archive.extractfile(f"gpt-bundle/{name}").read().decode()  # type: ignore[union-attr]
            for name in ("logs/train-7-restart-0-0.log", "heartbeat")
        )
    assert log == "slurmstepd: error: no room for the job\n"
    assert set(beats.splitlines()) == {"a line"}


def test_a_bundle_of_a_damaged_run_says_what_it_leaves_out(leaky_run: Path) -> None:
    (leaky_run / "FAILED").unlink()
    (leaky_run / "FAILED").mkdir()
    (leaky_run / "jobs/7/core").write_bytes(b"\x7fELF\0\0")
    (leaky_run / "jobs/7/a b").write_text("x")
    (leaky_run / "heartbeat").write_text("x" * (3 << 20))
    found = hpcgen("bundle", leaky_run)
    assert found.status == 0, found.stderr
    for line in ("FAILED: ", "jobs/7/core: not a text file", "jobs/7/a b: not a text file of a run"):
        assert f"\n  {line}" in found.stdout
    assert Path("gpt-bundle.tar.gz").stat().st_size < 1 << 20


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    found = hpcgen("bundle", tmp_path / "missing", "-o", tmp_path / "x.tar.gz")
    assert (found.status, (tmp_path / "x.tar.gz").exists()) == (2, False)
    assert "is not a directory" in found.stderr
