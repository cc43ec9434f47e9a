"""The resources that a stage requests from Slurm: its settings from the run file and the cluster profile, and the
mistakes in them.

`hpcgen.run_plan.stage` adds the directives that every job has: name, log, signal and requeue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from hpcgen.config.cluster import ClusterConfig, JobLimits, limits_of, within_limit
from hpcgen.config.defaults import OF_PROFILE
from hpcgen.config.fields import seconds
from hpcgen.config.node_type import NodeType
from hpcgen.config.run import RunConfig
from hpcgen.config.sbatch_options import EXCLUSIVE_OPTIONS, misspelled_option, release_with
from hpcgen.config.sbatch_values import other_reading, refused_value
from hpcgen.config.slurm import OWN_OPTIONS, SETTING_NAMES, ArraySettings, StageSettings
from hpcgen.config.stages import STAGE_ROWS
from hpcgen.errors import Problem
from hpcgen.planning.allocation import Allocation, Array
from hpcgen.planning.kind import Stage
from hpcgen.planning.slurm_variables import DEFAULTS
from hpcgen.text import counted, one_of
from trainer.contract.record import record

NUM_TASKS = 8
"""Default number of tasks in an array."""

OLDEST_SLURM = "20.11"
"""Oldest version whose --exclusive, step resources and requeue signals behave as the scripts expect."""


def stage_settings(stage: Stage, config: RunConfig, cluster: ClusterConfig) -> StageSettings:
    """The settings of a stage, each from the first of its `_sections` that sets it."""
    own = type(config.slurm.of(stage))
    sections = _sections(stage, config, cluster)
    chosen = {field.name: _found(stage, field.name, sections)[1] for field in dataclasses.fields(own)}
    if chosen["time"] is None and stage.time_limit is not None:
        chosen["time"] = within_limit(stage.time_limit, own(**chosen), cluster)
    chosen["extra_directives"] = tuple(option for _, option in extra_directives(stage, config, cluster))
    return own(**chosen)


_Sections = tuple[tuple["Setting", StageSettings], ...]


def _sections(stage: Stage, config: RunConfig, cluster: ClusterConfig) -> _Sections:
    """The sections that can set a stage's settings. A run file takes precedence over the profile, and in each of them
    the stage's section over the values for all stages. The section of `settings_of` is between these two."""
    rows = (stage, *([STAGE_ROWS[stage.settings_of]] if stage.settings_of else []))
    return (
        *((Setting(f"slurm.{row.section}"), config.slurm.of(row)) for row in rows),
        (Setting("slurm.defaults"), config.slurm.defaults),
        *((Setting(f"slurm.{row.section}", "cluster"), cluster.slurm.of(row)) for row in rows),
        (Setting("slurm", "cluster"), cluster.slurm),
    )


def _found(stage: Stage, name: str, sections: _Sections) -> tuple[Setting, Any]:
    """The place that sets a stage's setting, and the value. If nothing sets it: the stage's own section, and None."""
    own = sections[0][0]
    # with training's time limit, a short job would wait for a long slot
    own_alone = (name == "time" and stage.time_limit is not None) or (
        name == "nodes" and stage.one_node_by_default
    )
    for section, settings in sections:
        # only a stage's section has the keys of arrays
        value = getattr(settings, name, None)
        if value is not None and (section.path == own.path or not own_alone):
            return section.key(name), value
    return own.key(name), None


def extra_directives(
    stage: Stage, config: RunConfig, cluster: ClusterConfig
) -> Iterator[tuple[Setting, str]]:
    """Yields the cluster's extra sbatch options, then the run's, each with its place.

    sbatch uses the last of two options with the same name, so a cluster option that the run also sets is omitted.
    """
    of_file: dict[str, list[tuple[Setting, str]]] = {"run": [], "cluster": []}
    for section, settings in reversed(_sections(stage, config, cluster)):
        if (options := settings.extra_directives) is not None:
            of_file[section.file] = [
                (section.key(f"extra_directives[{index}]"), option) for index, option in enumerate(options)
            ]
    given = {option_name(option) for _, option in of_file["run"]}
    yield from (item for item in of_file["cluster"] if option_name(item[1]) not in given)
    yield from of_file["run"]


def option_name(directive: str) -> str:
    """The option of a directive: mail-type for --mail-type=FAIL."""
    return directive[2:].partition("=")[0]


