"""LoRA adapters from PEFT and to PEFT, and merged into their base model. PEFT and transformers are the reference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.selection import select
from tests.trainer.foreign import as_megatron_lm
from tests.trainer.huggingface.models import CASES as MODELS
from tests.trainer.huggingface.models import (
    VOCAB_SIZE,
    adapter_logits,
    huggingface_logits,
    prompts,
    save_adapter,
    save_model,
    transformers_process,
    weights,
)
from tests.trainer.runs import LLAMA, Run, finished, gpt_config
from trainer.contract.errors import TrainerError
from trainer.contract.families.huggingface import model_of
from trainer.contract.files.checkpoint_files import read_record
from trainer.contract.model.adapters import linears
from trainer.huggingface import check
from trainer.huggingface.adapter_exporting import check_names, export_adapter
from trainer.huggingface.adapter_importing import import_adapter
from trainer.huggingface.averaging import average
from trainer.huggingface.check import TOLERANCE, trainer_logits
from trainer.huggingface.exporting import Options, export
from trainer.huggingface.importing import import_model
from trainer.huggingface.peft_modules import peft_modules
from trainer.huggingface.source import read_source
from trainer.inference.checkpoint import find_checkpoint, inference_config
from trainer.inference.loading import load_part

pytestmark = pytest.mark.process

LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GPT2_TARGETS = ["c_attn", "c_proj", "c_fc"]


class Base(NamedTuple):
    """A model in Hugging Face's format, and as a checkpoint."""

    original: Path
    checkpoint: Path


def ignore(line: str) -> None:
    """Discards a progress line."""


def imported_base(case: str, directory: Path, dtype: torch.dtype = torch.float32) -> Base:
    original = save_model(case, directory / "original", dtype)
    import_model(original, directory / "base", ignore)
    return Base(original, directory / "base/iter_0000000")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return imported_base("llama2", tmp_path_factory.mktemp("llama"))


def assert_equal_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """They differ by at most TOLERANCE of the largest one."""
    error = (found[..., : expected.shape[-1]] - expected).abs().max() / expected.abs().max()
    print(f"{error:.1e}")
    assert error <= TOLERANCE


def assert_changed_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """They differ by more than rounding does."""
    assert (found - expected).abs().max() > 0.01 * expected.abs().max()


CASES = select(["llama2", "llama3.2", "mistral", "qwen2", "qwen3", "gpt2"], {"llama3.2", "gpt2"})


@pytest.mark.parametrize("case", CASES)
def test_adapters_of_every_family_have_equal_logits_in_both_directions(case: str, tmp_path: Path) -> None:
    base = imported_base(case, tmp_path)
    targets = GPT2_TARGETS if case == "gpt2" else LLAMA_TARGETS
    peft = save_adapter(base.original, tmp_path / "peft", r=4, lora_alpha=6, target_modules=targets)
    expected = adapter_logits(base.original, peft)
    assert_changed_logits(huggingface_logits(base.original), expected)
    import_adapter(peft, base.checkpoint, tmp_path / "adapters", ignore)
    checkpoint = tmp_path / "adapters/iter_0000000"
    kinds = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    expected_section = {"rank": 4, "alpha": 6.0, "dropout": 0.0, "target_modules": kinds}
    assert read_record(checkpoint)["lora"] == expected_section  # as a run without target_modules has it
    assert_equal_logits(trainer_logits(read_source(checkpoint), prompts()), expected)
    export_adapter(checkpoint, tmp_path / "exported", Options(), ignore)
    assert_equal_logits(adapter_logits(base.original, tmp_path / "exported"), expected)
    if case != "gpt2":
        assert_same_tensors(weights(tmp_path / "exported"), weights(peft))
    export(checkpoint, tmp_path / "merged", Options(), ignore)
    assert_equal_logits(huggingface_logits(tmp_path / "merged"), expected)


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.fixture(scope="module")
def trained_base(single_llama: Run, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """A model that this trainer made, and its import."""
    directory = tmp_path_factory.mktemp("base")
    export(single_llama.checkpoints / "iter_0000006", directory / "original", Options(), ignore)
    import_model(directory / "original", directory / "base", ignore)
    return Base(directory / "original", directory / "base/iter_0000000")


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2, id="TP2+SP"),
        pytest.param({"pipeline_model_parallel_size": 2}, 2, id="PP2", marks=pytest.mark.slow),
    ],
)
def test_adapters_that_were_trained_at_any_layout_are_exported(
    layout: dict[str, Any], world_size: int, corpus: str, trained_base: Base, tmp_path: Path
) -> None:
    config = lora_config(corpus, tmp_path / "run", trained_base.checkpoint.parent)
    config |= {"parallelism": layout, "world_size": world_size}
    checkpoint = finished(config).checkpoints / "iter_0000002"
    expected = trainer_logits(read_source(checkpoint), prompts())[..., :1000]
    export_adapter(checkpoint, tmp_path / "adapter", Options(), ignore)
    saved = json.loads((tmp_path / "adapter/adapter_config.json").read_bytes())
    assert saved["base_model_name_or_path"] == str(trained_base.original)
    assert saved["target_modules"] == sorted(LLAMA_TARGETS)
    assert_equal_logits(adapter_logits(trained_base.original, tmp_path / "adapter"), expected)
    export(checkpoint, tmp_path / "merged", Options(), ignore)
    assert_equal_logits(huggingface_logits(tmp_path / "merged"), expected)
    assert not torch.equal(huggingface_logits(trained_base.original), expected)
    card = (tmp_path / "adapter/README.md").read_text()
    assert "LoRA adapters of `original`" in card
    assert str(tmp_path.parent) not in card


