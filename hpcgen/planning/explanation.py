"""Why a stage has the environment that it has: what is exported, computed, taken over, unset and left out."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.config.stages import GPU_STAGES, STAGES
from hpcgen.config.validation import describe
from hpcgen.errors import ConfigErrors, Problem
from hpcgen.planning.environment import (
    LEAKED,
    ON_SCRATCH,
    RENDEZVOUS,
    RESERVED,
    SET_BY_THE_SCRIPT,
    Variable,
    all_environment_problems,
    environment_warnings,
    library_path,
    stage_environment,
    stage_secrets,
    uses_gpus,
)
from hpcgen.planning.paths import absolute_paths
from hpcgen.planning.software import runtime

COMPUTED = {
    "MASTER_ADDR": "address of the step's first node, as scontrol knows it",
    "MASTER_PORT": "10000 to 29999, from the job ID, its restarts and its steps; a later port where it is taken",
    "WORLD_SIZE": "ranks of the step",
    "TRAINER_RENDEZVOUS_ID": "random, for each attempt: by it the ranks know each other where MASTER_PORT is taken",
    "CORPUS_JOB": "RUN_DIR/jobs/ARRAY_TASK/corpus.json",
    "TRAINER_CONFIG": "RUN_DIR/jobs/JOBID/trainer.json",
    "TRAINER_STOP_FILE": "RUN_DIR/jobs/JOBID/stop-RESTART",
    "HOME": "SCRATCH/hpcgen-CLUSTER-JOBID, for the tasks alone",
    "TMPDIR": "SCRATCH/hpcgen-CLUSTER-JOBID/tmp, for the tasks alone",
    "XDG_CACHE_HOME": "SCRATCH/hpcgen-CLUSTER-JOBID/cache, for the tasks alone",
    "HF_HOME": "SCRATCH/hpcgen-CLUSTER-JOBID/huggingface, for the tasks alone",
    "TRITON_CACHE_DIR": "SCRATCH/hpcgen-CLUSTER-JOBID/triton, for the tasks alone",
    "TORCHINDUCTOR_CACHE_DIR": "SCRATCH/hpcgen-CLUSTER-JOBID/inductor, for the tasks alone",
    "LD_LIBRARY_PATH": "the profile's library_path, then the image's own value, for the tasks alone",
    "CHECK_MEMLOCK": "1, so that nodes warn where InfiniBand cannot pin memory (ulimit -l)",
    "ENROOT_DATA_PATH": "SCRATCH/hpcgen-CLUSTER-JOBID/enroot/data",
    "ENROOT_CACHE_PATH": "SCRATCH/hpcgen-CLUSTER-JOBID/enroot/cache",
    "ENROOT_RUNTIME_PATH": "SCRATCH/hpcgen-CLUSTER-JOBID/enroot/run",
    "ENROOT_TEMP_PATH": "SCRATCH/hpcgen-CLUSTER-JOBID/tmp",
    "ENROOT_MOUNT_HOME": "no, over the node's enroot.conf",
    "ENROOT_ROOTFS_WRITABLE": "no, over the node's enroot.conf",
}
"""Variables that a script sets when the job runs, and to what. RUN_DIR and SCRATCH stand for the run's own."""


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A variable that the stage does not have, and the change that would give it."""

    variable: Variable
    change: str
    """Options of the command line: "--set parallelism.use_sharp=true"."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The environment of one stage of a run."""

    stage: str
    cluster: str
    """The cluster's name and its node type's description."""
    run_dir: str
    variables: tuple[Variable, ...]
    """What the script exports, by name."""
    computed: Mapping[str, str]
    """Name -> how the script sets it in the job."""
    secrets: tuple[str, ...]
    """Names whose values the job takes from the submitting shell."""
    absent: tuple[Absent, ...]
    warnings: tuple[str, ...]

    def container_environment(self) -> tuple[str, ...]:
        """Names for pyxis's --container-env: of the variables that a launch script must have or compute."""
        rendezvous = RENDEZVOUS if self.stage in GPU_STAGES else ()
        return tuple(sorted({variable.name for variable in self.variables} | {*rendezvous, *self.secrets}))

    def only(self, patterns: Sequence[str]) -> Explanation:
        """What is said of the variables that `patterns` name (NCCL_DEBUG, or NCCL_*); all without any.

        Raises:
            ConfigErrors: every pattern that names none.
        """
        if not patterns:
            return self
        _require_known(patterns, self.stage, self.names(), self.secrets)
        return dataclasses.replace(
            self,
            variables=tuple(v for v in self.variables if matches(v.name, patterns)),
            computed={name: how for name, how in self.computed.items() if matches(name, patterns)},
            secrets=tuple(name for name in self.secrets if matches(name, patterns)),
            absent=tuple(a for a in self.absent if matches(a.variable.name, patterns)),
        )

    def names(self) -> list[str]:
        """Every variable that there is something to say about."""
        of_variables = [v.name for v in (*self.variables, *(a.variable for a in self.absent))]
        return [*of_variables, *self.computed, *self.secrets]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What one environment changes against another one of the same stage."""

    stage: str
    added: tuple[Variable, ...]
    removed: tuple[Variable, ...]
    changed: tuple[tuple[Variable, Variable], ...]
    """Before and after, where the values differ."""
    same: int
    """Variables with one value in both."""
    added_secrets: tuple[str, ...]
    removed_secrets: tuple[str, ...]


def explain(stage: str, run: Run) -> Explanation:
    """Everything there is to say about the environment of `stage`, whether or not its data files are there.

    Raises:
        ConfigErrors: mistakes in the run file, and variables that a file may not set.
        HpcgenError: the run directory has a path that no script can use.
    """
    mistakes = [*run.mistakes, *(_described(run, problem) for problem in all_environment_problems(run))]
    if mistakes:
        raise ConfigErrors(list(dict.fromkeys(mistakes)))
    config = absolute_paths(run.config, run.directory)
    variables = stage_environment(stage, run, config)
    return Explanation(
        stage=stage,
        cluster=f"{run.cluster_name} ({run.node_type.description})",
        variables=variables,
        run_dir=config.paths.run_dir,
        computed={name: _in_place(COMPUTED[name], run, config) for name in _computed(stage, run, config)},
        secrets=stage_secrets(stage, config),
        absent=tuple(_absent(stage, run, config, {variable.name for variable in variables})),
        warnings=tuple(_described(run, problem) for problem in environment_warnings(stage, run, variables)),
    )


def compare(before: Explanation, after: Explanation, patterns: Sequence[str] = ()) -> Difference:
    """What `after` changes against `before`, in the variables that `patterns` name.

    Raises:
        ConfigErrors: every pattern that names a variable of neither.
    """
    names = [*before.names(), *after.names()]
    _require_known(patterns, after.stage, names, (*before.secrets, *after.secrets))
    old = {v.name: v for v in before.variables if matches(v.name, patterns)}
    new = {v.name: v for v in after.variables if matches(v.name, patterns)}
    both = [(old[name], new[name]) for name in new if name in old]
    changed = tuple((was, now) for was, now in both if was.value != now.value)
    secrets = [name for name in (*before.secrets, *after.secrets) if matches(name, patterns)]
    return Difference(
        stage=after.stage,
        added=tuple(variable for name, variable in new.items() if name not in old),
        removed=tuple(variable for name, variable in old.items() if name not in new),
        changed=changed,
        same=len(both) - len(changed),
        added_secrets=tuple(name for name in secrets if name not in before.secrets),
        removed_secrets=tuple(name for name in secrets if name not in after.secrets),
    )


def by_change(absent: Iterable[Absent]) -> dict[str, list[Variable]]:
    """The variables that each change would give."""
    changes: dict[str, list[Variable]] = {}
    for item in absent:
        changes.setdefault(item.change, []).append(item.variable)
    return changes


def leaked(names: Iterable[str], secrets: Sequence[str]) -> tuple[str, ...]:
    """Those of a submitting shell's variables that the script unsets."""
    return tuple(sorted(name for name in names if name not in secrets and matches(name, LEAKED)))


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns of a shell fits `name`; no patterns at all fit every name."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _described(run: Run, problem: Problem) -> str:
    if problem.file == "cluster":
        return describe(problem, run.cluster_document, run.cluster)
    return describe(problem, run.document, run.config)


