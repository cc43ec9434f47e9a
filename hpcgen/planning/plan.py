"""The plan of a run: everything that is decided before anything is written or submitted."""

from __future__ import annotations

import dataclasses
import os.path
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.fields import slurm_time
from hpcgen.config.loader import Run
from hpcgen.config.presets import PRESETS
from hpcgen.config.run import RunConfig
from hpcgen.config.validation import describe
from hpcgen.errors import ConfigErrors, HpcgenError, Problem
from hpcgen.planning import checkpointing
from hpcgen.planning.allocation import (
    Allocation,
    allocation_problems,
    gres_problem,
    make_allocation,
    setting_path,
)
from hpcgen.planning.container import Container, container_problems, make_container, runtime
from hpcgen.planning.environment import (
    SET_BY_THE_SCRIPT,
    Variable,
    environment_problems,
    stage_environment,
)
from hpcgen.planning.layout import Layout
from hpcgen.planning.paths import absolute_paths, plain_path_problems, trainer_data
from hpcgen.planning.resolve import resolve_model, resolve_optimizer, resolve_parallelism
from hpcgen.planning.rules.check import check
from hpcgen.planning.rules.facts import Facts, World
from trainer.config import TrainerConfig

STAGES = ("tokenize", "train")
"""In the order of a model's life."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage as it will run on the cluster."""

    name: str
    job_name: str
    allocation: Allocation
    directives: tuple[str, ...]
    """sbatch options, each as it follows #SBATCH."""
    environment: tuple[Variable, ...]
    container: Container | None
    python: str
    arguments: tuple[str, ...]
    """What follows `python`; the training stage adds its configuration and its stop file in the job."""
    inputs: tuple[str, ...]
    """Host files that must be there when the stage starts."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the stages will do, and everything worth a warning."""

    run: Run
    config: RunConfig
    """The run file with absolute paths."""
    stages: dict[str, StagePlan]
    trainer: TrainerConfig | None
    """The trainer's resolved configuration; None when training is not planned."""
    layout: Layout | None
    warnings: tuple[str, ...]


def plan(run: Run, stages: Sequence[str] = ("train",), *, exists: Callable[[str], bool] = os.path.exists) -> Plan:
    """Plans `stages` ("tokenize", "train") of a run.

    `exists` answers for the data files, which only the login node can see now.

    Raises:
        ConfigErrors: every rule that the run breaks.
        HpcgenError: an unknown stage.
    """
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        raise HpcgenError(f"{unknown[0]!r} is not a stage", f"use {' or '.join(STAGES)}")
    planner = _Planner(run, tuple(stage for stage in STAGES if stage in stages))
    return planner.plan(exists)


