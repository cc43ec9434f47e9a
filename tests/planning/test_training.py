"""Precision, functions of one's own, logging and saves: what a run file says, and what the job then has."""

from __future__ import annotations

import json

import pytest

from hpcgen.run_plan.summary import for_people, summarize
from tests.runs import big_run, loaded, minimal_run, planned, write_yaml

FP8 = ("training.fp8=hybrid", "checkpoint.keep_last=5")


def lines(plan) -> dict[str, str]:
    return dict(for_people(summarize(plan)))


def test_functions_of_files_are_found_from_the_run_files_folder(tmp_path):
    run = big_run(model={"layer_spec": "mine/layers.py:spec", "model_provider": "installed.model:Mine"})
    overrides = ["optimizer.lr_schedule=mine/rates.py:rate"]
    plan = planned(tmp_path, run, overrides=overrides)
    trainer, train = plan.trainer, plan.stages["train"]
    assert trainer.model.layer_spec == f"{tmp_path}/mine/layers.py:spec"
    assert trainer.model.model_provider == "installed.model:Mine"
    assert trainer.optimizer.lr_schedule == f"{tmp_path}/mine/rates.py:rate"
    assert json.loads(train.files["trainer.json"])["model"]["layer_spec"] == trainer.model.layer_spec
    assert {f"{tmp_path}/mine/layers.py", f"{tmp_path}/mine/rates.py"} <= set(train.required)
    assert (f"{tmp_path}/mine", True) in [(m.source, m.read_only) for m in train.container.mounts]
    assert lines(plan)["parameters"].endswith(
        f" without changes by {tmp_path}/mine/layers.py:spec and installed.model:Mine"
    )
    assert lines(plan)["learning rate"] == f"6e-05 after 119 steps, then {tmp_path}/mine/rates.py:rate"


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    from hpcgen import plan
    from hpcgen.errors import ConfigErrors

    run = loaded(tmp_path, minimal_run(), ["model.layer_spec=layers.py:spec"])
    with pytest.raises(ConfigErrors, match=f"{tmp_path}/layers.py: no such file. Stage train needs it"):
        plan(run)


def test_fp8_is_measured_against_its_own_peak(tmp_path):
    plan = planned(tmp_path, big_run(), overrides=[*FP8, "slurm.train.nodes=32"])
    assert plan.trainer.peak_tflops == 1979
    assert lines(plan)["precision"] == "bf16, layers in FP8 (hybrid, current scaling)"
    assert not [warning for warning in plan.warnings if "training.fp8" in warning]


def test_fp8_on_gpus_that_name_no_peak_for_it_is_a_warning(tmp_path):
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "node_type": "ndv4"})
    plan = planned(tmp_path, big_run(cluster="site.yaml"), overrides=[*FP8, "slurm.train.nodes=32"])
    [warning] = [warning for warning in plan.warnings if "training.fp8" in warning]
    assert "peak_tflops of node type ndv4 has no fp8" in warning


def test_weights_and_biases_without_its_key_is_a_warning(tmp_path):
    overrides = ["logging.wandb_project=gpt"]
    [warning] = [w for w in planned(tmp_path, minimal_run(), overrides=overrides).warnings if "wandb" in w]
    assert warning == (
        "--set logging.wandb_project: logging.wandb_project = gpt will be logged offline, because secrets does not "
        "contain WANDB_API_KEY; add WANDB_API_KEY to secrets and export it where you submit, or upload later with "
        "wandb sync"
    )
    named = planned(tmp_path, minimal_run(secrets=["WANDB_API_KEY"]), overrides=overrides)
    assert not [warning for warning in named.warnings if "wandb" in warning]


def test_deterministic_kernels_need_their_environment(tmp_path):
    def variables(*overrides: str) -> dict[str, str]:
        environment = planned(tmp_path, big_run(), overrides=overrides).stages["train"].environment
        return {variable.name: variable.value for variable in environment}

    wanted = {
        "NCCL_ALGO": "Ring",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    assert wanted.items() <= variables("training.deterministic_mode=true").items()
    assert not wanted.keys() & variables().keys()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ((), "every 30 minutes, in the background using 142.3 GiB of memory per node, "),
        (("checkpoint.save_interval=500",), "every 500 steps, in the background"),
        (
            (
                "checkpoint.save_interval=500",
                "checkpoint.save_interval_minutes=45",
                "checkpoint.async_save=false",
            ),
            "every 500 steps and every 45 minutes, while training waits, ",
        ),
    ],
)
def test_the_summary_tells_when_and_how_checkpoints_are_written(tmp_path, overrides, line):
    assert line in lines(planned(tmp_path, big_run(), overrides=overrides))["checkpoint"]


