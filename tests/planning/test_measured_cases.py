"""The table of our own measured runs (benchmarks.planner.measure)."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.planner.measure import COLUMNS, write
from benchmarks.planner.own import documents_of
from benchmarks.planner_cases import CASES


def test_a_case_has_one_row_in_the_order_of_the_cases(tmp_path: Path) -> None:
    first, second = CASES[0].name, CASES[1].name
    file = tmp_path / "own.csv"
    for case, step_s in ((second, 2.0), (first, 1.0), (second, 3.0)):
        row = dict.fromkeys(COLUMNS, "") | {"case": case, "step_s": step_s, "gpu": "H100"}
        write(file, row | {"versions": {"torch": "2.11", "cuda": "13.0"}})
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["case"], row["step_s"]) for row in rows] == [(first, "1.0"), (second, "3.0")]
    assert rows[0]["versions"] == "torch 2.11 cuda 13.0"


def test_documents_end_where_samples_end() -> None:
    """As in the trainer, a document that continues in the next sample is two."""
    case = next(case for case in CASES if case.data)
    length, ends = 0, set()
    for each in documents_of(case):
        assert each > 0
        length += each
        ends.add(length)
    sample = case.model["seq_length"]
    assert ends.issuperset(range(sample, length + 1, sample))
    assert all(not documents_of(case) for case in CASES if not case.data)
