"""The `hpcgen checkpoint` commands. None of them removes a checkpoint that a run still needs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import Ended, hpcgen, listing
from tests.recorded_run import start, step, write_checkpoint, write_run
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import COMPLETE, METADATA, PINNED, STARTED, TRACKER


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that keeps the last 2, and every 500th; it has 6."""
    run = write_run(tmp_path / "run", [start(), step(1)])
    for iteration in (100, 300, 500, 600, 700, 800):
        write_checkpoint(run / "checkpoints", iteration)
    return run


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


def states(run: Path) -> dict[int, tuple[str, str | None]]:
    rows = json.loads(hpcgen("checkpoint", "list", run, "--json").stdout)
    return {row["iteration"]: (row["state"], row["kept_by"]) for row in rows}


def damage(checkpoint: Path) -> None:
    """Other bytes of the same length."""
    file = checkpoint / "__0_0.distcp"
    file.write_bytes(bytes(len(file.read_bytes())))


def test_list_shows_which_checkpoints_are_kept_and_why(run: Path) -> None:
    hpcgen("checkpoint", "pin", run / "checkpoints/iter_0000100")
    assert states(run) == {
        800: ("complete", "the newest"),
        700: ("complete", "keep_last = 2"),
        600: ("complete", None),
        500: ("complete", "keep_every = 500"),
        300: ("complete", None),
        100: ("complete", "pinned"),
    }
    ended = hpcgen("checkpoint", "list", run)
    assert ended.status == 0
    assert "\x1b" not in ended.stdout
    lines = ended.stdout.splitlines()
    assert lines[0].split() == ["checkpoint", "iteration", "complete", "since", "size", "state", "kept", "by"]
    assert lines[1] == "iter_0000800        800  2025-10-09 09:20:00 UTC  46 B  complete  the newest"
    assert lines[3].endswith("complete  nothing (prune removes it)")
    assert ended.stderr.endswith("keeps the newest 2, multiples of 500, and pinned ones\n")
    assert hpcgen("checkpoint", "list", run / "checkpoints") == ended


def test_checkpoints_to_be_evaluated_are_listed_and_kept(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [start(), step(1)], evaluation_every=300)
    for iteration in (100, 300, 600, 700, 800):
        write_checkpoint(run / "checkpoints", iteration)
    (run / "checkpoints/iter_0000900").mkdir()
    (run / "evaluation").mkdir()
    for name in ("iter_0000600.json", "iter_0000600.samples.jsonl", "queued"):
        (run / "evaluation" / name).touch()
    rows = json.loads(hpcgen("checkpoint", "list", run, "--json").stdout)
    assert {row["iteration"]: (row["kept_by"], row["evaluation"]) for row in rows} == {
        900: ("not complete", None),
        800: ("the newest", None),
        700: ("keep_last = 2", None),
        600: (None, "evaluated"),
        300: ("to be evaluated", "to be evaluated"),
        100: (None, None),
    }
    shown = hpcgen("checkpoint", "list", run / "checkpoints")
    assert shown.stdout.splitlines()[0].endswith("kept by                     evaluation")
    assert "nothing (prune removes it)  evaluated\n" in shown.stdout
    assert "to be evaluated             to be evaluated\n" in shown.stdout
    assert ", multiples of 300 until they are evaluated, and pinned ones" in shown.stderr
    hpcgen("checkpoint", "prune", run)
    assert names(run / "checkpoints") == [f"iter_0000{n}00" for n in (3, 7, 8, 9)]


