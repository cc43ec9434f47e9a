"""When a job is warned: early enough to write its checkpoint, and with time to train before."""

from __future__ import annotations

import dataclasses
import re

import pytest

from hpcgen.errors import ConfigErrors
from hpcgen.planning import checkpointing
from hpcgen.run_plan.summary import for_people, summarize
from tests.runs import big_run, minimal_run, planned, write_yaml


@pytest.fixture
def trainer(tmp_path):
    return planned(tmp_path, big_run()).trainer


def test_saving_takes_its_bytes_over_the_bandwidth(trainer):
    """174.6 billion parameters x 14 bytes (bf16 weights, fp32 copy, two moments) = 2.44 TB."""
    assert checkpointing.save_time_s(trainer, 64) == pytest.approx(174.6e9 * 14 / 64e9, rel=1e-3)
    assert checkpointing.save_time_s(trainer, None) == checkpointing.save_time_s(trainer, 1.0)


def test_few_ranks_are_slower_than_fast_storage(trainer):
    few = dataclasses.replace(trainer, world_size=16)
    assert checkpointing.save_time_s(few, 64) == 4 * checkpointing.save_time_s(trainer, 64)
    assert checkpointing.save_time_s(few, 2) == checkpointing.save_time_s(trainer, 2)


def test_a_save_is_staged_in_equal_parts_whether_it_is_waited_for_or_not(trainer):
    assert checkpointing.staged_bytes(trainer) == pytest.approx(174.6e9 * 14 / 128, rel=1e-3)
    waited = dataclasses.replace(trainer.checkpoint, async_save=False)
    synchronous = dataclasses.replace(trainer, checkpoint=waited)
    assert checkpointing.staged_bytes(synchronous) == checkpointing.staged_bytes(trainer)


def test_a_slow_step_is_a_fifth_of_the_peak(trainer):
    """6 x parameters x tokens over 128 GPUs at 0.2 x 989 TFLOP/s, and the attention's part on top."""
    tokens = 1536 * 2048
    plain_s = 6 * 174.6e9 * tokens / (128 * 0.2 * 989e12)
    assert plain_s < checkpointing.slow_step_s(trainer) < 1.2 * plain_s
    nameless = dataclasses.replace(trainer, peak_tflops=None)
    assert checkpointing.slow_step_s(nameless) == pytest.approx(
        checkpointing.slow_step_s(trainer) * 0.2 * 989 / 20
    )
    cpus = dataclasses.replace(nameless, device="cpu")
    assert checkpointing.slow_step_s(cpus) > 1000 * plain_s


@pytest.mark.parametrize(
    ("step_s", "save_s", "evaluation_s", "lead_s"),
    [(0, 0, 0, 60), (1, 1, 0, 70), (5, 0, 0, 70), (100, 50, 0, 360), (100, 50, 300, 660)],
)
def test_the_lead_is_a_margin_and_twice_the_slowest_step_and_save(step_s, save_s, evaluation_s, lead_s):
    assert checkpointing.signal_lead_s(step_s, save_s, evaluation_s) == lead_s


def test_an_evaluation_is_forward_passes_only_and_counts_if_the_signal_may_arrive_in_it(trainer):
    assert checkpointing.evaluation_s(trainer, step_s=3) == 0
    training = dataclasses.replace(trainer.training, eval_interval=100)
    assert checkpointing.evaluation_s(
        dataclasses.replace(trainer, training=training), step_s=3
    ) == pytest.approx(10)


def test_checkpoints_are_half_an_hour_apart_by_default(trainer):
    assert (trainer.checkpoint.save_interval, trainer.checkpoint.save_interval_minutes) == (None, 30)


@pytest.mark.parametrize(
    ("steps", "minutes", "saves"), [(1000, None, 95), (None, 30, 3500), (1000, 30, 3500), (10**9, None, 1)]
)
def test_checkpoints_are_saved_by_steps_and_by_the_clock(trainer, steps, minutes, saves):
    checkpoint = dataclasses.replace(trainer.checkpoint, save_interval=steps, save_interval_minutes=minutes)
    assert checkpointing.num_saves(checkpoint, 95367, step_s=66) == pytest.approx(saves, rel=0.02)


def test_the_shortest_time_holds_a_start_a_step_and_the_lead():
    assert checkpointing.shortest_time_s(100, 600, 30, 40) == 780
    assert checkpointing.shortest_time_s(101, 600, 30, 40) == 780
    assert checkpointing.shortest_time_s(111, 600, 30, 40) == 840


def directive(plan, name):
    return [word for word in plan.stages["train"].directives if word.startswith(f"--{name}=")]


def test_the_signal_reaches_only_the_batch_shell(tmp_path):
    """Without B: USR2 would kill torchrun's agent, data loaders and any wrapper shell."""
    [signal] = directive(planned(tmp_path, big_run()), "signal")
    assert signal == "--signal=B:USR2@410"


