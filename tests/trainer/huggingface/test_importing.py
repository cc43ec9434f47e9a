"""Imported models train at any layout, and damaged or unknown ones are refused with one message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.huggingface.models import VOCAB_SIZE, huggingface_logits, save_model, save_tokenizer
from tests.trainer.runs import finished, gpt_config, run
from tests.trainer.tensors import load_all
from trainer.contract.errors import TrainerError
from trainer.contract.files import checkpoint_files
from trainer.huggingface.importing import import_model
from trainer.huggingface.reading import SINGLE

pytestmark = pytest.mark.process


def ignore(line: str) -> None:
    """Discards a progress line."""


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("originals")
    return {case: save_model(case, directory / case) for case in ("gpt2", "llama3.2")}


@pytest.fixture
def original(originals: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(originals["gpt2"], tmp_path / "original"))


def finetuning(corpus: str, directory: Path, checkpoint: Path) -> dict[str, Any]:
    """A run of one step that starts from an import and changes no weight: its learning rate rounds to nothing."""
    record = checkpoint_files.read_record(checkpoint / "iter_0000000")
    config = gpt_config(corpus, directory, record["model"] | {"seq_length": 64})
    config["training"]["train_iters"] = 1
    config["optimizer"] = {"lr": 1e-30, "lr_warmup_iters": 0}
    config["checkpoint"] = {"load": str(checkpoint), "finetune": True}
    return config


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents whose tokens are below VOCAB_SIZE."""
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path_factory.mktemp("corpus") / "small"
    random = numpy.random.default_rng(3)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(100):
        builder.add_document(random.integers(0, VOCAB_SIZE, 100), [100])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.mark.parametrize("case", [pytest.param("gpt2", marks=pytest.mark.slow), "llama3.2"])
def test_every_layout_starts_from_the_same_weights(
    case: str, originals: dict[str, Path], small_corpus: str, tmp_path: Path
) -> None:
    imported = tmp_path / "imported"
    import_model(originals[case], imported, ignore)
    expected = load_all(imported / "iter_0000000")
    losses = []
    for tensor_parallel, pipeline in ((1, 1), (2, 2)):
        config = finetuning(small_corpus, tmp_path / f"run-{tensor_parallel}", imported)
        config["world_size"] = tensor_parallel * pipeline
        config["parallelism"] = {
            "tensor_model_parallel_size": tensor_parallel,
            "pipeline_model_parallel_size": pipeline,
        }
        config["model"] |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}
        result = finished(config)
        assert f"starts from the weights of {imported / 'iter_0000000'} (iteration 0)" in result.log
        saved = load_all(result.checkpoints / "iter_0000001")
        for name, tensor in expected.items():
            assert torch.equal(saved[name], tensor), name
        losses.append(result.steps[0][1])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_an_import_has_no_optimizer_to_continue_with(
    originals: dict[str, Path], small_corpus: str, tmp_path: Path
) -> None:
    import_model(originals["gpt2"], tmp_path / "imported", ignore)
    config = finetuning(small_corpus, tmp_path / "run", tmp_path / "imported")
    config["checkpoint"]["finetune"] = False
    result = run(config)
    assert result.statuses == (2,)
    assert "has only weights (hpcgen checkpoint import wrote it)" in result.log


def test_padding_rows_are_the_mean_so_the_loss_barely_changes(
    originals: dict[str, Path], tmp_path: Path
) -> None:
    import_model(originals["gpt2"], tmp_path / "imported", ignore)
    table = load_all(tmp_path / "imported" / "iter_0000000")["embedding.word_embeddings.weight"]
    assert table.shape[0] == 384
    assert torch.equal(table[VOCAB_SIZE:], table[:VOCAB_SIZE].mean(0).expand(384 - VOCAB_SIZE, -1))


def test_the_record_says_where_the_weights_are_from(originals: dict[str, Path], tmp_path: Path) -> None:
    lines: list[str] = []
    import_model(originals["gpt2"], tmp_path / "imported", lines.append)
    [found] = checkpoint_files.list_checkpoints(tmp_path / "imported")
    assert found.is_complete
    assert checkpoint_files.problems(found, hashes=True) == []
    assert found.record is not None
    origin = found.record["origins"]["huggingface"]
    assert (origin["name"], origin["family"]) == (str(originals["gpt2"]), "gpt2")
    assert lines[-1] == f'checkpoint: {{load: "{tmp_path}/imported", finetune: true}}'


