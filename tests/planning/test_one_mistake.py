"""One invalid key is one mistake, whatever depends on it. Mistakes in keys and values come first, then broken rules."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcgen.config.keys import key_paths
from hpcgen.config.run import RunConfig
from hpcgen.errors import HpcgenError
from tests.runs import MODEL_STAGES, SHAPE, planned, write_yaml

MODEL_RUN = {
    "name": "full",
    "cluster": "azure-ndv5",
    "paths": {"run_dir": "/r/full"},
    "share": "group",
    "secrets": ["HF_TOKEN"],
    "environment": {"A": "b"},
    "container": {"runtime": "pyxis", "image": "/i.sqsh", "mounts": [{"source": "/m"}]},
    "image": {"output": "/images/new.sqsh", "base": "nvcr.io#nvidia/pytorch:25.03-py3", "code": "/code"},
    "preflight": {"node_health": True, "spare_nodes": 1},
    "slurm": {
        "defaults": {"time": "1-00:00:00"},
        "train": {"nodes": 2, "ntasks_per_node": 8},
        "prepare": {"num_tasks": 4, "array_parallelism": 2, "mem": "64G"},
    },
    "data": {
        "datasets": [{"prefix": "/data/a"}],
        "corpus": {"directory": "/corpus", "source": {"directory": "/text"}, "num_output_files": 2},
    },
    "model": {
        **SHAPE,
        "num_attention_heads": 8,
        "vocab_size": 50257,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "swiglu": True,
    },
    "parallelism": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
    },
    "training": {
        "micro_batch_size": 1,
        "global_batch_size": 64,
        "train_iters": 100,
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
    },
    "optimizer": {"lr": 1e-3, "lr_warmup_iters": 10, "min_lr": 1e-4},
    "checkpoint": {"save_interval": 50, "keep_last": 2},
    "logging": {"log_interval": 5, "profile_step_start": 5, "profile_step_end": 7},
    "evaluation": {"tasks": ["hellaswag"], "hf_home": "/hf"},
    "generation": {"prompts": "/shared/prompts.jsonl"},
    "export": {"directory": "/shared/exported"},
}
PROGRAM_RUN = {
    "name": "p",
    "cluster": "azure-ndv5",
    "paths": {"run_dir": "/r/p"},
    "environment": {"A": "b"},
    "slurm": {"run": {"nodes": 2, "time": "1:00:00"}},
    "program": {
        "command": ["python", "t.py", "{RANK}"],
        "directory": "/code",
        "progress": {"file": "{RUN_DIR}/p"},
        "stop": {"signal": "USR1"},
        "done": {"file": "{RUN_DIR}/d"},
    },
}
REQUIRED = {
    *(("name",), ("cluster",), ("paths",), ("model",), ("training",), ("optimizer",)),
    *(("paths", "run_dir"), ("optimizer", "lr"), ("program", "command"), ("program", "done", "file")),
    *(("model", key) for key in SHAPE),
    *(("training", key) for key in ("micro_batch_size", "global_batch_size", "train_iters")),
    *(("data", "corpus", key) for key in ("directory", "source")),
    *(("generation", "prompts"), ("export", "directory")),
}
RUNS = {"model": (MODEL_RUN, MODEL_STAGES), "program": (PROGRAM_RUN, ("run",))}


def keys(section: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the paths of all sections and values."""
    for key, value in section.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from keys(value, (*prefix, key))


def changed(run: dict[str, Any], path: tuple[str, ...], value: object = None) -> dict[str, Any]:
    """The run with another value at `path`, or without the key."""
    run = copy.deepcopy(run)
    section = run
    for key in path[:-1]:
        section = section.setdefault(key, {})
    if value is None:
        del section[path[-1]]
    else:
        section[path[-1]] = value
    return run


