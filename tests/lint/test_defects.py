"""Mistakes in existing launch scripts, each found by lint on its line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hpcgen.check.lint.check import lint
from hpcgen.check.lint.job import Job
from hpcgen.check.lint.reader import read
from hpcgen.check.lint.rules.exclusive_options import REFUSED_BY_SRUN
from hpcgen.config.sbatch_options import EXCLUSIVE_OPTIONS

DEFECTS = Path(__file__).with_name("scripts") / "defects.sh"

IN_ONE_SCRIPT = [
    # the defect, the rule, text of the line that it names
    ("the merges file defaults to vocab.json", "merge-file", "--merge-file"),
    ("8 CPUs for the 8 ranks of a node", "few-cpus", "--cpus-per-task=8"),
    ("CPUs not repeated on srun", "cpus-not-inherited", "srun"),
    ("fixed numbers of files for validation and test", "files-by-count", "head -n"),
    ("a suffix removed anywhere in the path", "suffix-by-pattern", "sed"),
    ("variables that --container-env does not name", "container-env-gap", "--container-env"),
    ("the user's image path is overwritten", "setting-overwritten", "IMAGE=$STAGE/images"),
    ("fp16 on H100", "fp16", "--fp16"),
    ("positions fixed at 2048 under a free sequence length", "positions-fixed", "--max-position-embeddings"),
    ("NCCL_COLLNET_ENABLE for the job beside use-sharp", "collnet-with-sharp", "NCCL_COLLNET_ENABLE"),
    ("no kill-on-bad-exit", "no-kill-on-bad-exit", "srun"),
    ("no time limit", "no-time-limit", "--job-name"),
    ("a rate that never decays", "decay-beyond-run", "--lr-decay-iters"),
    ("set -x with tokens", "trace-with-secrets", "set -xe"),
    ("SLURM_GPUS_PER_NODE with a type of GPU", "gpu-count", "SLURM_GPUS_PER_NODE"),
    ("ranks that are no multiple of TP x PP", "parallel-sizes", "srun"),
    ("a log directory outside the mounts", "path-not-mounted", "--tensorboard-dir"),
    ("a checkpoint worker without async save", "checkpoint-worker", "--use-persistent-ckpt-worker"),
    ("a topology file that is not mounted", "topology-not-mounted", "NCCL_TOPO_FILE="),
    ("a variable that does not exist", "misspelt-variable", "NCCL_IB_QPS_PER_CONN"),
    ("an option that does not exist", "megatron-option", "--data-parallel-size"),
    ("an option that makes Megatron-LM exit", "megatron-removed-option", "--checkpoint-activations"),
    ("NCCL's log at scale", "nccl-debug-flood", "NCCL_DEBUG=INFO"),
    ("an export without quotes", "export-words", "RUN_OPTIONS"),
    ("a checkpoint that the next attempt does not load", "save-without-load", "--save"),
]

HEAD = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=1:00:00
"""

