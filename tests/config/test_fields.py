"""The constrained types, each from both sides, and Slurm's times."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgen.config import cluster, container, fields
from hpcgen.config.fields import constraint_problems, seconds, slurm_time
from trainer.contract.config import Count, FilePath, Fraction, NonNegative, PositiveFloat

ACCEPTED: list[tuple[Any, list[Any]]] = [
    (fields.Name, ["a", "gpt-175b", "GPT_3.v2", "0", "a" * 64]),
    (fields.SlurmWord, ["hpc", "a100|h100", "[rack1|rack2]&ib", "gpu,cpu", "proj:sub", "team@site", "a*2"]),
    (fields.Directive, ["--mail-type=FAIL,END", "--no-kill", "--comment=a/b%c", "--nodelist=n[1-4,7]"]),
    (fields.EnvironmentName, ["A", "_x", "NCCL_IB_HCA", "http_proxy"]),
    (FilePath, ["a", "/a/b.c", "./a", "a b/ü", "a..b/..c", "x" * 255, "/" + "x/" * 499]),
    (fields.RunPath, ["runs/a", "/shared/runs/a_1", "/a/user@site/x=1+2", "."]),
    (fields.TimeLimit, ["30:00", "12:00:00", "2-00:00:00", "1-12", "1-12:30", "100:00"]),
    (fields.Mask, ["0x0", "0xfff000", "0x" + "f" * 254]),
    (cluster.GpuRequest, ["gpus-per-node", "none", "gpu:8", "gpu:h100:8", "gpu:nvidia_h100-80gb.x:16"]),
    (cluster.SlurmVersion, ["22.05", "25.11", "23.02.7"]),
    (cluster.GroupName, ["hpc", "_x", "team-a"]),
    (container.MountPath, ["/", "/nvme", "/opt/a-b/c.xml", "/a/..b"]),
    (
        container.Image,
        [
            "/images/x.sqsh",
            "nvcr.io#nvidia/pytorch:25.03-py3",
            "reg:5000#a/b:1",
            "ubuntu",
            "nvcr.io#nvidia/pytorch@sha256:" + "a" * 64,
        ],
    ),
    (Count, [1, 2**53]),
    (NonNegative, [0]),
    (PositiveFloat, [1e-300, 1, 0.5]),
    (Fraction, [0, 0.0, 0.999]),
]
REFUSED: list[tuple[Any, list[Any]]] = [
    (fields.Name, ["", ".a", "-a", "a b", "a/b", "a" * 65, "ä", "a\n", "$(x)"]),
    (
        fields.SlurmWord,
        ["", "-a", "a b", "a'b", 'a"b', "a$b", "a`b", "a\\b", "a;b", "a#b", "a\nb", "a" * 257],
    ),
    (
        fields.Directive,
        ["", "-N4", "--", "--A", "mail", "--a b", "--a=b c", "--a=$x", "--a=`x`", "--a=", "--a=b\n"],
    ),
    (fields.EnvironmentName, ["", "1A", "A-B", "A=B", "A B", "Ä", "BASH_FUNC_x%%"]),
    (FilePath, ["", "~/a", "-a", "..", "../a", "a/../b", "a/..", "a\0b", "x" * 256, "/" + "x/" * 501]),
    (fields.RunPath, ["", "-a", "a b", "a%j", "~/a", "a/../b", "a$b", "a:b", "ü", "a\\b"]),
    (
        fields.TimeLimit,
        ["", "30", "1:2", "infinite", "UNLIMITED", "-1:00", "1:00:0", "1 day", "1２:00:00", "9" * 9 + "-00"],
    ),
    (fields.Mask, ["", "fff", "0xFFF", "0x", "0x" + "f" * 255]),
    (
        cluster.GpuRequest,
        ["", "8", "gpu", "gpu:0", "gpu:h100", "gpu:08", "gpu:1８", "gpu:8,gpu:4", "gpu:a b:8"],
    ),
    (cluster.SlurmVersion, ["", "25", "25.1", "v25.11"]),
    (cluster.GroupName, ["", "1a", "a b", "a" * 33]),
    (
        container.MountPath,
        ["", "a", "~/a", "/a b", "/a,b", "/a:b", "/$x", "/a/..", "/../a", "/a'b", "/a\\b", "/a`b"],
    ),
    (
        container.Image,
        [
            "",
            "x.sqsh",
            "./x.sqsh",
            "images/x.sqsh",
            "~/x.sqsh",
            "/a b.sqsh",
            "nvcr.io#NVIDIA/x",
            "docker://x",
            "a#b#c",
            "-x",
            "a:b c",
            "x@sha256:abc",
        ],
    ),
    (Count, [0, -1, 2**53 + 1, 10**400]),
    (NonNegative, [-1]),
    (PositiveFloat, [0, -1.0, 1e301, float("nan"), float("inf")]),
    (Fraction, [-0.1, 1.0]),
]


@pytest.mark.parametrize(("hint", "value"), [(hint, value) for hint, values in ACCEPTED for value in values])
def test_accepted(hint, value):
    assert list(constraint_problems(hint, value, "key")) == []


@pytest.mark.parametrize(("hint", "value"), [(hint, value) for hint, values in REFUSED for value in values])
def test_refused_with_one_reason(hint, value):
    [problem] = constraint_problems(hint, value, "key")
    assert problem.path == "key"
    assert re.match("must be |is empty$|contains the unprintable character ", problem.reason)


@pytest.mark.parametrize(
    "character", ["\n", "\r", "\0", "\x1b", "\x7f", "\x85", "\u2028", "\u202e", "\ud800", "\u00a0"]
)
def test_unprintable_characters_are_refused_in_every_text(character):
    [problem] = constraint_problems(str, f"a{character}b", "key")
    assert problem.reason == f"contains the unprintable character {character!a}"
    assert problem.reason.isascii()


@dataclass
class Inner:
    count: Count = 1
    name: fields.Name | None = None


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    many: tuple[Inner, ...] = ()
    named: dict[fields.EnvironmentName, Inner] = field(default_factory=dict)
    texts: dict[fields.EnvironmentName, str] = field(default_factory=dict)


def test_every_value_is_reported_at_its_path():
    values = {
        "inner": {"count": 0, "name": "a b"},
        "many": [{"count": 1}, {"count": -1, "name": None}],
        "named": {"A": {"count": 0}, "1B": {}},
        "texts": {"A": "a\nb"},
    }
    assert [problem.path for problem in constraint_problems(Outer, values)] == [
        "inner.count",
        "inner.name",
        "many[1].count",
        "named.A.count",
        "named.1B",
        "texts.A",
    ]


def test_values_of_a_wrong_type_are_left_to_the_schema():
    assert list(constraint_problems(Outer, {"inner": 5, "many": {}, "named": [], "texts": {"A": 1}})) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30:00", 1800),
        ("0:01", 1),
        ("90:30", 5430),
        ("12:00:00", 43200),
        ("1:02:03", 3723),
        ("2-00:00:00", 172800),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("0-0", 0),
    ],
)
def test_seconds_of_slurms_times(text, expected):
    assert seconds(text) == expected


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0, "00:00:00"), (90, "00:01:30"), (86399, "23:59:59"), (86400, "1-00:00:00"), (172_800, "2-00:00:00")],
)
def test_slurms_spelling(duration_s, text):
    assert slurm_time(duration_s) == text


@given(st.integers(min_value=0, max_value=9999 * 86400))
def test_times_survive_the_round_trip(duration_s):
    text = slurm_time(duration_s)
    assert seconds(text) == duration_s
    assert list(constraint_problems(fields.TimeLimit, text)) == []
