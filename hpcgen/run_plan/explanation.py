"""The explanation of a stage's environment: variables exported, computed, inherited, unset and absent."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hpcgen.config.known_variables import right_name
from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.config.stages import RENDEZVOUS, STAGE_ROWS
from hpcgen.config.validation import located
from hpcgen.config.variables import ON_SCRATCH, RESERVED
from hpcgen.errors import ConfigErrors, Problem
from hpcgen.planning.container import not_run_warnings
from hpcgen.planning.environment import (
    LEAKED,
    Variable,
    all_environment_problems,
    environment_warnings,
    leaked_patterns,
    library_path,
    stage_environment,
    stage_secrets,
    uses_gpus,
)
from hpcgen.planning.kind import Stage
from hpcgen.planning.paths import absolute_paths
from hpcgen.planning.runtimes import RUNTIMES
from hpcgen.planning.software import runtime
from hpcgen.stages import STAGES
from hpcgen.text import did_you_mean
from trainer.contract.record import record

COMPUTED = {
    **{name: how for stage in STAGE_ROWS.values() for name, how in stage.script_variables.items()},
    "HOME": "SCRATCH/hpcgen-CLUSTER-JOBID, for the tasks only",
    "TMPDIR": "SCRATCH/hpcgen-CLUSTER-JOBID/tmp, for the tasks only",
    "XDG_CACHE_HOME": "SCRATCH/hpcgen-CLUSTER-JOBID/cache, for the tasks only",
    "HF_HOME": "SCRATCH/hpcgen-CLUSTER-JOBID/huggingface, for the tasks only",
    "TRITON_CACHE_DIR": "SCRATCH/hpcgen-CLUSTER-JOBID/triton, for the tasks only",
    "TORCHINDUCTOR_CACHE_DIR": "SCRATCH/hpcgen-CLUSTER-JOBID/inductor, for the tasks only",
    "LD_LIBRARY_PATH": "library_path of the profile and the node type, then the image's own value, for the tasks only",
    "CHECK_MEMLOCK": "1, so that nodes warn if InfiniBand cannot pin memory (ulimit -l)",
    "APPTAINER_CACHEDIR": "SCRATCH/hpcgen-CLUSTER-JOBID/apptainer, for apptainer only",
    "APPTAINER_TMPDIR": "SCRATCH/hpcgen-CLUSTER-JOBID/tmp, for apptainer only",
    "ENROOT_DATA_PATH": "SCRATCH/hpcgen-CLUSTER-JOBID/enroot/data",
    "ENROOT_CACHE_PATH": "SCRATCH/hpcgen-CLUSTER-JOBID/enroot/cache",
    "ENROOT_RUNTIME_PATH": "SCRATCH/hpcgen-CLUSTER-JOBID/enroot/run",
    "ENROOT_TEMP_PATH": "SCRATCH/hpcgen-CLUSTER-JOBID/tmp",
    "ENROOT_MOUNT_HOME": "no, overriding the node's enroot.conf",
    "ENROOT_ROOTFS_WRITABLE": "no, overriding the node's enroot.conf",
}
"""Variables that a script sets when the job runs, and their values. RUN_DIR and SCRATCH stand for the run's paths."""


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A variable that the stage does not have, and the change that would set it."""

    variable: Variable
    change: str
    """Command-line options, such as "--set parallelism.use_sharp=true"."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The environment of one stage of a run."""

    stage: str
    cluster: str
    """The cluster's name and its node type's description."""
    run_dir: str
    variables: tuple[Variable, ...]
    """Variables that the script exports, sorted by name."""
    computed: Mapping[str, str]
    """Name -> how the script sets it in the job."""
    secrets: tuple[str, ...]
    """Names of variables that the job inherits from the submitting shell."""
    environment_script: str | None = None
    """Script of the nodes that sets more variables when the job runs."""
    unset: tuple[str, ...]
    """Patterns of variables that the script unsets if the submitting shell exports them."""
    absent: tuple[Absent, ...]
    warnings: tuple[str, ...]
    defaults: Mapping[str, tuple[str, str]]
    """See `Run.from_defaults`."""

    def container_environment(self) -> tuple[str, ...]:
        """Names for pyxis's --container-env: the variables that a launch script must set or compute."""
        rendezvous = RENDEZVOUS if STAGE_ROWS[self.stage].has_ranks else ()
        return tuple(sorted({variable.name for variable in self.variables} | {*rendezvous, *self.secrets}))

    def only(self, patterns: Sequence[str]) -> Explanation:
        """The part of the explanation about variables that match `patterns`, such as NCCL_*; everything if empty.

        Raises:
            ConfigErrors: patterns match no variable.
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

    def absent_by_change(self) -> dict[str, list[Variable]]:
        """The absent variables, grouped by the change that would set them."""
        changes: dict[str, list[Variable]] = {}
        for item in self.absent:
            changes.setdefault(item.change, []).append(item.variable)
        return changes

    def names(self) -> list[str]:
        """Names of all variables that are explained."""
        of_variables = [v.name for v in (*self.variables, *(a.variable for a in self.absent))]
        return [*of_variables, *self.computed, *self.secrets]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The differences between two environments of the same stage."""

    stage: str
    added: tuple[Variable, ...]
    removed: tuple[Variable, ...]
    changed: tuple[tuple[Variable, Variable], ...]
    """Variables whose values differ, each before and after."""
    same: int
    """Number of variables with the same value in both."""
    added_secrets: tuple[str, ...]
    removed_secrets: tuple[str, ...]