def imported_tensors(source: Path, destination: Path) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint that an import writes."""
    import_model(source, destination, ignore)
    return load_all(destination / "iter_0000000")


def assert_same_import(one: Path, other: Path, tmp_path: Path) -> None:
    """Both directories have the same model, bit for bit."""
    found, expected = (
        imported_tensors(one, tmp_path / "found"),
        imported_tensors(other, tmp_path / "expected"),
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("case", "is_base"),
    [
        pytest.param("mixtral", True, id="mixtral-base-model"),
        pytest.param("qwen3-moe-with-dense-layers", False, id="qwen3-moe-with-dense-layers"),
        pytest.param("deepseek-experts", False, id="deepseek-experts"),
    ],
)
def test_stacked_experts_are_imported_like_single_ones(case: str, is_base: bool, tmp_path: Path) -> None:
    """transformers 5 writes them with save_original_format=False, and from state dicts of FSDP."""
    single = save_model(case, tmp_path / "single")
    stacked = save_model(case, tmp_path / "stacked", original_format=False)
    assert any(name.endswith(".mlp.experts.gate_up_proj") for name in load_file(stacked / SINGLE))
    assert torch.equal(huggingface_logits(stacked), huggingface_logits(single))
    if is_base:
        change_tensors(without_prefix)(stacked)
    assert_same_import(stacked, single, tmp_path)


@pytest.mark.parametrize("case", ["gpt2", "llama3.2"])
def test_the_embedding_of_a_tied_model_may_have_the_name_of_the_head(
    case: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    """safetensors keeps one of the names of a shared tensor."""
    directory = Path(shutil.copytree(originals[case], tmp_path / "original"))
    name = {"gpt2": WTE, "llama3.2": "model.embed_tokens.weight"}[case]
    change_tensors(lambda tensors: tensors.update({"lm_head.weight": tensors.pop(name)}))(directory)
    assert torch.equal(huggingface_logits(directory), huggingface_logits(originals[case]))
    assert_same_import(directory, originals[case], tmp_path)


def test_a_directory_named_gpt2_is_not_the_tokenizer_gpt2(
    originals: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(originals["gpt2"], tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    import_model(Path("gpt2"), Path("imported"), ignore)
    assert (tmp_path / "imported" / "iter_0000000" / "COMPLETE").is_file()


@pytest.mark.parametrize("is_same", [True, False], ids=["same", "other"])
def test_the_head_of_a_tied_model_is_ignored_if_it_is_the_embedding(
    is_same: bool, originals: dict[str, Path], tmp_path: Path
) -> None:
    """transformers 5 uses another head in spite of tie_word_embeddings."""
    directory = Path(shutil.copytree(originals["llama3.2"], tmp_path / "original"))
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if is_same else embedding + 1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if is_same:
        import_model(directory, tmp_path / "imported", ignore)
        return
    with pytest.raises(TrainerError, match=r"If both are right, set tie_word_embeddings to false"):
        import_model(directory, tmp_path / "imported", ignore)


def test_names_without_the_prefix_and_old_buffers_are_read(original: Path, tmp_path: Path) -> None:
    """As in the first files of GPT-2 on the Hub."""
    changed = Path(shutil.copytree(original, tmp_path / "changed"))
    change_tensors(without_prefix)(changed)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    change_tensors(lambda tensors: tensors.update({"h.0.attn.bias": mask}))(changed)
    assert_same_import(changed, original, tmp_path)


def change_config(**values: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_bytes())
        (path / "config.json").write_text(json.dumps({**config, **values}))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return rewrite


def without_prefix(tensors: dict[str, torch.Tensor]) -> None:
    """The names of a base model, which has no head."""
    for name in [name for name in tensors if name != "lm_head.weight"]:
        tensors[name.partition(".")[2]] = tensors.pop(name)


def wrap(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[f"module.{name}"] = tensors.pop(name)


def empty(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        tensors[name] = torch.empty(0)


def replaced_by(name: str, content: str = "") -> Callable[[Path], None]:
    """Replaces the weights by another file."""

    def change(path: Path) -> None:
        (path / SINGLE).unlink()
        (path / name).write_text(content)

    return change


def index_of(content: Any) -> Callable[[Path], None]:
    return replaced_by("model.safetensors.index.json", json.dumps(content))


def another_format(name: str) -> Callable[[Path], None]:
    """Replaces config.json by a file of another program."""

    def change(path: Path) -> None:
        (path / "config.json").rename(path / name)

    return change


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def announce_a_huge_header(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def use_pytorch_format(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def name_a_missing_shard(path: Path) -> None:
    (path / "model.safetensors").unlink()
    index = {"weight_map": {"transformer.wte.weight": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def name_a_file_elsewhere(path: Path) -> None:
    (path / "model.safetensors").unlink()
    index = {"weight_map": {"transformer.wte.weight": "../other.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


WTE = "transformer.wte.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: (path / "config.json").unlink(),
            "has no config.json, so it is not a Hugging Face model",
        ),
        (lambda path: (path / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda path: (path / "config.json").write_text("[]"), "it has no model_type"),
        (change_config(model_type="bert", architectures=["BertModel"]), "model_type = 'bert', architectures"),
        (
            change_config(architectures=["GPT2ForSequenceClassification"]),
            "supported are GPT2LMHeadModel, Llama",
        ),
        (change_config(quantization_config={"bits": 4}), "quantization_config is set"),
        (change_config(activation_function="silu"), "activation_function = 'silu' is not supported"),
        (change_config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx = True"),
        (change_config(n_embd="64"), "n_embd = '64' must be of type int"),
        (change_config(n_layer=5), "has no tensor transformer.h.4.ln_1.weight, which GPT2LMHeadModel needs"),
        (change_config(n_layer=3), "has tensors that GPT2LMHeadModel does not: transformer.h.3."),
        (change_config(vocab_size=301), "has the shape [300, 64], but config.json gives [301, 64]"),
        (
            cut,
            "model.safetensors is not a valid safetensors file: Error while deserializing header: incomplete",
        ),
        (
            announce_a_huge_header,
            "is not a valid safetensors file: Error while deserializing header: header too large",
        ),
        (
            another_format("adapter_config.json"),
            "It is an adapter, not a model. Import its base model",
        ),
        (another_format("params.json"), "It has Meta's or Mistral's own format"),
        (another_format("model.gguf"), "It has llama.cpp's format"),
        (
            lambda path: (path / "config.json").rename(path / "checkpoint-500"),
            "The models are in its directories checkpoint-*. Name one of them (found checkpoint-500)",
        ),
        (replaced_by(SINGLE, POINTER), "model.safetensors is a pointer of git-lfs, not the file itself"),
        (lambda path: (path / "config.json").write_text(POINTER), "config.json is a pointer of git-lfs"),
        (
            lambda path: (path / "tokenizer.json").write_text(POINTER),
            "tokenizer.json is a pointer of git-lfs",
        ),
        (replaced_by("model.safetensors.index.json", POINTER), "index.json is a pointer of git-lfs"),
        (replaced_by("model-00001-of-00002.safetensors"), "The index is missing. Download it again"),
        (replaced_by("consolidated.safetensors"), "It has Meta's or Mistral's own format"),
        (change_tensors(empty), "Empty tensors are what DeepSpeed's ZeRO-3 leaves"),
        (change_tensors(wrap), "Its names begin with module., as of a wrapped model"),
        (index_of([]), "has no weight_map"),
        (index_of(None), "has no weight_map"),
        (index_of("a"), "has no weight_map"),
        (index_of({"weight_map": ["a"]}), "has no weight_map"),
        (index_of({"weight_map": {"a": 3}}), "has no weight_map"),
        (index_of({"weight_map": {"a": "b" * 5000}}), "bbb', which is not a file in its directory"),
        (index_of({"weight_map": {"a": "\ud800"}}), "which is not a file in its directory"),
        (index_of({"weight_map": {"a": "b\0"}}), "which is not a file in its directory"),
        (change_config(n_head=3), "n_embd = 64 is not a multiple of n_head = 3"),
        (use_pytorch_format, "It has weights in PyTorch's format; save it with safetensors"),
        (name_a_missing_shard, "model-00001-of-00002.safetensors is missing"),
        (name_a_file_elsewhere, "names '../other.safetensors', which is not a file in its directory"),
        (change_tensors(lambda tensors: tensors.pop(WTE)), "has no tensor transformer.wte.weight"),
        (change_tensors(lambda tensors: tensors[WTE].fill_(float("nan"))), "has numbers that are not finite"),
        (change_tensors(lambda tensors: tensors.update(extra=torch.ones(2))), "does not: extra"),
        (change_tensors(lambda tensors: tensors.update({WTE: tensors[WTE].long()})), "has the type I64"),
        (lambda path: save_tokenizer(path, 301), "has IDs up to 300, but the embedding has 300 rows"),
    ],
)
def test_bad_input_is_refused_with_one_message(
    original: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    damage(original)
    with pytest.raises(TrainerError) as error:
        import_model(original, tmp_path / "imported", ignore)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["original"]
