"""Answers of DeepSpeed itself, in a Python that has it. Reads JSON from stdin and prints JSON on the last line."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"


def verdicts(cases: list[list[Any]]) -> list[str | None]:
    """DeepSpeed's error for each pair of a configuration and a number of ranks; None if it accepts it."""
    from deepspeed.runtime import config as configs
    from deepspeed.utils import logger

    logger.setLevel(logging.CRITICAL)
    configs.dist.get_rank = lambda *arguments, **options: 0
    answers: list[str | None] = []
    for config, ranks in cases:
        configs.dist.get_world_size = lambda *arguments, ranks=ranks, **options: ranks
        try:
            configs.DeepSpeedConfig(config)
            answers.append(None)
        except Exception as error:  # any error means that DeepSpeed refuses it
            answers.append(f"{type(error).__name__}: {error}")
    return answers


def estimates(cases: list[dict[str, Any]]) -> list[list[float]]:
    """Host and GPU bytes of DeepSpeed's estimators, for their own arguments and the stage."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as stage_3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as stage_2

    return [list((stage_3 if case.pop("stage") == 3 else stage_2)(**case)[:2]) for case in cases]


def sizes(configs: list[dict[str, Any]]) -> list[list[int]]:
    """The parameters of transformers' models, and those of their largest module, as DeepSpeed counts them."""
    import torch
    from deepspeed.runtime.zero.stage3 import model_to_params
    from transformers import AutoConfig, AutoModelForCausalLM

    answers = []
    for config in configs:
        with torch.device("cpu"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        answers.append(list(model_to_params(model)))
    return answers


if __name__ == "__main__":
    questions = json.load(sys.stdin)
    answer = {"verdicts": verdicts, "estimates": estimates, "sizes": sizes}[sys.argv[1]](questions)
    print(f"\n{json.dumps(answer)}")
