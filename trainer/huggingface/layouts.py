"""Names what a directory has in place of a Hugging Face model with safetensors files, and what to do about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

BASE_MODEL = (
    "It is an adapter, not a model. Import its base model, and then the adapter with --base CHECKPOINT, which names "
    "the imported base model"
)
DOWNLOAD = "Download the repository again, or convert it with transformers"
OTHER_PROGRAMS = {
    "adapter_config.json": BASE_MODEL,
    "adapter_model.*": BASE_MODEL,
    "params.json": f"It has Meta's or Mistral's own format. {DOWNLOAD}",
    "consolidated.*": f"It has Meta's or Mistral's own format. {DOWNLOAD}",
    "*.gguf": "It has llama.cpp's format. Download the model that it was made from",
    "*.nemo": "It has NeMo's format. Export it to Hugging Face with NeMo",
}
NO_CONFIG = OTHER_PROGRAMS | {
    "iter_*": "It has checkpoints of Megatron-Core, which training reads without an import",
    "global_step*": "It has checkpoints of DeepSpeed. Convert them with the zero_to_fp32.py in this directory",
    "snapshots": "It is a directory of the Hub's cache. Name the one with the model, in snapshots/",
    "checkpoint-*": "The models are in its directories checkpoint-*. Name one of them",
}
"""File in a directory without config.json -> what the directory is and what to do, most telling first."""

IN_PYTORCH = "It has weights in PyTorch's format; save it with safetensors"
NO_WEIGHTS = OTHER_PROGRAMS | {
    "model-*-of-*.safetensors": "The index is missing. Download it again, since it lists the files of the model",
    "*.safetensors": "Its safetensors files have other names. Save the model with save_pretrained of transformers",
    **dict.fromkeys(("*.bin", "*.pt", "*.pth"), IN_PYTORCH),
    "*.h5": "It has TensorFlow's weights. Load it with from_tf=True of transformers 4, and save it",
    "*.msgpack": "It has Flax's weights. Load it with from_flax=True of transformers 4, and save it",
}
"""File in a directory without safetensors files -> what the directory is and what to do."""


def found(path: Path, layouts: Mapping[str, str]) -> str:
    """A sentence that describes a directory: the first of `layouts` that matches. Empty if none matches."""
    for pattern, sentence in layouts.items():
        if match := min(path.glob(pattern), default=None):
            return f" {sentence} (found {match.name})"
    return ""


def unusual_names(missing: str, names: Collection[str]) -> str:
    """A sentence about files whose names have an addition that transformers' names do not have."""
    if any(".lora_" in name for name in names):
        return f" {BASE_MODEL}"
    wrapped = next((name for name in names if name.endswith(f".{missing}")), None)
    if wrapped is None:
        return ""
    prefix = wrapped.removesuffix(missing)
    return (
        f" Its names begin with {prefix}, as of a wrapped model. Save the model itself, without the wrapper"
    )


def unusual_shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A sentence on files that ZeRO-3 wrote without gathering the weights."""
    if (0,) not in shapes.values():
        return ""
    return (
        " Empty tensors are what DeepSpeed's ZeRO-3 leaves when weights are saved without gathering them. Set "
        "stage3_gather_16bit_weights_on_model_save, or convert the checkpoint with its zero_to_fp32.py"
    )