def mistakes(directory: Path, run: dict[str, Any], stages: tuple[str, ...]) -> list[str]:
    try:
        planned(directory, run, stages)
    except HpcgenError as error:
        return [mistake.path or str(mistake) for mistake in error.mistakes]
    return []


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", RUNS)
def test_a_value_of_the_wrong_type_is_the_only_mistake(tmp_path, kind, every):
    run, stages = RUNS[kind]
    assert mistakes(tmp_path, run, stages) == []
    for path in list(keys(run))[::every]:
        assert mistakes(tmp_path, changed(run, path, [[]]), stages)[1:] == [], path


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", RUNS)
def test_an_invalid_value_of_any_key_is_reported(tmp_path, kind, every):
    """Whatever reads the value: no check ends in a traceback. The default is every ninth key."""
    run, stages = RUNS[kind]
    sections = ("program", "slurm", "container") if kind == "program" else (*run, "preset")
    settings = (
        "slurm.defaults",
        "slurm.run",
        "slurm.train",
        "slurm.prepare",
    )  # the other stages have the same keys
    for key in list(key_paths(RunConfig))[::every]:
        if key.partition(".")[0] in sections and (not key.startswith("slurm.") or key.startswith(settings)):
            found = mistakes(tmp_path, changed(run, tuple(key.split(".")), [[]]), stages)
            assert any(mistake.startswith(key) for mistake in found), key


@pytest.mark.parametrize("kind", RUNS)
def test_a_missing_required_key_is_the_only_mistake(tmp_path, kind):
    """A missing section is the mistake of its required key."""
    run, stages = RUNS[kind]
    for path in REQUIRED & set(keys(run)):
        named = "paths.run_dir" if path == ("paths",) else ".".join(path)
        assert mistakes(tmp_path, changed(run, path), stages) == [named], path


PROFILE = {
    "extends": "azure-ndv5",
    "node_type": "ndv5",
    "partitions": {"gpu": {"max_time": "2-00:00:00", "max_nodes": 8}},
    "slurm": {"partition": "gpu", "time": "1-00:00:00", "extra_directives": ["--mail-type=FAIL"]},
    "gres": "gpu:8",
    "python": "python3",
    "container": {"runtime": "pyxis", "image": "/i.sqsh", "mounts": [{"source": "/n"}]},
    "environment": {"B": "c"},
    "scratch": "/scratch",
    "health_command": ["/opt/check"],
}


def test_a_mistake_in_the_profile_is_the_only_mistake(tmp_path):
    run = changed(MODEL_RUN, ("cluster",), "./site.yaml")
    write_yaml(tmp_path / "site.yaml", PROFILE)
    assert mistakes(tmp_path, run, MODEL_STAGES) == []
    for path in keys(PROFILE):
        write_yaml(tmp_path / "site.yaml", changed(PROFILE, path, [[]]))
        assert len(mistakes(tmp_path, run, MODEL_STAGES)) == 1, path