def _computed(stage: str, run: Run, config: RunConfig) -> Iterator[str]:
    """Names that the script of the stage sets in the job, as the templates do."""
    yield from SET_BY_THE_SCRIPT.get(stage, ())
    yield from ON_SCRATCH
    if library_path(stage, run.cluster):
        yield "LD_LIBRARY_PATH"
    if uses_gpus(stage, run):
        yield "CHECK_MEMLOCK"
    if stage != "image" and runtime(config, run.cluster) == "enroot":
        yield from (name for name in COMPUTED if name.startswith("ENROOT_"))


def _in_place(how: str, run: Run, config: RunConfig) -> str:
    return how.replace("RUN_DIR", config.paths.run_dir).replace("SCRATCH", run.cluster.scratch)


def _absent(stage: str, run: Run, config: RunConfig, present: set[str]) -> Iterator[Absent]:
    """What the stage would have besides, with another setting or in another stage: the nearest change of each."""
    found = set(present)
    for change, other_stage, other in _changes(stage, run, config):
        for variable in stage_environment(other_stage, run, other):
            if variable.name not in found:
                found.add(variable.name)
                yield Absent(variable=variable, change=change)


def _changes(stage: str, run: Run, config: RunConfig) -> Iterator[tuple[str, str, RunConfig]]:
    """One setting changed, then another stage, then both."""
    settings = list(_settings(run, config))
    others = [other for other in STAGES if other != stage]
    yield from ((f"--set {setting}", stage, other) for setting, other in settings)
    yield from ((f"--stage {other}", other, config) for other in others)
    for other_stage in others:
        for setting, other in settings:
            yield f"--stage {other_stage} --set {setting}", other_stage, other


