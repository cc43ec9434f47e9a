"""Signals, addresses, functions, arguments and ports that reach a step or not, and correct scripts close to these."""

from __future__ import annotations

import pytest

from hpcgen.check.lint.check import Finding, lint

HEAD = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=60
"""
WARNED = f"{HEAD}#SBATCH --signal=B:USR1@300\n"
TRAINING = "srun -K torchrun --nnodes=2 --nproc-per-node=8 train.py"
BACKGROUND = f'{TRAINING} &\npid=$!\nwait "$pid"\nwait "$pid"\n'
HEAD_NODE = 'ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)\n'
MEET = "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint $ip:29500 train.py"
SETUP = "setup() {\n    mkdir -p /tmp/x\n}\n"


def found(text: str, rule: str) -> list[Finding]:
    return lint(text, rules=[rule])


@pytest.mark.parametrize(
    ("handler", "is_lost"),
    [
        ("trap 'echo caught' USR1\n", True),
        ("trap 'echo caught >&2; date' SIGUSR1\n", True),
        ("handler() {\n    echo caught\n}\ntrap handler USR1\n", True),
        ("trap 'kill -USR1 $pid' USR1\n", False),
        ("handler() {\n    echo a; kill -USR1 $pid\n}\ntrap handler USR1\n", False),
        ("trap 'scontrol requeue $SLURM_JOB_ID' USR1\n", False),
        ("trap 'echo 1 > /shared/stop' USR1\n", False),
        ("handler() {\n    echo a > stop\n}\ntrap handler USR1\n", False),
        ("trap 'stop=1' USR1\n", False),
        ("handler() {\n    stop=1; echo a\n}\ntrap handler USR1\n", False),
        ("trap 'echo bye; exit' USR1\n", False),
        ("trap save_all USR1\n", False),
        ('trap "$HANDLER" USR1\n', False),
        ("trap '' USR1\n", False),
    ],
)
def test_a_trap_that_does_not_forward_the_signal(handler: str, is_lost: bool) -> None:
    assert bool(found(f"{WARNED}{handler}{BACKGROUND}", "signal-not-forwarded")) == is_lost


def test_a_script_that_acts_after_the_trap() -> None:
    text = f"{WARNED}trap 'echo caught' USR1\n{BACKGROUND}scontrol requeue $SLURM_JOB_ID\n"
    assert found(text, "signal-not-forwarded") == []


@pytest.mark.parametrize("end", ["cp -r out /shared\n", "trap 'cp -r out /shared' EXIT\n"])
def test_a_script_whose_trap_ends_its_wait(end: str) -> None:
    assert found(f"{WARNED}trap 'echo caught' USR1\n{BACKGROUND}{end}", "signal-not-forwarded") == []


def test_a_training_without_srun_does_not_get_the_signal_either() -> None:
    text = f"{WARNED}trap 'echo caught' USR1\npython train.py\n".replace("nodes=2", "nodes=1")
    assert len(found(text, "signal-not-forwarded")) == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"export MASTER_ADDR=$(hostname -I)\n{TRAINING}\n", 6),
        (f"{HEAD_NODE}srun -K {MEET}\n", 6),
        (f'{HEAD_NODE}srun -K bash -c "{MEET}"\n', 7),
        (f"{HEAD_NODE}export MASTER_ADDR=$ip\n{TRAINING}\n", 6),
        (f"export MASTER_ADDR=`hostname -i`\n{TRAINING}\n", 6),
        (f"{HEAD_NODE}ip=${{ip%% *}}\nsrun -K {MEET}\n", None),
        (f'{HEAD_NODE}read -ra all <<< "$ip"\nsrun -K {MEET}\n', None),
        (f"{HEAD_NODE}echo $ip\n{TRAINING}\n", None),
        (f"export MASTER_ADDR=$(hostname)\n{TRAINING}\n", None),
        (f"export MASTER_ADDR=$(hostname -I | awk '{{print $1}}')\n{TRAINING}\n", None),
    ],
)
def test_an_address_of_hostname(text: str, line: int | None) -> None:
    assert [finding.line for finding in found(HEAD + text, "host-address")] == ([line] if line else [])


@pytest.mark.parametrize(
    ("text", "is_missing"),
    [
        (f"{SETUP}srun -K bash -c 'setup; exec python train.py'\n", True),
        (f"{SETUP}srun -K bash -c 'x=$(setup); exec python train.py'\n", True),
        ("train() {\n    python train.py\n}\nsrun -K train\n", True),
        (f"{SETUP}export -f setup other\nsrun -K bash -c 'setup; exec python train.py'\n", False),
        (f"set -a\n{SETUP}srun -K bash -c 'setup; exec python train.py'\n", False),
        ("srun -K bash -c 'setup() { mkdir x; }; setup; exec python train.py'\n", False),
        (f'{SETUP}srun -K bash -c "$(declare -f setup); setup; exec python train.py"\n', False),
        (f"{SETUP}srun -K bash -c 'source lib.sh; setup; exec python train.py'\n", False),
        (f'{SETUP}srun -K bash -c "python train.py --port=$(setup)"\n', False),
        (f'{SETUP}PORT=$(setup)\nCMD="python train.py --port=$PORT"\nsrun -K bash -c "$CMD"\n', False),
        (f"{SETUP}bash -c 'setup'\n", False),
        ('python() {\n    command python -u "$@"\n}\nsrun -K python train.py\n', False),
        ('run() {\n    srun -K "$@"\n}\nrun python train.py\n', False),
    ],
)
def test_a_function_that_the_step_does_not_have(text: str, is_missing: bool) -> None:
    assert bool(found(HEAD + text, "function-in-step")) == is_missing


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("srun -K bash -c 'python train.py \"$@\"'\n", "error"),
        ('srun -K bash -c "python train.py $@"\n', "warning"),
        ('srun -K bash -c \'python train.py "$@"\' bash "$@"\n', ""),
        ('srun -K bash -c "python train.py $*"\n', ""),
        ("srun -K bash -c 'set -- a b; python train.py \"$@\"'\n", ""),
        ("srun -K bash -c 'run() { python \"$@\"; }; run train.py'\n", ""),
        ('CMD="python train.py $@"\nsrun -K bash -c "$CMD"\n', ""),
        ('srun -K python train.py "$@"\n', ""),
        ("srun -K bash -c 'cd /x\nexec '\"$L train.py $@\"\n", "warning"),
        ("srun -K bash -c 'python '\"$X\"' train.py \"$@\"'\n", "error"),
        ('srun -K bash -c "python train.py \\$@"\n', "error"),
        ("srun -K bash -c \"echo '\\$@'\"\n", ""),
        ("srun -K bash -c 'python train.py '\"$*\"\n", ""),
        ("ls | xargs -n1 bash -c 'gzip \"$@\"'\n", ""),
    ],
)
def test_arguments_that_bash_c_does_not_get(text: str, severity: str) -> None:
    assert [finding.severity for finding in found(HEAD + text, "arguments-lost")] == [severity] * bool(
        severity
    )


QUOTED = "export HF_TOKEN='${HF_TOKEN}' NCCL_DEBUG='$LEVEL'"


@pytest.mark.parametrize(
    ("text", "is_known"),
    [
        (f'srun -K bash -c "\n{QUOTED}\npython eval.py"\n', False),
        (f'TEXT="{QUOTED}"\nsrun -K bash -c "$TEXT; python eval.py"\n', False),
        (f'eval "{QUOTED}"\n', False),
        (f"sbatch <<EOF\n#!/bin/bash\n#SBATCH --time=60\n{QUOTED}\nEOF\n", False),
        (f"sbatch <<'EOF'\n#!/bin/bash\n#SBATCH --time=60\n{QUOTED}\nEOF\n", True),
        (f'srun -K bash -c "{QUOTED.replace("$", chr(92) + "$")}"\n', True),
    ],
)
def test_what_the_outer_shell_has_expanded_is_unknown(text: str, is_known: bool) -> None:
    """'$LEVEL' in a text in double quotes has a value, although it is in single quotes."""
    rules = ["secret-in-script", "nccl-debug-level"]
    assert {finding.rule for finding in lint(HEAD + text, rules=rules)} == (set(rules) if is_known else set())


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("srun -K python train.py | tee log\n", "set -o pipefail"),
        ("srun -K python train.py | tee log\nrm -f tmp\n", "set -eo pipefail"),
        ("set -o pipefail\nsrun -K python train.py | tee log\nrm -f tmp\n", "set -e"),
        ("srun -K python train.py\nrm -f tmp\n", "srun ... || exit, or set -e"),
        (
            "for lr in 1 2; do\n  srun -K python train.py --lr $lr\ndone\n",
            "srun ... || failed=1, and exit ${failed:-0}",
        ),
        ("srun -K bash -c 'python train.py | tee log'\n", "set -eo pipefail at the start of the text"),
        (
            "mpirun bash -c 'set -o pipefail; python train.py | tee log; date'\n",
            "set -e at the start of the text",
        ),
        ("srun -K bash -c 'set -eo pipefail; python train.py | tee log; date'\n", ""),
        ("set -o pipefail\nsrun -K python train.py | tee $(date).log\n", ""),
        ("set -o pipefail\nsrun -K python train.py |\n  tee log\n", ""),
        ("set -eo pipefail\nsrun -K python train.py | tee log\nrm -f tmp\n", ""),
        (
            "set -o pipefail\nsrun -K python train.py | tee log\nif [ $? != 0 ]; then exit 1; fi\nrm -f tmp\n",
            "",
        ),
        ("srun -K python train.py | tee log\nexit ${PIPESTATUS[0]}\n", ""),
        ("for lr in 1 2; do\n  srun -K python train.py --lr $lr || failed=1\ndone\nexit ${failed:-0}\n", ""),
        ("for lr in 1 2; do\n  srun -K python train.py --lr $lr &\ndone\nwait\n", ""),
        ("for lr in 1 2; do\n  srun -K python train.py && break\ndone\n", ""),
        ("for lr in 1 2; do\n  if [ $lr = $N ]; then\n    srun -K python train.py\n  fi\ndone\n", ""),
    ],
)
def test_the_advice_for_a_failure_that_is_not_noticed_repairs_it(text: str, advice: str) -> None:
    hidden = found(HEAD + text, "failure-hidden") + found(HEAD + text, "failure-in-pipe")
    assert [finding.problem.hint.removesuffix(" at the end") for finding in hidden] == [advice] * bool(advice)
    if advice.startswith("set"):
        command = advice.removesuffix(" at the start of the text")
        repaired = text.replace(" -c '", f" -c '{command}; ") if "text" in advice else f"{command}\n{text}"
        repaired = HEAD + repaired
        assert found(repaired, "failure-hidden") + found(repaired, "failure-in-pipe") == []


@pytest.mark.parametrize(
    ("end", "is_hidden"),
    [
        ("wait\n", True),
        ("wait\necho done\nexit $?\n", True),
        ("wait $!\n", False),
        ("wait -n\n", False),
        ("pid=$!\nwait\nwait $pid\n", False),
        ("wait\npython evaluate.py\n", False),
        ("wait\nexit $status\n", False),
    ],
)
def test_a_wait_that_returns_0(end: str, is_hidden: bool) -> None:
    assert bool(found(f"{HEAD}{TRAINING} &\n{end}", "wait-without-status")) == is_hidden


def test_a_wait_for_a_monitor_alone() -> None:
    text = f"{HEAD}srun --overlap monitor.sh &\n{TRAINING}\nwait\n"
    assert found(text, "wait-without-status") == []


@pytest.mark.parametrize(
    ("port", "bounds"),
    [
        ("MASTER_PORT=$(($RANDOM + 1024))", "1024 and 33791"),
        ('MASTER_PORT="$((RANDOM % 30000 + 10000))"', "10000 and 39999"),
        ("MASTER_PORT=$(shuf -i 20000-65000 -n 1)", "20000 and 65000"),
        ('MASTER_PORT="$(shuf -n 1 -i 1025-65535)"', "1025 and 65535"),
        ("PORT=$((RANDOM + 10000))\nMASTER_PORT=$PORT", "10000 and 42767"),
        ("MASTER_PORT=$((60000 - RANDOM % 1000))", "59001 and 60000"),
        ("srun -K torchrun --master_port=$((RANDOM + 10000)) train.py", "10000 and 42767"),
        (
            "PORT=$(shuf -i 30000-40000 -n1)\nsrun -K torchrun --rdzv_endpoint=$h:$PORT train.py",
            "30000 and 40000",
        ),
        ("MASTER_PORT=$((RANDOM % 10000 + 10000))", ""),
        ("MASTER_PORT=$(shuf -i 10000-30000 -n 1)", ""),
        ("MASTER_PORT=$(shuf -i 61000-65000 -n 1)", ""),
        ("MASTER_PORT=$(shuf -i 20000-65000 -n 1 | head -c 4)", ""),
        ("MASTER_PORT=$((BASE + RANDOM))", ""),
        ("while ss -tln | grep :$MASTER_PORT; do MASTER_PORT=$((RANDOM + 20000)); done", ""),
    ],
)
def test_ports_that_are_drawn(port: str, bounds: str) -> None:
    findings = found(f"{HEAD}{port}\n", "ephemeral-port")
    assert len(findings) == bool(bounds)
    assert all(f"between {bounds}" in finding.problem.reason for finding in findings)


@pytest.mark.parametrize(
    ("loop", "is_lost"),
    [
        ('for m in $MOUNTS; do\n    args+=("--container-mounts=$m")\ndone', True),
        ('for m in a b; do\n    args+=(--container-mounts "$m")\ndone', True),
        ('for m in $MOUNTS; do\n    args+=("$m")\ndone\nargs+=(--container-mounts=/a)', False),
        ('for m in $MOUNTS; do\n    mounts+=,$m\ndone\nargs+=(--container-mounts="$mounts")', False),
        ('for a in "$@"; do\n    case $a in /*) args+=("--container-mounts=$a") ;; esac\ndone', False),
    ],
)
def test_mounts_of_a_loop(loop: str, is_lost: bool) -> None:
    text = f'{HEAD}args=(--container-image=/a.sqsh)\n{loop}\nsrun -K "${{args[@]}}" python train.py\n'
    assert bool(found(text, "container-mounts-repeated")) == is_lost


def test_a_command_that_grows_by_a_mount_in_every_turn() -> None:
    loop = 'for mount in $MOUNTS; do\n    CMD="$CMD --container-mounts=$mount"\ndone\n'
    text = f'{HEAD}CMD="srun --container-image=$IMAGE"\n{loop}$CMD bash -c "python train.py"\n'
    [finding] = found(text, "container-mounts-repeated")
    assert (finding.line, finding.severity) == (8, "warning")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"export CUDA_VISIBLE_DEVICES=0,1\n{TRAINING}\n", "lists 2"),
        ("export CUDA_VISIBLE_DEVICES=0,1\ntorchrun train.py\n", "uses 2"),
        ("CUDA_VISIBLE_DEVICES=0 python train.py &\nCUDA_VISIBLE_DEVICES=1 python train.py &\n", "uses 2"),
        ("CUDA_VISIBLE_DEVICES=0 python train.py\npython train.py\n", ""),
        ("CUDA_VISIBLE_DEVICES=$i python train.py\n", ""),
        ("CUDA_VISIBLE_DEVICES=0 python prepare.py\n", ""),
    ],
)
def test_devices_that_the_training_does_not_see(text: str, why: str) -> None:
    findings = found(HEAD.replace("#SBATCH --nodes=2\n", "") + text, "few-gpus")
    assert len(findings) == bool(why)
    assert all(why in finding.problem.reason for finding in findings)


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("module load cuda/12\nexport LD_LIBRARY_PATH=/shared/lib\n", True),
        ("module load cuda/12\nexport LD_LIBRARY_PATH=/shared/lib:${LD_LIBRARY_PATH:-}\n", False),
        ("module load cuda/12\nexport LD_LIBRARY_PATH+=:/shared/lib\n", False),
        ("export LD_LIBRARY_PATH=/shared/lib\nmodule load cuda/12\n", False),
        ("module load cuda/12\nOLD=$LD_LIBRARY_PATH\nexport LD_LIBRARY_PATH=/shared/lib:$OLD\n", False),
        ("module load git\nexport LD_LIBRARY_PATH=/shared/lib\n", False),
        ("module purge\nexport LD_LIBRARY_PATH=/shared/lib\n", False),
    ],
)
def test_libraries_of_modules(text: str, is_lost: bool) -> None:
    assert bool(found(HEAD + text, "library-path")) == is_lost
