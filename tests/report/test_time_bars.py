"""The panel of where the time went: its lengths, its limits, and what it says to screen readers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgen.ledger.parts import PARTS
from hpcgen.report.page import render_page
from hpcgen.report.run import read_run
from hpcgen.report.time_bars import MAX_BARS, STYLES, time_bars
from tests.ledger.requeued_run import write_requeued_run
from tests.recorded_run import START, start, step, write_run


def test_each_part_has_its_share_of_the_bar(tmp_path: Path) -> None:
    run = read_run(write_requeued_run(tmp_path / "run"), START + 10_000)
    bars = time_bars(["gpt"], [run.ledger])
    assert bars is not None
    assert [bar.label for bar in bars.bars] == ["all", "attempt 1", "attempt 2"]
    assert bars.bars[0].percent == 100
    assert bars.bars[1].percent + bars.bars[2].percent == pytest.approx(100)
    for bar in bars.bars:
        assert sum(segment.percent for segment in bar.segments) == pytest.approx(100, abs=0.2)
    assert "steps redone 1 min 40 s (4.9%)" in bars.summary
    assert STYLES.keys() == set(PARTS)
    assert len(set(STYLES.values())) == len(PARTS)


def test_a_run_with_many_attempts_shows_the_newest(tmp_path: Path) -> None:
    events = []
    for attempt in range(30):
        events += [
            start(attempt, START + 100 * attempt),
            step(attempt + 1, time=START + 100 * attempt + 50, data_wait_s=0.0),
        ]
    run = read_run(write_run(tmp_path / "run", events), START + 10_000)
    bars = time_bars(["gpt"], [run.ledger])
    assert bars is not None
    assert len(bars.bars) == MAX_BARS + 1
    assert bars.bars[-1].label == "attempt 30"
    assert bars.note == f"The newest {MAX_BARS} of 30."


def test_several_runs_have_a_bar_each_and_hostile_names_stay_text(tmp_path: Path) -> None:
    first = read_run(write_requeued_run(tmp_path / "first"), START + 10_000)
    hostile = "<script>alert(1)</script>"
    events = [start(0, name=hostile), step(1, data_wait_s=0.0)]
    second = read_run(write_run(tmp_path / "second", events, hostile), START + 10_000)
    page = render_page([first, second])
    assert page.count('<div class="row">') == 2
    assert hostile not in page


def test_a_run_without_a_start_has_no_panel(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [step(1)]), START + 10_000)
    assert time_bars(["gpt"], [run.ledger]) is None
    assert 'id="time"' not in render_page([run])
