"""Exports of trained checkpoints, of Megatron-LM's, and what is refused. Nothing half-written appears."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE_S
from tests.trainer.foreign import as_megatron_lm
from tests.trainer.forked import ForkedPython, run_python
from tests.trainer.huggingface.models import (
    VOCAB_SIZE,
    assert_same_weights,
    save_model,
    save_tokenizer,
    transformers_process,
    weights,
)
from tests.trainer.runs import LLAMA, finished, gpt_config
from tests.trainer.tensors import load_all
from trainer.contract.errors import TrainerError
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import COMPLETE
from trainer.huggingface import check
from trainer.huggingface.exporting import Options, export
from trainer.huggingface.importing import import_model
from trainer.huggingface.source import read_source

pytestmark = pytest.mark.process


def ignore(line: str) -> None:
    """Discards a progress line."""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small Llama."""
    directory = tmp_path_factory.mktemp("imported")
    import_model(save_model("llama2", directory / "original"), directory / "checkpoints", ignore)
    return directory / "checkpoints" / "iter_0000000"


@pytest.fixture
def copied(imported: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    shutil.copytree(imported.parent, tmp_path / "copied")
    return tmp_path / "copied" / "iter_0000000"


@pytest.fixture(scope="module")
def trained(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a Llama that 2 ranks trained at PP 2. test_deepseek.py exports one of TP 2."""
    config = gpt_config(corpus, tmp_path_factory.mktemp("trained"), LLAMA)
    config["parallelism"] = {"pipeline_model_parallel_size": 2}
    config["world_size"] = 2
    config["training"]["train_iters"] = 2
    return finished(config).checkpoints / "iter_0000002"


def refused(checkpoint: Path, destination: Path, options: Options = Options()) -> str:  # noqa: B008
    """The message of an export that leaves nothing behind."""
    before = sorted(destination.parent.iterdir())
    with pytest.raises(TrainerError) as error:
        export(checkpoint, destination, options, ignore)
    assert sorted(destination.parent.iterdir()) == before
    return str(error.value)


def rewrite_record(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    record = checkpoint_files.read_record(checkpoint)
    change(record)
    (checkpoint / COMPLETE).write_text(checkpoint_files.record_text(record))


def test_weights_trained_at_any_layout_are_exported_without_padding(trained: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    export(trained, tmp_path / "exported", Options(), lines.append)
    stored, exported = load_all(trained), weights(tmp_path / "exported")
    assert exported["model.embed_tokens.weight"].shape == (1000, 64)
    assert torch.equal(exported["lm_head.weight"], stored["output_layer.weight"][:1000])
    gate_up = stored["decoder.layers.mlp.linear_fc1.weight"][3]
    assert torch.equal(exported["model.layers.3.mlp.gate_proj.weight"], gate_up[:96])
    assert torch.equal(exported["model.layers.3.mlp.up_proj.weight"], gate_up[96:])
    qkv = stored["decoder.layers.self_attention.linear_qkv.weight"][2].view(
        2, 64, 64
    )  # 2 groups of 2 + 1 + 1 heads
    assert torch.equal(exported["model.layers.2.self_attn.k_proj.weight"], qkv[:, 32:48].reshape(32, 64))
    assert lines[-1].endswith("has no tokenizer files. To add them, export with --tokenizer")
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "| iteration | 2 |" in card
    assert "| training tokens | 512 (8 samples of 64) |" in card
    assert "| data | `low` |" in card
    assert "| documents |" not in card
    assert str(tmp_path.parent) not in card


def test_the_card_tells_how_a_text_begins_after_separate_documents(trained: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(trained, tmp_path / trained.name)
    rewrite_record(checkpoint, lambda record: record["data"].update(reset_attention_mask=True))
    export(checkpoint, tmp_path / "exported", Options(), ignore)
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "| documents | separate: a text begins with its first token, without a special token" in card


@pytest.mark.parametrize(("original", "is_reported"), [(16, True), (32, False)])
def test_a_factor_that_older_transformers_would_ignore_is_reported(
    original: int, is_reported: bool, copied: Path, tmp_path: Path
) -> None:
    """transformers 4.51.3 computes 128 / 16 in place of the factor 4, and 4.56.2 does not."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    rewrite_record(copied, lambda record: record["model"].update(rope_scaling=scaling))
    lines: list[str] = []
    export(copied, tmp_path / "exported", Options(), lines.append)
    [warning] = [line for line in lines if line.startswith("warning:")] or [""]
    assert ("= 128 / 16 = 8, but this model's is 4. For these versions, set" in warning) == is_reported
    assert ("max_position_embeddings = 64 in config.json" in warning) == is_reported


def test_a_checkpoint_of_megatron_lm_is_exported(trained: Path, tmp_path: Path) -> None:
    export(trained, tmp_path / "ours", Options(), ignore)
    theirs = as_megatron_lm(trained, tmp_path)
    message = refused(theirs, tmp_path / "theirs")
    assert "does not say how many of its 1024 embedding rows are padding" in message
    export(theirs, tmp_path / "theirs", Options(vocab_size=1000), ignore)
    assert_same_weights(tmp_path / "theirs", tmp_path / "ours")
    ours, other = (json.loads((tmp_path / name / "config.json").read_bytes()) for name in ("ours", "theirs"))
    assert other == ours


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"layer_spec": "layers.py:make"}, "model.layer_spec = layers.py:make (it needs null)"),
        ({"add_bias_linear": True}, "model.add_qkv_bias = false (it needs true)"),
        ({"swiglu": False, "activation_func": "gelu"}, "model.swiglu = false (it needs true)"),
        ({"normalization": "LayerNorm"}, "model.normalization = LayerNorm (it needs RMSNorm)"),
    ],
)
def test_what_no_family_can_express_is_refused_by_its_key(
    copied: Path, tmp_path: Path, model: dict[str, Any], message: str
) -> None:
    rewrite_record(copied, lambda record: record["model"].update(model, add_qkv_bias=False))
    assert message in refused(copied, tmp_path / "exported", Options(family="llama"))
    assert "cannot express" in refused(copied, tmp_path / "exported")


