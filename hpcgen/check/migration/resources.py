"""Converts the directives and the container of a script into sections of a run file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Launch, Step
from hpcgen.check.lint.rules.mounts import mounts_of
from hpcgen.check.lint.words import Word
from hpcgen.check.lint.wrappers import CONTAINERS
from hpcgen.check.migration.account import launch_prefix, option_text, shell_prefixes, shown_words, text_of
from hpcgen.check.migration.apptainer import carry_call, read_call
from hpcgen.check.migration.leftover import Carried, is_sure, unknown
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.container import Image, MountPath
from hpcgen.config.fields import (
    Directive,
    Name,
    TimeLimit,
    constraint_problems,
    seconds,
    slurm_time,
)
from hpcgen.config.node_type import NodeType
from hpcgen.config.slurm import OWN_OPTIONS, PASSED_ON, PassedOn
from hpcgen.text import counted

OWN = {
    "open-mode": r"append", "requeue": r"", "propagate": r"NONE", "export": r"ALL", "parsable": r"", "quiet": r"",
    "verbose": r"", "kill-on-bad-exit": r"1?", "label": r"", "unbuffered": r"", "jobid": r".*", "job-name": r".*",
    "distribution": r"block",
}  # fmt: skip
"""Options that hpcgen gives to sbatch and srun itself, or that only matter on a command line -> the values."""
SET_BY_LAUNCHER = frozenset((
    "nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "rdzv-backend", "rdzv-endpoint", "rdzv-id",
    "standalone", "num-nodes", "num-gpus", "hostfile",
))  # fmt: skip
"""Options of torchrun and deepspeed that hpcgen's launchers set, or that become keys of the run file."""
SET_FOR_RANKS = frozenset((
    "np", "n", "c", "npernode", "pernode", "N", "ppn", "perhost", "grr", "x", "genv", "env", "H", "host", "hosts",
    "hostfile", "machinefile", "f",
))  # fmt: skip
"""Options of mpirun that hpcgen sets, or that have a key of the run file."""
USUAL_OF_LAUNCHERS = frozenset(("m", "module", "u"))
"""Options that are part of the command, or that every job has (PYTHONUNBUFFERED)."""
_GPUS = ("gpus-per-node", "gres")
_SET_ELSEWHERE = re.compile(r"(ntasks|cpus|gpus|mem)-per-\w+|test-only|container.*")
"""More directives that keys of the run file or the cluster profile replace, or that start no job."""