IN_SCRIPTS_OF_THEIR_OWN = [
    (
        "a batch that is no multiple",
        "batch-size",
        "srun python pretrain_gpt.py --micro-batch-size 4 --global-batch-size 100\n",
        "srun",
    ),
    (
        "set -e above the directives",
        "directive-after-command",
        "#!/bin/bash\nset -e\n#SBATCH --nodes=2\n",
        "--nodes",
    ),
    (
        "nodes_array=($nodes) keeps one",
        "nodes-array",
        "nodes=($(scontrol show hostnames))\nnodes_array=($nodes)\nssh ${nodes_array[1]}\n",
        "nodes_array",
    ),
    (
        "$exit_code where exitcode was set",
        "similar-name",
        "srun ./train; exitcode=$?\nexit $exit_code\n",
        "exit $",
    ),
    (
        "a health check whose status is lost",
        "check-ignored",
        "srun ./node_health_check.sh; srun python train.py\n",
        "health",
    ),
    (
        "an unknown size becomes the small model",
        "default-model",
        "case $1 in\n175b) NUM_LAYERS=96;;\n*) NUM_LAYERS=12;;\nesac\n",
        "*)",
    ),
    (
        "an image without a version",
        "image-pin",
        "srun --container-image=nvcr.io#nvidia/pytorch python train.py\n",
        "srun",
    ),
    ("a token as text", "secret-in-script", "export HF_TOKEN=hf_" + "a1" * 17 + "\n", "HF_TOKEN"),
    (
        "a port for every job of a shared node",
        "fixed-port",
        "#!/bin/bash\n#SBATCH --gpus=1\nsrun torchrun --nproc_per_node 1 --master_port 29500 train.py\n",
        "29500",
    ),
    ("an array index beyond the limit", "array-index", "#SBATCH --array=0-5000\n", "--array"),
    (
        "a .sqsh taken for a registry name",
        "image-path",
        "srun --container-image=pytorch.sqsh python train.py\n",
        "srun",
    ),
    (
        "subprocess.run unchecked",
        "subprocess-unchecked",
        "python - <<'E'\nsubprocess.run(cmd, shell=True)\nE\n",
        "shell=True",
    ),
    ("a marker after a failure", "marker-after-failure", "python tokenize.py a b\ntouch out/DONE\n", "touch"),
    ("localhost for many nodes", "localhost-master", "export MASTER_ADDR=localhost\n", "MASTER_ADDR"),
    ("two of eight InfiniBand devices", "few-nics", "export NCCL_IB_HCA=mlx5_0:1,mlx5_1:1\n", "NCCL_IB_HCA"),
    (
        "TERM to srun, which kills",
        "kill-srun",
        "srun python train.py &\npid=$!\nkill -TERM $pid\nwait\n",
        "kill",
    ),
    (
        "an unset mount that swallows the command",
        "mount-unset",
        "srun --container-image=/a.sqsh --container-mounts $MOUNTS python train.py\n",
        "srun",
    ),
    ("no exit handler", "no-exit-handler", "srun python pretrain_gpt.py --save /shared/run\n", "srun"),
    (
        "a directive cut at #",
        "directive-cut",
        "#SBATCH --container-image=nvcr.io#nvidia/pytorch:25.03-py3\n",
        "nvcr",
    ),
]


@pytest.mark.parametrize(("defect", "rule", "at"), IN_ONE_SCRIPT, ids=[row[0] for row in IN_ONE_SCRIPT])
def test_it_is_found_at_its_line(defect: str, rule: str, at: str) -> None:
    text = DEFECTS.read_text()
    found = [
        text.split("\n")[finding.line - 1] for finding in lint(text, rules=[rule], slurm_version="22.05")
    ]
    assert any(at in line for line in found), found


@pytest.mark.parametrize(
    ("defect", "rule", "text", "at"), IN_SCRIPTS_OF_THEIR_OWN, ids=[row[0] for row in IN_SCRIPTS_OF_THEIR_OWN]
)
def test_it_is_found_in_a_small_script(defect: str, rule: str, text: str, at: str) -> None:
    text = text if text.startswith("#!") else HEAD + text
    found = [
        text.split("\n")[finding.line - 1] for finding in lint(text, rules=[rule], slurm_version="22.05")
    ]
    assert any(at in line for line in found), lint(text)


