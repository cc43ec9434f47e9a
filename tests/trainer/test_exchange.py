"""The trainer resumes checkpoints of Megatron-LM's pretrain_gpt.py, and pretrain_gpt.py the trainer's.

Its training code is not installed, so what it reads and writes is written down here, with the places it is from. With
the environment variable MEGATRON_LM naming a checkout, the slow tests run the program itself, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from tests.trainer.runs import DEEPSEEK, DEEPSEEK_V3, GPT, LLAMA, MOE, ROOT, Run, finished, gpt_config, run
from trainer import checkpoint
from trainer.checkpoint import megatron_lm
from trainer.contract import config as configuration
from trainer.contract import hyperparameters
from trainer.contract.checkpoint_files import COMPLETE, STARTED, TRACKER, list_checkpoints
from trainer.contract.config import ModelConfig, OptimizerConfig, ParallelismConfig, TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.contract.resolve import model_problems, resolve
from trainer.metrics.console import Log
from trainer.model.multi_token import DIVIDES_BY_TARGETS
from trainer.optimizer.schedule import Schedule

SAVED_AT = 3

EXACT = GPT | {"activation_func": "gelu"}
"""The model of pretrain_gpt.py with --no-bias-gelu-fusion, which it needs on a CPU."""

COMPARED = ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding")
COMPARED_WITH_VOCAB_FILE = ("max_position_embeddings", "make_vocab_size_divisible_by", "tokenizer_type")
"""Read without a default by `check_checkpoint_args`: megatron/training/checkpointing.py, lines 102-136 of 0.16.1 and
143-181 of 0.19.0."""

TAKEN_OVER = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "seq_length",
        "num_attention_heads",
        "num_query_groups",
    ),
    *("group_query_attention", "kv_channels", "max_position_embeddings", "position_embedding_type"),
    *("add_position_embedding", "use_rotary_position_embeddings", "rotary_base", "rotary_percent"),
    *("rotary_interleaved", "add_bias_linear", "add_qkv_bias", "squared_relu", "swiglu"),
    *("untie_embeddings_and_output_weights", "normalization", "apply_query_key_layer_scaling"),
    *("attention_dropout", "hidden_dropout", "padded_vocab_size", "ckpt_format"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
)
"""With --use-checkpoint-args, by `load_args_from_checkpoint`: lines 1391-1465 of 0.16.1, 1884-1983 of 0.19.0. What the
checkpoint lacks has the flag's value, which would be silently another model."""

COUNTED = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
"""`load_checkpoint`: lines 1746-1756 of 0.16.1."""

ARGS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 256,
    "kv_channels": 16,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-05,
    "layernorm_zero_centered_gamma": False,
    "swiglu": False,
    "bias_gelu_fusion": False,
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "untie_embeddings_and_output_weights": False,
    "padded_vocab_size": 1024,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "num_query_groups": 4,
    "group_query_attention": False,
    "softmax_type": "vanilla",
    "num_experts": None,
    "mtp_num_layers": None,
    "optimizer": "adam",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-08,
    "clip_grad": 1.0,
    "loss_scale": None,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "lr_warmup_init": 0.0,
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_samples": None,
    "lr_wsd_decay_style": "exponential",
    "weight_decay_incr_style": "constant",
    "fp8": None,
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "bf16": False,
    "fp16": False,
    "seed": 1234,
    "split": "8,1,1",
    "train_data_path": None,
    "rampup_batch_size": None,
    "dataloader_type": "single",
    "eod_mask_loss": False,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "consumed_train_samples": 12,
    "use_distributed_optimizer": True,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
}
"""Some of the 680 arguments in a checkpoint that pretrain_gpt.py 0.16.1 saved at step 3 with the same model."""

SCHEDULE: dict[str, Any] = {
    "max_lr": 1e-2,
    "lr_warmup_steps": 4,
    "num_steps": 12,
    "lr_decay_style": "cosine",
    "lr_decay_steps": 24,
    "min_lr": 1e-3,
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_style": "constant",
    "wd_incr_steps": 24,
}
"""Beside them: `OptimizerParamScheduler.state_dict`, in samples."""

CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def common_state(corpus: str = "/corpus", **args: Any) -> dict[str, Any]:
    """The common state of a checkpoint of Megatron-LM."""
    return {
        "args": argparse.Namespace(**ARGS | {"data_path": [corpus]} | args),
        "checkpoint_version": 3.0,
        "iteration": SAVED_AT,
        "optimizer": {"optimizer": {"param_groups": []}},
        "opt_param_scheduler": SCHEDULE,
        "num_floating_point_operations_so_far": 1.0,
        "content_metadata": CONTENT,
    }


def config_of(corpus: str = "/corpus", **training: Any) -> TrainerConfig:
    plain = gpt_config(corpus, Path("/run"), EXACT)
    plain["training"] |= training
    return resolve(configuration.from_dict(TrainerConfig, plain, "test"))


# The arguments that each program reads and writes.


def test_a_checkpoint_has_every_argument_that_megatron_lm_reads() -> None:
    config = config_of()
    args = vars(megatron_lm.common_state(config, 5, 20)["args"])
    assert {*COMPARED, *COMPARED_WITH_VOCAB_FILE, *TAKEN_OVER, *COUNTED} <= args.keys()
    assert {name: args[name] for name in COMPARED} == {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "add_position_embedding": True,
    }
    assert (args["consumed_train_samples"], args["no_save_rng"]) == (20, True)
    shared = args.keys() & ARGS.keys() - {"consumed_train_samples"}
    assert {name: args[name] for name in shared} == {name: ARGS[name] for name in shared}


def test_the_arguments_are_values_that_torch_reads_back_without_pickled_code(tmp_path: Path) -> None:
    common = megatron_lm.common_state(config_of(), 5, 20)
    torch.save(common, tmp_path / "common.pt")
    assert torch.load(tmp_path / "common.pt", weights_only=True) == common  # Core allows Namespace


def test_the_schedule_counts_samples() -> None:
    schedule = megatron_lm.common_state(config_of(), SAVED_AT, 12)["opt_param_scheduler"]
    assert schedule == SCHEDULE


def test_the_written_common_state_reads_back_unchanged() -> None:
    config = config_of()
    saved = {**common_state(), **megatron_lm.common_state(config, 5, 20)}
    saved["iteration"] = 5
    there = megatron_lm.resumed(saved, config.parallelism)
    assert (there.iteration, there.consumed_samples) == (5, 20)
    assert hyperparameters.check_changes({"model": there.sections["model"]}, config) == ()


ROPE = {"position_embedding_type": "rope"}
MLA = ROPE | {"multi_latent_attention": True}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize(
    ("model", "args"),
    [
        ({"activation_func": "gelu_tanh"}, {"bias_gelu_fusion": True, "squared_relu": False}),
        ({"activation_func": "gelu"}, {"bias_gelu_fusion": False, "squared_relu": False}),
        ({"activation_func": "gelu", "add_bias_linear": False}, {"add_bias_linear": False}),
        ({"activation_func": "squared_relu"}, {"bias_gelu_fusion": False, "squared_relu": True}),
        ({"swiglu": True, "add_bias_linear": False, "add_qkv_bias": True}, {"add_qkv_bias": True}),
        ({"qk_layernorm": True}, {"qk_layernorm": True}),
        ({"window_size": 8}, {"window_size": (7, 0)}),
        ({"num_moe_experts": 8, "moe_aux_loss_coeff": 0.01}, {"num_experts": 8, "moe_layer_freq": 1}),
        (
            {"num_moe_experts": 8, "moe_layer_freq": [0, 1, 1, 1], "moe_ffn_hidden_size": 96},
            {"moe_layer_freq": [0, 1, 1, 1], "moe_ffn_hidden_size": 96},
        ),
        (ROPE | {"rope_scaling": LLAMA3}, {"use_rope_scaling": True}),
        (
            ROPE | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            {"rotary_seq_len_interpolation_factor": 4.0},
        ),
        (ROPE | {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}, {"mtp_num_layers": 2}),
        (MLA | {"q_lora_rank": 24}, {"rope_type": "rope", "v_head_dim": 128, "q_lora_rank": 24}),
        (MLA | {"rope_scaling": YARN}, {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.0}),
        (
            MLA | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
            {"rotary_scaling_factor": 40.0, "mscale_all_dim": 0.7},
        ),
    ],
    ids=str,
)
def test_a_model_is_carried_in_their_arguments(model: dict[str, Any], args: dict[str, Any]) -> None:
    document = gpt_config("/corpus", Path("/run"))
    document["model"] |= model
    config = resolve(configuration.from_dict(TrainerConfig, document, "test"))
    common = megatron_lm.common_state(config, 5, 20)
    written = vars(common["args"])
    assert {name: written[name] for name in args} == args
    there = megatron_lm.resumed(common_state(**written), config.parallelism)
    assert hyperparameters.check_changes({"model": there.sections["model"]}, config) == ()
    resolved = hyperparameters.sections(config)["model"]
    assert {name: there.sections["model"][name] for name in model} == {name: resolved[name] for name in model}


