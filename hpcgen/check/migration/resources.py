"""Converts directives, environment and container of a script into sections of a run file."""

from __future__ import annotations

import re
from collections.abc import Collection

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Launch, Step
from hpcgen.check.lint.rules.mounts import mounts_of
from hpcgen.check.lint.wrappers import CONTAINERS
from hpcgen.check.migration.leftover import Carried, is_sure, unknown
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.container import Image, MountPath
from hpcgen.config.fields import Directive, SlurmWord, TimeLimit, constraint_problems
from hpcgen.config.node_type import NodeType
from hpcgen.planning.environment import ON_SCRATCH, RESERVED, RESERVED_PREFIXES
from hpcgen.planning.known_variables import UNREAD, right_name
from hpcgen.planning.secret import SECRET, SECRET_VALUE

SLURM_KEYS = {
    "partition": "partition", "account": "account", "qos": "qos", "reservation": "reservation",
    "constraint": "constraint",
}  # fmt: skip

SET_BY_HPCGEN = frozenset((
    "job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "gres", "gpus",
    "gpus-per-task", "exclusive", "mem", "mem-per-cpu", "mem-per-gpu", "time", "signal", "requeue",
    "open-mode", "propagate", "output", "error", "export", "no-requeue", "cpus-per-gpu",
))  # fmt: skip
"""Directives with a key in a run file, or that hpcgen derives from the cluster profile."""

SET_BY_HOST_OR_IMAGE = frozenset(
    ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "HOME", "TMPDIR", "LD_PRELOAD")
)


def carry_directives(
    job: Job, launch: Launch, carried: Carried, node_type: NodeType, stage: str = "train"
) -> None:
    """Carries over the directives."""
    options = job.script.options
    if job.nodes:
        carried.put(f"slurm.{stage}.nodes", job.nodes)
    elif "nodes" in options:
        carried.leave(
            job.script.option_line("nodes"),
            f"--nodes={options['nodes']}",
            f"slurm.{stage}.nodes must be one number",
        )
    elif (world := job.world_size(launch)) is not None:
        carried.put(f"slurm.{stage}.nodes", world[0])
    world = job.world_size(launch)
    if world and world[1] != node_type.gpus_per_node:
        carried.put(f"slurm.{stage}.ntasks_per_node", world[1])
    gpus = job.gpus_per_node or (world[1] if world else None)
    if gpus and node_type.gpus_per_node and gpus != node_type.gpus_per_node:
        why = f"nodes of the profile have {node_type.gpus_per_node}; the script's nodes and ranks per node are kept"
        carried.leave(job.script.option_line("gpus-per-node"), f"GPUs per node: {gpus}", why)
    if time := options.get("time"):
        minutes = f"{time}:00" if re.fullmatch(r"\d{1,6}", time) else time
        if _fits(TimeLimit, minutes):
            carried.put("slurm.defaults.time", minutes)
        else:
            carried.leave(job.script.option_line("time"), f"--time={time}", "it is not a valid time limit")
    extra: dict[str, str] = {}
    for directive in job.script.directives:
        text = f"--{directive.name}" + (f"={directive.value}" if directive.value is not None else "")
        if not directive.effective:
            carried.leave(directive.line, text, "sbatch ignores it, because it is below the first command")
        elif directive.name == "array":
            carried.leave(
                directive.line, text, "a run file describes one job; write one for each task of the array"
            )
        elif directive.name in ("output", "error"):
            carried.leave(directive.line, text, f"the log is {stage}-%j.log in the run directory")
        elif directive.name in SLURM_KEYS and directive.value and _fits(SlurmWord, directive.value):
            carried.put(f"slurm.defaults.{SLURM_KEYS[directive.name]}", directive.value)
        elif directive.name.startswith("container"):
            carried.leave(
                directive.line,
                text,
                "the batch script runs on the host, and the section container applies to its tasks",
            )
        elif directive.name not in SET_BY_HPCGEN and _fits(Directive, text):
            extra[directive.name] = text  # the last one wins, as in sbatch
        elif directive.name not in SET_BY_HPCGEN:
            carried.leave(directive.line, text, "a run file has no key for it")
    if extra:
        carried.put("slurm.defaults.extra_directives", list(extra.values()))


def _fits(hint: object, value: str) -> bool:
    return not any(constraint_problems(hint, value))


