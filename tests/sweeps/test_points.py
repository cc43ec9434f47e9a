"""Points of a sweep: their directories, and the mistakes of all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcgen import load_run, plan
from hpcgen.config import document
from hpcgen.errors import ConfigErrors, FileErrors, HpcgenError
from hpcgen.slurm.submission import SUBMISSION, submission_file
from hpcgen.sweeps.assignments import points_of
from hpcgen.sweeps.points import Sweep, plan_sweep
from tests.runs import minimal_run, write_yaml

LR = "optimizer.lr=1e-4,3e-4"


def planned(directory: Path, *settings: str, **sections: Any) -> Sweep:
    run = minimal_run(paths={"run_dir": "run"}, **sections)
    return plan_sweep(write_yaml(directory / "run.yaml", run), *points_of(settings))


def directories(sweep: Sweep) -> list[Path]:
    return [point.directory for point in sweep.points]


def test_each_point_is_a_run_with_its_values_its_name_and_its_directory(tmp_path: Path) -> None:
    sweep = planned(tmp_path, LR, "training.seed=7")
    assert [point.name for point in sweep.points] == ["lr-1e-4", "lr-3e-4"]
    for point, lr in zip(sweep.points, (1e-4, 3e-4), strict=True):
        trainer = point.plan.trainer
        assert trainer is not None
        assert (trainer.optimizer.lr, trainer.training.seed) == (lr, 7)
        assert trainer.name == f"mini-{point.name}"
        assert trainer.run_dir == str(point.directory)
        assert point.directory == tmp_path / "run/sweep" / f"{point.name}-{point.key}"
    assert not (tmp_path / "run").exists()


def test_points_share_what_does_not_depend_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning 1,000 points took 13 to 22 s of CPU, half of it for reading the same files."""
    read: list[str] = []

    def counted(path: str | Path) -> str:
        read.append(Path(path).name)
        return read_text(path)

    read_text = document.read_text
    monkeypatch.setattr(document, "read_text", counted)
    numbers: list[int] = []
    run = write_yaml(tmp_path / "run.yaml", minimal_run(paths={"run_dir": "run"}))
    shared, points = points_of(["optimizer.lr=1e-4,2e-4,3e-4"])
    sweep = plan_sweep(run, shared, points, numbers.append)
    assert numbers == [1, 2, 3]
    assert len(sweep.points) == 3
    assert sorted(set(read)) == sorted(read)
    assert {"run.yaml", "local.yaml"} <= set(read)


def test_points_can_differ_in_their_cluster(tmp_path: Path) -> None:
    for name in ("one", "two"):
        profile = {"extends": "local", "description": name, "environment": {"NAME": name}}
        write_yaml(tmp_path / f"{name}.yaml", profile)
    sweep = planned(tmp_path, "cluster=./one.yaml,./two.yaml")
    assert [point.plan.run.cluster.description for point in sweep.points] == ["one", "two"]


def test_resume_submits_the_same_point(tmp_path: Path) -> None:
    for point in planned(tmp_path, LR, "training.seed=7").points:
        record = json.loads(submission_file(point.plan, point.plan.stages["train"])[SUBMISSION])
        again = plan(load_run(record["run_file"], record["overrides"]))
        assert again.trainer == point.plan.trainer


def test_points_whose_names_are_cut_off_stay_apart(tmp_path: Path) -> None:
    long = "environment." + "A" * 60
    sweep = planned(tmp_path, f"{long}=1,2")
    assert len({point.name for point in sweep.points}) == 1
    assert list(sweep.directories.values()) == directories(sweep)


