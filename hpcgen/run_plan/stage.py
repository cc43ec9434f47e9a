"""The plan of one stage: its directives, environment, container and command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from hpcgen.config.fabric import fabric_of
from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.container import make_container
from hpcgen.planning.environment import Variable, stage_environment, stage_secrets, uses_gpus
from hpcgen.planning.inputs import Input
from hpcgen.planning.kind import Stage, Work
from hpcgen.planning.request import make_allocation
from hpcgen.planning.runtimes import Container
from trainer.contract.config import TrainerConfig
from trainer.contract.files.index_header import IDX
from trainer.contract.record import record

COMMENT = "--comment=hpcgen"
"""Option with which admins find the jobs of hpcgen: `squeue --format="%i %u %k"`."""


@record(kw_only=True)
class StagePlan:
    """The Slurm resources of one stage, and what it runs."""

    kind: Stage
    allocation: Allocation
    directives: tuple[str, ...]
    """sbatch options, as written after #SBATCH."""
    device: str
    """cuda if the stage runs on GPUs, otherwise cpu."""
    environment: tuple[Variable, ...]
    environment_script: str | None
    """Path of the nodes' script that sets more variables."""
    container: Container | None
    python: str
    arguments: tuple[str, ...]
    """Arguments after `python`. The job adds the arguments that are known only at run time: its configuration, stop
    file and task ID."""
    inputs: tuple[Input, ...]
    """Host files that the stage reads."""
    required: tuple[str, ...]
    """Host paths that every node must have: inputs, and mounted paths that the job does not create."""
    directories: tuple[str, ...]
    """Directories, in addition to the run's, that the job creates so that a container can mount them."""
    striped_directories: tuple[str, ...]
    """Directories for large files that the job creates. New ones are striped on Lustre."""
    modules: tuple[str, ...]
    """Environment modules that the job loads."""
    secrets: tuple[str, ...]
    """Names of variables that the submitting shell must export. Their values are never written."""
    files: Mapping[str, str]
    """Name -> content of files that the script writes into the job's directory."""
    values: Mapping[str, object]
    """Variables of the stage's own template."""
    queued: StagePlan | None
    """The stage that the running job submits, as train submits evaluate. Its script is the job's file NAME.sh."""
    signal_lead_s: int
    """Seconds before the time limit at which the job receives its signal; 0 for stages with nothing to save."""

    @property
    def prefixes(self) -> frozenset[str]:
        """Prefixes of the pairs that the stage reads."""
        return frozenset(item.path.removesuffix(IDX) for item in self.inputs if item.path.endswith(IDX))

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.kind.name

    @property
    def checks_nodes(self) -> bool:
        """True if the job checks its nodes, outside of the container."""
        return "node_expectations" in self.values

    @property
    def environment_file(self) -> str:
        """The file that describes the container; empty if the runtime needs none."""
        describe = self.container.kind.file if self.container else None
        return describe(self.container) if self.container and describe else ""

    def required_everywhere(self) -> tuple[str, ...]:
        """Host paths to check on each node: `required`, with dataset files replaced by their directories."""
        of_datasets = {item.path for item in self.inputs if item.is_dataset}
        paths = (str(PurePosixPath(path).parent) if path in of_datasets else path for path in self.required)
        return tuple(dict.fromkeys(paths))


def make_stage(
    stage: Stage, run: Run, config: RunConfig, trainer: TrainerConfig | None = None, signal_lead_s: int = 0
) -> StagePlan:
    """Plans a stage. The paths in `config` must be absolute.

    Raises:
        HpcgenError: the container cannot mount a path.
    """
    allocation = make_allocation(stage, config, run.cluster, run.node_type)
    environment = stage_environment(stage, run, config)
    queued = stage.queued_stage(config)
    work = stage.work(run, config, allocation, trainer)
    signal_lead_s = signal_lead_s or work.signal_lead_s
    reads = (*work.reads, *_code(stage, run), *_topology(environment), *_of_nodes(stage, run))
    container = _container(stage, run, config, work, environment)
    return StagePlan(
        kind=stage,
        allocation=allocation,
        directives=stage_directives(stage, config, allocation, signal_lead_s),
        device="cuda" if uses_gpus(stage, run) else "cpu",
        environment=environment,
        environment_script=run.node_type.environment_script if stage.uses_gpus else None,
        container=container,
        python=run.cluster.python,
        arguments=work.arguments,
        inputs=work.inputs,
        required=(*(item.path for item in work.inputs), *reads, *_needed_by(container, run, config)),
        directories=work.writes,
        striped_directories=work.large,
        modules=run.cluster.modules,
        secrets=stage_secrets(stage, config, run.cluster),
        files=work.files,
        values=work.values,
        queued=make_stage(queued, run, config, trainer) if queued else None,
        signal_lead_s=signal_lead_s,
    )


def _container(
    stage: Stage, run: Run, config: RunConfig, work: Work, environment: tuple[Variable, ...]
) -> Container | None:
    if not stage.in_container:
        return None
    of_inputs = (str(PurePosixPath(item.path).parent) for item in work.inputs)
    variables = (variable.name for variable in environment)
    return make_container(
        config,
        run.cluster,
        writes=(*work.writes, *work.large, config.paths.run_dir, run.cluster.scratch),
        reads=(*work.reads, *_code(stage, run), *_topology(environment), *_of_nodes(stage, run), *of_inputs),
        environment=(*variables, *stage.script_variables, *stage_secrets(stage, config, run.cluster)),
        fabric=fabric_of(run.node_type) if uses_gpus(stage, run) else None,
        uses_gpus=uses_gpus(stage, run),
    )


def _needed_by(container: Container | None, run: Run, config: RunConfig) -> tuple[str, ...]:
    """The paths that the container needs to start: its image, and the sources of the configured mounts."""
    if container is None:
        return ()
    image = (container.image,) if container.image_is_file else ()
    return (*(mount.source for mount in (*run.cluster.container.mounts, *config.container.mounts)), *image)


def _code(stage: Stage, run: Run) -> tuple[str, ...]:
    return (run.cluster.code_dir,) if run.cluster.code_dir and not stage.runs_user_program else ()


def _of_nodes(stage: Stage, run: Run) -> tuple[str, ...]:
    """Devices and plugins of the nodes' network."""
    return run.node_type.mounts if uses_gpus(stage, run) else ()


def _topology(environment: tuple[Variable, ...]) -> tuple[str, ...]:
    """NCCL's topology file, if the stage has one."""
    return tuple(
        variable.value for variable in environment if variable.name == "NCCL_TOPO_FILE" and variable.value
    )


def stage_directives(stage: Stage, config: RunConfig, allocation: Allocation, lead_s: int) -> tuple[str, ...]:
    """The sbatch options of a stage, whose job gets its signal `lead_s` seconds before the time limit."""
    options: dict[str, str | bool] = {
        "job-name": stage.job_name(config.name),
        **allocation.resource_options(),
        **({"signal": f"B:USR2@{lead_s}"} if lead_s else {}),
        "no-requeue" if stage.has_attempts and allocation.settings.chain else "requeue": True,
        "open-mode": "append",
        "propagate": "NONE",
        "output": f"{config.paths.run_dir}/{stage.name}-{'%A_%a' if allocation.array else '%j'}.log",
    }
    written = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    extra = allocation.settings.extra_directives or ()
    comment = () if any(option.startswith("--comment=") for option in extra) else (COMMENT,)
    return (*written, *comment, *extra)
