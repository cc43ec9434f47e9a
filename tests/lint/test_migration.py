from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
from pathlib import Path

import pytest

from hpcgen.check.migration.migration import migrate
from hpcgen.config import document
from hpcgen.config.loader import load_cluster
from hpcgen.config.presets import PRESETS
from hpcgen.errors import ConfigErrors
from tests.cli.command import Ended, hpcgen, listing
from trainer.contract.config import ModelConfig, from_dict
from trainer.contract.resolve import resolve_model

SCRIPTS = Path(__file__).with_name("scripts")
AZURE = SCRIPTS / "azure-175b.sh"


TRAINING = (
    "srun python pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1"
)
WHOLE = f"{TRAINING} --global-batch-size 256 --train-iters 1000 --lr 1e-4 --mock-data"
"""A training that can be converted unchanged."""
ROPE = "--position-embedding-type rope"


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    return tmp_path


def init(text: str, *options: str) -> Ended:
    Path("job.sh").write_text(textwrap.dedent(text))
    cluster = () if "--cluster" in options else ("--cluster", "azure-ndv5")
    return hpcgen("init", "run.yaml", "--from", "job.sh", *cluster, *options)


def written() -> dict:
    return document.read(Path("run.yaml")).values


def left(ended: Ended) -> dict[str, str]:
    """The options that were not converted, with the reasons."""
    lines = ended.stderr.splitlines()
    pairs = itertools.pairwise(lines)
    return {
        what.partition("not converted: ")[2]: why.strip() for what, why in pairs if "not converted: " in what
    }


def refused(ended: Ended) -> dict[str, str]:
    """Options that are refused because results depend on them -> the reasons, for a script without a run file."""
    assert ended.status == 2, ended.stderr
    assert not Path("run.yaml").exists()
    found = (re.fullmatch(r"job\.sh:\d+: (.+?): (.+)", line) for line in ended.stderr.splitlines())
    return {match[1]: match[2] for match in found if match}


def test_a_pyxis_script_for_175b() -> None:
    ended = hpcgen("init", "run.yaml", "--from", AZURE, "--cluster", "azure-ndv5")
    assert ended.status == 0, ended.stderr
    assert written() == {
        "name": "gpt3-175b",
        "cluster": "azure-ndv5",
        "paths": {"run_dir": "runs/gpt3-175b"},
        "secrets": ["WANDB_API_KEY"],
        "environment": {"NCCL_PXN_DISABLE": "0", "LOG_LEVEL": "INFO"},
        "container": {
            "image": "nvcr.io#nvidia/pytorch:25.03-py3",
            "mounts": [{"source": "/shared/stage"}, {"source": "/opt/microsoft", "read_only": True}],
            "workdir": "/workspace",
        },
        "slurm": {
            "defaults": {
                "time": "2-00:00:00",
                "partition": "hpc",
                "account": "research",
                "extra_directives": ["--mail-type=FAIL"],
            },
            "train": {"nodes": 16},
        },
        "data": {
            "train": [
                {"prefix": "/shared/stage/tokens/a", "weight": 0.7},
                {"prefix": "/shared/stage/tokens/b", "weight": 0.3},
            ],
            "valid": [{"prefix": "/shared/stage/tokens/c"}],
            "num_workers": 4,
            "cache_dir": "/shared/stage/cache",
            "tokenizer": {"kind": "gpt2"},
        },
        "model": {
            "num_layers": 96,
            "hidden_size": 12288,
            "num_attention_heads": 96,
            "seq_length": 2048,
            "max_position_embeddings": 2048,
            "attention_dropout": 0,
            "hidden_dropout": 0,
            "init_method_std": 0.006,
            "padded_vocab_size": 51200,
        },
        "parallelism": {
            "tensor_model_parallel_size": 8,
            "pipeline_model_parallel_size": 16,
            "virtual_pipeline_model_parallel_size": 3,
            "sequence_parallel": True,
            "overlap_grad_reduce": True,
        },
        "training": {
            "micro_batch_size": 1,
            "global_batch_size": 1536,
            "train_iters": 95367,
            "precision": "bf16",
            "fp8": "hybrid",
            "fp8_recipe": "delayed",
            "fp8_amax_history_len": 1,
            "fp8_amax_compute_algo": "most_recent",
            "recompute_granularity": "selective",
            "eval_interval": 200,
            "eval_iters": 10,
            "distributed_timeout_minutes": 30,
        },
        "optimizer": {
            "lr": 6e-5,
            "min_lr": 6e-6,
            "lr_decay_style": "cosine",
            "lr_decay_iters": 82651,
            "lr_warmup_iters": 119,
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
            "clip_grad": 1.0,
        },
        "checkpoint": {"save": "/shared/stage/checkpoints", "save_interval": 500},
        "logging": {"log_interval": 10},
    }
    assert {what.split(" ")[0] for what in left(ended)} == {
        "--output=/shared/logs/%j.log",
        "module",
        "NCCL_MIN_CHANNELS",
        "WANDB_API_KEY",
        "DATA_DATE",
        "srun",
        "--tensorboard-dir",
        "the",  # run's own checkpoint directory
        "--container-mounts=$HOME/code:/code",
        "TP,",  # PP of the environment
    }
    assert "NCCL_MIN_NCHANNELS" in left(ended)["NCCL_MIN_CHANNELS"]


