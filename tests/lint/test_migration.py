from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from hpcgen.config import document
from tests.cli.command import Ended, hpcgen, listing

SCRIPTS = Path(__file__).with_name("scripts")
AZURE = SCRIPTS / "azure-175b.sh"


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    return tmp_path


def init(text: str, *options: str) -> Ended:
    Path("job.sh").write_text(textwrap.dedent(text))
    return hpcgen("init", "run.yaml", "--from", "job.sh", *options)


def written() -> dict:
    return document.read(Path("run.yaml")).values


def left(ended: Ended) -> dict[str, str]:
    """What was not carried, and why."""
    lines = ended.stderr.splitlines()[:-1]
    return {
        what.partition("not carried: ")[2]: why.strip()
        for what, why in zip(lines[::2], lines[1::2], strict=True)
    }


def test_a_pyxis_script_for_175b() -> None:
    ended = hpcgen("init", "run.yaml", "--from", AZURE)
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
        "a",  # checkpoint of Megatron-LM's
        "--container-mounts=$HOME/code:/code",
    }
    assert "NCCL_MIN_NCHANNELS" in left(ended)["NCCL_MIN_CHANNELS"]


def test_what_was_carried_can_be_validated_and_rendered() -> None:
    assert hpcgen("init", "run.yaml", "--from", AZURE).status == 0
    checked = hpcgen("validate", "-c", "run.yaml")
    assert checked.status == 0, checked.stderr
    assert "TP8 PP16 VPP3 CP1 DP1, 1,536 microbatches on 128 ranks" in checked.stdout
    assert hpcgen("render", "train", "-c", "run.yaml", "-o", "train.sh").status == 0
    assert hpcgen("lint", "train.sh").stdout == ""


def test_secrets_are_carried_by_name_alone() -> None:
    ended = hpcgen("init", "run.yaml", "--from", AZURE)
    assert "0123456789abcdef" not in ended.stderr + Path("run.yaml").read_text()
    assert written()["secrets"] == ["WANDB_API_KEY"]


def test_a_secret_is_known_by_its_look_as_well() -> None:
    token = "hf_" + "Zq7" * 12
    ended = init(
        f"export HUB={token} MIRROR=https://me:pass4word@host/x\n"
        f"python pretrain_gpt.py --mock-data --wandb-api-key {token}\n"
    )
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


def test_a_torchrun_script_without_slurm() -> None:
    ended = init(TORCHRUN)
    assert ended.status == 0, ended.stderr
    values = written()
    assert values["name"] == "run"
    assert values["container"] == {"runtime": "none"}
    assert values["slurm"] == {"defaults": {"time": "1-00:00:00"}, "train": {"nodes": 16}}
    assert values["training"]["precision"] == "fp16"
    assert values["data"] == {"mock": True}
    assert left(ended).keys() == {
        "--data-path",
        "--save $1",
        "--load $1",
        "data",
        "the time limit",
        "a checkpoint of Megatron-LM's",
    } - {"--load $1"}
    assert hpcgen("validate", "-c", "run.yaml").status == 0


def test_where_megatrons_defaults_are_others_they_are_written_out() -> None:
    assert init(TORCHRUN).status == 0
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


def test_options_that_do_not_exist_are_listed() -> None:
    ended = init(
        """\
        #!/bin/bash
        #SBATCH --nodes=16
        #SBATCH --ntasks-per-node=8
        #SBATCH --time=48:00:00
        export NCCL_IB_QPS_PER_CONN=4 MEGATRON_NUM_MICROBATCHES=4
        srun --mpi=pmix python pretrain_gpt.py \\
            --num-layers=80 --hidden-size=8192 --num-attention-heads=64 --seq-length=2048 \\
            --micro-batch-size=1 --global-batch-size=128 --tensor-model-parallel-size=8 \\
            --pipeline-model-parallel-size=3 --data-parallel-size=32 --datacenter-id=1 \\
            --checkpoint-activations --train-iters=100000 --lr=1.0e-4 --bf16 --walrus \\
            --lr-warmup-iters=2000 --mock-data
        """
    )
    assert ended.status == 0, ended.stderr
    reasons = left(ended)
    assert set(reasons) == {
        "NCCL_IB_QPS_PER_CONN",
        "MEGATRON_NUM_MICROBATCHES",
        "--data-parallel-size 32",
        "--datacenter-id 1",
        "--checkpoint-activations",
        "--walrus",
    }
    assert "--recompute" in reasons["--checkpoint-activations"]
    # what breaks a rule is carried, and validate says so
    assert written()["parallelism"]["pipeline_model_parallel_size"] == 3
    checked = hpcgen("validate", "-c", "run.yaml")
    assert checked.status == 2
    assert "pipeline_model_parallel_size = 3 does not divide" in checked.stderr


