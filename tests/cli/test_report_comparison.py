"""Several runs in one report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.cli.command import hpcgen
from tests.cli.reports import Page, report
from tests.recorded_run import start, step, steps, write_run


def test_runs_side_by_side(eventful: Path, tmp_path: Path) -> None:
    other = write_run(
        tmp_path / "other", [start(name="other"), *steps(1, 50, lr=1e-4)], "other", optimizer={"lr": 1e-4}
    )
    page = report(eventful, other)
    assert page.charts[:4] == ["loss", "recent-loss", "loss-by-tokens", "validation"]
    assert [series["label"] for series in page.values["charts"]["lr"]["series"]] == ["gpt", "other"]
    assert "optimizer.lr 0.0003 0.0001" in page.text
    assert page.series("loss-by-tokens", 1)["x"][-1] == 50 * 256 * 2048
    ended = hpcgen("report", eventful, eventful)
    assert (ended.status, ended.stderr) == (0, "wrote report.html\n")
    assert "eventful (1) and eventful (2)" in Page(Path("report.html").read_text(encoding="utf-8")).text


def test_rates_are_compared_as_recorded(tmp_path: Path) -> None:
    """Not as medians: a schedule has no noise."""

    def rates(count: int) -> list[dict[str, Any]]:
        return [step(i, lr=3e-3 * min(i - 1, 20) / 20 if i < count else 0.0) for i in range(1, count + 1)]

    for count in (300, 4000):
        runs = [write_run(tmp_path / f"{name}-{count}", [start(name=name), *rates(count)]) for name in "ab"]
        page = report(*runs)
        series = page.series("lr", 1)
        assert "middle_label" not in series
        assert (max(series["middle"]), series["middle"][-1]) == (3e-3, 0)
        assert series.get("low", series["middle"])[0] == 0
        assert "middle_label" in page.series("loss", 1)
        assert "middle_label" not in page.series("memory", 1)


def test_runs_of_one_name_are_distinguished_by_their_directories(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"lr{n}" / "m", [start(name="m"), *steps(1, 3)], "m") for n in range(10)]
    page = report(*runs[:2])
    labels = ["lr0/m", "lr1/m"]
    assert [series["label"] for series in page.values["charts"]["lr"]["series"]] == labels
    assert "lr0/m and lr1/m" in page.text
    assert re.findall(r"^(\S+): silent, ", hpcgen("report", *runs[:2]).stdout, re.MULTILINE) == labels
    page = report(*runs)
    [head] = re.findall(r"<h1>(.*?)</h1>", page.source)
    assert re.sub("<.*?>", "", head) == "lr0/m, lr1/m and 8 others"
    lines = [
        str(a["class"]) for tag, a in page.tags if tag == "path" and str(a["class"]).startswith("smooth")
    ]
    assert lines[:10] == [*(f"smooth c{n}" for n in range(8)), "smooth c0 d1", "smooth c1 d1"]
    legend = [str(a["class"]) for tag, a in page.tags if tag == "li"][:10]
    assert len(set(legend)) == 10


def test_a_label_never_equals_the_name_of_another_run(tmp_path: Path) -> None:
    named = {"one": "m", "two": "m", "three": "two"}
    runs = [write_run(tmp_path / where, [start(name=name), step(1)], name) for where, name in named.items()]
    labels = [f"{tmp_path.name}/one", f"{tmp_path.name}/two", "two"]
    assert re.findall(r"^(\S+): silent, ", hpcgen("report", *runs).stdout, re.MULTILINE) == labels


def test_values_of_the_configuration_can_be_pasted(tmp_path: Path) -> None:
    training = {"seed": 1234, "train_iters": 1_000_000}
    one = write_run(tmp_path / "one", [start(), *steps(1, 3)], training=training, optimizer={"lr": 1.25e-5})
    other = write_run(tmp_path / "other", [start(), *steps(1, 3)], training=training | {"seed": 12345678})
    page = report(one)
    for words in ("seed 1234", "train_iters 1000000", "lr 1.25e-05", "hidden_size 2048"):
        assert words in page.text
    assert "training.seed 1234 12345678" in report(one, other).text
