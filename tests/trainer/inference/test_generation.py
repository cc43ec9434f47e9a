"""Generation with the cache is that of transformers, token by token, for prompts of different lengths in one batch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core.models.gpt import GPTModel

from tests.trainer.families import FAMILIES, LENGTH, VOCAB
from tests.trainer.inference.models import ONE, TOKENIZER, build_chunk, family, random_prompts
from tests.trainer.runs import ROOT
from trainer.contract.errors import TrainerError
from trainer.distributed import groups
from trainer.inference import Completion, Options, generate
from trainer.inference.groups import open_groups
from trainer.inference.model import Model
from trainer.model import layers

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("code_of_this_test"),
]  # Megatron-Core warns about its own defaults


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for such small models
    yield
    torch.set_num_threads(threads)
    groups.finalize()


@pytest.fixture(scope="module")
def llama() -> Model:
    return family("llama")[0]


def transformers_tokens(reference: Any, prompt: str, count: int) -> list[int]:
    ids = TOKENIZER.encode(prompt)
    reference.generation_config = transformers.GenerationConfig(pad_token_id=0)
    inputs = torch.tensor([ids])
    mask = torch.ones_like(inputs)
    output = reference.generate(inputs, attention_mask=mask, max_new_tokens=count, do_sample=False)
    tokens: list[int] = output[0, len(ids) :].tolist()
    return tokens


def continued(model: Model, prompts: list[str], **options: Any) -> list[Completion]:
    return list(generate(model, TOKENIZER, prompts, Options(**options)))


VARIANTS = ("llama with linear", "llama with llama3", "qwen2")
"""Families of which others here have everything."""


# Small sizes but for one, since generating takes seconds. They cover every kind of attention.
@pytest.mark.parametrize(
    ("name", "number", "count"),
    [
        ("llama", 9, 30),
        *((name, 3, 24) for name in FAMILIES if name not in ("llama", *VARIANTS)),
        *(pytest.param(name, 3, 24, marks=pytest.mark.slow) for name in VARIANTS),
    ],
)
def test_greedy_tokens_are_those_of_transformers(name: str, number: int, count: int) -> None:
    model, reference = family(name, length=96)
    assert model.has_cache
    assert not model.why_slow
    prompts = random_prompts(number)
    completions = continued(model, prompts, max_new_tokens=count, batch_size=8)
    assert [completion.prompt for completion in completions] == prompts
    for completion in completions:
        assert completion.tokens == transformers_tokens(reference, completion.prompt, count)
        assert completion.text == TOKENIZER.decode(completion.tokens)
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("name", ["gpt2", "mistral", "qwen3", "deepseek"])
def test_tokens_do_not_depend_on_the_cache_or_the_batch(name: str) -> None:
    model, _ = family(name)
    prompts = random_prompts(5)
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "top_p": 0.9, "seed": 5}
    together = continued(model, prompts, **options)
    assert continued(model, prompts, **options, batch_size=2) == together
    model, _ = without_cache(name)
    assert not model.has_cache
    assert continued(model, prompts, **options) == together


def without_cache(name: str) -> tuple[Model, Any]:
    """The model with layers that are not the trainer's own."""

    class OtherAttention(layers.CoreAttention):
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "CoreAttention", OtherAttention)
        return family(name)


@pytest.mark.parametrize("key", ["model_provider", "layer_spec"])
def test_models_of_users_generate_what_they_compute(key: str) -> None:
    function = {
        "model_provider": "custom_model.py:CappedGPT",
        "layer_spec": "custom_layers.py:parallel_layers",
    }[key]
    config, chunk = build_chunk(FAMILIES["llama"].model | {key: f"{ROOT}/examples/{function}"})
    torch.manual_seed(1)
    for parameter in chunk.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens = [1, 2, 3]
    with torch.no_grad():
        for _ in range(6):
            logits = chunk.eval()(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)
            tokens.append(int(logits[0, -1].argmax()))
    model = Model(config, chunk, open_groups(config, ONE))
    [completion] = continued(model, [TOKENIZER.decode(tokens[:3])], max_new_tokens=6)
    assert completion.tokens == tokens[3:]


def test_rows_that_end_early_do_not_change_the_others(llama: Model) -> None:
    """Four of the six end at different steps, so the batch shrinks on the way."""
    prompts = random_prompts(6)
    alone = [continued(llama, [prompt], max_new_tokens=24)[0] for prompt in prompts]
    ends = tuple(one.text[index : index + 2] for index, one in zip((20, 3, 9, 4), alone, strict=False))
    together = continued(llama, prompts, max_new_tokens=24, stop=ends)
    assert {one.finish_reason for one in together} == {"stop", "length"}
    assert len({len(one.tokens) for one in together}) > 3
    for one, complete in zip(together, alone, strict=True):
        assert one.tokens == complete.tokens[: len(one.tokens)]
        assert one.finish_reason == "stop" or one.text == complete.text


def test_long_rows_end_before_short_ones(llama: Model) -> None:
    """The longest prompt reaches the last position of the model while two others continue."""
    prompts = ["\u0101" * (LENGTH - 4), "\u0102", "\u0103\u0104"]
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.0, "repetition_penalty": 1.5}
    together = continued(llama, prompts, **options)
    assert [len(one.tokens) for one in together] == [4, 30, 30]
    assert together[0] == continued(llama, prompts[:1], **options)[0]
    assert together == continued(without_cache("llama")[0], prompts, **options)