def test_options_of_a_condition_or_from_outside_are_listed() -> None:
    ended = init(
        """\
        #!/bin/bash
        args=(--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --micro-batch-size 4)
        args+=(--global-batch-size 256 --train-iters 10 --lr 1e-4 --mock-data --lr-warmup-iters 1)
        if [[ $LONG ]]; then args+=(--context-parallel-size 2); fi
        python pretrain_gpt.py "${args[@]}" --seed $SEED $EXTRA_ARGS
        """,
        "--cluster",
        "local",
    )
    assert ended.status == 0, ended.stderr
    assert left(ended)["--context-parallel-size 2"] == "it is only given under a condition"
    assert left(ended)["--seed $SEED"].startswith("only the job knows")
    assert "$EXTRA_ARGS" in left(ended)
    assert "parallelism" not in written()


def test_what_a_run_file_needs_stands_there() -> None:
    ended = init("python pretrain_gpt.py --mock-data\n", "--name", "mine")
    assert ended.status == 0, ended.stderr
    assert written()["name"] == "mine"
    assert {"model.num_layers", "training.global_batch_size", "optimizer.lr", "the number of nodes"} <= left(
        ended
    ).keys()
    assert hpcgen("validate", "-c", "run.yaml").status == 0


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("srun python train.py --num-layers 3\n", (), "starts no training of Megatron-LM"),
        ("if true; then\n", (), "job.sh:"),
        ("python pretrain_gpt.py --mock-data\n", ("--preset", "tiny"), "--preset and --from both"),
        ("python pretrain_gpt.py --mock-data\n", ("--cluster", "nowhere"), "names no cluster profile"),
        ("\0", (), "is not a text"),
    ],
)
def test_mistakes_write_nothing(workplace, text, options, message) -> None:
    ended = init(text, *options)
    assert ended.status == 2
    assert message in ended.stderr
    assert listing(workplace).keys() == {"job.sh"}


def test_a_script_that_is_not_there(workplace) -> None:
    ended = hpcgen("init", "run.yaml", "--from", "nowhere.sh")
    assert ended.status == 2
    assert "nowhere.sh: cannot be read" in ended.stderr
    assert listing(workplace) == {}


@pytest.mark.parametrize(
    "value", ["a'b", 'a"b', "a\\b", "$(touch planted)", "a: b", "- x", "#", "ä", "a\nb", "%x"]
)
def test_any_text_of_the_script_makes_a_run_file(workplace, value: str) -> None:
    quoted = "'" + value.replace("'", "'\\''") + "'"
    ended = init(
        f"export GREETING={quoted}\npython pretrain_gpt.py --mock-data --save /shared/{quoted} --split {quoted}\n"
    )
    assert ended.status == 0, ended.stderr
    assert not (workplace / "planted").exists()
    carried = written().get("environment", {}).get("GREETING")
    assert carried == (None if "\n" in value else value)
    assert written()["checkpoint"]["save"] == f"/shared/{value}"


TRAINING = "srun python pretrain_gpt.py --num-layers 12"