def test_a_growing_batch_reads_fewer_tokens(tmp_path):
    plan = planned(tmp_path, big_run(), overrides=["training.rampup_batch_size=[32, 32, 3000000]"])
    constant = planned(tmp_path, big_run())
    assert summarize(plan)["tokens_of_the_run"] < summarize(constant)["tokens_of_the_run"]
    assert lines(plan)["tokens"].endswith(
        "; batch size grows from 32 in increments of 32 over 3,000,000 samples"
    )
    # 375 million tokens of warm-up are more steps of a small batch
    assert plan.trainer.optimizer.lr_warmup_iters > constant.trainer.optimizer.lr_warmup_iters


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["optimizer.lr_decay_style=constant"], "0.001 after 1 step, constant"),
        (
            ["optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_iters=3"],
            "0.001 after 1 step, WSD decay from step 7 to 0.0001 at step 10",
        ),
        ([], "0.001 after 1 step, cosine decay to 0.0001 at step 10"),
    ],
)
def test_the_schedule_in_a_line(tmp_path, overrides, line):
    assert lines(planned(tmp_path, minimal_run(), overrides=overrides))["learning rate"] == line


def mistakes(tmp_path, *overrides: str, **sections) -> str:
    from hpcgen import plan
    from hpcgen.errors import ConfigErrors

    with pytest.raises(ConfigErrors) as error:
        plan(loaded(tmp_path, minimal_run(**sections), overrides))
    return str(error.value)


@pytest.mark.parametrize(
    "key", ["model.layer_spec", "model.model_provider", "optimizer.lr_schedule", "training.loss"]
)
def test_a_function_that_its_file_does_not_define_is_an_error(tmp_path, key):
    (tmp_path / "mine.py").write_text("import os\nraise SystemExit  # never imported\ndef rates(): pass\n")
    found = mistakes(tmp_path, f"{key}=mine.py:rate")
    assert f"names rate, which {tmp_path}/mine.py does not define; did you mean rates?" in found


@pytest.mark.parametrize(
    ("file", "reason"),
    [("sched", "is the name of another module"), ("my-rate", "is not a valid module name")],
)
def test_a_file_that_cannot_be_imported_by_its_name_is_an_error(tmp_path, file, reason):
    (tmp_path / f"{file}.py").write_text("def rate(iteration, optimizer): return 1e-3\n")
    found = mistakes(tmp_path, f"optimizer.lr_schedule={file}.py:rate")
    assert f"names {tmp_path}/{file}.py, but {file} {reason}" in found


@pytest.mark.parametrize(
    ("key", "definition", "problem"),
    [
        (
            "training.loss",
            "def mine(logits, labels): ...",
            "takes (logits, labels), but is called with (logits, labels, loss_mask, batch) by name; "
            "write def mine(logits, labels, loss_mask, batch)",
        ),
        (
            "training.loss",
            "def mine(outputs, labels, loss_mask=None, batch=None): ...",
            "takes (outputs, labels, loss_mask=..., batch=...), but is called with",
        ),
        (
            "training.loss",
            "class mine:\n def __init__(self): ...\n def __call__(self, **rest): ...",
            "is a class whose __init__ takes (), but is called with (config) by position",
        ),
        (
            "training.loss",
            "class mine:\n def __init__(self, config): ...\n def __call__(self, x): ...",
            "is a class whose instances take (x), but is called with (logits, labels, loss_mask, batch) by name",
        ),
        ("training.loss", "class mine: ...", "is a class without __call__"),
        (
            "training.metrics",
            "def mine(logits, /, labels, loss_mask, batch): ...",
            "takes (logits, /, labels,",
        ),
        (
            "optimizer.lr_schedule",
            "def mine(iteration): ...",
            "takes (iteration), but is called with (iteration, optimizer) by position; "
            "write def mine(iteration, optimizer)",
        ),
        (
            "data.dataset",
            "def mine(path, seed, length): ...",
            "takes (path, seed, length), but is called with (split, config) by position; write def mine(split, config)",
        ),
        (
            "data.dataset",
            "class mine:\n def __init__(self, split): ...",
            "is a class whose __init__ takes (split), but is called with (split, config) by position",
        ),
        ("model.layer_spec", "def mine(core): ...", "is called with (core, vp_stage, usual) by position"),
        ("model.model_provider", "def mine(config): ...", "is called with (config, transformer_layer_spec, "),
    ],
)
def test_a_function_with_other_arguments_is_an_error(tmp_path, key, definition, problem):
    (tmp_path / "mine.py").write_text(f"raise SystemExit  # never imported\n{definition}\n")
    path = "[mine.py:mine]" if key == "training.metrics" else "mine.py:mine"
    assert problem in mistakes(tmp_path, f"{key}={path}")