def test_a_repeated_token_becomes_less_likely_at_each_step(llama: Model) -> None:
    """Neither padding nor a token of another row counts as repeated."""
    prompts = random_prompts(3)
    for completion in continued(llama, prompts, max_new_tokens=20, repetition_penalty=1e9):
        text = completion.prompt + completion.text
        assert len(set(text[len(completion.prompt) :])) == len(completion.text)
        assert not set(completion.prompt) & set(completion.text)


def test_attention_of_users_is_computed_without_the_cache(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_ATTENTION)
    _, chunk = build_chunk(FAMILIES["llama"].model | {"layer_spec": f"{tmp_path}/own.py:layers"})
    config, usual = build_chunk(FAMILIES["llama"].model)
    assert (
        "a layer does not have the trainer's attention"
        in Model(config, chunk, open_groups(config, ONE)).why_slow
    )

    class OwnLogits(GPTModel):
        def _postprocess(self, *args: Any, **kwargs: Any) -> Any:
            return super()._postprocess(*args, **kwargs)

    usual.__class__ = OwnLogits
    assert "OwnLogits has its own _postprocess" in Model(config, usual, open_groups(config, ONE)).why_slow


OWN_ATTENTION = """
from megatron.core.transformer.attention import SelfAttention

class Own(SelfAttention):
    pass

def layers(core, vp_stage, usual):
    for layer in usual.layer_specs:
        layer.submodules.self_attention.module = Own
    return usual
"""


def test_one_seed_gives_one_text(llama: Model) -> None:
    prompts = random_prompts(3)

    def texts(seed: int) -> list[str]:
        return [one.text for one in continued(llama, prompts, max_new_tokens=12, temperature=1.0, seed=seed)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_a_text_ends_before_a_stop_string(llama: Model) -> None:
    [prompt, *_] = random_prompts(3)
    [complete] = continued(llama, [prompt], max_new_tokens=12)
    stop = complete.text[5:7]
    cut = complete.text.index(stop)
    shown: list[str] = []
    [stopped] = generate(
        llama, TOKENIZER, [prompt], Options(max_new_tokens=12, stop=("never", stop)), shown.append
    )
    assert (stopped.text, stopped.finish_reason) == (complete.text[:cut], "stop")
    assert stopped.tokens == complete.tokens[: cut + 2]
    assert "".join(shown) == stopped.text


def test_a_document_ends_with_its_token(llama: Model) -> None:
    [prompt, other] = random_prompts(2)
    [complete, _] = continued(llama, [prompt, other], max_new_tokens=12)
    tokenizer = dataclasses.replace(TOKENIZER, eod_id=complete.tokens[4])
    end = complete.tokens.index(complete.tokens[4])
    ended = next(iter(generate(llama, tokenizer, [prompt, other], Options(max_new_tokens=12))))
    assert ended.finish_reason == "eod"
    assert ended.tokens == complete.tokens[: end + 1]
    assert ended.text == complete.text[:end]


def test_a_text_ends_at_the_last_position_of_the_model(llama: Model) -> None:
    prompt = "\u0101" * (LENGTH - 3)
    [completion] = continued(llama, [prompt], max_new_tokens=12)
    assert (len(completion.tokens), completion.finish_reason) == (3, "length")
    with pytest.raises(
        TrainerError, match=f"prompt 2 has {LENGTH} tokens, but the model has {LENGTH} positions"
    ):
        continued(llama, ["\u0101", "\u0101" * LENGTH])


def test_an_empty_prompt_begins_a_document(llama: Model) -> None:
    tokenizer = dataclasses.replace(TOKENIZER, eod_id=7)
    [empty] = generate(llama, tokenizer, [""], Options(max_new_tokens=3))
    [begun] = generate(llama, tokenizer, [TOKENIZER.decode([7])], Options(max_new_tokens=3))
    assert empty.tokens == begun.tokens
    with pytest.raises(TrainerError, match="prompt 1 is empty, and the end-of-document token"):
        continued(llama, [""])


def test_padding_of_the_vocabulary_is_never_generated(llama: Model) -> None:
    """The columns of padded_vocab_size that are not tokens have weights too."""
    model, _ = family("llama")
    [complete] = continued(model, ["\u0101"], max_new_tokens=8)
    most = max(complete.tokens)
    smaller = dataclasses.replace(model.config.model, vocab_size=most)
    model.config = dataclasses.replace(model.config, model=smaller)
    [completion] = continued(model, ["\u0101"], max_new_tokens=8)
    assert max(completion.tokens) < most


def test_logits_of_a_notebook_are_those_of_transformers() -> None:
    model, reference = family("gpt2")
    tokens = list(range(9))
    expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(model.logits(tokens), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(TrainerError, match=f"{LENGTH + 1} tokens: the model computes 1 to {LENGTH}"):
        model.logits([0] * (LENGTH + 1))


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama with yarn", "mistral", "qwen3", "deepseek"])
def test_attention_maps_of_the_guide_are_those_of_transformers(name: str) -> None:
    """The program is that of docs/generation.md. The maps are the same after text was generated."""
    model, reference = family(name)
    guide = (ROOT / "docs/generation.md").read_text(encoding="utf-8")
    [program] = re.findall(r"```python\n(import torch\n.*?)\nmaps = ", guide, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(program, namespace)
    continued(model, ["\u0101\u0102"], max_new_tokens=4)
    tokens = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(2))
    maps = namespace["attention_maps"](model, tokens.tolist())
    expected = reference(tokens[None], output_attentions=True).attentions
    assert len(maps) == len(expected)
    for found, weights in zip(maps, expected, strict=True):
        torch.testing.assert_close(found, weights[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        model.logits(tokens.tolist()), reference(tokens[None]).logits[0], rtol=1e-4, atol=1e-4
    )
