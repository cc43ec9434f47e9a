"""Rules and estimates compared with DeepSpeed 0.19.8 itself.

The environment variable DEEPSPEED_PYTHON names a Python with deepspeed, torch and transformers. Without it, the tests
are skipped.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hpcgen.config.program import DeepSpeedConfig
from hpcgen.planning.deepspeed import keys
from hpcgen.planning.deepspeed.check import deepspeed_problems
from hpcgen.planning.deepspeed.facts import Facts
from hpcgen.planning.deepspeed.keys import SECTIONS
from hpcgen.planning.deepspeed.memory import ModelSize, estimate, setup_of
from hpcgen.planning.deepspeed.model import model_size
from hpcgen.planning.deepspeed.types import Key, Section
from tests.planning.deepspeed.test_check import BROKEN, MICRO, VALID, zero
from tests.planning.deepspeed.test_memory import LLAMA, NO_BUFFERS
from tests.runs import write_yaml

PYTHON = os.environ.get("DEEPSPEED_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(PYTHON is None, reason="DEEPSPEED_PYTHON is not set"),
]
RANKS = 16
LEAVES = ("classes", "names", "name_suffixes")
NUM_CONFIGS = 3000
VALUES: tuple[Any, ...] = (
    *(
        True,
        False,
        None,
        0,
        1,
        2,
        3,
        -1,
        8,
        16,
        0.5,
        1.0,
        1e8,
        5e8,
        "auto",
        "",
        "cpu",
        "nvme",
        "none",
        "/nvme",
    ),
    *("fp16", "bf16", "fp32", "bfloat16", "mean", "sum", "Warn", "fast", "AdamW", "Lion", "WarmupLR", "text"),
    *([], ["a"], [0.9, 0.95], {}, {"enabled": True}, {"enabled": False}),
)
STRICTER = (
    "is not a key of DeepSpeed",  # ignored silently
    "must be ",  # converted, or not checked before it is used
    "has an invalid item",
    "is deprecated",
    "has no effect",
    "needs ",  # checked when the engine starts, as all of the following
    "is not supported",
    "has not been tested with ZeRO",
    "has no type, so DeepSpeed ignores",
    "nor a class of torch",
    "has no params",
    "has device: nvme without nvme_path",
    "is a relative path",
    "does not divide",
    "times sequence_parallel_size",
    "is an odd number",
    "is ignored",
    "differs from",
    "conflicts with",
    "is the same key as",
    "has no total_num_steps",
    "exclude each other",
    "is set by DeepSpeed itself",
    "combines autotp",
    "would be written",
    "is a number, but select_strategy",
    "has select_strategy",
    "was removed",
)
"""Reasons of problems that the constructor of DeepSpeed's configuration does not report."""