def test_a_converted_run_file_validates_and_renders() -> None:
    assert hpcgen("init", "run.yaml", "--from", AZURE, "--cluster", "azure-ndv5").status == 0
    checked = hpcgen("validate", "-c", "run.yaml")
    assert checked.status == 0, checked.stderr
    assert "TP8 PP16 VPP3 CP1 DP1, 1,536 microbatches on 128 ranks" in checked.stdout
    assert hpcgen("render", "train", "-c", "run.yaml", "-o", "train.sh").status == 0
    assert hpcgen("lint", "train.sh").stdout == ""


def test_secrets_are_converted_only_by_name() -> None:
    ended = hpcgen("init", "run.yaml", "--from", AZURE, "--cluster", "azure-ndv5")
    assert "0123456789abcdef" not in ended.stderr + Path("run.yaml").read_text()
    assert written()["secrets"] == ["WANDB_API_KEY"]


def test_a_secret_is_recognized_by_its_value_too() -> None:
    token = "hf_" + "Zq7" * 12
    ended = init(f"export HUB={token} MIRROR=https://me:pass4word@host/x\n{WHOLE} --wandb-api-key {token}\n")
    assert ended.status == 0, ended.stderr
    assert written()["secrets"] == ["HUB", "MIRROR"]
    for secret in (token, "pass4word"):
        assert secret not in ended.stderr + Path("run.yaml").read_text()


TORCHRUN = """\
    #!/bin/bash
    export CUDA_DEVICE_MAX_CONNECTIONS=1
    GPUS_PER_NODE=8
    NUM_NODES=16
    MASTER_ADDR=localhost
    MASTER_PORT=29500
    CHECKPOINT_PATH=$1
    DATA_PATH=$2
    DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --master_addr $MASTER_ADDR)
    GPT_MODEL_ARGS=(
        --num-layers 96
        --hidden-size 12288
        --num-attention-heads 96
        --seq-length 2048
        --max-position-embeddings 2048
    )
    TRAINING_ARGS="
        --micro-batch-size 1 \\
        --global-batch-size 1536 \\
        --train-iters 500000 \\
        --fp16 \\
        --lr 6.0e-5 \\
        --lr-warmup-fraction .001
    "
    MODEL_PARALLEL_ARGS=(--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16)
    torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
        ${GPT_MODEL_ARGS[@]} $TRAINING_ARGS ${MODEL_PARALLEL_ARGS[@]} \\
        --data-path $DATA_PATH --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH
"""


ANSWERS = ("--set", "data.mock=true")


def test_a_torchrun_script_without_slurm() -> None:
    assert refused(init(TORCHRUN)).keys() == {"--data-path $2"}
    ended = init(TORCHRUN, *ANSWERS)
    assert ended.status == 0, ended.stderr
    values = written()
    assert values["name"] == "run"
    assert values["container"] == {"runtime": "none"}
    assert values["slurm"] == {"defaults": {"time": "1-00:00:00"}, "train": {"nodes": 16}}
    assert values["training"]["precision"] == "fp16"
    assert values["data"] == {"mock": True, "tokenizer": {"kind": "gpt2"}}
    assert left(ended).keys() == {"--data-path", "--save $1", "the time limit"}
    assert hpcgen("validate", "-c", "run.yaml").status == 0


