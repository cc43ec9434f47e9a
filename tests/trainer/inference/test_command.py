"""`python -m trainer.inference` and `hpcgen generate` with a checkpoint of two tensor-parallel ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.foreign import as_megatron_lm
from tests.trainer.forked import run_ranks
from tests.trainer.runs import LLAMA, ROOT, environment, finished, free_port, gpt_config
from trainer.contract.errors import TrainerError
from trainer.contract.files.checkpoint_files import COMMON, COMPLETE, METADATA, record_text
from trainer.distributed import groups
from trainer.inference import Options, generate, load_model
from trainer.inference.arguments import read_prompts
from trainer.inference.checkpoint import find_checkpoint, inference_config

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore"),  # Megatron-Core warns about its own defaults
]

PROMPTS = ["A", "in the beginning", "x = 1"]
OPTIONS = ("--tokenizer", "bytes", "--max-new-tokens", "8", "--device", "cpu")


@pytest.fixture(scope="module")
def run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with one checkpoint, and prompts."""
    directory = tmp_path_factory.mktemp("run")
    config = gpt_config(corpus, directory, LLAMA | {"num_layers": 3}) | {"world_size": 2}
    config["parallelism"] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    config["training"]["train_iters"] = 2
    finished(config)
    lines = (json.dumps({"prompt": prompt}) for prompt in PROMPTS)
    (directory / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    yield directory
    if torch.distributed.is_initialized():
        groups.finalize()


@pytest.fixture(scope="module")
def expected(run: Path) -> list[dict[str, Any]]:
    """The completions of a notebook, which is a single process."""
    model, tokenizer = load_model(run, tokenizer="bytes", device="cpu")
    completions = list(generate(model, tokenizer, PROMPTS, Options(max_new_tokens=8)))
    assert [completion.prompt for completion in completions] == PROMPTS
    return [vars(completion) for completion in completions]


def generated(run: Path, *arguments: str, world_size: int = 1) -> list[subprocess.CompletedProcess[str]]:
    """The ranks of `python -m trainer.inference`, which have ended."""
    command = ("-m", "trainer.inference", str(run), *OPTIONS, *arguments)
    port = free_port()
    return run_ranks(command, [environment(rank, world_size, port) for rank in range(world_size)])


@pytest.mark.parametrize("arguments", [(), ("--pipeline-model-parallel-size", "2")], ids=["TP2", "PP2"])
def test_two_ranks_generate_what_one_does(
    run: Path, expected: list[dict[str, Any]], arguments: tuple[str, ...]
) -> None:
    given = ("--prompts", str(run / "prompts.jsonl"), "--json", *arguments)
    ranks = generated(run, *given, world_size=2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    assert [json.loads(line) for line in ranks[0].stdout.splitlines()] == expected
    assert ranks[1].stdout == ""


def test_replicas_share_the_prompts_of_a_file(
    run: Path, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    output = tmp_path / "new/texts.jsonl"
    given = ("--prompts", str(run / "prompts.jsonl"), "--output", str(output))
    given = (*given, "--tensor-model-parallel-size", "1", "--batch-size", "1")
    ranks = generated(run, *given, world_size=2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    assert [json.loads(line) for line in output.read_text().splitlines()] == expected
    assert ranks[0].stdout == ranks[1].stdout == ""
    assert f"texts: {output}\n3 prompts, 24 new tokens in " in ranks[0].stderr
    assert list(output.parent.iterdir()) == [output]


def test_hpcgen_generate_writes_json_lines_into_a_pipe(
    run: Path, expected: list[dict[str, Any]], stand_in: str
) -> None:
    command = [stand_in, "-m", "hpcgen", "generate", "--checkpoint", str(run), *OPTIONS]
    given = (run / "prompts.jsonl").read_text()
    done = subprocess.run(
        [*command, "--prompts", "-"], input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected
    assert done.stderr.startswith("3 prompts, 24 new tokens in ")


def test_lines_that_are_typed_are_continued(run: Path, expected: list[dict[str, Any]], stand_in: str) -> None:
    typed = subprocess.run(
        [stand_in, "-m", "trainer.inference", str(run), *OPTIONS],
        cwd=ROOT,
        env=environment(0, 1, "0"),
        input=f"{PROMPTS[0]}\n{'x' * 64}\n{PROMPTS[2]}\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert typed.returncode == 0, typed.stderr
    texts = [one["text"] for one in expected]
    assert typed.stdout.startswith(f"> {texts[0]}\n> prompt 1 has 64 tokens")
    assert typed.stdout.endswith(f"> {texts[2]}\n> \n")


def test_a_prompt_that_fills_the_model_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "x" * 64}) + "\n")
    message = refused(run, "--prompts", str(tmp_path / "long.jsonl"))
    assert message.startswith("trainer: prompt 1 has 64 tokens, but the model has 64 positions")


def test_prompts_are_read_before_the_weights(copy: Path, tmp_path: Path) -> None:
    for shard in copy.rglob("*.distcp"):
        shard.unlink()
    (tmp_path / "bad.jsonl").write_text("not JSON\n")
    assert "bad.jsonl:1: not JSON" in refused(copy, "--prompts", str(tmp_path / "bad.jsonl"))


def test_a_layout_for_other_ranks_is_refused(run: Path) -> None:
    message = refused(run, "--prompts", str(run / "prompts.jsonl"), "--tensor-model-parallel-size", "2")
    assert message.startswith("trainer: TP x PP = 2 x 1 = 2, but the number of ranks is 1 ")


def refused(run: Path, *arguments: str) -> str:
    """The one line that the program writes."""
    [done] = generated(run, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


def test_weights_are_converted_to_another_precision(run: Path) -> None:
    exact, _ = load_model(run / "checkpoints", tokenizer="bytes", device="cpu")
    rounded, _ = load_model(
        run / "checkpoints/iter_0000002", tokenizer="bytes", device="cpu", precision="bf16"
    )
    pairs = list(zip(exact.module.parameters(), rounded.module.parameters(), strict=True))
    assert len(pairs) > 10
    for one, other in pairs:
        assert other.dtype == torch.bfloat16
        assert torch.equal(one.bfloat16(), other)


def test_a_checkpoint_of_megatron_lm_is_loaded(run: Path, tmp_path: Path) -> None:
    """Its arguments describe the model, but not how many of the rows are padding: the tokenizer does."""
    path = as_megatron_lm(run / "checkpoints/iter_0000002", tmp_path)
    model, tokenizer = load_model(path.parent, tokenizer="bytes", device="cpu")
    assert model.vocab_size == tokenizer.size < (model.config.model.padded_vocab_size or 0)
    ours, _ = load_model(run, tokenizer="bytes", device="cpu")
    tokens = tokenizer.encode(PROMPTS[1])
    assert torch.equal(model.logits(tokens), ours.logits(tokens)[:, : tokenizer.size])
    common = torch.load(path / COMMON, weights_only=False)
    torch.save({"iteration": common["iteration"]}, path / COMMON)
    with pytest.raises(TrainerError, match=f"{path} does not describe its model: neither"):
        load_model(path, tokenizer="bytes", device="cpu")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints."""
    return shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")


def test_a_directory_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"no such directory. Name a run directory"):
        find_checkpoint(tmp_path / "missing")
    with pytest.raises(TrainerError, match=f"{tmp_path} has no complete checkpoint. Name a run directory"):
        find_checkpoint(tmp_path)
    (tmp_path / "iter_new").mkdir()
    with pytest.raises(TrainerError, match="iter_new is not a checkpoint"):
        find_checkpoint(tmp_path / "iter_new")


def test_an_incomplete_checkpoint_is_refused(copy: Path) -> None:
    newer = shutil.copytree(copy / "iter_0000002", copy / "iter_0000003")
    (newer / COMPLETE).unlink()
    assert find_checkpoint(copy).iteration == 2
    with pytest.raises(TrainerError, match="iter_0000003 is not a complete checkpoint: COMPLETE is missing"):
        find_checkpoint(newer)
    (copy / "iter_0000002" / METADATA).unlink()
    with pytest.raises(
        TrainerError, match=f"iter_0000002 is not a complete checkpoint: {METADATA} is missing"
    ):
        find_checkpoint(copy)
    shutil.rmtree(copy / "iter_0000002")
    with pytest.raises(
        TrainerError, match=r"has no complete checkpoint. iter_0000003 is incomplete: COMPLETE"
    ):
        find_checkpoint(copy)


def test_a_record_that_others_can_write_names_only_code_of_this_user(copy: Path, tmp_path: Path) -> None:
    """In a run that a group shares, any member can replace the record."""
    code = tmp_path / "planted.py"
    code.write_text("raise SystemExit('the code ran')\n")
    record = copy / "iter_0000002" / COMPLETE
    content = json.loads(record.read_text())
    content["model"]["layer_spec"] = f"{code}:layers"
    del content["checksum"]
    record.write_text(record_text(content))
    record.chmod(0o660)
    for place, mode in ((code, 0o664), (tmp_path, 0o2770)):
        before = place.stat().st_mode
        place.chmod(mode)
        with pytest.raises(TrainerError, match=rf"not run: .* = {code}:layers. {place} has"):
            load_model(copy, tokenizer="bytes", device="cpu")
        place.chmod(before)
    with pytest.raises((TrainerError, SystemExit), match="the code ran"):
        load_model(copy, tokenizer="bytes", device="cpu")
    record.chmod(0o640)
    tmp_path.chmod(0o2770)
    with pytest.raises((TrainerError, SystemExit), match="the code ran"):
        load_model(copy, tokenizer="bytes", device="cpu")


def test_damaged_tensors_are_refused(copy: Path) -> None:
    index = copy / "iter_0000002/.metadata"
    index.write_bytes(b"x" * index.stat().st_size)
    with pytest.raises(TrainerError, match=r"cannot be loaded .* hpcgen checkpoint inspect --verify"):
        load_model(copy, tokenizer="bytes", device="cpu")


def test_a_layout_that_cannot_split_the_model_is_refused(run: Path) -> None:
    found = find_checkpoint(run)
    with pytest.raises(
        TrainerError, match=r"tensor_model_parallel_size = 4 does not divide model\.num_query_groups = 2"
    ):
        inference_config(found, device="cpu", precision=None, tensor_parallel=4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no prompts"),
        (b'{"prompt": "a"}\n{"text": "b"}\n', 'prompts:2: expected a line such as {"prompt"'),
        (b'{"prompt": "a"}\n\n{"prompt": \n', "prompts:3: not JSON"),
        (b'{"prompt": "a"}\n\xff', r"prompts:2: not UTF-8 text \(invalid start byte at byte 0 of the line\)"),
        (
            b'{"prompt": "a\\udc80"}',
            r"prompts:1: the prompt has U\+DC80 at character 2, which is half of a",
        ),
        (b"{}\n[]\n" + b"{}\n" * 12, r"(?s)prompts:1: .*prompts:2: .*prompts:10: [^\n]*\nand 4 lines more"),
    ],
)
def test_a_file_without_prompts_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_bytes(content)
    with pytest.raises(TrainerError, match=message):
        read_prompts(str(tmp_path / "prompts"))
    with pytest.raises(TrainerError, match="missing: No such file or directory"):
        read_prompts(str(tmp_path / "missing"))


def test_only_a_newline_ends_a_line_of_a_file_with_prompts(tmp_path: Path) -> None:
    """JSON strings may have other line separators as they are."""
    prompts = [
        "a\u2028b",
        "a\u2029b",
        "a\x85b",
        "a\x7fb",
        "\ufeffa",
        "a\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    ]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    (tmp_path / "prompts").write_bytes("\r\n".join(lines).encode())
    assert read_prompts(str(tmp_path / "prompts")) == prompts
