"""Answers of the model in training: those of its checkpoint, in every layout, and training does not notice them."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.data.chat_corpora import write_tokenizer
from tests.selection import select
from tests.trainer.chat_pairs import chat_config, write_chats
from tests.trainer.forked import ROOT
from tests.trainer.runs import LLAMA, MOE, TWO_LAYERS, Run, finished, gpt_config, run
from trainer.contract.errors import Exit

pytestmark = pytest.mark.process

ALPHABET = b"abcdefghijklmnopqrstuvwxyz"
MODEL = LLAMA | {"num_layers": 2, "seq_length": 64, "vocab_size": 257}
PROMPTS = ("abc", "klmnop", "xyza")
STEPS = 40


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a pair whose documents repeat the alphabet."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path_factory.mktemp("alphabet") / "letters"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for start in range(40):
        letters = (ALPHABET * 6)[start % 26 :][:120]
        builder.add_document(numpy.frombuffer(letters, numpy.uint8).astype(numpy.uint16), [120])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def prompts_file(directory: Path, *prompts: str) -> Path:
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


@pytest.fixture
def asking(alphabet: str, tmp_path: Path) -> dict[str, Any]:
    """A run that answers PROMPTS before the first step, after half of them and at the end."""
    config = gpt_config(alphabet, tmp_path / "run", MODEL)
    config["training"] |= {"train_iters": STEPS, "eval_interval": STEPS // 2, "eval_iters": 1}
    config["optimizer"] |= {"lr": 1e-2, "lr_decay_iters": 2 * STEPS}
    config["checkpoint"] = {"save_interval": STEPS // 2}
    config["answers"] = {
        "prompts": str(prompts_file(tmp_path, *PROMPTS)),
        "tokenizer": "bytes",
        "max_new_tokens": 8,
    }
    return config


def answers(found: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (found.directory / "answers.jsonl").read_text().splitlines()]


def texts(found: Run) -> list[tuple[int, str, str]]:
    return [(each["iteration"], each["prompt"], each["answer"]) for each in answers(found)]


def changed(config: dict[str, Any], directory: Path, **sections: Any) -> dict[str, Any]:
    copied = copy.deepcopy(config) | {"run_dir": str(directory)}
    for section, values in sections.items():
        copied[section] = copied[section] | values if isinstance(values, dict) else values
    return copied


def test_answers_are_those_of_the_checkpoints_and_change_nothing(
    asking: dict[str, Any], tmp_path: Path
) -> None:
    found = finished(asking)
    lines = answers(found)
    assert [(each["iteration"], each["number"], each["prompt"]) for each in lines] == [
        (iteration, number, prompt)
        for iteration in (0, STEPS // 2, STEPS)
        for number, prompt in enumerate(PROMPTS)
    ]
    assert {each["finish_reason"] for each in lines} == {"length"}
    assert {each["tokens"] for each in lines} == {8}
    assert texts(found)[-3:] == [
        (STEPS, "abc", "defghijk"),
        (STEPS, "klmnop", "qrstuvwx"),
        (STEPS, "xyza", "bcdefghi"),
    ]
    assert lines[0]["answer"] != "defghijk"
    for iteration in (STEPS // 2, STEPS):
        assert generated(found, iteration, asking) == [
            text for at, _, text in texts(found) if at == iteration
        ]
    silent = changed(asking, tmp_path / "silent")
    del silent["answers"]
    without = finished(silent)
    assert (found.steps, found.evaluations) == (without.steps, without.evaluations)
    assert f"iteration {STEPS}: 3 answers in " in found.log


def generated(found: Run, iteration: int, config: dict[str, Any]) -> list[str]:
    """What generation makes of the checkpoint, with its cache."""
    from tests.trainer.forked import ForkedPython
    from tests.trainer.runs import environment, free_port

    output = found.directory / f"texts-{iteration}.jsonl"
    arguments = [
        *("-m", "trainer.inference", str(found.checkpoints / f"iter_{iteration:07}")),
        *("--prompts", config["answers"]["prompts"], "--tokenizer", "bytes", "--device", "cpu"),
        *("--max-new-tokens", "8", "--output", str(output)),
    ]
    process = ForkedPython(arguments, environment(0, 1, free_port()), found.directory / "generation.log")
    assert process.wait(timeout=300) == 0, (found.directory / "generation.log").read_text()
    return [json.loads(line)["text"] for line in output.read_text().splitlines()]


LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "TP2 with sequence parallelism": (
        2,
        {},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "DP2, the third prompt alone": (2, {}, {}),
    "CP2 and PP2": (4, {}, {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}),
    "interleaved": (
        2,
        {"num_layers": 4},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "experts on two ranks": (
        2,
        {key: value for key, value in MOE.items() if key.startswith("moe_") or "experts" in key} | TWO_LAYERS,
        {"expert_model_parallel_size": 2},
    ),
}


@pytest.mark.parametrize(
    ("world_size", "model", "layout"), select(LAYOUTS, often=("CP2 and PP2", "experts on two ranks"))
)
def test_every_layout_gives_the_answers_of_one_process(
    world_size: int, model: dict[str, Any], layout: dict[str, Any], asking: dict[str, Any], tmp_path: Path
) -> None:
    asking["model"] |= model
    asking["training"]["train_iters"] = asking["training"]["eval_interval"] = 4
    asking["answers"] |= {"temperature": 0.7, "batch_size": 2}
    found = finished(changed(asking, tmp_path / "layout", parallelism=layout, world_size=world_size))
    alone = finished(changed(asking, tmp_path / "alone"))
    assert texts(found) == texts(alone)


def test_mtp_layers_give_no_answers(short: dict[str, Any]) -> None:
    """The answers are those of generation, which has no MTP layers."""
    short["model"]["mtp_num_layers"] = 1
    short["training"] |= {"train_iters": 2}
    found = finished(short)
    assert generated(found, 2, short) == [answer for iteration, _, answer in texts(found) if iteration == 2]


@pytest.fixture
def short(asking: dict[str, Any]) -> dict[str, Any]:
    """A run that answers before the first of four steps, after two and at the end."""
    asking["training"] |= {"train_iters": 4, "eval_interval": 2}
    asking["checkpoint"] = {"save_interval": 2}
    return asking


def test_a_resumed_run_gives_no_answer_twice(short: dict[str, Any], tmp_path: Path) -> None:
    complete = texts(finished(changed(short, tmp_path / "complete")))
    first = finished(changed(short, tmp_path / "run", training={"train_iters": 2}))
    path = first.directory / "answers.jsonl"
    torn = path.read_text() + json.dumps({"iteration": 4, "prompt": "abc"}) + '\n{"iteration": 6'
    path.write_text(torn)
    resumed = finished(short)
    assert texts(resumed) == complete
    assert [each["time"] for each in answers(resumed)[:6]] == [
        json.loads(line)["time"] for line in torn.splitlines()[:6]
    ]


def test_answers_to_fewer_prompts_stay_when_a_prompt_is_added(short: dict[str, Any], tmp_path: Path) -> None:
    before = texts(finished(changed(short, tmp_path / "run", training={"train_iters": 2})))
    prompts_file(tmp_path, *PROMPTS, "one more")
    found = texts(finished(short))
    assert [each for each in found if each[0] == 0] == [each for each in before if each[0] == 0]
    assert [sum(at == iteration for at, *_ in found) for iteration in (0, 2, 4)] == [3, 4, 4]


def test_answers_end_in_time(asking: dict[str, Any]) -> None:
    asking["answers"] |= {"max_seconds": 1e-6, "max_new_tokens": 40}
    found = finished(asking)
    assert {(each["tokens"], each["finish_reason"]) for each in answers(found)} == {(1, "time")}
    assert "answers.max_seconds = 1e-06 has ended 3 of them" in found.log


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (("abc", "x" * 64), "prompt 2 of"),
        (("a",) * 65, "has 65 prompts"),
    ],
)
def test_prompts_are_refused_before_the_first_step(
    prompts: tuple[str, ...], message: str, asking: dict[str, Any], tmp_path: Path
) -> None:
    prompts_file(tmp_path, *prompts)
    found = run(asking)
    assert set(found.statuses) == {Exit.REFUSED}
    assert message in found.log
    assert not (found.directory / "answers.jsonl").exists()


QUESTIONS = {"Is it wet?": "Yes. The rain in Oslo.", "Hi": "hello hello!"}


def chats_of_questions(tokenizer: Path, directory: Path) -> tuple[str, int]:
    """The prefix of a pair of chats with QUESTIONS, and the number of tokens of the tokenizer."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    pairs = []
    for question, answer in QUESTIONS.items():
        asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = [library.encode(text, add_special_tokens=False).ids for text in (asked, f"{answer}<|im_end|>")]
        pairs.append(([*ids[0], *ids[1]], [*[0] * len(ids[0]), *[1] * len(ids[1])]))
    return write_chats(directory / "chats", pairs * 8), library.get_vocab_size(with_added_tokens=True)


