"""Hostile strings in every field of run file and profile: refused in plain words, or passed on unchanged.

Stand-ins for srun and its kind write down how they were called: what is tested is the quoting, all the way
from YAML through bash to a program's arguments. No planted command may run.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpcgen import load_run, plan, render
from hpcgen.config import document as documents
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.corpus import CorpusJob
from hpcgen.config.fields import constraint_problems
from hpcgen.config.run import TRAINER_SECTIONS, RunConfig
from hpcgen.config.validation import located
from hpcgen.errors import ConfigErrors, HpcgenError
from hpcgen.planning.environment import library_path
from hpcgen.planning.paths import corpus_job
from hpcgen.run_plan.plan import Plan
from hpcgen.slurm.rendering.settings import LIBRARY_PATH
from hpcgen.stages import STAGES
from tests.hostile import (
    KEY,
    Place,
    Recording,
    hostile_strings,
    nothing_read_twice,
    placed,
    require_shellcheck,
    run_script,
    text_at,
    text_places,
)
from tests.runs import MODEL_STAGES, SHAPE
from trainer.contract.config import TrainerConfig, from_dict

STRINGS_IN_CI = 1
"""In each field, for each runtime."""
STRINGS_IN_FULL = 2000
CHUNK = 50
"""Strings of each field that one process of the long test takes at a time."""

RUN: dict[str, Any] = {
    "name": "run",
    "cluster": "./site.yaml",
    "paths": {"run_dir": "runs"},
    "environment": {"A": "x"},
    "secrets": ["HF_TOKEN"],
    "container": {"mounts": [{"source": "/source", "target": "/target"}]},
    "slurm": {"defaults": {"time": "10:00:00"}, "train": {"ntasks_per_node": 4}},
    "preflight": {"node_health": True},
    "model": {**SHAPE, "vocab_size": 50257},
    "training": {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 10},
    "optimizer": {"lr": 1e-3},
    "evaluation": {"data": [{"name": "text", "prefix": "/data/text"}]},
    "generation": {"prompts": "/prompts/all.jsonl"},
    "export": {"directory": "/models/exported"},
    "data": {
        "datasets": [{"prefix": "/data/a"}],
        "tokenizer": {"kind": "huggingface", "tokenizer_file": "/data/t.json", "eod_token": "e"},
        "corpus": {
            "directory": "/corpus",
            "source": {"directory": "/text"},
            "splits": {"train": ["train/*"]},
        },
    },
}
SITE: dict[str, Any] = {
    "node_type": "ndv5",
    "code_dir": "/code",
    "container": {"mounts": [{"source": "/s1", "target": "/t1"}]},
    "environment": {"A": "y"},
}
SOURCES: dict[str, dict[str, Any]] = {
    "huggingface": {"huggingface": {"repo_id": "a/b"}},
    "url": {"url": {"template": "https://h/a"}},
    "manifest": {"manifest": "/text/files.jsonl"},
}
"""Where a corpus comes from in place of a directory."""
RUNTIMES = ("pyxis", "enroot", "none")

TextField = tuple[type, Place]
FIELDS: list[TextField] = [(cls, place) for cls in (RunConfig, ClusterConfig) for place in text_places(cls)]
"""Every field of run file and profile that accepts text."""


def test_the_walk_finds_every_field() -> None:
    places = {".".join(map(str, place)) for cls, place in FIELDS if cls is RunConfig}
    assert places >= {
        *("name", "preset", "share", "secrets.0", f"environment.{KEY}", "environment.A"),
        *("container.mounts.0.source", "slurm.train.extra_directives.0", "slurm.node_health.partition"),
        *("data.corpus.json_key", "data.datasets.0.prefix", "training.precision", "image.base"),
        *("model.normalization", "checkpoint.load", "data.tokenizer.eod_token", "data.corpus.include.0"),
        *("data.corpus.directory", "data.corpus.source.token_variable", "data.corpus.splits.valid.0"),
        *("data.corpus.source.huggingface.revision", "data.corpus.source.url.template", "slurm.prepare.mem"),
    }
    assert len(FIELDS) > 100


@pytest.fixture(autouse=True)
def quiet_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


def base(place: Place) -> str:
    """The way of saying things in which the field is read: samples come one way, a tokenizer has its files."""
    if place[:2] in (("data", "train"), ("data", "valid"), ("data", "test")):
        return "a blend for each split"
    if place[:3] == ("data", "corpus", "source") and place[3] != "directory":
        return "huggingface" if place[3] == "token_variable" else str(place[3])
    if place[0] == "program" or place[:2] == ("slurm", "run"):
        return "a program"
    return "GPT-2's tokenizer" if place[-1] in ("vocab_file", "merges_file") else "one blend"


def values(way: str, runtime: str, texts: Mapping[TextField, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run file and profile with the texts in their fields, valid but for these."""
    data, container = dict(RUN["data"]), RUN["container"]
    if way == "a blend for each split":
        del data["datasets"]
        data |= {split: [{"prefix": f"/data/{split}"}] for split in ("train", "valid", "test")}
    elif way in SOURCES:
        data["corpus"] = {**data["corpus"], "source": SOURCES[way]}
    elif way == "GPT-2's tokenizer":
        data["tokenizer"] = {
            "kind": "gpt2",
            "vocab_file": "/data/vocab.json",
            "merges_file": "/data/merges.txt",
        }
    if runtime == "none":
        container = {}
    run = {**RUN, "data": data, "container": {**container, "runtime": runtime}}
    if way == "a program":
        run = {key: value for key, value in run.items() if key not in (*TRAINER_SECTIONS, "data")}
        run["program"] = {"command": ["true", "{JOB_ID}"], "directory": "."}
    image = Path("gpt.sqsh").absolute()
    image.touch()
    scratch = Path("scratch").absolute()
    (scratch / "hpcgen-slurm-77").mkdir(parents=True, exist_ok=True)  # mkdir is a stand-in
    site = {**SITE, "container": {**SITE["container"], "image": str(image)}, "scratch": str(scratch)}
    for (cls, place), text in texts.items():
        if cls is RunConfig:
            run = placed(run, place, text)
        else:
            site = placed(site, place, text)
    return run, site


