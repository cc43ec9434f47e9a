"""Keys of a configuration that the report shows."""

from __future__ import annotations

from hpcgen.report.essentials import shown


def test_values_that_are_empty_or_off_are_left_out() -> None:
    training = {"precision": "bf16", "fp8": None, "metrics": [], "z_loss_coeff": 1e-4}
    assert list(shown("training", training)) == [("precision", "bf16"), ("z_loss_coeff", 1e-4)]
    assert list(shown("training", {"metrics": ["own.py:accuracy"]})) == [("metrics", ["own.py:accuracy"])]
