"""Warnings about settings of a job that Slurm accepts, but that have no effect or another one than meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.node_type import NodeType
from hpcgen.config.run import RunConfig
from hpcgen.config.sbatch_values import other_reading, refused_value
from hpcgen.errors import Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.kind import Stage
from hpcgen.planning.request import (
    Setting,
    extra_directives,
    make_allocation,
    make_array,
    memory_mb,
    option_name,
    place_of,
    stage_settings,
)
from hpcgen.text import counted, one_of

LITTLE_MB = 1024
"""Memory of a node that is less than any stage needs, and a usual number of GB."""
TAKES_CPUS = ("hint", "threads-per-core", "core-spec", "thread-spec", "cores-per-socket")
"""Options of sbatch that take CPUs from a job, which masks may name."""


def allocation_warnings(
    stage: Stage, config: RunConfig, cluster: ClusterConfig, node_type: NodeType
) -> Iterator[Problem]:
    """Yields settings that have no effect, or an effect that is not meant."""

    def place(name: str) -> Setting:
        return place_of(stage, name, config, cluster)

    allocation = make_allocation(stage, config, cluster, node_type)
    yield from array_warnings(stage, config, cluster)
    yield from _unit_warnings(allocation, place)
    yield from _segment_warnings(stage, allocation, node_type, place)
    yield from _mask_warnings(stage, allocation, cluster, node_type, place)
    of_step = {option_name(option): option for option in allocation.srun_options()}
    for item, directive in extra_directives(stage, config, cluster):
        option = option_name(directive)
        if option == "segment":
            reason = "is not checked, and is also passed for jobs with fewer nodes, which Slurm may refuse"
            yield item.problem(reason, "use the key segment")
        elif option in TAKES_CPUS and allocation.cpu_masks:
            reason = "can take CPUs from the job that cpu_masks of the node type name, and srun then refuses the masks"
            yield item.problem(reason, "remove it, or set cpu_masks: [] in a node type of your own")
        elif option in of_step and allocation.num_tasks > 1:
            reason = f"has no effect on the tasks, because their step has {of_step[option]}"
            yield item.problem(reason, "remove it, or change step in a template of your own")


def _unit_warnings(allocation: Allocation, place: Callable[[str], Setting]) -> Iterator[Problem]:
    """Yields hours that are minutes to Slurm, and GB that are MB."""
    time, mem = allocation.settings.time, allocation.settings.mem
    if time and (reading := other_reading(time)):
        yield place("time").problem(*reading)
    if mem and not refused_value("mem", mem) and 0 < memory_mb(mem) < LITTLE_MB:
        reason = f"is only {memory_mb(mem)} MB per node, because a number without a unit is MB to Slurm"
        yield place("mem").problem(reason, f"write {mem}G for GB")


def _segment_warnings(
    stage: Stage, allocation: Allocation, node_type: NodeType, place: Callable[[str], Setting]
) -> Iterator[Problem]:
    """Yields a segment that no NVLink domain holds."""
    domain = node_type.nvlink.domain_nodes if node_type.nvlink else 1
    if stage.uses_gpus and 1 < domain < (allocation.settings.segment or 0):
        reason = (
            f"is more than the {domain} nodes that NVLink connects (nvlink.domain_nodes of the node type)"
        )
        hint = f"use at most {domain}, unless blocks of Slurm's topology contain several domains"
        yield place("segment").problem(reason, hint)


def _mask_warnings(
    stage: Stage,
    allocation: Allocation,
    cluster: ClusterConfig,
    node_type: NodeType,
    place: Callable[[str], Setting],
) -> Iterator[Problem]:
    """Yields the reason why ranks do not use the CPU masks of the node type. A launcher binds its ranks itself."""
    tasks, masks = allocation.ntasks_per_node, node_type.cpu_masks
    is_bound = bool(allocation.cpu_masks) or tasks != allocation.ranks_per_node
    if not masks or is_bound or not stage.uses_gpus or stage.is_single_task or stage.shares_node:
        return
    result = (
        f"so ranks are not bound to the CPUs near their GPUs (cpu_masks of node type {cluster.node_type})"
    )
    sizes = one_of(sorted({str(int(mask, 16).bit_count()) for mask in masks}))
    if not allocation.exclusive:
        reason = "has cpu_masks, but its jobs share their nodes (exclusive: false), so the masks are not used"
        yield Problem("node_type", reason, "set cpu_masks to [], or exclusive to true", "cluster")
    elif tasks != len(masks):
        reason = f"is not the number of masks, {len(masks)}, {result}"
        yield place("ntasks_per_node").problem(reason, f"use {len(masks)} if every GPU should have a rank")
    elif allocation.settings.cpus_per_task:
        yield place("cpus_per_task").problem(
            f"is not the number of CPUs in a mask, {sizes}, {result}", f"use {sizes}, or remove it"
        )
    else:
        reason = f"has masks of {sizes} CPUs, but each rank gets {allocation.cpus_per_task} of cpus_per_node, {result}"
        yield Problem("node_type", reason, "correct cpus_per_node or cpu_masks", "cluster")


def array_warnings(stage: Stage, config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """Yields a warning if the array gets fewer tasks than requested."""
    array = make_array(stage, config, cluster)
    where = place_of(stage, "num_tasks", config, cluster)
    asked = getattr(stage_settings(stage, config, cluster), "num_tasks", None)
    if array is None or asked is None or asked == array.num_tasks:
        return
    limit, or_more = "the cluster's max_array_size", ""
    if array.num_tasks < cluster.max_array_size:
        limit, or_more = "the number of output files", ", or raise data.corpus.num_output_files"
    most = array.num_tasks
    reason = f"is more than {limit} ({most}), so the array gets only {counted(most, 'task')}"
    yield where.problem(reason, f"use at most {most}{or_more}")