@record
class Change:
    """The items of a list that were removed and added. A single value is a list of one item."""

    removed: tuple[str, ...]
    added: tuple[str, ...]


@record(kw_only=True)
class Changes:
    """Changes for a stage between two versions of hpcgen, besides the variables."""

    directives: Mapping[str, Change]
    """Option of sbatch -> its values."""
    settings: Mapping[str, Change] = dataclasses.field(default_factory=dict)
    """Shell variable of the script -> its words."""
    files: Mapping[str, Change] = dataclasses.field(default_factory=dict)
    """Job file, or the script of the jobs that the job queues -> its keys and values, if it is JSON, or its lines."""
    functions: tuple[str, ...] = ()
    """Names of the shell functions whose text differs, or that only one of the scripts has."""
    defaults: Mapping[str, Change] = dataclasses.field(default_factory=dict)
    """Key that neither the run file nor the profile sets -> its default."""


@record(kw_only=True)
class Comparison:
    """An explanation, compared with another one of the same stage."""

    before: Explanation
    after: Explanation
    against: str
    """Origin of `before`."""
    changes: Changes | None = None
    """Other changes; None if only the variables are compared."""
    unseen: str = ""
    """Changes that the comparison cannot show."""


def explain(name: str, run: Run) -> Explanation:
    """Explains the environment of the stage `name`. Its data files need not exist.

    Raises:
        ConfigErrors: a file sets variables that it may not set.
        HpcgenError: scripts cannot use the path of the run directory.
    """
    if mistakes := [_located(run, problem) for problem in all_environment_problems(run)]:
        raise ConfigErrors(mistakes)
    stage, config = STAGES[name], absolute_paths(run.config, run.directory)
    variables = stage_environment(stage, run, config)
    return Explanation(
        stage=name,
        cluster=f"{run.cluster_name} ({run.node_type.description})",
        variables=variables,
        run_dir=config.paths.run_dir,
        computed={name: _in_place(COMPUTED[name], run, config) for name in _computed(stage, run, config)},
        secrets=stage_secrets(stage, config, run.cluster),
        environment_script=run.node_type.environment_script if stage.uses_gpus else None,
        unset=leaked_patterns(config, run.cluster),
        absent=tuple(_absent(stage, run, config, {variable.name for variable in variables})),
        warnings=tuple(
            str(_located(run, problem))
            for problem in (
                *not_run_warnings(config, run.cluster),
                *environment_warnings(stage, run, variables),
            )
        ),
        defaults=run.from_defaults,
    )