@record
class Setting:
    """The place of a setting or a section: a dotted path in the run file or in the cluster profile."""

    path: str
    file: Literal["run", "cluster"] = "run"

    def key(self, name: str) -> Setting:
        """The place of a key of this section."""
        return Setting(f"{self.path}.{name}", self.file)

    def problem(self, reason: str, hint: str = "", about: tuple[str, ...] = ()) -> Problem:
        """A problem with the setting."""
        return Problem(self.path, reason, hint, self.file, about=about)


def place_of(stage: Stage, name: str, config: RunConfig, cluster: ClusterConfig) -> Setting:
    """The place that sets a stage's setting, or the stage's own section if it is not set."""
    return _found(stage, name, _sections(stage, config, cluster))[0]


def make_allocation(
    stage: Stage, config: RunConfig, cluster: ClusterConfig, node_type: NodeType
) -> Allocation:
    """The allocation of `stage`."""
    settings = stage_settings(stage, config, cluster)
    gpus = node_type.gpus_per_node if stage.uses_gpus else 0
    spares = stage.spare_nodes(config)
    # by default one rank per GPU, and one per node without GPUs
    ranks = 1 if stage.is_single_task else settings.ntasks_per_node or gpus or 1
    # one task may start several ranks, as torchrun does
    tasks = stage.tasks_per_node(config, ranks)
    share = max(1, node_type.cpus_per_node // tasks) if node_type.cpus_per_node else None
    cpus = settings.cpus_per_task or stage.cpus_per_task(share)
    exclusive = node_type.exclusive and not _shares_node(stage, settings)
    nodes = 1 if stage.is_single_task else settings.nodes or 1
    allocation = Allocation(
        nodes=nodes,
        ntasks_per_node=tasks,
        cpus_per_task=cpus,
        # with gres: none, Slurm gets no request for GPUs, but the ranks use the node's GPUs
        gpus_per_node=0 if cluster.gres == "none" else gpus,
        gres=cluster.gres,
        exclusive=exclusive,
        settings=settings,
        # on a shared node, the CPUs of a mask may belong to another job
        cpu_masks=_cpu_masks(node_type, tasks, cpus) if gpus and exclusive else (),
        spare_nodes=spares,
        # Slurm would end the job when a node fails, although a spare can replace the node
        no_kill=spares > 0 or stage.no_kill,
        ranks_per_node=ranks,
        mpi=cluster.mpi,
        segment=_segment(stage, settings, nodes + spares),
        array=make_array(stage, config, cluster),
    )
    return dataclasses.replace(allocation, nvlink_nodes=_nvlink_nodes(allocation, node_type))


def _segment(stage: Stage, settings: StageSettings, num_job_nodes: int) -> int | None:
    """The segment of a job. A job with fewer nodes is one segment: releases before 25.11 refuse larger ones."""
    if settings.segment is None or num_job_nodes == 1 or not stage.uses_gpus:
        return None
    return min(settings.segment, num_job_nodes)


def _nvlink_nodes(allocation: Allocation, node_type: NodeType) -> int:
    """The number of the step's nodes whose GPUs are connected by NVLink: all of a domain that are in one segment."""
    domain = node_type.nvlink.domain_nodes if node_type.nvlink else 1
    together = allocation.nodes_per_segment if allocation.segment else None
    return min(domain, together or domain)


def _cpu_masks(node_type: NodeType, tasks: int, cpus_per_task: int | None) -> tuple[str, ...]:
    """The CPU masks of a node's ranks, if the step has all their CPUs. srun refuses masks with CPUs outside the step.

    `--cpus-per-task` limits the step to that many CPUs per task, because it implies --exact.
    """
    masks = node_type.cpu_masks
    fits = all(cpus_per_task in (None, int(mask, 16).bit_count()) for mask in masks)
    return masks if len(masks) == tasks and fits else ()


def _shares_node(stage: Stage, settings: StageSettings) -> bool:
    """Returns True if other jobs may run on the stage's node. An array task with `cpus_per_task` leaves the remaining
    CPUs and the GPUs to them."""
    return stage.shares_node or (stage.is_array and settings.cpus_per_task is not None)


def allocation_problems(
    stage: Stage, config: RunConfig, cluster: ClusterConfig, node_type: NodeType
) -> Iterator[Problem]:
    """Yields settings that Slurm would refuse or treat differently from the plan."""
    allocation = make_allocation(stage, config, cluster, node_type)
    settings = allocation.settings

    def place(name: str) -> Setting:
        return place_of(stage, name, config, cluster)

    yield from _time_problems(settings, place)
    yield from _required_problems(settings, cluster)
    yield from _limit_problems(allocation, settings, cluster, place)
    yield from _task_problems(allocation, node_type, place)
    yield from _memory_problems(settings, node_type, place)
    yield from _single_node_problems(stage, settings, place)
    yield from _segment_problems(allocation, cluster, place)
    yield from _directive_problems(stage, config, cluster)
    yield from _exclusive_options(allocation, extra_directives(stage, config, cluster))


def _time_problems(settings: StageSettings, place: Callable[[str], Setting]) -> Iterator[Problem]:
    if settings.time is None:
        reason = "is missing. Without a time limit, the job never gets the signal to save a last checkpoint"
        yield place("time").problem(reason, "set one, for example 1-00:00:00")
    elif seconds(settings.time) == 0:
        reason = (
            "means no limit to Slurm. Without one, the job never gets the signal to save a last checkpoint"
        )
        yield place("time").problem(reason, "set a limit")


def _directive_problems(stage: Stage, config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """Yields extra options that hpcgen sets itself, that cannot work, or that are duplicates."""
    seen: set[str] = set()
    for item, directive in extra_directives(stage, config, cluster):
        option = option_name(directive)
        if option.startswith("container"):
            reason = "runs the batch script itself in a container, where srun is not available"
            yield item.problem(reason, "remove it and use the section container")
            continue
        # sbatch accepts any unambiguous prefix of an option
        if own := next((name for name in sorted(OWN_OPTIONS) if name.startswith(option)), None):
            yield item.problem(
                f"sets --{own}, which hpcgen sets itself", "remove it and use the key for this option"
            )
        elif option == "segment" and stage_settings(stage, config, cluster).segment:
            yield item.problem("is a duplicate of the key segment", "remove it")
        elif option in seen:
            yield item.problem(
                f"is a duplicate of --{option}; sbatch uses the last one", "remove one of them"
            )
        elif cluster.slurm_version and cluster.slurm_version < (
            release := release_with(option, directive.partition("=")[2])
        ):
            reason = f"requires Slurm {release}, but slurm_version of the cluster profile is {cluster.slurm_version}"
            yield item.problem(reason, "remove it, or correct slurm_version")
        elif right := misspelled_option(option):
            yield item.problem("is no option of sbatch", f"did you mean --{right}?")
        elif mistake := refused_value(option, directive.partition("=")[2]):
            yield item.problem(*mistake)
        seen.add(option)


_EXCLUSIVE = (*EXCLUSIVE_OPTIONS, ("exclusive", "oversubscribe"))
"""Pairs of options. Before Slurm 23.02, sbatch did not refuse the last one, and other jobs could get the node."""


def _exclusive_options(allocation: Allocation, extra: Iterable[tuple[Setting, str]]) -> Iterator[Problem]:
    """Yields extra options that sbatch refuses next to those of the job."""
    options = allocation.resource_options().keys()
    for item, directive in extra:
        excluded = {other for pair in _EXCLUSIVE for other in pair if option_name(directive) in pair}
        for other in sorted(excluded & options - {option_name(directive)}):
            yield item.problem(
                f"excludes --{other}, which hpcgen sets: sbatch refuses both", _instead_of(other)
            )


def _instead_of(option: str) -> str:
    """Advice for an extra option that excludes one of hpcgen's."""
    key = option.replace("-", "_")
    if option == "exclusive":
        return "remove it, or set exclusive: false in a node type of your own"
    return f"remove it and use the key {key}" if key in SETTING_NAMES else "remove it"


def _task_problems(
    allocation: Allocation, node_type: NodeType, place: Callable[[str], Setting]
) -> Iterator[Problem]:
    settings, gpus = allocation.settings, allocation.gpus_per_node
    tasks, cpus = allocation.ntasks_per_node, settings.cpus_per_task or 1
    if gpus and allocation.ranks_per_node > gpus:
        reason = f"is more than the {counted(gpus, 'GPU')} of a node. Each rank needs its own GPU"
        yield place("ntasks_per_node").problem(reason, f"use at most {gpus}")
    if node_type.cpus_per_node and tasks * cpus > node_type.cpus_per_node:
        where = place("cpus_per_task" if settings.cpus_per_task else "ntasks_per_node")
        reason = f"requests {tasks} x {cpus} CPUs per node, but nodes have {node_type.cpus_per_node}"
        yield where.problem(reason, f"use at most {node_type.cpus_per_node // tasks or 1} CPUs per task")


def _segment_problems(
    allocation: Allocation, cluster: ClusterConfig, place: Callable[[str], Setting]
) -> Iterator[Problem]:
    """Yields numbers of nodes that Slurm cannot divide into segments, or whose spare nodes would split the segments."""
    release = release_with("segment", "")
    if allocation.settings.segment and cluster.slurm_version and cluster.slurm_version < release:
        reason = (
            f"requires Slurm {release}, but slurm_version of the cluster profile is {cluster.slurm_version}"
        )
        yield place("segment").problem(reason, "remove it, or correct slurm_version")
    segment, spares = allocation.segment, allocation.spare_nodes
    if segment is None:
        return
    total, where = allocation.num_job_nodes, place("segment").path
    count, rest = divmod(total, segment)
    if rest:
        with_spares = f"and preflight.spare_nodes = {spares} make {total} nodes, which " if spares else ""
        sizes = [each * segment - spares for each in (count, count + 1)]
        hint = f"use {one_of([str(size) for size in sizes if size > 0])}"
        yield place("nodes").problem(
            f"{with_spares}cannot be divided into segments of {segment} nodes ({where})",
            f"{hint}, or set spare_nodes to {spares + segment - rest}" if spares else hint,
            about=("preflight.spare_nodes",) if spares else (),
        )
    elif allocation.nodes_per_segment is None:
        reason = (
            f"neither fills segments of {segment} nodes ({where}) nor gives each of the {count} segments of the job "
            "equally many spare nodes, so replacing a node would split a segment"
        )
        sizes = sorted({-(-spares // unit) * unit for unit in (count, segment)})
        choices = [f"{size} with {total - size} nodes" for size in sizes if size < total]
        yield Problem("preflight.spare_nodes", reason, f"use {one_of(choices)}", about=(place("nodes").path,))


def _memory_problems(
    settings: StageSettings, node_type: NodeType, place: Callable[[str], Setting]
) -> Iterator[Problem]:
    most = node_type.health.memory_mb if node_type.health else None
    if settings.mem is None:
        return
    if mistake := refused_value("mem", settings.mem):
        yield place("mem").problem(*mistake)
    elif most and memory_mb(settings.mem) > most:
        reason = f"is more than the {most:,} MB of a node (health.memory_mb of the node type)"
        yield place("mem").problem(reason, "use at most this, or 0 for all memory")


def memory_mb(size: str) -> int:
    """MB of 1024 x 1024 bytes of a size for Slurm, such as 64G. A number alone is MB."""
    number, unit = size.lower().removesuffix("b"), 1.0
    if number[-1:] in "kmgt":
        number, unit = number[:-1], 1024.0 ** ("kmgt".index(number[-1]) - 1)
    return int(int(number) * unit)


def _single_node_problems(
    stage: Stage, settings: StageSettings, place: Callable[[str], Setting]
) -> Iterator[Problem]:
    if not stage.is_single_task:
        return
    for name in ("nodes", "ntasks_per_node"):
        # only the stage's own section counts: settings for all stages are not meant for a single-task stage
        where = place(name)
        if (getattr(settings, name) or 1) > 1 and where.path.startswith(f"slurm.{stage.section}."):
            yield where.problem(
                f"is more than 1, but stage {stage.name} runs as one task on one node", "remove it"
            )


def _required_problems(settings: StageSettings, cluster: ClusterConfig) -> Iterator[Problem]:
    for name in cluster.required_settings:
        if getattr(settings, name) in (None, ()):
            path = f"slurm.defaults.{name}"
            reason = f"is missing, but the cluster profile requires it (required_settings: {name})"
            variables = " ".join(DEFAULTS.get(name, ()))
            hint = f"set it in the run file or with --set {path}=..."
            if name in OF_PROFILE:
                hint += f", or {name} in ~/.config/hpcgen/defaults.yaml for all your runs"
            if variables:
                hint += f"; {variables} in the shell does not count"
            yield Problem(path, reason, hint, is_missing=True)


def _limit_problems(
    allocation: Allocation, settings: StageSettings, cluster: ClusterConfig, place: Callable[[str], Setting]
) -> Iterator[Problem]:
    yield from _unknown_names(
        settings.partition, "a partition", cluster.partitions, "partitions", place("partition")
    )
    yield from _unknown_names(settings.qos, "a QOS", cluster.qos, "qos", place("qos"))
    limits = tuple(limits_of(settings, cluster))
    if settings.time:
        maxima = [(name, each.max_time) for name, each in limits if each.max_time]
        exceeded = [(name, most) for name, most in maxima if seconds(settings.time) > seconds(most)]
        if exceeded:
            most = min((most for _, most in exceeded), key=seconds)
            reading = other_reading(most)
            hint = f", or correct the limit, which {reading[0]}: {reading[1]}" if reading else ""
            yield place("time").problem(_exceeds(exceeded), f"use at most {most}{hint}")
    yield from _size_problems(allocation, limits, place)


def _unknown_names(
    names: str | None, what: str, known: Mapping[str, JobLimits], section: str, where: Setting
) -> Iterator[Problem]:
    for name in (names or "").split(",") if known else ():
        if name and name not in known:
            hint = f"use {one_of(tuple(known))}, or add it to the profile's {section}"
            yield where.problem(f"is not {what} of the cluster profile", hint)


def _size_problems(
    allocation: Allocation, limits: Sequence[tuple[str, JobLimits]], place: Callable[[str], Setting]
) -> Iterator[Problem]:
    spares = allocation.spare_nodes
    maxima = [(name, each.max_nodes) for name, each in limits if each.max_nodes]
    exceeded = [(name, most) for name, most in maxima if allocation.nodes + spares > most]
    if exceeded:
        reason = _exceeds(exceeded) + (f" with preflight.spare_nodes = {spares}" if spares else "")
        most = max(0, min(most for _, most in exceeded) - spares)
        yield place("nodes").problem(reason, f"use at most {most}", about=("preflight.spare_nodes",))


def _exceeds(exceeded: Sequence[tuple[str, object]]) -> str:
    """The reason of a problem: the names of all limits that are exceeded, and their values if there are several."""
    if len(exceeded) == 1:
        return f"is more than {exceeded[0][0]} allows"
    return f"is more than {' and '.join(f'{name} ({most})' for name, most in exceeded)} allow"


def cluster_problems(cluster: ClusterConfig, node_type: NodeType) -> Iterator[Problem]:
    """Yields contradictions within a profile and its node type, and a health command that some nodes may not find."""
    yield from _gres_problems(cluster, node_type)
    yield from _version_problems(cluster)
    yield from _code_problems(cluster, node_type)
    if (rule := cluster.rendezvous) and (rule.suffix is None) == (rule.interface is None):
        reason = "must have either suffix or interface"
        yield Problem("rendezvous", reason, "keep one of them, or remove rendezvous", "cluster")
    if cluster.health_command and not cluster.health_command[0].startswith("/"):
        reason = "is not an absolute path, so nodes where it is not on PATH would count as bad"
        hint = "use the absolute path of the program on the nodes"
        yield Problem("health_command[0]", reason, hint, "cluster")


def _gres_problems(cluster: ClusterConfig, node_type: NodeType) -> Iterator[Problem]:
    count = cluster.gres.rpartition(":")[2]
    if count.isdigit() and int(count) != node_type.gpus_per_node:
        asked = f"{counted(int(count), 'GPU')} per node"
        reason = f"requests {asked}, but node type {cluster.node_type} has {node_type.gpus_per_node}"
        yield Problem("gres", reason, f"change the count to {node_type.gpus_per_node}", "cluster")


def _code_problems(cluster: ClusterConfig, node_type: NodeType) -> Iterator[Problem]:
    """Yields a code directory whose compiled packages are for other processors than the nodes'."""
    if node_type.processor is None or cluster.code_dir is None:
        return
    from hpcgen.install.directory_name import architecture_of  # few profiles have a directory of code

    installed = architecture_of(cluster.code_dir)
    needed = "aarch64" if node_type.processor.is_arm else "x86_64"
    if installed not in (None, needed):
        reason = f"was installed for {installed}, but node type {cluster.node_type} has {needed} processors"
        yield Problem("code_dir", reason, f"run hpcgen install-code --architecture {needed}", "cluster")


def _version_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    if cluster.slurm_version is not None and cluster.slurm_version < OLDEST_SLURM:
        reason = f"is older than {OLDEST_SLURM}, the oldest version that the scripts support"
        yield Problem("slurm_version", reason, f"use Slurm {OLDEST_SLURM} or newer", "cluster")


def make_array(stage: Stage, config: RunConfig, cluster: ClusterConfig) -> Array | None:
    """The job array of a stage; None if the stage has none.

    The number of tasks is reduced to what Slurm and the number of outputs allow; each task then has more files.
    """
    settings = stage_settings(stage, config, cluster)
    if not isinstance(settings, ArraySettings):
        return None
    limits = [settings.num_tasks or NUM_TASKS, cluster.max_array_size]
    if (most := stage.max_tasks(config)) is not None:
        limits.append(most)
    return Array(min(limits), settings.array_parallelism)