@pytest.mark.parametrize(
    ("sections", "is_same"),
    [
        ({}, True),
        ({"optimizer": {"lr": 1e-3, "lr_decay_iters": 10, "weight_decay": 0.2}}, False),
        ({"model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 128}}, False),
        ({"checkpoint": {"save_interval": 7}}, True),
        ({"logging": {"tensorboard": False}}, True),
    ],
)
def test_another_run_file_has_other_points_unless_the_same_run_continues(
    tmp_path: Path, sections: dict[str, Any], is_same: bool
) -> None:
    fixed = {"optimizer": {"lr": 1e-3, "lr_decay_iters": 10}}
    before = directories(planned(tmp_path, LR, **fixed))
    after = directories(planned(tmp_path, LR, **{**fixed, **sections}))
    assert (before == after) is is_same
    assert [each.name.rpartition("-")[0] for each in before] == [
        each.name.rpartition("-")[0] for each in after
    ]


def test_more_steps_continue_the_points_unless_the_schedule_follows_them(tmp_path: Path) -> None:
    fixed = {"optimizer": {"lr": 1e-3, "lr_decay_iters": 10, "lr_warmup_iters": 1}}
    steps = [
        directories(planned(tmp_path, LR, f"training.train_iters={number}", **fixed)) for number in (10, 20)
    ]
    assert steps[0] == steps[1]
    following = [directories(planned(tmp_path, LR, f"training.train_iters={number}")) for number in (10, 20)]
    assert following[0] != following[1]
    swept = planned(tmp_path, "training.train_iters=10,20", **fixed)
    assert len(set(directories(swept))) == 2


def test_edited_code_makes_other_points(tmp_path: Path) -> None:
    code = tmp_path / "layers.py"
    found = []
    for text in (
        "def layers(core, vp_stage, usual):\n    return usual\n",
        "def layers(core, vp_stage, usual):\n    usual\n",
    ):
        code.write_text(text)
        shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128}
        found.append(directories(planned(tmp_path, LR, model={**shape, "layer_spec": "layers.py:layers"})))
    assert found[0] != found[1]


def test_a_program_is_swept_by_its_environment(tmp_path: Path) -> None:
    run = {
        "name": "mine",
        "cluster": "local",
        "paths": {"run_dir": "run"},
        "program": {"command": ["sh", "-c", "echo $LR"]},
    }
    file = write_yaml(tmp_path / "run.yaml", run)
    sweep = plan_sweep(file, *points_of(["environment.LR=1e-4,3e-4"]))
    assert [point.name for point in sweep.points] == ["LR-1e-4", "LR-3e-4"]
    assert [point.plan.config.environment["LR"] for point in sweep.points] == ["1e-4", "3e-4"]


def mistakes(directory: Path, kind: type[HpcgenError], settings: Sequence[str]) -> list[str]:
    with pytest.raises(kind) as error:
        planned(directory, *settings)
    return [str(mistake) for mistake in error.value.mistakes]


def test_mistakes_of_all_points_are_reported_with_their_points(tmp_path: Path) -> None:
    shared, of_points = mistakes(
        tmp_path,
        FileErrors,
        ["optimizer.lr=1e-4,many", "training.global_batch_size=4,7", "model.num_layers=no"],
    )
    assert shared.startswith("--set model.num_layers: ")
    assert of_points.startswith(
        "lr-many_global_batch_size-4, lr-many_global_batch_size-7: --set optimizer.lr: "
    )
    rules = mistakes(
        tmp_path, ConfigErrors, ["training.global_batch_size=4,6,7", "training.micro_batch_size=4"]
    )
    assert [each.partition(":")[0] for each in rules] == ["global_batch_size-6", "global_batch_size-7"]


def test_the_same_point_twice_is_refused(tmp_path: Path) -> None:
    [found] = mistakes(tmp_path, ConfigErrors, ["optimizer.lr=1e-4,0.0001,3e-4"])
    assert found.startswith("the points optimizer.lr=1e-4 and optimizer.lr=0.0001 are the same")


def test_a_run_file_without_training_is_refused(tmp_path: Path) -> None:
    corpus = {"directory": "data", "source": {"directory": "corpus"}}
    run = {
        "name": "c",
        "cluster": "local",
        "paths": {"run_dir": "run"},
        "data": {"corpus": corpus, "tokenizer": {"kind": "bytes"}},
    }
    with pytest.raises(HpcgenError, match="describes no training"):
        plan_sweep(write_yaml(tmp_path / "run.yaml", run), *points_of(["environment.A=1,2"]))
