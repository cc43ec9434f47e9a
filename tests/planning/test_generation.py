"""The stages generate and export."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest

from hpcgen.config.huggingface_export import FamilyName
from hpcgen.errors import ConfigErrors
from hpcgen.run_plan.stage import StagePlan
from tests.data.chat_corpora import CHATML, write_tokenizer
from tests.runs import minimal_run, planned
from trainer.contract.config import ModelConfig
from trainer.contract.config.resolve import resolve_model
from trainer.contract.families.huggingface import FAMILIES

PROMPTS = {"prompts": "prompts.jsonl"}


def stage_plan(directory: Path, stage: str, *overrides: str, **sections: Any) -> StagePlan:
    run = minimal_run(slurm={"defaults": {"nodes": 4, "time": "1:00:00"}}, **sections)
    return planned(directory, run, [stage], overrides).stages[stage]


def messages(directory: Path, stage: str, *overrides: str, **sections: Any) -> str:
    with pytest.raises(ConfigErrors) as error:
        stage_plan(directory, stage, *overrides, **sections)
    return "\n".join(error.value.messages)


def test_the_job_continues_the_prompts_with_the_checkpoints_of_the_run(tmp_path: Path) -> None:
    tokenizer = {"kind": "huggingface", "tokenizer_file": "tokenizer.json", "eod_token": "<end>"}
    generation = PROMPTS | {"temperature": 0.5, "top_k": 40, "stop": ["a b"], "precision": "bf16"}
    stage = stage_plan(
        tmp_path,
        "generate",
        "parallelism.tensor_model_parallel_size=2",
        "slurm.generate.ntasks_per_node=4",
        generation=generation,
        data={"tokenizer": tokenizer, "mock": True},
    )
    assert stage.arguments == (
        *("-m", "trainer.inference", "/runs/mini/checkpoints", f"--prompts={tmp_path}/prompts.jsonl"),
        *("--output=/runs/mini/generation/prompts.jsonl", f"--tokenizer={tmp_path}/tokenizer.json"),
        *("--eod-token=<end>", "--device=cpu", "--tensor-model-parallel-size=2"),
        *("--temperature=0.5", "--top-k=40", "--precision=bf16", "--stop=a b"),
    )
    assert tuple(item.path for item in stage.inputs) == (
        f"{tmp_path}/prompts.jsonl",
        f"{tmp_path}/tokenizer.json",
    )
    assert stage.allocation.nodes == 1  # slurm.defaults.nodes is for training
    assert (
        stage_plan(tmp_path, "generate", "slurm.generate.nodes=2", generation=PROMPTS).allocation.nodes == 2
    )


def test_mistakes_are_found_before_the_job_starts(tmp_path: Path) -> None:
    assert "generation.prompts is missing" in messages(tmp_path, "generate")
    found = messages(tmp_path, "generate", generation=PROMPTS | {"top_p": 0.5, "stop": ["", "x"]})
    assert 'generation.stop = ["", "x"] must be ' in found
    assert "generation.top_p = 0.5 has no effect at temperature 0" in found
    layout = ("slurm.generate.ntasks_per_node=3", "generation.tensor_model_parallel_size=2")
    found = messages(tmp_path, "generate", *layout, generation=PROMPTS)
    assert "results in TP x PP = 2 x 1 = 2, which does not divide the 3 ranks of the job" in found
    assert "export.directory is missing" in messages(tmp_path, "export")


def chat_sections(directory: Path, *lines: str) -> dict[str, Any]:
    """Sections of a run whose prompts are `lines`, for a tokenizer and a chat template in directories of their own."""
    tokenizer = write_tokenizer(directory / "tokenizer", template=None)
    (directory / "templates").mkdir()
    (directory / "templates" / "own.jinja").write_text(CHATML)
    (directory / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    corpus = {
        "directory": "corpus",
        "source": {"directory": "source"},
        "chat": {"chat_template_file": "templates/own.jinja"},
    }
    named = {"kind": "huggingface", "tokenizer_file": str(tokenizer), "eod_token": "<|endoftext|>"}
    return {
        "data": {"mock": True, "tokenizer": named, "corpus": corpus},
        "generation": PROMPTS,
        "answers": PROMPTS,
    }


QUESTION = '{"messages": [{"role": "user", "content": "Hi"}]}'


@pytest.mark.parametrize("stage", ["train", "generate"])
def test_the_chat_template_is_an_input_of_stages_that_answer(stage: str, tmp_path: Path) -> None:
    """So it is mounted into a container, and missed before the job is queued."""
    sections = chat_sections(tmp_path, QUESTION)
    template = str(tmp_path / "templates" / "own.jinja")
    assert template in stage_plan(tmp_path, stage, **sections).required
    Path(template).unlink()
    assert template in [item.path for item in stage_plan(tmp_path, stage, **sections).inputs]


@pytest.mark.parametrize(("stage", "key"), [("train", "answers.prompts"), ("generate", "generation.prompts")])
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "Hi"}', "prompts.jsonl:2: expected a line such as"),
        (QUESTION.replace("user", "human"), 'prompt 2: messages[0] has the role "human"'),
        (QUESTION.replace("Hi", r"\ud83d"), "prompts.jsonl:2: the chat has U+D83D"),
    ],
)
def test_prompts_are_read_before_the_job_is_queued(
    stage: str, key: str, line: str, reason: str, tmp_path: Path
) -> None:
    found = messages(tmp_path, stage, **chat_sections(tmp_path, QUESTION, line))
    assert f"{key} = prompts.jsonl cannot be used: " in found
    assert reason in found


def test_the_newest_checkpoint_is_exported_with_the_tokenizer_of_the_run(tmp_path: Path) -> None:
    stage = stage_plan(tmp_path, "export", export={"directory": "model", "dtype": "bf16"})
    assert stage.arguments == (
        *("-m", "trainer.huggingface", "export", "/runs/mini/checkpoints", f"--to={tmp_path}/model"),
        *("--dtype=bf16", "--tokenizer=gpt2"),
    )
    assert stage.allocation.nodes == 1
    corpus = {"directory": "c", "source": {"directory": "s"}, "chat": {"chat_template_file": "chats.jinja"}}
    tokenizer = {"kind": "huggingface", "tokenizer_file": "tokenizer.json", "eod_token": "<end>"}
    chats = {"tokenizer": tokenizer, "corpus": corpus}
    stage = stage_plan(tmp_path, "export", export={"directory": "model"}, data=chats)
    assert f"--chat-template={tmp_path}/chats.jinja" in stage.arguments
    assert f"{tmp_path}/chats.jinja" in [item.path for item in stage.inputs]
    bytes_run = {"tokenizer": {"kind": "bytes"}, "mock": True}
    stage = stage_plan(tmp_path, "export", export={"directory": "model"}, data=bytes_run)
    assert not any(argument.startswith("--tokenizer") for argument in stage.arguments)


def test_a_model_that_transformers_does_not_have_is_found_before_training(tmp_path: Path) -> None:
    export = {"directory": "model"}
    found = messages(tmp_path, "export", export=export, preset="tiny-moe", model={})
    assert (
        "default: model.swiglu = false cannot be exported: MixtralForCausalLM does not support it; use true"
        in found
    )
    assert "GPT2" not in found
    found = messages(tmp_path, "export", export=export | {"family": "llama"})
    assert "model.normalization = LayerNorm cannot be exported: LlamaForCausalLM does not support it" in found


def test_every_family_can_be_named() -> None:
    assert set(get_args(FamilyName)) == set(FAMILIES)


@pytest.mark.parametrize(
    ("topk", "groups", "is_same"), [(8, 4, True), (8, 3, True), (8, 2, False), (5, 2, True), (3, 1, False)]
)
def test_groups_of_experts_are_rated_as_in_transformers(topk: int, groups: int, is_same: bool) -> None:
    """transformers rates a group by its two best experts, Megatron-Core by topk // groups."""
    shape = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8)
    model = dataclasses.replace(
        shape, num_moe_experts=64, moe_router_topk=topk, moe_router_num_groups=8, moe_router_group_topk=groups
    )
    misfits = FAMILIES["deepseek_v3"].misfits(resolve_model(model))
    assert any(misfit.key == "moe_router_group_topk" for misfit in misfits) != is_same
