"""Edits of YAML text: the value changes, and every other character stays."""

from __future__ import annotations

import pytest

from hpcgen.config.edits import with_value, with_values, without
from hpcgen.errors import HpcgenError

TEXT = """\
# a profile
extends: local   # the parent
rate: 0.5        # measured
slurm:
  # for all stages
  partition: gpu
  extra_directives:
    - --comment=x  # to find them
    - --mail-type=FAIL
  # the end of slurm

# about flow
flow: {a: 1, b: [1, 2], c: 3} # three
"""


@pytest.mark.parametrize(
    ("keys", "value", "before", "after"),
    [
        (["rate"], 2.5, "rate: 0.5        # measured", "rate: 2.5        # measured"),
        (["slurm", "partition"], "cpu", "partition: gpu", "partition: cpu"),
        (["slurm", "qos"], "a", "    - --mail-type=FAIL\n", "    - --mail-type=FAIL\n  qos: a  # why\n"),
        (["slurm", "train", "qos"], "a", "FAIL\n", "FAIL\n  train: {qos: a}  # why\n"),
        (["flow", "b"], 5, "b: [1, 2]", "b: 5"),
        (["flow", "d"], "x", "c: 3}", "c: 3, d: x}"),
        (["new"], 7, "} # three\n", "} # three\nnew: 7  # why\n"),
        (["slurm"], None, TEXT[TEXT.index("slurm:") : TEXT.index("  # the end")], "slurm: null\n"),
    ],
)
def test_a_value_is_set_and_nothing_else_changes(keys, value, before, after):
    assert TEXT.count(before) == 1
    assert with_value(TEXT, "x.yaml", keys, value, "why") == TEXT.replace(before, after)


@pytest.mark.parametrize(
    ("keys", "before", "after"),
    [
        (["rate"], "rate: 0.5        # measured\n", ""),
        (["slurm", "extra_directives", 0], "    - --comment=x  # to find them\n", ""),
        (["slurm"], TEXT[TEXT.index("slurm:") : TEXT.index("\n# about flow")], ""),
        (["flow", "a"], "a: 1, ", ""),
        (["flow", "c"], ", c: 3", ""),
        (["flow", "b", 1], "[1, 2]", "[1]"),
    ],
)
def test_a_value_is_removed_and_nothing_else_changes(keys, before, after):
    assert TEXT.count(before) == 1
    assert without(TEXT, "x.yaml", keys) == TEXT.replace(before, after)


@pytest.mark.parametrize(
    "text", ["a: {b: {c: 1}}\nd: 2\n", "a:\n  b:\n    c: 1\nd: 2\n", "a: {b: [1]}\nd: 2\n"]
)
def test_sections_that_would_be_empty_are_removed_too(text):
    keys = ["a", "b", 0 if "[" in text else "c"]
    assert without(text, "x.yaml", keys) == "d: 2\n"


@pytest.mark.parametrize(
    ("text", "edited"), [("", "a: 1\n"), ("# only\n", "# only\na: 1\n"), ("{}", "{a: 1}")]
)
def test_a_file_without_values_gets_its_first(text, edited):
    assert with_value(text, "x.yaml", ["a"], 1) == edited


def test_an_edit_that_would_change_another_value_is_refused():
    with pytest.raises(HpcgenError, match=r"x\.yaml: b cannot be changed automatically"):
        with_value("a: &x 1\nb: *x\n", "x.yaml", ["b"], 2)
    with pytest.raises(HpcgenError, match="a cannot be changed"):
        without("a: &x 1\nb: *x\n", "x.yaml", ["a"])


CHOSEN = {"parallelism.tensor_model_parallel_size": 4, "parallelism.sequence_parallel": True}
REASON = "hpcgen layouts: 12% faster"


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        pytest.param(
            "name: a\n\n# Axes.\n# parallelism:\n  # TP.\n  # tensor_model_parallel_size: 2   # from the preset\n"
            "  # SP.\n  # sequence_parallel: false\n\n# Batch.\n# training:\n  # seed: 1\n",
            "name: a\n\n# Axes.\nparallelism:\n  # TP.\n  # hpcgen layouts: 12% faster\n"
            "  tensor_model_parallel_size: 4\n  # SP.\n  sequence_parallel: true\n\n"
            "# Batch.\n# training:\n  # seed: 1\n",
            id="lines that are commented out",
        ),
        pytest.param(
            "parallelism:\n  # hpcgen tune: older\n  tensor_model_parallel_size: 8  # mine\n\n# end\n",
            "parallelism:\n  # hpcgen layouts: 12% faster\n  tensor_model_parallel_size: 4  # mine\n"
            "  sequence_parallel: true\n\n# end\n",
            id="an earlier reason",
        ),
        pytest.param(
            "name: a",
            "name: a\nparallelism:\n  # hpcgen layouts: 12% faster\n  tensor_model_parallel_size: 4\n"
            "  sequence_parallel: true\n",
            id="no section",
        ),
        pytest.param(
            '{"name": "a"}\n',
            '# hpcgen layouts: 12% faster\n{"name": "a", parallelism: {tensor_model_parallel_size: 4, '
            "sequence_parallel: true}}\n",
            id="flow style",
        ),
        pytest.param(
            "# parallelism:\n  # sequence_parallel: 1\nparallelism: {tensor_model_parallel_size: 8}\n",
            "# parallelism:\n  # sequence_parallel: 1\n# hpcgen layouts: 12% faster\n"
            "parallelism: {tensor_model_parallel_size: 4, sequence_parallel: true}\n",
            id="a section next to one that is commented out",
        ),
    ],
)
def test_chosen_values_are_written_with_their_reason(text, edited):
    assert with_values(text, "x.yaml", CHOSEN, REASON) == edited
    assert with_values(edited, "x.yaml", CHOSEN, REASON) == edited


def test_a_text_that_looks_like_a_reason_stays():
    text = "note: |\n  # hpcgen layouts: in a text\n"
    assert with_values(text, "x.yaml", {"a.b": 1}, REASON).startswith(text)