@dataclass(frozen=True)
class Layout:
    """The ranks that the run file starts."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_node: int
    is_exclusive: bool
    starts_ranks: bool
    """True if one task per node starts the ranks, as torchrun does."""

    def __str__(self) -> str:
        return f"{counted(self.nodes, 'node')} with {counted(self.ranks_per_node, 'rank')} each"

    def agrees(self, name: str, text: str) -> bool:
        """True if an option of sbatch or srun asks for this layout."""
        tasks = {1, self.ranks_per_node} if self.starts_ranks else {self.ranks_per_node}
        fitting: dict[str, set[int] | set[float]] = {
            "nodes": {self.nodes},
            "ntasks-per-node": tasks,
            "ntasks": {self.nodes * number for number in tasks},
            "gpus-per-node": {self.gpus_per_node},
            "gpus": {self.nodes * self.gpus_per_node},
            "gpus-per-task": {self.gpus_per_node / number for number in tasks},
            "ntasks-per-gpu": {number / self.gpus_per_node for number in tasks if self.gpus_per_node},
            "cpus-per-task": {self.cpus_per_node / number for number in tasks},
        }
        if self.is_exclusive and (name, text) in (("exclusive", ""), ("mem", "0")):
            return True
        if name == "gres":
            return text in (f"gpu:{self.gpus_per_node}", f"gres/gpu:{self.gpus_per_node}")
        return text.isdecimal() and int(text) in fitting.get(name, ())


def layout_of(carried: Carried, launch: Launch, node_type: NodeType, stage: str) -> Layout:
    """The layout of the run file so far."""
    gpus = node_type.gpus_per_node or 0
    return Layout(
        nodes=carried.get(f"slurm.{stage}.nodes") or 1,
        ranks_per_node=carried.get(f"slurm.{stage}.ntasks_per_node") or gpus or 1,
        gpus_per_node=gpus,
        cpus_per_node=node_type.cpus_per_node or 0,
        is_exclusive=node_type.exclusive,
        starts_ranks=launch.launcher not in ("python", ""),
    )


def claim_usual_options(job: Job, launch: Launch, carried: Carried, layout: Layout) -> None:
    """Claims the options of sbatch and srun that agree with the run file's layout, or that hpcgen gives itself."""
    given = job.script.options
    for directive in job.script.directives:
        text = directive.value or ""
        if not directive.effective or carried.is_claimed(directive):
            continue
        if layout.agrees(directive.name, text):
            carried.claim(directive)
        # (?!) matches nothing
        elif directive.name != "job-name" and re.fullmatch(OWN.get(directive.name, "(?!)"), text):
            carried.claim(directive)
            carried.own.append(text_of(directive))
    for option in launch.step.options if launch.step else ():
        # an option of the step that repeats the job's, or reads it from Slurm, says nothing new
        is_same = option.value is not None and option.text == given.get(option.name)
        of_slurm = option.value is not None and re.fullmatch(r"\"?\$\{?SLURM_\w+\}?\"?", option.value.source)
        if is_same or of_slurm or layout.agrees(option.name, option.text):
            carried.claim(option)
        elif re.fullmatch(OWN.get(option.name, "(?!)"), option.text):
            carried.claim(option)
            carried.own.append(f"srun {option_text(option)}")
    for mpi_option in launch.mpi.options if launch.mpi else ():
        if mpi_option.name in SET_FOR_RANKS:
            carried.claim(mpi_option)
            carried.own.append(f"mpirun {shown_words((mpi_option.word, *mpi_option.values))}")
    for option in launch.options:
        if carried.is_claimed(option):
            continue
        if option.name in USUAL_OF_LAUNCHERS:
            carried.claim(option)
        elif option.name in SET_BY_LAUNCHER:
            carried.claim(option)
            carried.own.append(f"{launch.launcher} {option_text(option)}")


def carry_directives(
    job: Job, launch: Launch, carried: Carried, node_type: NodeType, stage: str = "train"
) -> None:
    """Carries over the directives."""
    options = job.script.options
    _carry_layout(job, launch, carried, node_type, stage)
    if time := options.get("time"):
        # sbatch reads a plain number as minutes
        minutes = f"{time}:00" if re.fullmatch(r"\d{1,6}", time) else time
        # Slurm takes more forms of a time than a run file, such as 1-0
        limit = minutes if _fits(TimeLimit, minutes) else slurm_time(job.time_limit_s or 0)
        if _fits(TimeLimit, limit) and seconds(limit):
            carried.put("slurm.defaults.time", limit)
        else:
            carried.leave(
                job.script.option_line("time"),
                f"--time={time}",
                "a run file needs a time limit in Slurm's format",
            )
    extra: dict[str, str] = {}
    last = {item.name: item for item in job.script.directives if item.effective}
    for directive in job.script.directives:
        text = text_of(directive)
        if not directive.effective:
            carried.leave(directive.line, text, "sbatch ignores it, because it is below the first command")
        elif directive is not last[directive.name] and directive.value != last[directive.name].value:
            carried.leave(
                directive.line, text, f"sbatch uses {text_of(last[directive.name])}, which is below it"
            )
        elif directive.name == "array":
            carried.leave(
                directive.line, text, "a run file describes one job; write one for each task of the array"
            )
        elif key := PASSED_ON.get(directive.name):
            if _fits(PassedOn, directive.value or ""):
                carried.put(f"slurm.defaults.{key}", directive.value)
            else:
                carried.leave(directive.line, text, f"slurm.defaults.{key} does not take this value")
        elif directive.name == "segment" and re.fullmatch(r"[1-9]\d{0,4}", directive.value or ""):
            carried.put("slurm.defaults.segment", int(directive.value or ""))
        elif directive.name.startswith("container"):
            carried.leave(
                directive.line,
                text,
                "the batch script runs on the host, and the section container applies to its tasks",
            )
        elif directive.name == "job-name" and _fits(Name, directive.value or ""):
            pass  # the name of the run
        elif _can_be_extra(directive.name) and _fits(Directive, text):
            extra[directive.name] = text  # the last one wins, as in sbatch
        elif directive.name != "time":
            continue  # leftover.py reports what nothing claims
        carried.claim(directive)
    if extra:
        carried.put("slurm.defaults.extra_directives", list(extra.values()))