def ask(question: str, cases: Any) -> Any:
    assert PYTHON is not None
    script = Path(__file__).parent / "oracle.py"
    done = subprocess.run(
        [PYTHON, str(script), question], input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def reasons(config: dict[str, Any]) -> list[str]:
    problems = deepspeed_problems(DeepSpeedConfig(config=config), RANKS, 8)
    return [f"{problem.path} {problem.reason}" for problem in problems]


def random_section(choose: random.Random, section: Section, chance: float) -> dict[str, Any]:
    """A few keys of the section. Half of the values have the key's type."""
    found = {}
    for name, key in section.keys.items():
        if choose.random() < chance:
            found[name] = random_value(choose, key)
    if choose.random() < 0.02:
        found["unknown_key"] = 1
    return found


def random_value(choose: random.Random, key: Key | Section) -> Any:
    if isinstance(key, Section):
        return random_section(choose, key, 0.15)
    valid = [value for value in VALUES if not key.type(value)]
    return choose.choice(valid if valid and choose.random() < 0.97 else VALUES)


def as_filled_in(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration after Hugging Face's Trainer has filled in the sizes, without which DeepSpeed always fails."""
    sizes = {
        name: 1
        for name, value in config.items()
        if name.endswith(("size_per_gpu", "steps")) and value == "auto"
    }
    filled = {**config, **sizes}
    return {
        name: value for name, value in filled.items() if not (name == "train_batch_size" and value == "auto")
    }


def test_every_configuration_that_the_rules_accept_is_accepted_by_deepspeed() -> None:
    choose = random.Random(7)
    configs = [{**MICRO, **random_section(choose, SECTIONS[""], 0.05)} for _ in range(NUM_CONFIGS)]
    configs += [{**MICRO, **config} for config in VALID]
    theirs = ask("verdicts", [[as_filled_in(config), RANKS] for config in configs])
    counts: Counter[str] = Counter()
    surprises = []
    for config, error in zip(configs, theirs, strict=True):
        ours = reasons(config)
        counts[f"{'refused' if ours else 'accepted'}, DeepSpeed: {'refused' if error else 'accepted'}"] += 1
        if (
            error and not ours and "GDS currently only supported for CUDA" not in error
        ):  # the oracle has no GPU
            surprises.append(f"{config}: {error}")
        elif not error:
            surprises += [reason for reason in ours if not any(known in reason for known in STRICTER)]
    print(dict(counts))
    assert not surprises, f"{len(surprises)} surprises: {surprises[:10]}"
    assert len(counts) >= 3


NOT_IN_FILES = {"TPTrainingConfig": {"dtype"}, "TPConfig": {"mpu", "tp_group"}}
"""Class -> fields whose values are objects of Python, which a configuration file cannot express."""
ALSO_ACCEPTED = {
    ("DeepSpeedZeroConfig", "stage"),
    *(("DeepSpeedZeroLeafModuleConfig", each) for each in LEAVES),
}
"""Fields whose types say less than their validators accept."""


def kinds(words: str) -> set[str]:
    """The kinds of values of a type in the words of keys.txt, without limits, lengths and choices."""
    plain = {"size": "integer", "one": "text", "any": "text"}
    return {plain.get(first, first) for first in (each.split()[0] for each in words.split(" or "))}


def table_rows() -> dict[tuple[str, str], dict[str, list[str]]]:
    """File and class of each section that is a class -> its keys, and the cells after each."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for block in Path(keys.__file__).with_name("keys.txt").read_text().split("\n\n"):
        head, *rows = block.splitlines()
        source = re.fullmatch(r"\[.*\]\t(\S+\.py), ([A-Z]\w+)(\t.*)?", head)
        if source is not None:
            cells = {row.split("\t")[0]: row.split("\t")[1:] for row in rows}
            found[source[1], source[2]] = {
                re.sub(r"\[stage3_\](.*)", r"\1 stage3_\1", name): [*given, ""]
                for name, given in cells.items()
                if given[0] != "removed"
            }
    return found


def test_the_keys_of_each_section_are_the_fields_of_its_class() -> None:
    table = table_rows()
    models = dict(zip(table, ask("models", list(table)), strict=True))
    differences = []
    for (file, name), fields in models.items():
        if fields is None:  # DeepSpeed reads this section key by key
            continue
        ours = table[file, name]
        for spellings, (words, is_nullable) in fields.items():
            cells = ours.pop(spellings, None) or next(
                filter(None, [ours.pop(each, None) for each in spellings.split()]), None
            )
            row = f"{name}: {spellings}\t{words}\t{'null' * is_nullable}"
            if words.endswith("section") or spellings in NOT_IN_FILES.get(name, ()):
                continue
            if cells is None:
                differences.append(row)
            elif cells[0] != "deprecated":
                same = kinds(cells[0]) == kinds(words) or "anything" in words
                same = same or (name, spellings) in ALSO_ACCEPTED
                if not same or ("null" in cells[1].split()) != is_nullable:
                    differences.append(f"{row}, not {cells}")
        differences += [f"{name}: {key} is no field" for key in ours]
    assert sum(fields is not None for fields in models.values()) >= 15
    assert not differences, "\n".join(differences)


def test_what_the_constructor_refuses_is_a_mistake() -> None:
    """Each of the broken configurations that the constructor refuses has a problem; the others fail later."""
    theirs = ask("verdicts", [[{**MICRO, **config}, RANKS] for config, _ in BROKEN])
    refused = [config for (config, _), error in zip(BROKEN, theirs, strict=True) if error is not None]
    assert len(refused) >= 15
    assert all(reasons({**MICRO, **config}) for config in refused)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_estimates_are_those_of_deepspeed(nodes: int) -> None:
    size = ModelSize(parameters=8_000_000_000, trainable=8_000_000_000, largest_layer=500_000_000)
    cases, found = [], []
    for stage, optimizer, param in ((2, 0, 0), (2, 1, 0), (3, 0, 0), (3, 1, 0), (3, 1, 1)):
        case = {"stage": stage, "total_params": size.parameters, "num_gpus_per_node": 8, "num_nodes": nodes}
        of_stage_3 = {"largest_layer_params": size.largest_layer, "cpu_offload_params": bool(param)}
        cases.append({**case, "cpu_offload": bool(optimizer), **(of_stage_3 if stage == 3 else {})})
        devices = {"offload_optimizer": {"device": "cpu" if optimizer else "none"}}
        devices["offload_param"] = {"device": "cpu" if param else "none"}
        config = {**zero(stage, **devices, **NO_BUFFERS), "bf16": {"enabled": True}}
        facts = Facts(config=config, ranks=8 * nodes, ranks_per_node=8, model_parallel_size=1)
        ours = estimate(size, setup_of(facts))
        found.append((ours.host, ours.gpu))
    theirs = ask("estimates", cases)
    for case, ours, (host, gpu) in zip(cases, found, theirs, strict=True):
        both_gradients = (
            2 * size.parameters / 8 / nodes if case["stage"] == 3 and not case["cpu_offload"] else 0
        )
        assert ours[1] == pytest.approx(gpu + both_gradients, rel=1e-3), case
        # their stage 2 counts the GPUs of all nodes for each node
        is_off = nodes > 1 and case["cpu_offload"] and case["stage"] == 2
        assert ours[0] == pytest.approx(host / nodes if is_off else host, rel=1e-3), case


def test_parameters_are_those_of_transformers(tmp_path: Path) -> None:
    small = {
        **LLAMA,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    small |= {"num_key_value_heads": 2, "vocab_size": 1000, "head_dim": 16}
    gpt2 = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
    }
    gpt2 |= {"vocab_size": 50, "n_positions": 128}
    qwen = {
        **small,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
    }
    configs = [small, gpt2, {**gpt2, "vocab_size": 1001}, qwen]
    found = []
    for index, config in enumerate(configs):
        file = write_yaml(tmp_path / f"{index}.json", config)
        size = model_size(DeepSpeedConfig(config={}, model=str(file)))
        assert size is not None
        found.append([size.parameters, size.largest_layer])
    theirs = ask("sizes", configs)
    assert [one for one, _ in found] == [one for one, _ in theirs]
    # the largest module includes its bias, which is not counted here
    assert [one for _, one in found] == pytest.approx([one for _, one in theirs], rel=0.02)
