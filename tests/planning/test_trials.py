"""The trials of a run: its candidates as configurations, their names, their keys and their mistakes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from hpcgen import load_run, plan
from hpcgen.errors import ConfigErrors
from hpcgen.stages.tune import TRIALS_FILE
from tests.runs import big_run, minimal_run, planned
from trainer.contract.config import from_dict
from trainer.contract.trials import TrialConfig, TrialsConfig

MEASURED = Path(__file__).parents[2] / "benchmarks/planner/data/two-h100s"
TWO_RANKS = {"train": {"ntasks_per_node": 2, "time": "1:00:00"}}
TP2 = "parallelism.tensor_model_parallel_size=2 parallelism.sequence_parallel=true"


def trials(directory: Path, values: dict[str, Any], *candidates: str, **tune: Any) -> tuple[TrialConfig, ...]:
    """The trials of a run with these candidates."""
    run = values | {"tune": {"candidates": candidates, **tune}}
    text = planned(directory, run, ["tune"]).stages["tune"].files[TRIALS_FILE]
    return from_dict(TrialsConfig, json.loads(text), "test").trials


def test_candidates_have_their_values_and_defaults_that_follow_from_them(tmp_path: Path) -> None:
    """A default that was resolved for the run itself would be wrong for a candidate."""
    experts = minimal_run(slurm=TWO_RANKS)
    experts["model"] = experts["model"] | {"num_moe_experts": 4, "add_bias_linear": False}
    found = trials(tmp_path, experts, TP2, "training.micro_batch_size=2")
    assert [trial.name for trial in found] == ["TP2 ETP2 MBS1", "DP2 MBS2", "DP2 MBS1"]
    assert [trial.overrides for trial in found] == [tuple(TP2.split()), ("training.micro_batch_size=2",), ()]
    sizes = [trial.trainer.parallelism.expert_tensor_parallel_size for trial in found]
    assert sizes == [2, 1, 1]
    assert found[1].trainer.training.micro_batch_size == 2
    assert len({trial.trainer.model.vocab_size for trial in found}) == 1


def test_a_candidate_that_is_the_run_itself_is_measured_once(tmp_path: Path) -> None:
    run = minimal_run(slurm=TWO_RANKS)
    [own] = trials(tmp_path, run, "training.micro_batch_size=1")
    assert own.overrides == ()


def test_candidates_that_differ_in_other_keys_are_told_apart(tmp_path: Path) -> None:
    found = trials(tmp_path, minimal_run(slurm=TWO_RANKS), "model.swiglu=true")
    assert [trial.name for trial in found] == ["DP2 MBS1, model.swiglu=true", "DP2 MBS1"]


def test_a_key_depends_on_what_decides_the_result_only(tmp_path: Path) -> None:
    run = minimal_run(slurm=TWO_RANKS)
    [own] = trials(tmp_path, run)

    def key(**sections: Any) -> str:
        return trials(tmp_path, run | sections)[-1].key

    unimportant = {
        "name": "other",
        "optimizer": {"lr": 5e-4},
        "training": run["training"] | {"train_iters": 77},
        "checkpoint": {"save_interval": 5},
    }
    assert all(key(**{name: value}) == own.key for name, value in unimportant.items())
    assert trials(tmp_path, run, TP2)[-1].key == own.key
    deciding = {
        "model": run["model"] | {"num_layers": 4},
        "training": run["training"] | {"global_batch_size": 8},
        "environment": {"NCCL_ALGO": "Ring"},
        "slurm": {"train": TWO_RANKS["train"] | {"nodes": 2}},
    }
    assert len({own.key, *(key(**{name: value}) for name, value in deciding.items())}) == 5
    assert trials(tmp_path, run, steps=3)[-1].key != own.key
    layer = tmp_path / "layer.py"
    layer.write_text("def layers(*_): pass\n")
    with_code = {"model": run["model"] | {"layer_spec": "layer.py:layers"}}
    before = key(**with_code)
    layer.write_text("def layers(*_): return None\n")
    assert key(**with_code) != before


def test_variables_that_depend_on_the_layout_are_those_of_the_trial(tmp_path: Path) -> None:
    """The job exports those of the run: TP x CP > 1 needs the order of kernels that one connection gives."""
    alone = "parallelism.tensor_model_parallel_size=1 parallelism.sequence_parallel=false"
    run = big_run(preset="13b", parallelism={"tensor_model_parallel_size": 2})
    found = trials(tmp_path, run, alone)
    assert [trial.environment for trial in found] == [{"CUDA_DEVICE_MAX_CONNECTIONS": ""}, {}]


def test_all_mistakes_of_candidates_are_told_at_once(tmp_path: Path) -> None:
    mistaken = (
        "parallelism.tensor_model_parallel_size=3",
        "training.micro_batch_sise=2",
        "name=other",
        "'",
        "",
        "training.micro_batch_size",
    )
    with pytest.raises(ConfigErrors) as raised:
        trials(tmp_path, minimal_run(slurm=TWO_RANKS), *mistaken)
    message = str(raised.value)
    for index, text in enumerate(
        (
            "parallelism.tensor_model_parallel_size = 3 does not divide",
            "training.micro_batch_sise = 2 is not a known key",
            "name cannot differ between candidates; change keys of model, parallelism, training, optimizer",
            '"\'" cannot be split into words (No closing quotation)',
            "has no assignment; write one, such as training.micro_batch_size=2",
            "training.micro_batch_size is no assignment; write KEY=VALUE",
        )
    ):
        assert f"tune.candidates[{index}]: {text}" in message


@pytest.mark.parametrize(("tune", "is_told"), [(None, True), ({"candidates": []}, False)])
def test_a_job_that_measures_only_the_runs_own_layout_is_told(
    tmp_path: Path, tune: dict[str, Any] | None, is_told: bool
) -> None:
    """A list in the run file is a decision, also an empty one."""
    run = minimal_run(slurm=TWO_RANKS) | ({} if tune is None else {"tune": tune})
    told = [text for text in planned(tmp_path, run, ["tune"]).warnings if "tune.candidates" in text]
    assert any("use hpcgen tune, which chooses layouts" in text for text in told) == is_told
    assert len(told) == is_told


def test_the_job_has_the_nodes_of_the_training(tmp_path: Path) -> None:
    run = big_run(slurm={"train": {"nodes": 16, "time": "1-00:00:00", "qos": "high"}})
    stage = planned(tmp_path, run, ["tune"]).stages["tune"]
    assert stage.allocation.nodes == 16
    assert "--qos=high" in stage.directives
    assert "--time=02:00:00" in stage.directives
    run["slurm"]["tune"] = {"nodes": 8}
    with pytest.raises(ConfigErrors, match=r"slurm\.tune\.nodes = 8 differs from the 16 of training"):
        planned(tmp_path, run, ["tune"])


@pytest.mark.parametrize("name", ["run.yaml", "batch-32.yaml"])
def test_the_layouts_that_were_measured_on_gpus_are_candidates_of_their_run_file(name: str) -> None:
    """The tables of docs/tune.md."""
    with (MEASURED / "measured.csv").open() as file:
        measured = [row["layout"] for row in csv.DictReader(file) if row["run"] == name]
    text = plan(load_run(MEASURED / name), ["tune"]).stages["tune"].files[TRIALS_FILE]
    trials = from_dict(TrialsConfig, json.loads(text), "test").trials
    assert [trial.name for trial in trials] == measured