def test_all_mistakes_in_keys_and_values_come_before_all_broken_rules(tmp_path):
    run = changed(MODEL_RUN, ("cluster",), "./site.yaml")
    run["model"] |= {"ffn_hidden_size": "wide", "num_query_groups": 3, "moe_router_topk": 5}
    run["model"]["rope_scaling"] = {"rope_type": "yarn", "factor": "four"}
    run["parallelism"] |= {"tensor_model_parallel_size": "two", "pipeline_model_parallel_size": 3}
    run["optimizer"] |= {"lr": "fast", "adam_beta_1": 0.9, "lr_warmup_iters": 1000}
    run["slurm"]["train"] |= {"time": "a day", "extra_directives": ["--nodes=2"]}
    run["data"]["corpus"] |= {"directory": 5, "sample_fraction": 0}
    run["checkpoint"]["keep_every"] = 70
    run["environment"]["SLURM_JOB_ID"] = "1"
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "scratsh": "/a", "slurm": {"time": "a day"}})
    assert sorted(mistakes(tmp_path, run, ("train",))) == [
        "data.corpus.directory",
        "model.ffn_hidden_size",
        "model.rope_scaling.factor",
        "optimizer.adam_beta_1",
        "optimizer.lr",
        "parallelism.tensor_model_parallel_size",
        "scratsh",
        "slurm.time",
        "slurm.train.time",
    ]
    run["model"] |= {"ffn_hidden_size": 256, "rope_scaling": {"rope_type": "yarn", "factor": 4}}
    run["parallelism"]["tensor_model_parallel_size"] = 2
    run["optimizer"] = {"lr": 1e-3, "adam_beta1": 0.9, "lr_warmup_iters": 1000}
    run["slurm"]["train"]["time"] = "1-0"
    run["data"]["corpus"]["directory"] = "/corpus"
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "health_command": ["check"]})
    assert sorted(mistakes(tmp_path, run, ("train",))) == [
        "checkpoint.keep_every",
        "data.corpus.sample_fraction",
        "environment.SLURM_JOB_ID",
        "health_command[0]",
        "model.moe_router_topk",
        "model.num_query_groups",
        "model.rope_scaling",
        "optimizer.lr_warmup_iters",
        "parallelism.pipeline_model_parallel_size",
        "slurm.train.extra_directives[0]",
    ]


@pytest.mark.parametrize(
    ("section", "unknown", "key"),
    [
        ("model", "num_expert", "num_moe_experts"),
        ("model", "num_local_experts", "num_moe_experts"),
        ("model", "hidden_siz", "hidden_size"),
        ("parallelism", "sequence_paralel", "sequence_parallel"),
        ("training", "train_iter", "train_iters"),
        ("optimizer", "learning_rate", "lr"),
    ],
)
def test_a_misspelled_key_is_the_only_mistake(tmp_path, section, unknown, key):
    run = copy.deepcopy(MODEL_RUN)
    run[section][unknown] = run[section].pop(key)
    assert mistakes(tmp_path, run, MODEL_STAGES) == [f"{section}.{unknown}"]


def test_a_key_in_another_section_is_the_only_mistake(tmp_path):
    for section, key, wrong in (
        ("model", "num_moe_experts", "parallelism"),
        ("parallelism", "expert_model_parallel_size", "model"),
        ("training", "micro_batch_size", "optimizer"),
    ):
        run = copy.deepcopy(MODEL_RUN)
        run[wrong][key] = run[section].pop(key)
        assert mistakes(tmp_path, run, MODEL_STAGES) == [f"{wrong}.{key}"]
        run[key] = run[wrong].pop(key)
        assert mistakes(tmp_path, run, MODEL_STAGES) == [key]


def test_an_unknown_preset_does_not_hide_the_mistakes_of_other_sections(tmp_path):
    run = {"name": "a", "cluster": "azure-ndv5", "preset": "176b", "paths": {"run_dir": "/r"}}
    run |= {"secrets": ["A"], "environment": {"A": "x"}, "slurm": {"train": {"nodes": "two"}}}
    assert mistakes(tmp_path, run, ("train",)) == ["preset", "slurm.train.nodes"]


def test_a_preset_that_contradicts_the_run_file_is_reported_at_its_line(tmp_path):
    run = {"name": "a", "cluster": "azure-ndv5", "preset": "mixtral-8x7b", "paths": {"run_dir": "/r"}}
    run |= {"container": {"image": "/i.sqsh"}, "slurm": {"train": {"nodes": 2, "time": "1-0"}}}
    run |= {"data": {"mock": True}, "model": {"num_moe_experts": None}}
    with pytest.raises(HpcgenError) as error:
        planned(tmp_path, run)
    lines = (tmp_path / "run.yaml").read_text().splitlines()
    for mistake in error.value.mistakes:
        assert "(preset mixtral-8x7b) has no effect" in str(mistake)
        assert "num_moe_experts" in lines[mistake.where.line - 1]
