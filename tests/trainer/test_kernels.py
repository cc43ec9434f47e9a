"""Configurations that the choice of kernels refuses before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import gpt_config
from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.contract.resolve import resolve
from trainer.model import kernels

NEEDS_ITS_LAYERS = [
    ("training", {"fp8": "hybrid"}),
    ("training", {"cuda_graph_impl": "transformer_engine"}),
    ("parallelism", {"tp_comm_overlap": True}),
]


def on_a_gpu(tmp_path: Path, section: str, values: dict[str, Any], **training: Any) -> TrainerConfig:
    document = gpt_config("x", tmp_path) | {"device": "cuda"}
    document["training"] |= {"precision": "bf16"} | training
    document[section] |= values
    return resolve(configuration.from_dict(TrainerConfig, document, "test"))


@pytest.mark.parametrize(("section", "values"), NEEDS_ITS_LAYERS)
def test_settings_that_other_layers_ignore_are_refused(
    section: str, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_a_gpu(tmp_path, section, values, transformer_impl="torch")
    [key] = values
    monkeypatch.setattr(kernels, "transformer_engine_version", lambda: "2.16.1")
    with pytest.raises(TrainerError, match=rf"{section}.{key} = \S+ requires Transformer Engine's layers"):
        kernels.choose(config)
    monkeypatch.setattr(kernels, "transformer_engine_version", lambda: None)
    with pytest.raises(TrainerError, match=rf"{section}.{key} = \S+ requires a GPU and Transformer Engine"):
        kernels.choose(config)