@pytest.mark.usefixtures("forks")
def test_a_model_that_learns_chats_answers_them_and_ends_its_turn(tmp_path: Path) -> None:
    """The prompts are messages. Before training, the answers go on to their limit."""
    file = write_tokenizer(tmp_path / "tokenizer")
    prefix, vocab_size = chats_of_questions(file, tmp_path)
    model = MODEL | {"vocab_size": vocab_size}
    config = chat_config(prefix, tmp_path / "run", model)
    config["training"] |= {"train_iters": 60}
    config["optimizer"]["lr"] = 1e-2
    prompts = tmp_path / "questions.jsonl"
    lines = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config["answers"] = {"prompts": str(prompts), "tokenizer": str(file), "max_new_tokens": 30}
    trained = finished(config)
    found = answers(trained)
    assert found[0]["prompt"] == "<|im_start|>user\nIs it wet?<|im_end|>\n<|im_start|>assistant\n"
    assert {(each["tokens"], each["finish_reason"]) for each in found[:2]} == {(30, "length")}
    assert [(each["answer"], each["finish_reason"]) for each in found[2:]] == [
        (answer, "stop") for answer in QUESTIONS.values()
    ]
    typed = "Hi\nIs it wet?\n"
    command = [
        sys.executable,
        "-m",
        "trainer.inference",
        str(trained.checkpoints),
        "--chat",
        "--tokenizer",
        str(file),
    ]
    said = subprocess.run(command, input=typed, capture_output=True, text=True, check=False, cwd=ROOT)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("> hello hello!\n> ")


def test_a_chat_needs_a_template(asking: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    found = run(asking)
    assert set(found.statuses) == {Exit.REFUSED}
    assert "a prompt has messages, but the tokenizer bytes has no chat template" in found.log
