"""Job arrays: number of tasks, parallelism, and sbatch's option."""

from __future__ import annotations

import pytest

from hpcgen.planning.allocation import Array
from hpcgen.planning.allocation_warnings import array_warnings
from hpcgen.planning.request import make_array
from hpcgen.stages import STAGES
from tests.runs import loaded, minimal_run, write_yaml

CORPUS = {"directory": "/data/corpus", "source": {"directory": "/data/text"}, "num_output_files": 12}


def run_of(directory, max_array_size=1001, corpus=CORPUS, **slurm):
    write_yaml(directory / "site.yaml", {"extends": "local", "max_array_size": max_array_size})
    return loaded(directory, minimal_run(cluster="./site.yaml", data={"corpus": corpus}, slurm=slurm))


def array_of(run, stage):
    return make_array(STAGES[stage], run.config, run.cluster)


@pytest.mark.parametrize(
    ("tasks", "parallelism", "option"),
    [
        (None, None, "0-9"),
        (None, 4, "0-9%4"),
        ((3,), 4, "3%4"),
        ((0, 1, 2, 5, 7, 8), None, "0-2,5,7-8"),
        ((1, 3, 9), 2, "1,3,9%2"),
    ],
)
def test_the_option_names_runs_of_tasks(tasks, parallelism, option):
    assert Array(10, parallelism).option(tasks) == option


def test_only_the_stages_of_the_corpus_are_arrays(tmp_path):
    run = run_of(tmp_path, extract={"array_parallelism": 3})
    assert array_of(run, "extract") == Array(8, 3)
    assert array_of(run, "download") == Array(8)
    assert array_of(run, "train") is None
    assert array_of(run, "index-cache") is None


@pytest.mark.parametrize("stage", ["concat", "tokenize", "prepare"])
def test_no_task_is_without_an_output(tmp_path, stage):
    run = run_of(tmp_path, **{stage: {"num_tasks": 100}})
    assert array_of(run, stage).num_tasks == 12
    [warning] = array_warnings(STAGES[stage], run.config, run.cluster)
    assert warning.path == f"slurm.{stage}.num_tasks"
    assert "is more than the number of output files (12), so the array gets only 12 tasks" in warning.reason


def test_outputs_of_all_splits_count(tmp_path):
    splits = {"train": ["train/*"], "valid": ["valid/*"], "test": ["test/*"]}
    run = run_of(tmp_path, corpus={**CORPUS, "splits": splits}, prepare={"num_tasks": 100})
    assert array_of(run, "prepare").num_tasks == 14


def test_few_outputs_need_no_warning_with_the_default_number_of_tasks(tmp_path):
    run = run_of(tmp_path, corpus={**CORPUS, "num_output_files": 2})
    assert array_of(run, "concat").num_tasks == 2
    assert list(array_warnings(STAGES["concat"], run.config, run.cluster)) == []


def test_tasks_beyond_the_limit_of_slurm_are_merged(tmp_path):
    run = run_of(tmp_path, max_array_size=50, extract={"num_tasks": 59_166})
    assert array_of(run, "extract").option() == "0-49"
    [warning] = array_warnings(STAGES["extract"], run.config, run.cluster)
    assert "is more than the cluster's max_array_size (50)" in warning.reason
    assert warning.hint == "use at most 50"


def test_the_largest_array_of_slurms_default(tmp_path):
    """MaxArraySize is 1001, and an index must be below it."""
    run = run_of(tmp_path, extract={"num_tasks": 1001})
    assert array_of(run, "extract").option() == "0-1000"
    assert list(array_warnings(STAGES["extract"], run.config, run.cluster)) == []
