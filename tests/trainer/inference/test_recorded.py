"""Steps that are recorded as CUDA graphs choose the tokens of steps that are not (make test-gpu)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.trainer.inference.models import TOKENIZER, family, random_prompts
from trainer.contract.errors import TrainerError
from trainer.distributed import groups
from trainer.inference import Completion, Options, generate
from trainer.inference.model import Model
from trainer.inference.start import prepare_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # Megatron-Core warns about its own defaults
]


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    prepare_device("cuda")
    yield
    groups.finalize()


@pytest.fixture(params=["gpt2", "llama", "mistral"])
def model(request: pytest.FixtureRequest) -> Model:
    return family(request.param, length=640, device="cuda")[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
        {"stop": ("\u0101", "\u0102", "\u0105")},
    ],
    ids=["greedy", "drawn", "stop"],
)
def test_recorded_steps_choose_the_same_tokens(model: Model, options: dict[str, Any]) -> None:
    """300 new tokens pass the number of slots that the first graph reads. Rows that stop make the batch smaller."""

    def texts(can_record: bool) -> list[Completion]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Model, "can_record", can_record)
            return list(generate(model, TOKENIZER, prompts, Options(max_new_tokens=300, **options)))

    assert model.can_record
    prompts = random_prompts(7)
    assert texts(True) == texts(False)


def test_a_batch_that_does_not_fit_is_explained(model: Model) -> None:
    torch.cuda.set_per_process_memory_fraction(1e-3)
    try:
        with pytest.raises(TrainerError, match=r"out of GPU memory: .* batch_size = 4096 texts of up to 640"):
            list(generate(model, TOKENIZER, ["\u0101"] * 4096, Options(max_new_tokens=639, batch_size=4096)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
