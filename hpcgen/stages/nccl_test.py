"""The stage nccl-test: measures the bandwidth between the GPUs of the job."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.config_text import config_text
from hpcgen.planning.environment import stage_environment
from hpcgen.planning.kind import Export, Stage, Work
from hpcgen.planning.node_check import message_bytes, rdma_devices, thresholds
from trainer.contract.config import TrainerConfig
from trainer.contract.health import NcclTestConfig

SMALLEST_BYTES = 2**20
STEP_FACTOR = 4
"""Factor between message sizes: 1 MiB, 4 MiB, ... up to the size that is checked against thresholds."""


class NcclTest(Stage):
    """Runs NVIDIA's all_reduce_perf, if the profile names it, and trainer.health.nccl_test."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Compares bandwidths with the thresholds of the node type and with earlier results on the cluster."""
        cluster, node_type = run.cluster, run.node_type
        baseline = cluster.nccl_baseline or f"{config.paths.run_dir}/nccl-baseline.json"
        largest = message_bytes(node_type)
        test = NcclTestConfig(
            device=node_type.device,
            node_type=cluster.node_type,
            nodes=allocation.nodes,
            ranks_per_node=allocation.ntasks_per_node,
            gpus_per_node=node_type.gpus_per_node,
            nvlink_nodes=allocation.nvlink_nodes,
            sizes_bytes=_sizes(largest),
            thresholds=thresholds(node_type),
            baseline=baseline,
            environment=self._variables_of_node_type(run, config),
            nics=rdma_devices(node_type),
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

    def exports(self, run: Run, config: RunConfig) -> Iterator[Export]:
        """Makes every collective of the test use SHARP if training uses it."""
        if config.parallelism.use_sharp and run.node_type.device == "cuda":
            why = "The entire test uses SHARP. In training, Megatron-Core enables it for one process group only."
            yield Export("NCCL_COLLNET_ENABLE", "1", why, "Megatron-Core, parallel_state.py")

    def _variables_of_node_type(self, run: Run, config: RunConfig) -> dict[str, str]:
        """NCCL variables as set by the node type, even if they are overridden."""
        layers = (
            each for variable in stage_environment(self, run, config) for each in (*variable.hides, variable)
        )
        return {
            each.name: each.value
            for each in layers
            if each.layer == "node type" and each.name.startswith("NCCL_")
        }


def _sizes(largest: int) -> tuple[int, ...]:
    """Message sizes in ascending order, derived from the largest one."""
    sizes = [largest]
    while sizes[0] // STEP_FACTOR >= SMALLEST_BYTES:
        sizes.insert(0, sizes[0] // STEP_FACTOR)
    return tuple(sizes)


STAGES = (NcclTest.of("nccl-test"),)
