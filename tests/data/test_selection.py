"""The files of a corpus: patterns, names that are not safe, and samples."""

from __future__ import annotations

import itertools

import pytest

from hpcgen.config.corpus import CorpusConfig, SplitPatterns
from hpcgen.data.listed_files import ManifestFile
from hpcgen.data.selection import evenly_spread, matches, sample_sizes, select
from hpcgen.errors import ConfigErrors, HpcgenError


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*.jsonl", ["a.jsonl", "x/y/a.jsonl"], ["a.jsonl.gz", "a.JSONL"]),
        ("train/*", ["train/a", "train/b/c"], ["xtrain/a", "train"]),
        ("train/**/*.zst", ["train/a.zst", "train/b/c/a.zst"], ["trainx.zst"]),
        ("**/x/**/a", ["x/a", "1/x/2/a", "x/2/3/a"], ["xa", "1/xx/a"]),
        ("part-[0-4]?.gz", ["part-37.gz"], ["part-57.gz", "part-3.gz"]),
    ],
)
def test_patterns(pattern: str, yes: list[str], no: list[str]) -> None:
    assert [name for name in yes + no if matches(name, pattern)] == yes


def chosen(names: list[str], sizes: list[int | None] | None = None, **corpus: object) -> list[str]:
    files = [
        ManifestFile(name=name, split="corpus", size=size, url="https://a.example")
        for name, size in zip(names, sizes or [1] * len(names), strict=True)
    ]
    config = CorpusConfig(directory="/x", **corpus)  # type: ignore[arg-type]
    return [file.name for file in select(files, config, "source").files]


@pytest.mark.parametrize(
    "name",
    [
        "../a.jsonl",
        "/etc/a.jsonl",
        "a/../../b.jsonl",
        "a//b.jsonl",
        "./a.jsonl",
        "a\\b.jsonl",
        "a\nb.jsonl",
        "a\x1b[31m.jsonl",
        "C:/a.jsonl",
        "\u202ea.jsonl",
        "x" * 300 + ".jsonl",
        "good.jsonl.record.json",
    ],
)
def test_names_that_are_not_safe(name: str) -> None:
    with pytest.raises(ConfigErrors, match=r"source: 1 file with an unsafe name") as e:
        chosen(["good.jsonl", name], include=("*",))
    assert str(e.value).isprintable()


def test_every_problem_is_reported_at_once() -> None:
    names = ["a.jsonl.zst", "a.jsonl.gz", "b.jsonl", "b.jsonl", "c.csv", "d.jsonl", "../e.jsonl"]
    with pytest.raises(ConfigErrors) as error:
        chosen(names, [1, 1, 1, 1, 1, 0, None], include=("*",))
    assert list(error.value.messages) == [
        "source: 1 file with an unsafe name (it must be relative, printable, not too long, and without '..' or '\\'): "
        "'../e.jsonl'; correct the source",
        "source: 1 file with a name that does not end in .jsonl or .json, optionally followed by .zst or .gz, or in "
        ".parquet: 'c.csv'; exclude them with data.corpus.include",
        "source: duplicate file names: b.jsonl; give each file its own name",
        "source: 1 file of 0 bytes: 'd.jsonl'; download them again, or exclude them with data.corpus.include",
    ]


def test_names_that_extraction_would_make_the_same() -> None:
    with pytest.raises(
        ConfigErrors, match=r"file names that would be duplicates after extraction: a\.jsonl;"
    ):
        chosen(["a.jsonl.zst", "a.jsonl.gz"])


def test_a_file_that_is_a_folder_of_another() -> None:
    with pytest.raises(
        ConfigErrors, match=r"file names that are also directories of other files: a/b\.jsonl; exclude"
    ):
        chosen(["a/b.jsonl", "a/b.jsonl/c/d.jsonl", "a/b.jsonlx.jsonl"])


def test_json_lines_under_other_names_need_a_pattern() -> None:
    names = ["en/c4-train.00000-of-01024.json.gz", "a.jsonl", "info.json"]
    assert chosen(names) == ["a.jsonl"]
    assert chosen(names, include=("en/*.json.gz",)) == names[:1]


def test_files_in_no_split_are_ignored() -> None:
    corpus = {"splits": SplitPatterns(train=("train/*",))}
    assert chosen(["train/a.jsonl", "x/empty.jsonl"], [1, 0], **corpus) == ["train/a.jsonl"]


def test_samples_are_spread_evenly() -> None:
    assert evenly_spread(10, 5) == [1, 3, 5, 7, 9]
    assert evenly_spread(59166, 3) == [9861, 29583, 49305]
    for count in range(1, 40):
        for taken in range(1, count + 1):
            indices = evenly_spread(count, taken)
            assert len(set(indices)) == taken
            assert indices == sorted(indices)
            assert 0 <= indices[0] <= indices[-1] < count
            gaps = [after - before for before, after in itertools.pairwise(indices)]
            assert not gaps or max(gaps) - min(gaps) <= 1


def test_samples_are_in_proportion() -> None:
    counts = {"train": 59000, "valid": 100, "test": 66}
    assert sample_sizes(counts, 100) == {"train": 98, "valid": 1, "test": 1}
    assert sample_sizes(counts, 3) == {"train": 1, "valid": 1, "test": 1}
    assert sample_sizes(counts, 10**6) == counts
    assert sum(sample_sizes({"a": 5, "b": 3}, 7).values()) == 7
    with pytest.raises(HpcgenError, match=r"set data\.corpus\.sample_files to at least 3"):
        sample_sizes(counts, 2)


def test_a_fraction_takes_at_least_one_file() -> None:
    assert chosen([f"{n}.jsonl" for n in range(9)], sample_fraction=1e-9) == ["4.jsonl"]
    assert len(chosen([f"{n}.jsonl" for n in range(1000)], sample_fraction=0.1)) == 100