def compare(before: Explanation, after: Explanation, patterns: Sequence[str] = ()) -> Difference:
    """Compares `after` with `before`, for variables that match `patterns`.

    Raises:
        ConfigErrors: patterns match no variable of either.
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


def different(before: Mapping[str, list[str]], after: Mapping[str, list[str]]) -> dict[str, Change]:
    """Name -> the change of its items, for names whose items differ."""
    names = sorted({*before, *after})
    pairs = {name: (before.get(name, []), after.get(name, [])) for name in names}
    return {name: _change(was, now) for name, (was, now) in pairs.items() if was != now}


def _change(was: list[str], now: list[str]) -> Change:
    removed, added = list[str](), list[str]()
    for tag, i, j, k, end in difflib.SequenceMatcher(None, was, now, autojunk=False).get_opcodes():
        if tag != "equal":
            removed += was[i:j]
            added += now[k:end]
    return Change(tuple(removed), tuple(added))


def leaked(names: Iterable[str], secrets: Sequence[str], patterns: Sequence[str] = LEAKED) -> tuple[str, ...]:
    """The variables of a submitting shell that the script unsets."""
    return tuple(sorted(name for name in names if name not in secrets and matches(name, patterns)))


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Returns True if `name` matches one of the shell patterns, or if there are none."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _located(run: Run, problem: Problem) -> Problem:
    if problem.file == "cluster":
        return located(problem, run.cluster_document, run.cluster)
    return located(problem, run.document, run.config)


def _computed(stage: Stage, run: Run, config: RunConfig) -> Iterator[str]:
    """Yields the names of variables that the stage's script sets when the job runs, following the templates."""
    yield from stage.script_variables
    yield from ON_SCRATCH
    if library_path(stage, run):
        yield "LD_LIBRARY_PATH"
    if uses_gpus(stage, run):
        yield "CHECK_MEMLOCK"
    kind = RUNTIMES.get(runtime(config, run.cluster))
    if stage.in_container and kind and kind.computes:
        yield from (name for name in COMPUTED if name.startswith(kind.computes))


def _in_place(how: str, run: Run, config: RunConfig) -> str:
    return how.replace("RUN_DIR", config.paths.run_dir).replace("SCRATCH", run.cluster.scratch)


def _absent(stage: Stage, run: Run, config: RunConfig, present: set[str]) -> Iterator[Absent]:
    """Yields variables that a different setting or stage would add, each with the smallest such change."""
    found = set(present)
    for change, other_stage, other in _changes(stage, run, config):
        for variable in stage_environment(other_stage, run, other):
            if variable.name not in found:
                found.add(variable.name)
                yield Absent(variable=variable, change=change)


def _changes(stage: Stage, run: Run, config: RunConfig) -> Iterator[tuple[str, Stage, RunConfig]]:
    """Yields changes in order of size: one setting, another stage, then both."""
    settings = list(_settings(run, config))
    others = [other for other in STAGES.values() if other is not stage and other.environment_of == other.name]
    yield from ((f"--set {setting}", stage, other) for setting, other in settings)
    yield from ((f"--stage {other.name}", other, config) for other in others)
    for other_stage in others:
        for setting, other in settings:
            yield f"--stage {other_stage.name} --set {setting}", other_stage, other


def _settings(run: Run, config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yields the settings on which variables depend, each changed separately."""
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
        # quoted twice: for the shell, and as a YAML string
        yield f"container.torch_version=\"'{version}'\"", dataclasses.replace(config, container=container)


def _torch_versions(run: Run) -> list[str]:
    """A PyTorch version in each range that the node type distinguishes: 2.9 for ">=2.9", 2.7 for "<2.8"."""
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


def _unknown(name: str, stage: str, names: Sequence[str], secrets: Sequence[str]) -> Problem:
    """The error for a name that no stage of the run sets."""
    if name in RESERVED:
        reason = f"set by Slurm, the container or the image, not by stage {stage}"
        return Problem("", reason, "a run file may not set it", where=name)
    hint = did_you_mean(name.upper(), set(names), most=3)
    if name in STAGE_ROWS:
        hint = f"use --stage {name}"
    elif not hint and (right := right_name(name.upper())):
        hint = f"did you mean {right}?"
    if not hint and leaked([name], secrets):
        hint = "it is unset if the submitting shell exports it. To use it, set it under environment in the run file"
    return Problem("", "no stage sets it", hint, where=name if name.isprintable() else ascii(name))