@pytest.mark.parametrize(
    "unread",
    [
        {"moe_router_pre_softmax": True, "moe_router_score_function": "sigmoid"},
        {"moe_router_num_groups": 4},
        {"moe_router_bias_update_rate": 0.1},
        {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "none"},
        {"moe_expert_capacity_factor": -1.0, "moe_token_drop_policy": "position"},
    ],
    ids=str,
)
def test_arguments_that_megatron_core_does_not_read_are_not_part_of_the_model(unread: dict[str, Any]) -> None:
    """The trainer would refuse such keys."""
    section = megatron_lm.resumed(common_state(num_experts=8, **unread), ParallelismConfig()).sections[
        "model"
    ]
    model = configuration.from_dict(ModelConfig, section, "test")
    assert model.num_moe_experts == 8
    assert list(model_problems(model)) == []


def test_hyperparameters_of_megatron_lm_are_compared_like_the_trainers() -> None:
    config = config_of()
    there = megatron_lm.resumed(common_state(), config.parallelism)
    assert hyperparameters.check_changes(there.sections, config) == ()

    other = megatron_lm.resumed(
        common_state("/elsewhere", seed=7, adam_beta2=0.999, split="969, 30, 1"), config.parallelism
    )
    with pytest.raises(TrainerError) as refused:
        hyperparameters.check_changes(other.sections, config)
    for line in (
        "training.seed: 7 -> 1234",
        "optimizer.adam_beta2: 0.999 -> 0.95",
        "data.split: 969,30,1 -> 8,1,1",
        'data.datasets: [{"prefix": "/elsewhere", "weight": null}]',
    ):
        assert line in str(refused.value)


def test_a_blend_of_megatron_lm_is_read() -> None:
    common = common_state(data_path=["0.7", "/a", "0.3", "/b"])
    assert megatron_lm.resumed(common, ParallelismConfig()).sections["data"]["datasets"] == [
        {"prefix": "/a", "weight": 0.7},
        {"prefix": "/b", "weight": 0.3},
    ]
    common = common_state(data_path=["/a", "/b"])
    assert megatron_lm.resumed(common, ParallelismConfig()).sections["data"]["datasets"] == [
        {"prefix": "/a", "weight": None},
        {"prefix": "/b", "weight": None},
    ]