def lora_config(corpus: str, run_dir: Path, load: Path, **lora: Any) -> dict[str, Any]:
    """Two steps of adapters of the model in the directory of checkpoints `load`."""
    config = gpt_config(corpus, run_dir, LLAMA)
    config["training"]["train_iters"] = 2
    config["lora"] = {"rank": 4, "alpha": 8.0, **lora}
    config["checkpoint"] = {"load": str(load), "finetune": True}
    return config


def test_training_goes_on_from_an_adapter_of_peft(corpus: str, trained_base: Base, tmp_path: Path) -> None:
    """The first loss is that of the merged model, and the parts without an adapter in PEFT get none."""
    targets = ["q_proj", "v_proj"]
    peft = save_adapter(
        trained_base.original,
        tmp_path / "peft",
        r=4,
        lora_alpha=16,
        use_rslora=True,
        target_modules=targets,
        rank_pattern={"layers.1.self_attn.v_proj": 2},
        layers_to_transform=[1, 2],
    )
    lines: list[str] = []
    import_adapter(peft, trained_base.checkpoint, tmp_path / "adapters", lines.append)
    section = yaml.safe_load(lines[-1])["lora"]
    assert section["target_modules"] == [f"decoder.layers.{n}.self_attention.linear_qkv" for n in (1, 2)]
    config = lora_config(corpus, tmp_path / "run", tmp_path / "adapters", **section)
    trained = finished(config)
    export(tmp_path / "adapters/iter_0000000", tmp_path / "merged", Options(), ignore)
    assert_equal_logits(huggingface_logits(tmp_path / "merged"), adapter_logits(trained_base.original, peft))
    import_model(tmp_path / "merged", tmp_path / "merged-weights", ignore)
    config = lora_config(corpus, tmp_path / "of-merged", tmp_path / "merged-weights")
    of_merged = finished(config)
    assert trained.steps[0][1] == pytest.approx(of_merged.steps[0][1], abs=1e-5)
    export_adapter(trained.checkpoints / "iter_0000002", tmp_path / "exported", Options(), ignore)
    before, after = weights(peft), weights(tmp_path / "exported")
    name = "base_model.model.model.layers.1.self_attn.{}_proj.lora_B.weight"
    assert not torch.equal(after[name.format("v")], torch.nn.functional.pad(before[name.format("v")], (0, 2)))
    assert not after[name.format("v")][:, 2:].any()
    assert not after[name.format("k")].any()
    assert_equal_logits(
        adapter_logits(trained_base.original, tmp_path / "exported"),
        trainer_logits(read_source(trained.checkpoints / "iter_0000002"), prompts())[..., :1000],
    )