def write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document).replace("\x7f", "\\u007f"), encoding="utf-8")


def planned(
    directory: Path, run: dict[str, Any], site: dict[str, Any], stages: Collection[str] = MODEL_STAGES
) -> Plan:
    """The plan of these stages."""
    write(directory / "run.yaml", run)
    write(directory / "site.yaml", site)
    return plan(load_run(directory / "run.yaml"), stages, exists=lambda path: True)


def read_by(texts: Mapping[TextField, str]) -> Collection[str]:
    """The stages that can say these texts to Slurm: what `slurm` says of one stage is read by no other."""
    if any(place[-1] in ("vocab_file", "merges_file") for _, place in texts):  # these stages fix the names
        return [name for name in STAGES if name not in ("generate", "export")]
    sections = {place[1] if cls is RunConfig and place[0] == "slurm" else None for cls, place in texts}
    return [name for name, stage in STAGES.items() if sections == {stage.section}] or MODEL_STAGES


def require_clean(messages: tuple[str, ...]) -> None:
    assert 1 <= len(messages) <= 3, messages
    assert all(message.isprintable() for message in messages), messages
    assert max(map(len, messages)) < 3000


def refused_by_form(field: TextField, text: str) -> bool:
    """True if the field's own type refuses the text, in plain words."""
    cls, place = field
    document = documents.constant(placed({}, place, text), "run.yaml:1")
    problems = list(constraint_problems(cls, document.values))
    if problems:
        require_clean(tuple(str(located(problem, document)) for problem in problems))
    return bool(problems)


def taken(
    directory: Path, runtime: str, texts: Mapping[TextField, str], way: str, only: int | None = None
) -> Plan | None:
    """The plan with these texts, whose scripts say nothing else to sbatch; None when they are refused.

    With `only`, the script of one stage, which this number chooses, is looked at.
    """
    try:
        found = planned(
            directory, *values(way, runtime, texts), ["run"] if way == "a program" else read_by(texts)
        )
        stages = list(found.stages)
        scripts = {
            stage: render(found, stage)
            for stage in (stages if only is None else [stages[only % len(stages)]])
        }
    except HpcgenError as error:
        messages = error.messages if isinstance(error, ConfigErrors) else (str(error),)
        if len(texts) == 1:
            require_clean(messages)
        return None
    if len(texts) == 1:
        [((cls, place), text)] = texts.items()
        assert text_at(found.run.config if cls is RunConfig else found.run.cluster, place) == text
    for stage, script in scripts.items():
        directives = [
            line.removeprefix("#SBATCH ").replace('"', "")
            for line in script.splitlines()
            if "#SBATCH" in line
        ]
        assert tuple(directives) == found.stages[stage].directives
    return found