def test_list_shows_incomplete_checkpoints(run: Path) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "iter_0000900").mkdir()
    (checkpoints / "iter_0000900" / STARTED).write_text("2026-01-01 10:00:00+0000 on ndv5-001\n")
    (checkpoints / "iter_0000800/__0_0.distcp").write_bytes(b"wei")
    (checkpoints / "iter_0000700" / COMPLETE).write_text("{}")
    checkpoint_files.set_aside(checkpoints / "iter_0000600")
    foreign = checkpoints / "iter_0000050"
    foreign.mkdir()
    (foreign / METADATA).write_text("{}")
    assert states(run) == {
        900: ("incomplete", "not complete"),
        800: ("damaged", "not complete"),
        700: ("damaged", "not complete"),
        600: ("set aside", "set aside"),
        500: ("complete", "the newest"),
        300: ("complete", "keep_last = 2"),
        100: ("complete", None),
        50: ("Megatron-LM's", "written by Megatron-LM"),
    }
    said = hpcgen("checkpoint", "list", run).stdout
    assert (
        "    the save started 2026-01-01 10:00:00+0000 on ndv5-001 was interrupted or is still running\n"
        in said
    )
    assert "    __0_0.distcp has 3 bytes, not 7\n" in said
    assert "    COMPLETE was changed after it was written: its checksum differs\n" in said
    assert "iter_0000600.broken" in said


def test_inspect_shows_experts_and_latent_attention(run: Path) -> None:
    checkpoints = run / "checkpoints"
    shape = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
    experts = {"num_moe_experts": 8, "moe_router_topk": 2, "multi_latent_attention": True, "kv_lora_rank": 32}
    layout = {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
    }
    write_checkpoint(checkpoints, 900, model=shape | experts, layout=layout)
    write_checkpoint(checkpoints, 950, model=shape | {"moe_router_topk": 2}, layout=layout)
    lines = hpcgen("checkpoint", "inspect", checkpoints / "iter_0000900").stdout.splitlines()
    assert "written by  16 ranks (TP 2 x EP 4 x ETP 1), bf16" in lines
    latent = "multi_latent_attention true, kv_lora_rank 32"
    assert any(line.endswith(f"{latent}, num_moe_experts 8, moe_router_topk 2") for line in lines)
    dense = hpcgen("checkpoint", "inspect", checkpoints / "iter_0000950").stdout
    assert "EP" not in dense
    assert "moe_" not in dense


def test_inspect_shows_the_record(run: Path) -> None:
    ended = hpcgen("checkpoint", "inspect", run)
    assert ended.status == 0
    for line in (
        f"checkpoint  {run}/checkpoints/iter_0000800",
        "iteration   800 of 1,000",
        "complete    2025-10-09 09:20:00 UTC",
        "consumed    204,800 samples, 419,430,400 tokens",
        "written by  16 ranks (TP 2 x PP 1 x CP 1), bf16",
        "model       num_layers 24, hidden_size 2048, num_attention_heads 16, seq_length 2048",
        "optimizer   lr 0.0003, lr_decay_style cosine, weight_decay 0.1",
        "data        /data/corpus",
    ):
        assert line in ended.stdout.splitlines()
    assert ended.stderr == "ok: every file has its recorded size (--verify also compares hashes)\n"
    found = json.loads(hpcgen("checkpoint", "inspect", run / "checkpoints/iter_0000300", "--json").stdout)
    assert (found["iteration"], found["problems"], found["verified"]) == (300, [], False)
    assert found["record"]["files"]["__0_0.distcp"]["bytes"] == 7


def test_inspect_shows_what_was_read_of_each_pair(tmp_path: Path) -> None:
    file = {"size": 10, "sha256": None, "modified_ns": 1}
    stream = {
        "pair": {"prefix": "/data/code", "idx": file, "bin": file},
        "documents": {"first": 0, "end": 9, "tokens": 409_600},
        "seq_length": 2048,
        "orders": [{"seed": 1234, "num_samples": 300}],
        "read": 150,
    }
    phase = {"first": 0, "split": None, "portions": [{"stream": 0, "weight": 1.0, "start": 0}]}
    path = write_checkpoint(tmp_path, 100, sampling={"streams": [stream], "phases": [phase]})
    line = "pair        /data/code: 150 samples of 2,048 tokens (0.75 epochs)"
    assert line in hpcgen("checkpoint", "inspect", path).stdout.splitlines()
    for number, damaged in enumerate(
        (
            {"streams": [stream | {"read": -1}], "phases": []},
            {"streams": [stream | {"orders": [{"seed": 1}]}], "phases": []},
            {"streams": [], "phases": [phase]},
            {"streams": [stream]},
        )
    ):
        path = write_checkpoint(tmp_path, 200 + number, sampling=damaged)
        ended = hpcgen("checkpoint", "inspect", path)
        assert ended.status == 1
        assert "COMPLETE is not a record of this trainer: sampling" in ended.stdout