def test_defaults_of_megatron_that_differ_are_written_out() -> None:
    assert init(TORCHRUN, *ANSWERS).status == 0
    values = written()
    assert values["optimizer"] == {
        "lr": 6e-5,
        "min_lr": 0.0,
        "lr_decay_style": "linear",
        "lr_warmup_fraction": 0.001,
        "weight_decay": 0.01,
        "adam_beta2": 0.999,
    }
    assert values["model"]["attention_dropout"] == values["model"]["hidden_dropout"] == 0.1
    assert values["model"]["init_method_std"] == 0.02
    assert (values["training"]["eval_interval"], values["training"]["eval_iters"]) == (1000, 100)


def test_options_that_do_not_exist_are_listed_or_refused() -> None:
    text = """\
        #!/bin/bash
        #SBATCH --nodes=16
        #SBATCH --ntasks-per-node=8
        #SBATCH --time=48:00:00
        export NCCL_IB_QPS_PER_CONN=4 MEGATRON_NUM_MICROBATCHES=4
        srun --mpi=pmix python pretrain_gpt.py \\
            --num-layers=80 --hidden-size=8192 --num-attention-heads=64 --seq-length=2048 \\
            --micro-batch-size=1 --global-batch-size=128 --tensor-model-parallel-size=8 \\
            --pipeline-model-parallel-size=3 --data-parallel-size=32 --datacenter-id=1 \\
            --checkpoint-activations --train-iters=100000 --lr=1.0e-4 --bf16 \\
            --lr-warmup-iters=2000 --mock-data
        """
    ended = init(text)
    assert ended.status == 0, ended.stderr
    reasons = left(ended)
    assert set(reasons) == {
        "NCCL_IB_QPS_PER_CONN",
        "MEGATRON_NUM_MICROBATCHES",
        "--data-parallel-size 32",
        "--datacenter-id 1",
        "--checkpoint-activations",
    }
    assert "--recompute" in reasons["--checkpoint-activations"]
    # an invalid value is converted, and validate reports it
    assert written()["parallelism"]["pipeline_model_parallel_size"] == 3
    checked = hpcgen("validate", "-c", "run.yaml")
    assert checked.status == 2
    assert "pipeline_model_parallel_size = 3 does not divide" in checked.stderr
    Path("run.yaml").unlink()
    found = refused(init(text.replace("--bf16", "--walrus --qk-layernormm --batch-size 4")))
    assert found.keys() == {"--walrus", "--qk-layernormm", "--batch-size 4"}
    assert (
        "no release of Megatron-LM has this option; did you mean --qk-layernorm?" in found["--qk-layernormm"]
    )
    assert "--set 'training.micro_batch_size=...'" in found["--batch-size 4"]


def test_missing_values_that_affect_results_are_refused() -> None:
    found = refused(init("python pretrain_gpt.py --data-path a b c 1\n"))
    assert found.keys() == {
        "--data-path a b",
        *("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--lr"),
        *("--micro-batch-size", "--global-batch-size", "--train-iters"),
    }


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("export A=1\necho $A\n", (), "starts no program that hpcgen finds"),
        (WHOLE, ("--set", "model.walrus=1"), "walrus"),
        (WHOLE, ("--set", "training.seed=x"), "training.seed"),
        (WHOLE, ("--set", "name=x"), "use --name"),
        ("if true; then\n", (), "job.sh:"),
        ("cd /a\nsrun bash -c 'python pretrain_gpt.py --moe-layer-freq ([0]*1+[1]*3)'\n", (), "job.sh:2: "),
        ("python pretrain_gpt.py --mock-data\n", ("--preset", "tiny"), "--preset and --from both"),
        ("python pretrain_gpt.py --mock-data\n", ("--cluster", "nowhere"), "is not a known cluster profile"),
        ("\0", (), "is not a text"),
    ],
)
def test_mistakes_write_nothing(workplace, text, options, message) -> None:
    ended = init(text, *options)
    assert ended.status == 2
    assert message in ended.stderr
    assert listing(workplace).keys() == {"job.sh"}


