"""Names that other programs have for keys of a section. In other sections, the same names mean something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcgen.config.sbatch_options import OWN_OPTIONS, SBATCH_OPTIONS, SBATCH_OPTIONS_OF_SOME

_TIME = ("walltime", "wall_time", "time_limit", "timelimit")
_DIRECTIVES = ("sbatch", "sbatch_args", "sbatch_options", "slurm_options", "slurm_args")

_OF_SUBMISSION = ("help", "usage", "version", "parsable", "test-only", "wait", "quiet", "verbose")
"""Options of sbatch that change nothing in the job."""
_WHOLE_NODES = "nodes, the number of nodes with all their GPUs"

SLURM = {
    **{
        option.replace("-", "_"): f"extra_directives with --{option}"
        for option in sorted((SBATCH_OPTIONS | SBATCH_OPTIONS_OF_SOME) - OWN_OPTIONS)
        if not option.startswith("container") and option not in _OF_SUBMISSION
    },
    **dict.fromkeys(("queue", "partitions"), "partition"),
    **dict.fromkeys((*_TIME, "timeout"), "time"),
    **dict.fromkeys(("memory", "mem_per_node", "ram"), "mem"),
    **dict.fromkeys(("mem_per_cpu", "mem_per_gpu"), "mem, which is the memory per node"),
    **dict.fromkeys(("cpus", "cpu", "cores", "num_cpus", "cpus_per_gpu"), "cpus_per_task"),
    **dict.fromkeys(
        ("tasks_per_node", "gpus_per_node", "nproc_per_node", "nproc", "ntasks_per_gpu"), "ntasks_per_node"
    ),
    **dict.fromkeys(("ntasks", "tasks"), "ntasks_per_node, and nodes"),
    **dict.fromkeys(("num_nodes", "nnodes", "n_nodes", "node_count"), "nodes"),
    **dict.fromkeys(("project", "charge_account"), "account"),
    **dict.fromkeys(("retries", "max_retries", "requeue", "requeues", "restarts"), "max_restarts"),
    "no_requeue": "max_restarts, with the value 0",
    "signal": "signal_lead_s",
    **dict.fromkeys(("features", "feature"), "constraint"),
    **dict.fromkeys((*_DIRECTIVES, "directives"), "extra_directives"),
    **dict.fromkeys(("gpus", "num_gpus", "gpus_per_task", "gpus_per_socket"), _WHOLE_NODES),
    **dict.fromkeys(("email", "mail"), "extra_directives with --mail-user and --mail-type"),
}
"""Name in a section below `slurm` -> its key, with a remark."""

RUN_FILE = {
    "": {
        **dict.fromkeys(("eval", "evaluate"), "evaluation"),
        **dict.fromkeys(("inference", "generate"), "generation"),
        **dict.fromkeys(("parallel", "layout"), "parallelism"),
        **dict.fromkeys(("scheduler", "schedule", "lr_scheduler"), "optimizer.lr_decay_style"),
        **dict.fromkeys(("profile", "site"), "cluster"),
        **{
            name: f"slurm.train.{SLURM[name]}"
            for name in ("queue", "partitions", "cpus", *_TIME, *_DIRECTIVES)
        },
    },
    "slurm": {  # and in the sections of stages, like the names in SLURM
        "job_name": "name",
        "gres": f"slurm.train.{_WHOLE_NODES}",
        "export": "environment, or secrets for variables of the submitting shell",
        **dict.fromkeys(("output", "error"), "paths.run_dir, the directory of the job's logs"),
    },
    "model": {
        **dict.fromkeys(("architecture", "size"), "preset"),
        "heads": "model.num_attention_heads",
        "rope": "model.position_embedding_type, with the value rope",
        "norm": "model.normalization",
        "bias": "model.add_bias_linear",
        "init_std": "model.init_method_std",
        "dropout": "model.attention_dropout and model.hidden_dropout",
        "width": "model.hidden_size",
        "experts": "model.num_moe_experts",
        "depth": "model.num_layers",
    },
    "training": {
        **dict.fromkeys(("duration", "tokens", "iters", "length"), "training.train_iters"),
    },
    "optimizer": {
        **dict.fromkeys(
            ("schedule", "scheduler", "lr_scheduler", "decay_style", "style"),
            "optimizer.lr_decay_style",
        ),
        **dict.fromkeys(("wd",), "optimizer.weight_decay"),
    },
    "data": {
        **dict.fromkeys(("paths", "files", "prefixes", "dataset"), "data.datasets"),
        "blend": "data.datasets, which has a weight for each prefix",
        **dict.fromkeys(("val", "validation", "eval"), "data.valid"),
        **dict.fromkeys(("sources", "url", "hub"), "data.corpus.source"),
        "workers": "data.num_workers",
        **dict.fromkeys(("split_ratio", "splits", "train_split"), "data.split"),
    },
    "data.datasets": dict.fromkeys(("path", "file", "name", "data_path"), "prefix"),
    "data.corpus": {
        **dict.fromkeys(("path", "dir", "output", "output_dir"), "data.corpus.directory"),
        **dict.fromkeys(("hub", "repo", "dataset", "hf"), "data.corpus.source.huggingface"),
        **dict.fromkeys(("key", "column", "field"), "data.corpus.json_key"),
        **dict.fromkeys(("files", "glob", "pattern", "patterns"), "data.corpus.include"),
    },
    "checkpoint": {
        **dict.fromkeys(("dir", "path", "directory", "folder", "save_dir"), "checkpoint.save"),
        **dict.fromkeys(("frequency", "freq", "steps"), "checkpoint.save_interval"),
        **dict.fromkeys(("keep", "max", "max_to_keep", "limit"), "checkpoint.keep_last"),
        "async": "checkpoint.async_save",
    },
    "logging": {
        **dict.fromkeys(("interval", "every", "frequency", "freq", "steps"), "logging.log_interval"),
        **dict.fromkeys(("project",), "logging.wandb_project"),
        **dict.fromkeys(("run_name", "name", "exp_name"), "logging.wandb_exp_name"),
        **dict.fromkeys(("entity", "team"), "logging.wandb_entity"),
        **dict.fromkeys(("dir", "path"), "paths.run_dir"),
    },
    "evaluation": {
        **dict.fromkeys(("interval", "frequency", "freq"), "evaluation.every"),
        **dict.fromkeys(("benchmarks", "harness", "lm_eval"), "evaluation.tasks"),
        **dict.fromkeys(("shots", "fewshot", "num_shots", "n_shot", "few_shot"), "evaluation.num_fewshot"),
        **dict.fromkeys(("datasets", "perplexity"), "evaluation.data"),
    },
    "generation": {
        **dict.fromkeys(("max_tokens", "max_length", "num_tokens"), "generation.max_new_tokens"),
        **dict.fromkeys(("temp",), "generation.temperature"),
        **dict.fromkeys(("prompt", "input"), "generation.prompts"),
    },
    "paths": {
        **dict.fromkeys(
            ("output", "output_dir", "root", "log_dir", "logs", "work_dir", "experiment_dir"), "paths.run_dir"
        ),
        **dict.fromkeys(("checkpoints", "checkpoint_dir", "save", "save_dir"), "checkpoint.save"),
        **dict.fromkeys(("data", "data_dir", "dataset"), "data.datasets"),
        **dict.fromkeys(("cache", "cache_dir"), "data.cache_dir"),
    },
    "program": {
        **dict.fromkeys(("script", "cmd", "args", "argv", "entrypoint", "run", "main"), "program.command"),
        **dict.fromkeys(("nproc", "nproc_per_node", "num_processes"), "slurm.run.ntasks_per_node"),
        **dict.fromkeys(("workdir", "cwd", "working_dir", "work_dir", "dir"), "program.directory"),
        **dict.fromkeys(("env", "environment"), "environment"),
    },
    "container": {
        **dict.fromkeys(("name", "path", "sqsh", "url", "docker"), "container.image"),
        **dict.fromkeys(("mount", "volumes", "binds", "bind"), "container.mounts"),
        **dict.fromkeys(("type", "engine", "kind"), "container.runtime"),
    },
}
"""Section of a run file -> name -> the key to use, with a remark. These names mean something else elsewhere."""

PROFILE = {
    "": {
        **dict.fromkeys(("gpu", "gpus", "gpu_type", "node", "instance_type", "vm_size"), "node_type"),
        **{name: f"slurm.{SLURM[name]}" for name in ("queue", *_TIME)},
        **dict.fromkeys(("container_runtime", "docker", "singularity", "apptainer"), "container.runtime"),
        **dict.fromkeys(("image_path", "docker_image", "container_image"), "container.image"),
        **dict.fromkeys(("mount", "volumes", "binds"), "container.mounts"),
        **dict.fromkeys(("scratch_dir", "tmpdir", "tmp", "local_scratch", "local_disk"), "scratch"),
        **dict.fromkeys(("env", "env_vars"), "environment"),
        **dict.fromkeys(("login_node", "login"), "login_host"),
        **dict.fromkeys(("venv", "interpreter"), "python"),
        **dict.fromkeys(("parent", "base"), "extends"),
        **dict.fromkeys(("account_name", "project"), "slurm.account"),
        **dict.fromkeys(("groups", "group"), "trusted_groups"),
        "storage_bandwidth": "storage_write_gb_s",
    },
    "slurm": {"gres": "gres"},  # the names in SLURM apply as well
}
"""Section of a cluster profile -> name -> the key to use."""

NODE_TYPE = {
    "": {
        **dict.fromkeys(("gpu_count", "num_gpus", "n_gpus"), "gpus_per_node"),
        **dict.fromkeys(("gpu", "gpu_type", "gpu_name"), "gpu_model"),
        **dict.fromkeys(("cores", "cpus", "threads", "cpu_count", "num_cpus", "vcpus"), "cpus_per_node"),
        **dict.fromkeys(("memory", "ram", "mem", "host_memory"), "health.memory_mb"),
        **dict.fromkeys(("vram", "gpu_memory", "hbm"), "gpu_memory_gib"),
        **dict.fromkeys(("ib_devices", "hcas", "hca", "ib", "infiniband", "nic"), "nics"),
        **dict.fromkeys(("numa", "sockets", "numa_domains"), "numa_nodes"),
        **dict.fromkeys(("pcie", "pci"), "pci_link"),
        **dict.fromkeys(("disks", "nvme", "ssds"), "health.nvme_disks"),
        **dict.fromkeys(("topology", "topo_file"), "topology_file"),
        "network": "fabric",
        **dict.fromkeys(("parent", "base"), "extends"),
        **dict.fromkeys(("env", "env_vars"), "environment"),
        **dict.fromkeys(("instance_type", "vm_size"), "vm_sizes"),
        **dict.fromkeys(("tflops", "flops"), "peak_tflops"),
        **dict.fromkeys(("cpu", "cpu_model"), "processor.model"),
    }
}
"""Section of a node type -> name -> the key to use."""

SECTIONS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "RunConfig": RUN_FILE,
    "ClusterConfig": PROFILE,
    "NodeType": NODE_TYPE,
}
"""Class of a document -> its table."""


def names_in_section(document: str, section: Sequence[str]) -> Mapping[str, str]:
    """Names that other programs have for keys of `section` -> the key to use, with a remark.

    `document` is the name of the class of the document.
    """
    path, tables = ".".join(section), SECTIONS.get(document, {})
    if "slurm" not in section[:1]:
        return tables.get(path, {})
    stage = "slurm.train" if path == "slurm" and document == "RunConfig" else path
    return {name: f"{stage}.{use}" for name, use in SLURM.items()} | dict(tables["slurm"])


def set_by_hpcgen(section: Sequence[str], name: str) -> str:
    """The option of sbatch with this name that has no key, because hpcgen's scripts depend on its value; else empty."""
    option = name.replace("_", "-")
    return option if "slurm" in section[:1] and option in OWN_OPTIONS else ""