@pytest.mark.parametrize(
    ("dataset", "line"),
    [
        ({"first": 5600, "length": 10_000, "state": None}, "20,000 samples of 10,000 (2.00 epochs)"),
        ({"first": 0, "length": None, "state": {"place": 3}}, "25,600 samples of a stream, with its state"),
        ({"first": 0, "length": None, "state": None}, "25,600 samples of a stream"),
        ({"first": 0, "length": "all", "state": None}, None),
        ({"first": 0, "length": None, "state": [3]}, None),
    ],
)
def test_inspect_shows_the_position_in_own_data(dataset: dict, line: str | None, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 100, sampling=None, dataset=dataset)
    ended = hpcgen("checkpoint", "inspect", path)
    if line is None:
        assert "dataset." in ended.stdout + ended.stderr
    else:
        assert f"own data    {line}" in ended.stdout.splitlines()


def test_verify_reads_every_byte(run: Path) -> None:
    checkpoint = run / "checkpoints/iter_0000800"
    ended = hpcgen("checkpoint", "inspect", checkpoint, "--verify")
    assert ended.status == 0
    assert ended.stderr.endswith("ok: every file matches its recorded hash\n")
    damage(checkpoint)
    assert hpcgen("checkpoint", "inspect", checkpoint).status == 0
    ended = hpcgen("checkpoint", "inspect", checkpoint, "--verify")
    assert ended.status == 1
    assert ended.stdout.endswith("__0_0.distcp was changed after it was written: its SHA-256 differs\n")
    (checkpoint / "metadata.json").unlink()
    ended = hpcgen("checkpoint", "inspect", checkpoint, "--verify", "--json")
    assert ended.status == 1
    assert sorted(json.loads(ended.stdout)["problems"]) == [
        "__0_0.distcp was changed after it was written: its SHA-256 differs",
        "metadata.json is missing",
    ]


def test_inspect_one_that_was_set_aside(run: Path) -> None:
    checkpoint = run / "checkpoints/iter_0000800"
    (checkpoint / "__0_0.distcp").unlink()
    ended = hpcgen("checkpoint", "inspect", checkpoint_files.set_aside(checkpoint))
    assert ended.status == 1
    assert ended.stdout.endswith("__0_0.distcp is missing\n")


def test_a_later_format_is_reported(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, 100, format=checkpoint_files.FORMAT + 1, model=None, time=None)
    ended = hpcgen("checkpoint", "inspect", checkpoint)
    assert ended.status == 0
    assert ended.stdout.splitlines()[-1].startswith("format      2, written by a newer trainer; ")
    assert states(tmp_path) == {100: ("complete", "the newest")}