def batches(directory: Path, runtime: str, texts: dict[TextField, str], way: str) -> Iterator[Plan]:
    """Plans that hold these texts together, as many at once as go together."""
    if texts and (found := taken(directory, runtime, texts, way)) is not None:
        yield found
    elif len(texts) > 1:
        fields = list(texts)
        for half in (fields[: len(fields) // 2], fields[len(fields) // 2 :]):
            yield from batches(directory, runtime, {field: texts[field] for field in half}, way)


def require_carried(found: Plan, stage: str, ran: Recording) -> None:
    """The plan's words and values are what the programs saw, byte for byte."""
    planned_stage, config = found.stages[stage], found.config
    container, cluster = planned_stage.container, found.run.cluster
    job = "77_0" if planned_stage.allocation.array else "77"
    made = ran.call("mkdir", f"{config.paths.run_dir}/jobs")
    assert made[4:] == planned_stage.directories
    jobs, scratch = Path(config.paths.run_dir, "jobs", job), Path(cluster.scratch, "hpcgen-slurm-77")
    for name, text in planned_stage.files.items():
        [written] = (scratch if stage == "image" else jobs).glob(f"{name}.{job}.*")
        assert written.read_text(encoding="utf-8").removesuffix("\n") == text.removesuffix("\n")
    for variable in planned_stage.environment:
        assert ran.environment[variable.name] == variable.value
    assert "NCCL_X" not in ran.environment
    for name in cluster.modules:
        assert ran.call("module", name) == ("module", "load", name)
    required = planned_stage.required_everywhere()
    prepare = ran.call("srun", "make_node_scratch")
    assert prepare[prepare.index("make_node_scratch") + 1] == f"{cluster.scratch}/hpcgen-slurm-77"
    assert prepare[prepare.index("make_node_scratch") + 4 :] == required

    step = ran.calls_of("srun", "--kill-on-bad-exit=1")[-1]
    if container is not None and container.runtime == "pyxis":
        assert f"--container-image={container.image}" in step
    elif container is not None:
        assert ran.call("srun", "create")[-1] == container.image
    assert holds(step, planned_stage.allocation.srun_options())
    libraries = ":".join(library_path(planned_stage.kind, found.run))
    with_libraries = ("sh", "-c", LIBRARY_PATH, "library_path", libraries) if libraries else ()
    assert holds(step, (*(container.words() if container else ()), *with_libraries, "env"))
    assert f"TMPDIR={cluster.scratch}/hpcgen-slurm-77/tmp" in step
    python = () if stage in ("image", "run") else (planned_stage.python,)
    assert holds(step, (*python, *planned_stage.arguments))

    if stage in ("train", "node-health"):
        check = ran.call("srun", "check_host")
        assert holds(check, tuple(f"file={path}" for path in required))
        assert check[len(check) - len(cluster.health_command) :] == cluster.health_command
    if stage == "nccl-test" and cluster.nccl_tests:
        looked_for, measured = ran.calls_of("srun", cluster.nccl_tests)
        assert looked_for[-3:] == ("test", "-x", cluster.nccl_tests)
        assert holds(measured, (cluster.nccl_tests, "--minbytes=1048576"))
    if stage == "tensorboard" and cluster.login_host:
        assert f"ssh -N -J {cluster.login_host} -L 6006:" in ran.output
    if STAGES[stage].is_array:
        assert holds(step, ("--task-id", "0"))
        told = from_dict(CorpusJob, json.loads(planned_stage.files["corpus.json"]), where="")
        assert told == corpus_job(config)
    if stage == "train" and found.trainer is not None:
        told = from_dict(TrainerConfig, json.loads(planned_stage.files["trainer.json"]), where="")
        assert told == found.trainer


def holds(call: tuple[str, ...], words: tuple[str, ...]) -> bool:
    """True if a call has these words next to each other in this order."""
    return any(call[start : start + len(words)] == words for start in range(len(call)))


def require_harmless(directory: Path, found: Plan) -> None:
    """The scripts of the plan run, carry everything, print no secret and start nothing that was planted."""
    for stage in found.stages:
        script = render(found, stage)
        ran = run_script(script, directory, found.config.paths.run_dir, found.stages[stage].secrets)
        assert "hunter2" not in script + ran.output
        try:
            require_carried(found, stage, ran)
        except Exception as error:
            raise AssertionError(f"{stage}: {error}\n{ran.output}") from error


def go_through(seed: int, num_strings: int) -> Counter[str]:
    """`num_strings` in each field, in a directory of its own; what became of them."""
    rng = random.Random(seed)
    strings = hostile_strings(rng)
    count: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, nothing_read_twice():
        directory = Path(name)
        os.chdir(directory)
        os.environ["XDG_CONFIG_HOME"] = str(directory / "xdg")
        runtime = RUNTIMES[seed % 3]
        for way in {base(place) for _, place in FIELDS}:
            assert taken(directory, runtime, {}, way), "the run is good without hostile strings"
        pools: dict[str, list[dict[TextField, str]]] = {}
        for field in FIELDS:
            for _ in range(num_strings):
                text = next(strings)
                count["strings"] += 1
                try:
                    accepted = not refused_by_form(field, text) and taken(
                        directory, runtime, {field: text}, base(field[1]), only=count["strings"]
                    )
                except Exception as error:
                    raise AssertionError(f"{field[0].__name__} {field[1]} = {text!r}") from error
                if not accepted:
                    continue
                count["taken"] += 1
                if field[1][-1] in ("run_dir", "image", "scratch") and text.startswith("/"):
                    continue  # its script would write there, or look for the image
                pool = pools.setdefault(base(field[1]), [])
                free = next((texts for texts in pool if field not in texts), None)
                if free is None:
                    pool.append(free := {})
                free[field] = text
        for way, pool in pools.items():
            for texts in pool:
                for found in batches(directory, runtime, texts, way):
                    require_harmless(directory, found)
                    if not count["scripts"]:
                        # Another stage for each seed, since shellcheck takes longer than all else.
                        stages = list(found.stages)
                        require_shellcheck(render(found, stages[seed % len(stages)]))
                    count["scripts"] += len(found.stages)
        os.chdir("/")
    return count


@pytest.mark.process
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, id=runtime, marks=[] if runtime == "pyxis" else [pytest.mark.slow])
        for seed, runtime in enumerate(RUNTIMES)
    ],
)
def test_hostile_strings_are_refused_or_arrive_unchanged(seed: int) -> None:
    count = go_through(seed, STRINGS_IN_CI)
    assert count["taken"] > 10
    assert count["scripts"] > 10


