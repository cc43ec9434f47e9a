"""Words that users of other programs type as commands or options, and what hpcgen has for them.

A hint only names a command that does what the user asked for. Words that could mean several things, and things that
hpcgen does not have, get no command.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcgen.config.stages import STAGE_ROWS, stage_called

_LOOK = "hpcgen status RUN_DIR shows a run"
_STOP = "use hpcgen stop RUN_DIR to save first and resume later, or hpcgen cancel RUN_DIR to end the jobs"
_RESUME = "use hpcgen resume RUN_DIR: the run continues from its newest checkpoint"
_SUBMIT = "use hpcgen submit STAGE..."
_PUSH = "hpcgen uploads nothing; hpcgen checkpoint export writes a Hugging Face directory"
_OTHER_PROGRAMS = "docs/fine-tuning.md#preference-tuning-and-other-programs"
_OWN_PROGRAM = "hpcgen init --program writes a run file for a training program of your own (docs/program.md)"

TOP = {
    **dict.fromkeys(
        (
            *("plot", "graph"),
            *(
                "curve",
                "curves",
                "metrics",
                "summary",
                "summarize",
                "history",
            ),
            *("visualize", "results", "loss", "ui", "gui", "web"),
        ),
        "use hpcgen report RUN_DIR",
    ),
    **dict.fromkeys(("stat", "stats", "state", "info", "show"), "use hpcgen status RUN_DIR"),
    **dict.fromkeys(
        ("monitor", "monitoring", "watch", "follow", "top", "dashboard", "progress"),
        "use hpcgen status RUN_DIR --watch",
    ),
    **dict.fromkeys(("compare", "comparison", "compare-runs"), "use hpcgen report RUN_DIR RUN_DIR..."),
    "diff": "hpcgen report RUN_DIR RUN_DIR... compares runs, and hpcgen templates diff the functions of a site",
    **dict.fromkeys(("tail", "log", "stdout", "stderr"), "use hpcgen logs RUN_DIR"),
    **dict.fromkeys(("ps", "queue", "queued", "job", "jobs"), f"squeue --me lists your jobs, and {_LOOK}"),
    **dict.fromkeys(
        ("squeue", "sacct", "sinfo", "scontrol", "srun", "salloc", "sbatch", "sacctmgr", "sprio", "sstat"),
        "that is a program of Slurm: type it without hpcgen",
    ),
    **dict.fromkeys(
        ("node", "nodes", "hosts"), "sinfo lists nodes, and hpcgen render node-health checks them"
    ),
    **dict.fromkeys(
        ("partition", "partitions"), "sinfo lists them, and hpcgen cluster show those of a profile"
    ),
    **dict.fromkeys(
        ("kill", "scancel", "abort", "halt", "terminate", "interrupt", "pause", "down"),
        _STOP,
    ),
    **dict.fromkeys(
        ("continue", "restart", "restore", "retry", "rerun", "requeue", "recover", "unpause"),
        _RESUME,
    ),
    **dict.fromkeys(("launch", "start", "execute", "enqueue", "dispatch", "slurm", "up"), _SUBMIT),
    "local": "hpcgen submit STAGE... --launcher local runs stages on this machine",
    "run": "use hpcgen submit train for hpcgen's trainer, or hpcgen submit run for a program of your own",
    **dict.fromkeys(
        ("check", "verify", "check-config", "estimate", "fits", "size", "vram", "params"),
        "use hpcgen validate",
    ),
    "plan": "use hpcgen layouts for the fastest layout, hpcgen validate for a run, or hpcgen data plan for a corpus",
    **dict.fromkeys(
        ("parallelism", "parallelize", "autoconfig", "auto-configurator", "deadline"),
        "use hpcgen layouts",
    ),
    **dict.fromkeys(("dry-run", "dryrun"), "use hpcgen validate, or hpcgen submit STAGE... --dry-run"),
    **dict.fromkeys(
        ("diagnose", "troubleshoot"),
        "use hpcgen doctor for a run that failed or is slow, hpcgen validate for a run file",
    ),
    **dict.fromkeys(
        ("new", "create", "quickstart", "wizard", "scaffold", "generate-config", "make-config", "initialize"),
        "use hpcgen init",
    ),
    **dict.fromkeys(
        ("config", "configure", "config-file", "setup"),
        "hpcgen init writes a run file, and hpcgen validate checks it",
    ),
    **dict.fromkeys(
        ("set", "unset", "edit"), "edit the run file, or override its values with --set KEY=VALUE"
    ),
    **dict.fromkeys(
        ("preview", "print", "script", "show-script", "generate-script", "make-script"),
        "use hpcgen render STAGE",
    ),
    **dict.fromkeys(
        ("chat", "prompt", "ask", "talk", "infer", "inference", "predict", "generation"),
        "use hpcgen generate",
    ),
    "sample": "use hpcgen generate for text of a model, or hpcgen data sample for a small corpus",
    **dict.fromkeys(
        ("convert", "conversion"),
        "use hpcgen checkpoint export or import for models of Hugging Face, or hpcgen init --from for a batch script",
    ),
    "export": "use hpcgen checkpoint export, or hpcgen submit export for a job",
    **dict.fromkeys(
        ("import", "import-hf", "from-hf", "hf", "huggingface"),
        "use hpcgen checkpoint import for a Hugging Face model",
    ),
    **dict.fromkeys(
        ("push", "upload", "publish", "hub", "push-to-hub"),
        _PUSH,
    ),
    **dict.fromkeys(
        ("serve", "server", "serving", "api"),
        "hpcgen serves no models; hpcgen checkpoint export writes a Hugging Face directory for a server",
    ),
    **dict.fromkeys(("migrate", "from-script"), "use hpcgen init --from SCRIPT for a batch script"),
    **dict.fromkeys(
        ("hpo", "optimize", "grid", "grid-search", "tuner"),
        "use hpcgen sweep for several values of a key, or hpcgen tune for layouts",
    ),
    **dict.fromkeys(
        (
            *("sft", "lora", "peft", "adapter", "instruct", "instruction-tuning", "finetune"),
            *("finetuning", "fine-tune", "fine-tuning"),
        ),
        "use hpcgen init --from-hf for a run that continues a model; data.corpus.chat trains on chats, "
        "and lora.rank trains adapters (docs/fine-tuning.md)",
    ),
    "qlora": "hpcgen's trainer has LoRA without quantized weights (lora.rank); for QLoRA, run TRL with bitsandbytes "
    f"in the stage run ({_OTHER_PROGRAMS})",
    **dict.fromkeys(
        (
            *(
                "dpo",
                "ppo",
                "grpo",
                "rloo",
                "rlhf",
                "rlvr",
                "orpo",
                "kto",
                "simpo",
                "rl",
                "align",
                "alignment",
            ),
            *("preference", "preferences", "preference-tuning", "reward", "reward-model"),
        ),
        "hpcgen's trainer does not train on preferences or rewards; run TRL in the stage run, as examples/trl_dpo.yaml "
        f"does ({_OTHER_PROGRAMS})",
    ),
    **dict.fromkeys(
        ("distill", "distillation"),
        "set training.loss in the run file, as examples/distillation.yaml does (docs/fine-tuning.md)",
    ),
    **dict.fromkeys(
        ("quantize", "quantization"),
        "hpcgen checkpoint export writes a Hugging Face directory for a program that quantizes",
    ),
    **dict.fromkeys(
        ("fsdp", "fsdp2", "zero", "zero3"),
        "hpcgen's trainer divides parameters by tensor and pipeline parallelism: use hpcgen layouts. For FSDP, see "
        "examples/program_torchtitan.yaml, and for ZeRO-3, docs/deepspeed.md",
    ),
    **dict.fromkeys(
        ("torchrun", "deepspeed", "accelerate", "torchtitan", "nemo", "megatron", "lightning", "program"),
        _OWN_PROGRAM,
    ),
    **dict.fromkeys(
        ("ls", "list", "dir"), "use hpcgen presets, or list after cluster, topology, templates or checkpoint"
    ),
    **dict.fromkeys(("model", "models", "arch", "architectures"), "use hpcgen presets"),
    **dict.fromkeys(("ckpt", "ckpts"), "use hpcgen checkpoint"),
    **dict.fromkeys(("dataset", "corpus", "corpora"), "use hpcgen data"),
    **dict.fromkeys(
        ("environ", "environment", "variables", "vars", "envs", "env-vars"),
        "use hpcgen env for exports, or hpcgen explain for their reasons",
    ),
    "why": "use hpcgen doctor for a run that failed or is slow, or hpcgen explain for environment variables",
    "template": "use hpcgen templates",
    **dict.fromkeys(("topo", "node-type", "node-types"), "use hpcgen topology"),
    **dict.fromkeys(("profile", "profiles", "site"), "use hpcgen cluster for cluster profiles"),
    **dict.fromkeys(
        ("profiler", "profiling", "trace", "nsys"),
        "set logging.profile_step_start and profile_step_end in the run file",
    ),
    "wandb": "set logging.wandb_project in the run file",
    **dict.fromkeys(
        ("shell", "repl", "python", "notebook", "jupyter", "ipython"), "docs/python.md shows hpcgen in Python"
    ),
    **dict.fromkeys(
        ("install", "upgrade", "update", "uninstall"),
        "docs/install.md shows how to install hpcgen; hpcgen install-code installs the code of jobs",
    ),
    **dict.fromkeys(("help", "usage", "commands", "man"), "use hpcgen --help"),
    **dict.fromkeys(("version", "ver"), "use hpcgen --version"),
    **dict.fromkeys(("stage", "stages"), "hpcgen submit --help lists the stages"),
}
"""Words in place of a command -> hint."""

_LIST = dict.fromkeys(("ls", "dir", "all"), "use {group} list")
GROUPS: Mapping[str, Mapping[str, str]] = {
    "data": {
        **dict.fromkeys(
            (
                "stat",
                "stats",
                "statistics",
                "info",
                "show",
                "head",
                "cat",
                "view",
                "count",
                "describe",
                "decode",
            ),
            "use hpcgen data inspect PREFIX",
        ),
        **dict.fromkeys(("check", "validate", "test", "checksum"), "use hpcgen data verify PREFIX"),
        **dict.fromkeys(("progress", "monitor", "watch", "state"), "use hpcgen data status"),
        **dict.fromkeys(("detokenize", "to-jsonl", "dump"), "use hpcgen data export"),
        **dict.fromkeys(
            ("mix", "blend", "weights", "mixture"), "set the weights of data.datasets in the run file"
        ),
        "generate": "hpcgen data sample writes a small corpus",
        "split": "set data.split or data.corpus.splits in the run file",
        "shuffle": "the trainer shuffles, with training.seed",
        **dict.fromkeys(("index-cache", "index", "cache"), "use hpcgen submit index-cache"),
    },
    "checkpoint": {
        **_LIST,
        **dict.fromkeys(("show", "info", "describe", "view", "stat"), "use hpcgen checkpoint inspect PATH"),
        **dict.fromkeys(("verify", "check", "validate"), "use hpcgen checkpoint inspect --verify PATH"),
        **dict.fromkeys(
            ("latest", "newest", "last"), "hpcgen checkpoint inspect RUN_DIR shows the newest checkpoint"
        ),
        **dict.fromkeys(
            ("rollback", "revert", "reset", "rewind"),
            "to resume from an older checkpoint, move the newer ones away (docs/checkpoints.md)",
        ),
        **dict.fromkeys(("push", "upload", "publish"), _PUSH),
        **dict.fromkeys(("gc", "clean", "cleanup"), "use hpcgen checkpoint prune DIR --dry-run"),
        **dict.fromkeys(("keep", "protect", "lock"), "use hpcgen checkpoint pin PATH"),
        **dict.fromkeys(("unkeep", "unprotect", "unlock"), "use hpcgen checkpoint unpin PATH"),
        "convert": "use hpcgen checkpoint export or import for models of Hugging Face",
        "to-hf": "use hpcgen checkpoint export",
        "from-hf": "use hpcgen checkpoint import",
        **dict.fromkeys(("resume", "restore", "load"), _RESUME),
    },
    "cluster": {
        **_LIST,
        **dict.fromkeys(
            ("info", "describe", "inspect", "view", "get", "show-all", "partitions"),
            "use hpcgen cluster show NAME",
        ),
        **dict.fromkeys(("validate", "verify", "test"), "use hpcgen cluster check NAME"),
        **dict.fromkeys(
            ("new", "create", "init", "add", "generate"),
            "write clusters/NAME.yaml with extends: PROFILE (docs/admins.md)",
        ),
    },
    "topology": {
        **_LIST,
        **dict.fromkeys(
            ("info", "describe", "inspect", "view", "get", "print"), "use hpcgen topology show NAME"
        ),
        **dict.fromkeys(("plot", "graph", "render", "svg", "picture"), "use hpcgen topology draw NAME"),
        **dict.fromkeys(("check", "validate", "test"), "use hpcgen topology verify NAME"),
        **dict.fromkeys(("export", "generate", "dump"), "use hpcgen topology xml NAME"),
    },
    "templates": {
        **_LIST,
        **dict.fromkeys(("validate", "verify", "lint", "test"), "use hpcgen templates check"),
        **dict.fromkeys(
            ("new", "create", "copy", "eject", "edit", "customize", "init", "add", "generate"),
            "use hpcgen templates override STAGE",
        ),
    },
}
"""Group of commands -> words in place of its commands -> hint."""

OPTIONS = {
    **dict.fromkeys(
        ("-f", "--file", "--config-name", "--config-file", "--config-path", "--cfg", "--run-file", "--yaml"),
        ("--config",),
    ),
    **dict.fromkeys(
        ("-o", "--out", "--output", "--out-file", "--output-file", "--out-dir", "--output-dir", "--dest"),
        ("--output", "--to"),
    ),
    **dict.fromkeys(("-y", "--yes", "--overwrite", "--clobber", "--replace"), ("--force", "--overwrite")),
    "--force": ("--overwrite",),
    **dict.fromkeys(
        ("-n", "--dry", "--dryrun", "--test-only", "--simulate", "--plan-only", "--what-if"), ("--dry-run",)
    ),
    **dict.fromkeys(("--profile", "--site"), ("--cluster",)),
    **dict.fromkeys(("--model", "--model-size", "--arch"), ("--preset", "--checkpoint")),
    **dict.fromkeys(("--hf", "--huggingface", "--pretrained", "--model-name-or-path"), ("--from-hf",)),
    **dict.fromkeys(("-s", "-D", "--override", "--overrides", "--set-value", "--param", "--opt"), ("--set",)),
    **dict.fromkeys(("--executor", "--backend"), ("--launcher",)),
    "--local": ("--launcher local",),
    "--slurm": ("--launcher slurm",),
    "--temp": ("--temperature",),
    **dict.fromkeys(("--tokenizer-type", "--tokenizer-model", "--tokenizer-name"), ("--tokenizer",)),
    **dict.fromkeys(("--max-tokens", "--max-length", "--num-tokens"), ("--max-new-tokens",)),
    **dict.fromkeys(("--ckpt", "--ckpt-path", "--load", "--checkpoint-path"), ("--checkpoint",)),
    **dict.fromkeys(("-j", "--jobs", "--num-workers", "--processes", "--nproc"), ("--workers",)),
    **dict.fromkeys(("--keep", "--keep-n", "--max-keep"), ("--keep-last",)),
    "--python": ("--python-version",),
    **dict.fromkeys(
        ("--json-keys", "--key", "--text-key", "--field", "--text-field", "--column", "--text-column"),
        ("--json-key",),
    ),
    **dict.fromkeys(("--disable", "--skip", "--exclude"), ("--ignore",)),
    **dict.fromkeys(("--select", "--only", "--check", "--rules"), ("--rule",)),
    **dict.fromkeys(("-V", "--ver"), ("--version",)),
}
"""Options of other programs -> options of hpcgen's commands with this meaning. The first that a command has counts."""
SBATCH_OPTIONS = {
    **{
        "-N": "--nodes",
        "-p": "--partition",
        "-t": "--time",
        "-A": "--account",
        "-q": "--qos",
        "-J": "--job-name",
    },
    **{"-w": "--nodelist", "-x": "--exclude", "-d": "--dependency"},
}
"""Short options of sbatch -> long options."""

