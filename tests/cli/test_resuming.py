"""The checks of a resumed run by the commands, before a job queues."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from hpcgen import load_run, plan
from tests.cli.command import Ended, hpcgen
from tests.recorded_run import write_checkpoint
from tests.runs import minimal_run, write_yaml
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import COMPLETE, METADATA, STARTED, TRACKER
from trainer.contract.resuming import provenance
from trainer.contract.resuming.hyperparameters import sections

NOTHING_DONE = "nothing was written or submitted"


@pytest.fixture
def run_file(workplace: Path) -> Path:
    """A run of 20 steps that has saved at 5 and 10, and its run file."""
    training = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 20, "precision": "fp32"}
    values = minimal_run(paths={"run_dir": "run"}, training=training)
    path = write_yaml(workplace / "run.yaml", values)
    trainer = plan(load_run(path)).trainer
    assert trainer is not None
    for iteration in (5, 10):
        write_checkpoint(workplace / "run/checkpoints", iteration, **sections(trainer))
    return path


def validated(run_file: Path, *values: str) -> Ended:
    return hpcgen("validate", "-c", run_file, *(word for value in values for word in ("--set", value)))


def archived(workplace: Path) -> str:
    """A copy of a checkpoint by its name, as docs/checkpoints.md says."""
    (workplace / "archive").mkdir()
    shutil.copytree(workplace / "run/checkpoints/iter_0000005", workplace / "archive/iter_0000005")
    return "checkpoint.load=archive"


def test_an_archive_needs_no_tracker(workplace: Path, run_file: Path) -> None:
    found = hpcgen(
        "render", "train", "-c", run_file, "--set", archived(workplace), "--set", "paths.run_dir=new"
    )
    assert found.status == 0
    assert f"{workplace}/archive/iter_0000005/{COMPLETE}" in found.stdout
    assert f"archive/{TRACKER}" not in found.stdout


def test_one_checkpoint_can_be_loaded_instead_of_the_newest(workplace: Path, run_file: Path) -> None:
    values = ("checkpoint.load=run/checkpoints/iter_0000005", "paths.run_dir=new", "optimizer.lr=2e-3")
    found = validated(run_file, *values)
    assert found.status == 2
    assert f"differs from 0.001 in the checkpoint {workplace}/run/checkpoints/iter_0000005;" in found.stderr
    sets = [word for value in values[:2] for word in ("--set", value)]
    script = hpcgen("render", "train", "-c", run_file, *sets)
    assert script.status == 0, script.stderr
    assert f"{workplace}/run/checkpoints/iter_0000005/{COMPLETE}" in script.stdout


@pytest.mark.parametrize(
    ("load", "hint"),
    [
        ("run", "{}/run/checkpoints?"),
        ("run/checkpoints/iter_0000099", "does not exist; use a checkpoint that is in {}/run/checkpoints"),
        ("rnu/checkpoints", "does not exist; did you mean {}/run/checkpoints?"),
        (
            "nowhere",
            "does not exist; use a directory that contains iter_... directories, or one iter_... directory",
        ),
        ("llama", "run hpcgen checkpoint import {}/llama --to DIR and use DIR"),
    ],
)
def test_a_directory_without_checkpoints_is_refused(
    workplace: Path, run_file: Path, load: str, hint: str
) -> None:
    (workplace / "llama").mkdir()
    (workplace / "llama/config.json").write_text('{"model_type": "llama"}')
    found = validated(run_file, f"checkpoint.load={load}", "paths.run_dir=new")
    assert (found.status, found.stdout) == (2, "")
    begin = f"--set checkpoint.load: checkpoint.load = {load} has no checkpoint for stage train: {workplace}/{load}"
    assert found.stderr.startswith(begin)
    assert found.stderr.rstrip().endswith(hint.format(workplace))


@pytest.mark.parametrize("command", [("validate",), ("render", "train"), ("submit", "train", "--dry-run")])
def test_every_command_names_differences_from_the_checkpoint(
    workplace: Path, run_file: Path, command: tuple[str, ...]
) -> None:
    found = hpcgen(*command, "-c", run_file, "--set", "optimizer.lr=2e-3")
    checkpoint = f"{workplace}/run/checkpoints/iter_0000010"
    both = "if this is intended, set checkpoint.changed: [optimizer.lr, optimizer.min_lr]"
    assert (found.status, found.stdout) == (2, "")
    assert found.stderr.splitlines() == [
        f"--set optimizer.lr: optimizer.lr = 0.002 differs from 0.001 in the checkpoint {checkpoint}; "
        f"{both}; otherwise set it to 0.001",
        "default: optimizer.min_lr resolves to 0.0002, which differs from 0.0001 in the checkpoint "
        f"{checkpoint}; {both}; otherwise set it to 0.0001",
        f"2 mistakes; {NOTHING_DONE}",
    ]


def test_named_and_unrestricted_keys_may_change(run_file: Path) -> None:
    named = "checkpoint.changed=[optimizer.lr, optimizer.min_lr]"
    assert validated(run_file, "optimizer.lr=2e-3", named).status == 0
    assert validated(run_file, "training.eval_iters=3").status == 0


def test_validate_says_where_the_run_continues_and_what_changes(workplace: Path, run_file: Path) -> None:
    checkpoint = f"{workplace}/run/checkpoints/iter_0000010"
    unchanged = validated(run_file).stdout
    assert f"\ncontinues from   iteration 10 ({checkpoint}); no changes\n" in unchanged
    values = ("optimizer.lr=2e-3", "checkpoint.changed=[optimizer.lr, optimizer.min_lr]")
    lines = validated(run_file, *values).stdout
    changes = "optimizer.lr: 0.001 -> 0.002; optimizer.min_lr: 0.0001 -> 0.0002"
    assert f"\ncontinues from   iteration 10 ({checkpoint}); changes: {changes}\n" in lines
    words = [word for value in values for word in ("--set", value)]
    start = json.loads(hpcgen("validate", "-c", run_file, *words, "--json").stdout)["start"]
    assert start == {
        "checkpoint": checkpoint,
        "iteration": 10,
        "weights_only": False,
        "is_finished": False,
        "changes": [["optimizer.lr", 0.001, 0.002], ["optimizer.min_lr", 0.0001, 0.0002]],
    }
    new = hpcgen("validate", "-c", run_file, "--set", "paths.run_dir=new", "--json")
    assert json.loads(new.stdout)["start"] is None
    weights = validated(run_file, archived(workplace), "paths.run_dir=new", "checkpoint.finetune=true").stdout
    assert f"\nstarts from      the weights of {workplace}/archive/iter_0000005 (iteration 5)\n" in weights


def test_a_name_that_is_left_over_is_reported_and_confirms_nothing(workplace: Path, run_file: Path) -> None:
    trainer = plan(load_run(run_file)).trainer
    assert trainer is not None
    used = {"optimizer.lr": {"iteration": 10, "before": 0.002, "after": 0.001}}
    path = write_checkpoint(workplace / "run/checkpoints", 15, **sections(trainer), confirmed=used)
    left = "checkpoint.changed=[optimizer.lr]"
    spent = "has optimizer.lr, which was used at iteration 10 for 0.002 -> 0.001 and confirms nothing more"
    found = validated(run_file, left)
    assert found.status == 0
    assert (
        f'--set checkpoint.changed: checkpoint.changed = ["optimizer.lr"] {spent}; remove it' in found.stderr
    )
    accident = ("optimizer.lr=0.1", "optimizer.min_lr=1e-4")
    found = validated(run_file, *accident, left)
    again = "checkpoint.changed: [optimizer.lr@15]"
    assert (found.status, found.stderr.splitlines()[0]) == (
        2,
        f"--set optimizer.lr: optimizer.lr = 0.1 differs from 0.001 in the checkpoint {path}. "
        f"checkpoint.changed {spent}; if this is intended, set {again}; otherwise set it to 0.001",
    )
    assert validated(run_file, *accident, again.replace(": ", "=")).status == 0


@pytest.mark.parametrize(
    "entry", ["optimizer.lr@", "optimizer.lr@soon", "optimizer.lr@-1", "optimizer.lr@1.5"]
)
def test_a_confirmation_has_the_iteration_as_a_number(run_file: Path, entry: str) -> None:
    found = validated(run_file, f"checkpoint.changed=[{entry}]")
    assert found.status == 2
    assert (
        "has no iteration after @; write the iteration of the checkpoint, optimizer.lr@1000" in found.stderr
    )


def test_a_longer_run_names_the_schedule_that_it_moves(run_file: Path) -> None:
    found = validated(run_file, "training.train_iters=40")
    assert [line.split()[1] for line in found.stderr.splitlines()[:-1]] == [
        "optimizer.lr_decay_iters",
        "optimizer.lr_warmup_iters",
    ]
    kept = ("optimizer.lr_decay_iters=20", "optimizer.lr_warmup_iters=2")
    assert validated(run_file, "training.train_iters=40", *kept).status == 0


def test_a_different_model_is_reported_first(run_file: Path) -> None:
    values = ("model.ffn_hidden_size=128", "optimizer.lr=2e-3")
    found = validated(run_file, *values)
    assert found.status == 2
    assert "model.ffn_hidden_size = 128 differs from 256 in the checkpoint" in found.stderr
    assert "this is a different model: set it to 256, or use another paths.run_dir" in found.stderr
    assert "optimizer.lr" not in found.stderr
    assert validated(run_file, *values, "paths.run_dir=new").status == 0
    elsewhere = validated(run_file, *values, "paths.run_dir=new", "checkpoint.save=run/checkpoints")
    assert "or use another checkpoint.save\n" in elsewhere.stderr


def test_loading_only_weights_compares_no_hyperparameters(workplace: Path, run_file: Path) -> None:
    load = (archived(workplace), "paths.run_dir=new", "optimizer.lr=2e-3")
    assert f"in the checkpoint {workplace}/archive/iter_0000005;" in validated(run_file, *load).stderr
    assert validated(run_file, *load, "checkpoint.finetune=true").status == 0
    shaped = validated(run_file, *load, "checkpoint.finetune=true", "model.num_layers=4")
    assert "or use another checkpoint.load\n" in shaped.stderr


def test_a_longer_context_with_the_same_frequencies_is_a_warning(workplace: Path, run_file: Path) -> None:
    rope = ("model.position_embedding_type=rope", "paths.run_dir=new")
    trainer = plan(load_run(run_file, [*rope, "model.seq_length=64"])).trainer
    assert trainer is not None
    path = write_checkpoint(workplace / "short", 5, **sections(trainer))
    load = (*rope, "model.seq_length=256", "checkpoint.load=short", "checkpoint.finetune=true")
    assert (
        f"model.seq_length = 256 is more than 64, the sequence length of the checkpoint {path}, but the rotary "
        "frequencies are the same; set model.rope_scaling, for example rope_type: yarn, factor: 4 and "
        "original_max_position_embeddings: 64"
    ) in validated(run_file, *load).stderr
    yarn = "model.rope_scaling={rope_type: yarn, factor: 4, original_max_position_embeddings: %d}"
    assert (
        "original_max_position_embeddings = 32 differs from 64"
        in validated(run_file, *load, yarn % 32).stderr
    )
    for scaled in (yarn % 64, "model.rotary_base=500000"):
        found = validated(run_file, *load, scaled)
        assert found.status == 0
        assert str(path) not in found.stderr


def test_keys_that_an_older_checkpoint_lacks_are_compared(workplace: Path, run_file: Path) -> None:
    trainer = plan(load_run(run_file)).trainer
    assert trainer is not None
    saved = sections(trainer)
    del saved["model"]["window_size"], saved["model"]["qk_layernorm"]
    path = write_checkpoint(workplace / "run/checkpoints", 15, **saved)
    assert validated(run_file).status == 0
    assert (
        f"model.window_size = 16 differs from null in the checkpoint {path}; if this is intended, set "
        "checkpoint.changed: [model.window_size]"
    ) in validated(run_file, "model.window_size=16").stderr
    assert (
        "this is a different model: set it to false" in validated(run_file, "model.qk_layernorm=true").stderr
    )


def test_the_newest_complete_checkpoint_counts(workplace: Path, run_file: Path) -> None:
    (workplace / "run/checkpoints/iter_0000010/__0_0.distcp").write_bytes(b"cut")
    assert "run/checkpoints/iter_0000005;" in validated(run_file, "optimizer.lr=2e-3").stderr


def test_a_checkpoint_that_cannot_be_compared_is_left_to_the_trainer(workplace: Path, run_file: Path) -> None:
    checkpoints = workplace / "run/checkpoints"
    for path in checkpoint_files.list_paths(checkpoints):
        (path / COMPLETE).unlink()
    assert validated(run_file, "optimizer.lr=2e-3", "checkpoint.discard_up_to=10").status == 0
    (checkpoints / "iter_0000010" / STARTED).unlink()  # as Megatron-LM's
    assert (checkpoints / "iter_0000010" / METADATA).exists()
    assert validated(run_file, "optimizer.lr=2e-3", "checkpoint.discard_up_to=10").status == 0
    shutil.rmtree(checkpoints)
    checkpoints.write_text("no directory")
    assert validated(run_file, "optimizer.lr=2e-3", "checkpoint.discard_up_to=10").status == 0


FINISHED = ("training.train_iters=10", "optimizer.lr_decay_iters=20", "optimizer.lr_warmup_iters=2")
"""The configuration that the run has finished, according to DONE. Its checkpoints are of one with 20 steps."""


@pytest.mark.parametrize(
    "command", [("validate",), ("render", "train"), ("submit", "train", "--launcher", "local")]
)
def test_a_finished_run_does_not_count_for_another_configuration(
    workplace: Path, run_file: Path, command: tuple[str, ...]
) -> None:
    (workplace / "run/DONE").write_text("10\n")
    options = [
        word for value in (*FINISHED, "optimizer.lr=5e-2", "training.seed=7") for word in ("--set", value)
    ]
    # Naming them has no effect, because no step is left to train with them.
    named = "checkpoint.changed=[optimizer.lr, optimizer.min_lr]"
    found = hpcgen(*command, "-c", run_file, *options, "--set", named)
    assert (found.status, found.stdout) == (2, "")
    assert found.stderr.splitlines()[0] == (
        f"--set training.seed: training.seed = 7 differs from 1234 in the checkpoint "
        f"{workplace}/run/checkpoints/iter_0000010; the run is finished: set it to 1234, or use another "
        "paths.run_dir. To continue with it, increase training.train_iters and set checkpoint.changed: "
        "[optimizer.lr, optimizer.min_lr, training.seed]"
    )
    assert "--set optimizer.lr: optimizer.lr = 0.05 differs from 0.001 in the checkpoint" in found.stderr
    assert not (workplace / "run/jobs").exists()


def test_a_finished_run_of_another_model_is_refused(workplace: Path, run_file: Path) -> None:
    (workplace / "run/DONE").write_text("10\n")
    found = validated(run_file, *FINISHED, "model.ffn_hidden_size=128")
    assert found.status == 2
    assert found.stderr.splitlines()[0].endswith(
        "the run is finished: set it to 256, or use another paths.run_dir"
    )


def test_a_finished_run_with_its_own_configuration_has_nothing_to_do(workplace: Path, run_file: Path) -> None:
    (workplace / "run/DONE").write_text("10\n")
    found = validated(run_file, *FINISHED)
    assert found.status == 0
    assert "training.train_iters = 10 has been reached" in found.stderr


def test_a_finished_run_is_continued_as_the_warning_says(workplace: Path, run_file: Path) -> None:
    (workplace / "run/DONE").write_text("10\n")
    said = validated(run_file, *FINISHED).stderr
    kept = [f"{name}={value}" for name, value in re.findall(r"(optimizer\.\w+): (\d+)", said)]
    assert [name.partition("=")[0] for name in kept] == [
        "optimizer.lr_decay_iters",
        "optimizer.lr_warmup_iters",
    ]
    assert validated(run_file, "training.train_iters=40").status == 2  # the schedule would change
    assert validated(run_file, "training.train_iters=40", *kept).status == 0


def test_fewer_steps_than_are_done_are_refused(workplace: Path, run_file: Path) -> None:
    values = ("training.train_iters=7", *FINISHED[1:])
    for done in (False, True):
        found = validated(run_file, *values)
        assert found.status == 2
        assert "training.train_iters = 7 is less than 10, the iteration of the checkpoint" in found.stderr
        if not done:
            (workplace / "run/DONE").write_text("10\n")


def test_a_finished_run_whose_checkpoints_are_gone_is_refused(workplace: Path, run_file: Path) -> None:
    (workplace / "run/DONE").write_text("10\n")
    (workplace / "run/checkpoints").rename(workplace / "archived")
    found = validated(run_file, *FINISHED)
    assert found.status == 2
    assert "holds no valid checkpoint" in found.stderr
    assert f"{workplace}/run/DONE says that iteration '10' was the last" in found.stderr
    assert validated(run_file, "checkpoint.load=archived").status == 0  # trains on from the archive


@pytest.mark.parametrize("edited", ["rates.py", "parts/high.py"])
def test_edited_code_is_refused_before_the_job_queues(workplace: Path, run_file: Path, edited: str) -> None:
    mine = workplace / "rates.py"
    mine.write_text("def rate(iteration, optimizer):\n    from parts.high import HIGH\n    return HIGH\n")
    (workplace / "parts").mkdir()
    (workplace / "parts/high.py").write_text("HIGH = 1e-3\n")
    schedule = "optimizer.lr_schedule=rates.py:rate"
    trainer = plan(load_run(run_file, [schedule, "paths.run_dir=new"])).trainer
    assert trainer is not None
    record = {**sections(trainer), "origins": provenance.examine(trainer).origins}
    write_checkpoint(workplace / "run/checkpoints", 15, **record)
    assert validated(run_file, schedule).status == 0
    shutil.copy(mine, workplace / "moved.py")  # another file with the same content is not a change
    assert validated(run_file, "optimizer.lr_schedule=moved.py:rate").status == 0
    (workplace / edited).write_text("def rate(iteration, optimizer):\n    return 5e-2\n")
    found = validated(run_file, schedule)
    assert found.status == 2
    assert f"{workplace / edited} (SHA-256 " in found.stderr
    assert "if this is intended, set checkpoint.changed: [optimizer.lr_schedule]" in found.stderr
    assert validated(run_file, schedule, "checkpoint.changed=[optimizer.lr_schedule]").status == 0


def test_an_edited_loss_is_refused_and_an_edited_metric_is_not(workplace: Path, run_file: Path) -> None:
    arguments = "logits, labels, loss_mask, batch"
    for name in ("loss", "metric"):
        (workplace / f"{name}.py").write_text(f"def {name}({arguments}): return 1, 1\n")
    own = ("training.loss=loss.py:loss", "training.metrics=[metric.py:metric]")
    trainer = plan(load_run(run_file, [*own, "paths.run_dir=new"])).trainer
    assert trainer is not None
    origins = provenance.examine(trainer).origins
    assert origins["code"].keys() == {"training.loss", "training.metrics[0]"}
    write_checkpoint(workplace / "run/checkpoints", 15, **sections(trainer), origins=origins)
    (workplace / "metric.py").write_text(f"def metric({arguments}): return 2, 1\n")
    assert validated(run_file, *own).status == 0
    assert validated(run_file, own[0]).status == 0
    (workplace / "loss.py").write_text(f"def loss({arguments}): return 2, 1\n")
    found = validated(run_file, *own)
    assert found.status == 2
    assert "if this is intended, set checkpoint.changed: [training.loss]" in found.stderr
    found = validated(run_file, "training.z_loss_coeff=1e-4")
    assert "set checkpoint.changed: [training.loss, training.z_loss_coeff]" in found.stderr


def test_differences_are_in_the_json_too(workplace: Path, run_file: Path) -> None:
    run_file.write_text(run_file.read_text().replace("0.001", "0.002"))
    line = next(n for n, text in enumerate(run_file.read_text().splitlines(), 1) if "0.002" in text)
    found = hpcgen("validate", "-c", run_file, "--json")
    assert found.status == 2
    mistake = json.loads(found.stdout)["mistakes"][0]
    assert (mistake["key"], mistake["file"], mistake["line"]) == ("optimizer.lr", str(run_file), line)
    assert mistake["reason"].startswith("differs from 0.001 in the checkpoint")
    assert mistake["hint"].endswith("otherwise set it to 0.001")


def test_training_that_would_be_discarded_is_named_before_the_job_queues(
    workplace: Path, run_file: Path
) -> None:
    (workplace / "run/checkpoints").rename(workplace / "away")
    event = {"event": "checkpoint", "iteration": 10, "path": f"{workplace}/run/checkpoints/iter_0000010"}
    (workplace / "run/metrics.jsonl").write_text(json.dumps(event) + "\n")
    found = validated(run_file)
    assert found.status == 2
    assert (
        f"paths.run_dir = run would lose training: {workplace}/run/checkpoints holds no valid" in found.stderr
    )
    assert "set checkpoint.discard_up_to: 10, or use another paths.run_dir" in found.stderr
    assert validated(run_file, "checkpoint.discard_up_to=9").status == 2
    assert validated(run_file, "checkpoint.discard_up_to=10").status == 0
    # The trainer checks what this machine does not see.
    assert validated(run_file, "checkpoint.save=/not/mounted/here").status == 0
