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
        "--fp8-format",
        "--tensorboard-dir",
        "a",  # checkpoint of Megatron-LM's
        "--container-mounts=$HOME/code:/code",
    }
    assert "NCCL_MIN_NCHANNELS" in left(ended)["NCCL_MIN_CHANNELS"]


def test_what_was_carried_can_be_validated_and_rendered() -> None:
    assert hpcgen("init", "run.yaml", "--from", AZURE).status == 0
    checked = hpcgen("validate", "-c", "run.yaml")
    assert checked.status == 0, checked.stderr
    assert "TP8 PP16 VPP3 CP1 DP1, 1536 microbatches on 128 ranks" in checked.stdout
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
    assert values["training"]["precision"] == "bf16"
    assert values["data"] == {"mock": True}
    assert left(ended).keys() == {
        "--data-path",
        "--save $1",
        "--load $1",
        "--fp16",
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