@pytest.mark.parametrize(
    "definition",
    [
        "def mine(batch, loss_mask, labels, logits, more=1): ...",
        "def mine(*, logits, labels, **rest): ...",
        "class mine:\n def __init__(self, config): ...\n def forward(self, logits, **rest): ...",
        "from torch.nn import Module\nclass mine(Module):\n def forward(self, logits, **rest): ...",
        "import functools\n@functools.cache\ndef mine(): ...",
        "try:\n def mine(): ...\nexcept ImportError:\n def mine(logits): ...",
    ],
)
def test_functions_whose_arguments_fit_or_are_not_known_are_accepted(tmp_path, definition):
    (tmp_path / "mine.py").write_text(f"{definition}\n")
    planned(tmp_path, minimal_run(), overrides=["training.loss=mine.py:mine"])


def test_functions_defined_in_unusual_ways_are_found(tmp_path):
    text = "try:\n    from a.b import c as rate\nexcept ImportError:\n    rate = None\nif True:\n    spec: int = 1\n"
    (tmp_path / "mine.py").write_text(text)
    planned(
        tmp_path,
        minimal_run(),
        overrides=["optimizer.lr_schedule=mine.py:rate", "model.layer_spec=mine.py:spec"],
    )
    for text in ("from a import *\n", "def __getattr__(name): ...\n", "globals()['rate'] = 1\n"):
        (tmp_path / "mine.py").write_text(text)
        planned(tmp_path, minimal_run(), overrides=["optimizer.lr_schedule=mine.py:rate"])
    (tmp_path / "mine.py").write_text("def rate(:\n")
    found = planned(tmp_path, minimal_run(), overrides=["optimizer.lr_schedule=mine.py:rate"])
    assert [w for w in found.warnings if f"this Python cannot parse {tmp_path}/mine.py:1" in w]


@pytest.mark.parametrize("lr", ["3", "10", "0.3"])
def test_an_absurd_learning_rate_is_an_error(tmp_path, lr):
    assert "is too high for AdamW" in mistakes(tmp_path, f"optimizer.lr={lr}")


def test_a_learning_rate_far_above_the_published_is_a_warning(tmp_path):
    def said(lr: str, *more: str) -> list[str]:
        found = planned(tmp_path, big_run(preset="1.3b"), overrides=[f"optimizer.lr={lr}", *more])
        return [warning for warning in found.warnings if "optimizer.lr" in warning]

    [warning] = said("3e-3")
    assert "is 15 times the published rate for models of this size (about 0.0002)" in warning
    assert said("6e-4") == []
    assert said("3", "optimizer.lr_schedule=mine.rates:rate")  # which may scale it


def test_a_vocabulary_far_larger_than_the_tokenizers_is_a_warning(tmp_path):
    found = planned(tmp_path, big_run(preset="llama3-8b"))
    [warning] = [warning for warning in found.warnings if "model.vocab_size" in warning]
    assert "128256 is much larger than the 50,257 ids of data.tokenizer (gpt2)" in warning
    padded = planned(tmp_path, minimal_run(), overrides=["model.vocab_size=50304"])
    assert not [warning for warning in padded.warnings if "model.vocab_size" in warning]


def test_a_group_that_matches_no_parameter_is_an_error(tmp_path):
    def groups(*patterns: str) -> str:
        return f"optimizer.parameter_groups={json.dumps([{'match': pattern} for pattern in patterns])}"

    found = mistakes(tmp_path, groups("*.bias", "decoder.layer.*"))
    assert "contains 'decoder.layer.*', which matches no parameter" in found
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in found
    assert "contains '*.bias', which" in mistakes(tmp_path, groups("*", "*.bias"))
    planned(tmp_path, minimal_run(), overrides=[groups("*.bias", "decoder.layers.1.*", "embedding.*")])
    elsewhere = ["model.model_provider=installed.model:Mine", groups("mine.*")]
    planned(tmp_path, minimal_run(), overrides=elsewhere)
