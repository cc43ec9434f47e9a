"""The nccl-test stage: the bandwidth between the GPUs of the job."""

from __future__ import annotations

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.environment import stage_environment
from hpcgen.planning.stages.config_text import config_text
from hpcgen.planning.stages.thresholds import message_bytes, thresholds
from hpcgen.planning.stages.work import Work
from trainer.contract.health import NcclTestConfig

SMALLEST_BYTES = 2**20
STEP_FACTOR = 4
"""From one message to the next: 1 MiB, 4 MiB, ... up to the one that is judged."""


def work(run: Run, config: RunConfig, allocation: Allocation) -> Work:
    """What the stage runs: NVIDIA's all_reduce_perf where the profile names it, and trainer.health.nccl_test."""
    cluster, node_type = run.cluster, run.node_type
    baseline = cluster.nccl_baseline or f"{config.paths.run_dir}/nccl-baseline.json"
    largest = message_bytes(node_type)
    test = NcclTestConfig(
        device=node_type.device,
        node_type=cluster.node_type,
        nodes=allocation.nodes,
        ranks_per_node=allocation.ntasks_per_node,
        gpus_per_node=node_type.gpus_per_node,
        sizes_bytes=_sizes(largest),
        thresholds=thresholds(node_type),
        baseline=baseline,
        environment=_of_node_type(run, config),
        nics=tuple(nic.name for nic in node_type.nics),
    )
    return Work(
        arguments=("-m", "trainer.health.nccl_test"),
        writes=(baseline.rpartition("/")[0],) if cluster.nccl_baseline else (),
        files={"nccl-test.config.json": config_text(test)},
        values={
            "nccl_tests": (cluster.nccl_tests or "") if node_type.device == "cuda" else "",
            "smallest_bytes": SMALLEST_BYTES,
            "largest_bytes": largest,
            "step_factor": STEP_FACTOR,
        },
    )


def _sizes(largest: int) -> tuple[int, ...]:
    """Messages from the largest downwards, smallest first."""
    sizes = [largest]
    while sizes[0] // STEP_FACTOR >= SMALLEST_BYTES:
        sizes.insert(0, sizes[0] // STEP_FACTOR)
    return tuple(sizes)


def _of_node_type(run: Run, config: RunConfig) -> dict[str, str]:
    """NCCL's variables as the node type sets them, whatever won over them."""
    layers = (
        each
        for variable in stage_environment("nccl-test", run, config)
        for each in (*variable.hides, variable)
    )
    return {
        each.name: each.value
        for each in layers
        if each.layer == "node type" and each.name.startswith("NCCL_")
    }
