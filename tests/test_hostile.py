"""Hostile strings in every field of run file and profile: refused in plain words, or carried unchanged.

Stand-ins for srun and its kind write down how they were called: what is tested is the quoting, all the way
from YAML through bash to a program's arguments. No planted command may run.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcgen import load_run, plan, render
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.run import RunConfig
from hpcgen.errors import ConfigErrors, HpcgenError
from hpcgen.planning.plan import Plan
from tests.hostile import KEY, Place, Recording, hostile_strings, placed, run_script, text_places
from tests.runs import SHAPE
from trainer.config import to_dict

STAGES = ("tokenize", "train")
CASES_IN_CI = 5
CASES_IN_FULL = 125
BATCHES_IN_CI = 8
"""Scripts that are run: each has a hostile string in as many fields at once as take one."""

RUN: dict[str, Any] = {
    "name": "run",
    "cluster": "./site.yaml",
    "paths": {"run_dir": "runs"},
    "environment": {"A": "x"},
    "secrets": ["HF_TOKEN"],
    "container": {"mounts": [{"source": "/source", "target": "/target"}]},
    "slurm": {"defaults": {"time": "10:00:00"}, "train": {"ntasks_per_node": 4}},
    "model": {**SHAPE, "vocab_size": 50257},
    "training": {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 10},
    "optimizer": {"lr": 1e-3},
    "data": {
        "datasets": [{"prefix": "/data/a"}],
        "tokenizer": {"kind": "huggingface", "tokenizer_file": "/data/t.json", "eod_token": "e"},
        "tokenize": {"input": ["/text/a.jsonl"], "output_prefix": "/data/a"},
    },
}
SITE: dict[str, Any] = {
    "node_type": "ndv5",
    "container": {"runtime": "pyxis", "image": "/image.sqsh", "mounts": [{"source": "/s1", "target": "/t1"}]},
    "environment": {"A": "y"},
}


def run_values(place: Place) -> dict[str, Any]:
    """A valid run in which `place` is read: samples come one way, a tokenizer has one kind of files."""
    data = dict(RUN["data"])
    if place[:2] in (("data", "train"), ("data", "valid"), ("data", "test")):
        del data["datasets"]
        data |= {split: [{"prefix": f"/data/{split}"}] for split in ("train", "valid", "test")}
    if place[-1] in ("vocab_file", "merges_file"):
        data["tokenizer"] = {"kind": "gpt2", "vocab_file": "/data/v.json", "merges_file": "/data/m.txt"}
    return {**RUN, "data": data}


PLACES = [(RunConfig, place) for place in text_places(RunConfig)]
PLACES += [(ClusterConfig, place) for place in text_places(ClusterConfig)]


def test_the_walk_finds_every_field() -> None:
    places = {".".join(map(str, place)) for cls, place in PLACES if cls is RunConfig}
    assert places >= {
        *(
            "name",
            "preset",
            "share",
            "secrets.0",
            f"environment.{KEY}",
            "environment.A",
            "container.mounts.0.source",
        ),
        *(
            "slurm.train.extra_directives.0",
            "data.tokenize.json_key",
            "data.datasets.0.prefix",
            "training.precision",
        ),
        *("model.normalization", "checkpoint.load", "data.tokenizer.eod_token", "data.tokenize.input.0"),
    }
    assert len(PLACES) > 75


@pytest.fixture(autouse=True)
def quiet_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


def write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values).replace("\x7f", "\\u007f"), encoding="utf-8")


def planned(directory: Path, run: dict[str, Any], site: dict[str, Any]) -> Plan:
    write(directory / "run.yaml", run)
    write(directory / "site.yaml", site)
    return plan(load_run(directory / "run.yaml"), STAGES, exists=lambda path: True)


def values_with(cls: type, place: Place, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if cls is RunConfig:
        return placed(run_values(place), place, text), SITE
    return RUN, placed(SITE, place, text)


def accepted(directory: Path, cls: type, place: Place, text: str) -> bool:
    """Whether the run is taken with this text, with sound scripts; else it is refused in plain words."""
    try:
        found = planned(directory, *values_with(cls, place, text))
        scripts = [render(found, stage) for stage in STAGES]
    except HpcgenError as error:
        messages = error.messages if isinstance(error, ConfigErrors) else (str(error),)
        assert 1 <= len(messages) <= 2, messages
        assert all(message.isprintable() for message in messages), messages
        assert max(map(len, messages)) < 3000
        return False
    for stage, script in zip(STAGES, scripts, strict=True):
        require_sound(found, stage, script)
    return True


def require_sound(found: Plan, stage: str, script: str) -> None:
    """bash can read it, and its directives are the plan's and no others."""
    checked = subprocess.run(["bash", "-n"], input=script.encode(), capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, b"")
    directives = [
        line.removeprefix("#SBATCH ").replace('"', "") for line in script.splitlines() if "#SBATCH" in line
    ]
    assert tuple(directives) == found.stages[stage].directives


