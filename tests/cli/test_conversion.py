"""hpcgen checkpoint export and import, and run files for imported models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hpcgen.config.loader import load_run
from tests.cli.command import hpcgen, listing
from tests.patience import PATIENCE_S, wait_until
from tests.trainer.huggingface.models import assert_same_weights, save_model, save_tokenizer, weights
from tests.trainer.huggingface.tokenizers_of_models import KINDS
from tests.trainer.runs import ROOT
from tests.user_programs import write_user_programs

pytestmark = pytest.mark.process

SIZE = 300
PROGRAMS = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def _forked_conversions(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions that a test starts in this process are forks."""
    monkeypatch.setattr(sys, "executable", stand_in)


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with a tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel  # here, since it takes seconds

    directory = tmp_path_factory.mktemp("hf") / "tiny-gpt2"
    with torch.random.fork_rng():
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=SIZE, n_positions=128))
    model.save_pretrained(directory)
    save_tokenizer(directory, SIZE)
    settings = {"eos_token": {"content": "<eod>"}, "bos_token": "t1", "chat_template": "{{ bos_token }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_a_model_goes_in_and_out_of_a_run(hf_dir: Path, workplace: Path) -> None:
    begun = hpcgen("init", "--from-hf", hf_dir, "--cluster", "local")
    assert begun.status == 0, begun.stderr
    assert f"hpcgen checkpoint import {hf_dir} --to run-weights" in begun.stderr
    config = load_run(workplace / "run.yaml").config
    assert (config.model.num_layers, config.model.seq_length, config.model.vocab_size) == (2, 128, SIZE)
    assert config.data.tokenizer.eod_token == "<eod>"
    assert config.data.corpus is not None
    assert config.data.corpus.source.directory == "corpus"
    missing = hpcgen("validate", "-c", "run.yaml", "--set", "data.mock=true")
    assert missing.status == 2
    assert "checkpoint.load = run-weights has no checkpoint for stage train" in missing.stderr

    imported = hpcgen("checkpoint", "import", hf_dir, "--to", "run-weights")
    assert imported.status == 0, imported.stderr
    assert f'checkpoint: {{load: "{workplace}/run-weights", finetune: true}}' in imported.stderr
    assert hpcgen("validate", "-c", "run.yaml", "--set", "data.mock=true").status == 0
    refused = hpcgen(
        "validate", "-c", "run.yaml", "--set", "data.mock=true", "--set", "checkpoint.finetune=false"
    )
    assert refused.status == 2
    assert "checkpoint.finetune = false does not fit run-weights/iter_0000000" in refused.stderr.replace(
        f"{workplace}/", ""
    )
    shown = hpcgen("checkpoint", "inspect", "run-weights", "--verify")
    assert "0, weights only" in shown.stdout
    assert f"from {hf_dir} (gpt2)" in shown.stdout
    listed = hpcgen("checkpoint", "list", "run-weights")
    assert f"checkpoint.load: {workplace}/run-weights/iter_0000000" in listed.stderr

    text = (workplace / "run.yaml").read_text()
    (workplace / "wrong.yaml").write_text(text.replace("eod_token:", "eod_tokens:"))
    refused = hpcgen("checkpoint", "export", "run-weights", "--to", "exported", "-c", "wrong.yaml")
    assert refused.status == 2
    assert "data.tokenizer.eod_tokens = " in refused.stderr
    exported = hpcgen("checkpoint", "export", "run-weights", "--to", "exported", "-c", "run.yaml")
    assert exported.status == 0, exported.stderr
    assert_same_weights(workplace / "exported", hf_dir)
    assert json.loads((workplace / "exported/config.json").read_bytes())["eos_token_id"] == SIZE - 1


def test_paths_to_paste_are_valid_in_a_run_file(
    hf_dir: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run file refuses paths with `..`."""
    shutil.copytree(hf_dir, workplace / "model")
    (workplace / "inside").mkdir()
    monkeypatch.chdir(workplace / "inside")
    assert hpcgen("init", "--from-hf", "../model", "--cluster", "local").status == 0
    tokenizer = load_run(workplace / "inside/run.yaml").config.data.tokenizer
    assert tokenizer.tokenizer_file == str(workplace / "model/tokenizer.json")
    imported = hpcgen("checkpoint", "import", "../model", "--to", "../weights")
    assert f'load: "{workplace}/weights"' in imported.stderr
    listed = hpcgen("checkpoint", "list", "../weights")
    assert f"checkpoint.load: {workplace}/weights/iter_0000000" in listed.stderr


def test_the_example_of_continued_pretraining_runs(hf_dir: Path, workplace: Path, stand_in: str) -> None:
    programs = write_user_programs(workplace / "programs", stand_in)
    (workplace / "corpus").mkdir()
    lines = [
        json.dumps({"text": " ".join(f"t{(number * 7 + step) % 290}" for step in range(60))})
        for number in range(200)
    ]
    (workplace / "corpus" / "text.jsonl").write_text("\n".join(lines))
    environment = {**os.environ, "PATH": f"{programs}:{PROGRAMS}:{os.environ['PATH']}"}
    command = [ROOT / "examples/continued_pretraining.sh", hf_dir, "corpus", "work"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    before, after = weights(hf_dir), weights(workplace / "work/exported")
    assert before.keys() == after.keys()
    changed = (after["transformer.wte.weight"] - before["transformer.wte.weight"]).abs().max()
    assert 0 < changed < 1e-3  # 4 steps at the learning rate of the run file
    settings = "tokenizer_config.json"
    assert (workplace / "work/exported" / settings).read_bytes() == (hf_dir / settings).read_bytes()
    losses = [
        json.loads(line) for line in (workplace / "work/runs/run/metrics.jsonl").read_text().splitlines()
    ]
    assert [event["iteration"] for event in losses if event["event"] == "step"] == [1, 2, 3, 4]


def as_transformers_reads(directory: Path) -> dict[str, Any]:
    """Special tokens, chat templates, IDs of a text, and what ends, begins and pads a generated text."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = AutoConfig.from_pretrained(directory)
    generation = (
        GenerationConfig.from_pretrained(directory)
        if (directory / "generation_config.json").exists()
        else GenerationConfig.from_model_config(config)
    )
    messages = [{"role": "user", "content": "the fox"}]
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {
        "special": tokenizer.special_tokens_map,
        "all special": tokenizer.all_special_tokens,
        "templates": tokenizer.chat_template,
        "chat": tokenizer.chat_template and tokenizer.apply_chat_template(messages, tokenize=False),
        "tokens": tokenizer("the quick <|tool|> fox")["input_ids"],
        "config": {name: getattr(config, name) for name in ids},
        "generation": {name: getattr(generation, name) for name in (*ids, "temperature", "do_sample")},
    }


@pytest.mark.parametrize("case", KINDS)
def test_an_export_has_the_special_tokens_and_the_chat_template_of_its_origin(
    case: str, workplace: Path
) -> None:
    """As the guide continues the pretraining of a model, without the training."""
    source = save_model(case, workplace / "source")
    KINDS[case](source)
    for arguments in (
        ("init", "run.yaml", "--from-hf", source, "--cluster", "local"),
        ("checkpoint", "import", source, "--to", "weights"),
        ("checkpoint", "export", "weights", "--to", "by-run-file", "-c", "run.yaml"),
        ("checkpoint", "export", "weights", "--to", "by-directory", "--tokenizer", source),
    ):
        ended = hpcgen(*arguments)
        assert ended.status == 0, ended.stderr
        assert "warning" not in ended.stderr
        assert "added" not in ended.stderr
    expected = as_transformers_reads(source)
    assert expected["special"].keys() >= {"bos_token", "eos_token"}
    for exported in ("by-run-file", "by-directory"):
        assert as_transformers_reads(workplace / exported) == expected


def test_an_export_has_the_chat_template_that_the_run_file_names(hf_dir: Path, workplace: Path) -> None:
    (workplace / "chats.jinja").write_text("{{ messages[0].content }}")
    for arguments in (
        ("init", "run.yaml", "--from-hf", hf_dir, "--cluster", "local"),
        ("checkpoint", "import", hf_dir, "--to", "weights"),
    ):
        assert hpcgen(*arguments).status == 0
    run = yaml.safe_load((workplace / "run.yaml").read_text())
    chats = {"directory": "c", "source": {"directory": "s"}, "chat": {"chat_template_file": "chats.jinja"}}
    run["data"] = {"tokenizer": run["data"]["tokenizer"], "corpus": chats}
    (workplace / "run.yaml").write_text(yaml.safe_dump(run))
    ended = hpcgen("checkpoint", "export", "weights", "--to", "exported", "-c", "run.yaml")
    assert ended.status == 0, ended.stderr
    assert (workplace / "exported/chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_what_an_export_cannot_keep_is_said(hf_dir: Path, workplace: Path) -> None:
    """A tokenizer without settings, an end of documents that ends no text in the source, and IDs without a row."""
    source = Path(shutil.copytree(hf_dir, workplace / "source"))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7], "pad_token_id": SIZE}))
    assert hpcgen("checkpoint", "import", source, "--to", "weights").status == 0
    (source / "tokenizer_config.json").unlink()
    tokenizer = ("--tokenizer", source / "tokenizer.json", "--eod-token", "<eod>")
    ended = hpcgen("checkpoint", "export", "weights", "--to", "exported", *tokenizer)
    assert ended.status == 0, ended.stderr
    assert f"left out eos_token_id = 50256 of {source}/config.json: not an ID below {SIZE}" in ended.stderr
    assert f"left out pad_token_id = {SIZE} of {source}/generation_config.json" in ended.stderr
    assert f"added {SIZE - 1} (<eod>), the end of a document, to eos_token_id = [5, 7]" in ended.stderr
    assert f"warning: {source} has no tokenizer_config.json" in ended.stderr
    generation = json.loads((workplace / "exported/generation_config.json").read_bytes())
    assert generation == {"eos_token_id": [SIZE - 1, 5, 7]}


