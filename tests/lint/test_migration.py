"""`hpcgen init --from`: Megatron-LM's options of the training are converted, listed or refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcgen.check.migration.migration import migrate
from hpcgen.config.profiles import load_cluster
from hpcgen.errors import ConfigErrors
from tests.lint.migrations import ROPE, TRAINING, WHOLE, init, migrated, refused, written

pytestmark = pytest.mark.usefixtures("workplace")


def test_schedules_loss_scales_and_logging_are_converted() -> None:
    found, _ = migrated(
        "--train-iters 5000 --lr 1e-4 --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 500 "
        "--lr-warmup-iters 10 --lr-warmup-init 1e-6 --fp16 --initial-loss-scale 65536 --hysteresis 4 "
        "--sequence-parallel --tensor-model-parallel-size 2 --tp-comm-overlap --deterministic-mode "
        "--save-interval 100 --save-retain-interval 1000 --async-save --load /shared/base --finetune "
        "--wandb-project gpt --wandb-exp-name first --profile --use-pytorch-profiler --profile-step-end 20 "
        "--profile-ranks 0 8 --record-memory-history --distributed-timeout-seconds-after-init 300"
    )
    assert found["optimizer"] == found["optimizer"] | {
        "lr_decay_style": "WSD",
        "lr_wsd_decay_style": "linear",
        "lr_wsd_decay_iters": 500,
        "lr_warmup_init": 1e-6,
        "initial_loss_scale": 65536.0,
        "hysteresis": 4,
    }
    assert found["training"] == found["training"] | {
        "precision": "fp16",
        "deterministic_mode": True,
        "distributed_timeout_seconds_after_init": 300,
    }
    assert found["parallelism"]["tp_comm_overlap"] is True
    assert found["checkpoint"] == {
        "load": "/shared/base",
        "finetune": True,
        "save_interval": 100,
        "keep_every": 1000,
        "async_save": True,
    }
    assert found["logging"] == {
        "wandb_project": "gpt",
        "wandb_exp_name": "first",
        "profile_step_start": 10,
        "profile_step_end": 20,
        "profile_ranks": [0, 8],
        "record_memory_history": True,
    }


def test_fp8_is_converted_with_its_recipe() -> None:
    found, _ = migrated("--bf16 --fp8-format e4m3 --fp8-recipe delayed --fp8-amax-history-len 16")
    assert found["training"] == found["training"] | {
        "fp8": "e4m3",
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": 16,
        "fp8_amax_compute_algo": "most_recent",
    }
    Path("run.yaml").unlink()
    found, leftovers = migrated(
        "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-amax-history-len 16"
    )
    assert found["training"]["fp8_recipe"] == "tensorwise"
    assert leftovers["--fp8-amax-history-len 16"] == "it only applies with training.fp8_recipe = delayed"


def test_a_growing_batch_counts_its_steps() -> None:
    """Three steps of 64 samples, two of 128 and one of 192 read 640; then ten of 256 are within 3264."""
    found, _ = migrated(
        "--rampup-batch-size 64 64 576 --train-samples 3264 --lr-warmup-samples 448 --lr-decay-samples 3264 "
        "--lr-decay-style WSD --lr-wsd-decay-samples 512 --lr 1e-4",
        *("--set", "training.rampup_batch_size=[64, 64, 576]"),
    )
    assert found["training"]["rampup_batch_size"] == [64, 64, 576]
    steps = {name: found["optimizer"][name] for name in ("lr_warmup_iters", "lr_wsd_decay_iters")}
    assert (found["training"]["train_iters"], steps) == (
        16,
        {"lr_warmup_iters": 5, "lr_wsd_decay_iters": 2},
    )


def test_options_without_effect_are_omitted_with_the_reason() -> None:
    found, leftovers = migrated(
        "--bf16 --loss-scale 1024 --fp8-recipe delayed --lr-wsd-decay-iters 5 --wandb-exp-name first "
        "--profile-ranks 0 1 --finetune --mtp-loss-scaling-factor 0.3 --rotary-base 500000 --recompute-method block "
        "--recompute-num-layers 2"
    )
    assert leftovers == leftovers | {
        "--loss-scale 1024": "it only applies with training.precision = fp16",
        "--fp8-recipe delayed": "it only applies with training.fp8",
        "--lr-wsd-decay-iters 5": "it only applies with optimizer.lr_decay_style = WSD",
        "--wandb-exp-name first": "it only applies with logging.wandb_project",
        "--profile-ranks 0 1": "it only applies with --profile",
        "--finetune": "it only applies with checkpoint.load",
        "--recompute-method block": "it only applies with training.recompute_granularity = full",
        "--recompute-num-layers 2": "it only applies with training.recompute_granularity = full",
        "--mtp-loss-scaling-factor 0.3": "it only applies with model.mtp_num_layers",
        "--rotary-base 500000": "it only applies with model.position_embedding_type = rope",
    }
    assert "logging" not in found


@pytest.mark.parametrize(
    ("options", "unread", "why"),
    [
        (
            "--num-experts 8 --disable-bias-linear --bf16 --moe-router-load-balancing-type seq_aux_loss",
            "--moe-router-load-balancing-type seq_aux_loss",
            "it has no effect without --moe-aux-loss-coeff, whose default is 0",
        ),
        (
            "--fp16 --loss-scale 1024 --loss-scale-window 500",
            "--loss-scale-window 500",
            "it has no effect with optimizer.loss_scale",
        ),
        (
            "--bf16 --deterministic-mode --cross-entropy-fusion-impl te",
            "--cross-entropy-fusion-impl te",
            "it has no effect with training.deterministic_mode",
        ),
        (
            f"--bf16 --reset-position-ids {ROPE}",
            "--reset-position-ids",
            "Megatron-Core computes rope from the number of tokens, and does not read the positions",
        ),
    ],
)
def test_an_option_that_another_makes_useless_is_omitted(options: str, unread: str, why: str) -> None:
    """The run file is valid without it, and trains as the script does."""
    found, leftovers = migrated(options)
    assert leftovers[unread] == why
    key = unread.split()[0].removeprefix("--").replace("-", "_")
    assert not any(key in section for section in found.values() if isinstance(section, dict))


def test_a_constant_rate_has_no_end() -> None:
    found, leftovers = migrated("--bf16 --lr-decay-style constant --min-lr 1e-5 --lr-decay-iters 500")
    assert found["optimizer"].keys().isdisjoint({"min_lr", "lr_decay_iters"})
    why = "it has no effect with optimizer.lr_decay_style = constant"
    assert leftovers["--min-lr 1e-5"] == leftovers["--lr-decay-iters 500"] == why
    fraction = "--lr-warmup-fraction 0.1 --lr-decay-iters 500"
    found, _ = migrated(f"--bf16 --lr-decay-style constant {fraction}", "--force")
    assert found["optimizer"]["lr_decay_iters"] == 500


def test_a_coefficient_keeps_its_balancing_loss() -> None:
    found, _ = migrated(
        "--num-experts 8 --disable-bias-linear --bf16 --moe-router-load-balancing-type seq_aux_loss "
        "--moe-aux-loss-coeff 1e-2"
    )
    assert found["model"]["moe_router_load_balancing_type"] == "seq_aux_loss"


@pytest.mark.parametrize("rampup", ["0 0 0", "64 64 0", "64", "64 64 $N", "999999999999999 1 1"])
def test_a_ramp_up_without_effect_must_be_set_to_null(rampup: str) -> None:
    options = (
        f"--lr 1e-4 --mock-data --global-batch-size 256 --train-samples 2560 --rampup-batch-size {rampup}"
    )
    text = f"{TRAINING} {options}\n"
    assert refused(init(text)).keys() == {f"--rampup-batch-size {rampup}"}
    ended = init(text, "--set", "training.rampup_batch_size=null")
    assert ended.status == 0, ended.stderr
    assert written()["training"]["train_iters"] == 10


def test_an_uneven_pipeline_is_converted() -> None:
    layout = "Et*3|t*3|t*3|t*3L"
    size = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=8\n"
    ended = init(
        f"{size}{WHOLE} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout '{layout}'\n"
    )
    assert ended.status == 0, ended.stderr
    assert written()["parallelism"] == {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": layout,
    }


def test_documents_are_converted() -> None:
    found, leftovers = migrated("--dataloader-inter-document-masking --eod-mask-loss")
    assert "--calculate-per-token-loss" in leftovers["the mean of the loss"]
    assert found["data"] == {
        "mock": True,
        "reset_attention_mask": True,
        "reset_position_ids": True,
        "eod_mask_loss": True,
    } | {key: found["data"][key] for key in ("tokenizer",) if key in found["data"]}


def test_a_mask_that_megatron_ignores_must_be_chosen() -> None:
    script = f"{WHOLE} --bf16 --reset-attention-mask\n"
    found = refused(init(script))
    assert "issue 2357" in found["--reset-attention-mask"]
    assert "--set 'data.reset_attention_mask=...'" in found["--reset-attention-mask"]
    for chosen in (True, False):
        ended = init(script, "--force", "--set", f"data.reset_attention_mask={str(chosen).lower()}")
        assert ended.status == 0, ended.stderr
        assert written()["data"]["reset_attention_mask"] is chosen


def test_a_mask_that_megatron_reads_is_converted() -> None:
    found, _ = migrated(
        "--reset-attention-mask --transformer-impl local --no-masked-softmax-fusion --num-workers 3"
    )
    assert found["data"]["reset_attention_mask"] is True


def test_documents_of_a_null_tokenizer_end_with_its_own_token() -> None:
    options = "--tokenizer-type NullTokenizer --vocab-size 50000"
    found, leftovers = migrated(f"{options} --eod-mask-loss --calculate-per-token-loss")
    assert "the mean of the loss" not in leftovers
    assert found["data"]["eod_id"] == 50000


def test_context_parallelism_and_recomputed_modules_are_converted() -> None:
    found, _ = migrated(
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 "
        "--disable-bias-linear --recompute-granularity selective --recompute-modules core_attn mlp"
    )
    assert found["parallelism"] == {
        "context_parallel_size": 4,
        "cp_comm_type": "a2a+p2p",
        "hierarchical_context_parallel_sizes": [2, 2],
    }
    assert found["training"]["recompute_modules"] == ["core_attn", "mlp"]


@pytest.mark.parametrize(
    ("options", "option", "reason"),
    [
        ("", "--cp-comm-type p2p", "it only applies with --context-parallel-size"),
        (
            "--context-parallel-size 2",
            "--cp-comm-type p2p a2a",
            "the trainer exchanges keys and values alike in all layers",
        ),
        (
            "--context-parallel-size 2 --cp-comm-type p2p",
            "--hierarchical-context-parallel-sizes 2 1",
            "it only applies with parallelism.cp_comm_type = a2a+p2p",
        ),
        (
            "",
            "--recompute-modules moe",
            "it only applies with training.recompute_granularity = selective",
        ),
    ],
)
def test_options_of_long_context_without_effect_are_listed(options: str, option: str, reason: str) -> None:
    _, leftovers = migrated(f"{options} {option}")
    assert leftovers[option] == reason


def test_offloaded_activations_are_listed_with_what_to_use_instead() -> None:
    _, leftovers = migrated(
        "--fine-grained-activation-offloading --offload-modules core_attn --min-offloaded-tensor-size 4096"
    )
    reason = leftovers["--fine-grained-activation-offloading"]
    assert reason.startswith(
        "the trainer does not offload activations; if they do not fit, use training.recompute_modules"
    )
    assert "--min-offloaded-tensor-size 4096" not in leftovers  # nothing more to say


def test_a_command_that_eval_runs_is_converted() -> None:
    ended = init(
        f"""\
        export LAYERS=12
        options="--recompute-activations \\
            --seed 7"
        [ "$1" ] && options="$options --manual-gc"
        run="{WHOLE} $options"
        eval $run
        """
    )
    assert ended.status == 0, ended.stderr
    assert written()["training"]["seed"] == 7
    assert written()["training"]["recompute_granularity"] == "selective"


@pytest.mark.parametrize("command", ['eval "$(conda shell.bash hook)"', "eval `ssh-agent`", "eval $COMMAND"])
def test_an_eval_of_unknown_text_is_not_read(command: str) -> None:
    assert init(f"{command}\n{WHOLE}\n").status == 0


def test_options_without_a_key_and_without_effect_share_a_line() -> None:
    ended = init(f"{WHOLE} --manual-gc --log-params-norm --use-flash-attn\n")
    assert (
        "without a key, and without effect on the results: --manual-gc, --log-params-norm, --use-flash-attn\n"
        in ended.stderr
    )


def test_recomputed_layers_of_experts_are_converted() -> None:
    experts = f"{WHOLE} --num-experts 8 --moe-layer-recompute"
    assert init(f"{experts}\n").status == 0
    assert written()["training"]["recompute_granularity"] == "selective"
    assert written()["training"]["recompute_modules"] == ["core_attn", "moe"]
    ended = init(f"{experts} --recompute-granularity selective --recompute-modules mlp\n", "--force")
    assert "without effect on the results: --moe-layer-recompute\n" in ended.stderr
    assert written()["training"]["recompute_modules"] == ["mlp"]


OPTIONS = """\
--exit-duration-in-mins 235; --dataloader-type single; --dataloader-type cyclic; --optimizer sgd;
--use-checkpoint-args; --num-experts 8; --moe-router-topk 2; --use-flash-attn; --swiglu;
--num-experts 8 --moe-permute-fusion; --moe-grouped-gemm;
--num-experts 8 --moe-layer-freq '([0]+[1]*11)'; --num-experts 8 --moe-layer-freq [0]*2+[1]*10;
--calculate-per-token-loss; --enable-experimental; --num-experts 8 --moe-token-dispatcher-type flex;
--group-query-attention; --num-query-groups 4; --no-position-embedding; --use-pytorch-profiler;
--tokenizer-type Llama2Tokenizer; --tokenizer-model /x; --vocab-size 5; --vocab-file /x/v.json;
--merge-file /x/m.txt; --make-vocab-size-divisible-by 64; --padded-vocab-size 51200;
--recompute-activations; --transformer-impl local; --transformer-impl transformer_engine; --bf16;
--disable-bias-linear; --load /x; --load /y; --profile; --lr-wsd-decay-samples 5; --qk-layernorm;
--num-layers-per-virtual-pipeline-stage 5; --test-data-path /x; --lr-warmup-samples 5120; --sft;
--sequence-parallel; --reset-position-ids; --dataloader-inter-document-masking; --ckpt-format torch;
--tiktoken-pattern v2; --walrus;
--add-qkv-bias; --squared-relu; --openai-gelu; --no-bias-gelu-fusion; --window-size 7,0;
--use-rope-scaling; --rope-scaling-factor 8; --rotary-seq-len-interpolation-factor 4
"""


def test_every_option_is_converted_listed_or_refused() -> None:
    """No option may be silently dropped."""
    cluster = load_cluster("local")
    without = migrate(f"{WHOLE} --save /y\n", "job.sh", *cluster)
    silent = []
    for option in re.split(r";\s+", OPTIONS.strip()):
        name = option.split()[0]
        text = f"{WHOLE} --save /y {option}\n"
        try:
            found = migrate(text, "job.sh", *cluster)
        except ConfigErrors as error:
            if name not in str(error):
                silent.append(option)
            continue
        listed = any(name in leftover.what.split() for leftover in found.leftovers)
        listed |= any(name in what.split() for what in found.without_effect)
        if not (listed or name in found.usual) and found.sections == without.sections:
            silent.append(option)
    assert silent == []


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--num-experts $N", "only known in the job"),
        (
            "--num-experts 8 --moe-router-load-balancing-type sinkhorn",
            "must be aux_loss, seq_aux_loss or none",
        ),
        ("--num-experts 8 --moe-input-jitter-eps 0.1", "no key"),
        ("--num-experts 8 --moe-shared-expert-gate", "no key"),
        ("--num-experts 8 --moe-layer-freq '[2]*12'", "neither a number nor a list of zeros and ones"),
        (
            "--num-experts 8 --moe-layer-freq '__import__(\"os\")'",
            "neither a number nor a list of zeros and ones",
        ),
        ("--num-experts 8 --expert-model-parallel-size $EP", "only known in the job"),
        ("--dataloader-type cyclic", "reads each sample once"),
        ("--use-checkpoint-args", "in a checkpoint"),
        (
            "--tokenizer-type Llama2Tokenizer --tokenizer-model /x",
            "data.tokenizer supports gpt2, huggingface (a tokenizer.json) and bytes; transformers makes",
        ),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model org/name", "downloads nothing"),
        ("--tokenizer-type NullTokenizer --vocab-size 131072", "131072 rows in newer releases"),
        ("--vocab-file $VOCAB --merge-file /x", "only known in the job"),
        ("--lr-decay-style WSD --lr-wsd-decay-style sqrt", "must be "),
        ("--save '<PATH TO CHECKPOINTS>'", "placeholder"),
        ("--save A B", "it takes 1 value, and has 2"),
        ("--rotary-percent 0.5", "no key"),
        ("--bf16 ${VP:+--num-layers-per-virtual-pipeline-stage 2} ", "its options are only known in the job"),
        ("--data-path /x", "uses only one of them"),
        ("--no-position-embedding", "learned_absolute and rope"),
        ("--squared-relu --swiglu", "combined with --swiglu"),
        ("--quick-geglu", "no key"),
        ("--window-size 7,7", "supports only N,0"),
        ("--window-size $W", "only known in the job"),
        ("--window-size 7,0 --window-attn-skip-freq 4", "no key"),
        (f"{ROPE} --use-rope-scaling --rope-scaling-factor 32", "ignores it and computes with 8"),
        (f"{ROPE} --rotary-seq-len-interpolation-factor 4", "that of 0.19 computes with it"),
    ],
)
def test_scripts_that_would_train_something_else_are_refused(option: str, why: str) -> None:
    found = refused(init(f"VP=$(( $1 ))\n{WHOLE} {option}\n"))
    assert any(why in reason for reason in found.values()), found
