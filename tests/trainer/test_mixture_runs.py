"""Training that goes on with another mixture: exact resumption, other layouts, the index cache and `samples`."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcgen.runs.history import Stage, read_history
from tests.trainer.chat_pairs import chat_config, random_chats, write_chats
from tests.trainer.forked import run_python
from tests.trainer.runs import Run, environment, finished, gpt_config, run
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import COMPLETE

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def begun(corpus: str, other_corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that has trained three steps with 70/30."""
    config = gpt_config(corpus, tmp_path_factory.mktemp("begun") / "run")
    config["data"]["datasets"] = [{"prefix": corpus, "weight": 0.7}, {"prefix": other_corpus, "weight": 0.3}]
    config["training"] |= {"train_iters": 3, "eval_iters": 1}
    config["optimizer"]["lr_decay_iters"] = 6
    finished(config)
    return config


def changed(config: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """A copy of the run, with 30/70 and six steps."""
    shutil.copytree(config["run_dir"], run_dir)
    config = copy.deepcopy(config) | {"run_dir": str(run_dir)}
    for dataset, weight in zip(config["data"]["datasets"], (0.3, 0.7), strict=True):
        dataset["weight"] = weight
    config["training"]["train_iters"] = 6
    config["checkpoint"] = {"changed": ["data.datasets"]}
    return config


@pytest.fixture(scope="module")
def at_once(begun: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(changed(begun, tmp_path_factory.mktemp("at-once") / "run"))


def sampling(run_dir: Path, iteration: int = 6) -> dict[str, Any]:
    record = checkpoint_files.read_record(run_dir / "checkpoints" / f"iter_{iteration:07d}")
    found: dict[str, Any] = record["sampling"]
    return found


def samples(config: dict[str, Any], *arguments: str) -> list[str]:
    path = Path(config["run_dir"]) / "samples.json"
    path.write_text(json.dumps(config))
    command = ("-m", "trainer.data.samples", "--config", str(path), *arguments)
    done = run_python(*command, env=environment(0, 1, "0"))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_each_pair_continues_with_another_mixture(begun: dict[str, Any], at_once: Run) -> None:
    assert [stream["read"] for stream in sampling(Path(begun["run_dir"]), 3)["streams"]] == [8, 4]
    after = sampling(at_once.directory)
    assert [stream["read"] for stream in after["streams"]] == [8 + 4, 4 + 8]
    assert [phase["first"] for phase in after["phases"]] == [0, 12]
    assert "NEW MIXTURE from sample 12 on" in at_once.log


def test_a_stop_after_the_change_does_not_change_the_curve(
    begun: dict[str, Any], at_once: Run, tmp_path: Path
) -> None:
    """The second attempt finds the indices that `index_cache` has built for the first."""
    config = changed(begun, tmp_path / "run")
    file = tmp_path / "trainer.json"
    file.write_text(json.dumps(config))
    built = run_python("-m", "trainer.data.index_cache", "--config", str(file), env=environment(0, 1, "0"))
    assert "data: built" in built.stdout, built.stderr
    assert "NEW MIXTURE from sample 12 on" in built.stdout
    (tmp_path / "run/log").unlink()
    (tmp_path / "stop").touch()
    assert len(finished(config, "--stop-file", str(tmp_path / "stop")).steps) == 4
    last = finished(config)
    assert last.steps == at_once.steps
    assert last.evaluations == at_once.evaluations
    assert "data: built" not in last.log
    assert sampling(tmp_path / "run")["streams"] == sampling(at_once.directory)["streams"]


def test_two_ranks_go_on_from_a_record_without_streams(
    begun: dict[str, Any], at_once: Run, tmp_path: Path
) -> None:
    """A checkpoint of hpcgen 0.2.0, with another layout."""
    config = changed(begun, tmp_path / "run") | {"world_size": 2}
    path = tmp_path / "run/checkpoints/iter_0000003"
    record = checkpoint_files.read_record(path)
    del record["sampling"]
    (path / COMPLETE).write_text(checkpoint_files.record_text(record))
    numpy.testing.assert_allclose(finished(config).steps, at_once.steps, rtol=0, atol=1e-4)
    assert sampling(tmp_path / "run") == sampling(at_once.directory)


def test_samples_are_found_in_every_mixture(begun: dict[str, Any], at_once: Run, tmp_path: Path) -> None:
    config = changed(begun, tmp_path / "run")
    first = samples(begun, "0", "11")
    planned = samples(config, "12", "23")
    done = json.loads((at_once.directory / "config.json").read_text())
    assert samples(done, "0", "23") == [*first, *planned]
    pairs = [line.split(": ")[1] for line in planned]
    assert [pairs.count(dataset["prefix"]) for dataset in config["data"]["datasets"]] == [4, 8]


def test_another_mixture_must_be_named(begun: dict[str, Any], tmp_path: Path) -> None:
    config = changed(begun, tmp_path / "run") | {"checkpoint": {}}
    refused = run(config)
    assert refused.statuses == (2,)
    assert "set checkpoint.changed: [data.datasets]" in refused.log


@pytest.fixture(scope="module")
def in_stages(corpus: str, other_corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run that changes to 30/70 after three of its six steps, in one configuration."""
    config = gpt_config(corpus, tmp_path_factory.mktemp("stages") / "run")
    pairs = [{"prefix": corpus}, {"prefix": other_corpus}]
    stages = (("general", 3, (0.7, 0.3)), ("decay", None, (0.3, 0.7)))
    config["data"]["datasets"] = pairs
    config["data"]["stages"] = [
        {
            "name": name,
            "until_iter": until,
            "train": [pair | {"weight": weight} for pair, weight in zip(pairs, weights, strict=True)],
        }
        for name, until, weights in stages
    ]
    config["training"] |= {"train_iters": 6, "eval_iters": 1}
    config["optimizer"]["lr_decay_iters"] = 6
    config["logging"] = config.get("logging", {}) | {"log_interval": 2}
    return config


@pytest.fixture(scope="module")
def staged_at_once(in_stages: dict[str, Any]) -> Run:
    return finished(in_stages)


def test_a_run_goes_through_its_stages(staged_at_once: Run, at_once: Run) -> None:
    """It reads what two configurations read, and no line of metrics.jsonl averages over two stages."""
    assert sampling(staged_at_once.directory) == sampling(at_once.directory)
    lines = [
        json.loads(line) for line in (staged_at_once.directory / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [(line["iteration"], line["stage"]) for line in lines if line["event"] == "step"]
    assert steps == [(2, "general"), (3, "general"), (4, "decay"), (6, "decay")]
    assert "iteration 3: stage decay of the data begins" in staged_at_once.log
    [stage, then] = read_history(staged_at_once.directory / "metrics.jsonl").stages
    assert (stage, then) == (Stage(name="general", after=0), Stage(name="decay", after=3))


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stop_at_the_end_of_a_stage_does_not_change_the_curve(
    world_size: int, in_stages: dict[str, Any], staged_at_once: Run, tmp_path: Path
) -> None:
    """The first attempt has built the indices of all stages. Two ranks continue what one rank began."""
    config = copy.deepcopy(in_stages) | {"run_dir": str(tmp_path / "run")}
    finished(copy.deepcopy(config) | {"training": config["training"] | {"train_iters": 3}})
    last = finished(config | {"world_size": world_size})
    numpy.testing.assert_allclose(
        last.steps[-2:], staged_at_once.steps[-2:], rtol=0, atol=0 if world_size == 1 else 1e-4
    )
    assert sampling(tmp_path / "run") == sampling(staged_at_once.directory)


def test_samples_are_found_in_every_stage(in_stages: dict[str, Any], at_once: Run, tmp_path: Path) -> None:
    config = in_stages | {"run_dir": str(tmp_path / "run")}
    (tmp_path / "run").mkdir()
    done = json.loads((at_once.directory / "config.json").read_text())
    assert samples(config, "0", "23") == samples(done, "0", "23")


def test_stages_of_chats_continue_exactly(tmp_path: Path) -> None:
    """A sample holds several chats, so a pair has fewer samples than its tokens suggest. Its second epoch begins."""
    pairs = [{"prefix": write_chats(tmp_path / name, random_chats(24, seed=ord(name)))} for name in "ab"]
    config = chat_config(pairs[0]["prefix"], tmp_path / "run", train=pairs)
    config["data"]["stages"] = [
        {
            "name": "both",
            "until_iter": 3,
            "train": [pair | {"weight": weight} for pair, weight in zip(pairs, (0.7, 0.3), strict=True)],
        },
        {"name": "last", "train": pairs[1:]},
    ]
    config["optimizer"]["lr_decay_iters"] = 6
    at_once = finished(config)
    parts = copy.deepcopy(config) | {"run_dir": str(tmp_path / "parts")}
    for last in (4, 6):
        run_of_part = finished(parts | {"training": parts["training"] | {"train_iters": last}})
    assert run_of_part.steps == at_once.steps
    found = [sampling(tmp_path / name) for name in ("run", "parts")]
    assert found[0]["phases"] == found[1]["phases"]
    for each in found:
        assert [stream["read"] for stream in each["streams"]] == [8, 4 + 12]
        assert each["streams"][1]["packing"]["samples"] < 4 + 12
