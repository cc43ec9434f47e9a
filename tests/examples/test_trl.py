"""The programs with TRL on the CPU: trl_dpo.py stops and resumes, and deepspeed/sft.py learns only answers.

They run in the process that imports transformers, and sft.py without DeepSpeed. tests/slurm/test_trl.py runs
trl_dpo.yaml as a job.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.examples.exports import export_pair, run_hpcgen
from tests.trainer.huggingface.models import transformers_process

pytestmark = pytest.mark.process
EXAMPLES = Path(__file__).parents[2] / "examples"
SYSTEM = {"role": "system", "content": "Be brief."}


def chat(*contents: str) -> list[dict[str, str]]:
    """Questions and answers by turns."""
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


CHATS = [
    [SYSTEM, *chat("What is 2 plus 2?", "4.", "And 3?", "6.")],
    chat("Hello?", "Hi."),
    chat("A question that fills all of the tokens" * 6, "Too late."),
]
ANSWERS = [["4.<|end|>", "6.<|end|>"], ["Hi.<|end|>"]]
"""The answers of the chats that end within 200 tokens, as the template of the tiny model writes them."""


def write_lines(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def imported(path: Path) -> ModuleType:
    """A program, without its main function being called."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def started(directory: Path, *words: object) -> Iterator[io.StringIO]:
    """The output of a program with these words on its command line. Caches are in the directory."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    handler, argv, sys.argv = signal.getsignal(signal.SIGUSR1), sys.argv, ["program", *map(str, words)]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            yield output
    finally:
        sys.argv = argv
        signal.signal(signal.SIGUSR1, handler)


def _write_tiny_chat_model(directory: Path) -> None:
    with started(directory, directory):
        imported(EXAMPLES / "deepspeed/tiny_chat_model.py").main()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights, its tokenizer and its chat template."""
    directory = tmp_path_factory.mktemp("tiny")
    transformers_process().submit(_write_tiny_chat_model, directory).result()
    return directory / "model"


# ==== fine-tuning on answers ====


def _trainer_of_sft(model: Path, data: Path, directory: Path) -> Any:
    words = (f"--model={model}", f"--data={data}", f"--directory={directory}", "--max-length=200")
    with started(directory, "--deepspeed_config=", *words, "--steps=1", "--fp32"):
        program = imported(EXAMPLES / "deepspeed/sft.py")
        options = program.parse_options()
        options.deepspeed_config = None
        return program.build_trainer(options, program.StopSignal())


def _learned(model: Path, data: Path, directory: Path) -> tuple[list[list[str]], list[bool], list[bool]]:
    """The texts that sft.py learns in each chat.

    With them, two lists with a value for each token of a batch: its output has a gradient, and the next one is learned.
    """
    import torch

    trainer = _trainer_of_sft(model, data, directory)
    rows = list(trainer.train_dataset)
    batch = trainer.data_collator(rows)
    outputs: list[torch.Tensor] = []
    trainer.model.model.norm.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    loss = trainer.compute_loss(trainer.model, dict(batch))
    [gradient] = torch.autograd.grad(loss, outputs)
    has_gradient = gradient.abs().amax(-1) > 0
    is_learned = torch.nn.functional.pad(batch["labels"][:, 1:] != -100, (0, 1))
    texts = []
    for row in rows:
        pairs = zip(row["input_ids"], row["labels"], strict=True)
        groups = [
            (learned, [*group]) for learned, group in itertools.groupby(pairs, lambda pair: pair[1] != -100)
        ]
        decode = trainer.processing_class.decode
        texts.append([decode([token for token, _ in group]) for learned, group in groups if learned])
    return texts, has_gradient.flatten().tolist(), is_learned.flatten().tolist()


def test_fine_tuning_learns_only_the_answers_and_their_ends(tiny: Path, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "chats.jsonl", [{"messages": messages} for messages in CHATS])
    data = export_pair(lines, tiny, tmp_path, "--chat")
    learned = transformers_process().submit(_learned, tiny, data, tmp_path).result()
    texts, has_gradient, is_learned = learned
    assert texts == ANSWERS
    assert has_gradient == is_learned
    assert any(is_learned)


