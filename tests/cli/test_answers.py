"""What a model answered while it trained: in the terminal, in JSON and in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import hpcgen
from tests.cli.reports import report
from tests.recorded_run import start, steps, write_run


def answered(directory: Path, *iterations: int, text: str = "at {}") -> Path:
    run = write_run(directory / "run", [start(), *steps(1, 50)], "run")
    lines = [
        {
            "iteration": iteration,
            "time": 1.8e9,
            "number": number,
            "prompt": prompt,
            "answer": text.format(iteration),
            "tokens": 8,
            "finish_reason": "length" if number else "eod",
        }
        for iteration in iterations
        for number, prompt in enumerate(("Say <b>one</b>", "Say two"))
    ]
    (run / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def rows(run: Path) -> list[str]:
    """The cells of the tables about answers."""
    text = report(run).text
    return text[text.index(" Answers ") : text.index(" Configuration ")].split()


def test_first_and_last_answers_are_next_to_each_other(tmp_path: Path) -> None:
    run = answered(tmp_path, 0, 25, 50)
    shown = hpcgen("answers", run).stdout
    assert shown == (
        "Say <b>one</b>\n  0: at 0\n  50: at 50\n\n"
        "Say two\n  0: at 0 [ends by length]\n  50: at 50 [ends by length]\n\n"
        "1 more iteration: --all shows them\n"
    )
    assert "  25: at 25" in hpcgen("answers", run, "--all").stdout
    page = report(run).text
    assert "Answers prompt iteration 0 iteration 50 Say <b>one</b> at 0 at 50 Say two at 0 at 50" in page
    assert "All answers prompt iteration answer Say <b>one</b> 0 at 0 Say <b>one</b> 25 at 25" in page


def test_json_has_every_answer(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = json.loads(hpcgen("answers", answered(tmp_path, 0, 5), "--json").stdout)
    assert [(each["iteration"], each["number"]) for each in found] == [(0, 0), (0, 1), (5, 0), (5, 1)]
    assert found[1] == {
        "iteration": 0,
        "number": 1,
        "prompt": "Say two",
        "answer": "at 0",
        "tokens": 8,
        "finish_reason": "length",
    }


def test_a_long_run_shows_its_course_in_short(tmp_path: Path) -> None:
    run = answered(tmp_path, *range(0, 100), text="x" * 10_000)
    page = report(run)
    assert "Answers along the way" in page.text
    assert len(page.source) < 200_000


@pytest.mark.parametrize("damage", [b'{"iteration": 7', b"[]\n", b"\xff\xfe\n", b'{"iteration": "7"}\n'])
def test_damaged_lines_are_left_out(damage: bytes, tmp_path: Path) -> None:
    run = answered(tmp_path, 0)
    with (run / "answers.jsonl").open("ab") as file:
        file.write(damage)
    assert len(json.loads(hpcgen("answers", run, "--json").stdout)) == 2
    assert report(run).text.count("Say two") == 1


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    shown = hpcgen("answers", answered(tmp_path, 0, text="\x1b[31mred")).stdout
    assert "red" in shown
    assert "\x1b" not in shown


def test_a_run_without_answers_says_what_to_do(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [start(), *steps(1, 5)], "run")
    ended = hpcgen("answers", run)
    assert ended.status == 2
    assert "the run has no answers; set answers.prompts in its run file" in ended.stderr
    assert "Answers" not in report(run).text
