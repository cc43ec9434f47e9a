"""Summary of a run's configuration, and differences between the configurations of several runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hpcgen.text import few

if TYPE_CHECKING:
    from hpcgen.report.run import Run

SHOWN: dict[str, tuple[str, ...]] = {
    "model": (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "seq_length",
        "padded_vocab_size",
        "position_embedding_type",
        "rope_scaling",
        "window_size",
        "normalization",
        "qk_layernorm",
        "swiglu",
        "activation_func",
        "untie_embeddings_and_output_weights",
        "multi_latent_attention",
        "q_lora_rank",
        "kv_lora_rank",
        "num_moe_experts",
        "moe_router_topk",
        "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
        "mtp_num_layers",
        "layer_spec",
        "model_provider",
    ),
    "parallelism": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "sequence_parallel",
        "overlap_grad_reduce",
        "overlap_param_gather",
    ),
    "training": (
        "micro_batch_size",
        "global_batch_size",
        "rampup_batch_size",
        "train_iters",
        "precision",
        "fp8",
        "recompute_granularity",
        "loss",
        "z_loss_coeff",
        "metrics",
        "seed",
    ),
    "optimizer": (
        "lr",
        "min_lr",
        "lr_decay_style",
        "lr_schedule",
        "lr_warmup_iters",
        "lr_warmup_fraction",
        "lr_decay_iters",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "clip_grad",
    ),
    "lora": ("rank", "alpha", "dropout", "target_modules"),
    "checkpoint": ("save_interval", "save_interval_minutes", "async_save", "keep_last", "keep_every", "load"),
}
"""Keys that most people look for first. The page has the rest as JSON, as has `hpcgen checkpoint inspect --json`."""

REQUIRED = {"moe_router_topk": "num_moe_experts"}
"""Key with a default -> the key without which it has no effect."""


def essentials(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """Sections with keys and values, except values that are null or off."""
    config, start = run.config, run.history.start
    sections = [
        (section, [(key, text(value)) for key, value in shown(section, values)])
        for section in SHOWN
        if isinstance(values := config.get(section), dict)
    ]
    return [("run", list(_recorded(start))), *((name, rows) for name, rows in sections if rows)]


def shown(section: str, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the keys of a section to show, with their values. Leaves out values that are null, off, empty or without
    effect."""
    off: tuple[Any, ...] = (None, False, [])
    for key in SHOWN[section]:
        has_effect = values.get(REQUIRED.get(key, key)) not in off
        if has_effect and values.get(key) not in off:
            yield key, values[key]


def _recorded(start: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Facts that the trainer recorded at its last start."""
    hosts, versions = start.get("hosts"), start.get("versions")
    layout = {
        key: start[key] for key in ("tp", "pp", "cp", "dp", "vpp", "ep", "etp") if start.get(key) is not None
    }
    if isinstance(start.get("layout"), dict):
        layout = start["layout"]
    yield "ranks", f"{start.get('world_size', '?')} on {start.get('device', '?')}"
    if layout:
        yield "layout", " × ".join(f"{name.upper()} {size}" for name, size in layout.items())
    if start.get("precision"):
        yield "precision", str(start["precision"])
    if isinstance(hosts, list):
        yield "hosts", f"{len(hosts)}: {few([str(host) for host in hosts], 8)}"
    if isinstance(versions, dict):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Keys whose values differ between the runs, with the value of each run."""
    configs = [dict(flat(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    rows = [(key, [text(config.get(key)) for config in configs]) for key in keys if key != "run_dir"]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def text(value: Any) -> str:
    """Formats a configuration value on one line, so that it can be pasted into a run file."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, list):
        return ", ".join(text(item) for item in value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {text(item)}' for key, item in value.items() if item is not None)}}}"
    return str(value)


def flat(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted path and value of every leaf of a configuration."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
