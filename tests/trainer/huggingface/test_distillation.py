"""The distillation example with a teacher made by transformers, compared with torch's divergence of complete logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.nn import functional

from tests.trainer.huggingface.models import transformers_process
from tests.trainer.losses import complete_logits, microbatch, sums_and_gradients
from tests.trainer.runs import LLAMA, ROOT, Run, finished, gpt_config
from tests.trainer.single_rank import resolved
from trainer.contract.code import code_loading

pytestmark = [
    pytest.mark.usefixtures("code_of_this_test"),
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore"),  # Megatron-Core warns about its own defaults
]

TEMPERATURE = 2.0
TOP_K = 20


def _save_teacher(directory: Path) -> None:
    import transformers

    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=1008, max_position_embeddings=128, **shape, **heads)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def _teacher_logits(directory: Path, tokens: numpy.ndarray) -> numpy.ndarray:
    import transformers

    teacher = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return teacher(torch.from_numpy(tokens)).logits.numpy()


def teacher_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [b, s, 1008] of the teacher, from a process without the trainer."""
    return torch.from_numpy(
        transformers_process().submit(_teacher_logits, directory, tokens.numpy()).result()
    )


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's directory with the teacher and a changed copy of the example."""
    directory = tmp_path_factory.mktemp("mine")
    transformers_process().submit(_save_teacher, directory / "teacher").result()
    text = (ROOT / "examples" / "distillation.py").read_text()
    for before, after in (
        ('"/shared/models/teacher"', repr(str(directory / "teacher"))),
        ("TOP_K = 64", f"TOP_K = {TOP_K}"),
        ("TEMPERATURE = 1.0", f"TEMPERATURE = {TEMPERATURE}"),
    ):
        assert text.count(before) == 1
        text = text.replace(before, after)
    (directory / "my_distillation.py").write_text(text)
    return directory


def test_the_student_minimizes_the_divergence_from_the_likely_tokens_of_the_teacher(
    mine: Path, tmp_path: Path, process_groups: ProcessGroupCollection
) -> None:
    config = resolved(tmp_path, LLAMA, loss=f"{mine}/my_distillation.py:Distillation")
    batch = microbatch(config)
    sums, gradients = sums_and_gradients(config, process_groups, batch)
    chunk, logits = complete_logits(config, process_groups, batch)
    cross_entropy = functional.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
    of_teacher = teacher_logits(mine / "teacher", batch.tokens)[..., :1000]
    kept = of_teacher.topk(TOP_K).indices
    likely, of_student = (grouped((each / TEMPERATURE).softmax(-1), kept) for each in (of_teacher, logits))
    divergence = functional.kl_div(of_student.log(), likely, reduction="none").sum(-1) * TEMPERATURE**2
    expected = [
        (each * batch.loss_mask).sum()
        for each in (cross_entropy, (cross_entropy + divergence) / 2, cross_entropy, divergence)
    ]
    expected[1].backward()
    assert sums[::2].tolist() == pytest.approx([each.item() for each in expected], rel=1e-5)
    for name, parameter in chunk.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.main_grad, rtol=1e-4, atol=1e-4)


def grouped(probabilities: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The probabilities of the `kept` tokens, and of all others together."""
    is_kept = torch.zeros(probabilities.shape, dtype=torch.bool).scatter(-1, kept, True)
    rest = probabilities.masked_fill(is_kept, 0.0).sum(-1, keepdim=True)
    return torch.cat([probabilities.gather(-1, kept), rest], dim=-1)


def test_a_student_with_the_probabilities_of_the_teacher_has_no_divergence(
    mine: Path, tmp_path: Path, process_groups: ProcessGroupCollection
) -> None:
    config = resolved(tmp_path, LLAMA)
    loss = code_loading.load(f"{mine}/my_distillation.py:Distillation", "training.loss")(config)
    batch = microbatch(config)
    logits = teacher_logits(mine / "teacher", batch.tokens)[..., :1000].requires_grad_()
    _, terms = loss(logits, batch.labels, batch.loss_mask, batch)
    terms["teacher_kl"].sum().backward()
    assert logits.grad is not None
    assert float(terms["teacher_kl"].detach().abs().max()) < 1e-5
    assert float(logits.grad.abs().max()) < 1e-5


def test_the_teacher_sees_one_document_at_a_time(
    mine: Path, tmp_path: Path, process_groups: ProcessGroupCollection
) -> None:
    config = resolved(tmp_path, LLAMA)
    loss = code_loading.load(f"{mine}/my_distillation.py:Distillation", "training.loss")(config)
    length = config.model.seq_length
    boundaries = torch.tensor([0, 20, length, length + 40, 2 * length])
    batch = dataclasses.replace(microbatch(config), boundaries=boundaries)
    likely, tokens = loss.likely_tokens(batch)
    logits = teacher_logits(mine / "teacher", batch.tokens[:1, 20:])[..., :1000]
    second = (logits / TEMPERATURE).log_softmax(-1).topk(TOP_K)
    assert torch.equal(tokens[:1, 20:], second.indices)
    torch.testing.assert_close(likely[:1, 20:, :TOP_K], second.values, rtol=1e-4, atol=1e-4)


TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}


def distilled(corpus: str, directory: Path, mine: Path, layout: dict[str, Any], world_size: int) -> Run:
    config = gpt_config(corpus, directory, LLAMA)
    config |= {"world_size": world_size, "parallelism": layout}
    config["training"] |= {"loss": f"{mine}/my_distillation.py:Distillation", "train_iters": 3}
    return finished(config)


@pytest.fixture(scope="module")
def single(corpus: str, mine: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A distillation on one rank."""
    return distilled(corpus, tmp_path_factory.mktemp("single"), mine, {}, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [TP2 | {"sequence_parallel": True}, PP2, CP2], ids=["TP2+SP", "PP2", "CP2"]
)
def test_distillation_is_the_same_at_every_layout(
    layout: dict[str, Any], corpus: str, mine: Path, single: Run, tmp_path: Path
) -> None:
    columns = ("loss", "objective", "teacher_kl", "grad_norm")
    ours, theirs = (
        [[each[name] for name in columns] for each in run.events if each["event"] == "step"]
        for run in (distilled(corpus, tmp_path, mine, layout, 2), single)
    )
    numpy.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
