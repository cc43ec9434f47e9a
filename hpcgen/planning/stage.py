"""One stage as it will run on the cluster: its directives, environment, container and command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.planning.allocation import Allocation, make_allocation
from hpcgen.planning.container import Container, make_container, runtime
from hpcgen.planning.environment import SET_BY_THE_SCRIPT, Variable, stage_environment
from hpcgen.planning.paths import trainer_data

STAGES = ("tokenize", "train")
"""In the order of a model's life."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What one stage asks of Slurm, and what it runs there."""

    name: str
    allocation: Allocation
    directives: tuple[str, ...]
    """sbatch options, each as it follows #SBATCH."""
    environment: tuple[Variable, ...]
    container: Container | None
    python: str
    arguments: tuple[str, ...]
    """What follows `python`; the training stage adds its configuration and its stop file in the job."""
    inputs: tuple[str, ...]
    """Host files that the stage reads, which the login node can look for."""
    required: tuple[str, ...]
    """Host paths that every node must have: inputs, and what is mounted and not made by the job."""
    directories: tuple[str, ...]
    """Directories besides the run's that the job makes, since a container can mount only what is there."""
    signal_lead_s: int
    """Seconds before the time limit at which the job is warned; 0 for a stage that has nothing to save."""


@dataclass(frozen=True)
class _Work:
    """What a stage runs, and the host paths it touches."""

    arguments: tuple[str, ...]
    inputs: tuple[str, ...]
    reads: tuple[str, ...]
    """Directories and files besides `inputs`."""
    writes: tuple[str, ...]


def make_stage(name: str, run: Run, config: RunConfig, signal_lead_s: int = 0) -> StagePlan:
    """Plans stage `name` of a run whose paths in `config` are absolute.

    Raises:
        HpcgenError: a path that the container cannot mount.
    """
    cluster, node_type = run.cluster, run.node_type
    allocation = make_allocation(name, config, cluster, node_type)
    environment = stage_environment(name, config, cluster, node_type, runtime=runtime(config, cluster))
    work = _train(run, config) if name == "train" else _tokenize(config)
    code = (cluster.code_dir,) if cluster.code_dir else ()
    exported = [variable.name for variable in environment]
    return StagePlan(
        name=name,
        allocation=allocation,
        directives=_directives(name, config, allocation, signal_lead_s),
        environment=environment,
        container=make_container(
            config,
            cluster,
            writes=(*work.writes, config.paths.run_dir, cluster.scratch),
            reads=(*work.reads, *(str(PurePosixPath(path).parent) for path in work.inputs), *code),
            environment=(*exported, *(SET_BY_THE_SCRIPT if name == "train" else ()), *config.secrets),
        ),
        python=cluster.python,
        arguments=work.arguments,
        inputs=work.inputs,
        required=(*work.inputs, *work.reads, *code, *_given_mounts(run, config)),
        directories=work.writes,
        signal_lead_s=signal_lead_s,
    )


def _given_mounts(run: Run, config: RunConfig) -> tuple[str, ...]:
    if runtime(config, run.cluster) == "none":
        return ()
    return tuple(mount.source for mount in (*run.cluster.container.mounts, *config.container.mounts))


def _train(run: Run, config: RunConfig) -> _Work:
    data, checkpoint = trainer_data(config), config.checkpoint
    datasets = (*data.datasets, *data.train, *data.valid, *data.test)
    inputs = tuple(f"{dataset.prefix}{suffix}" for dataset in datasets for suffix in (".idx", ".bin"))
    if checkpoint.load:
        inputs = (*inputs, f"{checkpoint.load}/latest_checkpointed_iteration.txt")
    reads = (checkpoint.load, run.node_type.topology_file)
    writes = (checkpoint.save, data.cache_dir)
    return _Work(
        arguments=("-m", "trainer"),
        inputs=inputs,
        reads=tuple(path for path in reads if path),
        writes=tuple(path for path in writes if path),
    )


def _tokenize(config: RunConfig) -> _Work:
    tokenize, tokenizer = config.data.tokenize, config.data.tokenizer
    assert tokenize is not None
    options = {
        "--output-prefix": tokenize.output_prefix,
        "--tokenizer": tokenizer.tokenizer_file if tokenizer.kind == "huggingface" else tokenizer.kind,
        "--vocab-file": tokenizer.vocab_file,
        "--merges-file": tokenizer.merges_file,
        "--eod-token": tokenizer.eod_token,
        "--json-key": tokenize.json_key,
    }
    words = [f"{option}={value}" for option, value in options.items() if value is not None]
    flags = ["--drop-empty"] if tokenize.drop_empty else []
    files = (tokenizer.vocab_file, tokenizer.merges_file, tokenizer.tokenizer_file)
    return _Work(
        # --overwrite: a job that Slurm requeued begins again
        arguments=("-m", "hpcgen", "data", "tokenize", "--overwrite", *words, *flags, "--", *tokenize.input),
        inputs=(*tokenize.input, *(path for path in files if path)),
        reads=(),
        writes=(str(PurePosixPath(tokenize.output_prefix).parent),),
    )


def _directives(stage: str, config: RunConfig, allocation: Allocation, lead_s: int) -> tuple[str, ...]:
    options: dict[str, str | bool] = {
        "job-name": config.name if stage == "train" else f"{config.name}-{stage}",
        **allocation.resource_options(),
        **({"signal": f"B:USR2@{lead_s}"} if lead_s else {}),
        "requeue": True,
        "open-mode": "append",
        "propagate": "NONE",
        "output": f"{config.paths.run_dir}/{stage}-%j.log",
    }
    written = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    return (*written, *(allocation.settings.extra_directives or ()))
