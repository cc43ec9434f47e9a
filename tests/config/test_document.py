"""YAML as people write it: what it means, where each value was written, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcgen.config import document
from hpcgen.config.document import MAX_BYTES, constant, merge, override, parse, read
from hpcgen.errors import HpcgenError, Problem


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("1e-4", 1e-4),
        ("6E-5", 6e-5),
        ("010", 10),
        ("0x10", 16),
        ("12:30:00", "12:30:00"),
        ("24:00:00", "24:00:00"),
        ("1-00:00:00", "1-00:00:00"),
        ("25.11", 25.11),
        ("1_000", 1000),
        ("~", None),
        ("", None),
        ("null", None),
        ("'no'", "no"),
        ('"a\\tb"', "a\tb"),
        ("{a: [1, 2.5, x]}", {"a": [1, 2.5, "x"]}),
        ("|\n  two\n  lines", "two\nlines\n"),
    ],
)
def test_values_have_the_expected_types(text, value):
    found = parse(f"key: {text}\n", "f").values["key"]
    assert found == value
    assert type(found) is type(value)


MISTAKES = {
    "a: 1\nb: 2\na: 3\n": "run.yaml:3",
    "a: [1\n": "run.yaml:1",
    "a: 'b\nc: 1\n": "run.yaml:1",
    "a:\n  b: 2\n  c:1\nd: 2\n": "run.yaml:3",
    "a: %b\n": "run.yaml:1",
    "a: 1\n  b: 2\n": "run.yaml:2",
    "a: 1\n\tb: 2\n": "run.yaml:2",
    "a: !!python/object/apply:os.system [touch canary]\n": "run.yaml:1",
    "a:\n  b: !secret x\n": "run.yaml:2",
    "a: 2024-01-01\n": "run.yaml:1",
    "a: 2024-01-01 10:00:00\n": "run.yaml:1",
    "a: !!binary aGk=\n": "run.yaml:1",
    "a: !!set {x, y}\n": "run.yaml:1",
    "1: x\n": "run.yaml:1",
    "? [a, b]\n: x\n": "run.yaml:1",
    "- a\n- b\n": "run.yaml:1",
    "only text\n": "run.yaml:1",
    "a: 1\n---\nb: 2\n": "run.yaml:2",
    "a: *nowhere\n": "run.yaml:1",
    "a: \x07\n": "run.yaml",
    "a: \x00\n": "run.yaml",
    "b: 1\na: " + "[" * 40 + "]" * 40: "run.yaml:2",
    "b: 1\na: " + "[" * 5000 + "]" * 5000: "run.yaml:2",
    "b: &a [x]\na: &a [*a, &b [*b]]\n": "run.yaml:2",
    "b: 1\na: " + "9" * 5000: "run.yaml:2",
    "b: 1\na: !!bool maybe\n": "run.yaml:2",
    "b: 1\na: !!int x\n": "run.yaml:2",
}


"""Texts that are refused, with the place that the message names."""


def mistakes(directory: Path, text: str) -> tuple[Problem, ...]:
    """The mistake in `text`, the text of run.yaml."""
    with pytest.raises(HpcgenError) as error:
        parse(text, "run.yaml")
    return error.value.mistakes


@pytest.mark.parametrize("text", MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_one_line_with_the_place(text, tmp_path):
    [mistake] = mistakes(tmp_path, text)
    assert mistake.where == MISTAKES[text]
    assert "\n" not in str(mistake)


def test_an_anchor_may_be_used_again():
    """YAML lets the newest one count; ruamel's warning about it is for programmers."""
    assert parse("a: &x 1\nb: &x 2\nc: *x\n", "run.yaml").values["c"] == 2


def test_nested_aliases_are_refused_before_they_are_expanded():
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(HpcgenError, match="more than 20000 values after expanding aliases"):
        parse("\n".join(["l0: &l0 [x, x, x, x, x, x, x, x, x, x]", *levels]), "bomb.yaml")


def test_nested_merges_are_refused_before_they_are_expanded():
    text = "{k: 1}"
    for level in range(8):  # 10 ** 8 keys
        text = f"{{<<: [&n{level} {text}{f', *n{level}' * 9}]}}"
    with pytest.raises(HpcgenError, match=r"bomb\.yaml:1: more than 20000 values after expanding aliases"):
        parse(f"a: {text}\n", "bomb.yaml")
    assert parse("a: &a {b: 1, <<: *a}\n", "f").values == {"a": {"b": 1}}


def test_a_yaml_version_may_be_given():
    assert parse("%YAML 1.2\n---\na: yes\n", "f").values == {"a": "yes"}
    assert parse("%TAG !e! tag:yaml.org,2002:\n---\na: !e!int 5\n", "f").values == {"a": 5}
    for version in ("1.1", "1.3", "2.0"):
        with pytest.raises(
            HpcgenError, match=rf"f: %YAML {version}: only YAML 1\.2 is supported; remove the line"
        ):
            parse(f"%YAML {version}\n---\na: 1\n", "f")
    with pytest.raises(HpcgenError, match="expected a single document"):
        parse("a: 1\n...\n%YAML 1.2\n---\nb: 2\n", "f")


@pytest.mark.parametrize("number", ["9" * 60_000, "0x" + "f" * 60_000, "0o" + "7" * 60_000, "1" + "0" * 400])
def test_a_huge_integer_is_refused(number):
    with pytest.raises(HpcgenError, match=r"f:2: '.{,60}\.\.\. is not a value of type int"):
        parse(f"name: x\na: {number}\n", "f")
    assert parse(f"a: {2**1000}\n", "f").values == {"a": 2**1000}