FILE = {"bytes": 1, "sha256": "0" * 64}
ADAPTERS = {"rank": 4, "alpha": 8.0}
CONFIGURED = {"seq_length": 8, "train_iters": 8, "global_batch_size": 8, "micro_batch_size": 8}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"files": None}, "files is None, not an object"),
        ({"files": []}, "files is [], not an object"),
        ({"files": {"x": 3}}, "files['x'] is 3, not an object"),
        ({"files": {"x": {}}}, "files['x'].bytes is None, not a non-negative integer"),
        ({"files": {"x": FILE | {"bytes": -1}}}, "files['x'].bytes is -1, not a non-negative integer"),
        ({"files": {"../x": FILE}}, "files names '../x', which is not a valid file name in a checkpoint"),
        ({"time": "x"}, "time is 'x', not a time in Unix seconds"),
        ({"time": 1e300}, "time is 1e+300, not a time in Unix seconds"),
        ({"time": float("nan")}, "time is nan, not a time in Unix seconds"),
        ({"world_size": True}, "world_size is True, not a non-negative integer"),
        ({"format": None}, "format is None, not a non-negative integer"),
        ({"model": None}, "model is None, not an object"),
        ({"model": {}}, "model.seq_length is None, not a non-negative integer"),
        ({"training": CONFIGURED | {"rampup_batch_size": 3}}, "training.rampup_batch_size is 3, not a list"),
        ({"layout": 3}, "layout is 3, not an object"),
        ({"consumed_samples": 10**4000}, f"consumed_samples is {str(10**4000)[:37]}..., not a non-negative"),
        ({"versions": {"torch": []}}, "versions.torch is [], not a string"),
        ({"data": {"datasets": [3]}}, "data.datasets[...] is 3, not an object"),
        ({"lora": "x"}, "lora is 'x', not an object"),
        ({"lora": {"rank": 4}}, "lora.alpha is None, not a number"),
        ({"lora": ADAPTERS}, "origins.base is None, not an object"),
        ({"lora": ADAPTERS, "origins": {"base": {"path": 3}}}, "origins.base.path is 3, not a string"),
    ],
)
def test_a_record_of_odd_values_is_damaged_and_the_others_are_as_they_are(
    record: dict[str, object], reason: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, 700)
    odd = write_checkpoint(tmp_path, 800, **record)
    assert states(tmp_path) == {800: ("damaged", "not complete"), 700: ("complete", "the newest")}
    assert (
        f"    COMPLETE is not a record of this trainer: {reason}"
        in hpcgen("checkpoint", "list", tmp_path).stdout
    )
    for options in ((), ("--json",), ("--verify",)):
        ended = hpcgen("checkpoint", "inspect", odd, *options)
        assert (ended.status, ended.stderr) == (1, "")
        assert json.dumps(reason)[1:-1] in ended.stdout


