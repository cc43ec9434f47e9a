"""hpcgen tune with the results of a job: the table, the conclusions, and what it writes. tests/slurm has the job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcgen import api
from hpcgen.config import document as documents
from hpcgen.run_plan.trials import candidates, with_candidates
from tests.cli.command import Ended, hpcgen
from trainer.contract.trials import TrialResult, result_path, result_text

TP2 = "parallelism.tensor_model_parallel_size=2 parallelism.sequence_parallel=true"
MBS2 = "training.micro_batch_size=2"
RUN = f"""\
name: mini
cluster: local
paths: {{run_dir: run}}
slurm: {{train: {{ntasks_per_node: 2, time: "1:00:00"}}}}
model: {{num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 128}}
training:
  micro_batch_size: 1  # the smallest
  global_batch_size: 4
  train_iters: 10
  precision: fp32
optimizer: {{lr: 1.0e-3}}
data: {{mock: true}}
tune:
  candidates:
    - {TP2}
    - {MBS2}
"""


@pytest.fixture
def run_file(workplace: Path) -> Path:
    file = workplace / "run.yaml"
    file.write_text(RUN)
    return file


def tuned(run_file: Path, *arguments: str, **results: TrialResult) -> Ended:
    """What the command says of the results `own`, `parallel` and `larger`."""
    plan = api.plan(api.load_run(run_file), ["tune"])
    names = {"": "own", TP2: "parallel", MBS2: "larger"}
    for candidate in candidates(plan):
        path = result_path(plan.config.paths.run_dir, candidate.trial.key)
        write(path, results[names[" ".join(candidate.trial.overrides)]])
    return hpcgen("tune", "-c", run_file, *arguments)


def write(path: Path, result: TrialResult) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(result_text(result))


def measured(step_s: float) -> TrialResult:
    return TrialResult(
        status="measured", step_s=step_s, tokens_per_s=512 / step_s, in_use_gib=10.0, device_gib=80.0
    )


FULL = TrialResult(status="out of memory", reason="rank 1 of pipeline stage 0 on n1 does not fit")


def test_the_fastest_layout_is_written_with_its_reason(run_file: Path) -> None:
    found = tuned(run_file, own=measured(0.8), parallel=FULL, larger=measured(0.5))
    assert found.status == 0, found.stderr
    lines = found.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["DP2", "MBS2"], ["*", "DP2"], ["TP2", "MBS1"]]
    assert "1,024" in lines[1]
    assert "10.0 of 80.0" in lines[1]
    assert lines[4] == "   out of memory: rank 1 of pipeline stage 0 on n1 does not fit"
    assert lines[-1] == "DP2 MBS2 is the fastest, 60.0% faster than the run's DP2 MBS1"
    assert f"wrote {run_file}: training.micro_batch_size=2" in found.stderr
    reason = "  # hpcgen tune: 0.5 s per step measured, 60.0% faster than the run's DP2 MBS1\n"
    assert run_file.read_text() == RUN.replace("  micro_batch_size: 1", f"{reason}  micro_batch_size: 2")
    # its result is now that of the run itself
    again = hpcgen("tune", "-c", run_file, "--dry-run")
    assert again.status == 0
    assert again.stdout.splitlines()[-1] == "the run's own layout, DP2 MBS2, is the fastest"


@pytest.mark.parametrize(
    ("own", "larger", "options", "said"),
    [
        (0.5, 0.8, (), "the run's own layout, DP2 MBS1, is the fastest"),
        (0.5, 0.497, (), "DP2 MBS2 is the fastest, 0.6% faster than the run's DP2 MBS1"),
        (0.8, 0.5, ("--no-write",), "DP2 MBS2 is the fastest"),
        (0.8, 0.5, ("--dry-run",), "DP2 MBS2 is the fastest"),
        (
            0.8,
            0.5,
            ("--set", "checkpoint.save_interval=5"),
            "was not changed, since it was measured with --set",
        ),
    ],
    ids=["own-is-fastest", "no-difference", "no-write", "dry-run", "with-other-values"],
)
def test_the_run_file_stays_as_it_is(
    run_file: Path, own: float, larger: float, options: tuple[str, ...], said: str
) -> None:
    found = tuned(run_file, *options, own=measured(own), parallel=FULL, larger=measured(larger))
    assert found.status == 0, found.stderr
    assert said in found.stdout + found.stderr
    assert run_file.read_text() == RUN


def test_a_write_protected_run_file_is_refused_before_the_job(run_file: Path) -> None:
    run_file.chmod(0o444)
    found = hpcgen("tune", "-c", run_file)
    assert (found.status, found.stdout) == (2, "")
    assert "run.yaml: is write-protected" in found.stderr
    dry = hpcgen("tune", "-c", run_file, "--dry-run")
    assert dry.status == 0, dry.stderr


def test_json_has_predictions_and_all_figures(run_file: Path) -> None:
    found = tuned(run_file, "--json", own=FULL, parallel=FULL, larger=measured(0.5))
    shown = json.loads(found.stdout)
    assert shown["fastest"] == "DP2 MBS2"
    assert shown["written"] == str(run_file)  # the run's own layout does not fit
    assert [trial["is_own"] for trial in shown["trials"]] == [False, False, True]
    assert shown["trials"][0]["result"]["step_s"] == 0.5
    assert shown["trials"][0]["predicted_step_s"] is None  # of a CPU
    assert documents.read(run_file).get("training.micro_batch_size") == 2


def test_without_a_measurement_it_fails(run_file: Path) -> None:
    found = tuned(run_file, own=FULL, parallel=FULL, larger=FULL)
    assert found.status == 1
    assert "no layout was measured; the logs of the trials are in " in found.stderr


def test_a_result_that_cannot_be_read_is_named(run_file: Path) -> None:
    tuned(run_file, own=FULL, parallel=FULL, larger=FULL)
    damaged = next(run_file.parent.glob("run/tune/*.json"))
    damaged.write_text("{")
    found = hpcgen("tune", "-c", run_file)
    assert found.status == 2
    assert f"{damaged}: is no result of this version" in found.stderr
    assert "remove it to measure the layout again" in found.stderr


def test_a_calibration_that_cannot_be_kept_hides_no_results(run_file: Path) -> None:
    plan = api.plan(api.load_run(run_file), ["tune"])
    calibration = Path(str(plan.stages["tune"].values["calibration"]))
    calibration.parent.mkdir(parents=True)
    calibration.write_text("{")
    found = tuned(run_file, own=measured(0.5), parallel=FULL, larger=measured(0.8))
    assert found.status == 0
    assert f"warning: predictions stay as they are: {calibration}: " in found.stderr
    assert "the run's own layout, DP2 MBS1, is the fastest" in found.stdout


def test_a_cluster_without_predictions_needs_candidates(run_file: Path) -> None:
    run_file.write_text(RUN.partition("tune:")[0])
    found = hpcgen("tune", "-c", run_file)
    assert found.status == 2
    assert "the run trains on CPUs" in found.stderr
    assert "name the layouts to measure in tune.candidates" in found.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("program: {command: [prog]}\n", "the run file has the section program"),
        ("", "model is missing, but stage train needs it"),
    ],
    ids=["program", "no-model"],
)
def test_a_run_without_a_training_has_no_layouts(run_file: Path, text: str, said: str) -> None:
    run_file.write_text(f"name: x\ncluster: azure-ndv5\npaths: {{run_dir: run}}\n{text}")
    found = hpcgen("tune", "-c", run_file)
    assert found.status == 2
    assert said in found.stderr


def test_a_broken_rule_is_told_and_not_that_no_layout_fits(run_file: Path) -> None:
    run_file.write_text(on_gpus().replace("{mock: true}", "{}"))
    found = hpcgen("tune", "-c", run_file)
    assert found.status == 2
    assert "data has no source of samples" in found.stderr


def test_a_model_that_fits_no_layout_is_not_measured(run_file: Path) -> None:
    run_file.write_text(on_gpus().replace("hidden_size: 64", "hidden_size: 65536"))
    found = hpcgen("tune", "-c", run_file)
    assert found.status == 2
    assert "no layout is estimated to fit the GPUs" in found.stderr


def on_gpus() -> str:
    """The run file for a node with eight GPUs, without candidates."""
    text = RUN.partition("tune:")[0].replace("local", "azure-ndv5").replace("fp32", "bf16")
    return text.replace("ntasks_per_node: 2, ", "").replace("batch_size: 4", "batch_size: 16")


def test_the_search_chooses_candidates_for_gpus(run_file: Path) -> None:
    run_file.write_text(on_gpus())
    found = hpcgen("tune", "-c", run_file, "--top=2", "--dry-run", "--json")
    assert found.status == 0, found.stderr
    trials = json.loads(found.stdout)["trials"]
    times = [trial["predicted_step_s"] for trial in trials]
    assert 2 <= len(trials) <= 3
    assert times == sorted(times)
    assert any(trial["is_own"] for trial in trials)


def test_it_says_if_the_first_of_the_search_is_not_the_fastest(run_file: Path) -> None:
    run_file.write_text(on_gpus())
    plan = api.plan(with_candidates(api.load_run(run_file), 2), ["tune"])
    found = candidates(plan)
    times = [1.1 * (candidate.step_s or 0.0) for candidate in found]
    times[-1] = 0.9 * times[0]  # the run itself
    for candidate, step_s in zip(found, times, strict=True):
        write(result_path(plan.config.paths.run_dir, candidate.trial.key), measured(step_s))
    shown = hpcgen("tune", "-c", run_file, "--top=2", "--no-write").stdout.splitlines()
    assert shown[-3] == f"the run's own layout, {found[-1].trial.name}, is the fastest"
    assert shown[-2] == f"{found[0].trial.name} was predicted to be the fastest; it is 11.1% slower"
    assert shown[-1].startswith("predicted times are 9.1% too short to ")
    assert "(-9.1%)" in shown[2]
