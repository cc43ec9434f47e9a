"""The environment of a stage: every variable with its value, layer and reason."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.document import Document
from hpcgen.config.fabric import fabric_of
from hpcgen.config.loader import Run
from hpcgen.config.node_type import NodeType
from hpcgen.config.node_types import set_by
from hpcgen.config.run import RunConfig
from hpcgen.config.site_doubts import NAME_FABRIC, WITHOUT_FABRIC, excluded, exclusion_of
from hpcgen.config.variables import RESERVED, RESERVED_PREFIXES
from hpcgen.errors import Problem
from hpcgen.planning.kind import Stage
from hpcgen.planning.request import make_allocation
from hpcgen.planning.runtimes import RUNTIMES
from hpcgen.planning.software import LAST_RELEASE_WITH_SHARP, holds_for, ngc_release, runtime, torch_version
from hpcgen.redaction import SECRET, SECRET_VALUE
from trainer.contract.record import record

LOADS_CODE = frozenset(
    ("PYTHONSTARTUP", "PERL5OPT", "PERL5LIB", "RUBYOPT", "NODE_OPTIONS", "GIT_SSH_COMMAND", "GIT_SSH")
)
"""Variables that make Python, Perl, Ruby, Node.js or git run additional code."""

# fmt: off
LEAKED = (
    "SLURM_*", "SLURMD_*", "SBATCH_*", "SRUN_*", "SALLOC_*", "SACCT_*", "SCANCEL_*", "SCONTROL_*", "SINFO_*",
    "SQUEUE_*", "SUBMITIT_*", "TRAINER_*", "NCCL_*", "RCCL_*", "UCX_*", "UCC_*", "HCOLL_*", "SHARP_*",
    "MELLANOX_*", "FI_*", "OFI_*", "RDMA_*", "RDMAV_*", "IBV_*", "MLX5_*", "PSM2_*", "PSM3_*", "NVSHMEM_*",
    "GLOO_*", "MPICH_*", "OMPI_*", "PRTE_*", "PMI_*", "PMI2_*", "PMIX_*", "I_MPI_*", "MV2_*", "HYDRA_*",
    "ORTE_*", "OPAL_*", "HWLOC_*",
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "ENROOT_*", "PYXIS_*", "NVIDIA_*", "CUDA_*", "CUBLAS*", "CUDNN_*",
    "NVTE_*", "TORCH*", "PYTORCH_*", "TRITON_*", "XLA_*", "HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*",
    "ACCELERATE_*", "FSDP_*", "PARALLELISM_CONFIG_*", "DS_*", "DEEPSPEED_*", "FLASH_*", "LMEVAL_*",
    "LM_HARNESS_*", "TRUST_REMOTE_CODE", "OMP_*", "KMP_*", "GOMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "GOTO_*",
    "NUMEXPR_*", "VECLIB_*", "RAYON_*", "TOKENIZERS_*", "PYTHON*", "LD_*", "MALLOC_*", "GLIBC_TUNABLES", "BASH_*",
    "ENV", "CDPATH", "EXECIGNORE", "FUNCNEST", "GLOBIGNORE", "POSIXLY_CORRECT", "TMOUT",
)
# fmt: on
"""Patterns of variables that would leak from the submitting shell into the job. The script unsets them first."""


def leaked_patterns(config: RunConfig, cluster: ClusterConfig) -> tuple[str, ...]:
    """LEAKED, and the variables that would change the containers of the run."""
    kind = RUNTIMES.get(runtime(config, cluster))
    return (*LEAKED, *(kind.leaks if kind else ()))


def has_enroot_hooks(config: RunConfig, cluster: ClusterConfig) -> bool:
    """Returns True if enroot's hooks expose devices to the run's containers."""
    kind = RUNTIMES.get(runtime(config, cluster))
    return kind is not None and kind.has_enroot_hooks


Layer = Literal["built-in", "node type", "stage", "cluster", "run file", "override"]
"""Layers in ascending order of precedence."""


@record(kw_only=True)
class Variable:
    """One environment variable of a stage, with the values that it overrides."""

    name: str
    value: str
    layer: Layer
    why: str
    """The reason, for readers of the script."""
    origin: str
    """Source of the value: a file and line, `--set ...`, or the public source of a fact."""
    hides: tuple[Variable, ...] = ()
    """Overridden values of lower layers, lowest first."""


def stage_environment(stage: Stage, run: Run, config: RunConfig) -> tuple[Variable, ...]:
    """The variables that the script of a stage exports, sorted by name.

    `config` is the run file with absolute paths; `run` has the origin of its values.
    """
    layers = (
        _built_in(stage, run),
        _of_hooks(stage, run, config),
        _of_node_type(stage, run, config),
        _of_stage(stage, run, config),
        _given(run.cluster.environment, "cluster", run.cluster_document),
        _given(config.environment, "run file", run.document),
    )
    merged: dict[str, Variable] = {}
    for variable in itertools.chain.from_iterable(layers):
        below = merged.get(variable.name)
        if below is not None:
            plain = dataclasses.replace(below, hides=())
            variable = dataclasses.replace(variable, hides=(*below.hides, plain))
        merged[variable.name] = variable
    return tuple(merged[name] for name in sorted(merged))


def _built_in(stage: Stage, run: Run) -> Iterator[Variable]:
    """Yields the variables of every stage on every cluster, and variables for hpcgen's own code."""
    yield _own("built-in", "PYTHONUNBUFFERED", "1", "Log lines appear as soon as they are printed.")
    yield _own("built-in", "PYTHONNOUSERSITE", "1", "Packages in ~/.local must not shadow the image's.")
    if stage.runs_user_program:
        return
    why = "Keeps Python from importing a directory named trainer in the working directory (Python 3.11 and newer)."
    yield _own("built-in", "PYTHONSAFEPATH", "1", why)
    if run.cluster.code_dir:
        why = "The code from hpcgen install-code takes precedence over the image's."
        yield _own("built-in", "PYTHONPATH", run.cluster.code_dir, why)