def test_a_model_without_the_tensors_of_its_record_is_refused(copied: Path, tmp_path: Path) -> None:
    rewrite_record(copied, lambda record: record["model"].update(num_layers=3))
    message = refused(copied, tmp_path / "exported")
    assert "has the shape [4, 64], not [3, 64]" in message
    rewrite_record(copied, lambda record: record["model"].update(num_layers=4, qk_layernorm=True))
    message = refused(copied, tmp_path / "exported", Options(family="qwen3"))
    assert "has no tensor decoder.layers.self_attention.q_layernorm.weight" in message


def test_tensors_without_a_place_in_the_family_are_refused(copied: Path, tmp_path: Path) -> None:
    rewrite_record(copied, lambda record: record["model"].update(untie_embeddings_and_output_weights=False))
    assert "has tensors that LlamaForCausalLM does not: output_layer.weight" in refused(
        copied, tmp_path / "out"
    )


def test_damaged_checkpoints_are_refused(copied: Path, tmp_path: Path) -> None:
    file = copied / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    assert re.search(r"__0_0.distcp has [\d,]+ bytes, not", refused(copied, tmp_path / "exported"))
    file.write_bytes(bytes(len(content)))
    assert "embed" in (message := refused(copied, tmp_path / "exported"))
    assert "cannot be read" in message
    assert "Name an iter_... directory" in refused(copied.parent, tmp_path / "exported")


