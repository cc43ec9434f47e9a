"""One stage as it will run on the cluster: its directives, environment, container and command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.config.stages import ARRAY_STAGES
from hpcgen.planning.allocation import Allocation, make_allocation
from hpcgen.planning.container import Container, make_container
from hpcgen.planning.environment import (
    SET_BY_THE_SCRIPT,
    Variable,
    stage_environment,
    stage_secrets,
    uses_gpus,
)
from hpcgen.planning.stages import corpus, image, index_cache, nccl_test, node_health, tensorboard, train
from hpcgen.planning.stages.work import Work
from trainer.contract.config import TrainerConfig

WORK: dict[str, Callable[[Run, RunConfig, Allocation], Work]] = {
    "image": image.work,
    "nccl-test": nccl_test.work,
    "node-health": node_health.work,
    "tensorboard": tensorboard.work,
}
"""What each of the cluster's own stages runs."""

OF_TRAINER: dict[str, Callable[[Run, RunConfig, Allocation, TrainerConfig | None], Work]] = {
    "index-cache": index_cache.work,
    "train": train.work,
}
"""What the stages run that read the trainer's configuration."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What one stage asks of Slurm, and what it runs there."""

    name: str
    allocation: Allocation
    directives: tuple[str, ...]
    """sbatch options, each as it follows #SBATCH."""
    device: str
    """cuda where the stage computes on GPUs, else cpu."""
    environment: tuple[Variable, ...]
    container: Container | None
    python: str
    arguments: tuple[str, ...]
    """What follows `python`; the job adds what it alone knows: its configuration's path, its stop file, its task."""
    inputs: tuple[str, ...]
    """Host files that the stage reads, which the login node can look for."""
    required: tuple[str, ...]
    """Host paths that every node must have: inputs, and what is mounted and not made by the job."""
    directories: tuple[str, ...]
    """Directories besides the run's that the job makes, since a container can mount only what is there."""
    striped_directories: tuple[str, ...]
    """Directories that the job makes for large files, striped on Lustre when they are new."""
    secrets: tuple[str, ...]
    """Names of variables that the submitting shell must have; their values are written nowhere."""
    files: Mapping[str, str]
    """Name -> text of files that the script writes into the job's directory."""
    values: Mapping[str, object]
    """Variables of the stage's own template."""
    datasets: tuple[str, ...]
    """Those of `inputs` that are a dataset's: often thousands, so the job looks for each once, not on every node."""
    signal_lead_s: int
    """Seconds before the time limit at which the job is warned; 0 for a stage that has nothing to save."""

    def required_everywhere(self) -> tuple[str, ...]:
        """Host paths that each node is asked for: `required`, with the directories of the datasets for their files."""
        of_datasets = set(self.datasets)
        paths = (str(PurePosixPath(path).parent) if path in of_datasets else path for path in self.required)
        return tuple(dict.fromkeys(paths))


def make_stage(
    name: str, run: Run, config: RunConfig, trainer: TrainerConfig | None = None, signal_lead_s: int = 0
) -> StagePlan:
    """Plans stage `name` of a run whose paths in `config` are absolute.

    Raises:
        HpcgenError: a path that the container cannot mount.
    """
    allocation = make_allocation(name, config, run.cluster, run.node_type)
    environment = stage_environment(name, run, config)
    work = _work(name, run, config, allocation, trainer)
    reads = (*work.reads, *_code(run), *_topology(environment))
    container = _container(name, run, config, work, environment)
    return StagePlan(
        name=name,
        allocation=allocation,
        directives=_directives(name, config, allocation, signal_lead_s),
        device="cuda" if uses_gpus(name, run) else "cpu",
        environment=environment,
        container=container,
        python=run.cluster.python,
        arguments=work.arguments,
        inputs=work.inputs,
        required=(*work.inputs, *reads, *_needed_by(container, run, config)),
        directories=work.writes,
        striped_directories=work.large,
        secrets=stage_secrets(name, config),
        files=work.files,
        values=work.values,
        datasets=work.datasets,
        signal_lead_s=signal_lead_s,
    )


def _work(
    name: str, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
) -> Work:
    if name in ARRAY_STAGES:
        return corpus.work(name, config, allocation)
    if name in OF_TRAINER:
        return OF_TRAINER[name](run, config, allocation, trainer)
    return WORK[name](run, config, allocation)


def _container(
    name: str, run: Run, config: RunConfig, work: Work, environment: tuple[Variable, ...]
) -> Container | None:
    if name == "image":  # made outside of any
        return None
    of_inputs = (str(PurePosixPath(path).parent) for path in work.inputs)
    variables = (variable.name for variable in environment)
    return make_container(
        config,
        run.cluster,
        writes=(*work.writes, *work.large, config.paths.run_dir, run.cluster.scratch),
        reads=(*work.reads, *_code(run), *_topology(environment), *of_inputs),
        environment=(*variables, *SET_BY_THE_SCRIPT.get(name, ()), *stage_secrets(name, config)),
    )


def _needed_by(container: Container | None, run: Run, config: RunConfig) -> tuple[str, ...]:
    """What must be there for the container to start: its image, and the sources of the mounts that were given."""
    if container is None:
        return ()
    image = (container.image,) if container.image.endswith(".sqsh") else ()
    return (*(mount.source for mount in (*run.cluster.container.mounts, *config.container.mounts)), *image)


def _code(run: Run) -> tuple[str, ...]:
    return (run.cluster.code_dir,) if run.cluster.code_dir else ()


def _topology(environment: tuple[Variable, ...]) -> tuple[str, ...]:
    """NCCL's topology file, where the stage has one."""
    return tuple(
        variable.value for variable in environment if variable.name == "NCCL_TOPO_FILE" and variable.value
    )


def _directives(stage: str, config: RunConfig, allocation: Allocation, lead_s: int) -> tuple[str, ...]:
    options: dict[str, str | bool] = {
        "job-name": config.name if stage == "train" else f"{config.name}-{stage}",
        **allocation.resource_options(),
        **({"signal": f"B:USR2@{lead_s}"} if lead_s else {}),
        "requeue": True,
        "open-mode": "append",
        "propagate": "NONE",
        "output": f"{config.paths.run_dir}/{stage}-{'%A_%a' if allocation.array else '%j'}.log",
    }
    written = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    return (*written, *(allocation.settings.extra_directives or ()))
