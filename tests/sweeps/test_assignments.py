"""Points of a sweep from settings on the command line, and from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgen.errors import ConfigErrors, HpcgenError
from hpcgen.sweeps.assignments import MAX_NAME, point_names, points_of, read_points, split_values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4", ["1e-4"]),
        ("1e-4, 3e-4,1e-3", ["1e-4", "3e-4", "1e-3"]),
        ("[1,2],[3, 4]", ["[1,2]", "[3, 4]"]),
        ("[{prefix: a, weight: 1}, {prefix: b}]", ["[{prefix: a, weight: 1}, {prefix: b}]"]),
        ('"99,1,0"', ['"99,1,0"']),
        ("'9,1,0','8,2,0'", ["'9,1,0'", "'8,2,0'"]),
        ('["a]", b],c', ['["a]", b]', "c"]),
        ("it's,don't", ["it's", "don't"]),
        ("", [""]),
        ("null,1", ["null", "1"]),
    ],
)
def test_commas_separate_values_but_not_in_brackets_and_quotes(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_points_are_all_combinations_or_pairs() -> None:
    settings = ["optimizer.lr=1e-4,3e-4", "training.train_iters=20", "training.seed=1,2"]
    shared, points = points_of(settings)
    assert shared == ["training.train_iters=20"]
    assert points == [
        ("optimizer.lr=1e-4", "training.seed=1"),
        ("optimizer.lr=1e-4", "training.seed=2"),
        ("optimizer.lr=3e-4", "training.seed=1"),
        ("optimizer.lr=3e-4", "training.seed=2"),
    ]
    assert points_of(settings, paired=True)[1] == [points[0], points[3]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["optimizer.lr=1e-4"], "no setting has several values"),
        (["optimizer.lr=1e-4,,3e-4"], "--set optimizer.lr=1e-4,,3e-4: a value is empty"),
        (
            ["data.split=99,1,0"],
            "the commas are those of one value, as in the default 99990,8,2; quote each value: ",
        ),
        (["name=a,b", "paths.run_dir=a,b"], "each point has its own name"),
        (
            [f"training.seed={','.join(map(str, range(1001)))}"],
            "1,001 points are more than the maximum of 1,000",
        ),
    ],
)
def test_settings_without_sensible_points_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(HpcgenError) as error:
        points_of(settings)
    assert message in str(error.value)
    assert len(error.value.mistakes) == len(settings)


@pytest.mark.parametrize(
    "path", ["no.such.key", "environment.A", "model.num_layers", "model.rope_scaling.factor"]
)
def test_values_of_any_other_key_are_separate(path: str) -> None:
    assert points_of([f"{path}=1,2"]) == ([], [(f"{path}=1",), (f"{path}=2",)])


def test_pairs_need_the_same_number_of_values() -> None:
    with pytest.raises(HpcgenError, match=r"optimizer\.lr has 2, training\.seed has 3"):
        points_of(["optimizer.lr=1e-4,3e-4", "training.seed=1,2,3"], paired=True)


def test_a_file_has_a_point_per_line(tmp_path: Path) -> None:
    file = tmp_path / "points"
    file.write_text("# small\noptimizer.lr=1e-4 'data.split=9,1,0'\n\noptimizer.lr=3e-4  # larger\n")
    assert read_points(file) == [("optimizer.lr=1e-4", "data.split=9,1,0"), ("optimizer.lr=3e-4",)]


def test_all_mistakes_of_a_file_name_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "points"
    file.write_text("optimizer.lr 1\noptimizer.lr=1\nname=x\noptimizer.lr='1\n")
    with pytest.raises(ConfigErrors) as error:
        read_points(file)
    places = [mistake.where for mistake in error.value.mistakes]
    assert places == [f"{file}:1", f"{file}:3", f"{file}:4"]
    file.write_text("# nothing\n")
    with pytest.raises(HpcgenError, match="has no points"):
        read_points(file)


def test_names_tell_the_values() -> None:
    assert point_names([("optimizer.lr=1e-4",), ("optimizer.lr=-3", "training.seed=2")]) == [
        "lr-1e-4",
        "lr--3_seed-2",
    ]
    assert point_names([("a.x=1", "b.x=[1, 2]"), ("a.x=2", 'b.x="q/r"')]) == [
        "a.x-1_b.x-1-2",
        "a.x-2_b.x-q-r",
    ]
    assert point_names([("a=1e+30",), ("a=1e-30",)]) == ["a-1e30", "a-1e-30"]
    same = ("3e-4", "0.0003", "3.0E-04", ".0003")
    assert set(point_names([(f"optimizer.lr={text}",) for text in same])) == {"lr-3e-4"}
    others = {
        "0.1": "0.1",
        "1.50": "1.5",
        "-2.5e-5": "-2.5e-5",
        "1e9": "1e9",
        "0.0": "0",
        "20": "20",
        "1e": "1e",
        "007": "007",
    }
    assert point_names([(f"a={text}",) for text in others]) == [f"a-{name}" for name in others.values()]
    [long, _] = point_names([("data.split=" + "9" * 200,), ("data.split=1",)])
    assert len(long) == MAX_NAME
