"""Run files without the sections that their stages do not need."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgen.config.loader import load_cluster_run
from hpcgen.config.run import OMITTED_SECTIONS
from hpcgen.config.stages import TRAINING
from hpcgen.errors import ConfigErrors
from hpcgen.planning.kind import Stage
from hpcgen.run_plan.explanation import explain
from hpcgen.run_plan.plan import main_stage
from hpcgen.stages import STAGES
from tests.runs import loaded, minimal_run, planned

ONLY_DATA = {
    "name": "corpus",
    "cluster": "local",
    "paths": {"run_dir": "/runs/corpus"},
    "slurm": {"defaults": {"time": "1:00:00"}},
    "data": {"corpus": {"directory": "/corpus", "source": {"directory": "/text"}}},
}
"""A run file that only prepares data."""


def test_the_sections_that_can_be_omitted_are_those_that_training_needs() -> None:
    assert OMITTED_SECTIONS.keys() == TRAINING.keys()


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_run_file_for_data_lacks_only_what_other_stages_need(tmp_path: Path, stage: Stage) -> None:
    overrides = ("image.output=/images/a.sqsh", "image.code=/code")
    missing = [key for key in stage.needs if key != "data.corpus"]
    if not missing:
        assert planned(tmp_path, ONLY_DATA, [stage.name], overrides).stages[stage.name].name == stage.name
        return
    with pytest.raises(ConfigErrors) as error:
        planned(tmp_path, ONLY_DATA, [stage.name], overrides)
    found = {mistake.path: str(mistake) for mistake in error.value.mistakes if "but stage" in mistake.reason}
    assert list(found) == missing
    for key, mistake in found.items():
        reason = f"{key} is missing, but stage {stage.name} needs it; {stage.needs[key]}"
        assert mistake == f"{tmp_path}/run.yaml: {reason}"


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"training": {"micro_batch_size": 1}}, ["training.global_batch_size", "training.train_iters"]),
        ({"model": None}, ["model"]),
        ({"modle": {"num_layers": 2}}, ["modle"]),
        ({"preset": "tinny"}, ["preset"]),
        ({"data": 5}, ["data"]),
    ],
    ids=str,
)
def test_a_mistake_in_the_file_is_one_for_every_stage_and_reported_once(
    tmp_path: Path, changes: dict[str, object], wrong: list[str]
) -> None:
    values = {**ONLY_DATA, **changes}
    with pytest.raises(ConfigErrors) as error:
        planned(tmp_path, values, ["prepare", "train"])
    assert [mistake.path for mistake in error.value.mistakes] == wrong


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (ONLY_DATA, "prepare"),
        ({**ONLY_DATA, "checkpoint": {"keep_last": 2}}, "train"),
        ({**ONLY_DATA, "data": {"mock": True}}, "train"),
        (minimal_run(data=ONLY_DATA["data"]), "train"),
        ({**ONLY_DATA, "program": {"command": ["a"]}}, "run"),
    ],
    ids=str,
)
def test_the_stage_that_a_run_file_is_for(tmp_path: Path, values: dict[str, object], expected: str) -> None:
    assert main_stage(loaded(tmp_path, values)) == expected


def test_environments_can_be_explained_without_a_model(tmp_path: Path) -> None:
    run = loaded(tmp_path, ONLY_DATA)
    for stage in STAGES:
        assert (
            explain(stage, run).variables
            == explain(stage, load_cluster_run("local", "/runs/corpus")).variables
        )