def test_no_message_shows_a_secret() -> None:
    secret = "hf_" + "Zq7" * 12
    text = HEAD + f"set -x\nexport HF_TOKEN={secret}\nhuggingface-cli login --token {secret}\n"
    text += f"srun --container-env=HF_TOKEN={secret} env\nexport HF_TOKEN=x {secret}\n"
    found = lint(text)
    assert {"secret-in-script", "trace-with-secrets"} <= {finding.rule for finding in found}
    assert secret not in "".join(finding.problem.reason + finding.problem.hint for finding in found)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--gpu-per-node=8", "did you mean --gpus-per-node?"),
        ("--ntask-per-node=8", "did you mean --ntasks-per-node?"),
        ("--mail-tpye=ALL", "did you mean --mail-type?"),
        ("--node=2", "did you mean --nodes?"),
        ("--exclu", "write the full name"),
        ("--kill-on-bad-exit=1", "pass it to srun"),
        ("-K", "pass it to srun"),
        ("-g 8", "man sbatch"),
        ("--gpus-per-n=8", ""),
        ("--mail-ty=ALL", ""),
    ],
)
def test_directives_that_sbatch_refuses(option: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH {option}\ntrue\n")
    fixes = [finding.problem.hint for finding in lint(script.read_text(), rules=["directive-unknown"])]
    assert (said in fixes[0]) if said else fixes == []
    if shutil.which("sbatch") is None:
        return
    complaint = answer_of_slurm(tmp_path, "sbatch", "--test-only", "--parsable", str(script))
    refused = re.search(r"unrecognized option|invalid option|is ambiguous", complaint)
    assert bool(refused) == bool(said), complaint


def answer_of_slurm(directory: Path, *command: str) -> str:
    """What a program of Slurm prints about its options, before it looks for the controller."""
    conf = directory / "slurm.conf"
    conf.write_text(
        "ClusterName=x\nSlurmctldHost=localhost\nSlurmctldPort=1\nAuthType=auth/none\nSelectType=select/cons_tres\nGresTypes=gpu\n"
    )
    environment = {"PATH": os.environ["PATH"], "SLURM_CONF": str(conf)}
    done = subprocess.run(
        ["timeout", "2", *command], env=environment, capture_output=True, text=True, check=False
    )
    return done.stderr


NOT_IN_22_05 = {"tres-per-task"}
VALUES = {"exact": "", "whole": "", "exclusive": "", "overlap": ""}
PAIRS = [
    (program, *pair)
    for program, pairs in (
        ("sbatch", EXCLUSIVE_OPTIONS),
        ("srun", EXCLUSIVE_OPTIONS),
        ("srun", REFUSED_BY_SRUN),
    )
    for pair in pairs
    if not NOT_IN_22_05.intersection(pair)
]


@pytest.mark.parametrize(("program", "first", "second"), PAIRS)
def test_options_that_exclude_each_other(program: str, first: str, second: str, tmp_path: Path) -> None:
    given = [f"--{name}{VALUES.get(name, '=1')}" for name in (first, second)]
    text = f"#!/bin/bash\nsrun {' '.join(given)} true\n"
    if program == "sbatch":
        text = "#!/bin/bash\n#SBATCH {}\n#SBATCH {}\ntrue\n".format(*given)
    findings = lint(text, rules=["exclusive-options"])
    assert [finding.severity for finding in findings] == ["error"]
    if shutil.which(program):
        script = ["--wrap", "true"] if program == "sbatch" else ["true"]
        assert "mutually exclusive" in answer_of_slurm(tmp_path, program, *given, *script)


def test_one_mistake_is_one_finding() -> None:
    training = "srun python pretrain_gpt.py --num-attention-heads 16 --hidden-size 1024"
    [found] = lint(f"{HEAD}{training} --tensor-model-parallel-size 6\n", rules=["parallel-sizes"])
    assert found.problem.hint == "use --tensor-model-parallel-size 1, 2, 4, 8 or 16"
    sizes = "--tensor-model-parallel-size 4 --context-parallel-size 3 --seq-length 6144"
    [found] = lint(f"{HEAD}{training} {sizes}\n", rules=["parallel-sizes"])
    assert "TP x PP x CP = 4 x 1 x 3 = 12 does not divide" in found.problem.reason
    assert found.problem.hint == "use 3 or 6 nodes, or choose parallel sizes whose product divides 16"
    text = "export MASTER_ADDR=localhost\nsrun torchrun --nnodes 2 --master_addr $MASTER_ADDR train.py\n"
    [found] = lint(HEAD + text, rules=["localhost-master"])
    assert found.line == len(HEAD.splitlines()) + 1


def test_layers_of_a_virtual_stage_divide_those_of_a_stage() -> None:
    training = "srun python pretrain_gpt.py --num-layers 96 --pipeline-model-parallel-size 16"
    option = "--num-layers-per-virtual-pipeline-stage"
    [found] = lint(f"{HEAD}{training} {option} 4\n", rules=["parallel-sizes"])
    assert "96 / 16 = 6 (6 / 4)" in found.problem.reason
    assert found.problem.hint == f"use {option} 1, 2, 3 or 6"
    assert lint(f"{HEAD}{training} {option} 3\n", rules=["parallel-sizes"]) == []


def moe_script(options: str) -> str:
    """A script that trains a mixture of 8 experts on 16 GPUs."""
    return (
        f"{HEAD}srun python pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 "
        f"--num-experts 8 --disable-bias-linear --global-batch-size 64 --micro-batch-size 1 {options}\n"
    )


@pytest.mark.parametrize(
    ("options", "rule", "message"),
    [
        ("--expert-model-parallel-size 3", "parallel-sizes", "does not divide --num-experts = 8 (8 / 3)"),
        (
            "--pipeline-model-parallel-size 4 --expert-model-parallel-size 8",
            "parallel-sizes",
            "does not divide the 4 ranks of a pipeline stage",
        ),
        (
            "--tensor-model-parallel-size 2",
            "parallel-sizes",
            "a run without --sequence-parallel does not work",
        ),
        ("--moe-ffn-hidden-size 1000 --expert-tensor-parallel-size 3", "parallel-sizes", "= 1000 (1000 / 3)"),
        ("--moe-router-topk 9", "model-shape", "--moe-router-topk 9 is more than --num-experts = 8"),
        ("--moe-router-topk 1", "model-shape", "no gradient for the router"),
        ("--moe-layer-freq '[1,0]'", "model-shape", "has 2 numbers"),
        ("--moe-pad-expert-input-to-capacity", "model-shape", "requires --moe-expert-capacity-factor"),
        ("--moe-router-enable-expert-bias", "model-shape", "requires --moe-router-score-function = sigmoid"),
        ("--moe-router-group-topk 2", "model-shape", "requires --moe-router-num-groups"),
    ],
)
def test_experts_that_do_not_fit(options: str, rule: str, message: str) -> None:
    assert message in " ".join(found.problem.reason for found in lint(moe_script(options), rules=[rule]))


def test_options_without_a_value_are_added_or_removed() -> None:
    script = moe_script("--tensor-model-parallel-size 2 --moe-shared-expert-intermediate-size 64")
    [parallel] = lint(script, rules=["parallel-sizes"])
    assert parallel.problem.hint == "add --sequence-parallel"
    biased = script.replace("--disable-bias-linear", "--sequence-parallel")
    [shape] = lint(biased, rules=["model-shape"])
    assert (
        shape.problem.reason
        == "--moe-shared-expert-intermediate-size 64 does not support a run without --disable-bias-linear"
    )
    assert shape.problem.hint == "add --disable-bias-linear"
    [shared] = lint(biased, rules=["parallel-sizes"])
    assert shared.problem.reason.startswith(
        "a run without --disable-bias-linear is not supported for experts that 2 ranks share"
    )
    assert shared.problem.hint == "add --disable-bias-linear, or set --expert-tensor-parallel-size to 1"


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--expert-model-parallel-size 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2",
        "--expert-model-parallel-size $EP",
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
        "--moe-router-topk 1 --moe-router-pre-softmax",
        "--moe-router-topk 1 --moe-router-load-balancing-type sinkhorn",
        "--moe-router-num-groups 3 --moe-token-drop-policy position",  # Megatron-LM ignores both
        "--moe-layer-freq 2",
        "--moe-layer-freq $PATTERN",
    ],
)
def test_experts_that_fit(options: str) -> None:
    assert lint(moe_script(options), rules=["parallel-sizes", "model-shape"]) == []


