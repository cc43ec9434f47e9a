"""Texts end exactly where lm-eval's own model `hf` ends them, for every kind of stop string and tokenizer.

The models write tokens that a generator chooses: special tokens, parts of characters, runs of spaces, and words in
usual and in other tokens.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.evaluate import writers
from tests.trainer.evaluate.writers import EOD, MAX_LENGTH, TURN
from tests.trainer.huggingface.models import transformers_process
from tests.trainer.inference.models import ONE
from trainer.contract.errors import TrainerError
from trainer.contract.evaluation import EvaluationSettings
from trainer.distributed import groups
from trainer.huggingface import exporting
from trainer.huggingface.importing import import_model
from trainer.inference import Options, Tokenizer, generate, load_tokenizer
from trainer.inference.checkpoint import find_checkpoint
from trainer.inference.loading import load
from trainer.inference.model import Model

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'hpcgen[eval]')")
pytest.importorskip("accelerate", reason="lm-eval's model hf needs accelerate")
pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore"),  # Megatron-Core warns about its own defaults
]

SEED = int(os.environ.get("STOP_STRING_SEED", "1"))
NUM_CASES = int(os.environ.get("STOP_STRING_CASES", "20"))
LONGEST = 14
"""Maximum number of new tokens."""

Case = tuple[str, dict[str, Any]]
"""A prompt and the generation_kwargs of a task."""


WORDS = [
    EOD,
    TURN,
    "the cat",
    "Question:",
    "\n\n\n\n",
    "    ",
    "stop",
    "naïve",
    "👩‍🚀",
    "東京",
    "the end. </s>",
    " \n",
]


@dataclass(frozen=True)
class Writer:
    """A model that writes `script[p]` at position p."""

    kind: str
    model: Model
    tokenizer: Tokenizer
    script: list[int]
    exported: Path

    def written(self, prompt: str, count: int) -> list[int]:
        """The tokens after a prompt, of which the end of a document is the last one."""
        begin = len(self.tokenizer.encode(prompt))
        tokens = self.script[begin : begin + count]
        end = self.tokenizer.eod_id
        return tokens[: tokens.index(end) + 1] if end in tokens else tokens


@pytest.fixture(scope="module", params=list(writers.KINDS))
def writer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writer]:
    directory = tmp_path_factory.mktemp("writer")
    file = directory / "tokenizer.json"
    library = writers.KINDS[request.param]()
    library.save(str(file))
    tokenizer = load_tokenizer(file, EOD)
    script = _script(tokenizer, random.Random(f"{SEED}/{request.param}"))
    writers.save_model(directory / "original", script, tokenizer.size)
    import_model(directory / "original", directory / "imported", lambda line: None)
    checkpoint = directory / "imported/iter_0000000"
    options = exporting.Options(tokenizer=file, eos_token=EOD)
    exporting.export(checkpoint, directory / "exported", options, lambda line: None)
    model = load(find_checkpoint(checkpoint), ONE, device="cpu", precision="fp32")
    yield Writer(request.param, model, tokenizer, script, directory / "exported")
    groups.finalize()


def _script(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Random tokens and words, of which half are spelled in tokens of one character."""
    ids: dict[str, list[int]] = {}
    for token in range(tokenizer.size):
        ids.setdefault(tokenizer.spell([token]), []).append(token)
    special = tokenizer.encode(TURN)[-1]
    script: list[int] = []
    while len(script) < MAX_LENGTH:
        word = rng.choice(WORDS)
        spelled = [rng.choice(ids[character]) for character in word if character in ids]
        kinds = ([rng.randrange(tokenizer.size)], [special, *spelled], tokenizer.encode(word), spelled)
        script += rng.choice(kinds)
    return script[:MAX_LENGTH]


def cases(writer: Writer, number: int) -> list[Case]:
    """Prompts with stop strings of every kind, most of which the model writes."""
    rng = random.Random(SEED)
    return [_case(writer, rng) for _ in range(number)]


def _case(writer: Writer, rng: random.Random) -> Case:
    ending = rng.choice(["", " ", "the", TURN, "\n", "é", "👩"])
    prompt = "Q" * rng.randrange(1, MAX_LENGTH - LONGEST - len(ending.encode()) - 1) + ending
    count = rng.choice([1, 3, LONGEST, LONGEST, LONGEST])
    tokens = writer.written(prompt, count)
    until = [_stop_string(writer.tokenizer, prompt, tokens, rng) for _ in range(rng.choice([0, 1, 1, 2, 4]))]
    if rng.random() < 0.1:
        until.append("")
    arguments: dict[str, Any] = {"max_gen_toks": count, "until": until}
    if len(until) == 1 and rng.random() < 0.5:
        arguments["until"] = until[0]
    if not until and rng.random() < 0.5:
        del arguments["until"]
    return prompt, arguments


