"""The environment of a stage: every variable with the layer it comes from and the reason."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.node_type import NodeType
from hpcgen.config.run import RunConfig
from hpcgen.errors import Problem
from trainer.config import ParallelismConfig

SECRET = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?|PRIVATE_KEY|ACCESS_KEY)(_|$)", re.IGNORECASE
)
"""Names of secrets; TOKENIZERS_PARALLELISM is none."""

SET_BY_THE_SCRIPT = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TRAINER_CONFIG", "TRAINER_STOP_FILE")
"""Known only when the job runs: the script computes them."""

ON_SCRATCH = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""The script lets the tasks' caches lie on the node."""

# fmt: off
OF_BASH = (
    "PATH", "ENV", "IFS", "SHELLOPTS", "POSIXLY_CORRECT", "GLOBIGNORE", "TMOUT", "FUNCNEST", "UID",
    "EUID", "PPID", "GROUPS", "DIRSTACK", "PIPESTATUS", "LD_PRELOAD", "LD_AUDIT",
)
# fmt: on
"""Change what bash does with the script, or are not to be set."""

RESERVED = frozenset(
    (
        *SET_BY_THE_SCRIPT,
        *ON_SCRATCH,
        *OF_BASH,
        "CHECK_MEMLOCK",
        "RANK",
        "LOCAL_RANK",
        "PYTHONPATH",
        "PYTHONHOME",
    )
)
"""A run or cluster file may not set these: the script or the image decides, or they change what bash runs."""

RESERVED_PREFIXES = ("TORCHELASTIC_", "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "BASH")


@dataclass(frozen=True)
class Variable:
    """One environment variable: `layer` is built-in, node type, cluster or run file; `why` is for the reader."""

    name: str
    value: str
    layer: str
    why: str


def stage_environment(
    stage: str, config: RunConfig, cluster: ClusterConfig, node_type: NodeType, *, runtime: str
) -> tuple[Variable, ...]:
    """The variables that the script exports, lower layers first laid down and higher ones over them, by name."""
    layers = [_built_in(stage, config, cluster, node_type)]
    if stage == "train" and node_type.device == "cuda":
        layers.append(
            Variable(name, fact.value, "node type", fact.why) for name, fact in node_type.environment.items()
        )
    elif runtime == "pyxis":
        layers.append(iter(_WITHOUT_DEVICES))
    layers.append(_given(cluster.environment, "cluster", "set by the cluster profile"))
    layers.append(_given(config.environment, "run file", "set by the run file"))
    merged = {variable.name: variable for layer in layers for variable in layer}
    return tuple(merged[name] for name in sorted(merged))


_WITHOUT_DEVICES = (
    Variable(
        "NVIDIA_VISIBLE_DEVICES",
        "void",
        "built-in",
        "This stage uses no GPU; enroot's 98-nvidia hook is skipped.",
    ),
    Variable(
        "MELLANOX_VISIBLE_DEVICES",
        "void",
        "built-in",
        "This stage uses no InfiniBand; enroot's 99-mellanox hook fails on nodes without.",
    ),
)


def _built_in(
    stage: str, config: RunConfig, cluster: ClusterConfig, node_type: NodeType
) -> Iterator[Variable]:
    def built_in(name: str, value: str, why: str) -> Variable:
        return Variable(name, value, "built-in", why)

    yield built_in("PYTHONUNBUFFERED", "1", "Log lines appear when they are printed.")
    yield built_in("PYTHONNOUSERSITE", "1", "Packages in ~/.local must not shadow the image's.")
    if cluster.code_dir:
        yield built_in(
            "PYTHONPATH", cluster.code_dir, "The code that hpcgen install-code put there comes first."
        )
    if stage != "train":
        return
    yield built_in("OMP_NUM_THREADS", "1", "One thread a rank: more fight over the rank's CPUs.")
    yield built_in("HF_HUB_OFFLINE", "1", "No rank may ask a hub while GPUs wait.")
    yield built_in("TRANSFORMERS_OFFLINE", "1", "No rank may ask a hub while GPUs wait.")
    if node_type.device == "cuda":
        yield from _nccl(config.parallelism, config.paths.run_dir)


def _nccl(parallelism: ParallelismConfig, run_dir: str) -> Iterator[Variable]:
    def built_in(name: str, value: str, why: str) -> Variable:
        return Variable(name, value, "built-in", why)

    if parallelism.tensor_model_parallel_size > 1 or parallelism.context_parallel_size > 1:
        why = (
            "Keeps communication ahead of compute with TP or CP before Blackwell (Megatron-LM, arguments.py)."
        )
        yield built_in("CUDA_DEVICE_MAX_CONNECTIONS", "1", why)
    flight = "With the trace buffer: a hung collective leaves a record of every rank."
    yield built_in("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", flight)
    yield built_in("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000", "Collectives remembered for that record.")
    yield built_in(
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{run_dir}/nccl-flight-record-", "Where the record is written."
    )


def _given(values: Mapping[str, str], layer: str, why: str) -> Iterator[Variable]:
    for name, value in values.items():
        yield Variable(name, value, layer, why)


def environment_warnings(config: RunConfig, node_type: NodeType) -> Iterator[Problem]:
    """A variable of the run file that undoes what the layout needs (Megatron-LM, arguments.py)."""
    layout, asked = config.parallelism, config.environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    overlaps = layout.tensor_model_parallel_size > 1 or layout.context_parallel_size > 1
    if node_type.device == "cuda" and overlaps and asked != "1":
        reason = "is not 1, so that communication of TP or CP may wait behind compute before Blackwell"
        yield Problem("environment.CUDA_DEVICE_MAX_CONNECTIONS", reason, "remove it")


def environment_problems(environment: Mapping[str, str], secrets: tuple[str, ...]) -> Iterator[Problem]:
    """Variables that a file may not set: those the script computes, and secrets, which go by name."""
    for name in environment:
        if name in RESERVED:
            yield Problem(f"environment.{name}", "is set by the script or the image", "remove it")
        elif name.startswith(RESERVED_PREFIXES):
            yield Problem(
                f"environment.{name}", "changes what Slurm or bash does behind the script's back", "remove it"
            )
        elif name == name.lower() and not name.endswith("_proxy"):
            # some of them are evaluated as arithmetic, where a text could run a command
            yield Problem(
                f"environment.{name}", "is in lower case, as the script's own variables are", "remove it"
            )
        elif SECRET.search(name):
            hint = f"add {name} to secrets and export it where you submit"
            yield Problem(
                f"environment.{name}", "looks like a secret, and would be written into the script", hint
            )
    for index, name in enumerate(secrets):
        if name in RESERVED or name.startswith(RESERVED_PREFIXES):
            yield Problem(f"secrets[{index}]", "is not a secret: the script or Slurm sets it", "remove it")