@pytest.mark.parametrize(("name", "shared"), [("%x.out", True), ("%%j.out", True), ("%x-%4j.out", False)])
def test_a_log_without_the_jobs_number_is_shared(name: str, shared: bool) -> None:
    found = lint(f"{HEAD}#SBATCH --output=/lustre/logs/{name}\ntrue\n", rules=["log-shared"])
    assert bool(found) == shared


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("srun -N2 torchrun --node_rank $SLURM_NODEID train.py", ["SLURM_NODEID"]),
        ('srun -N2 torchrun --node_rank="${SLURM_NODEID}" train.py', ["SLURM_NODEID"]),
        ("rank=$SLURM_PROCID\nsrun torchrun --node_rank $rank train.py", ["SLURM_PROCID"]),
        ('a=(--local-rank $SLURM_LOCALID)\nsrun python train.py "${a[@]}"', ["SLURM_LOCALID"]),
        ('launch() { srun "$@"; }\nlaunch python train.py --rank $SLURM_PROCID', ["SLURM_PROCID"]),
        ('srun bash -c "torchrun --node_rank $SLURM_NODEID train.py"', ["SLURM_NODEID"]),
        ("srun --export=ALL,RANK=$SLURM_PROCID python train.py", ["SLURM_PROCID"]),
        ("srun bash -c 'torchrun --node_rank $SLURM_NODEID train.py'", []),
        ('srun bash -c "torchrun --node_rank \\$SLURM_NODEID train.py"', []),
        ("srun -N2 torchrun --rdzv_backend c10d --node_rank $SLURM_NODEID train.py", []),
        (
            'L="accelerate launch --machine_rank $SLURM_PROCID --rdzv_backend=c10d"\nsrun bash -c "$L train.py" 2>&1',
            [],
        ),
        ("srun -n1 -N1 ./copy $SLURM_PROCID", []),
        ("srun -N1 -n8 ./check $SLURM_NODEID", []),
        ("srun -N2 -n2 ./check $SLURM_LOCALID", []),
        ("echo $SLURM_PROCID; srun python train.py", []),
    ],
)
def test_the_rank_of_the_batch_shell_is_not_the_tasks(text: str, names: list[str]) -> None:
    found = lint(f"{HEAD}{text}\n", rules=["rank-of-batch-shell"])
    assert [re.findall(r"SLURM_\w+", finding.problem.reason)[0] for finding in found] == names
    assert all("bash -c '" in finding.problem.hint for finding in found)