def test_collnet_becomes_use_sharp_where_the_nodes_have_it() -> None:
    text = f"""\
        #!/bin/bash
        #SBATCH --nodes=2
        export NCCL_COLLNET_ENABLE=1 SHARP_COLL_ENABLE_SAT=1 SHARP_COLL_LOG_LEVEL=5
        {TRAINING}
        """
    assert init(text).status == 0
    found = written()
    assert found["parallelism"]["use_sharp"] is True
    assert found["environment"] == {"SHARP_COLL_LOG_LEVEL": "5"}  # the others are the node type's


def test_a_run_that_would_write_to_the_old_checkpoints_is_told() -> None:
    ended = init(f"#!/bin/bash\n#SBATCH --nodes=2\n{TRAINING} --save /shared/old\n")
    assert written()["checkpoint"]["save"] == "/shared/old"
    assert "writes there" in left(ended)["a checkpoint directory of the run's own"]
    ended = init(f"#!/bin/bash\n#SBATCH --nodes=2\n{TRAINING}\n", "--force")
    assert not any("checkpoint directory" in what for what in left(ended))


def test_a_python_script_is_refused_as_one() -> None:
    ended = init("#!/usr/bin/env python3\nfoo(\n")
    assert (ended.status, "python3 runs it" in ended.stderr) == (2, True)


def migrated(options: str) -> tuple[dict, dict[str, str]]:
    """What a training with `options` becomes, which must keep every rule, and what of it is left."""
    options += " --mock-data --micro-batch-size 1 --global-batch-size 256"
    ended = init(f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n{TRAINING} {options}\n")
    assert ended.status == 0, ended.stderr
    checked = hpcgen("validate", "-c", "run.yaml")
    assert checked.status == 0, checked.stderr
    return written(), left(ended)


def test_schedules_loss_scales_and_ways_to_watch_are_carried() -> None:
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


def test_fp8_is_carried_with_its_recipe() -> None:
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
    assert leftovers["--fp8-amax-history-len 16"] == "it belongs to training.fp8_recipe = delayed"


def test_a_growing_batch_counts_its_steps() -> None:
    """Three steps of 64 samples, two of 128 and one of 192 read 640; then ten of 256 are within 3264."""
    found, _ = migrated(
        "--rampup-batch-size 64 64 576 --train-samples 3264 --lr-warmup-samples 448 --lr-decay-samples 3264 "
        "--lr-decay-style WSD --lr-wsd-decay-samples 512 --lr 1e-4"
    )
    assert found["training"]["rampup_batch_size"] == [64, 64, 576]
    steps = {name: found["optimizer"][name] for name in ("lr_warmup_iters", "lr_wsd_decay_iters")}
    assert (found["training"]["train_iters"], steps) == (
        16,
        {"lr_warmup_iters": 5, "lr_wsd_decay_iters": 2},
    )


def test_what_nothing_would_read_is_left_with_its_reason() -> None:
    found, leftovers = migrated(
        "--bf16 --loss-scale 1024 --fp8-recipe delayed --lr-wsd-decay-iters 5 --wandb-exp-name first "
        "--profile-ranks 0 1 --finetune"
    )
    assert leftovers == leftovers | {
        "--loss-scale 1024": "it belongs to training.precision = fp16",
        "--fp8-recipe delayed": "it belongs to training.fp8",
        "--lr-wsd-decay-iters 5": "it belongs to optimizer.lr_decay_style = WSD",
        "--wandb-exp-name first": "it belongs to logging.wandb_project",
        "--profile-ranks 0 1": "it belongs to logging.profile_step_start",
        "--finetune": "it belongs to checkpoint.load",
    }
    assert "logging" not in found


@pytest.mark.parametrize("rampup", ["0 0 0", "64 64 0", "64", "64 64 $N", "999999999999999 1 1"])
def test_a_ramp_that_is_none_is_no_reason_to_fail(rampup: str) -> None:
    ended = init(
        f"{TRAINING} --mock-data --global-batch-size 256 --train-samples 2560 --rampup-batch-size {rampup}\n"
    )
    assert ended.status == 0, ended.stderr
    assert written()["training"]["train_iters"] == 10