def test_a_missing_script(workplace) -> None:
    ended = hpcgen("init", "run.yaml", "--from", "nowhere.sh", "--cluster", "local")
    assert ended.status == 2
    assert "nowhere.sh: cannot be read" in ended.stderr
    assert listing(workplace) == {}


@pytest.mark.parametrize(
    "value", ["a'b", 'a"b', "a\\b", "$(touch planted)", "a: b", "- x", "#", "ä", "a\nb", "%x"]
)
def test_any_text_of_the_script_makes_a_run_file(workplace, value: str) -> None:
    quoted = "'" + value.replace("'", "'\\''") + "'"
    ended = init(f"export GREETING={quoted}\n{WHOLE} --save /shared/{quoted} --split {quoted}\n")
    assert not (workplace / "planted").exists()
    if "\n" in value:  # which no run file can hold
        assert refused(ended) == {}
        assert "checkpoint.save" in ended.stderr
        return
    assert ended.status == 0, ended.stderr
    carried = written().get("environment", {}).get("GREETING")
    assert carried == value
    assert written()["checkpoint"]["save"] == f"/shared/{value}"


def test_collnet_becomes_use_sharp_where_the_nodes_have_it() -> None:
    text = f"""\
        #!/bin/bash
        #SBATCH --nodes=2
        export NCCL_COLLNET_ENABLE=1 SHARP_COLL_ENABLE_SAT=1 SHARP_COLL_LOG_LEVEL=5
        {WHOLE}
        """
    assert init(text).status == 0
    found = written()
    assert found["parallelism"]["use_sharp"] is True
    assert found["environment"] == {"SHARP_COLL_LOG_LEVEL": "5"}  # the others are the node type's


def test_a_run_that_would_write_to_the_old_checkpoints_is_reported() -> None:
    ended = init(f"#!/bin/bash\n#SBATCH --nodes=2\n{WHOLE} --save /shared/old\n")
    assert written()["checkpoint"]["save"] == "/shared/old"
    assert "saves there" in left(ended)["the run's own checkpoint directory"]
    ended = init(f"#!/bin/bash\n#SBATCH --nodes=2\n{WHOLE}\n", "--force")
    assert not any("checkpoint directory" in what for what in left(ended))


def test_a_python_script_is_refused_as_one() -> None:
    ended = init("#!/usr/bin/env python3\nfoo(\n")
    assert (ended.status, "its interpreter is python3" in ended.stderr) == (2, True)


def migrated(options: str, *more: str) -> tuple[dict, dict[str, str]]:
    """The valid run file for a training with `options`, and the options that were not converted."""
    options += " --mock-data --global-batch-size 256"
    for name, value in {"lr": "1e-4", "train-iters": "1000"}.items():
        if f"--{name} " not in options and not (name == "train-iters" and "--train-samples " in options):
            options += f" --{name} {value}"
    ended = init(
        f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n{TRAINING} {options}\n", *more
    )
    assert ended.status == 0, ended.stderr
    checked = hpcgen("validate", "-c", "run.yaml")
    assert checked.status == 0, checked.stderr
    return written(), left(ended)


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
        "--profile-ranks 0 1 --finetune --mtp-loss-scaling-factor 0.3 --rotary-base 500000"
    )
    assert leftovers == leftovers | {
        "--loss-scale 1024": "it only applies with training.precision = fp16",
        "--fp8-recipe delayed": "it only applies with training.fp8",
        "--lr-wsd-decay-iters 5": "it only applies with optimizer.lr_decay_style = WSD",
        "--wandb-exp-name first": "it only applies with logging.wandb_project",
        "--profile-ranks 0 1": "it only applies with logging.profile_step_start",
        "--finetune": "it only applies with checkpoint.load",
        "--mtp-loss-scaling-factor 0.3": "it only applies with model.mtp_num_layers",
        "--rotary-base 500000": "it only applies with model.position_embedding_type = rope",
    }
    assert "logging" not in found


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
    found, leftovers = migrated("--reset-attention-mask --reset-position-ids --eod-mask-loss")
    assert "--calculate-per-token-loss" in leftovers["the mean of the loss"]
    assert found["data"] == {
        "mock": True,
        "reset_attention_mask": True,
        "reset_position_ids": True,
        "eod_mask_loss": True,
    } | {key: found["data"][key] for key in ("tokenizer",) if key in found["data"]}


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
    assert leftovers["--min-offloaded-tensor-size 4096"] == "a run file has no key for it"