@pytest.mark.parametrize(
    ("args", "changes", "message"),
    [
        ({"is_hybrid_model": True}, {}, "does not support: is_hybrid_model = True"),
        ({"num_experts": 8, "moe_latent_size": 32}, {}, "does not support: moe_latent_size = 32"),
        (
            {"num_experts": 8, "moe_router_topk_limited_devices": 2},
            {},
            "does not support: moe_router_topk_limited_devices = 2",
        ),
        (
            {"num_experts": 8, "moe_router_load_balancing_type": "sinkhorn"},
            {},
            "moe_router_load_balancing_type = 'sinkhorn'",
        ),
        ({"mtp_use_repeated_layer": True, "no_rope_freq": 4}, {}, "= 4, mtp_use_repeated_layer = True"),
        (
            {"multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": None},
            {},
            "qk_layernorm without q_lora_rank (megatron-core 0.16",
        ),
        (
            {"multi_latent_attention": True, "rope_type": "rope", "mscale_all_dim": 1.0}
            | {"rotary_scaling_factor": 40.0},
            {},
            "mscale_all_dim with rope_type = 'rope'",
        ),
        ({"window_size": (3, 0), "window_attn_skip_freq": 4}, {}, "window_attn_skip_freq = 4"),
        ({"window_size": (3, -1)}, {}, "window_size = (3, -1) (supported is (N, 0)"),
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
            {},
            "rope_scaling_factor = 32.0 (pretrain_",
        ),
        ({"position_embedding_type": "yarn"}, {}, "position_embedding_type = 'yarn'"),
        ({"openai_gelu": True}, {}, "openai_gelu without bias_gelu_fusion"),
        ({"sft": True}, {}, "sft = True"),
        ({"use_distributed_optimizer": False}, {}, "--use-distributed-optimizer"),
        ({}, {"optimizer": None}, "without the optimizer state"),
        ({}, {"content_metadata": None}, "does not say how its optimizer state is sharded"),
        (
            {"tensor_model_parallel_size": 2},
            {"content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}},
            "--dist-ckpt-optim-fully-reshardable",
        ),
        (
            {"num_experts": 8, "expert_model_parallel_size": 2},
            {"content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}},
            "expert_model_parallel_size: 2, expert_tensor_parallel_size: 1",
        ),
    ],
)
def test_unsupported_checkpoints_of_megatron_lm_are_refused_by_name(
    args: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainerError, match=re.escape(message)):
        megatron_lm.resumed(common_state(**args) | changes, ParallelismConfig())


def test_loading_only_weights_needs_neither_optimizer_nor_arguments() -> None:
    common = common_state(use_distributed_optimizer=False, sft=True) | {"optimizer": None}
    there = megatron_lm.resumed(common, ParallelismConfig(), weights_only=True)
    assert there.sections.keys() == {"model"}
    assert megatron_lm.resumed({}, ParallelismConfig(), weights_only=True).sections == {}
    with pytest.raises(TrainerError, match="is_hybrid_model"):
        megatron_lm.resumed(common_state(is_hybrid_model=True), ParallelismConfig(), weights_only=True)
    with pytest.raises(TrainerError, match="finetune"):
        megatron_lm.resumed({"iteration": 3}, ParallelismConfig())


class OneGroup:
    """The part of an optimizer that schedules use."""

    def __init__(self) -> None:
        self.param_groups = [{"wd_mult": 1.0, "lr_mult": 1.0}]


@pytest.mark.process
def test_after_a_ramp_up_the_rates_are_those_of_megatron_lm() -> None:
    """Megatron-LM's schedule follows samples, the trainer's iterations: 8 steps of a smaller batch have 20 samples."""
    theirs = OptimizerParamScheduler(
        OneGroup(),
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=8,
        lr_decay_steps=60,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=60,
        wd_incr_style="constant",
    )
    theirs.step(20)
    common = common_state(consumed_train_samples=20, rampup_batch_size=["2", "2", "18"])
    common |= {"iteration": 8, "opt_param_scheduler": theirs.state_dict()}
    there = megatron_lm.resumed(common, ParallelismConfig())
    optimizer = there.sections["optimizer"]
    assert (there.iteration, there.consumed_samples) == (8, 20)
    assert (optimizer["lr_warmup_iters"], optimizer["lr_decay_iters"]) == (5, 18)
    assert there.sections["training"]["rampup_batch_size"] == [2, 2, 18]

    ours = Schedule(OptimizerConfig(**optimizer), OneGroup(), train_iters=18)  # type: ignore[arg-type]
    ours.step(there.iteration)
    for _ in range(10):
        assert ours.rate() == pytest.approx(theirs.get_lr({}), rel=1e-12)
        ours.step(1)
        theirs.step(4)


def test_a_custom_schedule_is_stored_by_its_import_path(corpus: str) -> None:
    plain = gpt_config(corpus, Path("/run"))
    plain["optimizer"]["lr_schedule"] = "rates.py:decay"
    config = resolve(configuration.from_dict(TrainerConfig, plain, "test"))
    assert (
        megatron_lm.common_state(config, 5, 20)["opt_param_scheduler"]["lr_decay_style"] == "rates.py:decay"
    )


# Whole runs.


@pytest.fixture(scope="module")
def ours(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six steps, saved after the third."""
    config = gpt_config(corpus, tmp_path_factory.mktemp("ours"), EXACT)
    config["checkpoint"] = {"save_interval": SAVED_AT}
    return finished(config)


def only(run_or_directory: Path, iteration: int, target: Path) -> Path:
    """A checkpoint directory with one checkpoint of another directory."""
    name = f"iter_{iteration:07d}"
    shutil.copytree(run_or_directory / name, target / name)
    (target / TRACKER).write_text(str(iteration))
    return target


def as_megatron_lm_writes(ours: Run, corpus: str, target: Path) -> Path:
    """The checkpoint of `ours` with the common state that Megatron-LM would have written."""
    [path] = only(ours.checkpoints, SAVED_AT, target).glob("iter_*")
    for name in (COMPLETE, STARTED):
        (path / name).unlink()
    saved = torch.load(path / "common.pt", weights_only=False)
    common = common_state(corpus) | {"optimizer": saved["optimizer"]}
    assert common["content_metadata"] == saved["content_metadata"]
    torch.save(common, path / "common.pt")
    return target


@pytest.mark.process
def test_a_run_of_megatron_lm_resumes_like_one_of_the_trainer(ours: Run, corpus: str, tmp_path: Path) -> None:
    theirs = as_megatron_lm_writes(ours, corpus, tmp_path / "theirs")
    config = gpt_config(corpus, tmp_path / "run", EXACT) | {"checkpoint": {"load": str(theirs)}}
    theirs_goes_on = finished(config)
    assert theirs_goes_on.steps == ours.steps[SAVED_AT:]
    events = theirs_goes_on.events
    assert [event["consumed_samples"] for event in events if event["event"] == "step"] == [16, 20, 24]


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group with only this process, for functions that use collectives."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.process
def test_an_unreadable_checkpoint_is_reported_with_a_remedy(
    ours: Run, corpus: str, tmp_path: Path, one_rank: None
) -> None:
    plain = gpt_config(corpus, tmp_path / "run", EXACT) | {"checkpoint": {"load": str(tmp_path / "theirs")}}
    config = resolve(configuration.from_dict(TrainerConfig, plain, "test"))
    [path] = as_megatron_lm_writes(ours, corpus, tmp_path / "theirs").glob("iter_*")

    (path / "common.pt").unlink()  # as megatron-core 0.19 leaves it out
    with pytest.raises(TrainerError, match=r"cannot read it, .* 0\.19 or later"):
        checkpoint.find(tmp_path / "own", config, Log(is_rank_0=False, progress=False), lambda: None)

    (path / "metadata.json").unlink()
    (path / "mp_rank_00").mkdir()
    [old] = list_checkpoints(tmp_path / "theirs")
    assert old.flaw is not None
    assert "--ckpt-convert-format torch_dist" in old.flaw
    with pytest.raises(TrainerError, match="holds no valid checkpoint"):
        checkpoint.find(tmp_path / "own", config, Log(is_rank_0=False, progress=False), lambda: None)


@pytest.mark.process
def test_without_optimizer_state_only_the_weights_are_loaded(
    ours: Run, corpus: str, tmp_path: Path, one_rank: None
) -> None:
    theirs = as_megatron_lm_writes(ours, corpus, tmp_path / "theirs")
    file = theirs / f"iter_{SAVED_AT:07d}" / "common.pt"
    common = torch.load(file, weights_only=False)
    torch.save(common | {"optimizer": None}, file)
    plain = gpt_config(corpus, tmp_path / "run", EXACT) | {"checkpoint": {"load": str(theirs)}}

    config = resolve(configuration.from_dict(TrainerConfig, plain, "test"))
    with pytest.raises(TrainerError, match=r"iter_0000003: .*--no-save-optim.*checkpoint.finetune: true"):
        checkpoint.find(tmp_path / "own", config, Log(is_rank_0=False, progress=False), lambda: None)

    plain["checkpoint"]["finetune"] = True
    plain["training"]["train_iters"] = 1
    plain["optimizer"] |= {"lr_warmup_iters": 0, "lr": 1e-3}
    [step] = finished(plain).steps
    assert step[0] == 1
    assert step[1] < ours.steps[0][1]  # the same batch, with what three steps have taught


# Megatron-LM itself.

MEGATRON_LM = os.environ.get("MEGATRON_LM")
needs_megatron_lm = pytest.mark.skipif(
    not MEGATRON_LM, reason="MEGATRON_LM does not name a checkout of Megatron-LM"
)

FLAGS = (
    *("--distributed-backend", "gloo", "--transformer-impl", "local", "--use-cpu-initialization"),
    *("--no-gradient-accumulation-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion"),
    *(
        "--no-bias-dropout-fusion",
        "--no-masked-softmax-fusion",
        "--no-persist-layer-norm",
        "--no-rope-fusion",
    ),
    *("--micro-batch-size", "1", "--global-batch-size", "4"),
    *("--lr", "1e-2", "--min-lr", "1e-3", "--lr-decay-style", "cosine"),
    *("--weight-decay", "0.1", "--adam-beta2", "0.95", "--seed", "1234", "--calculate-per-token-loss"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "999", "--split", "8,1,1", "--num-workers", "0"),
    *("--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1", "--save-interval", "5"),
    "--use-distributed-optimizer",
)
SIX_STEPS = ("--train-iters", "6", "--lr-warmup-iters", "1", "--use-checkpoint-args")
MODEL = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--max-position-embeddings", "64", "--attention-dropout", "0", "--hidden-dropout", "0"),
)
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


def pretrain_gpt(corpus: str, save: Path, *flags: str, ranks: int = 1) -> list[tuple[int, float]]:
    """Runs pretrain_gpt.py and returns the iterations and losses in its log."""
    return logged(log_of_pretrain_gpt(corpus, save, *flags, ranks=ranks), "lm loss")


def log_of_pretrain_gpt(corpus: str, save: Path, *flags: str, ranks: int = 1) -> str:
    """Runs pretrain_gpt.py and returns its output."""
    assert MEGATRON_LM
    paths = {"data-path": corpus, "data-cache-path": save / "cache", "save": save}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
            *(str(ROOT / "tests/trainer/megatron_lm_driver.py"), MEGATRON_LM, *FLAGS),
            *(part for name, path in paths.items() for part in (f"--{name}", str(path))),
            *flags,
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def logged(log: str, name: str) -> list[tuple[int, float]]:
    """The iterations and the losses of this name in a log. Its second line is the mean of two: see `training_log`."""
    lines = re.findall(rf"iteration +(\d+)/.* {name}: (\S+) ", log)
    (_, first), (second, mean), *_ = losses = [(int(iteration), float(loss)) for iteration, loss in lines]
    return [losses[0], (second, 2 * mean - first), *losses[2:]]


EXPERTS = (
    *("--moe-router-dtype", "fp32", "--moe-token-dispatcher-type", "alltoall"),
    *("--moe-router-load-balancing-type", MOE["moe_router_load_balancing_type"]),
    *(
        "--moe-aux-loss-coeff",
        str(MOE["moe_aux_loss_coeff"]),
        "--moe-z-loss-coeff",
        str(MOE["moe_z_loss_coeff"]),
    ),
    *("--moe-router-bias-update-rate", str(MOE["moe_router_bias_update_rate"])),
)
"""Flags that --use-checkpoint-args does not set."""

BIASED_EXPERTS = (
    *("--moe-router-dtype", "fp32", "--moe-token-dispatcher-type", "alltoall"),
    *("--moe-router-load-balancing-type", "aux_loss", "--norm-epsilon", "1e-6"),
    *("--moe-router-bias-update-rate", str(DEEPSEEK_V3["moe_router_bias_update_rate"])),
)


# pretrain_gpt.py has no option for original_max_position_embeddings, whose default is 4096.
SCALING = DEEPSEEK["rope_scaling"] | {"original_max_position_embeddings": 4096}
LATENT = DEEPSEEK | {"mtp_num_layers": None, "rope_scaling": SCALING}
LATENT_ATTENTION = (
    *("--multi-latent-attention", "--qk-layernorm", "--rope-type", "yarn"),
    *(
        part
        for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        for part in (f"--{name.replace('_', '-')}", str(LATENT[name]))
    ),
    *("--rotary-scaling-factor", str(SCALING["factor"])),
    *("--mscale", str(SCALING["mscale"])),
    *("--mscale-all-dim", str(SCALING["mscale_all_dim"])),
)
PREDICTING = LLAMA | {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}
MTP = ("--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.3")
MTP_TOLERANCE = 1e-3 if DIVIDES_BY_TARGETS else 1e-5
"""The first losses agree in any version. Later ones do not if Core weights the gradients of MTP losses differently."""


@dataclass(frozen=True)
class Case:
    """A way to exchange checkpoints in both directions."""

    flags: tuple[str, ...] = (RESHARDABLE,)
    model: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    ranks: int = 1
    """Number of ranks of Megatron-LM; ours is one, except with `layout`."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Section `parallelism` of the trainer."""
    tolerance: float = 1e-5

    @property
    def losses(self) -> dict[str, str]:
        """The names of the losses in metrics.jsonl, and in the log of Megatron-LM."""
        layers = range(1, (self.model.get("mtp_num_layers") or 0) + 1)
        return {"loss": "lm loss", **{f"mtp_{layer}_loss": f"mtp_{layer} loss" for layer in layers}}


CASES = {
    "gpt": Case(),
    "llama": Case(model=LLAMA),
    "an embedding that they would pad otherwise": Case(model={"padded_vocab_size": 1100}),
    "bf16": Case(flags=("--bf16", RESHARDABLE), precision="bf16", tolerance=2e-3),
    "bf16, their default sharding": Case(flags=("--bf16",), precision="bf16", tolerance=2e-3),
    "bf16, their default sharding at DP2": Case(flags=("--bf16",), precision="bf16", ranks=2, tolerance=2e-3),
    "fp16": Case(
        flags=("--fp16", "--initial-loss-scale", "1024", RESHARDABLE), precision="fp16", tolerance=2e-3
    ),
    "TP2": Case(flags=("--tensor-model-parallel-size", "2", RESHARDABLE), ranks=2),
    "PP2, llama": Case(flags=("--pipeline-model-parallel-size", "2", RESHARDABLE), model=LLAMA, ranks=2),
    # Megatron-Core cannot load an optimizer state without separate groups for experts at EP > 1.
    "EP2": Case(
        flags=("--expert-model-parallel-size", "2", *EXPERTS, RESHARDABLE),
        model=MOE,
        ranks=2,
        layout={"expert_model_parallel_size": 2},
    ),
    "EP2, their default sharding": Case(
        flags=("--expert-model-parallel-size", "2", *EXPERTS),
        model=MOE,
        ranks=2,
        layout={"expert_model_parallel_size": 2},
    ),
    "EP1": Case(flags=(*EXPERTS, RESHARDABLE), model=MOE),
    "latent attention": Case(flags=(*LATENT_ATTENTION, RESHARDABLE), model=LATENT),
    "MTP": Case(flags=(*MTP, RESHARDABLE), model=PREDICTING, tolerance=MTP_TOLERANCE),
    "MTP, PP2": Case(
        flags=(*MTP, "--pipeline-model-parallel-size", "2", RESHARDABLE),
        model=PREDICTING,
        ranks=2,
        tolerance=MTP_TOLERANCE,
    ),
    "MTP with latent attention and experts": Case(
        flags=(*MTP, *LATENT_ATTENTION, *BIASED_EXPERTS, RESHARDABLE),
        model=DEEPSEEK_V3 | {"rope_scaling": SCALING, "mtp_loss_scaling_factor": 0.3},
        tolerance=MTP_TOLERANCE,
    ),
}


@pytest.mark.process
@pytest.mark.slow
@needs_megatron_lm
@pytest.mark.parametrize("name", CASES)
def test_pretrain_gpt_and_the_trainer_resume_each_others_checkpoints(
    name: str, corpus: str, tmp_path: Path
) -> None:
    """The trainer saves at step 3, Megatron-LM resumes from that and saves at 5, and the trainer resumes from that."""
    case = CASES[name]
    config = gpt_config(corpus, tmp_path / "ours", EXACT)
    config["model"] |= case.model
    if config["model"].get("swiglu"):
        del config["model"]["activation_func"]
    if case.layout:
        config |= {"world_size": case.ranks, "parallelism": case.layout}
    config["training"]["precision"] = case.precision
    config["optimizer"]["initial_loss_scale"] = 1024.0
    config["checkpoint"] = {"save_interval": 3}
    ours = finished(config)

    at_3 = only(ours.checkpoints, 3, tmp_path / "at-3")
    load = ("--load", str(at_3), "--exit-on-missing-checkpoint")
    log = log_of_pretrain_gpt(corpus, tmp_path / "theirs", *load, *SIX_STEPS, *case.flags, ranks=case.ranks)
    at_5 = only(tmp_path / "theirs", 5, tmp_path / "at-5")
    back = finished(config | {"run_dir": str(tmp_path / "back"), "checkpoint": {"load": str(at_5)}})
    for loss, their_name in case.losses.items():
        theirs = dict(logged(log, their_name))
        differences = {step: abs(theirs[step] - value) for step, value in losses(ours, loss)[3:]}
        [(iteration, value)] = losses(back, loss)
        print(json.dumps({f"{name}, {loss}": differences, "and back": abs(value - theirs[6])}))
        assert theirs.keys() == {4, 5, 6}
        assert max(differences.values()) < case.tolerance
        assert differences[4] < 1e-3
        assert iteration == 6
        assert value == pytest.approx(theirs[6], abs=case.tolerance)
    assert back.steps[-1][3] == ours.steps[-1][3]  # learning rates


def losses(result: Run, name: str) -> list[tuple[int, float]]:
    """The iterations and the losses of this name in metrics.jsonl."""
    return [(event["iteration"], event[name]) for event in result.events if event["event"] == "step"]


@pytest.mark.process
@pytest.mark.slow
@needs_megatron_lm
def test_the_trainer_resumes_after_a_batch_ramp_up_of_pretrain_gpt(corpus: str, tmp_path: Path) -> None:
    """Four steps of two samples, then of four; its schedule ends with its 24 samples, ours with our 8 steps."""
    samples = ("--train-samples", "24", "--rampup-batch-size", "2", "2", "8", "--lr-warmup-samples", "0")
    theirs = dict(pretrain_gpt(corpus, tmp_path / "theirs", *samples, *MODEL, RESHARDABLE))
    assert theirs.keys() == set(range(1, 9))

    at_5 = only(tmp_path / "theirs", 5, tmp_path / "at-5")
    config = gpt_config(corpus, tmp_path / "ours", EXACT) | {"checkpoint": {"load": str(at_5)}}
    config["training"] |= {"rampup_batch_size": [2, 2, 8], "train_iters": 8}
    refused = run(config)
    assert refused.statuses == (2,)
    assert "set optimizer.lr_warmup_iters = 2" in refused.log
    config["optimizer"]["lr_warmup_iters"] = 2
    steps = finished(config).steps
    print(json.dumps({iteration: abs(loss - theirs[iteration]) for iteration, loss, _, _ in steps}))
    assert [iteration for iteration, *_ in steps] == [6, 7, 8]
    assert [loss for _, loss, _, _ in steps] == pytest.approx([theirs[6], theirs[7], theirs[8]], abs=1e-5)


@pytest.mark.process
@pytest.mark.slow
@needs_megatron_lm
def test_weights_of_a_run_without_the_distributed_optimizer(corpus: str, tmp_path: Path) -> None:
    steps = ("--train-iters", "6", "--lr-warmup-iters", "1", "--no-save-optim", "--no-save-rng")
    theirs = dict(pretrain_gpt(corpus, tmp_path / "theirs", *steps, *MODEL))
    config = gpt_config(corpus, tmp_path / "ours", EXACT)
    config["training"]["train_iters"] = 1
    config["optimizer"] |= {"lr_warmup_iters": 0}
    config["checkpoint"] = {"load": str(tmp_path / "theirs"), "finetune": True}
    [(iteration, loss, _, _)] = finished(config).steps
    assert iteration == 1
    assert loss < theirs[1] - 0.1  # the batch that it began with, after its six steps


LLAMA_FLAGS = (
    *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
    *("--group-query-attention", "--num-query-groups", "2", "--untie-embeddings-and-output-weights"),
)


@pytest.mark.process
@pytest.mark.slow
@needs_megatron_lm
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [((), 1), (LLAMA_FLAGS, 1), ((*LLAMA_FLAGS, "--tensor-model-parallel-size", "2"), 2)],
    ids=["gpt", "llama", "llama TP2"],
)
def test_the_export_of_pretrain_gpts_checkpoint_computes_its_logits(
    flags: tuple[str, ...], ranks: int, corpus: str, tmp_path: Path
) -> None:
    """Megatron-Core reads its weights for our logits; the export reads them tensor by tensor."""
    from transformers import AutoModelForCausalLM

    from trainer.inference import load_model

    steps = ("--train-iters", "5", "--lr-warmup-iters", "1", RESHARDABLE)
    pretrain_gpt(corpus, tmp_path / "theirs", *steps, *MODEL, *flags, ranks=ranks)
    checkpoint = tmp_path / "theirs/iter_0000005"
    command = [sys.executable, "-m", "trainer.huggingface", "export", checkpoint, "--to", tmp_path / "hf"]
    subprocess.run([*command, "--vocab-size", "999"], check=True)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    model, _ = load_model(checkpoint, tokenizer="bytes", device="cpu", precision="fp32")
    for length in (1, 7, 33, 64):
        tokens = [(7 * index + length) % 999 for index in range(length)]
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0]
        found = model.logits(tokens)[:, :999]
        error = float((found - expected[:, : found.shape[1]]).abs().max() / expected.abs().max())
        print(json.dumps({"length": length, "error": error}))
        assert error < 1e-5
