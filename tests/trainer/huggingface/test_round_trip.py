"""Models of every family survive import and export bit for bit, and compute the same in transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.selection import select
from tests.trainer.huggingface.models import (
    CASES,
    assert_same_weights,
    huggingface_logits,
    prompts,
    save_model,
    weights,
)
from trainer.huggingface.check import trainer_logits
from trainer.huggingface.exporting import INDEX, Options, export
from trainer.huggingface.importing import import_model
from trainer.huggingface.source import read_source

pytestmark = pytest.mark.process  # not in `make quick`: they build models

TOLERANCE = 1e-5

NOT_MODEL = {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "rope_theta", "rope_scaling"}
"""Keys of a configuration that do not define the model, or that `rope_parameters` replaces."""

NOT_HERE = {"bos_token_id", "eos_token_id", "summary_first_dropout", "initializer_range", "max_window_layers"}
"""Keys that the export does not know, or that have no effect in these models."""


def ignore(line: str) -> None:
    """Discards a progress line."""


@dataclass(frozen=True)
class Converted:
    """A model of transformers with its logits, the checkpoint made from it, and the export of that."""

    original: Path
    checkpoint: Path
    exported: Path
    logits: torch.Tensor


def convert(case: str, tmp_path: Path, dtype: torch.dtype = torch.float32) -> tuple[Path, Path, Path]:
    """The original, the checkpoint made from it, and the export of that."""
    original = save_model(case, tmp_path / "original", dtype)
    import_model(original, tmp_path / "imported", ignore)
    checkpoint = tmp_path / "imported" / "iter_0000000"
    export(checkpoint, tmp_path / "exported", Options(), ignore)
    return original, checkpoint, tmp_path / "exported"


OFTEN = (
    "gpt2",
    "gpt2-squared-relu-untied",
    "llama-with-biases",
    "llama3.2",
    "mistral",
    "qwen2-window",
    "qwen3",
    "mixtral-window",
    "qwen3-moe-with-dense-layers",
    "deepseek-groups",
    "deepseek-yarn-mscale",
)
"""One of each family, or two. The other cases differ from these in less."""


@pytest.fixture(scope="module", params=select(CASES.keys(), OFTEN))
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    original, checkpoint, exported = convert(request.param, tmp_path_factory.mktemp("converted"))
    return Converted(original, checkpoint, exported, huggingface_logits(original))


def test_import_and_export_change_nothing(converted: Converted) -> None:
    from transformers import AutoConfig

    original, exported = converted.original, converted.exported
    assert_same_weights(exported, original)
    before, after = (AutoConfig.from_pretrained(path).to_dict() for path in (original, exported))
    assert after["architectures"] == before["architectures"]
    differing = {key for key in before if before[key] != after.get(key)} - NOT_MODEL - NOT_HERE
    assert differing <= {key for key in ("n_inner", "head_dim") if before.get(key, 0) is None}
    assert torch.equal(huggingface_logits(exported), converted.logits)


def test_the_trainer_computes_what_transformers_computes(converted: Converted) -> None:
    expected = converted.logits
    found = trainer_logits(read_source(converted.checkpoint), prompts())
    assert found.shape[-1] == 384
    error = (found[..., : expected.shape[-1]] - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_data_type_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    original, _, exported = convert("llama2", tmp_path, dtype)
    assert_same_weights(exported, original)
    name = str(dtype).removeprefix("torch.")
    assert json.loads((exported / "config.json").read_bytes())["dtype"] == name


def test_another_data_type_rounds_each_weight(tmp_path: Path) -> None:
    original, checkpoint, _ = convert("gpt2", tmp_path)
    export(checkpoint, tmp_path / "bf16", Options(dtype="bf16"), ignore)
    rounded = weights(tmp_path / "bf16")
    for name, tensor in weights(original).items():
        assert torch.equal(rounded[name], tensor.bfloat16()), name


def test_large_models_have_several_files_and_an_index(tmp_path: Path) -> None:
    original, checkpoint, _ = convert("llama2", tmp_path)
    export(checkpoint, tmp_path / "sharded", Options(shard_bytes=200_000), ignore)
    assert_same_weights(tmp_path / "sharded", original)
    index = json.loads((tmp_path / "sharded" / INDEX).read_bytes())
    files = sorted(path.name for path in (tmp_path / "sharded").glob("*.safetensors"))
    assert len(files) > 2
    assert files == sorted(set(index["weight_map"].values()))
    assert all(f"-of-{len(files):05}." in name for name in files)
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in weights(original).values())
    assert all(path.stat().st_size <= 210_000 for path in (tmp_path / "sharded").glob("*.safetensors"))
    assert torch.equal(huggingface_logits(tmp_path / "sharded"), huggingface_logits(original))


def test_a_sharded_model_is_imported_like_a_single_file(tmp_path: Path) -> None:
    original, checkpoint, _ = convert("gpt2", tmp_path)
    export(checkpoint, tmp_path / "sharded", Options(shard_bytes=200_000), ignore)
    import_model(tmp_path / "sharded", tmp_path / "again", ignore)
    export(tmp_path / "again" / "iter_0000000", tmp_path / "final", Options(), ignore)
    assert_same_weights(tmp_path / "final", original)