def test_a_configured_lead_replaces_the_computed_one(tmp_path):
    run = big_run()
    [signal] = directive(planned(tmp_path, run, overrides=["slurm.train.signal_lead_s=900"]), "signal")
    assert signal == "--signal=B:USR2@900"
    with pytest.raises(
        ConfigErrors,
        match=r"--set slurm.train.signal_lead_s: slurm.train.signal_lead_s = 400 is too short "
        r"to save a checkpoint, which takes 6 min 50 s \(1 min \+ 2 x \(a step of .* \+ a save of 39 s\)\); "
        r"use at least 410$",
    ):
        planned(tmp_path, run, overrides=["slurm.train.signal_lead_s=400"])


def test_a_time_limit_that_leaves_no_time_to_train(tmp_path):
    run = big_run()
    with pytest.raises(
        ConfigErrors, match=r"slurm.train.time = 10:00 leaves no time to train.*; use at least 00:20:00$"
    ):
        planned(tmp_path, run, overrides=["slurm.train.time=10:00"])
    planned(tmp_path, run, overrides=["slurm.train.time=00:20:00"])
    with pytest.raises(ConfigErrors, match="use at least 00:20:00"):
        planned(tmp_path, run, overrides=["slurm.train.time=00:19:59"])


def refused(tmp_path, run, *overrides):
    with pytest.raises(ConfigErrors) as found:
        planned(tmp_path, run, overrides=overrides)
    [message] = found.value.messages
    return message


def test_a_configured_lead_that_leaves_no_time_is_named(tmp_path):
    message = refused(tmp_path, big_run(), "slurm.train.signal_lead_s=60000", "slurm.train.time=10:00:00")
    assert (
        "slurm.train.time = 10:00:00 leaves no time to train. Start-up takes 10 min, and the last checkpoint must "
        "start 16 h 40 min before the limit (slurm.train.signal_lead_s = 60000); use at least 16:5" in message
    )
    assert message.endswith(", or set slurm.train.signal_lead_s to 410 or more")


def test_no_limit_is_proposed_that_the_partition_refuses(tmp_path):
    write_yaml(
        tmp_path / "site.yaml", {"extends": "azure-ndv5", "partitions": {"hpc": {"max_time": "10:00:00"}}}
    )
    run = big_run(cluster="./site.yaml")
    message = refused(tmp_path, run, "slurm.train.signal_lead_s=60000", "slurm.train.time=10:00:00")
    assert "; set slurm.train.signal_lead_s to 410 or more; the limit would have to be 16:5" in message
    assert message.endswith(", and partition hpc allows 10:00:00")


def test_slurm_announces_a_limit_at_most_18_hours_before(tmp_path):
    assert "must be at most 65535" in refused(tmp_path, big_run(), "slurm.train.signal_lead_s=65536")
    huge = ["training.global_batch_size=3072000", "training.train_iters=10", "slurm.train.time=90-00:00:00"]
    message = refused(tmp_path, big_run(), *huge)
    assert "and Slurm announces the limit at most 18 h 12 min before it; use more nodes" in message


def test_a_machine_without_slurm_has_no_limit(tmp_path):
    """Nobody chose the limit of profile local. One in the run file is Slurm's."""
    run = minimal_run(preset="llama3-8b", model={}, training={}, optimizer={})
    del run["model"], run["training"], run["optimizer"]
    layout = ["slurm.train.ntasks_per_node=2"]
    found = planned(tmp_path, run, overrides=layout)
    [warning] = [text for text in found.warnings if "global_batch_size" in text]
    assert re.search(r"results in steps of about \d+ d \d+ h on this machine", warning)
    [stop] = [text for heading, text in for_people(summarize(found)) if heading == "stop"]
    assert stop.startswith("Ctrl-C asks to save a checkpoint")
    message = refused(tmp_path, run, *layout, "slurm.defaults.time=1-00:00:00")
    assert "leaves no time to save" in message
    assert "Nodes of type cpu have no GPUs; use a cluster profile with GPUs" in message
    assert planned(tmp_path, minimal_run()).warnings == ()


def test_the_limit_that_decides_a_save_is_named(tmp_path):
    def saving(*overrides, **profile):
        write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", **profile})
        found = planned(tmp_path, big_run(cluster="./site.yaml"), overrides=overrides)
        return next(text for heading, text in for_people(summarize(found)) if heading == "checkpoint")

    assert "39 s to write at 64 GB/s (storage_write_gb_s of the profile)" in saving(storage_write_gb_s=64)
    assert (
        "20 s to write at 128 GB/s (assumed 1 GB/s per process; storage_write_gb_s = 200 of the profile allows more)"
    ) in saving(storage_write_gb_s=200)
    unset = saving(storage_write_gb_s=None)
    assert "40 min 45 s to write at 1 GB/s (assumed; set storage_write_gb_s in the profile)" in unset


def test_a_small_run_is_warned_early_enough_too(tmp_path):
    [signal] = directive(planned(tmp_path, minimal_run()), "signal")
    assert int(signal.rpartition("@")[2]) >= 60