def _of_hooks(stage: Stage, run: Run, config: RunConfig) -> Iterator[Variable]:
    """Yields the variables that make enroot's hooks expose GPUs and InfiniBand to the container."""
    if not uses_gpus(stage, run) or not has_enroot_hooks(config, run.cluster):
        return
    hook = "NVIDIA enroot, conf/hooks/98-nvidia.sh"
    why = "If unset, enroot's hook exposes no GPU to the container."
    yield _own("built-in", "NVIDIA_VISIBLE_DEVICES", "all", why, hook)
    why = "The hook's default is utility only, without CUDA."
    yield _own("built-in", "NVIDIA_DRIVER_CAPABILITIES", "compute,utility", why, hook)
    hook = "NVIDIA enroot, conf/hooks/99-mellanox.sh"
    fabric = fabric_of(run.node_type)
    if fabric and fabric.mellanox_hook:
        why = "If unset, enroot's hook exposes no RDMA device to the container."
        yield _own("built-in", "MELLANOX_VISIBLE_DEVICES", "all", why, hook)
    else:
        without = "These nodes have no RDMA devices of NVIDIA" if fabric else "The node type names no fabric"
        why = f"{without}, and enroot's hook would fail."
        yield _own("built-in", "MELLANOX_VISIBLE_DEVICES", "void", why, hook)


def _of_node_type(stage: Stage, run: Run, config: RunConfig) -> Iterator[Variable]:
    """Yields the node type's variables for this stage, runtime and PyTorch version."""
    if not uses_gpus(stage, run):
        return
    facts = list(run.node_type.environment.items())
    if config.parallelism.use_sharp:
        facts += run.node_type.sharp.items()
    asked, torch = runtime(config, run.cluster), torch_version(config, run.cluster)
    for name, fact in facts:
        for_stage = not fact.stages or stage.environment_of in fact.stages
        for_runtime = not fact.runtimes or asked in fact.runtimes
        if for_stage and for_runtime and holds_for(fact.torch, torch):
            origin = f"{set_by(run.node_type_document, _path(name, run.node_type))}: {fact.source}"
            yield Variable(name=name, value=fact.value, layer="node type", why=fact.why, origin=origin)