def test_text_from_variables_counts_as_the_line_it_is_used_on() -> None:
    text = HEAD + "X='a\nb\nc\nd\ne'\n" + 'bash -c "$X\nsrun python train.py\ntrue"\n'
    last = text.count("\n")
    found = lint(text)
    said = [finding.line for finding in found]
    said += [int(line) for finding in found for line in re.findall(r"line (\d+)", finding.problem.reason)]
    assert max(said) <= last
    inner = [command for command in read(text).commands if command.outer is not None]
    assert {command.name for command in inner} >= {"srun", "true"}
    assert all(text.split("\n")[command.line - 1].startswith("bash -c") for command in inner)


def test_text_without_variables_keeps_its_lines() -> None:
    text = HEAD + "bash -c '\ntrue\nsrun python train.py'\n"
    [step] = [command for command in read(text).commands if command.name == "srun"]
    assert text.split("\n")[step.line - 1].startswith("srun")


@pytest.mark.parametrize(
    "first", ["#!/usr/bin/env python3", "#!/usr/bin/python3 -u", "#!/usr/bin/env -S A=b perl -w"]
)
def test_only_the_directives_of_a_script_for_another_interpreter_are_read(first: str) -> None:
    found = lint(f"{first}\n#SBATCH --nodes=2\nfoo(1, (2))\nif x:\n    pass\n")
    assert {finding.rule for finding in found} >= {"not-a-shell-script", "no-time-limit"}
    assert "syntax" not in {finding.rule for finding in found}


@pytest.mark.parametrize("text", ["", "\n", " \t\n\n"])
def test_an_empty_script_is_an_error(text: str) -> None:
    [found] = lint(text)
    assert (found.rule, found.severity, found.line) == ("empty-script", "error", 1)


def test_a_here_document_is_no_part_of_a_script_with_a_syntax_error() -> None:
    text = HEAD + "set -e\ncat <<EOT > next.slurm\n#!/bin/bash\n#SBATCH --nodes=1\nEOT\ndone\n"
    assert {finding.rule for finding in lint(text)} == {"syntax"}


def test_options_of_a_fork_are_not_mistakes() -> None:
    fork = "--num_layers 12 --hidden_size 768 --lora_rank 8 --data-parallel-size 2"
    assert lint(f"{HEAD}srun python pretrain_gpt.py {fork}\n", rules=["megatron-option"]) == []
    [found] = lint(f"{HEAD}srun python pretrain_gpt.py --num_layers 12\n", rules=["megatron-option"])
    assert found.problem.hint == "did you mean --num-layers?"


