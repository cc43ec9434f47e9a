"""Reads a batch script into the sections of a run file, and says what it could not carry."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.fields import Name, constraint_problems
from hpcgen.config.node_type import NodeType
from hpcgen.errors import HpcgenError
from hpcgen.lint.job import Job
from hpcgen.lint.launch import Launch
from hpcgen.lint.reader import read
from hpcgen.migration.leftover import Carried, Leftover, Sections
from hpcgen.migration.resources import carry_container, carry_directives, carry_environment
from hpcgen.migration.training import carry_training

NEEDED = {
    "model.num_layers": 12, "model.hidden_size": 768, "model.num_attention_heads": 12, "model.seq_length": 1024,
    "training.micro_batch_size": 1, "training.global_batch_size": 256, "training.train_iters": 1000,
    "optimizer.lr": 1e-4,
}  # fmt: skip
"""Keys that a run file must have -> what stands there when the script does not say."""

TIME = "1-00:00:00"

PROLOGUE = ("module", "ml", "source", ".", "conda", "spack", "ulimit")


@dataclass(frozen=True, kw_only=True)
class Migration:
    """What came of a script."""

    name: str | None
    """The job's name, where a run may be called so."""
    sections: Sections
    """Of the run file, without its name, cluster and paths."""
    leftovers: tuple[Leftover, ...]
    """What is not in them, in the order of the script."""


def migrate(text: str, path: str, cluster: ClusterConfig, node_type: NodeType) -> Migration:
    """Reads a script that trains with Megatron-LM.

    Raises:
        HpcgenError: the text is no script, bash does not take it, or it starts no training of Megatron-LM's.
    """
    script = read(text, path)
    if not script.is_shell:
        raise HpcgenError(
            f"{path}: is not a shell script: {script.interpreter} runs it", "give a shell script"
        )
    if script.error:
        raise HpcgenError(f"{path}:{script.error.line}: {script.error.reason}", "bash -n says more")
    job = Job(script)
    launches = [launch for launch in job.megatron if launch.flags]
    if not launches:
        hint = "it must call pretrain_gpt.py with its options, through srun, torchrun or python"
        raise HpcgenError(f"{path}: starts no training of Megatron-LM", hint)
    launch, *others = launches
    carried = Carried()
    carry_directives(job, launch, carried, node_type)
    carry_environment(job, carried, cluster, node_type)
    carry_container(launch.step, carried, cluster)
    carry_training(job, launch, carried)
    for other in others:
        carried.leave(other.line, other.program, "a run file has one training; this is another")
    _other_commands(job, launch, carried)
    for key, value in NEEDED.items():
        if carried.get(key) is None:
            carried.put(key, value)
            carried.leave(
                launch.line, key, f"the script does not say it; {value} stands there for you to change"
            )
    if carried.get("slurm.train.nodes") is None:
        nodes = _fewest_nodes(carried, node_type)
        carried.put("slurm.train.nodes", nodes)
        carried.leave(
            script.first_directive,
            "the number of nodes",
            f"the script does not say it; {nodes} hold one replica",
        )
    if carried.get("slurm.defaults.time") is None:
        carried.put("slurm.defaults.time", TIME)
        carried.leave(
            script.first_directive,
            "the time limit",
            f"the script does not say it; {TIME} stands there for you to change",
        )
    if not any(carried.get(f"data.{key}") for key in ("datasets", "train", "mock")):
        carried.put("data.mock", True)
        carried.leave(
            launch.line,
            "data",
            "the script does not say where it is; made-up samples stand there for you to change",
        )
    return Migration(
        name=_name(script.options.get("job-name", "")),
        sections=carried.sections,
        leftovers=tuple(sorted(set(carried.leftovers), key=lambda leftover: (leftover.line, leftover.what))),
    )


def _fewest_nodes(carried: Carried, node_type: NodeType) -> int:
    """Nodes that hold one replica of the model."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    ranks = math.prod(int(carried.get(f"parallelism.{name}") or 1) for name in sizes)
    return -(-ranks // (node_type.gpus_per_node or 1))


def _name(text: str) -> str | None:
    return text if text and not any(constraint_problems(Name, text)) else None


def _other_commands(job: Job, launch: Launch, carried: Carried) -> None:
    """What the script does besides: it belongs into a block of a site's template."""
    for command in job.script.commands:
        if command.name in PROLOGUE and not command.function and command.outer is None:
            text = " ".join(word.text for word in command.words)
            carried.leave(
                command.line, text[:60], "put it into the prologue of a site template (templates/README.md)"
            )
    for step in job.steps:
        if step.command is not launch.command and (
            launch.step is None or step.command is not launch.step.command
        ):
            text = re.sub(r"\s+", " ", " ".join(word.text for word in step.program))
            carried.leave(
                step.line,
                f"srun ... {text[:50]}",
                "put it into a block of a site template (templates/README.md)",
            )