def _of_stage(stage: Stage, run: Run, config: RunConfig) -> Iterator[Variable]:
    """Yields the variables that the stage itself needs."""
    for export in stage.exports(run, config):
        yield _own("stage", *export)
    if not uses_gpus(stage, run) and has_enroot_hooks(config, run.cluster):
        why = "This stage uses no GPU; enroot's 98-nvidia hook is skipped."
        yield _own("stage", "NVIDIA_VISIBLE_DEVICES", "void", why, "NVIDIA enroot, conf/hooks/98-nvidia.sh")
        why = "This stage uses no InfiniBand; enroot's 99-mellanox hook would fail on nodes without it."
        yield _own(
            "stage", "MELLANOX_VISIBLE_DEVICES", "void", why, "NVIDIA enroot, conf/hooks/99-mellanox.sh"
        )


def _own(layer: Layer, name: str, value: str, why: str, origin: str = "hpcgen") -> Variable:
    return Variable(name=name, value=value, layer=layer, why=why, origin=origin)


def _given(values: Mapping[str, str], layer: Layer, document: Document) -> Iterator[Variable]:
    for name, value in values.items():
        path = f"environment.{name}"
        # values replaced by an extending file or --set are reported as overridden too
        for text, origin in (*document.replaced.get(path, ()), (value, document.origin(path) or "")):
            actual_layer: Layer = "override" if origin.startswith("--set") else layer
            why = {
                "override": "set on the command line",
                "cluster": "set by the cluster profile",
            }.get(actual_layer, "set by the run file")
            yield Variable(name=name, value=text, layer=actual_layer, why=why, origin=origin)


def uses_gpus(stage: Stage, run: Run) -> bool:
    """Returns True if the stage runs on GPUs of these nodes."""
    return stage.uses_gpus and run.node_type.device == "cuda"


def library_path(stage: Stage, run: Run) -> tuple[str, ...]:
    """Directories to prepend to LD_LIBRARY_PATH in a stage's tasks."""
    of_nodes = run.node_type.library_path if uses_gpus(stage, run) else ()
    return tuple(dict.fromkeys((*run.cluster.library_path, *of_nodes))) if stage.uses_gpus else ()


def stage_secrets(stage: Stage, config: RunConfig, cluster: ClusterConfig) -> tuple[str, ...]:
    """Names of the variables of profile, run and stage that a job inherits from the submitting shell."""
    return tuple(dict.fromkeys((*cluster.secrets, *config.secrets, *stage.secrets(config))))


def environment_warnings(stage: Stage, run: Run, environment: Iterable[Variable]) -> Iterator[Problem]:
    """Yields warnings about variables that are unused or risky, and about SHARP where it is known to fail."""
    config = run.config
    environment = tuple(environment)
    yield from _mistaken(environment, run)
    yield from _risky(environment, run)
    given = {v.name: v.value for v in environment if v.layer in ("cluster", "run file", "override")}
    for problem in stage.environment_advice(run, given):
        yield _in_its_file(problem, run)
    if not uses_gpus(stage, run):
        return
    if make_allocation(stage, config, run.cluster, run.node_type).nodes > 1:
        yield from _interface_warnings(environment)
        yield from _fabric_warnings(run)
    if config.parallelism.use_sharp:
        yield from _sharp_warnings(run)


def excluded_variables(run: Run) -> Iterator[Problem]:
    """Yields the run file's variables that contradict the nodes' network."""
    for name, reason in excluded(run.config.environment, run.node_type):
        yield Problem(f"environment.{name}", reason, "remove it")