@pytest.mark.parametrize(
    ("key", "option"),
    [
        ("num-moe-experts", "num-experts"),
        ("num-layers-in-first-pipeline-stage", "decoder-first-pipeline-num-layers"),
        ("moe-token-dropping", "moe-expert-capacity-factor"),
        ("gated-linear-unit", "swiglu"),
    ],
)
def test_a_name_of_megatron_cores_configuration_is_no_option(key: str, option: str) -> None:
    [found] = lint(f"{HEAD}srun python pretrain_gpt.py --{key} 8\n", rules=["megatron-option"])
    assert found.problem.reason == f"Megatron-LM has no --{key}"
    assert found.problem.hint == f"use --{option}"


def test_the_last_check_of_a_script_is_its_status() -> None:
    assert lint(f"{HEAD}srun dcgmi diag -r 3\ndcgmi diag -r 3\n", rules=["check-ignored"]) == []
    [found] = lint(f"{HEAD}dcgmi diag -r 3\nsrun python train.py\n", rules=["check-ignored"])
    assert found.problem.hint == "dcgmi diag -r 3 || exit 1"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("export RANK=$SLURM_PROCID\nsrun python train.py", True),
        ("RANK=$SLURM_PROCID\nexport RANK\nsrun apptainer exec --nv image.sif python train.py", True),
        ("export RANK=$SLURM_PROCID\nsrun torchrun --nproc_per_node 8 train.py", False),
        ("export RANK=$SLURM_PROCID\nsrun -N1 -n1 python train.py", False),
        ("export RANK=$SLURM_PROCID\nsrun --container-image=a#b:1 python train.py", False),
        ("srun bash -c 'export RANK=$SLURM_PROCID; python train.py'", False),
    ],
)
def test_a_rank_that_the_batch_shell_exports(text: str, found: bool) -> None:
    assert bool(lint(f"{HEAD}{text}\n", rules=["rank-of-batch-shell"])) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("--rdzv_endpoint=$(hostname)", True),
        ("--rdzv_endpoint=node1", True),
        ("--rdzv_endpoint=$ENDPOINT", False),
        ("--rdzv_endpoint=node1:$((10000 + SLURM_JOB_ID % 20000))", False),
        ("--standalone --master_port 29500", False),
    ],
)
def test_an_endpoint_without_a_port_has_torchruns_own(text: str, found: bool) -> None:
    script = f"#!/bin/bash\n#SBATCH --gpus=1\nsrun torchrun --nproc_per_node 1 {text} train.py\n"
    findings = lint(script, rules=["fixed-port"])
    assert [re.findall("port 29400", finding.problem.reason) for finding in findings] == (
        [["port 29400"]] if found else []
    )


@pytest.mark.parametrize(
    ("directives", "options", "tasks"),
    [
        ("--ntasks-per-node=8", "--ntasks-per-node=1", 8),
        ("--ntasks-per-node=8", "--ntasks=2 --ntasks-per-node=1", 1),
        ("--tasks-per-node=1", "--ntasks-per-node=4", 1),
        ("--exclusive", "--ntasks-per-node=4", 4),
    ],
)
def test_the_tasks_that_a_step_has_on_a_node(directives: str, options: str, tasks: int) -> None:
    job = Job(read(f"#!/bin/bash\n#SBATCH --nodes=2 {directives}\nsrun {options} python train.py\n"))
    assert job.tasks_per_node(job.steps[0]) == tasks


def test_latent_attention_with_tensor_parallelism_needs_sequence_parallelism() -> None:
    shape = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --position-embedding-type rope"
    options = f"{shape} --multi-latent-attention --tensor-model-parallel-size 2"
    script = f"{HEAD}srun python pretrain_gpt.py {options}"
    [found] = lint(f"{script}\n", rules=["parallel-sizes"])
    assert "must be true for --multi-latent-attention with TP = 2" in found.problem.reason
    assert (
        lint(f"{script} --sequence-parallel --kv-channels 64\n", rules=["parallel-sizes", "model-shape"])
        == []
    )