_SCRIPTS = (".sh", ".sbatch", ".slurm", ".bash", ".job")


def meaning(group: str, word: str) -> str:
    """The hint for a word in place of a command of `group`, which is empty for hpcgen's own; empty if unknown."""
    plain = word.lower().replace("_", "-")
    if group:
        return GROUPS.get(group, {}).get(plain, "").format(group=f"hpcgen {group}")
    return TOP.get(plain) or _stage(plain)


def known_words(group: str) -> list[str]:
    """All words that `meaning` knows in place of a command of `group`."""
    return list(GROUPS.get(group, {})) if group else [*TOP, *STAGE_ROWS]


def file_meaning(word: str) -> str:
    """The hint for a file or a directory in place of a command; empty for other words."""
    path = Path(word)
    if path.suffix in (".yaml", ".yml"):
        return f"for a run file, use hpcgen validate -c {word}"
    if path.suffix in _SCRIPTS:
        return f"hpcgen lint {word} checks a batch script, and hpcgen init --from {word} converts it"
    return f"for a run directory, use hpcgen status {word}" if "/" in word and path.is_dir() else ""


def _stage(word: str) -> str:
    """The command that runs the stage with this name."""
    stage = stage_called(word)
    if stage is None:
        return ""
    if stage.is_array:
        return f"use hpcgen submit {stage.name}, or hpcgen data {stage.name} without a job"
    return f"use {stage.start_command}"