def _stop_string(tokenizer: Tokenizer, prompt: str, tokens: list[int], rng: random.Random) -> str:
    start = rng.randrange(len(tokens))
    some = tokens[start : start + rng.randint(1, 5)]
    with_special, text = tokenizer.spell(tokens), tokenizer.decode(tokens)
    spelled = tokenizer.spell(some)
    kind = rng.choice(["token", "part", "across", "after special", "without special", "boundary", "known"])
    match kind:
        case "token":
            found = tokenizer.spell(some[:1])
        case "part":
            found = spelled[: rng.randint(1, 3)]
        case "across":
            found = _substring(with_special, rng)
        case "after special":
            found = TURN + with_special.partition(TURN)[2][: rng.randint(0, 5)]
        case "without special":
            found = _substring(text, rng)
        case "boundary":
            found = prompt[-1:] + with_special[: rng.randint(0, 3)]
        case _:
            found = rng.choice([*WORDS, "\n", " ", "\n\n", "\ufffd", "<|", "end|>", f"\n{TURN}", f"{TURN}\n"])
    return found or "e"


def _substring(text: str, rng: random.Random) -> str:
    start = rng.randrange(len(text)) if text else 0
    return text[start : start + rng.randint(1, 8)]


def texts_of_hf(exported: Path, requests: list[Case]) -> list[str]:
    """What lm-eval's own model `hf` generates, one prompt at a time."""
    return transformers_process().submit(_texts_of_hf, exported, requests).result()


def _texts_of_hf(exported: Path, requests: list[Case]) -> list[str]:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    warnings.simplefilter("ignore")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(1)
    model = HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=1)
    instances = [Instance("generate_until", {}, request, 0) for request in requests]
    return model.generate_until(instances, disable_tqdm=True)


def texts(writer: Writer, requests: list[Case], batch_size: int = 4) -> list[str]:
    """What a task of an evaluation job generates."""
    from lm_eval.api.instance import Instance

    from trainer.evaluate.harness import HarnessModel
    from trainer.evaluate.replicas import Replicas
    from trainer.metrics.console import Log

    replicas = Replicas(writer.model, writer.tokenizer, batch_size, Log(is_rank_0=False, progress=False))
    model = HarnessModel(replicas, EvaluationSettings(batch_size=batch_size))
    return model.generate_until([Instance("generate_until", {}, request, 0) for request in requests])


def test_tasks_end_texts_where_hf_ends_them(writer: Writer) -> None:
    requests = cases(writer, NUM_CASES)
    for request, text, expected in zip(
        requests, texts(writer, requests), texts_of_hf(writer.exported, requests), strict=True
    ):
        assert text == expected, request


def test_a_prompt_and_its_text_are_the_text_of_all_tokens(writer: Writer) -> None:
    """With tokenizers of the kind of Llama's too, which drop the first space of a text."""
    tokenizer = writer.tokenizer
    prompts = [prompt for prompt, _ in cases(writer, NUM_CASES)]
    spaces = 0
    for completion in generate(writer.model, tokenizer, prompts, Options(max_new_tokens=LONGEST)):
        before = tokenizer.encode(completion.prompt)
        prompt, complete = tokenizer.decode(before), tokenizer.decode([*before, *completion.tokens])
        alone = tokenizer.decode(completion.tokens)
        # The bytes of a character in a prompt have no text if those of an incomplete one follow them.
        expected = complete.removeprefix(prompt) if complete.startswith(prompt) else alone
        assert completion.text == expected, completion
        spaces += completion.text != alone
    assert (spaces > 0) == (writer.kind != "byte-level")


def test_an_empty_prompt_begins_a_text_without_a_space(writer: Writer) -> None:
    [completion] = generate(writer.model, writer.tokenizer, [""], Options(max_new_tokens=LONGEST))
    assert completion.text == writer.tokenizer.decode(completion.tokens)


def test_pieces_of_a_text_are_final(writer: Writer) -> None:
    """The pieces that are shown while a text is generated make up the text, with any stop strings."""
    for prompt, arguments in cases(writer, NUM_CASES):
        until = arguments.get("until", [])
        stop = tuple(string for string in ([until] if isinstance(until, str) else until) if string)
        pieces: list[str] = []
        options = Options(max_new_tokens=arguments["max_gen_toks"], stop=stop)
        [completion] = generate(writer.model, writer.tokenizer, [prompt], options, pieces.append)
        assert "".join(pieces) == completion.text, (prompt, stop)
        [quiet] = generate(writer.model, writer.tokenizer, [prompt], options)
        assert quiet == completion
        if writer.kind == "byte-level":
            arguments = arguments | {"until": [*stop]}
            # Tasks also end at the end of a document that is spelled in other tokens.
            assert completion.text.partition(EOD)[0] == texts(writer, [(prompt, arguments)])[0]


def test_arguments_of_a_task_that_would_have_no_effect_are_refused(writer: Writer) -> None:
    for name, value in {"num_beams": 4, "min_p": 0.1, "max_length": 60, "eos_token_id": 3}.items():
        with pytest.raises(TrainerError, match=rf"sets {name} = {value} in generation_kwargs, which the"):
            texts(writer, [("the", {"max_gen_toks": 1, "until": ["."], name: value})])
    assert texts(writer, [("the", {"max_gen_toks": 1, "num_beams": 1})])