class _Planner:
    """Gathers problems over all parts of a plan, so that they are reported together."""

    def __init__(self, run: Run, stages: tuple[str, ...]) -> None:
        self.run = run
        self.stages = stages
        self.config = absolute_paths(run.config, run.directory)
        self.errors: list[str] = list(run.mistakes)
        self.warnings: list[str] = []

    def plan(self, exists: Callable[[str], bool]) -> Plan:
        self._check_sections()
        trainer, layout = self._trainer() if "train" in self.stages else (None, None)
        stages = {name: self._stage(name, trainer) for name in self.stages}
        self._check_inputs(stages, exists)
        if self.errors:
            raise ConfigErrors(list(dict.fromkeys(self.errors)))
        return Plan(
            run=self.run,
            config=self.config,
            stages=stages,
            trainer=trainer,
            layout=layout,
            warnings=tuple(self.warnings),
        )

    def _error(self, problem: Problem) -> None:
        """Notes a problem, unless it speaks of a section that holds a mistake anyway."""
        named = re.findall(r"\b([a-z]+)[.\[]", f"{problem.path}. {problem.reason}")
        if self.run.unsure_sections.isdisjoint(named):
            self.errors.append(describe(problem, self.run.document, self.run.config))

    def _check_sections(self) -> None:
        config, cluster = self.run.config, self.run.cluster
        for problem in (
            *plain_path_problems(config),
            *environment_problems(config.environment, config.secrets),
            *container_problems(config, cluster),
            *tokenizers.problems(config.data.tokenizer),
        ):
            self._error(problem)
        if problem := gres_problem(cluster, self.run.node_type):
            self.errors.append(f"cluster {self.run.cluster_name}: {problem.path} = {cluster.gres} {problem.reason}")
        for stage in self.stages:
            for problem in allocation_problems(stage, config, cluster, self.run.node_type, OWN_OPTIONS):
                self._error(problem)

    def _trainer(self) -> tuple[TrainerConfig | None, Layout | None]:
        config, node_type = self.config, self.run.node_type
        allocation = make_allocation("train", config, self.run.cluster, node_type)
        model = config.model
        if model.vocab_size is None and model.padded_vocab_size is None and not self.errors:
            model = dataclasses.replace(model, vocab_size=self._vocab_size())
        data = trainer_data(config)
        facts = Facts(
            model=model,
            parallelism=config.parallelism,
            training=config.training,
            optimizer=config.optimizer,
            data=data,
            world=World(
                path=setting_path("train", "nodes", config), count=allocation.nodes, ranks_each=allocation.ntasks_per_node
            ),
            gpus_per_node=node_type.gpus_per_node or allocation.ntasks_per_node,
            device_memory_gib=node_type.gpu_memory_gib,
        )
        errors, warnings = check(facts)
        for problem in errors:
            self._error(problem)
        self.warnings += [describe(problem, self.run.document, self.run.config) for problem in warnings]
        self._warn_about_batch()
        layout = facts.layout
        if self.errors or layout is None:
            return None, None
        trainer = TrainerConfig(
            name=config.name,
            run_dir=config.paths.run_dir,
            device=node_type.device,
            world_size=allocation.num_tasks,
            peak_tflops=node_type.peak_tflops.get(config.training.precision),
            model=resolve_model(model),
            parallelism=resolve_parallelism(config.parallelism),
            training=config.training,
            optimizer=resolve_optimizer(config.optimizer, config.training, seq_length=model.seq_length),
            data=data,
            checkpoint=config.checkpoint,
            logging=config.logging,
        )
        return trainer, layout

    def _vocab_size(self) -> int | None:
        try:
            return tokenizers.vocab_size(self.config.data.tokenizer)
        except HpcgenError as error:
            hint = "make the tokenizer's files readable here, or set model.vocab_size"
            self._error(Problem("model.vocab_size", f"is left to data.tokenizer, which cannot tell: {error}", hint))
            return None

    def _warn_about_batch(self) -> None:
        name, batch = self.run.config.preset, self.run.config.training.global_batch_size
        if name is None:
            return
        usual = PRESETS[name].sections["training"]["global_batch_size"]
        if batch > 2 * usual:
            reason = f"is more than twice the {usual} of preset {name}: throughput rises, learning per token falls"
            problem = Problem("training.global_batch_size", reason)
            self.warnings.append(describe(problem, self.run.document, self.run.config))

    def _stage(self, name: str, trainer: TrainerConfig | None) -> StagePlan:
        config, cluster, node_type = self.config, self.run.cluster, self.run.node_type
        allocation = make_allocation(name, config, cluster, node_type)
        environment = stage_environment(name, config, cluster, node_type, runtime=runtime(config, cluster))
        if name == "train":
            reads, writes, inputs, arguments = self._train_files()
            lead_s = self._signal_lead_s(trainer, allocation) if trainer else 0
        else:
            reads, writes, inputs, arguments = self._tokenize_files()
            lead_s = 0
        if cluster.code_dir:
            reads.append(cluster.code_dir)
        if name == "train" and node_type.topology_file:
            reads.append(node_type.topology_file)
        names = [variable.name for variable in environment] + [*SET_BY_THE_SCRIPT, *config.secrets]
        return StagePlan(
            name=name,
            job_name=config.name if name == "train" else f"{config.name}-{name}",
            allocation=allocation,
            directives=_directives(name, config, allocation, lead_s),
            environment=environment,
            container=make_container(config, cluster, writes=writes, reads=reads, environment=names),
            python=cluster.python,
            arguments=arguments,
            inputs=tuple(inputs),
        )

    def _train_files(self) -> tuple[list[str], list[str], list[str], tuple[str, ...]]:
        config = self.config
        data = trainer_data(config)
        prefixes = [dataset.prefix for blend in (data.datasets, data.train, data.valid, data.test) for dataset in blend]
        reads = [os.path.dirname(prefix) for prefix in prefixes]
        writes = [config.paths.run_dir, self.run.cluster.scratch]
        writes += [path for path in (config.checkpoint.save, data.cache_dir) if path]
        if config.checkpoint.load:
            reads.append(config.checkpoint.load)
        inputs = [f"{prefix}{extension}" for prefix in prefixes for extension in (".idx", ".bin")]
        return reads, writes, inputs, ("-m", "trainer")

    def _tokenize_files(self) -> tuple[list[str], list[str], list[str], tuple[str, ...]]:
        config, tokenize = self.config, self.config.data.tokenize
        if tokenize is None:
            self._error(Problem("data.tokenize", "is missing", "name its input and output_prefix to use this stage"))
            return [], [], [], ()
        if not tokenize.input:
            self._error(Problem("data.tokenize.input", "is empty", "name the .jsonl or .jsonl.zst files"))
        tokenizer = config.data.tokenizer
        files = [path for path in (tokenizer.vocab_file, tokenizer.merges_file, tokenizer.tokenizer_file) if path]
        reads = [os.path.dirname(path) for path in (*tokenize.input, *files)]
        writes = [os.path.dirname(tokenize.output_prefix), config.paths.run_dir, self.run.cluster.scratch]
        return reads, writes, [*tokenize.input, *files], _tokenize_arguments(config)

    def _signal_lead_s(self, trainer: TrainerConfig, allocation: Allocation) -> int:
        """The warning's lead; refuses one, or a time limit, that is too short for the checkpoint to be written."""
        cluster: ClusterConfig = self.run.cluster
        save_s = checkpointing.save_time_s(trainer, cluster.storage_write_gb_s)
        step_s = checkpointing.slow_step_s(trainer)
        needed_s = checkpointing.signal_lead_s(step_s, save_s)
        asked_s = allocation.settings.signal_lead_s
        parts = f"60 s + 2 x (a step of {step_s:.0f} s + a save of {save_s:.0f} s)"
        if asked_s is not None and asked_s < needed_s:
            path = setting_path("train", "signal_lead_s", self.run.config)
            self._error(Problem(path, f"is too short to write a checkpoint: it takes {parts}", f"use at least {needed_s}"))
        lead_s = max(asked_s or 0, needed_s)
        shortest_s = checkpointing.shortest_time_s(lead_s, cluster.startup_time_s, step_s, save_s)
        if 0 < allocation.time_s < shortest_s:
            reason = (
                f"leaves no time to train: start-up takes {cluster.startup_time_s} s, "
                f"and the warning comes {lead_s} s before the limit ({parts})"
            )
            path = setting_path("train", "time", self.run.config)
            self._error(Problem(path, reason, f"use at least {slurm_time(shortest_s)}"))
        return lead_s

    def _check_inputs(self, stages: dict[str, StagePlan], exists: Callable[[str], bool]) -> None:
        """Files that are not there. Where not even the top of their path is, this machine cannot tell: a warning."""
        tokenize = self.config.data.tokenize
        made = () if tokenize is None else tuple(f"{tokenize.output_prefix}{end}" for end in (".idx", ".bin"))
        for stage in stages.values():
            for path in stage.inputs:
                if exists(path):
                    continue
                if stage.name == "train" and path in made:
                    if "tokenize" not in stages:
                        self.warnings.append(f"{path} is not there yet: the tokenize stage must run first")
                elif exists("/" + path.split("/")[1]):
                    self.errors.append(f"{path}: no such file, and stage {stage.name} needs it")
                else:
                    self.warnings.append(f"{path} cannot be seen from this machine: not checked")


OWN_OPTIONS = frozenset(
    "job-name nodes ntasks ntasks-per-node cpus-per-task gpus-per-node gres gpus exclusive mem time partition account "
    "qos reservation constraint signal requeue no-requeue open-mode propagate output error array chdir wrap export".split()
)
"""sbatch options that have a key of their own, or that the script relies on."""


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


def _tokenize_arguments(config: RunConfig) -> tuple[str, ...]:
    tokenize, tokenizer = config.data.tokenize, config.data.tokenizer
    assert tokenize is not None
    kind = tokenizer.tokenizer_file if tokenizer.kind == "huggingface" else tokenizer.kind
    options = {
        "--output-prefix": tokenize.output_prefix,
        "--tokenizer": kind,
        "--vocab-file": tokenizer.vocab_file,
        "--merges-file": tokenizer.merges_file,
        "--eod-token": tokenizer.eod_token,
        "--json-key": tokenize.json_key,
    }
    words = [f"{option}={value}" for option, value in options.items() if value is not None]
    flags = ["--drop-empty"] if tokenize.drop_empty else []
    # a job that Slurm requeued begins again
    return ("-m", "hpcgen", "data", "tokenize", "--overwrite", *words, *flags, "--", *tokenize.input)