def require_accepted_or_refused(directory: Path, seed: int, cases: int) -> int:
    """Goes through all fields; the number of strings that were taken."""
    rng = random.Random(seed)
    strings = hostile_strings(rng)
    taken = 0
    for cls, place in PLACES:
        for text in (next(strings) for _ in range(cases)):
            try:
                taken += accepted(directory, cls, place, text)
            except Exception as error:
                raise AssertionError(f"{cls.__name__} {place} = {text!r}") from error
    return taken


def test_hostile_strings_are_refused_or_quoted(tmp_path: Path) -> None:
    assert require_accepted_or_refused(tmp_path, seed=1, cases=CASES_IN_CI) > 20


@pytest.mark.slow
def test_ten_thousand_hostile_strings(tmp_path: Path) -> None:
    assert require_accepted_or_refused(tmp_path, seed=2, cases=CASES_IN_FULL) > 1000


def hostile_plan(directory: Path, strings: Iterator[str]) -> Plan:
    """A plan with a hostile string in every field that takes one beside the others."""
    run, site = RUN, SITE
    found = planned(directory, run, site)
    for cls, place in PLACES:
        if place[-1] in ("preset", "extends", "cluster", "node_type", "vocab_file", "merges_file"):
            continue
        for text in (next(strings) for _ in range(3)):
            tried = (placed(run, place, text), site) if cls is RunConfig else (run, placed(site, place, text))
            try:
                attempt = planned(directory, *tried)
                for stage in STAGES:
                    render(attempt, stage)
            except HpcgenError:
                continue
            found, (run, site) = attempt, tried
            break
    return found


def require_carried(found: Plan, stage: str, ran: Recording) -> None:
    """The plan's words and values are what the programs saw, byte for byte."""
    planned_stage = found.stages[stage]
    step = ran.step("-m", "trainer", "--config") if stage == "train" else ran.step("-m", "hpcgen")
    container = planned_stage.container.srun_flags() if planned_stage.container else ()
    words = (*planned_stage.allocation.srun_options(), *container, "env")
    assert step[1 : 1 + len(words)] == words
    python = step.index(planned_stage.python, len(words))
    assert step[python + 1 :][: len(planned_stage.arguments)] == planned_stage.arguments
    for variable in planned_stage.environment:
        assert ran.environment[variable.name] == variable.value
    assert "NCCL_X" not in ran.environment
    prepare = ran.step("prepare_node")
    inputs = prepare[prepare.index("prepare_node") + 2 :]
    assert inputs[: len(planned_stage.inputs)] == planned_stage.inputs
    if stage == "train" and found.trainer is not None:
        [written] = Path(found.config.paths.run_dir).glob("jobs/77/trainer.json*")
        assert json.loads(written.read_text()) == json.loads(json.dumps(to_dict(found.trainer)))


def run_hostile_batch(directory: Path, seed: int) -> None:
    found = hostile_plan(directory, hostile_strings(random.Random(seed)))
    for stage in STAGES:
        script = render(found, stage)
        ran = run_script(script, directory, found.config.paths.run_dir, found.config.secrets)
        assert "hunter2" not in script + ran.output
        require_carried(found, stage, ran)
        if shutil.which("shellcheck"):
            # a value may hold a $ or end with a backslash (SC2016, SC1003); the others are not about values
            command = ["shellcheck", "--norc", "--exclude=SC1003,SC2016,SC2034,SC2317", "--shell=bash", "-"]
            checked = subprocess.run(command, input=script.encode(), capture_output=True, check=False)
            assert checked.stdout.decode() == ""


@pytest.mark.parametrize("seed", range(BATCHES_IN_CI))
def test_what_is_taken_arrives_unchanged_and_runs_nothing(seed: int, tmp_path: Path) -> None:
    run_hostile_batch(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_a_hundred_scripts_of_hostile_strings(seed: int, tmp_path: Path) -> None:
    run_hostile_batch(tmp_path, seed)


@pytest.mark.parametrize("name", ["life", "rc", "run_dir", "BASH_ENV", "SHELLOPTS"])
def test_a_variable_cannot_take_the_place_of_the_scripts_own(name: str, tmp_path: Path) -> None:
    """`life` is evaluated as arithmetic, where the text a[$(...)] runs a command."""
    with pytest.raises(ConfigErrors, match=f"environment.{name} "):
        planned(tmp_path, {**RUN, "environment": {name: "a[$(>canary)]"}}, SITE)


def test_a_folder_with_a_hostile_name(tmp_path: Path) -> None:
    """The run file's own folder is part of every path that was relative."""
    for index, name in enumerate(("a b", "it's", "$(>canary)", "a;b", "`>canary`", "a\\b", "[x]*", "größe")):
        directory = tmp_path / str(index) / name
        directory.mkdir(parents=True)
        site = {"extends": "local", "container": {"runtime": "none"}}
        run = {
            **RUN,
            "container": {},
            "slurm": {"defaults": {"time": "10:00:00"}},
            "training": {**RUN["training"], "precision": "fp32"},
        }
        run["data"] = {"mock": True, "tokenize": {"input": ["a.jsonl"], "output_prefix": "out/a"}}
        try:
            found = planned(directory, run, site)
            script = render(found, "train")
        except HpcgenError:  # a name that #SBATCH has no form for
            continue
        ran = run_script(script, directory, found.config.paths.run_dir, found.config.secrets)
        require_carried(found, "train", ran)
