"""The stage evaluate, and the training that queues its jobs."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from hpcgen import plan
from hpcgen.errors import ConfigErrors
from hpcgen.run_plan.summary import for_people, summarize
from tests.data import pairs
from tests.runs import loaded, minimal_run, planned, write_yaml
from trainer.contract.config import fingerprint

TEXT = {"name": "wikitext", "prefix": "texts/wikitext"}
EVERY = {"every": 4, "data": [TEXT]}


def evaluated_run(evaluation: dict[str, Any], **sections: Any) -> dict[str, Any]:
    slurm = {"train": {"time": "1:00:00"}}
    return minimal_run(evaluation=evaluation, checkpoint={"save_interval": 2}, slurm=slurm, **sections)


def messages(tmp_path, run, *overrides, stages=("evaluate",)):
    with pytest.raises(ConfigErrors) as error:
        planned(tmp_path, run, stages, overrides)
    return [message.replace(f"{tmp_path}/", "") for message in error.value.messages]


def test_the_job_evaluates_the_checkpoints_of_the_run(tmp_path):
    tokenizer = {"kind": "huggingface", "tokenizer_file": "tokenizer.json", "eod_token": "<end>"}
    evaluation = {"data": [TEXT], "tasks": ["piqa", "tasks/own.yaml"], "tensor_model_parallel_size": 2}
    run = evaluated_run(evaluation, data={"tokenizer": tokenizer, "mock": True}, model=MODEL)
    stage = planned(tmp_path, run, ["evaluate"], ["slurm.evaluate.ntasks_per_node=4"]).stages["evaluate"]
    config = json.loads(stage.files["evaluation.json"])
    settings = config.pop("settings")
    assert config == {
        "name": "mini",
        "run_dir": "/runs/mini",
        "device": "cpu",
        "world_size": 4,
        "checkpoint": "/runs/mini/checkpoints",
        "tokenizer": f"{tmp_path}/tokenizer.json",
        "eod_token": "<end>",
        "tensorboard": True,
    }
    assert settings["data"] == [{"name": "wikitext", "prefix": f"{tmp_path}/texts/wikitext"}]
    assert settings["tasks"] == ["piqa", f"{tmp_path}/tasks/own.yaml"]
    assert tuple(item.path for item in stage.inputs) == (
        f"{tmp_path}/texts/wikitext.idx",
        f"{tmp_path}/texts/wikitext.bin",
        f"{tmp_path}/tasks/own.yaml",
        f"{tmp_path}/tokenizer.json",
    )
    assert "--job-name=mini-evaluate" in stage.directives


MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 1000}


def test_data_sets_of_tasks_are_read_from_a_directory_of_the_run_file(tmp_path):
    run = evaluated_run({"tasks": ["piqa"], "hf_home": "huggingface"})
    stage = planned(tmp_path, run, ["evaluate"]).stages["evaluate"]
    home = f"{tmp_path}/huggingface"
    assert {each.name: each.value for each in stage.environment}["HF_HOME"] == home
    assert home in stage.directories
    assert stage.values["hf_home"] == home


def test_the_checkpoints_may_be_elsewhere(tmp_path):
    run = evaluated_run({"data": [TEXT]})
    stage = planned(tmp_path, run, ["evaluate"], ["checkpoint.save=ckpt"]).stages["evaluate"]
    assert json.loads(stage.files["evaluation.json"])["checkpoint"] == f"{tmp_path}/ckpt"
    assert f"{tmp_path}/ckpt" in stage.required


def test_the_files_of_gpt2s_tokenizer_are_in_one_directory(tmp_path):
    files = {"vocab_file": "gpt2/vocab.json", "merges_file": "gpt2/merges.txt"}
    run = evaluated_run({"tasks": ["piqa"]}, data={"tokenizer": files, "mock": True}, model=MODEL)
    stage = planned(tmp_path, run, ["evaluate"]).stages["evaluate"]
    assert json.loads(stage.files["evaluation.json"])["tokenizer"] == f"{tmp_path}/gpt2"
    assert messages(tmp_path, run, "data.tokenizer.merges_file=other/merges.txt") == [
        "run.yaml:25: data.tokenizer.vocab_file = gpt2/vocab.json and merges_file have other names or directories "
        "than evaluation.tasks requires; put both files into one directory as vocab.json and merges.txt"
    ]
    run = evaluated_run({"data": [TEXT]}, data={"tokenizer": files, "mock": True}, model=MODEL)
    planned(tmp_path, run, ["evaluate"], ["data.tokenizer.merges_file=other/merges.txt"])


def test_an_evaluation_has_work(tmp_path):
    [message] = messages(tmp_path, minimal_run())
    assert "has neither data nor tasks, so stage evaluate has nothing to compute" in message


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_a_missing_text_is_reported_by_its_key(tmp_path, stage):
    """Training queues jobs that would fail."""
    run = loaded(tmp_path, evaluated_run(EVERY))
    with pytest.raises(ConfigErrors) as error:
        plan(run, [stage], exists=lambda path: "wikitext" not in path)
    [message] = error.value.messages
    assert "evaluation.data[0].prefix" in message
    assert f"Stage evaluate needs {tmp_path}/texts/wikitext.idx, which does not exist" in message


def test_a_task_file_that_runs_code_is_a_warning(tmp_path):
    """Its relative path starts at the directory of the run file, and not at the current one."""
    (tmp_path / "own.yaml").write_text("task: own\ndoc_to_text: !function own.text\n")
    (tmp_path / "own.py").write_text("def text(document): ...\n")
    found = warned(tmp_path, evaluated_run({"tasks": ["own.yaml"]}), "runs the code of")
    assert [message.partition(": ")[2].partition(" ")[0] for message in found] == ["evaluation.tasks[0]"]


def test_a_misspelled_key_of_the_section_is_reported(tmp_path):
    [message] = messages(tmp_path, evaluated_run(EVERY), "evaluation.evry=4")
    assert "did you mean every?" in message


def test_the_trainer_keeps_what_is_to_be_evaluated_and_its_fingerprint_stays(tmp_path):
    """A finished run is still finished when its checkpoints are to be evaluated."""
    with_every, without = (
        planned(tmp_path, evaluated_run(EVERY), ["train"], overrides)
        for overrides in ((), ("evaluation.every=null",))
    )
    assert json.loads(with_every.stages["train"].files["trainer.json"])["evaluation_every"] == 4
    assert "evaluation_every" not in without.stages["train"].files["trainer.json"]
    assert fingerprint(with_every.trainer) == fingerprint(without.trainer)
    shown, hidden = (dict(for_people(summarize(each))) for each in (with_every, without))
    assert shown["evaluation"] == "a job for each checkpoint of a multiple of 4 steps"
    assert "evaluation" not in hidden
    assert with_every.stages["train"].queued.name == "evaluate"
    assert without.stages["train"].queued is None


def test_the_job_that_training_queues_follows_the_rules_of_its_stage(tmp_path):
    [message] = messages(
        tmp_path, evaluated_run(EVERY), "slurm.evaluate.extra_directives=[--time=1]", stages=["train"]
    )
    assert "sets --time, which hpcgen sets itself" in message


def warned(tmp_path, run, key, *overrides, stages=("evaluate",), **options):
    found = plan(loaded(tmp_path, run, overrides), stages, **options).warnings
    return [message.replace(f"{tmp_path}/", "") for message in found if key in message]


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_a_text_that_the_model_is_trained_on_is_a_warning(tmp_path, stage):
    """By its path, a link, a hard link, or a copy."""
    pairs.write(tmp_path / "corpus", [[1, 2, 3], [4, 5]])
    pairs.write(tmp_path / "other", [[1, 2], [3, 4, 5]])
    (tmp_path / "by-folder").symlink_to(tmp_path)
    for suffix in (".bin", ".idx"):
        source = tmp_path / f"corpus{suffix}"
        (tmp_path / f"link{suffix}").symlink_to(source)
        (tmp_path / f"hard{suffix}").hardlink_to(source)
        shutil.copy(source, tmp_path / f"copy{suffix}")
    names = ["./corpus", "by-folder/corpus", "link", "hard", "copy", "other"]
    texts = [{"name": f"text{number}", "prefix": name} for number, name in enumerate(names)]
    data = {"datasets": [{"prefix": "corpus"}], "split": "50,50,0"}
    found = warned(tmp_path, evaluated_run({"data": texts}, data=data), "unseen text", stages=[stage])
    assert [int(message.partition("data[")[2][0]) for message in found] == [0, 1, 2, 3, 4]
    assert found[0].endswith(
        "is a pair that the model is trained on (data.datasets[0]), so its loss is not that of unseen text; name a "
        "pair that is held out"
    )
    held_out = {"train": [{"prefix": "other"}], "valid": [{"prefix": "corpus"}]}
    run = evaluated_run({"data": texts}, data=held_out)
    assert [message.partition("data[")[2][0] for message in warned(tmp_path, run, "unseen text")] == ["5"]


IMAGE = {"container": {"runtime": "pyxis", "image": "nvcr.io#nvidia/pytorch:25.03-py3"}}


@pytest.mark.parametrize(
    ("profile", "files", "where"),
    [
        (IMAGE, (), "the image nvcr.io#nvidia/pytorch:25.03-py3;"),
        (
            IMAGE | {"code_dir": "/code"},
            ("/code",),
            "the image nvcr.io#nvidia/pytorch:25.03-py3 or code_dir;",
        ),
        (IMAGE | {"code_dir": "/code"}, ("/code", "/code/lm_eval"), None),
        (IMAGE | {"code_dir": "/elsewhere"}, (), None),
        ({"container": {"runtime": "pyxis", "image": "/images/own.sqsh"}}, (), None),
        (
            {"python": "/venv/bin/python"},
            ("/venv/lib/python3.11/site-packages",),
            "python = /venv/bin/python;",
        ),
        (
            {"python": "/venv/bin/python"},
            ("/venv/lib/python3.11/site-packages", "/venv/lib/python3.11/site-packages/lm_eval"),
            None,
        ),
        ({"python": "/elsewhere/bin/python"}, (), None),
        ({}, (), None),
    ],
)
@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_tasks_without_lm_eval_are_a_warning(tmp_path, profile, files, where, stage):
    write_yaml(tmp_path / "site.yaml", {"extends": "local", **profile})
    own = str(tmp_path)

    def exists(path):
        return path in files or path.startswith(own) or path.endswith((".yaml", ".idx", ".bin"))

    run = evaluated_run({"tasks": ["own.yaml"], "every": 4}, cluster="./site.yaml", model=MODEL)
    found = warned(tmp_path, run, "needs the package", stages=[stage], exists=exists)
    assert len(found) == (where is not None)
    assert where is None or f"needs the package lm_eval, which is not in {where}" in found[0]
    assert not warned(
        tmp_path,
        run,
        "needs the package",
        "evaluation.tasks=[]",
        "evaluation.every=null",
        stages=["train"],
        exists=exists,
    )