def test_no_code_in_a_file_is_run(copied: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Attack:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {marker}",)

    index = checkpoint_files.describe_file(copied / ".metadata")
    torch.save({"x": Attack()}, tmp_path / "attack")
    file = copied / "__0_0.distcp"
    attack = (tmp_path / "attack").read_bytes()
    file.write_bytes(attack + bytes(file.stat().st_size - len(attack)))
    assert "cannot be read" in refused(copied, tmp_path / "exported")
    assert not marker.exists()
    assert checkpoint_files.describe_file(copied / ".metadata") == index


def test_the_destination_must_be_new(imported: Path, tmp_path: Path) -> None:
    (tmp_path / "exported").mkdir()
    assert "exists already" in refused(imported, tmp_path / "exported")
    with pytest.raises(TrainerError, match=r"there is no directory .*nowhere\. Create it first"):
        export(imported, tmp_path / "nowhere" / "exported", Options(), ignore)


def test_the_tokenizer_is_included_with_its_end_of_document(imported: Path, tmp_path: Path) -> None:
    options = Options(tokenizer=save_tokenizer(tmp_path), eos_token="<eod>")
    export(imported, tmp_path / "exported", options, ignore)
    config = json.loads((tmp_path / "exported" / "config.json").read_bytes())
    generation = json.loads((tmp_path / "exported" / "generation_config.json").read_bytes())
    assert config["eos_token_id"] == generation["eos_token_id"] == VOCAB_SIZE - 1
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer("t5 t7")["input_ids"] == [5, 7]
    assert tokenizer.eos_token_id == VOCAB_SIZE - 1


def test_the_chat_template_of_the_training_replaces_that_of_the_tokenizer(
    imported: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    (directory := tmp_path / "tokenizer").mkdir()
    save_tokenizer(directory).rename(directory / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eod>",
        "chat_template": "its own",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (template := tmp_path / "chats.jinja").write_text("{{ messages[0].content }}<eod>")
    export(imported, tmp_path / "exported", Options(tokenizer=directory, chat_template=template), ignore)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.chat_template == template.read_text()
    absent = Options(tokenizer=directory, chat_template=tmp_path / "absent.jinja")
    assert "cannot read the chat template" in refused(imported, tmp_path / "again", absent)


def test_a_chat_template_chosen_by_name_becomes_the_default_and_documents_end_texts(
    imported: Path, tmp_path: Path
) -> None:
    """The directory has no config.json. The end of a turn and the end of a document are different tokens."""
    from transformers import AutoTokenizer

    (directory := tmp_path / "tokenizer").mkdir()
    save_tokenizer(directory).rename(directory / "tokenizer.json")
    templates = [
        {"name": name, "template": f"{name}: {{{{ messages[0].content }}}}"} for name in ("default", "tools")
    ]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "t7",
        "chat_template": templates,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    options = Options(tokenizer=directory, chat_template_name="tools", eos_token="<eod>")
    export(imported, tmp_path / "exported", options, ignore)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "exported" / name).read_bytes())["eos_token_id"] == [VOCAB_SIZE - 1, 7]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    chat = [{"role": "user", "content": "t5"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "tools: t5"
    absent = Options(tokenizer=directory, chat_template_name="rag")
    assert "no chat template 'rag'" in refused(imported, tmp_path / "again", absent)


def test_links_to_files_elsewhere_are_not_exported(imported: Path, tmp_path: Path) -> None:
    """A downloaded directory could name a private file, which would be published with the export."""
    secret, elsewhere = tmp_path / "id_rsa", tmp_path / "elsewhere"
    secret.write_text("private")
    (directory := tmp_path / "tokenizer").mkdir()
    (elsewhere / "more").mkdir(parents=True)
    (elsewhere / "more/tool.jinja").write_text("private")
    tokenizer = save_tokenizer(directory).rename(directory / "tokenizer.json")
    (directory / "chat_template.jinja").symlink_to(secret)
    (directory / "additional_chat_templates").symlink_to(elsewhere / "more")
    for named in (directory, tokenizer):
        message = refused(imported, tmp_path / "exported", Options(tokenizer=named, eos_token="<eod>"))
        assert f"{directory}/chat_template.jinja leads to {secret}" in message
        assert f"tool.jinja leads to {elsewhere}/more/tool.jinja" in message


def test_links_of_the_hubs_cache_are_followed(imported: Path, tmp_path: Path) -> None:
    (snapshot := tmp_path / "models--gpt/snapshots/5f91").mkdir(parents=True)
    (blobs := tmp_path / "models--gpt/blobs").mkdir()
    save_tokenizer(tmp_path).rename(blobs / "0a1b")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/0a1b")
    (blobs / "2c3d").write_text("{{ messages }}")
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/2c3d")
    (tmp_path / "latest").symlink_to(snapshot)
    for number, named in enumerate((snapshot, tmp_path / "latest", snapshot / "tokenizer.json")):
        export(imported, tmp_path / str(number), Options(tokenizer=named, eos_token="<eod>"), ignore)
        assert (tmp_path / str(number) / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_tokenizer_larger_than_the_embedding_is_refused(imported: Path, tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path, VOCAB_SIZE + 1)
    message = refused(imported, tmp_path / "exported", Options(tokenizer=path))
    assert f"has IDs up to {VOCAB_SIZE}, but the embedding has {VOCAB_SIZE} rows" in message
    path = save_tokenizer(tmp_path)
    message = refused(imported, tmp_path / "exported", Options(tokenizer=path, eos_token="<end>"))
    assert "has no token '<end>'" in message


def test_a_check_that_fails_leaves_nothing(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def different(*args: Any) -> str:
        raise TrainerError("the logits of the export differ")

    monkeypatch.setattr(check, "compare", different)
    assert "logits" in refused(imported, tmp_path / "exported", Options(check=True))


def difference(checkpoint: Path, exported: Path) -> str:
    """The result of the check, in the process of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return check.compare(read_source(checkpoint), exported)


def test_the_check_finds_a_wrong_weight(imported: Path, tmp_path: Path) -> None:
    source = tmp_path / "exported"
    export(imported, source, Options(), ignore)
    compared = transformers_process().submit(difference, imported, source).result()
    assert "differ from the checkpoint's by at most" in compared
    from safetensors.torch import save_file

    tensors = weights(source)
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1.0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrainerError, match="the logits of the export differ from the checkpoint's"):
        transformers_process().submit(difference, imported, source).result()


WITH_SMALL_FILES = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 1024, 100 * 1024))
runpy.run_module("trainer.huggingface", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("direction", ["export", "import"])
def test_a_full_disk_leaves_nothing(direction: str, imported: Path, tmp_path: Path) -> None:
    """The limit of a file's size stands in for a full disk."""
    source = imported if direction == "export" else imported.parents[1] / "original"
    ended = run_python("-c", WITH_SMALL_FILES, direction, str(source), "--to", f"{tmp_path}/out")
    assert ended.returncode == 2
    reason = f"{tmp_path}/out cannot be written (File too large)"
    assert ended.stderr == f"{reason}; what was written of it is removed\n"
    assert not list(tmp_path.iterdir())


AFTER_A_MISTAKE = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
from trainer.huggingface import __main__
hide_gpus = __main__.device.hide_gpus
def reported():
    print("transformers" in sys.modules)
    hide_gpus()
__main__.device.hide_gpus = reported
print(__main__.main(), repr(os.environ["CUDA_VISIBLE_DEVICES"]))
"""


def test_conversions_hide_the_gpus_before_any_library_sees_them(tmp_path: Path) -> None:
    """transformers asks CUDA for its devices before the trainer computes its logits on the CPU."""
    words = ("average", str(tmp_path / "missing"), "--last", "2", "--to", str(tmp_path / "out"))
    ended = run_python("-c", AFTER_A_MISTAKE, *words)
    assert ended.stdout == "False\n2 ''\n", ended.stderr


SLOWLY = """
import sys, time
from trainer.huggingface import __main__, exporting, transforms
slow = transforms.to_huggingface
def to_huggingface(*args):
    print("begun", flush=True)
    time.sleep(0.2)
    return slow(*args)
exporting.to_huggingface = to_huggingface
sys.exit(__main__.main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_kill_leaves_nothing_at_the_destination(
    imported: Path, tmp_path: Path, number: signal.Signals
) -> None:
    log, folder = tmp_path / "log", tmp_path / "exports"
    folder.mkdir()
    arguments = ("-c", SLOWLY, "export", str(imported), "--to", str(folder / "out"))
    process = ForkedPython(arguments, os.environ, log)
    while not (log.exists() and "begun" in log.read_text()):
        assert process.poll() is None, log.read_text()
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(number)
    assert process.wait(timeout=PATIENCE_S) != 0
    assert not (folder / "out").exists()
    if number == signal.SIGTERM:
        assert not list(folder.iterdir())
    export(imported, folder / "out", Options(), ignore)
    assert (folder / "out" / "model.safetensors").exists()
