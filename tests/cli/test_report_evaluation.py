"""Results of the stage evaluate in the report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.cli.command import hpcgen
from tests.cli.reports import report
from tests.recorded_run import start, steps, write_run
from trainer.contract.evaluation import (
    FORMAT,
    EvaluationData,
    EvaluationResult,
    EvaluationSettings,
    Metric,
    TaskResult,
    TextResult,
    result_file,
)


def metric(name: str, value: float, stderr: float | None = None) -> Metric:
    return Metric(name=name, filter="none", value=value, stderr=stderr, higher_is_better=True)


def task(name: str, *metrics: Metric, is_group: bool = False) -> TaskResult:
    return TaskResult(
        name=name, is_group=is_group, version="1", num_fewshot=0, documents=1000, metrics=metrics
    )


def write_result(
    run: Path,
    iteration: int,
    loss: float | None,
    *tasks: TaskResult,
    limit: int | None = None,
    prefix: str = "/text",
) -> None:
    settings = EvaluationSettings(
        data=(EvaluationData(name="wikitext", prefix=prefix),), tasks=("hellaswag", "mmlu"), limit=limit
    )
    text = TextResult(
        name="wikitext",
        prefix=prefix,
        loss=loss,
        perplexity=None if loss is None else 2.718281828**loss,
        tokens=20480,
        sequences=10,
        seq_length=2048,
        seconds=1.0,
    )
    result = EvaluationResult(
        format=FORMAT,
        name="gpt",
        iteration=iteration,
        checkpoint=f"/runs/gpt/checkpoints/iter_{iteration:07}",
        checkpoint_sha256="0" * 64,
        time=1.8e9,
        seconds=60.0,
        world_size=8,
        device="cuda",
        precision="bf16",
        tokenizer=None,
        settings=settings,
        versions={},
        data=(text,),
        tasks=tasks,
    )
    path = result_file(run, iteration)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(result)))


HELLASWAG = task("hellaswag", metric("acc", 0.41, 0.01), metric("acc_norm", 0.5123, 0.00499))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with results at two of its iterations and at one after its last line."""
    run = write_run(tmp_path / "gpt", [start(), *steps(1, 90)])
    for iteration, loss in ((40, 3.0), (80, 2.5), (100, 2.0)):
        write_result(run, iteration, loss, HELLASWAG)
    return run


def test_a_report_draws_losses_and_main_metrics_with_their_errors(run: Path) -> None:
    page = report(run)
    texts, tasks = page.series("texts"), page.series("tasks")
    assert (texts["label"], texts["x"], texts["middle"]) == ("wikitext", [40, 80, 100], [3, 2.5, 2])
    assert (tasks["label"], tasks["x"], tasks["middle"]) == (
        "hellaswag acc_norm",
        [40, 80, 100],
        [0.5123] * 3,
    )
    assert tasks["error"] == [0.005] * 3
    assert "right: perplexity" in page.text
    assert "Evaluation of iteration 100" in page.text
    assert "wikitext loss 2 (perplexity 7.389) 20,480 tokens" in page.text
    assert "hellaswag acc 0.41 ± 0.01 1,000 documents" in page.text


def test_the_newest_results_in_the_terminal_and_all_as_json(run: Path) -> None:
    assert hpcgen("report", run, "-o", "r.html").stdout.splitlines()[-1] == (
        "evaluation of iteration 100: wikitext loss 2 (perplexity 7.389), hellaswag acc_norm 0.5123 ± 0.005"
    )
    [summary] = json.loads(hpcgen("report", run, "--json").stdout)
    assert [result["iteration"] for result in summary["results"]] == [40, 80, 100]
    assert summary["results"][1]["data"][0]["loss"] == 2.5
    assert summary["results"][1]["tasks"][0]["metrics"][1]["stderr"] == 0.00499


def test_tasks_of_a_group_are_in_its_result_alone(run: Path) -> None:
    """mmlu has 57 tasks, which would hide all other lines."""
    mmlu = (task("mmlu", metric("acc", 0.3), is_group=True), task("mmlu_anatomy", metric("acc", 0.2)))
    write_result(run, 100, 2.0, HELLASWAG, *mmlu)
    last = hpcgen("report", run, "-o", "r.html").stdout.splitlines()[-1]
    assert last.endswith("hellaswag acc_norm 0.5123 ± 0.005, mmlu acc 0.3")
    assert "mmlu_anatomy acc 0.2" in report(run).text


def test_an_infinite_loss_is_a_gap(run: Path) -> None:
    write_result(run, 100, None)
    assert report(run).series("texts")["x"] == [40, 80]
    assert "wikitext loss – (perplexity –)" in hpcgen("report", run, "-o", "r.html").stdout


@pytest.mark.parametrize(
    ("content", "said"), [("{", "not JSON"), ('{"format": 99}', "later version"), ("{}", "is missing")]
)
def test_an_invalid_result_file_is_reported_and_left_out(run: Path, content: str, said: str) -> None:
    result_file(run, 80).write_text(content)
    ended = hpcgen("report", run, "-o", "report.html")
    assert ended.status == 0
    assert "iter_0000080.json" in ended.stderr
    assert said in ended.stderr
    page = Path("report.html").read_text(encoding="utf-8")
    assert '<p class="alarm">' in page
    assert "iter_0000080.json" in page


def test_runs_are_compared_by_text_and_task(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", [start(name="other"), *steps(1, 90)], name="other")
    write_result(other, 60, 2.75, task("piqa", metric("acc", 0.6)))
    page = report(run, other)
    assert "Loss on wikitext" in page.text
    assert "hellaswag acc_norm" in page.text
    lines = [page.series("evaluation-0", number) for number in (0, 1)]
    assert [(line["label"], line["x"]) for line in lines] == [("gpt", [40, 80, 100]), ("other", [60])]
    assert "piqa acc" in page.text


def test_a_limit_is_shown(run: Path) -> None:
    write_result(run, 100, 2.0, HELLASWAG, limit=10)
    assert hpcgen("report", run, "-o", "r.html").stdout.splitlines()[-1] == (
        "evaluation of iteration 100, of a part (evaluation.limit = 10): wikitext loss 2 (perplexity 7.389; 10 "
        "windows, 20,480 tokens), hellaswag acc_norm 0.5123 ± 0.005"
    )
    page = report(run).text
    assert "Evaluation of iteration 100, of a part (evaluation.limit = 10)" in page
    assert "20,480 tokens in 10 windows" in page


def test_results_of_different_texts_and_tasks_are_marked(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", [start(name="other"), *steps(1, 90)], name="other")
    for options, differing in (
        ({}, None),
        ({"prefix": "/other"}, "pair is /text in gpt, /other in other"),
        ({"limit": 10}, "evaluation.limit is null in gpt, 10 in other"),
    ):
        write_result(other, 60, 2.75, HELLASWAG, **options)
        stdout = hpcgen("report", run, other, "-o", "r.html").stdout
        assert ("The losses on the text wikitext cannot be compared" in stdout) == (differing is not None)
        assert ("The metrics of the task hellaswag cannot be compared" in stdout) == ("limit" in options)
        assert differing is None or differing in stdout


def test_a_directory_with_evaluations_only_is_reported_as_one(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    ended = hpcgen("report", run)
    assert (ended.status, ended.stdout) == (2, "")
    assert "the directory has " in ended.stderr
    assert " and no training; evaluation of iteration " in ended.stderr
    assert ended.stderr.endswith(f"; the results are in {run}/evaluation\n")