def test_a_branch_that_does_not_run_contributes_nothing() -> None:
    ended = init(
        """\
        #!/bin/bash
        #SBATCH --nodes=2 --ntasks-per-node=8
        MOCK=false  # set it to true for made-up samples
        PROFILER=false
        SIZE=${SIZE:-base}
        DATA=(--split 100,0,0 --num-workers 1)
        if [ "$MOCK" = true ]; then
            DATA="${DATA[@]} --mock-data"
        else
            DATA="${DATA[@]} --data-path /shared/a"
        fi
        case $SIZE in
            small) HIDDEN=256 HEADS=4 ;;
            base) HIDDEN=768 HEADS=12 ;;
            *) exit 1 ;;
        esac
        COMMAND="python pretrain_gpt.py --num-layers 12 --hidden-size $HIDDEN --num-attention-heads $HEADS $DATA"
        if [ ${SLURM_RESTART_COUNT:-0} -gt 0 ]; then export NCCL_PXN_DISABLE=0; fi
        COMMAND="$COMMAND --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --lr 1e-4"
        COMMAND+=" --global-batch-size 256 --train-iters 10"
        if [ -n "$WANDB_API_KEY" ]; then
            COMMAND="$COMMAND --wandb-project p --wandb-exp-name $SLURM_JOB_ID"
        fi
        if [[ $PROFILER == true ]]; then
            COMMAND="nsys profile $COMMAND --profile"
            export NCCL_DEBUG=INFO
        fi
        srun bash -c "RANK=\\$SLURM_PROCID numactl --membind=0 $COMMAND"
        """
    )
    assert ended.status == 0, ended.stderr
    found = written()
    assert found["data"] == {
        "datasets": [{"prefix": "/shared/a"}],
        "split": "100,0,0",
        "num_workers": 1,
        "tokenizer": {"kind": "gpt2"},
    }
    assert (found["model"]["hidden_size"], found["model"]["num_attention_heads"]) == (768, 12)
    assert "logging" not in found
    assert "environment" not in found
    assert left(ended).keys() == {
        "NCCL_PXN_DISABLE",
        "--wandb-project",
        "--wandb-exp-name",
        "SIZE from the environment",
        "the time limit",
    }


def test_values_of_an_uncertain_branch_are_refused_and_the_rest_is_converted() -> None:
    text = f"""\
        if [ "$1" = big ]; then HIDDEN=8192 LAYERS=40; elif [ "$1" = huge ]; then HIDDEN=16384; else HIDDEN=5120; fi
        args=(--hidden-size $HIDDEN --num-layers 32 --num-attention-heads 64)
        [ -d /shared/a ] && args+=(--data-path /shared/a) || args+=(--mock-data)
        if [[ $LONG ]]; then args+=(--context-parallel-size 2 --profile); fi
        {TRAINING.replace("--num-layers 12 --hidden-size 768 --num-attention-heads 12", '"${args[@]}"')} \\
            --lr 1e-4 --train-iters 10 --global-batch-size 256 --seed $SEED $EXTRA_ARGS
        """
    found = refused(init(text))
    assert found.keys() == {
        "--hidden-size",
        "--context-parallel-size",
        "--seed $SEED",
        "--data-path",
        "--mock-data",
    }
    assert "condition" in found["--hidden-size"]
    answers = {
        "model.hidden_size": "5120",
        "parallelism.context_parallel_size": "1",
        "training.seed": "7",
        "data.mock": "true",
    }
    ended = init(text, *(word for key, value in answers.items() for word in ("--set", f"{key}={value}")))
    assert ended.status == 0, ended.stderr
    values = written()
    assert values["model"] == values["model"] | {
        "hidden_size": 5120,
        "num_layers": 32,
        "num_attention_heads": 64,
    }
    assert (values["training"]["seed"], values["data"]["mock"]) == (7, True)
    assert "profile_step_start" not in values.get("logging", {})
    assert {"--profile", "$EXTRA_ARGS"} <= left(ended).keys()


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
--sequence-parallel; --reset-position-ids; --ckpt-format torch; --tiktoken-pattern v2; --walrus;
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
        if not (listed or name in found.usual) and found.sections == without.sections:
            silent.append(option)
    assert silent == []


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--num-experts $N", "only known in the job"),
        ("--num-experts 8 --moe-router-load-balancing-type sinkhorn", "cannot have this value"),
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
        ("--lr-decay-style WSD --lr-wsd-decay-style sqrt", "cannot have this value"),
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


