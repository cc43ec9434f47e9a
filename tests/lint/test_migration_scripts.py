"""`hpcgen init --from` for scripts of Megatron-LM's training: directives, environment, containers, branches, paths."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cli.command import hpcgen, listing
from tests.lint.migrations import TRAINING, WHOLE, init, left, refused, written

pytestmark = pytest.mark.usefixtures("workplace")

SCRIPTS = Path(__file__).with_name("scripts")
AZURE = SCRIPTS / "azure-175b.sh"


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
        "srun --mpi=pmix",
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
        (
            "A=1\nsbatch -N 2 <<EOF\n#!/bin/bash\nsrun python x.py $A\nEOF\n",
            (),
            "job.sh:2: submits another script",
        ),
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


def test_a_submitted_script_is_converted_as_the_shell_prints_it(workplace) -> None:
    training = WHOLE.partition("--num-layers 12")
    wrapper = f"A='--num-layers 12'\nsbatch -N 2 <<EOF\n#!/bin/bash\n{training[0]}$A{training[2]}\nEOF\n"
    assert "replace sbatch and its options by cat" in init(wrapper).stderr
    printed = subprocess.run(
        ["bash"], input=wrapper.replace("sbatch -N 2", "cat"), capture_output=True, text=True
    )
    assert init(printed.stdout).status == 0
    assert written()["model"]["num_layers"] == 12


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
        "numactl --membind=0 in front of python",
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


def test_relative_paths_are_listed_and_chosen_data_wins() -> None:
    text = f"#SBATCH --nodes=2\n{WHOLE.replace('--mock-data', '')} --data-path text_document --save out\n"
    ended = init(f"#!/bin/bash\n{text}")
    assert "the path starts at its folder" in left(ended)["the directory of out, text_document"]
    vocabulary = "--vocab-file /gpt2/vocab.json --merge-file merges.txt"
    ended = init(f"#!/bin/bash\n{text.replace('--save', f'{vocabulary} --save')}", "--force")
    assert "the directory of out, text_document, merges.txt" in left(ended)
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
    assert "singularity exec -B /a image.sif" in left(ended)["the container of singularity"]


def test_a_container_of_apptainer_is_carried_over() -> None:
    call = "apptainer --quiet exec --nv -B /data:/data:ro,$SCRATCH/x:/x --bind=/code --pwd /code --writable-tmpfs"
    program = WHOLE.replace("srun python", f"srun {call} --env API_TOKEN=abc --cleanenv /i/gpt.sif python")
    ended = init(f"#!/bin/bash\n#SBATCH --nodes=2\n{program}\n")
    assert ended.status == 0, ended.stderr
    assert written()["container"] == {
        "runtime": "apptainer",
        "image": "/i/gpt.sif",
        "workdir": "/code",
        "writable": True,
        "mounts": [{"source": "/data", "read_only": True}, {"source": "/code"}],
    }
    found = left(ended)
    assert "the path is only known in the job" in found["--bind=$SCRATCH/x:/x"]
    assert "options of its own" in found["--cleanenv"]
    assert "abc" not in ended.stderr
