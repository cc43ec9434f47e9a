"""Tasks of lm-eval give what its own model `hf` gives for the exported model, in every layout."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.evaluate import parts
from tests.trainer.forked import run_python
from trainer.contract.errors import TrainerError
from trainer.contract.evaluation import EvaluationResult
from trainer.evaluate.tasks import load_tasks

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'hpcgen[eval]')")
pytest.importorskip("accelerate", reason="lm-eval's model hf needs accelerate")
pytestmark = pytest.mark.process

NAMES = ("suite", "answer", "rolling")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task files."""
    directory = tmp_path_factory.mktemp("tasks") / "tasks"
    parts.write_tasks(directory)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> parts.Imported:
    return parts.import_case("llama3.2", tmp_path_factory.mktemp("llama"))


def job(model: parts.Imported, tasks: Path, run_dir: Path, **settings: Any) -> dict[str, Any]:
    """Configuration of a job with a perplexity and all tasks."""
    parts.write_text(run_dir.parent / "text")
    data = [{"name": "text", "prefix": str(run_dir.parent / "text")}]
    names = [str(tasks / f"{name}.yaml") for name in NAMES]
    config = parts.configuration(model.checkpoint, run_dir, data=data, tasks=names, **settings)
    return config | {"tokenizer": str(model.tokenizer), "eod_token": parts.EOD}


@pytest.fixture(scope="module")
def single(
    llama: parts.Imported, tasks: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[EvaluationResult, list[dict[str, Any]]]:
    """The results of one rank."""
    return parts.evaluated(job(llama, tasks, tmp_path_factory.mktemp("single") / "run"))


def answers(samples: list[dict[str, Any]]) -> dict[tuple[str, int], Any]:
    """Answers by task and document."""
    return {(sample["task"], sample["doc_id"]): sample["resps"] for sample in samples}


def assert_same_answers(found: dict[tuple[str, int], Any], expected: dict[tuple[str, int], Any]) -> None:
    """Texts and greedy flags are equal, and log-likelihoods almost."""
    assert found.keys() == expected.keys()
    for key, responses in expected.items():
        for response, other in zip(found[key], responses, strict=True):
            [one], [two] = response, other
            if key[0] == "answer":
                assert one == two, key
            elif key[0] == "rolling":
                assert one == pytest.approx(two, abs=TOLERANCE, rel=1e-6), key
            else:
                assert one[0] == pytest.approx(two[0], abs=TOLERANCE, rel=0), key
                assert one[1] == two[1], key


def values(result: EvaluationResult) -> dict[tuple[str, str], float | None]:
    return {(task.name, metric.name): metric.value for task in result.tasks for metric in task.metrics}


def assert_like_hf(
    result: EvaluationResult, samples: list[dict[str, Any]], model: parts.Imported, tasks: Path
) -> None:
    expected = parts.reference_tasks(model.exported, tasks, NAMES)
    listed = [{"task": name, **each} for name, found in expected["samples"].items() for each in found]
    assert_same_answers(answers(samples), answers(listed))
    metrics = values(result)
    assert {name for name, _ in metrics} == {"choice", "letters", "suite", "answer", "rolling"}
    for (task, metric), value in metrics.items():
        theirs = expected["results"][task][f"{metric},none"]
        assert value == pytest.approx(theirs, rel=1e-5 if task == "rolling" else 0, abs=0), (task, metric)


def test_llama_answers_as_with_lm_evals_own_model(
    single: tuple[EvaluationResult, list[dict[str, Any]]], llama: parts.Imported, tasks: Path
) -> None:
    result, samples = single
    assert_like_hf(result, samples, llama, tasks)
    of_letters = next(task for task in result.tasks if task.name == "letters")
    assert (of_letters.num_fewshot, of_letters.version, of_letters.documents) == (2, "2.0", 7)
    suite = next(task for task in result.tasks if task.name == "suite")
    assert (suite.is_group, suite.documents, [metric.name for metric in suite.metrics]) == (True, 14, ["acc"])
    accuracy = of_letters.metrics[0]
    assert (accuracy.filter, accuracy.higher_is_better) == ("none", True)
    assert accuracy.stderr is not None
    assert accuracy.stderr > 0


@pytest.mark.slow  # test_job.py compares the loss of a GPT-2
def test_gpt2_answers_as_with_lm_evals_own_model(tasks: Path, tmp_path: Path) -> None:
    model = parts.import_case("gpt2", tmp_path)
    result, samples = parts.evaluated(job(model, tasks, tmp_path / "run"))
    assert_like_hf(result, samples, model, tasks)


@pytest.mark.slow  # losses: test_documents.py; texts: ../inference
@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        pytest.param(2, {}, id="2 replicas"),
        pytest.param(2, {"tensor_model_parallel_size": 2}, id="TP2"),
        pytest.param(4, {"pipeline_model_parallel_size": 2}, id="PP2 x 2 replicas"),
    ],
)
def test_layouts_have_the_results_of_one_rank(
    world_size: int,
    sizes: dict[str, int],
    single: tuple[EvaluationResult, list[dict[str, Any]]],
    llama: parts.Imported,
    tasks: Path,
    tmp_path: Path,
) -> None:
    config = job(llama, tasks, tmp_path / "run", batch_size=3, **sizes) | {"world_size": world_size}
    result, samples = parts.evaluated(config)
    expected, expected_samples = single
    assert result.data[0].tokens == expected.data[0].tokens
    assert result.data[0].loss == pytest.approx(expected.data[0].loss, abs=1e-6)
    assert_same_answers(answers(samples), answers(expected_samples))
    assert values(result) == pytest.approx(values(expected), abs=1e-5)