def _mistaken(environment: Iterable[Variable], run: Run) -> Iterator[Problem]:
    """Yields variables from the user's or the site's files that nothing reads, or whose value is wrong."""
    own_layers: tuple[Layer, ...] = ("built-in", "node type", "stage")
    is_shipped = all(file.startswith("shipped:") for file in run.node_type_files[:1])
    for variable in environment:
        if variable.layer in own_layers and (is_shipped or variable.layer != "node type"):
            continue
        from hpcgen.planning.variable_mistakes import variable_mistakes  # few runs set variables

        is_known = any(hidden.layer in own_layers for hidden in variable.hides)
        if exclusion_of(variable.name, run.node_type):  # a finding of its own says to remove it
            is_known = True
        for mistake in variable_mistakes(variable.name, variable.value, run.node_type, is_known=is_known):
            yield _placed(variable, mistake, run)


def _risky(environment: Iterable[Variable], run: Run) -> Iterator[Problem]:
    """Yields variables that make programs of the job load code that the job does not name."""
    for variable in environment:
        if variable.name == "LD_LIBRARY_PATH":
            reason = "replaces the image's value, and affects srun and other programs of the batch script"
            hint = "remove it and add the directories to library_path in the cluster profile"
        elif variable.name in LOADS_CODE:
            reason, hint = "makes programs of the job run additional code", "remove it"
        else:
            continue
        yield _placed(variable, Problem(f"environment.{variable.name}", reason, hint), run)


def _interface_warnings(environment: Iterable[Variable]) -> Iterator[Problem]:
    """Yields a warning if NCCL or gloo would choose a network interface by itself on each node."""
    names = {variable.name for variable in environment}
    missing = [name for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if name not in names]
    if missing:
        reason = f"does not set {' and '.join(missing)}, so nodes can choose different networks and wait for each other"
        hint = "set the interface (see ip -brief address) under environment in the node type or the profile"
        yield Problem("node_type", reason, hint, "cluster")


def _fabric_warnings(run: Run) -> Iterator[Problem]:
    """Yields a warning if the network between nodes is unknown, and no doubt says so already."""
    limits = [limit.max_nodes for limit in run.cluster.partitions.values()]
    if run.node_type.fabric or run.doubts or (limits and set(limits) == {1}):
        return
    yield Problem("node_type", f"has no fabric. {WITHOUT_FABRIC}", NAME_FABRIC, "cluster")


def _placed(variable: Variable, problem: Problem, run: Run) -> Problem:
    """The problem of a variable, in the file that sets it, or at the profile's key `node_type`."""
    if variable.layer != "node type":
        return _in_its_file(problem, run)
    where = _written(variable.name, run.node_type, run.node_type_document)
    reason = f"sets {variable.name} ({where}), which {problem.reason}"
    return Problem("node_type", reason, problem.hint, "cluster")


def _in_its_file(problem: Problem, run: Run) -> Problem:
    """The problem of a variable, in the file that sets it."""
    in_run_file = problem.path.removeprefix("environment.") in run.config.environment
    return dataclasses.replace(problem, file="run" if in_run_file else "cluster")


def _sharp_warnings(run: Run) -> Iterator[Problem]:
    """Yields a warning with the images known to work or fail (Azure's ai-infrastructure-on-azure, pull request 71)."""
    release = ngc_release(run.config, run.cluster)
    if runtime(run.config, run.cluster) == "none":
        where, hint = "the host's SHARP library", "check the nodes' SHARP and OFED versions (ofed_info -s)"
    else:
        where = f"image {run.config.container.image or run.cluster.container.image}"
        if release is None:
            hint = "check the image's SHARP version and the nodes' OFED version (ofed_info -s)"
        elif release <= LAST_RELEASE_WITH_SHARP:
            hint = "check the nodes' OFED version (ofed_info -s)"
        else:
            hint = "use an image up to 25.01"
    reason = (
        f"may fail with {where}. On Azure with OFED 25.04, NVIDIA's images up to 25.01 (SHARP 3.9.0) worked, and "
        "25.02 and newer (SHARP 3.10.3) failed with 'LLT QP DEVX transition to RTR error'"
    )
    yield Problem(
        "parallelism.use_sharp", reason, f"{hint}, and test SHARP first with hpcgen render nccl-test"
    )