def test_the_base_model_may_be_of_megatron_lm(single_llama: Run, trained_base: Base, tmp_path: Path) -> None:
    base = as_megatron_lm(single_llama.checkpoints / "iter_0000006", tmp_path)
    peft = save_adapter(trained_base.original, tmp_path / "peft", r=4, target_modules=["q_proj", "v_proj"])
    import_adapter(peft, base, tmp_path / "adapters", ignore)
    export(tmp_path / "adapters/iter_0000000", tmp_path / "merged", Options(vocab_size=1000), ignore)
    expected = adapter_logits(trained_base.original, peft)
    assert_equal_logits(huggingface_logits(tmp_path / "merged"), expected)
    (base / ".metadata").unlink()
    with pytest.raises(TrainerError, match=r"\.metadata, of the model of the adapters in .*, cannot be read"):
        read_source(tmp_path / "adapters/iter_0000000")


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora = True is not supported"),
    "bias": ({"bias": "all"}, "bias = 'all' is not supported"),
    "modules to save": ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head'] is not supported"),
    "a later key": ({"use_something": [1]}, "use_something = [1] is not supported"),
    "another method": ({"peft_type": "IA3"}, "peft_type = 'IA3' is not supported; only LORA is"),
    "another task": ({"task_type": "SEQ_CLS"}, "task_type = 'SEQ_CLS' is not supported"),
    "changed weights": ({"init_lora_weights": "pissa"}, "changes the weights of the base model"),
    "a regular expression": ({"rank_pattern": {"(a+)+$": 2}}, "only names of modules are supported"),
    "no name": ({"base_model_name_or_path": ["a"]}, "base_model_name_or_path = ['a'] is not a text"),
    "no rank": ({"r": True}, "r = True is not a valid number"),
    "a number that is not meant": ({"lora_alpha": 10**400}, "is not a valid number"),
    "no number": (
        {"alpha_pattern": {"q_proj": float("inf")}},
        "does not give a positive number for each module",
    ),
    "no dropout": ({"lora_dropout": 1.0}, "lora_dropout = 1.0 is not a valid number"),
    "two mistakes": (
        {"use_dora": True, "lora_alpha": "x"},
        "lora_alpha = 'x' is not a valid number; use_dora",
    ),
    "another rank": (
        {"r": 3},
        "has the shape [4, 64], but the base model and adapter_config.json give [3, 64]",
    ),
}


