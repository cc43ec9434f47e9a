"""Times of kernels: the physical form, and its correction by measured rows."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest

from hpcgen.config.node_types import load_node_type
from hpcgen.planning.step_time.kernels import IN_A_STEP, Attention, Kernels, Precision, Product, product_of
from hpcgen.planning.step_time.machine import Machine
from hpcgen.planning.step_time.measurements import Measurements

UNMEASURED = dataclasses.replace(Machine.of(load_node_type("h100-sxm"), nvlink_devices=8), measurements=None)


def kernels(**sections: tuple[dict[str, Any], ...]) -> Kernels:
    """The kernels of an H100 of which only these rows are measured."""
    table = Measurements(UNMEASURED.gpu_model, **sections)
    return Kernels(dataclasses.replace(UNMEASURED, measurements=table))


FORM = kernels()
SQUARE = Product(8192, 8192, 8192)
ATTENTION = Attention(8192, 1, 32, 8, 128, 128)


def product_row(product: Product, factor: float) -> dict[str, Any]:
    """A row in which a product takes `factor` times as long as the form computes."""
    names = dict(zip(("m", "n", "k", "pass", "precision", "groups"), product, strict=False))
    return names | {"us": factor * FORM.product(product) * 1e6}


def test_a_large_product_is_near_its_peak() -> None:
    flops = 2 * 8192**3 / FORM.product(SQUARE)
    assert 0.65 < flops / 989e12 < 0.75


def test_a_product_pays_for_an_incomplete_wave() -> None:
    """132 processors compute 132 tiles at once. One more tile is a second wave."""
    one_wave, two_waves = (FORM.product(Product(128 * tiles, 256, 8192)) for tiles in (132, 133))
    assert two_waves > 1.4 * one_wave


def test_bytes_limit_a_narrow_product() -> None:
    narrow = FORM.product(Product(8192, 8192, 64))
    assert 8192 * 8192 * 2 / narrow < UNMEASURED.memory_bandwidth


@pytest.mark.parametrize(
    ("product", "low", "high"),
    [
        (SQUARE, 1.45 * IN_A_STEP.value, 1.5 * IN_A_STEP.value),
        (SQUARE._replace(m=7000), 1.4 * IN_A_STEP.value, 1.5 * IN_A_STEP.value),
        (SQUARE._replace(m=512, k=256), 1.2 * IN_A_STEP.value, 1.4 * IN_A_STEP.value),
        (SQUARE._replace(kind="weight_gradient"), 1.0, 1.0),
        (SQUARE._replace(precision="fp8"), 1.0, 1.0),
    ],
    ids=["the row", "near it", "between two rows", "another pass", "another precision"],
)
def test_rows_correct_products_of_similar_shape(product: Product, low: float, high: float) -> None:
    rows = product_row(SQUARE, 1.5), product_row(SQUARE._replace(m=256, k=128), 1.2)
    factor = kernels(products=rows).product(product) / FORM.product(product)
    assert low <= factor <= high + 1e-9


def test_rows_correct_attention_and_memory_bound_kernels() -> None:
    """A kernel without rows is like the measured ones."""
    names = ("seq", "batch", "heads", "kv_heads", "qk_dim", "v_dim", "pass")
    attention = dict(zip(names, ATTENTION, strict=True)) | {"us": 2e6 * FORM.attention(ATTENTION)}
    size = 10**8
    norm = {
        "kernel": "norm",
        "pass": "forward",
        "bytes": size,
        "width": 4096,
        "us": 3e6 * FORM.memory("norm", "forward", size),
    }
    measured = kernels(attention=(attention,), memory=(norm,))
    assert measured.attention(ATTENTION) == pytest.approx(2 * IN_A_STEP.value * FORM.attention(ATTENTION))
    for name in ("norm", "swiglu"):
        assert measured.memory(name, "forward", size, 4096) == pytest.approx(
            3 * FORM.memory(name, "forward", size)
        )
    assert measured.memory("norm", "forward", 0) == 0


def test_what_is_not_measured_is_guessed() -> None:
    assert len(FORM.guesses(["bf16", "fp8"])) == 5
    found = [str(each) for each in kernels(products=(product_row(SQUARE, 1),)).guesses(["bf16", "fp8"])]
    assert not any("bf16 at 73%" in each for each in found)
    assert any("fp8 at 70%" in each for each in found)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_half_of_the_measured_products_predict_the_others(precision: Precision) -> None:
    """The physical form and near rows are right for shapes that were not measured."""
    table = Machine.of(load_node_type("h100-sxm"), nvlink_devices=8).measurements
    assert table is not None
    half = kernels(products=table.products[::2])
    errors = [
        half.product(product_of(row)) / IN_A_STEP.value / (row["us"] * 1e-6) - 1
        for row in table.products[1::2]
        if row["precision"] == precision and row["groups"] == 1
    ]
    assert len(errors) > 100
    assert statistics.median(map(abs, errors)) < 0.04
    assert abs(statistics.mean(errors)) < 0.02