def _can_be_extra(name: str) -> bool:
    return name not in OWN_OPTIONS and name not in OWN and not _SET_ELSEWHERE.fullmatch(name)


def _world(job: Job, launch: Launch) -> tuple[int, int] | None:
    """Number of nodes, and of ranks per node, of the program. A step can have fewer nodes than the job."""
    step = launch.step
    if step is None or launch.launcher == "torchrun" or launch.mpi is not None:
        return job.world_size(launch)
    tasks, nodes = job.num_tasks(step), job.num_nodes(step)
    if tasks is None or nodes is None:
        return None
    nodes = min(tasks, nodes)
    return (nodes, tasks // nodes) if nodes and tasks % nodes == 0 else None


def _ranks_per_node(job: Job, launch: Launch, most: int) -> int | None:
    """Number of ranks per node of a step whose number of nodes is unknown; None if it is unknown as well.

    A job without --nodes gets 1 node, which has all tasks if there are at most `most`.
    """
    step = launch.step
    if step is None or launch.launcher == "torchrun":
        return None
    if not (job.sets_tasks or step.option("ntasks", "ntasks-per-node")):
        is_default = job.script.is_batch and "ntasks-per-gpu" not in job.script.options
        return 1 if is_default and not launch.is_megatron else None
    tasks = job.num_tasks(step)
    if tasks and tasks <= max(most, 1) and "nodes" not in job.script.options and not step.option("nodes"):
        return tasks
    return 1 if tasks == 1 else job.tasks_per_node(step)


def _carry_layout(job: Job, launch: Launch, carried: Carried, node_type: NodeType, stage: str) -> None:
    """Carries over the number of nodes, and the number of ranks per node if it differs from the number of GPUs."""
    options, world = job.script.options, _world(job, launch)
    nodes = world[0] if world else job.nodes
    if launch.launcher == "torchrun" and launch.step is None and not launch.option("nnodes"):
        nodes = 1  # torchrun's default, on the node of the batch script
    if nodes:
        carried.put(f"slurm.{stage}.nodes", nodes)
    elif "nodes" in options:
        line = job.script.option_line("nodes")
        carried.leave(line, f"--nodes={options['nodes']}", f"slurm.{stage}.nodes must be one number")
    ranks = world[1] if world else _ranks_per_node(job, launch, node_type.gpus_per_node or 1)
    if ranks and ranks != node_type.gpus_per_node:
        carried.put(f"slurm.{stage}.ntasks_per_node", ranks)
    gpus = job.gpus_per_node or ranks
    if gpus and node_type.gpus_per_node and gpus != node_type.gpus_per_node:
        given = [item for item in job.script.directives if item.effective and item.name in _GPUS][-1:]
        texts = [f" ({text_of(item)})" for item in given if not re.fullmatch(r"(gpu:)?\d+", item.value or "")]
        line = given[0].line if given else job.script.first_directive
        why = f"nodes of the profile have {node_type.gpus_per_node}; the script's nodes and ranks per node are kept"
        carried.leave(line, f"GPUs per node: {gpus}{''.join(texts)}", why)
        carried.claim(*given)


def _fits(hint: object, value: str) -> bool:
    return not any(constraint_problems(hint, value))


def carry_container(job: Job, launch: Launch, carried: Carried, cluster: ClusterConfig) -> None:
    """Carries over the image, mounts and working directory of pyxis or apptainer. Without a container, the runtime is
    none."""
    shown = {mount.target or mount.source for mount in cluster.container.mounts}
    prefixes = [
        prefix
        for prefix in (launch_prefix(launch)[0], *shell_prefixes(job, launch))
        if prefix and prefix[0].text.rpartition("/")[2] in CONTAINERS
    ]
    step = launch.step
    has_pyxis = step is not None and step.has_container
    # of several containers, each inside another, it is not known which has the paths
    call = read_call(prefixes[0]) if len(prefixes) == 1 and not has_pyxis else None
    for prefix in prefixes:
        carried.claim(prefix[0])
        if call is None:
            why = (
                "hpcgen starts containers itself; set container.image and container.runtime in place of "
                f"{shown_words(prefix)}"
            )
            carried.leave(prefix[0].line, f"the container of {prefix[0].text.rpartition('/')[2]}", why)
    if call is not None:
        if cluster.container.runtime != "apptainer":
            carried.put("container.runtime", "apptainer")
        carry_call(call, carried)
        _mounts([("--bind", value.line, value) for value in call.binds()], carried, shown)
        return
    if step is None or not step.has_container:
        # the profile's runtime would start a container that the script does not have
        if cluster.container.runtime not in (None, "none"):
            carried.put("container.runtime", "none")
        return
    if cluster.container.runtime != "pyxis":
        carried.put("container.runtime", "pyxis")
    for option in step.options:
        if option.name in ("container-image", "container-mounts", "container-workdir", "container-writable"):
            carried.claim(option)
    _image(step, carried)
    last = step.all("container-mounts")[-1:]  # pyxis uses the last one
    given = [("--container-mounts", option.word.line, option.value) for option in last if option.value]
    _mounts(given, carried, shown)
    workdir = step.option("container-workdir")
    if workdir and workdir.value:
        if is_sure(workdir.value) and _fits(MountPath, workdir.text):
            carried.put("container.workdir", workdir.text)
        else:
            carried.leave(workdir.word.line, f"--container-workdir={workdir.text}", unknown(workdir.value))
    if step.option("container-writable"):
        carried.put("container.writable", True)


def _image(step: Step, carried: Carried) -> None:
    """Carries over the image of pyxis."""
    image = step.option("container-image")
    if not (image and image.value):
        return
    # enroot separates the registry with #; docker:// is what it assumes anyway
    name = re.sub(r"^([\w-]+(?:\.[\w-]+)+)/", r"\1#", image.text.removeprefix("docker://"))
    if is_sure(image.value) and _fits(Image, name):
        carried.put("container.image", name)
        return
    why = (
        unknown(image.value)
        if not is_sure(image.value)
        else "container.image must be an absolute path, or REGISTRY#IMAGE:TAG"
    )
    carried.leave(image.word.line, f"--container-image={image.text}", why)


def _mounts(given: Iterable[tuple[str, int, Word]], carried: Carried, shown: Collection[str]) -> None:
    """Carries over mounts: names of options, their lines and their values. Targets in `shown` are taken."""
    mounts: list[dict[str, object]] = []
    targets = set(shown)
    for name, line, value in given:
        if not value.certain:
            carried.leave(line, name, unknown(value))
            continue
        for mount in mounts_of(value.text):
            what = f"{name}={mount.source}:{mount.target}"
            if "$" in mount.source + mount.target:
                carried.leave(line, what, "the path is only known in the job")
            elif not (_fits(MountPath, mount.source) and _fits(MountPath, mount.target)):
                carried.leave(line, what, "a run file only mounts absolute paths without blanks")
            elif mount.target in targets:
                carried.leave(line, what, "another mount has this target")
            else:
                targets.add(mount.target)
                entry: dict[str, object] = {"source": mount.source}
                if mount.target != mount.source:
                    entry["target"] = mount.target
                if "ro" in "+".join(mount.flags).split("+"):  # such as ro+rprivate
                    entry["read_only"] = True
                mounts.append(entry)
    if mounts:
        carried.put("container.mounts", mounts)