def carry_environment(
    job: Job, carried: Carried, cluster: ClusterConfig, node_type: NodeType, *, trains: bool = True
) -> None:
    """Carries over variables that neither hpcgen nor the node type sets. Only the names of secrets are kept.

    For hpcgen's trainer (`trains`), NCCL_COLLNET_ENABLE becomes parallelism.use_sharp if the node type supports SHARP.
    """
    facts = node_type.environment | node_type.sharp
    usual = {name: variable.value for name, variable in facts.items()} | cluster.environment
    secrets: set[str] = set()
    environment: dict[str, str] = {}
    for assignment in (*job.script.exports, *job.mpi_settings):
        name, word = assignment.name, assignment.value
        if assignment.dead:
            continue
        if trains and name == "CUDA_DEVICE_MAX_CONNECTIONS" and word and word.text == "1":
            continue  # hpcgen sets it with tensor or context parallelism
        if SECRET.search(name) or (word and SECRET_VALUE.search(word.text)):
            secrets.add(name)
            carried.leave(
                assignment.line, name, "it is a secret: export it in the shell that submits the job"
            )
        elif not trains and (name in ON_SCRATCH or name == "PYTHONPATH"):
            why = f"to keep it, begin program.command with env and {name}=VALUE"
            carried.leave(assignment.line, name, why)
        elif name in SET_BY_HOST_OR_IMAGE:
            carried.leave(assignment.line, name, "it is set by the image or the node")
        elif name in RESERVED or name.startswith(RESERVED_PREFIXES):
            continue  # the rendered script sets it
        elif right := right_name(name):
            carried.leave(assignment.line, name, f"nothing reads it; the correct name is {right}")
        elif name in UNREAD:
            carried.leave(assignment.line, name, f"nothing reads it: {UNREAD[name]}")
        elif word is None or not (word.known and word.certain) or assignment.conditional:
            why = (
                "it is only set conditionally"
                if assignment.conditional
                else unknown(word)
                if word
                else "it has no value"
            )
            carried.leave(assignment.line, name, why)
        elif name == name.lower() or not word.text.isprintable():
            carried.leave(
                assignment.line, name, "a run file cannot set lower-case variables or multi-line values"
            )
        elif trains and name == "NCCL_COLLNET_ENABLE" and word.text == "1" and node_type.sharp:
            carried.put("parallelism.use_sharp", True)
        elif usual.get(name) != word.text:
            environment[name] = word.text
    used = {use.name for use in job.script.uses if SECRET.search(use.name)}
    assigned = {assignment.name for assignment in job.script.assignments}
    if secrets or used - assigned:
        carried.put("secrets", sorted(secrets | (used - assigned)))
    if environment:
        carried.put("environment", environment)


def carry_container(launch: Launch, carried: Carried, cluster: ClusterConfig) -> None:
    """Carries over pyxis's image, mounts and working directory. Without a container, the runtime is none."""
    step = launch.step
    if step is None or not step.has_container:
        program = step.program[0] if step and step.program else None
        if program and program.text.rpartition("/")[2] in CONTAINERS:
            why = "hpcgen starts containers with pyxis or enroot; set container.image and container.runtime"
            carried.leave(program.line, f"the container of {program.text}", why)
        if cluster.container.runtime not in (None, "none"):
            carried.put("container.runtime", "none")
        return
    if cluster.container.runtime != "pyxis":
        carried.put("container.runtime", "pyxis")
    image = step.option("container-image")
    if image and image.value:
        name = re.sub(r"^([\w-]+(?:\.[\w-]+)+)/", r"\1#", image.text.removeprefix("docker://"))
        if is_sure(image.value) and _fits(Image, name):
            carried.put("container.image", name)
        else:
            why = (
                unknown(image.value)
                if not is_sure(image.value)
                else "container.image must be an absolute path, or REGISTRY#IMAGE:TAG"
            )
            carried.leave(image.word.line, f"--container-image={image.text}", why)
    _mounts(step, carried, {mount.target or mount.source for mount in cluster.container.mounts})
    workdir = step.option("container-workdir")
    if workdir and workdir.value:
        if is_sure(workdir.value) and _fits(MountPath, workdir.text):
            carried.put("container.workdir", workdir.text)
        else:
            carried.leave(workdir.word.line, f"--container-workdir={workdir.text}", unknown(workdir.value))
    if step.option("container-writable"):
        carried.put("container.writable", True)


def _mounts(step: Step, carried: Carried, shown: Collection[str]) -> None:
    mounts: list[dict[str, object]] = []
    targets = set(shown)
    for option in step.all("container-mounts")[-1:]:
        if option.value and not option.value.certain:
            carried.leave(option.word.line, "--container-mounts", unknown(option.value))
            continue
        for mount in mounts_of(option.text):
            what = f"--container-mounts={mount.source}:{mount.target}"
            if "$" in mount.source + mount.target:
                carried.leave(option.word.line, what, "the path is only known in the job")
            elif not (_fits(MountPath, mount.source) and _fits(MountPath, mount.target)):
                carried.leave(option.word.line, what, "a run file only mounts absolute paths without blanks")
            elif mount.target in targets:
                carried.leave(option.word.line, what, "another mount has this target")
            else:
                targets.add(mount.target)
                entry: dict[str, object] = {"source": mount.source}
                if mount.target != mount.source:
                    entry["target"] = mount.target
                if "ro" in "+".join(mount.flags).split("+"):
                    entry["read_only"] = True
                mounts.append(entry)
    if mounts:
        carried.put("container.mounts", mounts)