EXPERTS = "--num-experts 8 --disable-bias-linear"
MOE = {"num_moe_experts": 8, "add_bias_linear": False, "activation_func": "gelu"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ("--disable-bias-linear", {"add_bias_linear": False, "activation_func": "gelu"}),
        ("--no-bias-gelu-fusion", {"activation_func": "gelu"}),
        (
            "--squared-relu --disable-bias-linear",
            {"add_bias_linear": False, "activation_func": "squared_relu"},
        ),
        ("--openai-gelu", {}),
        (
            "--swiglu --disable-bias-linear --add-qkv-bias",
            {"swiglu": True, "add_bias_linear": False, "add_qkv_bias": True, "ffn_hidden_size": 2048},
        ),
        ("--qk-layernorm --window-size 4095,0", {"qk_layernorm": True, "window_size": 4096}),
        ("--window-size '(4095,0)'", {"window_size": 4096}),
        ("--num-experts 8", {"num_moe_experts": 8}),
        (
            f"{EXPERTS} --moe-router-topk 1 --moe-router-pre-softmax --moe-aux-loss-coeff 1e-2",
            MOE | {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.01},
        ),
        (f"{EXPERTS} --moe-layer-freq 4", MOE | {"moe_layer_freq": [1, 0, 0, 0] * 3}),
        (f"{EXPERTS} --moe-layer-freq '([0]*1+[1]*11)'", MOE | {"moe_layer_freq": [0, *[1] * 11]}),
        (f"{EXPERTS} --moe-layer-freq [0]*1+[1]*11", MOE | {"moe_layer_freq": [0, *[1] * 11]}),
        (f"{EXPERTS} --moe-layer-freq 1 --moe-expert-capacity-factor -1", MOE),
        (f"{EXPERTS} --moe-router-bias-update-rate 1e-2 --moe-token-drop-policy position", MOE),
        (
            f"{EXPERTS} --moe-router-bias-update-rate 1e-2 --moe-router-score-function sigmoid "
            "--moe-router-enable-expert-bias",
            MOE
            | {
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_bias_update_rate": 0.01,
            },
        ),
        ("--moe-router-topk 4 --moe-grouped-gemm", {}),
        (f"{ROPE} --use-rope-scaling", {"position_embedding_type": "rope", "rope_scaling": LLAMA3}),
        ("--use-rope-scaling", {}),
    ],
)
def test_the_model_is_the_one_that_megatron_computes(options: str, model: dict[str, object]) -> None:
    plain, _ = migrated("")
    found, _ = migrated(options, "--force")
    assert found["model"] == plain["model"] | model


def test_lists_of_layers_need_no_quotes() -> None:
    """The shell keeps such a pattern if it matches no file. shfmt reads it as an index in arrays."""
    ended = init(f"LAYERS=(--moe-layer-freq [0]*1+[1]*11)\n{WHOLE} --num-experts 8 ${{LAYERS[@]}}\n")
    assert ended.status == 0, ended.stderr
    assert written()["model"]["moe_layer_freq"] == [0, *[1] * 11]


def test_the_layout_of_experts_is_converted() -> None:
    options = f"{EXPERTS} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --moe-grouped-gemm"
    found, leftovers = migrated(
        f"{options} --moe-token-dispatcher-type flex --moe-layer-recompute", "--force"
    )
    assert found["parallelism"] == {
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "moe_grouped_gemm": True,
    }
    assert leftovers["--moe-token-dispatcher-type"] == "the trainer has alltoall and allgather"
    assert "--moe-layer-recompute" in leftovers
    scripts = (
        ("--moe-router-pre-softmax", "--moe-router-score-function sigmoid"),
        ("--moe-aux-loss-coeff 1e-2", "--moe-router-load-balancing-type none"),
    )
    for unused, reason in scripts:
        found, leftovers = migrated(f"{EXPERTS} {unused} {reason}", "--force")
        assert leftovers[unused].startswith("it has no effect with model.moe_router_")
        assert unused.split()[0].removeprefix("--").replace("-", "_") not in found["model"]
    _, leftovers = migrated(f"{EXPERTS} --moe-router-num-groups 2", "--force")
    assert leftovers["--moe-router-num-groups 2"] == "it only applies with model.moe_router_group_topk"
    _, leftovers = migrated("--moe-grouped-gemm", "--force")
    assert leftovers["--moe-grouped-gemm"] == "it only applies with --num-experts"


