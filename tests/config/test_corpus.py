"""The rules of a corpus: where it comes from, how it is cut, and what the pairs made of it are called."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpcgen.config.corpus import (
    CorpusConfig,
    CorpusJob,
    blend,
    num_outputs,
    output_names,
    problems,
    selection,
)
from hpcgen.config.fields import constraint_problems
from hpcgen.config.run import RunConfig
from hpcgen.config.tokenizer import TokenizerConfig
from trainer.contract.config import BlendConfig, from_dict, to_dict

HUB = {"huggingface": {"repo_id": "cerebras/SlimPajama-627B"}}
URL = {"url": {"template": "https://example.org/{index:05d}.jsonl.zst", "count": 4}}
DIRECTORY = {"directory": "/text"}
MANIFEST = {"manifest": "/text/files.jsonl"}
OWN_SPLITS = {"train": ["train/*"], "valid": ["validation/*"]}


def corpus(**fields: Any) -> CorpusConfig:
    """A corpus of a directory; `fields` replace its own."""
    return from_dict(CorpusConfig, {"directory": "/data", "source": DIRECTORY, **fields}, where="")


def found(**fields: Any) -> list[tuple[str, str]]:
    """Paths and reasons of the problems that the rules find."""
    return [
        (problem.path.removeprefix("data.corpus."), problem.reason)
        for problem in problems(corpus(**fields), TokenizerConfig())
    ]


@pytest.mark.parametrize("source", [HUB, URL, DIRECTORY, MANIFEST])
def test_one_source_of_any_kind_is_right(source: dict[str, Any]) -> None:
    assert found(source=source) == []


def test_a_corpus_needs_a_source() -> None:
    assert found(source={}) == [("source", "has no source")]


def test_a_corpus_has_only_one_source() -> None:
    assert found(source={**URL, **DIRECTORY, **MANIFEST}) == [
        ("source.directory", "is a second source in addition to url"),
        ("source.manifest", "is a second source in addition to url"),
    ]


def test_numbered_files_have_their_number_in_the_address() -> None:
    address = "https://example.org/corpus.jsonl.zst"
    assert found(source={"url": {"template": address}}) == []
    assert found(source={"url": {"template": address, "count": 2}}) == [
        ("source.url", "has the same URL for every file")
    ]


def test_a_password_in_an_address_is_refused() -> None:
    for address in ("https://me:hf_x@example.org/{index}", "https://me@example.org/a"):
        assert found(source={"url": {"template": address}}) == [
            ("source.url", "contains a user name or password in its template")
        ]
    assert found(source={"url": {"template": "https://example.org/me@x/{index}?sig=a@b"}}) == []


def test_a_selection_is_all_that_decides_which_files_are_taken() -> None:
    signed = {"url": {"template": "https://h/{index:05d}.jsonl?sig=hf_x", "count": 4}}
    told = selection(corpus(source=signed, include=["a*", "b"], splits=OWN_SPLITS, sample_files=2))
    assert told == {
        "source.url": "https://h/{index:05d}.jsonl?... (SHA-256 7b57e2a91899), 4 from 0 on",
        "sample_files": "2",
        "include": "a*, b",
        "splits.train": "train/*",
        "splits.valid": "validation/*",
    }
    assert selection(corpus(sample_fraction=0.5)) == {"source.directory": "/text", "sample_fraction": "0.5"}
    assert selection(corpus(source=HUB)) == {"source.huggingface": "cerebras/SlimPajama-627B at main"}
    renewed = {"url": {**signed["url"], "template": "https://h/{index:05d}.jsonl?sig=hf_y"}}
    assert selection(corpus(source=renewed)) != selection(corpus(source=signed))
    assert selection(corpus(num_output_files=3, json_key="body")) == selection(corpus())


@pytest.mark.parametrize("source", [HUB, URL, MANIFEST])
def test_a_token_opens_hubs_and_servers(source: dict[str, Any]) -> None:
    assert found(source={**source, "token_variable": "HF_TOKEN"}) == []


def test_a_directory_takes_no_token() -> None:
    assert found(source={**DIRECTORY, "token_variable": "HF_TOKEN"}) == [
        ("source.token_variable", "has no effect for a directory")
    ]


def test_a_sample_is_a_number_or_a_share() -> None:
    assert found(sample_files=100) == []
    assert found(sample_fraction=0.01) == []
    assert found(sample_files=100, sample_fraction=0.01) == [
        ("sample_fraction", "conflicts with sample_files")
    ]
    assert found(sample_fraction=0.0) == [("sample_fraction", "selects no files")]


def test_a_corpus_with_splits_of_its_own_says_what_to_train_on() -> None:
    assert found(splits=OWN_SPLITS) == []
    assert found(splits={"test": ["test/*"]}) == [
        ("splits.train", "is empty, but valid or test is not"),
    ]


def test_all_problems_are_reported_at_once() -> None:
    assert len(found(source={}, sample_files=1, sample_fraction=0.5, splits={"valid": ["*"]})) == 3


@pytest.mark.parametrize(
    ("place", "accepted", "refused"),
    [
        (
            "source.huggingface.repo_id",
            ["gpt2", "cerebras/SlimPajama-627B", "a_b/c.d-e"],
            ["", "a/b/c", "-a", "/a", "a b", "https://huggingface.co/a/b"],
        ),
        ("source.huggingface.revision", ["main", "v1.0", "refs/pr/3", "2d0accdd58c5"], ["", "-x", "a b"]),
        (
            "source.url.template",
            ["http://h/a", "https://h/{index}", "https://h:8/a-{index:05d}.zst?x=1", "https://h/{index:5}"],
            [
                "h/{index}",
                "ftp://h/{index}",
                "https://h/{number}",
                "https://h/{index:x}",
                "https://h/{{index}}",
            ],
        ),
        ("include.0", ["*.jsonl", "train/*/[ab]?.zst"], ["", "/a", "../a", "a/../b", "a" * 501]),
        ("splits.train.0", ["train/*"], ["/train/*", "train/.."]),
        ("source.token_variable", ["HF_TOKEN", "_a1"], ["HF-TOKEN", "hf_x=y", "1a"]),
        ("directory", ["data", "/data/a b"], ["", "~/data", "../data"]),
    ],
)
def test_forms_of_texts(place: str, accepted: list[str], refused: list[str]) -> None:
    def wrong(text: str) -> bool:
        value: Any = text
        for key in reversed(place.split(".")):
            value = [value] if key == "0" else {key: value}
        return bool(list(constraint_problems(RunConfig, {"data": {"corpus": value}})))

    assert [text for text in accepted if wrong(text)] == []
    assert [text for text in refused if not wrong(text)] == []


def test_each_split_of_its_own_has_its_number_of_files() -> None:
    assert num_outputs(corpus()) == {"corpus": 1}
    both = corpus(splits=OWN_SPLITS, num_output_files=8, num_eval_output_files=2)
    assert num_outputs(both) == {"train": 8, "valid": 2}


def test_names_of_output_files_sort_in_their_order() -> None:
    names = output_names("train", 12)
    assert (names[0], names[-1]) == ("train-00000-of-00012", "train-00011-of-00012")
    assert names == sorted(names)


def test_the_pairs_of_a_corpus_without_splits_are_one_blend() -> None:
    made = blend(corpus(num_output_files=2))
    prefixes = ["/data/tokens/corpus-00000-of-00002", "/data/tokens/corpus-00001-of-00002"]
    assert [dataset.prefix for dataset in made.pop("datasets")] == prefixes
    assert made == {}


def test_the_pairs_of_a_corpus_with_splits_are_a_blend_for_each() -> None:
    made = blend(corpus(splits={**OWN_SPLITS, "test": ["test/*"]}, num_output_files=2))
    assert {split: [dataset.prefix for dataset in datasets] for split, datasets in made.items()} == {
        "train": ["/data/tokens/train-00000-of-00002", "/data/tokens/train-00001-of-00002"],
        "valid": ["/data/tokens/valid-00000-of-00001"],
        "test": ["/data/tokens/test-00000-of-00001"],
    }


@pytest.mark.parametrize("splits", [{}, OWN_SPLITS])
def test_the_trainer_takes_the_blend(splits: dict[str, Any]) -> None:
    made = BlendConfig(**blend(corpus(splits=splits, num_output_files=3)))
    assert len([*made.datasets, *made.train]) == 3
    assert all(dataset.weight is None for dataset in (*made.datasets, *made.train))


def test_a_task_reads_the_job_back_unchanged() -> None:
    job = CorpusJob(
        corpus=corpus(source={**HUB, "token_variable": "HF_TOKEN"}, splits=OWN_SPLITS, sample_fraction=0.5),
        tokenizer=TokenizerConfig(kind="bytes"),
        share="group",
        selection={"include": "a*"},
    )
    assert from_dict(CorpusJob, json.loads(json.dumps(to_dict(job))), where="") == job
