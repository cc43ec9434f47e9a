"""How long a run takes: its steps by batch size, jobs, and what they use."""

from __future__ import annotations

import itertools

import pytest

from hpcgen.config.cluster import ClusterConfig, PartitionConfig, price_per_gpu_hour
from hpcgen.config.slurm import StageSettings
from hpcgen.planning.run_time import NODE_WATTS, Job, Resources, Steps, remaining_steps, run_time
from trainer.contract.config import TrainingConfig
from trainer.contract.model.batch_size import Batches

TRAINING = {"micro_batch_size": 1, "global_batch_size": 64, "train_iters": 1000}
DAY_JOB = {"limit_s": 86400, "startup_s": 300.0, "lead_s": 100.0, "last_save_s": 50.0}
RESOURCES = Resources(num_nodes=4, num_gpus=32, gpu_watts=700.0)


@pytest.mark.parametrize(
    ("ramp", "iteration", "consumed"),
    [
        (None, 0, 0),
        (None, 400, 25600),
        ((16, 16, 3000), 0, 0),
        ((16, 16, 3000), 70, 1296),
        ((16, 16, 3000), 500, 30000),
        ((64, 16, 3000), 0, 0),
        ((16, 16, 10**9), 0, 0),
        (None, 1000, 64000),
    ],
)
def test_steps_are_counted_by_batch_size(ramp, iteration, consumed):
    training = TrainingConfig(**TRAINING, rampup_batch_size=ramp)
    sizes = [batch.size for batch in Batches(training, iteration, consumed)]
    counted = [Steps(len(list(group)), size) for size, group in itertools.groupby(sizes)]
    assert list(remaining_steps(training, iteration, consumed)) == counted


@pytest.mark.parametrize(
    ("days", "limit_s", "jobs"), [(0.5, 86400, 1), (1, 86400, 2), (30, 86400, 31), (30, 0, 1)]
)
def test_each_job_loses_its_start_and_its_last_save(days, limit_s, jobs):
    """86,000 of 86,400 s of a job train. Jobs end with the save after the signal."""
    job = Job(**{**DAY_JOB, "limit_s": limit_s})
    found = run_time(86400 * days, 0, 0, job, RESOURCES)
    assert found.num_jobs == jobs
    assert found.total_s == 86400 * days + jobs * 350


def test_gpu_hours_and_energy_are_those_of_all_allocated_nodes():
    found = run_time(2700.0, 225, 0.1, Job(**DAY_JOB), RESOURCES)
    assert found.gpu_hours == 32
    assert found.energy_kwh == pytest.approx((32 * 700 + 4 * NODE_WATTS) / 1000)
    four_gpus_each = Resources(num_nodes=4, num_gpus=16, gpu_watts=700.0)
    assert four_gpus_each.kilowatts == pytest.approx(RESOURCES.kilowatts / 2)


@pytest.mark.parametrize(
    ("partition", "prices", "of_all", "price"),
    [
        (None, {}, None, None),
        (None, {"hpc": 3.0}, 2.0, 2.0),
        ("hpc", {"hpc": 3.0}, 2.0, 3.0),
        ("hpc", {"hpc": 3.0}, None, 3.0),
        ("other", {"hpc": 3.0}, 2.0, 2.0),
        ("hpc", {"hpc": None}, 2.0, 2.0),
        ("hpc", {"hpc": 0.0}, 2.0, 0.0),
        ("spot,hpc", {"hpc": 3.0, "spot": 1.0}, 2.0, 3.0),
    ],
)
def test_the_price_is_that_of_the_partition_or_the_cluster(partition, prices, of_all, price):
    """Slurm may choose the more expensive one of several partitions."""
    partitions = {name: PartitionConfig(price_per_gpu_hour=each) for name, each in prices.items()}
    cluster = ClusterConfig(node_type="ndv5", partitions=partitions, price_per_gpu_hour=of_all)
    assert price_per_gpu_hour(StageSettings(partition=partition), cluster) == price