@pytest.fixture(scope="module")
def query_adapter(llama: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of a few modules."""
    directory = tmp_path_factory.mktemp("query") / "peft"
    return save_adapter(llama.original, directory, r=4, target_modules=["q_proj", "o_proj"])


def refused(adapter: Path, base: Path, destination: Path) -> str:
    """The message of an import that leaves nothing behind."""
    before = sorted(destination.parent.iterdir())
    with pytest.raises(TrainerError) as error:
        import_adapter(adapter, base, destination, ignore)
    assert sorted(destination.parent.iterdir()) == before
    return str(error.value)


@pytest.mark.parametrize(("change", "expected"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_settings_of_peft_that_the_trainer_does_not_have_are_refused_by_name(
    change: dict[str, Any], expected: str, llama: Base, query_adapter: Path, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(query_adapter, tmp_path / "copied"))
    config = json.loads((copied / "adapter_config.json").read_bytes())
    (copied / "adapter_config.json").write_text(json.dumps(config | change))
    assert expected in refused(copied, llama.checkpoint, tmp_path / "adapters")


@pytest.mark.parametrize(
    "change", ["a pickle", "unknown tensors", "half an adapter", "not finite", "other base"]
)
def test_files_that_are_not_adapters_of_the_base_model_are_refused(
    change: str, llama: Base, query_adapter: Path, tmp_path: Path
) -> None:
    copied, base = Path(shutil.copytree(query_adapter, tmp_path / "copied")), llama.checkpoint
    file = copied / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.3.self_attn.o_proj.lora_A.weight"
    match change:
        case "a pickle":
            file.rename(copied / "adapter_model.bin")
            expected = "save_pretrained of PEFT writes it"
        case "unknown tensors":
            tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 64)
            expected = "not matrices of adapters of LlamaForCausalLM: base_model.model.lm_head.lora_A.weight"
        case "half an adapter":
            del tensors[name]
            expected = f"has no {name}"
        case "not finite":
            tensors[name][1, 2] = float("nan")
            expected = f"{name} has numbers that are not finite"
        case _:
            import_adapter(copied, base, tmp_path / "first", ignore)
            base = tmp_path / "first/iter_0000000"
            expected = "contains adapters, not a complete model"
    if file.exists():
        save_file(tensors, file)
    assert expected in refused(copied, base, tmp_path / "adapters")


@pytest.mark.parametrize(
    ("named", "is_doubted"),
    [
        ("{original}", False),
        ("somebody/Original", False),
        ("/cache/models--somebody--original/snapshots/0a1b", False),
        (None, False),
        ("somebody/other", True),
        ("/cache/models--somebody--other/snapshots/original", True),
    ],
)
def test_an_adapter_of_another_base_model_is_doubted(
    named: str | None, is_doubted: bool, llama: Base, query_adapter: Path, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(query_adapter, tmp_path / "copied"))
    config = json.loads((copied / "adapter_config.json").read_bytes())
    name = named and named.format(original=llama.original)
    (copied / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": name}))
    lines: list[str] = []
    import_adapter(copied, llama.checkpoint, tmp_path / "adapters", lines.append)
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert bool(warnings) == is_doubted
    assert all(f"base model {name}, but" in line and str(llama.original) in line for line in warnings)


def test_adapters_have_no_mean(llama: Base, query_adapter: Path, tmp_path: Path) -> None:
    """The mean of products B A is not the product of the means."""
    import_adapter(query_adapter, llama.checkpoint, tmp_path / "adapters", ignore)
    with pytest.raises(TrainerError, match="has LoRA adapters"):
        average(tmp_path / "adapters", 1, tmp_path / "mean", ignore)


def test_a_checkpoint_without_adapters_is_no_adapter(llama: Base, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="has no adapters, but a complete model"):
        export_adapter(llama.checkpoint, tmp_path / "exported", Options(), ignore)


def test_sums_that_overflow_are_refused(llama: Base, query_adapter: Path, tmp_path: Path) -> None:
    """An inf in a merged weight would make every logit NaN."""
    copied = Path(shutil.copytree(query_adapter, tmp_path / "copied"))
    tensors = load_file(copied / "adapter_model.safetensors")
    for scale, dtype, expected in (
        (1e30, None, "with its adapter has numbers that are not finite"),
        (1e3, "fp16", "has numbers that are too large for fp16"),
    ):
        scaled = {name: tensor * scale for name, tensor in tensors.items()}
        save_file(scaled, copied / "adapter_model.safetensors")
        import_adapter(copied, llama.checkpoint, tmp_path / str(scale), ignore)
        with pytest.raises(TrainerError, match=expected):
            export(tmp_path / str(scale) / "iter_0000000", tmp_path / "merged", Options(dtype=dtype), ignore)
        assert not (tmp_path / "merged").exists()


def test_a_merged_model_is_rounded_once(llama: Base, query_adapter: Path, tmp_path: Path) -> None:
    """fp32 sums are rounded to bf16, and tensors without adapters are those of the base model."""
    base = imported_base("llama2", tmp_path, torch.bfloat16)
    import_adapter(query_adapter, base.checkpoint, tmp_path / "adapters", ignore)
    export(tmp_path / "adapters/iter_0000000", tmp_path / "merged", Options(), ignore)
    merged, before, adapter = weights(tmp_path / "merged"), weights(base.original), weights(query_adapter)
    name = "model.layers.2.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
    expected = (before[f"{name}.weight"].float() + 8 / 4 * (b @ a)).bfloat16()
    assert torch.equal(merged[f"{name}.weight"], expected)
    assert merged.keys() == before.keys()
    kept = [each for each in merged if "q_proj" not in each and "o_proj" not in each]
    assert all(torch.equal(merged[each], before[each]) for each in kept)


@pytest.mark.parametrize("case", select(["qwen3-moe", "mixtral"], {"qwen3-moe"}))
def test_adapters_of_experts_are_exported_and_merged(case: str, tmp_path: Path) -> None:
    """Two ranks train them. PEFT reads one adapter for each expert, and stacks them."""
    base = imported_base(case, tmp_path)
    config = lora_config("", tmp_path / "run", base.checkpoint.parent)
    config |= {
        "model": read_record(base.checkpoint)["model"] | {"seq_length": 64},
        "parallelism": {"expert_model_parallel_size": 2},
        "world_size": 2,
        "data": {"mock": True, "num_workers": 0},
    }
    checkpoint = finished(config).checkpoints / "iter_0000002"
    expected = trainer_logits(read_source(checkpoint), prompts())[..., :VOCAB_SIZE]
    assert_changed_logits(huggingface_logits(base.original), expected)
    export(checkpoint, tmp_path / "merged", Options(), ignore)
    assert_equal_logits(huggingface_logits(tmp_path / "merged"), expected)
    export_adapter(checkpoint, tmp_path / "adapter", Options(), ignore)
    assert_equal_logits(adapter_logits(base.original, tmp_path / "adapter"), expected)
    import_adapter(tmp_path / "adapter", base.checkpoint, tmp_path / "again", ignore)
    again = trainer_logits(read_source(tmp_path / "again/iter_0000000"), prompts())
    assert torch.equal(again[..., :VOCAB_SIZE], expected)


def test_experts_next_to_dense_layers_are_only_merged() -> None:
    """PEFT would take adapters of dense layers for those of experts."""
    shape = MODELS["qwen3-moe-with-dense-layers"][1]
    family, model = model_of({"model_type": "qwen3_moe", **shape})
    modules = list(peft_modules(family, model, list(linears(model))))
    with pytest.raises(TrainerError, match=r"from those of model\.layers\.1\.mlp\.gate_proj"):
        check_names(modules, family)


@pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults
def test_a_damaged_base_model_is_refused(
    llama: Base, query_adapter: Path, tmp_path: Path, process_groups: Any
) -> None:
    base = shutil.copytree(llama.checkpoint, tmp_path / "base/iter_0000000")
    import_adapter(query_adapter, base, tmp_path / "adapters", ignore)
    file = base / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(TrainerError, match=r"__0_0\.distcp was changed after it was written.*Restore it"):
        read_source(tmp_path / "adapters/iter_0000000")
    found = find_checkpoint(tmp_path / "adapters")
    with pytest.raises(TrainerError, match=r"__0_0\.distcp was changed after it was written.*Restore it"):
        load_part(found, inference_config(found, device="cpu", precision=None), process_groups)


def test_the_checks_find_a_wrong_export(llama: Base, query_adapter: Path, tmp_path: Path) -> None:
    import_adapter(query_adapter, llama.checkpoint, tmp_path / "adapters", ignore)
    checkpoint = tmp_path / "adapters/iter_0000000"
    export_adapter(checkpoint, tmp_path / "adapter", Options(dtype="bf16"), ignore)
    export(checkpoint, tmp_path / "merged", Options(dtype="bf16"), ignore)
    for done in checked(checkpoint, tmp_path, llama.original):
        assert done.startswith("checked: the logits of 4 prompts differ from the checkpoint's by at most")
    config = tmp_path / "adapter/adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    file = tmp_path / "merged/model.safetensors"
    tensors = load_file(file)
    name = "model.layers.3.self_attn.o_proj.weight"
    save_file(tensors | {name: tensors[name].flip(0)}, file, metadata={"format": "pt"})
    for failed in checked(checkpoint, tmp_path, llama.original):
        assert failed.startswith("the logits of the export differ from the checkpoint's by")


def checked(checkpoint: Path, directory: Path, base: Path) -> tuple[str, str]:
    """What the checks of both exports say, in the process of transformers."""
    return transformers_process().submit(_checked, checkpoint, directory, base).result()


def _checked(checkpoint: Path, directory: Path, base: Path) -> tuple[str, str]:
    def said(compare: Callable[[], str]) -> str:
        try:
            return compare()
        except TrainerError as error:
            return str(error)

    source = read_source(checkpoint)
    return (
        said(lambda: check.compare(source, directory / "merged")),
        said(lambda: check.compare_adapter(source, directory / "adapter", str(base), torch.bfloat16)),
    )