MIXTRAL = """\
#!/bin/bash
#SBATCH --nodes=8 --gpus-per-node=8 --ntasks-per-node=8 --time=1-00:00:00
export CUDA_DEVICE_MAX_CONNECTIONS=1
MODEL="--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768
    --position-embedding-type rope --no-position-embedding --rotary-base 1000000 --swiglu --disable-bias-linear
    --normalization RMSNorm --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --init-method-std 0.01 --no-masked-softmax-fusion"
EXPERTS="--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-permute-fusion"
LAYOUT="--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
    --num-virtual-stages-per-pipeline-rank 8 --use-distributed-optimizer --sequence-parallel
    --overlap-grad-reduce --overlap-param-gather"
TRAINING="--micro-batch-size 1 --global-batch-size 256 --train-iters 500000 --bf16 --lr 1e-4 --min-lr 1e-5
    --lr-decay-iters 320000 --lr-decay-style cosine --lr-warmup-iters 500 --weight-decay 0.1 --clip-grad 1"
srun python pretrain_gpt.py $MODEL $EXPERTS $LAYOUT $TRAINING --mock-data --vocab-size 32000 \\
    --tokenizer-type NullTokenizer --save /shared/checkpoints
"""


def test_a_script_for_mixtral_becomes_the_preset() -> None:
    ended = init(MIXTRAL, "--set", "data.tokenizer.kind=bytes", "--set", "model.vocab_size=32000")
    assert ended.status == 0, ended.stderr
    checked = hpcgen("validate", "-c", "run.yaml")
    assert checked.status == 0, checked.stderr
    preset, values = PRESETS["mixtral-8x7b"].sections, written()
    expected = resolve_model(from_dict(ModelConfig, preset["model"], "preset"))
    converted = resolve_model(from_dict(ModelConfig, values["model"], "run.yaml"))
    assert converted == dataclasses.replace(expected, padded_vocab_size=converted.padded_vocab_size)
    assert values["parallelism"] == {
        **preset["parallelism"],
        "tensor_model_parallel_size": 1,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }
    assert "disables it" in left(ended)["--sequence-parallel"]


def test_values_that_megatron_derives_are_derived() -> None:
    found, leftovers = migrated(
        "--swiglu --group-query-attention --sequence-parallel --normalization rmsnorm --optimizer adam "
        "--lr-decay-style WSD --lr-wsd-decay-style 1-sqrt --lr-wsd-decay-iters 10 --save /shared/a/../b"
    )
    assert found["model"] == found["model"] | {
        "ffn_hidden_size": 2048,  # a multiple of 64 near 8/3 of the hidden size
        "num_query_groups": 1,
        "normalization": "RMSNorm",
    }
    assert "parallelism" not in found
    assert "Megatron-LM disables it" in leftovers["--sequence-parallel"]
    assert found["optimizer"]["lr_wsd_decay_style"] == "minus_sqrt"
    assert found["checkpoint"]["save"] == "/shared/b"


def test_relative_paths_are_listed_and_chosen_data_wins() -> None:
    text = f"#SBATCH --nodes=2\n{WHOLE.replace('--mock-data', '')} --data-path text_document --save out\n"
    ended = init(f"#!/bin/bash\n{text}")
    assert "the path starts at its folder" in left(ended)["the directory of out, text_document"]
    ended = init(f"#!/bin/bash\n{text}", "--force", "--set", "data.mock=true")
    assert written()["data"] == {"mock": True, "tokenizer": {"kind": "gpt2"}}
    assert left(ended)["--data-path"] == "--set overrides the data"


