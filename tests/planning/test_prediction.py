"""The prediction of a planned run, in Python, as JSON and as text."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from hpcgen.planning.predicted_step import NoPrediction
from hpcgen.run_plan.prediction import DENSE_RANGE, EXPERTS_RANGE, UNMEASURED_RANGE, predict, step_time_s
from hpcgen.run_plan.summary import for_people, summarize
from tests.recorded_run import write_checkpoint
from tests.runs import big_run, minimal_run, planned, write_yaml
from trainer.contract.model.batch_size import Batches
from trainer.contract.resuming.hyperparameters import sections

GPUS = {
    "cluster": "azure-ndv5",
    "training": {"micro_batch_size": 1, "global_batch_size": 64, "train_iters": 1000, "precision": "bf16"},
    "parallelism": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "slurm": {"train": {"time": "1:00:00"}},
}
"""A small model on eight H100s, with four microbatches per rank."""

ENDLESS = (
    *(
        "model.hidden_size=8192",
        "model.num_attention_heads=64",
        "model.num_layers=48",
        "model.seq_length=8192",
    ),
    *("training.global_batch_size=262144", "memory_check=warning", "slurm.train.time=null"),
)
"""Steps of days."""


def lines(plan):
    return dict(for_people(summarize(plan)))


def test_the_figures_follow_from_the_step(tmp_path):
    found = predict(planned(tmp_path, big_run()))
    assert found.tokens_per_s * found.step.total == 1536 * 2048
    assert found.remaining_tokens == 95367 * 1536 * 2048
    assert found.likely.steps_s == pytest.approx(95367 * found.step.total)
    assert found.low.steps_s < found.likely.steps_s < found.high.steps_s
    assert found.low.num_jobs < found.high.num_jobs
    assert found.likely.gpu_hours == pytest.approx(128 * found.likely.total_s / 3600)
    assert 150 < found.tflops_per_gpu < found.full_attention_tflops_per_gpu < 989
    assert found.guesses


@pytest.mark.parametrize(
    ("preset", "node_type", "span"),
    [
        ("13b", "ndv5", DENSE_RANGE),
        ("13b", "ndv4", UNMEASURED_RANGE),
        ("mixtral-8x7b", "ndv5", EXPERTS_RANGE),
    ],
)
def test_the_range_is_wide_where_little_is_known(tmp_path, preset, node_type, span):
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "node_type": node_type})
    run = big_run(cluster="./site.yaml", preset=preset, data={"mock": True})
    assert predict(planned(tmp_path, run)).range == span


def test_a_step_that_waits_for_the_host_is_uncertain_and_a_warning(tmp_path):
    """Kernels shorter than their launches: a host twice as fast halves the step, so the range contains that."""
    run = big_run(preset="125m", data={"mock": True})
    batch = "training.global_batch_size=1024"
    found = predict(planned(tmp_path, run, overrides=(batch, "training.micro_batch_size=1")))
    assert found.step.host > 0.5 * found.step.total
    assert found.range[0] < 0.6
    assert found.range[1] > 1.2
    assert [warning.path for warning in found.warnings if "host" in warning.reason] == [
        "training.micro_batch_size"
    ]
    larger = predict(planned(tmp_path, run, overrides=(batch, "training.micro_batch_size=8")))
    assert larger.range[1] - larger.range[0] < found.range[1] - found.range[0]


def test_spare_nodes_are_charged(tmp_path):
    found, spared = (
        predict(planned(tmp_path, big_run(), overrides=overrides)).likely
        for overrides in ((), ("preflight.spare_nodes=2",))
    )
    assert spared.gpu_hours == pytest.approx(found.gpu_hours * 18 / 16)


def test_a_growing_batch_takes_the_time_of_each_of_its_steps(tmp_path):
    """Steps of 16, 32 and 48 samples, each size over 1000 samples, and then of 64."""
    run = minimal_run(**GPUS)
    growing = planned(tmp_path, run, overrides=["training.rampup_batch_size=[16, 16, 3000]"])
    counts = Counter(batch.size for batch in Batches(growing.trainer.training))
    assert sorted(counts) == [16, 32, 48, 64]
    expected = 0.0
    for size, count in counts.items():
        constant = planned(tmp_path, run, overrides=[f"training.global_batch_size={size}"])
        expected += count * predict(constant).step.total
    assert predict(growing).likely.steps_s == pytest.approx(expected, rel=0.02)


def test_only_the_rest_of_a_resumed_run_counts(tmp_path):
    run = minimal_run(**GPUS, paths={"run_dir": "run"})
    plan = planned(tmp_path, run)
    whole = predict(plan)
    write_checkpoint(
        tmp_path / "run/checkpoints", 750, **sections(plan.trainer), world_size=8, consumed_samples=750 * 64
    )
    rest = predict(planned(tmp_path, run))
    assert rest.likely.steps_s == pytest.approx(whole.likely.steps_s / 4)
    assert rest.remaining_tokens == whole.remaining_tokens / 4


def test_weights_only_are_a_start_and_no_progress(tmp_path):
    run = minimal_run(**GPUS, paths={"run_dir": "run"})
    plan = planned(tmp_path, run)
    write_checkpoint(tmp_path / "weights", 750, **sections(plan.trainer), world_size=8)
    load = ["checkpoint.load=weights", "checkpoint.finetune=true"]
    assert predict(planned(tmp_path, run, overrides=load)).remaining_tokens == predict(plan).remaining_tokens


@pytest.mark.parametrize(
    ("overrides", "profile", "reason"),
    [
        ((), {"extends": "local"}, "the run trains on CPUs, whose speed hpcgen does not know"),
        (("training.precision=fp32",), {}, "node type ndv5 lacks peak_tflops.fp32"),
        (("model.layer_spec=own_code.py:layers",), {}, "builds layers whose time hpcgen does not know"),
        (("model.model_provider=own_code.py:model",), {}, "builds layers whose time hpcgen does not know"),
        (ENDLESS, {"extends": "local", "node_type": "ndv5"}, "the time limit leaves no time to train"),
    ],
)
def test_what_cannot_be_predicted_says_why(tmp_path, overrides, profile, reason):
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", **profile})
    (tmp_path / "own_code.py").write_text("def layers(*arguments): ...\n\n\ndef model(**arguments): ...\n")
    run = minimal_run(**{**GPUS, "cluster": "./site.yaml", "parallelism": {}})
    plan = planned(tmp_path, run, overrides=overrides)
    with pytest.raises(NoPrediction, match=reason):
        predict(plan)
    summary = summarize(plan)
    assert summary["prediction"] is None
    assert reason in summary["no_prediction"]
    assert reason in dict(for_people(summary))["prediction"]


def test_the_time_of_another_program_is_unknown(tmp_path):
    run = {
        **{
            key: value for key, value in big_run().items() if key in ("name", "cluster", "paths", "container")
        },
        "slurm": {"run": {"nodes": 2, "time": "1-00:00:00"}},
        "program": {"command": ["python", "train.py"]},
    }
    summary = summarize(planned(tmp_path, run, stages=["run"]))
    assert summary["prediction"] is None
    assert "its own trainer only" in dict(for_people(summary))["prediction"]


def test_the_summary_has_every_figure_with_its_unit(tmp_path):
    found = summarize(planned(tmp_path, big_run()))["prediction"]
    assert json.loads(json.dumps(found)) == found
    assert sum(found["step_parts_s"].values()) == pytest.approx(found["step_time_s"])
    assert found["full_attention_mfu"] > found["mfu"] > 0.2
    likely = found["likely"]
    parts = ("steps_s", "evaluation_s", "saves_and_failures_s", "job_overhead_s")
    assert likely["total_s"] == pytest.approx(sum(likely[part] for part in parts))
    assert likely["days"] == likely["total_s"] / 86400
    assert likely["cost"] is None


def test_people_read_ranges(tmp_path):
    write_yaml(
        tmp_path / "site.yaml", {"extends": "azure-ndv5", "price_per_gpu_hour": 2.5, "currency": "EUR"}
    )
    text = lines(planned(tmp_path, big_run(cluster="./site.yaml")))
    assert text["step time"].startswith("about ")
    assert "compute " in text["step time"]
    assert "MFU" in text["throughput"]
    assert "causal attention counted half" in text["throughput"]
    assert " to " in text["duration"]
    assert "for 299,998,642,176 tokens" in text["duration"]
    assert "EUR at 2.5 EUR per GPU-hour" in text["resources"]
    assert re.match(
        r"\d+ constants of the prediction; --json lists them, and hpcgen tune measures 1 of them$",
        text["guessed"],
    )


def test_mfu_in_fp8_is_of_the_fp8_peak(tmp_path):
    run = minimal_run(**GPUS)
    assert "of the FP8 peak" not in lines(planned(tmp_path, run))["throughput"]
    fp8 = lines(planned(tmp_path, run, overrides=["training.fp8=hybrid"]))
    assert re.search(r", MFU \d+% of the FP8 peak \(", fp8["throughput"])


def test_without_measured_kernels_everything_is_guessed(tmp_path):
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "node_type": "ndv4"})
    text = lines(planned(tmp_path, big_run(cluster="./site.yaml", memory_check="warning")))
    assert "every time above, since kernels of A100 SXM 80 GB were not measured: " in text["guessed"]


def test_implausible_prices_are_warnings_and_free_partitions_are_not(tmp_path):
    partitions = {"spot": {"price_per_gpu_hour": 0}, "gpu": {"price_per_gpu_hour": 1e9}}

    def doubted(**prices):
        write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "partitions": partitions, **prices})
        found = predict(planned(tmp_path, big_run(cluster="./site.yaml"))).warnings
        return [(doubt.path, doubt.file) for doubt in found if "implausible" in doubt.reason]

    of_gpu = ("partitions.gpu.price_per_gpu_hour", "cluster")
    assert doubted(price_per_gpu_hour=2.5) == [of_gpu]
    assert doubted(price_per_gpu_hour=1e6) == [("price_per_gpu_hour", "cluster"), of_gpu]
    assert doubted(price_per_gpu_hour=300, currency="JPY") == [of_gpu]


def test_jobs_that_mostly_start_and_stop_are_a_warning(tmp_path):
    def doubted(time):
        found = predict(planned(tmp_path, big_run(), overrides=[f"slurm.train.time={time}"])).warnings
        return [str(doubt) for doubt in found if "its start and its stop" in doubt.reason]

    [message] = doubted("0:20:00")
    better = re.search(r"each job spends \d\d% of it .*; use (\S+) or more", message)[1]
    assert doubted(better) == []


def test_too_frequent_saves_are_named_as_the_cause(tmp_path):
    """Each step waits for a save of half an hour. The advice is that for the predicted step."""
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "storage_write_gb_s": 1})
    often = ("checkpoint.async_save=false", "checkpoint.save_interval=1", "slurm.train.time=3-00:00:00")
    found = planned(tmp_path, big_run(cluster="./site.yaml"), overrides=often)
    with pytest.raises(
        NoPrediction, match=r"checkpoint\.save_interval = 1 saves so often .*: a save takes 40 min"
    ):
        predict(found)
    [warning] = [text for text in summarize(found)["warnings"] if "repeated after failures" in text]
    steps = int(re.search(r"; use about (\d+) \(steps\)", warning)[1])
    saving = summarize(found)["storage"]["saving"]
    assert steps == round(saving["best_interval_s"] / step_time_s(found))


def test_failures_take_time_and_restarts(tmp_path):
    """Restarts are those at time limits and after failures. Jobs that fail too often do not progress."""

    def at(hours):
        profile = {"extends": "azure-ndv5", "gpu_hours_between_failures": hours}
        write_yaml(tmp_path / "site.yaml", profile)
        return planned(tmp_path, big_run(cluster="./site.yaml"))

    rarely, often = predict(at(1e6)), predict(at(1000))
    assert often.likely.saves_and_failures_s > 5 * rarely.likely.saves_and_failures_s
    failures = often.high.total_s / 3600 / (1000 / 128)
    [restarts] = [problem for problem in often.warnings if "restarts" in problem.reason]
    assert f"may need {often.high.num_jobs - 1 + round(failures)}" in restarts.reason
    with pytest.raises(NoPrediction, match="a failure is expected every 2 min 49 s, so the run would hardly"):
        predict(at(6))


def test_too_few_restarts_are_told(tmp_path):
    plan = planned(tmp_path, big_run(), overrides=["slurm.train.max_restarts=3"])
    [warning] = set(summarize(plan)["warnings"]) - set(plan.warnings)
    assert "slurm.train.max_restarts = 3 allows 3 restarts, but the run may need" in warning
    assert "--set slurm.train.max_restarts" in warning
    plan = planned(tmp_path, big_run(), overrides=["slurm.train.chain=3"])
    [warning] = set(summarize(plan)["warnings"]) - set(plan.warnings)
    assert "slurm.train.chain = 3 allows 3 jobs, but the run may need" in warning


def test_a_run_of_years_is_told_to_use_more_nodes_not_more_restarts(tmp_path):
    plan = planned(tmp_path, big_run(), overrides=["training.train_iters=100000000"])
    told = set(summarize(plan)["warnings"]) - set(plan.warnings)
    [warning] = [text for text in told if " years" in text]
    assert "slurm.train.nodes = 16 may be too few: the run may take up to" in warning
    assert warning.endswith("hpcgen layouts --finish-in 30d finds how many finish in a month")
    assert not any("restarts" in text for text in told)


def test_steps_too_slow_for_the_signal_are_told(tmp_path):
    """With one microbatch, seven of eight stages wait. The lead is planned for a fifth of the peak."""
    slow = [
        *("parallelism.virtual_pipeline_model_parallel_size=null", "training.global_batch_size=64"),
        *("training.micro_batch_size=16", "training.recompute_granularity=full"),
        *("training.recompute_method=uniform", "training.recompute_num_layers=1"),
    ]
    plan = planned(tmp_path, big_run(), overrides=slow)
    assert any(
        "slurm.train.signal_lead_s" in text and "may be too late" in text
        for text in summarize(plan)["warnings"]
    )
    assert not any("may be too late" in text for text in summarize(planned(tmp_path, big_run()))["warnings"])


def test_no_stage_that_trains(tmp_path):
    plan = planned(tmp_path, big_run(), stages=["tensorboard"])
    with pytest.raises(NoPrediction, match="no planned stage trains; plan the stage train"):
        predict(plan)
    assert "prediction" not in summarize(plan)
