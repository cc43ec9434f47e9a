"""The flags that benchmarks and docs give to pretrain_gpt.py; make test-exchange runs it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from benchmarks import bare_loop, exchange, train
from hpcgen.config.megatron_options import rows

REQUIRED = {"eval-interval"}
"""Without a default in core_v0.16.1 and core_v0.19.0, whose training.py divides by it whatever eval-iters is."""

CORPUS = argparse.Namespace(
    corpus=Path("corpus"), directory=Path("here"), device="cuda", precision="bf16", steps=20
)
CASES = {case.name: case for case in train.CASES if case.has_peers}
DOCS = Path(__file__).parents[2] / "docs" / "exchange.md"


def check(words: list[str]) -> None:
    given = {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")}
    assert given >= REQUIRED
    assert given <= {name for name, row in rows().items() if row.exists}


@pytest.mark.parametrize("name", CASES)
def test_the_speed_benchmark(name: str) -> None:
    check(train.megatron_lm_flags(CASES[name], CORPUS, Path("scratch")))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "num_moe_experts" in case.model])
def test_all_programs_of_the_speed_benchmark_load_experts_evenly(name: str) -> None:
    """Else each program has its own router, and the loads of the experts decide which one is faster."""
    config = train.configuration(CASES[name], Path("corpus"), Path("run"))
    assert config["model"]["layer_spec"].endswith("benchmarks/even_routing.py:evenly_routed")
    assert bare_loop.expert_config(config)["moe_router_force_load_balancing"]
    switch = "--moe-router-force-load-balancing"
    assert switch in train.megatron_lm_flags(CASES[name], CORPUS, Path("scratch"))


def test_the_exchange_benchmark() -> None:
    check(exchange.flags(CORPUS, Path("checkpoints")))


def test_the_documentation() -> None:
    [command] = re.findall(
        r"^torchrun .* pretrain_gpt\.py \\\n((?:.*\\\n)*.*)\n", DOCS.read_text(), re.MULTILINE
    )
    check(command.split())