def test_fine_tuning_refuses_texts(tiny: Path, tmp_path: Path) -> None:
    """TRL would learn every token."""
    data = export_pair(write_lines(tmp_path / "texts.jsonl", [{"text": "a text"}]), tiny, tmp_path)
    with pytest.raises(SystemExit, match="has no column assistant_masks: export pairs of chats"):
        transformers_process().submit(_trainer_of_sft, tiny, data, tmp_path).result()


# ==== preferences ====


def _tune(model: Path, directory: Path, words: Sequence[str], stop_at: int | None) -> tuple[str, list[Any]]:
    """What trl_dpo.py prints, and the metrics of its last checkpoint. It gets hpcgen's signal in step `stop_at`."""
    with started(directory, f"--model={model}", f"--directory={directory}", *words) as output:
        program = imported(EXAMPLES / "trl_dpo.py")

        class Stop(program.StopSignal):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == stop_at:
                    signal.raise_signal(signal.SIGUSR1)
                super().on_step_end(args, state, control, **kwargs)

        program.StopSignal = Stop
        program.main()
        newest = program.newest_checkpoint(directory / "checkpoints")
    state = json.loads(Path(newest, "trainer_state.json").read_text())
    return output.getvalue(), state["log_history"]


def tune(model: Path, directory: Path, *words: str, stop_at: int | None = None) -> tuple[str, list[Any]]:
    directory.mkdir(exist_ok=True)
    return transformers_process().submit(_tune, model, directory, words, stop_at).result()


def preferences(path: Path) -> Path:
    """Pairs of answers, of which some are too long."""
    lines = []
    for number in range(24):
        rejected = "No." + "!" * (100 if number % 6 == 0 else number)
        [question, chosen] = chat(f"What is {number} plus {number}?", f"It is {2 * number}.")
        answers = {"chosen": [chosen], "rejected": [chosen | {"content": rejected}]}
        lines.append({"prompt": [question], **answers})
    return write_lines(path, lines)


@pytest.fixture(scope="module")
def exported(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that hpcgen exported, with the chat template of its tokenizer."""
    directory = tmp_path_factory.mktemp("exported")
    run_hpcgen("checkpoint", "import", tiny, "--to", directory / "checkpoints")
    run_hpcgen(
        "checkpoint", "export", directory / "checkpoints", "--to", directory / "model", "--tokenizer", tiny
    )
    return directory / "model"


def test_a_stopped_preference_tuning_ends_with_the_weights_of_an_uninterrupted_one(
    exported: Path, tmp_path: Path
) -> None:
    words = (f"--data={preferences(tmp_path / 'pairs.jsonl')}", "--steps=6", "--lr=1e-3", "--max-length=64")
    words = (*words, "--micro-batch-size=4", "--save-every=2")
    _, expected = tune(exported, tmp_path / "once", *words)
    text, metrics = tune(exported, tmp_path / "twice", *words, stop_at=3)
    assert "20 of 24 pairs fit in 64 tokens" in text
    assert len(metrics) == 3
    assert not (tmp_path / "twice/done").exists()
    _, metrics = tune(exported, tmp_path / "twice", *words)
    assert (tmp_path / "twice/done").exists()
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (metrics, expected)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    assert metrics[5]["rewards/margins"] > metrics[1]["rewards/margins"] > 0
    weights = [load_file(tmp_path / name / "model/model.safetensors") for name in ("once", "twice")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    run_hpcgen("checkpoint", "import", tmp_path / "twice/model", "--to", tmp_path / "checkpoints")
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").exists()


def test_preference_tuning_without_a_pair_that_fits_ends(tiny: Path, tmp_path: Path) -> None:
    data = preferences(tmp_path / "pairs.jsonl")
    with pytest.raises(SystemExit, match="nothing to train on"):
        tune(tiny, tmp_path, f"--data={data}", "--steps=1", "--max-length=26")


def test_a_part_of_a_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    for number, text in ((2, "{\n}\n"), (10, "{\n}\n"), (12, '{\n "epoch"'), (14, "")):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}/trainer_state.json").write_text(text)
    found = transformers_process().submit(_newest, tmp_path).result()
    assert found == [str(tmp_path / "checkpoint-10")] * 2


def _newest(directory: Path) -> list[str]:
    programs = ("trl_dpo.py", "deepspeed/sft.py")
    return [imported(EXAMPLES / program).newest_checkpoint(directory) for program in programs]
