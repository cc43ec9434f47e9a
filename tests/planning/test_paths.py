"""Paths: the base of relative ones, the pairs that the trainer reads, and invalid run directories."""

from __future__ import annotations

import re

import pytest

from hpcgen.config.corpus import selection
from hpcgen.config.keys import field_docs, inner_class
from hpcgen.config.run import RunConfig
from hpcgen.errors import FileErrors, HpcgenError
from hpcgen.planning.paths import absolute_paths, corpus_job, planning_job, run_dir_problems, trainer_data
from tests.runs import loaded, minimal_run
from trainer.contract.config import field_hints

CORPUS = {"directory": "out/corpus", "source": {"directory": "in"}, "num_output_files": 2}


def config(tmp_path, **sections):
    run = loaded(tmp_path, minimal_run(**sections))
    return run.config


def test_relative_paths_start_at_the_run_files_folder(tmp_path):
    given = config(
        tmp_path,
        paths={"run_dir": "runs/mini"},
        data={
            "corpus": CORPUS,
            "train": [{"prefix": "a/x"}, {"prefix": "/abs/y"}],
            "valid": [{"prefix": "./v"}],
            "cache_dir": "cache",
            "tokenizer": {"kind": "huggingface", "tokenizer_file": "t.json"},
        },
        checkpoint={"save": "ckpt", "load": "/old"},
    )
    found = absolute_paths(given, tmp_path)
    assert found.paths.run_dir == f"{tmp_path}/runs/mini"
    assert found.data.corpus.directory == f"{tmp_path}/out/corpus"
    assert found.data.corpus.source.directory == f"{tmp_path}/in"
    assert [dataset.prefix for dataset in found.data.train] == [f"{tmp_path}/a/x", "/abs/y"]
    assert found.data.valid[0].prefix == f"{tmp_path}/v"
    assert found.data.cache_dir == f"{tmp_path}/cache"
    assert found.data.tokenizer.tokenizer_file == f"{tmp_path}/t.json"
    assert (found.checkpoint.save, found.checkpoint.load) == (f"{tmp_path}/ckpt", "/old")


def test_absolute_paths_stay_and_nulls_stay(tmp_path):
    given = config(tmp_path)
    assert absolute_paths(given, tmp_path) == given


def test_a_folder_that_sbatch_would_read_as_a_pattern_is_refused(tmp_path):
    """`%j` in --output is the job's number, so the log would be elsewhere, or the job would die without one."""
    folder = tmp_path / "50%j"
    with pytest.raises(HpcgenError, match="50%j/runs/mini: the path contains %, which sbatch would expand"):
        absolute_paths(config(folder, paths={"run_dir": "runs/mini"}), folder)
    absolute_paths(config(folder), folder)


def test_the_trainer_reads_the_pairs_of_the_corpus(tmp_path):
    given = absolute_paths(config(tmp_path, data={"corpus": CORPUS}), tmp_path)
    assert [dataset.prefix for dataset in trainer_data(given).datasets] == [
        f"{tmp_path}/out/corpus/tokens/corpus-0000{index}-of-00002" for index in (0, 1)
    ]


def test_a_corpus_with_splits_of_its_own_gives_a_blend_for_each(tmp_path):
    splits = {"train": ["train/*"], "test": ["test/*"]}
    data = trainer_data(config(tmp_path, data={"corpus": {**CORPUS, "splits": splits}}))
    assert (len(data.datasets), len(data.train), len(data.valid), len(data.test)) == (0, 2, 0, 1)
    assert data.test[0].prefix == "out/corpus/tokens/test-00000-of-00001"


@pytest.mark.parametrize(
    "blend", [{"datasets": [{"prefix": "/d"}]}, {"train": [{"prefix": "/d"}]}, {"mock": True}]
)
def test_a_given_blend_overrides_the_corpus(tmp_path, blend):
    data = trainer_data(config(tmp_path, data={"corpus": CORPUS, **blend}))
    assert [dataset.prefix for dataset in data.datasets] == [d["prefix"] for d in blend.get("datasets", [])]
    assert (bool(data.train), data.mock) == ("train" in blend, "mock" in blend)


@pytest.mark.parametrize("path", ["~/x", "-x", "..", "a/../b", "/a/..", "x" * 256, "/x" * 501])
def test_paths_of_the_trainers_sections(tmp_path, path):
    with pytest.raises(FileErrors) as refused:
        config(
            tmp_path,
            data={"datasets": [{"prefix": "/ok"}, {"prefix": path}], "cache_dir": path},
            optimizer={"lr": 0.001, "lr_schedule": f"{path}/rates.py:rate"},
            checkpoint={"save": path, "load": path},
            evaluation={"tasks": ["hellaswag", path]},
        )
    found = refused.value.mistakes
    assert sorted(problem.path for problem in found) == [
        "checkpoint.load",
        "checkpoint.save",
        "data.cache_dir",
        "data.datasets[1].prefix",
        "evaluation.tasks[1]",
        "optimizer.lr_schedule",
    ]
    assert all(problem.reason.startswith("must be a path without '..'") for problem in found)


def test_an_empty_path_is_refused(tmp_path):
    with pytest.raises(FileErrors) as refused:
        config(tmp_path, checkpoint={"save": ""})
    [problem] = refused.value.mistakes
    assert (problem.path, problem.reason) == ("checkpoint.save", "is empty")


@pytest.mark.parametrize("path", ["/a..b/c", "a b", "./x", "/x/~y"])
def test_valid_paths_have_no_problems(tmp_path, path):
    assert config(tmp_path, checkpoint={"save": path}).checkpoint.save == path


def text_keys(section):
    """Each key of a section, and of those in it, that is a text: its hint and its documentation."""
    docs = field_docs(section)
    for name, hint in field_hints(section).items():
        inner = inner_class(hint)
        if inner is not None:
            yield from text_keys(inner)
        elif "str" in str(hint):
            yield f"{section.__name__}.{name}", hint, docs[name]


def test_a_key_documented_as_a_path_has_a_type_that_says_so():
    """Its text would stay relative, and be checked by nobody."""
    words = re.compile(
        r"(With \w+: )?(new |working |json lines )?(path|director|file|manifest)", re.IGNORECASE
    )
    unmarked = [
        key
        for key, hint, doc in text_keys(RunConfig)
        if words.match(doc) and "PathKind" not in str(hint) and "Text(" not in str(hint)
    ]
    assert unmarked == []


@pytest.mark.parametrize("path", ["/", "//", "/./"])
def test_the_run_directory_must_not_be_the_root_directory(tmp_path, path):
    [problem] = run_dir_problems(config(tmp_path, paths={"run_dir": path}))
    assert (problem.path, problem.reason) == ("paths.run_dir", "is the root directory")


def test_a_job_omits_the_urls_that_planning_uses(tmp_path):
    source = {"url": {"template": "https://h/{index}.jsonl?sig=hf_x"}, "token_variable": "TOKEN"}
    given = config(tmp_path, data={"corpus": {**CORPUS, "source": source}}, share="group")
    job, planning = corpus_job(given), planning_job(given)
    assert "hf_x" not in repr(job)
    assert (job.corpus.source.url, job.corpus.source.token_variable) == (None, "TOKEN")
    assert planning.corpus == given.data.corpus
    assert job.selection == planning.selection == selection(given.data.corpus)
    assert (job.share, planning.share) == ("group", "group")
