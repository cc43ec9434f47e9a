"""Answers of DeepSpeed itself, in a Python that has it. Reads JSON from stdin and prints JSON on the last line."""

from __future__ import annotations

import enum
import importlib
import json
import logging
import os
import sys
import types
import typing
from collections.abc import Iterator
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


def models(sources: list[list[str]]) -> list[dict[str, list[Any]] | None]:
    """The fields of each class of pydantic, given by its file and name: all spellings of a key -> its type in the words
    of keys.txt, and whether it can be null. None for another class."""
    return [_fields(file, name) for file, name in sources]


def _fields(file: str, name: str) -> dict[str, list[Any]] | None:
    module = importlib.import_module("deepspeed." + file.removesuffix(".py").replace("/", "."))
    model = getattr(module, name, None)
    if not hasattr(model, "model_fields"):
        return None
    return {
        " ".join(dict.fromkeys((key, field.alias or key))): [
            _words(field.annotation, field.metadata),
            type(None) in typing.get_args(field.annotation),
        ]
        for key, field in model.model_fields.items()
    }


def _words(hint: Any, limits: Any = ()) -> str:
    arguments = [each for each in typing.get_args(hint) if each is not type(None)]
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _words(arguments[0], (*limits, *arguments[1:]))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(each, limits) for each in arguments)
    if origin is typing.Literal or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return "one of " + ", ".join(str(getattr(each, "value", each)) for each in arguments or hint)
    if origin in (list, tuple) or hint in (list, tuple):
        return f"list of {_words(arguments[0]) if arguments else 'anything'}"
    if hasattr(hint, "model_fields"):
        return "section"
    name = {bool: "switch", int: "integer", float: "number", str: "text", dict: "mapping"}.get(origin or hint)
    return (name or "anything") + "".join(_bounds(limits) if hint in (int, float) else ())


def _bounds(limits: Any) -> Iterator[str]:
    for limit in limits:
        for each in getattr(limit, "metadata", [limit]):
            for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
                if getattr(each, name, None) is not None:
                    yield f" {sign}{getattr(each, name):g}"


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
    answer = {"verdicts": verdicts, "models": models, "estimates": estimates, "sizes": sizes}[sys.argv[1]](
        questions
    )
    print(f"\n{json.dumps(answer)}")
