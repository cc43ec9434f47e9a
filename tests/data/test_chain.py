"""The three stages and the fused one: the same pairs, whatever the shape of the corpus and whoever makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.corpus import SplitPatterns, num_outputs, output_names
from hpcgen.data.assignment import assign
from hpcgen.data.manifest import manifest_path, read_manifest

from .data_runs import (
    CHAIN,
    documents,
    json_lines,
    make_units,
    pairs,
    planned_corpus,
    published,
    run_stages,
    write_file,
)


def make_corpus(folder, texts: Sequence[Sequence[str]], suffixes="zst gz jsonl", junk=b"", **options):
    """A corpus of one file for each list of texts. `junk` lines follow the first text of every file."""
    kinds = suffixes.split()
    names = []
    for index, of_file in enumerate(texts):
        kind = kinds[index % len(kinds)]
        names.append(f"part/{index:03d}.jsonl" + ("" if kind == "jsonl" else f".{kind}"))
        content = json_lines(of_file[:1]) + junk + json_lines(of_file[1:])
        write_file(folder / "source" / names[-1], content.removesuffix(b"\n") if index % 2 else content)
    return planned_corpus(folder / "source", folder / "corpus", names, **options)


def expected_bins(job, texts, bad_lines=0) -> dict[str, bytes]:
    """The .bin files by the rule, from the texts themselves, with the bytes tokenizer."""
    eod = tokenizers.eod_id(job.tokenizer)
    manifest = read_manifest(manifest_path(job.directory))
    texts_of = dict(zip([file.name for file in manifest.files], texts, strict=True))
    bins = {}
    for split, count in num_outputs(job.corpus).items():
        files = manifest.of_split(split)
        names = output_names(split, count)
        for share in assign([file.size for file in files], count):
            # None: a bad line, which has a number as well
            lines = [
                text
                for index in share.inputs
                for of_file in [texts_of[files[index].name]]
                for text in (*of_file[:1], *[None] * bad_lines, *of_file[1:])
            ]
            for turn, output in enumerate(share.outputs):
                mine = [text for text in lines[turn :: len(share.outputs)] if text is not None]
                ids = [id for text in mine if text for id in (*text.encode(), eod)]
                bins[f"{names[output]}.bin"] = np.array(ids, "<u2").tobytes()
    return bins


def bins_of(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in found.items() if name.endswith(".bin")}


SHAPES = {
    "many-to-few": ([20] * 11, 3),
    "one-to-one": ([12] * 4, 4),
    "one-to-many": ([40], 5),
    "few-to-many": ([60, 15, 30], 8),
    "uneven": ([1, 1, 90, 1, 1], 2),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_chain_and_prepare_give_the_same_pairs(tmp_path, shape):
    sizes, count = SHAPES[shape]
    texts = [documents(size, seed) for seed, size in enumerate(sizes)]
    job = make_corpus(tmp_path, texts, num_output_files=count)
    make_units(job, *CHAIN)
    chain = pairs(job.directory)
    assert bins_of(chain) == expected_bins(job, texts)
    make_units(job, "prepare")
    assert pairs(job.directory) == chain


def test_own_splits(tmp_path):
    texts = [documents(20, seed) for seed in range(6)]
    names = [f"part/{index:03d}.jsonl{suffix}" for index, suffix in enumerate([".zst", ".gz", ""] * 2)]
    job = make_corpus(
        tmp_path,
        texts,
        splits=dict(zip(names, ["train", "train", "valid", "train", "train", "test"], strict=True)),
        num_output_files=2,
        num_eval_output_files=3,
    )
    patterns = SplitPatterns(train=("a",), valid=("b",), test=("c",))  # the manifest says which file is which
    job = dataclasses.replace(job, corpus=dataclasses.replace(job.corpus, splits=patterns))
    make_units(job, *CHAIN)
    chain = pairs(job.directory)
    assert sorted({name.partition("-")[0] for name in chain}) == ["test", "train", "valid"]
    assert len(chain) == 2 * (2 + 3 + 3)
    assert bins_of(chain) == expected_bins(job, texts)
    make_units(job, "prepare")
    assert pairs(job.directory) == chain


@pytest.mark.parametrize(("sizes", "count"), [([20] * 4, 2), ([50], 4)], ids=["many-to-few", "one-to-many"])
def test_bad_documents_are_left_out_in_both_ways(tmp_path, sizes, count):
    junk = b'{"text": 5}\n\n\xff\xfe\n{"text": "\\ud800"}\n[1]\n'
    texts = [documents(size, seed) for seed, size in enumerate(sizes)]
    job = make_corpus(
        tmp_path, texts, junk=junk, num_output_files=count, bad_documents="skip", max_bad_fraction=0.5
    )
    make_units(job, *CHAIN)
    chain = pairs(job.directory)
    assert bins_of(chain) == expected_bins(job, texts, bad_lines=5)
    rejects = [name for name in published(job.directory) if name.endswith(".rejects.jsonl")]
    assert sum((job.directory / name).read_bytes().count(b"\n") for name in rejects) == 5 * len(sizes)
    make_units(job, "prepare")
    assert pairs(job.directory) == chain


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8), count=st.integers(1, 6), data=st.data())
def test_any_shape(tmp_path_factory, sizes, count, data):
    if count > len(sizes):
        sizes = [size + count for size in sizes]  # enough lines for every output
    texts = [[f"{index} {seed}" for index in range(size)] for seed, size in enumerate(sizes)]
    suffixes = " ".join(data.draw(st.permutations(["zst", "gz", "jsonl"])))
    job = make_corpus(tmp_path_factory.mktemp("shape"), texts, suffixes=suffixes, num_output_files=count)
    make_units(job, *CHAIN)
    chain = pairs(job.directory)
    assert bins_of(chain) == expected_bins(job, texts)
    make_units(job, "prepare")
    assert pairs(job.directory) == chain


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_tasks_and_workers_do_not_matter(tmp_path):
    texts = [documents(10, seed) for seed in range(7)]
    for num_tasks, workers in ((1, 2), (3, 1)):
        job = make_corpus(tmp_path / f"{num_tasks}", texts, num_output_files=3)
        run_stages(job, "prepare", num_tasks=num_tasks, workers=workers)
        assert bins_of(pairs(job.directory)) == expected_bins(job, texts)