def test_a_limit_and_a_number_of_examples_apply_to_all_tasks(
    llama: parts.Imported, tasks: Path, tmp_path: Path
) -> None:
    config = job(llama, tasks, tmp_path / "run", limit=2, num_fewshot=1)
    config["settings"]["tasks"] = [str(tasks / "letters.yaml")]
    result, samples = parts.evaluated(config)
    assert [(task.documents, task.num_fewshot) for task in result.tasks] == [(2, 1)]
    assert len(samples) == 2
    assert (result.data[0].sequences, result.data[0].tokens) == (2, 64)


def test_all_mistakes_are_reported_at_once(llama: parts.Imported, tasks: Path, tmp_path: Path) -> None:
    config = job(llama, tasks, tmp_path / "run")
    config["settings"]["data"][0]["prefix"] = str(tmp_path / "missing")
    config["settings"]["tasks"] = [str(tasks / "missing.yaml"), str(tasks / "other.yml")]
    config |= {"tokenizer": "gpt2", "eod_token": None}
    statuses, log = parts.finish(config)
    assert statuses == [2]
    assert f"evaluation.data[0]: {tmp_path}/missing.bin is not a file" in log
    assert "the tokenizer gpt2 has IDs up to 50256, but the model has 300 tokens" in log
    assert f"evaluation.tasks: {tasks}/missing.yaml: no such file" in log
    assert f"evaluation.tasks: {tasks}/other.yml: no such file" in log
    assert "4 mistakes; nothing was evaluated" in log
    assert not (tmp_path / "run/evaluation").exists()


def test_a_data_set_that_is_not_cached_is_named_with_the_command_that_caches_it(
    llama: parts.Imported, tmp_path: Path
) -> None:
    (tmp_path / "remote.yaml").write_text(
        "task: remote\ndataset_path: Rowan/hellaswag\ntest_split: test\noutput_type: multiple_choice\n"
        "doc_to_text: x\ndoc_to_choice: [a, b]\ndoc_to_target: 0\n"
    )
    config = parts.configuration(llama.checkpoint, tmp_path / "run", tasks=[str(tmp_path / "remote.yaml")])
    statuses, log = parts.finish(config | {"tokenizer": str(llama.tokenizer), "eod_token": parts.EOD})
    assert statuses == [2]
    [line] = [line for line in log.splitlines() if line]
    assert f"remote.yaml cannot be loaded: its dataset is not in {tmp_path}/run/huggingface (HF_HOME)" in line
    assert "python -m trainer.evaluate --download" in line


def test_data_sets_are_loaded_before_the_job(tasks: Path, tmp_path: Path) -> None:
    arguments = (
        "-m",
        "trainer.evaluate",
        "--download",
        str(tasks / "suite.yaml"),
        str(tasks / "answer.yaml"),
    )
    done = run_python(*arguments, env={**os.environ, "HF_HOME": str(tmp_path)})
    assert (done.returncode, done.stdout) == (0, "in the cache: choice, letters, answer\n"), done.stderr
    assert list((tmp_path / "datasets").rglob("*.arrow"))


def test_a_task_that_occurs_twice_and_one_that_runs_code_are_refused(tasks: Path, tmp_path: Path) -> None:
    unsafe = tmp_path / "unsafe.yaml"
    unsafe.write_text(f"include: {tasks}/answer.yaml\ntask: unsafe\nunsafe_code: true\n")
    _, problems = load_tasks([str(tasks / "suite.yaml"), str(tasks / "letters.yaml"), str(unsafe)])
    assert list(map(str, problems)) == [
        f"evaluation.tasks: {tasks}/letters.yaml contains letters, which another entry contains. Remove one of them",
        f"evaluation.tasks: {unsafe}: the metric of unsafe runs code that the model has written, which is not safe. "
        "Remove it",
    ]


@pytest.mark.slow  # lm-eval reads the files of its 14,000 tasks
def test_an_unknown_task_is_refused_with_similar_names(tmp_path: Path) -> None:
    _, problems = load_tasks([str(tmp_path / "missing.yml"), "helaswag"])
    assert str(problems[0]) == f"evaluation.tasks: {tmp_path}/missing.yml: no such file"
    assert str(problems[1]).startswith(
        "evaluation.tasks: lm-eval has no task 'helaswag'; did you mean hellaswag?"
    )


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(TrainerError, match=r"needs lm-eval, .* pip install 'hpcgen\[eval\]'"):
        load_tasks(["hellaswag"])