class _Planted:
    """A pickle that runs a command where it is loaded as pickle loads."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch planted",)


def test_an_index_from_anywhere_runs_nothing(run: Path) -> None:
    index = run / "checkpoints/iter_0000800/.metadata"
    for content in (pickle.dumps(_Planted()), b"not a pickle", b""):
        index.write_bytes(content)
        ended = hpcgen("checkpoint", "inspect", run, "--tensors")
        assert (ended.status, ended.stdout) == (2, "")
        reason = "names posix.system" if b"system" in content else "not a torch_dist index"
        assert reason in ended.stderr
    assert not Path("planted").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (pickle.dumps(_Planted()), ".metadata names posix.system, which no checkpoint's index needs."),
        (b"not a pickle", ".metadata cannot be read: not a torch_dist index (UnpicklingError:"),
        (b"", ".metadata cannot be read: not a torch_dist index (EOFError:"),
    ],
)
@pytest.mark.parametrize("is_foreign", [False, True], ids=["own", "foreign"])
def test_a_checkpoint_is_not_ok_if_the_trainer_cannot_read_its_index(
    content: bytes, problem: str, is_foreign: bool, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path, 700)
    newest = write_checkpoint(tmp_path, 800)
    if is_foreign:
        (newest / COMPLETE).unlink()
        (newest / STARTED).unlink()
    (newest / ".metadata").write_bytes(content)
    kept_by = "written by Megatron-LM" if is_foreign else "not complete"
    assert states(tmp_path) == {800: ("damaged", kept_by), 700: ("complete", "the newest")}
    shown = hpcgen("checkpoint", "list", tmp_path)
    assert f"\n    {problem}" in shown.stdout
    assert f"checkpoint.load: {checkpoint}\n" in shown.stderr
    for options in ((), ("--json",), ("--verify",)):
        ended = hpcgen("checkpoint", "inspect", newest, *options)
        assert ended.status == 1
        assert problem in ended.stdout
        assert "ok" not in ended.stderr
    hpcgen("checkpoint", "prune", tmp_path, "--keep-last", "1")
    assert names(tmp_path) == ["iter_0000700", "iter_0000800"]


def test_prune_keeps_what_the_run_keeps(run: Path) -> None:
    before = listing(run)
    would = hpcgen("checkpoint", "prune", run, "--dry-run")
    assert would.stdout == "".join(
        f"would remove {run}/checkpoints/iter_{iteration:07d} (46 B)\n" for iteration in (100, 300, 600)
    )
    assert would.stderr == (
        f"{run}/checkpoints: keeps the newest 2, multiples of 500, and pinned ones "
        f"(from {run}/jobs/4711/trainer.json)\n"
        "would remove 3 checkpoints, 138 B\n"
    )
    assert listing(run) == before
    ended = hpcgen("checkpoint", "prune", run)
    assert ended.stdout == would.stdout.replace("would remove", "removed")
    assert names(run / "checkpoints") == ["iter_0000500", "iter_0000700", "iter_0000800"]
    assert (run / "checkpoints" / TRACKER).read_text() == "800"
    assert "\nremoved 0 checkpoints" in hpcgen("checkpoint", "prune", run).stderr


def test_prune_by_other_rules(run: Path) -> None:
    ended = hpcgen("checkpoint", "prune", run, "--keep-last", 1, "--keep-every", 300, "--dry-run", "--json")
    removed = json.loads(ended.stdout)
    assert removed["removed"] is False
    assert [each["iteration"] for each in removed["checkpoints"]] == [100, 500, 700]
    hpcgen("checkpoint", "prune", run, "--keep-last", 1, "--keep-every", 0)
    assert names(run / "checkpoints") == ["iter_0000800"]


def test_prune_names_where_each_rule_is_from(run: Path) -> None:
    def rule(*options: object) -> str:
        said = hpcgen("checkpoint", "prune", run, *options, "--dry-run").stderr.splitlines()[0]
        return said.split(": keeps ", 1)[1]

    file = run / "jobs/4711/trainer.json"
    assert rule("--keep-last", 1) == (
        f"the newest one, multiples of 500, and pinned ones (--keep-last 1, checkpoint.keep_every of {file})"
    )
    assert rule("--keep-every", 300) == (
        f"the newest 2, multiples of 300, and pinned ones (checkpoint.keep_last of {file}, --keep-every 300)"
    )
    assert rule("--keep-last", 3, "--keep-every", 0) == (
        "the newest 3, and pinned ones (--keep-last 3, --keep-every 0)"
    )
    shutil.rmtree(run / "jobs")
    assert rule("--keep-last", 3) == "the newest 3, and pinned ones (--keep-last 3)"


def test_prune_never_removes_the_newest_complete_or_a_pinned_checkpoint(run: Path) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "iter_0000800/__0_0.distcp").write_bytes(b"cut")
    (checkpoints / "iter_0000900").mkdir()
    (checkpoints / "iter_0000900" / STARTED).touch()
    hpcgen("checkpoint", "pin", checkpoints / "iter_0000300")
    hpcgen("checkpoint", "prune", run, "--keep-last", 1, "--keep-every", 0)
    assert names(checkpoints) == ["iter_0000300", "iter_0000700", "iter_0000800", "iter_0000900"]
    hpcgen("checkpoint", "unpin", checkpoints / "iter_0000300")
    hpcgen("checkpoint", "prune", run, "--keep-last", 1, "--keep-every", 0)
    assert names(checkpoints) == ["iter_0000700", "iter_0000800", "iter_0000900"]


def test_prune_without_a_rule_removes_nothing(run: Path) -> None:
    shutil.rmtree(run / "jobs")
    ended = hpcgen("checkpoint", "prune", run)
    assert (ended.status, ended.stdout) == (2, "")
    assert ended.stderr.endswith("checkpoint.keep_last is not set, so all are kept; add --keep-last N\n")
    assert len(names(run / "checkpoints")) == 6


def test_prune_ignores_the_rules_of_other_runs(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "run" / "archive"
    (run / "checkpoints").rename(elsewhere)
    ended = hpcgen("checkpoint", "prune", elsewhere)
    assert (ended.status, ended.stdout) == (2, "")
    assert "checkpoint.keep_last is not set, so all are kept" in ended.stderr
    elsewhere.rename(run / "checkpoints")
    said = hpcgen("checkpoint", "prune", run / "checkpoints", "--dry-run").stderr
    assert f"(from {run}/jobs/4711/trainer.json)" in said


def test_prune_of_broken_ones(run: Path) -> None:
    checkpoints = run / "checkpoints"
    aside = [checkpoint_files.set_aside(checkpoints / f"iter_{number:07d}") for number in (600, 800)]
    before = names(checkpoints)
    would = hpcgen("checkpoint", "prune", run, "--broken", "--dry-run")
    assert [line.split(" (")[0] for line in would.stdout.splitlines()] == [
        f"would remove {path}" for path in reversed(aside)
    ]
    assert names(checkpoints) == before
    assert hpcgen("checkpoint", "prune", run, "--broken").status == 0
    assert names(checkpoints) == [f"iter_{number:07d}" for number in (100, 300, 500, 700)]
    assert hpcgen("checkpoint", "prune", run, "--broken", "--keep-last", 1).status == 2


def test_a_prune_that_is_killed_leaves_nothing_that_looks_like_a_checkpoint(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    assert hpcgen("checkpoint", "prune", run).status == 130
    monkeypatch.undo()
    assert 100 not in states(run)
    assert all(state == "complete" for state, _ in states(run).values())


def test_only_complete_checkpoints_can_be_pinned(run: Path) -> None:
    checkpoint = run / "checkpoints/iter_0000800"
    assert hpcgen("checkpoint", "pin", checkpoint).stderr == f"pinned {checkpoint}\n"
    assert (checkpoint / PINNED).exists()
    assert hpcgen("checkpoint", "inspect", checkpoint, "--verify").status == 0
    assert hpcgen("checkpoint", "unpin", checkpoint).stderr == f"unpinned {checkpoint}\n"
    assert hpcgen("checkpoint", "unpin", checkpoint).stderr == f"{checkpoint} was not pinned\n"
    (checkpoint / COMPLETE).unlink()
    ended = hpcgen("checkpoint", "pin", run / "checkpoints/iter_0000700", checkpoint)
    assert ended.status == 2
    assert f"{checkpoint} is not complete" in ended.stderr


def test_checkpoints_elsewhere_are_found(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "lustre"
    (run / "checkpoints").rename(elsewhere)
    trainer_json = run / "jobs/4711/trainer.json"
    config = json.loads(trainer_json.read_text())
    config["checkpoint"]["save"] = str(elsewhere)
    trainer_json.write_text(json.dumps(config))
    assert states(run)[800] == ("complete", "the newest")
    assert hpcgen("checkpoint", "inspect", run).stdout.startswith(f"checkpoint  {elsewhere}/iter_0000800\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list", "nothing"], "nothing: no such directory; give a run directory"),
        (["list", "empty"], "empty has no checkpoints; give a run directory"),
        (
            ["inspect", "run/checkpoints/iter_0000801"],
            "no such directory; the newest are iter_0000800, iter_0000700",
        ),
        (["pin", "run"], "run is not a checkpoint; give an iter_... directory"),
        (["pin", "run/checkpoints/iter_0000800", "nothing"], "nothing: no such directory"),
        (["prune", "run", "--keep-last", "0"], "Invalid value for '--keep-last'"),
    ],
)
def test_mistakes_end_with_status_2(
    run: Path, arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    ended = hpcgen("checkpoint", *arguments)
    assert (ended.status, ended.stdout) == (2, "")
    assert said in ended.stderr
    assert not list(run.rglob(PINNED))


def test_no_checkpoints_yet(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [start()])
    (run / "checkpoints").mkdir()
    ended = hpcgen("checkpoint", "list", run)
    assert ended == Ended(0, "", f"{run}/checkpoints: no checkpoints yet\n")
    ended = hpcgen("checkpoint", "inspect", run)
    assert (ended.status, ended.stderr) == (2, f"{run}/checkpoints has no complete checkpoint\n")


@pytest.mark.process
def test_paths_are_completed(run: Path) -> None:
    environment = {
        **os.environ,
        "_HPCGEN_COMPLETE": "bash_complete",
        "COMP_WORDS": f"hpcgen checkpoint pin {run}/checkpoints/iter_00007",
        "COMP_CWORD": "3",
    }
    completed = subprocess.run(
        [sys.executable, "-m", "hpcgen"], env=environment, capture_output=True, text=True, check=True
    )
    assert completed.stdout.split() == [f"plain,{run}/checkpoints/iter_0000700"]


HOSTILE = "\x1b]0;owned\x07\u2028\nsize        1 B\u202e"
SPELLED = r"\x1b]0;owned\x07\u2028\nsize        1 B\u202e"


def test_text_from_a_checkpoint_cannot_control_the_terminal(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 800, versions={HOSTILE: "1"}, precision=HOSTILE)
    started = write_checkpoint(tmp_path, 900)
    (started / STARTED).write_text(HOSTILE)
    (started / COMPLETE).unlink()
    (tmp_path / TRACKER).unlink()
    for arguments in (("inspect", path), ("list", tmp_path)):
        ended = hpcgen("checkpoint", *arguments)
        assert SPELLED in ended.stdout
        assert not set("\x1b\x07\u202e\u2028") & set(ended.stdout + ended.stderr)
        assert "\nsize        1 B" not in ended.stdout


@pytest.mark.parametrize(
    "arguments", [["list"], ["prune", "--keep-last", "1"], ["pin"], ["unpin"], ["inspect", "x"]]
)
def test_names_of_directories_cannot_control_the_terminal(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda *stream: False)  # as on a terminal
    run = tmp_path / "\x1b[2J\u202efake"
    run.mkdir()
    path = write_checkpoint(run, 800)
    ended = hpcgen("checkpoint", *arguments, path if arguments[0].endswith("pin") else run)
    assert r"\x1b[2J\u202efake" in ended.stdout + ended.stderr
    assert not any(text in ended.stdout + ended.stderr for text in ("\x1b[2J", "\u202e"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("by", ["link", "configuration"])
def test_prune_goes_nowhere_that_another_member_of_the_group_chose(
    run: Path, tmp_path: Path, by: str
) -> None:
    """A member can put a link in place of the checkpoints, and a configuration next to the run's."""
    other = tmp_path / "other"
    (run / "checkpoints").rename(other)
    if by == "link":
        planted = run / "checkpoints"
        planted.symlink_to(other)
    else:
        planted = run / "a.json"
        rules = {"model": {}, "training": {}, "checkpoint": {"save": str(other), "keep_last": 1}}
        planted.write_text(json.dumps(rules))
        os.utime(planted, (2e9, 2e9))
    os.lchown(planted, 65534, 65534)
    ended = hpcgen("checkpoint", "prune", run)
    assert (ended.status, ended.stdout) == (2, "")
    assert str(planted) in ended.stderr
    assert f"run hpcgen checkpoint prune {other}" in ended.stderr
    assert len(names(other)) == 6
