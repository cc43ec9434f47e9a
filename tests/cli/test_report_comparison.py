"""Several runs in one report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.cli.command import hpcgen
from tests.cli.reports import Page, report
from tests.recorded_run import CONFIG, START, start, step, steps, write_run


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
    legend = [str(a["class"]) for tag, a in page.tags if tag == "li" and "class" in a][:10]
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


def test_each_named_validation_set_is_a_chart(tmp_path: Path) -> None:
    runs = [validated(tmp_path, name, {"mock": True}, split="valid/wiki") for name in ("one", "other")]
    page = report(*runs)
    assert [series["label"] for series in page.values["charts"]["validation-wiki"]["series"]] == [
        "one",
        "other",
    ]
    assert "Validation loss on wiki" in page.text
    assert "validation" not in page.charts
    [curve] = [
        each for each in report(runs[0]).values["charts"]["loss"]["series"] if each["label"] != "train"
    ]
    assert curve["label"] == "valid/wiki"


def validated(directory: Path, name: str, data: dict[str, Any], split: str = "valid", **model: Any) -> Path:
    """A run with a validation loss."""
    loss = {
        "event": "evaluation",
        "iteration": 3,
        "time": START + 7,
        "split": split,
        "loss": 2.5,
        "samples": 8,
    }
    shape = {**CONFIG["model"], **model}
    return write_run(directory / name, [start(name=name), *steps(1, 3), loss], name, data=data, model=shape)


def notes(*runs: Path) -> list[str]:
    """The sentences in the terminal, which are also on the page and in JSON."""
    ended = hpcgen("report", *runs, "-o", "r.html")
    found = [line for line in ended.stdout.splitlines() if "cannot be compared" in line]
    page = Page(Path("r.html").read_text(encoding="utf-8")).text
    assert all(f"{note}." in page for note in found)
    is_marked = any(note.startswith("The validation losses") for note in found)
    assert ("validation loss (not comparable)" in page) == is_marked
    assert [each["not_comparable"] for each in json.loads(hpcgen("report", *runs, "--json").stdout)] == [
        found for _ in runs
    ]
    return found


def test_validation_losses_of_different_data_are_marked(tmp_path: Path) -> None:
    def blend(*names: str) -> list[dict[str, Any]]:
        return [{"prefix": f"{tmp_path}/{name}", "weight": None} for name in names]

    (tmp_path / "link").symlink_to(tmp_path)
    base = validated(tmp_path, "base", {"datasets": blend("a", "b"), "split": "98,1,1"})
    same = validated(tmp_path, "same", {"datasets": blend("link/a", "b"), "split": "98,1,1"})
    assert notes(base, same) == []
    other = validated(tmp_path, "other", {"datasets": blend("a", "c"), "split": "90,5,5"})
    assert notes(base, other) == [
        f"The validation losses cannot be compared: data.datasets is {tmp_path}/b in base, {tmp_path}/c in other; "
        "data.split is 98,1,1 in base, 90,5,5 in other"
    ]
    valid = validated(tmp_path, "valid", {"train": blend("a"), "valid": blend("v")}, seq_length=1024)
    [note] = notes(base, same, valid)
    assert f"data.valid is null in base, null in same, {tmp_path}/v in valid" in note
    assert "model.seq_length is 2048 in base, 2048 in same, 1024 in valid" in note
    unvalidated = write_run(
        tmp_path / "none", [start(name="none"), *steps(1, 3)], "none", data={"mock": True}
    )
    assert notes(base, unvalidated) == []


def test_losses_of_different_vocabularies_are_marked(tmp_path: Path) -> None:
    runs = [
        write_run(
            tmp_path / name,
            [start(name=name), *steps(1, 3)],
            name,
            model={**CONFIG["model"], "vocab_size": size, "padded_vocab_size": 512},
        )
        for name, size in (("one", 257), ("other", 300), ("same", 300))
    ]
    assert notes(*runs[1:]) == []
    assert notes(*runs[:2]) == ["The losses cannot be compared: model.vocab_size is 257 in one, 300 in other"]