def environment_problems(environment: Mapping[str, str], secrets: tuple[str, ...]) -> Iterator[Problem]:
    """Yields variables that a file may not set: variables that the script computes, and values of secrets."""
    for name, value in environment.items():
        yield from _variable_problems(name, value)
    for index, name in enumerate(secrets):
        yield from _secret_problems(f"secrets[{index}]", name, environment)


def _variable_problems(name: str, value: str) -> Iterator[Problem]:
    path = f"environment.{name}"
    if name in RESERVED:
        yield Problem(path, "is set by the script or the image", "remove it")
    elif name.startswith(RESERVED_PREFIXES):
        yield Problem(path, "would change how Slurm or bash runs the script", "remove it")
    elif name == name.lower() and not name.endswith("_proxy"):
        # some of the script's variables are evaluated as arithmetic, where a string could run a command
        reason = "is in lower case, which is reserved for the script's own variables"
        yield Problem(path, reason, "remove it")
    elif SECRET.search(name) or SECRET_VALUE.search(value):
        hint = f"add {name} to secrets and export it in the shell that submits the job"
        yield Problem(path, "looks like a secret, which would be written into the script", hint)


def node_type_environment_problems(node_type: NodeType, document: Document) -> Iterator[Problem]:
    """Yields problems of a node type's variables, reported at the profile's key `node_type`."""
    values = {**node_type.environment, **node_type.sharp}
    for problem in environment_problems({name: fact.value for name, fact in values.items()}, ()):
        variable = problem.path.removeprefix("environment.")
        reason = f"sets {variable} ({_written(variable, node_type, document)}), which {problem.reason}"
        yield Problem("node_type", reason, problem.hint, "cluster")


def _written(variable: str, node_type: NodeType, document: Document) -> str | None:
    """File and line where a node type sets a variable."""
    return document.origin(_path(variable, node_type))


def _path(variable: str, node_type: NodeType) -> str:
    """Path of a variable's value in the files of a node type."""
    section = "environment" if variable in node_type.environment else "sharp"
    return f"{section}.{variable}.value"


def _secret_problems(path: str, name: str, environment: Mapping[str, str]) -> Iterator[Problem]:
    if name in RESERVED or name.startswith(RESERVED_PREFIXES):
        yield Problem(path, "is not a secret, because the script or Slurm sets it", "remove it")
    elif name in environment:
        reason = "is also set under environment, which would override the submitting shell's value"
        yield Problem(path, reason, "remove one of them")


def all_environment_problems(run: Run) -> Iterator[Problem]:
    """Yields all problems with the variables of a run, its cluster profile and its node type."""
    config = run.config
    yield from environment_problems(config.environment, config.secrets)
    yield from _token_problems(config)
    for problem in environment_problems(run.cluster.environment, run.cluster.secrets):
        yield dataclasses.replace(problem, file="cluster")
    for name in config.environment:
        if name in run.cluster.secrets:
            reason = "is a secret of the cluster profile, so jobs have the submitting shell's value"
            yield Problem(f"environment.{name}", reason, "remove it, and export it where you submit")
    yield from node_type_environment_problems(run.node_type, run.node_type_document)
    yield from _sharp_problems(run)


def _token_problems(config: RunConfig) -> Iterator[Problem]:
    if config.data.corpus and config.data.corpus.source.token_variable:
        token = config.data.corpus.source.token_variable
        yield from _secret_problems("data.corpus.source.token_variable", token, config.environment)


def _sharp_problems(run: Run) -> Iterator[Problem]:
    if run.config.parallelism.use_sharp and not run.node_type.sharp:
        reason = f"requires switches with SHARP, but node type {run.cluster.node_type} does not define SHARP"
        yield Problem("parallelism.use_sharp", reason, "set it to false")