def test_a_recursive_alias_is_refused():
    with pytest.raises(HpcgenError, match=r"run\.yaml:1: nested too deeply"):
        parse("a: &a [*a]\n", "run.yaml")


def test_aliases_and_merges_are_followed():
    text = "base: &base {nodes: 2, time: 1:00}\ntrain:\n  <<: *base\n  nodes: 4\nsame: *base\n"
    found = parse(text, "f")
    assert found.values["train"] == {"nodes": 4, "time": "1:00"}
    assert found.values["same"] == {"nodes": 2, "time": "1:00"}
    assert found.origin("train.nodes") == "f:4"


def test_every_value_knows_its_line():
    text = "# a comment\nname: x\n\nslurm:\n  train:\n    nodes: 2\n"
    text += "data:\n  datasets:\n  - prefix: a\n  - prefix: b\n    weight: 2\n"
    found = parse(text, "run.yaml")
    assert {
        path: found.origin(path) for path in ("name", "slurm.train.nodes", "data.datasets[1].weight")
    } == {
        "name": "run.yaml:2",
        "slurm.train.nodes": "run.yaml:6",
        "data.datasets[1].weight": "run.yaml:11",
    }
    assert found.origin("slurm.train.time") is None
    assert found.nearest_origin("slurm.train.time") == "run.yaml:5"
    assert found.nearest_origin("model.num_layers") == "run.yaml"
    assert found.get("data.datasets[1].prefix") == "b"
    assert found.get("data.datasets[2].prefix") is None


def test_an_empty_file_is_an_empty_document():
    assert parse("# nothing\n", "f").values == {}


def test_reading(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("name: größe\n", encoding="utf-8")
    assert read(path).values == {"name": "größe"}
    assert read(path).origin("name") == f"{path}:1"


def test_what_cannot_be_read(tmp_path: Path):
    path = tmp_path / "run.yaml"
    with pytest.raises(HpcgenError, match="no such file"):
        read(path)
    with pytest.raises(HpcgenError, match="not a regular file"):
        read(tmp_path)
    path.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(HpcgenError, match=r"not UTF-8 text \(byte 9\)"):
        read(path)
    path.write_bytes(b"#" * MAX_BYTES + b"\n")
    with pytest.raises(HpcgenError, match=f"{MAX_BYTES + 1} bytes is more than the maximum of"):
        read(path)
    path.write_bytes(b"#" * (MAX_BYTES - 1) + b"\n")
    assert read(path).values == {}
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(HpcgenError):
            read(Path(name))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.touch(mode=0)
    with pytest.raises(HpcgenError, match="Permission denied"):
        read(path)


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("a=1", "a", 1),
        ("a.b=1e-4", "a.b", 1e-4),
        ("a.b=x=y", "a.b", "x=y"),
        ("a.b=", "a.b", None),
        ("a.b=[1, {c: no}]", "a.b", [1, {"c": "no"}]),
        ("environment.NCCL_DEBUG=INFO", "environment.NCCL_DEBUG", "INFO"),
        ("a.time=12:00:00", "a.time", "12:00:00"),
    ],
)
def test_an_override_is_a_document_with_one_value(assignment, path, value):
    found = override(assignment)
    assert found.get(path) == value
    assert found.origin(path) == f"--set {path}"


@pytest.mark.parametrize("assignment", ["a", "=1", "a..b=1", "a.=1", "a b=1", "$(x)=1", "a\n=1"])
def test_a_malformed_override_is_refused(assignment):
    with pytest.raises(HpcgenError, match=r"--set .*: expected KEY\.KEY=VALUE; for example"):
        override(assignment)


def test_an_override_that_is_not_yaml_is_reported():
    with pytest.raises(HpcgenError, match=r"--set a=\[1.*not valid YAML"):
        override("a=[1")


def test_merging_overrides_single_keys_and_complete_lists():
    lower = parse("a: {x: 1, y: 2}\nb: [1, 2, 3]\nc: 1\n", "low")
    upper = parse("a: {y: 3, z: 4}\nb: [9]\n", "up")
    merged = merge(lower, upper)
    assert merged.values == {"a": {"x": 1, "y": 3, "z": 4}, "b": [9], "c": 1}
    origins = {path: merged.origin(path) for path in ("a.x", "a.y", "a.z", "b[0]", "b[1]", "c")}
    assert origins == {
        "a.x": "low:1",
        "a.y": "up:1",
        "a.z": "up:1",
        "b[0]": "up:2",
        "b[1]": None,
        "c": "low:3",
    }
    assert lower.values["a"] == {"x": 1, "y": 2}


def test_a_value_over_a_section_and_a_section_over_a_value():
    merged = merge(parse("a:\n", "low"), override("a.b.c=1"))
    assert merged.values == {"a": {"b": {"c": 1}}}
    assert merged.origin("a.b.c") == "--set a.b.c"
    merged = merge(parse("a: {b: 1}\n", "low"), override("a=5"))
    assert merged.values == {"a": 5}
    assert merged.origin("a.b") is None


def test_an_override_keeps_the_origins_of_other_values():
    merged = merge(parse("a:\n  b: 1\n  c: 2\n", "f"), override("a.b=3"))
    assert (merged.origin("a.b"), merged.origin("a.c"), merged.origin("a")) == ("--set a.b", "f:3", "f:1")


def test_a_constant_has_one_origin():
    found = constant({"a": {"b": (1, 2)}}, "preset x")
    assert found.values == {"a": {"b": [1, 2]}}
    assert {found.origin(path) for path in ("a", "a.b", "a.b[1]")} == {"preset x"}


def test_the_limits_are_sane():
    """A run file has a few hundred values; the limits are far above that and far below what hurts."""
    assert document.MAX_DEPTH >= 16
    assert document.MAX_VALUES >= 10_000