def test_a_batch_that_is_left_out_follows_from_the_ranks() -> None:
    text = f"#SBATCH --nodes=4 --ntasks-per-node=8\n{WHOLE.replace('--global-batch-size 256', '')}"
    ended = init(f"#!/bin/bash\n{text} --tensor-model-parallel-size 2\n")
    assert ended.status == 0, ended.stderr
    assert written()["training"]["global_batch_size"] == 16
    assert written()["model"]["padded_vocab_size"] == 50432


def test_a_huge_number_of_steps_is_computed_quickly() -> None:
    samples = 15 * 10**12 // 4096
    ended = init(
        f"{TRAINING} --mock-data --lr 1e-4 --global-batch-size 2048 --train-samples {samples} "
        "--rampup-batch-size 512 512 1000000\n",
        *("--set", "training.rampup_batch_size=[512, 512, 1000000]"),
    )
    assert ended.status == 0, ended.stderr
    assert 1_788_000 < written()["training"]["train_iters"] < samples // 2048 + 1000


def test_several_trainings_are_refused_unless_they_are_the_same() -> None:
    assert refused(init(f"{WHOLE}\n{WHOLE} --seed 2\n")).keys() == {"pretrain_gpt.py"}
    assert init(f"if [ $PROFILE ]; then\n nsys profile {WHOLE[5:]}\nelse\n {WHOLE}\nfi\n").status == 0


def test_the_cluster_is_asked_for_and_what_differs_is_listed() -> None:
    Path("job.sh").write_text(
        f"#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --gpus-per-node=4 --ntasks-per-node=4\n{WHOLE}\n"
    )
    ended = hpcgen("init", "run.yaml", "--from", "job.sh")
    assert (ended.status, "--from requires --cluster" in ended.stderr) == (2, True)
    ended = hpcgen("init", "run.yaml", "--from", "job.sh", "--cluster", "azure-ndv5")
    assert "have 8" in left(ended)["GPUs per node: 4"]
    assert written()["slurm"]["train"] == {"nodes": 4, "ntasks_per_node": 4}


def test_a_training_in_singularity_is_found_and_its_container_listed() -> None:
    program = WHOLE.replace("srun python", "srun singularity exec -B /a image.sif ./launch.sh")
    ended = init(f"#!/bin/bash\n#SBATCH --nodes=2\n{program}\n")
    assert ended.status == 0, ended.stderr
    assert "pyxis or enroot" in left(ended)["the container of singularity"]


MLA = f"{ROPE} --multi-latent-attention"


def test_latent_attention_has_megatron_lms_defaults() -> None:
    ended = init(f"{WHOLE} {MLA} --q-lora-rank 96 --qk-layernorm --kv-channels 64")
    model = written()["model"]
    assert {key: model[key] for key in ("multi_latent_attention", "q_lora_rank", "kv_lora_rank")} == {
        "multi_latent_attention": True,
        "q_lora_rank": 96,
        "kv_lora_rank": 32,
    }
    assert "rope_scaling" not in model
    assert left(ended)["--kv-channels 64"] == "latent attention does not use it"
    assert "kv_channels" not in model


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--rotary-scaling-factor 40", {}),
        (
            "--rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 0.7",
            {"mscale": 1.0, "mscale_all_dim": 0.7},
        ),
    ],
)
def test_yarn_of_latent_attention_has_megatron_cores_defaults(options: str, expected: dict) -> None:
    assert init(f"{WHOLE} {MLA} --rope-type yarn {options}").status == 0
    assert written()["model"]["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        **expected,
    }


def test_a_factor_without_yarn_is_refused() -> None:
    ended = init(f"{WHOLE} {MLA} --rope-type rope --rotary-scaling-factor 40")
    why = "Megatron-LM scales the scores of attention without scaling the rotary embedding"
    assert refused(ended)["--rope-type rope"].startswith(why)


def test_widths_without_latent_attention_are_left_out() -> None:
    reasons = left(init(f"{WHOLE} --kv-lora-rank 64 --mscale 0.7"))
    for option in ("--kv-lora-rank 64", "--mscale 0.7"):
        assert reasons[option] == "it only applies with --multi-latent-attention"


def test_mtp_layers_are_converted() -> None:
    untied = "--untie-embeddings-and-output-weights"
    assert init(f"{WHOLE} {ROPE} {untied} --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3").status == 0
    model = written()["model"]
    assert (model["mtp_num_layers"], model["mtp_loss_scaling_factor"]) == (1, 0.3)