@pytest.mark.process
@pytest.mark.slow
def test_two_thousand_hostile_strings_in_every_field() -> None:
    seeds = range(100, 100 + STRINGS_IN_FULL // CHUNK)
    with ProcessPoolExecutor() as processes:
        count = sum(processes.map(go_through, seeds, [CHUNK] * len(seeds)), Counter[str]())
    print(dict(count))
    assert count["strings"] == STRINGS_IN_FULL * len(FIELDS)


@pytest.mark.parametrize("name", ["restart", "rc", "run_dir", "BASH_ENV", "SHELLOPTS"])
def test_a_variable_cannot_take_the_place_of_the_scripts_own(name: str, tmp_path: Path) -> None:
    """`restart` is evaluated as arithmetic, where the text a[$(...)] runs a command."""
    with pytest.raises(ConfigErrors, match=f"environment.{name} "):
        planned(
            tmp_path, *values("one blend", "pyxis", {(RunConfig, ("environment", name)): "a[$(>canary)]"})
        )


@pytest.mark.process
def test_a_folder_with_a_hostile_name(tmp_path: Path) -> None:
    """The run file's own folder is part of every path that was relative."""
    runs = 0
    for index, name in enumerate(("a b", "it's", "$(>canary)", "a;b", "`>canary`", "a\\b", "[x]*", "größe")):
        directory = tmp_path / str(index) / name
        directory.mkdir(parents=True)
        run, site = values("one blend", "none", {})
        run["data"] = {"mock": True, "corpus": {"directory": "out", "source": {"directory": "text"}}}
        write(directory / "run.yaml", run)
        write(directory / "site.yaml", site)
        try:
            found = plan(load_run(directory / "run.yaml"), ["prepare", "train"], exists=lambda path: True)
            for stage in found.stages:
                render(found, stage)
        except HpcgenError:  # a name that #SBATCH has no form for
            continue
        require_harmless(directory, found)
        runs += 1
    assert runs >= 3