def _settings(run: Run, config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """The settings of a run file that variables depend on, each changed alone."""
    if run.node_type.sharp:
        parallelism = dataclasses.replace(config.parallelism, use_sharp=True)
        yield "parallelism.use_sharp=true", dataclasses.replace(config, parallelism=parallelism)
    parallelism = dataclasses.replace(config.parallelism, tensor_model_parallel_size=2)
    setting = "parallelism.tensor_model_parallel_size=2"
    yield setting, dataclasses.replace(config, parallelism=parallelism)
    if runtime(config, run.cluster) == "none":
        container = dataclasses.replace(config.container, runtime="pyxis")
        yield "container.runtime=pyxis", dataclasses.replace(config, container=container)
    for version in _torch_versions(run):
        container = dataclasses.replace(config.container, torch_version=version)
        # quoted twice: for the shell, and as a text of YAML
        yield f"container.torch_version=\"'{version}'\"", dataclasses.replace(config, container=container)


def _torch_versions(run: Run) -> list[str]:
    """A PyTorch in each range that the node type tells apart: ">=2.9" gives 2.9, "<2.8" gives 2.7."""
    facts = (*run.node_type.environment.values(), *run.node_type.sharp.values())
    return [_version_in(wanted) for wanted in dict.fromkeys(fact.torch for fact in facts) if wanted]


def _version_in(wanted: str) -> str:
    major, minor = (int(part) for part in wanted.lstrip("<>=").split("."))
    if wanted.startswith(">="):
        return f"{major}.{minor}"
    return f"{major}.{minor - 1}" if minor else f"{major - 1}.99"


def _require_known(patterns: Sequence[str], stage: str, names: Sequence[str], secrets: Sequence[str]) -> None:
    unknown = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    if unknown:
        raise ConfigErrors([_unknown(pattern, stage, names, secrets) for pattern in unknown])


def _unknown(name: str, stage: str, names: Sequence[str], secrets: Sequence[str]) -> str:
    """What there is to say about a name that no stage of the run sets."""
    if name in RESERVED:
        return f"{name}: Slurm, the container or the image sets it; a run file may not, and stage {stage} does not"
    close = difflib.get_close_matches(name.upper(), sorted(set(names)), n=3, cutoff=0.75)
    hints = [f"did you mean {' or '.join(close)}?"] if close else []
    if not hints and leaked([name], secrets):
        hints = ["and one of the submitting shell is unset: set it under environment in the run file"]
    return "; ".join([f"{name if name.isprintable() else ascii(name)}: no stage sets it", *hints])
