"""The trainer resumes checkpoints of Megatron-LM's pretrain_gpt.py, and pretrain_gpt.py the trainer's.

With the environment variable MEGATRON_LM naming a checkout, the slow tests run the program itself, on the CPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.megatron_lm_state import EXACT, SAVED_AT, common_state
from tests.trainer.runs import DEEPSEEK, DEEPSEEK_V3, LLAMA, MOE, ROOT, Run, finished, gpt_config, run
from trainer import checkpoint
from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import TrainerError
from trainer.contract.files.checkpoint_files import COMPLETE, STARTED, TRACKER, list_checkpoints
from trainer.metrics.console import Log
from trainer.model.multi_token import DIVIDES_BY_TARGETS


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


@pytest.mark.process
@pytest.mark.usefixtures("process_groups")
def test_an_unreadable_checkpoint_is_reported_with_a_remedy(ours: Run, corpus: str, tmp_path: Path) -> None:
    plain = gpt_config(corpus, tmp_path / "run", EXACT) | {"checkpoint": {"load": str(tmp_path / "theirs")}}
    config = resolve(configuration.from_dict(TrainerConfig, plain, "test"))
    [path] = as_megatron_lm_writes(ours, corpus, tmp_path / "theirs").glob("iter_*")

    (path / "common.pt").unlink()  # as megatron-core 0.19 leaves it out
    with pytest.raises(TrainerError, match=r"cannot read it, .* 0\.19 or later"):
        checkpoint.find(tmp_path / "own", config, {}, Log(is_rank_0=False, progress=False), lambda: None)

    (path / "metadata.json").unlink()
    (path / "mp_rank_00").mkdir()
    [old] = list_checkpoints(tmp_path / "theirs")
    assert old.flaw is not None
    assert "--ckpt-convert-format torch_dist" in str(old.flaw)
    with pytest.raises(TrainerError, match="holds no valid checkpoint"):
        checkpoint.find(tmp_path / "own", config, {}, Log(is_rank_0=False, progress=False), lambda: None)


@pytest.mark.process
@pytest.mark.usefixtures("process_groups")
def test_without_optimizer_state_only_the_weights_are_loaded(ours: Run, corpus: str, tmp_path: Path) -> None:
    theirs = as_megatron_lm_writes(ours, corpus, tmp_path / "theirs")
    file = theirs / f"iter_{SAVED_AT:07d}" / "common.pt"
    common = torch.load(file, weights_only=False)
    torch.save(common | {"optimizer": None}, file)
    plain = gpt_config(corpus, tmp_path / "run", EXACT) | {"checkpoint": {"load": str(theirs)}}

    config = resolve(configuration.from_dict(TrainerConfig, plain, "test"))
    with pytest.raises(TrainerError, match=r"iter_0000003: .*--no-save-optim.*checkpoint.finetune: true"):
        checkpoint.find(tmp_path / "own", config, {}, Log(is_rank_0=False, progress=False), lambda: None)

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
LATENT = DEEPSEEK | {"num_layers": 4, "mtp_num_layers": None, "rope_scaling": SCALING}
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
DEEP = {"num_layers": 4, "moe_layer_freq": [0, 1, 1, 1]}
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
        model=DEEPSEEK_V3 | DEEP | {"rope_scaling": SCALING, "mtp_loss_scaling_factor": 0.3},
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