def test_errors_of_the_conversion_are_passed_on(hf_dir: Path, workplace: Path) -> None:
    before = listing(workplace)
    ended = hpcgen("checkpoint", "import", "nowhere", "--to", "weights")
    assert (ended.status, ended.stdout) == (2, "")
    assert ended.stderr == (
        "nowhere is not a directory. Name a local copy of a Hugging Face model, "
        "from hf download MODEL --local-dir DIR\n"
    )
    ended = hpcgen("checkpoint", "export", "nowhere", "--to", "exported")
    assert ended.status == 2
    assert listing(workplace) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from-hf", "nowhere"), "nowhere/config.json: no such file; name a local directory"),
        (
            ("--from-hf", "nowhere", "--preset", "tiny"),
            "--from-hf and --preset both set the shape of the model",
        ),
    ],
)
def test_init_from_something_else_writes_nothing(
    workplace: Path, arguments: tuple[str, ...], message: str
) -> None:
    ended = hpcgen("init", *arguments)
    assert ended.status == 2
    assert message in ended.stderr
    assert listing(workplace) == {}


def test_init_refuses_a_tokenizer_that_does_not_fit(hf_dir: Path, workplace: Path) -> None:
    (workplace / "model").mkdir()
    (workplace / "model/config.json").write_bytes((hf_dir / "config.json").read_bytes())
    ended = hpcgen("init", "--from-hf", "model")
    assert "has neither tokenizer.json nor vocab.json with merges.txt" in ended.stderr
    save_tokenizer(workplace / "model", SIZE + 1)
    ended = hpcgen("init", "--from-hf", "model")
    assert (ended.status, (workplace / "run.yaml").exists()) == (2, False)
    assert "the tokenizer has IDs up to 300, but the embedding has 300 rows" in ended.stderr


def test_a_conversion_ends_with_its_killed_parent(tmp_path):
    start = (
        "import os, signal, subprocess, sys\n"
        "from hpcgen.slurm.processes import end_with_parent\n"
        "child = subprocess.Popen(['sleep', '300'], preexec_fn=end_with_parent)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", start], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    child = Path("/proc", done.stdout.strip(), "stat")
    wait_until(lambda: not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z")
