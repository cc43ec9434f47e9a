"""A valid batch script, and two changes for each rule: one that violates it, and one that nearly does."""

from __future__ import annotations

from dataclasses import dataclass, field

SOUND = """\
#!/bin/bash
#SBATCH --job-name=gpt3-13b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=1-00:00:00
#SBATCH --signal=B:USR2@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/shared/logs/gpt3-13b-%j.log
set -uo pipefail

# ==== environment ====
export CUDA_DEVICE_MAX_CONNECTIONS=1
export GLOO_SOCKET_IFNAME=eth0
export NCCL_DEBUG=WARN
export NCCL_IB_QPS_PER_CONNECTION=4
export NCCL_SOCKET_IFNAME==eth0
export NCCL_TOPO_FILE=/opt/microsoft/ndv5-topo.xml
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_TRACE_BUFFER_SIZE=2000
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT WORLD_SIZE=32
names=CUDA_DEVICE_MAX_CONNECTIONS,GLOO_SOCKET_IFNAME,MASTER_ADDR,MASTER_PORT,NCCL_DEBUG,NCCL_IB_QPS_PER_CONNECTION
names+=,NCCL_SOCKET_IFNAME,NCCL_TOPO_FILE,TORCH_NCCL_DUMP_ON_TIMEOUT,TORCH_NCCL_TRACE_BUFFER_SIZE,WORLD_SIZE

# ==== tasks ====
container=(
    --container-image=/shared/images/pytorch-25.03.sqsh
    --container-mounts=/shared:/shared,/opt/microsoft:/opt/microsoft:ro
    --container-env="$names"
    --no-container-mount-home
)
step=(
    --ntasks=32
    --ntasks-per-node=8
    --cpus-per-task=12
    --kill-on-bad-exit=1
)
model=(
    --num-layers 40
    --hidden-size 5120
    --num-attention-heads 40
    --seq-length 2048
    --max-position-embeddings 2048
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 4
    --sequence-parallel
    --use-distributed-optimizer
)
training=(
    --micro-batch-size 2
    --global-batch-size 1024
    --train-iters 140000
    --lr 1e-4
    --min-lr 1e-5
    --lr-warmup-iters 200
    --lr-decay-iters 140000
    --bf16
    --distributed-timeout-minutes 60
)
data=(
    --data-path /shared/tokens/corpus
    --vocab-file /shared/gpt2/vocab.json
    --merge-file /shared/gpt2/merges.txt
    --split 99,1,0
)
output=(
    --save /shared/checkpoints/gpt3-13b
    --load /shared/checkpoints/gpt3-13b
    --save-interval 500
    --exit-signal-handler
    --exit-signal SIGUSR2
    --log-throughput
)

arguments=("${model[@]}" "${training[@]}" "${data[@]}" "${output[@]}")

# ==== launch ====
srun "${step[@]}" "${container[@]}" python -u /shared/Megatron-LM/pretrain_gpt.py "${arguments[@]}" &
pid=$!
trap 'kill -USR2 "$pid"' USR2
while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
wait "$pid"
exit $?
"""

Edits = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Example:
    """Replacements in SOUND; `at` is text of the line that the finding names."""

    fails: Edits
    at: str
    passes: Edits = ()
    also: frozenset[str] = field(default_factory=frozenset)
    """Other rules that the same mistake breaks."""


def edited(edits: Edits, text: str = SOUND) -> str:
    for old, new in edits:
        assert old in text, f"{old!r} is not in the script"
        text = text.replace(old, new)
    return text


def _in(place: str, line: str) -> tuple[str, str]:
    """Another line after the one that reads `place`."""
    return f"{place}\n", f"{place}\n{line}\n"


def flag(old: str, new: str) -> Edits:
    return ((f"    {old}\n", f"    {new}\n" if new else ""),)


ENVIRONMENT = "# ==== environment ===="
TASKS = "# ==== tasks ===="
LAUNCH = "# ==== launch ===="
ADDRESS = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
IMAGE = "--container-image=/shared/images/pytorch-25.03.sqsh"
MOUNTS = "--container-mounts=/shared:/shared,/opt/microsoft:/opt/microsoft:ro"


def _started(launcher: str) -> str:
    """The training step of SOUND with another launcher."""
    return f'srun "${{step[@]}}" "${{container[@]}}" {launcher} /shared/Megatron-LM/pretrain_gpt.py "${{arguments[@]}}"'


SRUN = _started("python -u")
AFTER_SRUN = SOUND[SOUND.index("pid=$!\n") :]
NO_SIGNAL = (
    ("#SBATCH --signal=B:USR2@300\n", ""),
    ("    --exit-signal-handler\n    --exit-signal SIGUSR2\n", "    --exit-duration-in-mins 1430\n"),
)
FOREGROUND = ((f"{SRUN} &\n{AFTER_SRUN}", f"{SRUN}\n"), *NO_SIGNAL)
AGENTS = "--nproc-per-node=8 --nnodes=4"
ENDPOINT = "--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT"
MASTER = "--master-addr=$MASTER_ADDR --master-port=$MASTER_PORT"
TORCHRUN = _started(f"torchrun {AGENTS} {ENDPOINT}")
ALONE = TORCHRUN.partition('"${container[@]}" ')[2]
AGENT_PER_NODE = (
    ("    --ntasks=32\n    --ntasks-per-node=8\n", "    --ntasks=4\n    --ntasks-per-node=1\n"),
)
PREPARE = "prepare() {\n    mkdir -p /tmp/cache\n}\n"

EXAMPLES: dict[str, Example] = {
    # ---- directives ----
    "directive-after-command": Example(
        fails=(("#SBATCH --job-name=gpt3-13b\n", "set -e\n#SBATCH --job-name=gpt3-13b\n"),),
        at="--",
        passes=(_in(ENVIRONMENT, "cat <<END > /shared/next.sh\n#!/bin/bash\n#SBATCH --nodes=1\nEND\n"),),
        also=frozenset({"no-time-limit", "world-size"}),
    ),
    "directive-spelling": Example(
        fails=(_in("#SBATCH --mem=0", "#SBACTH --partition=hpc"),),
        at="#SBACTH",
        passes=(_in("#SBATCH --mem=0", "##SBATCH --partition=hpc"),),
    ),
    "directive-unknown": Example(
        fails=(_in("#SBATCH --mem=0", "#SBATCH --mail-tpye=ALL"),),
        at="--mail-tpye",
        passes=(_in("#SBATCH --mem=0", "#SBATCH --mail-ty=ALL --container-name=x --private-tmp"),),
    ),
    "directive-value": Example(
        fails=(("#SBATCH --time=1-00:00:00", "#SBATCH --time=24h"),),
        at="--time=24h",
        passes=(("#SBATCH --time=1-00:00:00", "#SBATCH --time=UNLIMITED"),),
    ),
    "time-reading": Example(
        fails=(("#SBATCH --time=1-00:00:00", "#SBATCH --time=24:00"),),
        at="--time=24:00",
        passes=(("#SBATCH --time=1-00:00:00", "#SBATCH --time=90:00"),),
    ),
    "directive-placeholder": Example(
        fails=(_in("#SBATCH --mem=0", "#SBATCH --account=<project_id>"),),
        at="--account",
        passes=(_in("#SBATCH --mem=0", "#SBATCH --account=yourte --partition=young --comment=<project_id>"),),
    ),
    "exclusive-options": Example(
        fails=(_in("#SBATCH --mem=0", "#SBATCH --mem-per-cpu=4G"),),
        at="--mem-per-cpu",
        passes=(("#SBATCH --mem=0", "#SBATCH --mem-per-cpu=4G"),),
    ),
    "directive-cut": Example(
        fails=(_in("#SBATCH --mem=0", "#SBATCH --comment=nvcr.io#nvidia/pytorch"),),
        at="nvcr.io",
        passes=(_in("#SBATCH --mem=0", "#SBATCH --comment=nvcr.io\\#nvidia# the image"),),
    ),
    "directive-variable": Example(
        fails=(("--output=/shared/logs/", "--output=$HOME/logs/"),),
        at="$HOME",
        passes=(("--output=/shared/logs/", "--output=/home/%u/logs/"),),
    ),
    "directive-twice": Example(
        fails=(_in("#SBATCH --mem=0", "#SBATCH -N 8"),),
        at="-N 8",
        passes=(
            _in(
                "#SBATCH --mem=0",
                "#SBATCH --mail-type=END\n#SBATCH --mail-type=FAIL\n#SBATCH hetjob\n#SBATCH -N 1",
            ),
        ),
        also=frozenset({"parallel-sizes", "world-size"}),
    ),
    "no-shebang": Example(
        fails=(("#!/bin/bash\n", "# a job\n"),), at="# a job", passes=(("#!/bin/bash", "#! /bin/sh"),)
    ),
    "empty-script": Example(fails=((SOUND, " \n\n"),), at="", passes=((SOUND, "#!/bin/bash\n"),)),
    "dos-line-ends": Example(
        fails=(("#SBATCH --mem=0\n", "#SBATCH --mem=0\r\n"),),
        at="--mem",
        passes=(("# ==== tasks ====", "# a\\r b"),),
    ),
    "no-time-limit": Example(
        fails=(("#SBATCH --time=1-00:00:00\n", ""),),
        at="#SBATCH --job-name",
        passes=(("#SBATCH --time=1-00:00:00", "#SBATCH -t 30"),),
    ),
    "signal-to-steps": Example(
        fails=(
            ("B:USR2@300", "USR2@300"),
            (SRUN, TORCHRUN),
            ("    --ntasks=32\n    --ntasks-per-node=8\n", "    --ntasks=4\n"),
        ),
        at="--signal",
        passes=(
            ("B:USR2@300", "USR2@300"),
            (
                f"{SRUN} &\n{AFTER_SRUN}",
                "srun --kill-on-bad-exit=1 bash -c 'OMP_NUM_THREADS=4 numactl -l python pretrain_gpt.py --bf16'\n",
            ),
        ),
        also=frozenset({"signal-not-to-script"}),
    ),
    "signal-not-to-script": Example(
        fails=(("B:USR2@300", "USR2@300"),),
        at="--signal",
        passes=(("B:USR2@300", "USR2@300"), ("' USR2\n", "' EXIT\n")),
    ),
    "signal-not-trapped": Example(
        fails=(("trap 'kill -USR2 \"$pid\"' USR2\n", ""),),
        at="--signal",
        passes=(("trap 'kill -USR2 \"$pid\"' USR2\n", "source /shared/tools/common.sh\n"),),
    ),
    "signal-too-late": Example(fails=(("@300", "@30"),), at="--signal", passes=(("@300", "@90"),)),
    "foreground-step": Example(
        fails=((f"{SRUN} &\n{AFTER_SRUN}", f"trap 'touch stop' USR2\n{SRUN}\n"),),
        at="srun",
        passes=((f"{SRUN} &\n{AFTER_SRUN}", f"{SRUN}\n"),),  # without a trap there is nothing to wait for
    ),
    "log-truncated": Example(
        fails=(("#SBATCH --open-mode=append\n", ""),),
        at="--requeue",
        passes=(("#SBATCH --requeue\n#SBATCH --open-mode=append", "#SBATCH --no-requeue"),),
    ),
    "log-shared": Example(
        fails=(
            ("gpt3-13b-%j.log", "gpt3-13b.log"),
            ("#SBATCH --requeue\n#SBATCH --open-mode=append", "#SBATCH --no-requeue"),
        ),
        at="--output",
        passes=(
            ("/shared/logs/gpt3-13b-%j.log", "/dev/null"),
            ("#SBATCH --requeue\n#SBATCH --open-mode=append", "#SBATCH --no-requeue"),
        ),
    ),
    "log-directory": Example(
        fails=(("/shared/logs/gpt3", "./logs/gpt3"),),
        at="--output",
        passes=(("/shared/logs/gpt3", "./gpt3"),),
    ),
    "few-cpus": Example(
        fails=(("cpus-per-task=12", "cpus-per-task=1"),),
        at="--cpus-per-task",
        passes=(("#SBATCH --cpus-per-task=12\n", ""),),  # the cluster may have a default per GPU
    ),
    "task-count": Example(
        fails=(_in("#SBATCH --mem=0", "#SBATCH --ntasks=16"),),
        at="--ntasks=16",
        passes=(_in("#SBATCH --mem=0", "#SBATCH -n 32"),),
    ),
    "container-directive": Example(
        fails=(_in("#SBATCH --mem=0", "#SBATCH --container-image=/shared/a.sqsh"),),
        at="#SBATCH --container-image",
        passes=(_in("#SBATCH --mem=0", "##SBATCH --container-image=/shared/a.sqsh"),),
    ),
    "array-index": Example(
        fails=(_in("#SBATCH --mem=0", "#SBATCH --array=0-1999%8"),),
        at="--array",
        passes=(_in("#SBATCH --mem=0", "#SBATCH --array=0-1000%2000"),),
    ),
    "export-none": Example(
        fails=(_in("#SBATCH --mem=0", "#SBATCH --export=NONE"),),
        at="srun",
        passes=(
            _in("#SBATCH --mem=0", "#SBATCH --export=NONE"),
            ("    --ntasks=32\n", "    --ntasks=32\n    --export=ALL\n"),
        ),
    ),
    # ---- steps ----
    "no-kill-on-bad-exit": Example(
        fails=flag("--kill-on-bad-exit=1", ""), at="srun", passes=flag("--kill-on-bad-exit=1", "-K1")
    ),
    "cpus-not-inherited": Example(
        fails=flag("--cpus-per-task=12", "--cpu-bind=cores"),
        at="srun",
        passes=flag("--cpus-per-task=12", "--cpu-bind=mask_cpu:0xff,0xff00"),
    ),
    "step-tasks": Example(
        fails=(
            ("#SBATCH --ntasks-per-node=8", "#SBATCH --ntasks-per-node=1"),
            *flag("--ntasks=32", ""),
            *flag("--cpus-per-task=12", "--cpus-per-task=1"),
        ),
        at="--ntasks-per-node=8",
        passes=(("#SBATCH --ntasks-per-node=8\n", ""), *flag("--ntasks=32", "")),
        also=frozenset({"world-size", "parallel-sizes", "few-cpus", "batch-size"}),
    ),
    "kill-srun": Example(
        fails=(("kill -USR2", "kill -TERM"),),
        at="trap",
        passes=(_in(LAUNCH, "srun ./serve --port 80 &\nserver=$!\nkill $server"),),
    ),
    "no-wait": Example(
        fails=((AFTER_SRUN[AFTER_SRUN.index("while") :], "echo started\n"),),
        at="srun",
        passes=((AFTER_SRUN[AFTER_SRUN.index("while") :], "while true; do sleep 60; done\n"),),
    ),
    "wait-interrupted": Example(
        fails=(('while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done\n', ""),),
        at="wait",
        passes=(
            ('while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done\n', ""),
            ("trap 'kill -USR2 \"$pid\"'", 'trap \'kill -USR2 "$pid"; wait "$pid"\''),
        ),
    ),
    "step-outside-srun": Example(
        fails=((SRUN, ALONE),),
        at="torchrun",
        passes=((SRUN, f"mpirun {ALONE}"),),
        also=frozenset({"foreground-step"}),
    ),
    "too-many-agents": Example(
        # a job of 8 tasks a node, where srun ignores its own --ntasks-per-node
        fails=((SRUN, TORCHRUN), ("    --ntasks=32\n    --ntasks-per-node=8\n", "    --ntasks-per-node=1\n")),
        at="srun",
        passes=(
            (SRUN, TORCHRUN),
            ("    --ntasks=32\n    --ntasks-per-node=8\n", "    --ntasks=4\n    --ntasks-per-node=1\n"),
        ),
        also=frozenset({"step-tasks"}),
    ),
    "fixed-port": Example(
        fails=(
            ("MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))", "MASTER_PORT=29500"),
            ("#SBATCH --exclusive\n", ""),
            ("--gpus-per-node=8", "--gpus-per-node=2"),
        ),
        at="MASTER_PORT=29500",
        passes=(("MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))", "MASTER_PORT=29500"),),  # exclusive nodes
    ),
    "rdzv-endpoint": Example(
        fails=(
            (SRUN, _started(f"torchrun {AGENTS} --rdzv-backend=c10d {MASTER}")),
            ("    --ntasks=32\n    --ntasks-per-node=8\n", "    --ntasks=4\n"),
        ),
        at="srun",
        passes=(
            (
                SRUN,
                _started(f"torchrun {AGENTS} --rdzv-backend=static {MASTER}"),
            ),
            ("    --ntasks=32\n    --ntasks-per-node=8\n", "    --ntasks=4\n"),
        ),
    ),
    "ephemeral-port": Example(
        fails=(("10000 + SLURM_JOB_ID % 20000", "15000 + SLURM_JOB_ID % 20000"),),
        at="MASTER_PORT=",
        passes=(("10000 + SLURM_JOB_ID % 20000", "12000 + SLURM_JOB_ID % 20000"),),
    ),
    "port-range": Example(
        fails=(("$((10000 + SLURM_JOB_ID % 20000))", "$((10000 + ${SLURM_JOB_ID: -4}))"),),
        at="MASTER_PORT=",
        passes=(("$((10000 + SLURM_JOB_ID % 20000))", "$((10000 + 10#${SLURM_JOB_ID: -4}))"),),
    ),
    "localhost-master": Example(
        fails=((ADDRESS, "MASTER_ADDR=127.0.0.1"),),
        at="MASTER_ADDR=",
        passes=((ADDRESS, f"MASTER_ADDR=127.0.0.1\n[[ $SLURM_NNODES == 1 ]] || {ADDRESS}"),),
    ),
    "nodelist-as-host": Example(
        fails=((ADDRESS, 'MASTER_ADDR="$SLURM_JOB_NODELIST"'),),
        at="MASTER_ADDR=",
        passes=((ADDRESS, "MASTER_ADDR=$SLURMD_NODENAME"),),
    ),
    "nodes-array": Example(
        fails=(
            _in(
                TASKS,
                'nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))\nall=($nodes)\necho "${all[1]}"',
            ),
        ),
        at="all=",
        passes=(
            _in(
                TASKS,
                'nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))\nall=($nodes)\necho "${all[0]}"',
            ),
        ),
    ),
    "port-of-each-task": Example(
        fails=(
            (
                SRUN,
                "srun --kill-on-bad-exit=1 bash -c 'export MASTER_PORT=$(shuf -i 10000-20000 -n 1); exec ./train'",
            ),
        ),
        at="shuf",
        passes=(
            (
                SRUN,
                'srun --kill-on-bad-exit=1 bash -c "export MASTER_PORT=$(shuf -i 10000-20000 -n 1); exec ./train"',
            ),
        ),
    ),
    "gpu-count": Example(
        fails=(
            ("--gpus-per-node=8", "--gpus-per-node=h100:8"),
            _in(TASKS, 'echo "$SLURM_GPUS_PER_NODE GPUs"'),
        ),
        at="SLURM_GPUS_PER_NODE",
        passes=(_in(TASKS, 'echo "$SLURM_GPUS_PER_NODE GPUs"'),),
    ),
    "world-size": Example(
        fails=(("WORLD_SIZE=32", "WORLD_SIZE=8"),),
        at="WORLD_SIZE=8",
        passes=(("WORLD_SIZE=32", "WORLD_SIZE=$((SLURM_NNODES * 8))"),),
    ),
    "check-ignored": Example(
        fails=(_in(LAUNCH, "bash /shared/tools/node_health.sh || true"),),
        at="node_health",
        passes=(_in(LAUNCH, "dcgmi profile --pause\nbash /shared/tools/node_health.sh || exit 1"),),
    ),
    "array-exported": Example(
        fails=(_in(LAUNCH, "export HOSTS=(a b)\nsrun -K bash -c './serve ${HOSTS[0]}'"),),
        at="HOSTS[0]",
        passes=(_in(LAUNCH, 'export HOSTS=(a b)\nsrun -K bash -c "./serve ${HOSTS[0]}"'),),
    ),
    "array-in-sh": Example(
        fails=(("#!/bin/bash\n", "#!/bin/sh\n"),),
        at="container=(",
        passes=(("#!/bin/bash\n", "#!/usr/bin/env bash\n"),),
    ),
    "comment-in-quotes": Example(
        fails=(_in(LAUNCH, 'srun -K bash -c "./serve \\\n    # --quiet \\\n    --port 7"'),),
        at="# --quiet",
        passes=(_in(LAUNCH, 'srun -K bash -c "./serve \\\n    --port 7 \\\n    # --quiet"'),),
    ),
    "continuation-lost": Example(
        fails=(_in(LAUNCH, "rsync -a /shared/code \\\n    # --quiet \\\n    /scratch/code"),),
        at="/scratch/code",
        passes=(
            _in(
                LAUNCH,
                "rsync -a /shared/code /a && \\\n    # then\n    rsync -a /a /b \\\n    # --quiet\nsync",
            ),
        ),
    ),
    "failure-in-pipe": Example(
        fails=(*FOREGROUND, (f"{SRUN}\n", f"{SRUN} | tee /shared/log\n"), ("set -uo pipefail\n", "set -u\n")),
        at="srun",
        passes=(*FOREGROUND, (f"{SRUN}\n", f"{SRUN} | tee /shared/log\n")),
    ),
    "failure-hidden": Example(
        fails=(*FOREGROUND, (f"{SRUN}\n", f"{SRUN}\necho trained\n")),
        at="srun",
        passes=(*FOREGROUND, (f"{SRUN}\n", f"{SRUN}\nstatus=$?\necho trained\nexit $status\n")),
    ),
    "rank-of-batch-shell": Example(
        fails=(_in(LAUNCH, 'srun --ntasks-per-node=2 ./check --rank "$SLURM_PROCID"'),),
        at="SLURM_PROCID",
        passes=(
            (SRUN, _started(f'torchrun --rdzv-backend=c10d --node_rank "$SLURM_NODEID" {AGENTS} {ENDPOINT}')),
        ),
    ),
    "directory-by-date": Example(
        fails=(("/shared/checkpoints/gpt3-13b", "/shared/runs/$(date +%F-%H%M)"),),
        at="--",
        passes=(("/shared/checkpoints/gpt3-13b", "/shared/runs/$SLURM_JOB_ID"),),
    ),
    "requeue-overwrites": Example(
        fails=(
            _in(LAUNCH, "srun -n1 python train.py --output_dir /shared/run --overwrite_output_dir || exit"),
        ),
        at="--overwrite_output_dir",
        passes=(
            _in(
                LAUNCH,
                "srun -n1 python train.py --output_dir /shared/run --overwrite_output_dir --resume_from_checkpoint a",
            ),
        ),
        also=frozenset({"foreground-step"}),
    ),
    "hosts-appended": Example(
        fails=(_in(LAUNCH, "echo n1 >> hosts-$SLURM_JOB_ID\n./check --hostfile hosts-$SLURM_JOB_ID"),),
        at=">> hosts",
        passes=(_in(LAUNCH, "rm -f hosts\necho n1 >> hosts\n./check --hostfile hosts\necho n1 >> names"),),
    ),
    "few-gpus": Example(
        fails=(
            _in(ENVIRONMENT, "export CUDA_VISIBLE_DEVICES=0,1"),
            ("NCCL_DEBUG,", "NCCL_DEBUG,CUDA_VISIBLE_DEVICES,"),
        ),
        at="CUDA_VISIBLE_DEVICES",
        passes=(_in(ENVIRONMENT, "export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7"),),
    ),
    "resubmits-itself": Example(
        fails=(_in(LAUNCH, 'sbatch --dependency=singleton "$0"'),),
        at="singleton",
        passes=(_in(LAUNCH, '[[ -e /shared/progress ]] && sbatch --dependency=singleton "$0"'),),
    ),
    "script-directory": Example(
        fails=(_in(LAUNCH, 'HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\nsource "$HERE/common.sh"'),),
        at="HERE=",
        passes=(_in(LAUNCH, 'HERE=${SLURM_SUBMIT_DIR:-$(dirname "$0")}\nmkdir -p "$HERE/logs"'),),
    ),
    "local-rank": Example(
        fails=(
            ("--gpus-per-node=8", "--gpus-per-task=1"),
            (SRUN, "srun -n32 -K bash -c 'LOCAL_RANK=$SLURM_LOCALID exec python train.py'"),
        ),
        at="--gpus-per-task",
        passes=((SRUN, "srun -n32 -K bash -c 'LOCAL_RANK=$SLURM_LOCALID exec python train.py'"),),
    ),
    "launch-twice": Example(
        fails=(_in(LAUNCH, "srun --ntasks=1 bash -c 'srun --ntasks=1 hostname'"),),
        at="hostname",
        passes=(_in(LAUNCH, "srun --ntasks=1 bash -c 'hostname'"),),
    ),
    # ---- what reaches a step ----
    "signal-not-forwarded": Example(
        fails=(('kill -USR2 "$pid"\' USR2', 'echo "time is nearly up"\' USR2'),),
        at="trap",
        passes=(('kill -USR2 "$pid"\' USR2', 'echo "time is nearly up"; kill -USR2 "$pid"\' USR2'),),
    ),
    "host-address": Example(
        fails=((ADDRESS, "MASTER_ADDR=$(hostname --ip-address)"),),
        at="MASTER_ADDR=",
        passes=((ADDRESS, "MASTER_ADDR=$(hostname -I | cut -d' ' -f1)"),),
    ),
    "launch-deprecated": Example(
        fails=((SRUN, _started(f"python -m torch.distributed.launch {AGENTS} {ENDPOINT}")), *AGENT_PER_NODE),
        at="torch.distributed.launch",
        passes=((SRUN, _started(f"python -m torch.distributed.run {AGENTS} {ENDPOINT}")), *AGENT_PER_NODE),
    ),
    "function-in-step": Example(
        fails=(_in(LAUNCH, f"{PREPARE}srun --ntasks=4 bash -c 'prepare'"),),
        at="bash -c",
        passes=(_in(LAUNCH, f"{PREPARE}export -f prepare\nsrun --ntasks=4 bash -c 'prepare'"),),
    ),
    "arguments-lost": Example(
        fails=(_in(LAUNCH, "srun --ntasks=4 bash -c 'mkdir -p \"$@\"'"),),
        at="mkdir",
        passes=(_in(LAUNCH, "srun --ntasks=4 bash -c 'mkdir -p \"$@\"' bash /tmp/cache"),),
    ),
    "wait-without-status": Example(
        fails=((f"{SRUN} &\n{AFTER_SRUN}", f"{SRUN} &\nwait\n"), *NO_SIGNAL),
        at="wait",
        passes=((f"{SRUN} &\n{AFTER_SRUN}", f"{SRUN} &\nwait $!\n"), ("#SBATCH --signal=B:USR2@300\n", "")),
    ),
    # ---- containers ----
    "container-env-gap": Example(
        fails=((",NCCL_TOPO_FILE,", ","),),
        at="--container-env",
        passes=(('    --container-env="$names"\n', ""),),  # a script that names none
    ),
    "container-env-value": Example(
        fails=(('--container-env="$names"', '--container-env="$names,NCCL_ALGO=Ring"'),),
        at="NCCL_ALGO",
        passes=(('--container-env="$names"', '--container-env "$names"'),),
    ),
    "container-env-path": Example(
        fails=(('--container-env="$names"', '--container-env="$names,PATH"'),),
        at=",PATH",
        passes=(('--container-env="$names"', '--container-env="$names,PYTHONPATH"'),),
    ),
    "container-mounts-repeated": Example(
        fails=((MOUNTS, f"--container-mounts=/opt/microsoft\n    {MOUNTS}"),),
        at=MOUNTS,
        passes=((MOUNTS, f"{MOUNTS},/scratch:/scratch"),),
    ),
    "container-without-image": Example(
        fails=((f"    {IMAGE}\n", ""),),
        at=MOUNTS,
        passes=((IMAGE, "--container-name=pytorch"),),
    ),
    "container-option": Example(
        fails=((IMAGE, "--container=nvcr.io#nvidia/pytorch:25.03-py3"),),
        at="--container=",
        passes=((IMAGE, f"{IMAGE}\n    --container=/shared/bundle"),),
        also=frozenset({"container-without-image"}),
    ),
    "image-path": Example(
        fails=((IMAGE, "--container-image=images/pytorch.sqsh"),),
        at="images/",
        passes=((IMAGE, "--container-image=../../pytorch.sqsh"),),
    ),
    "image-empty": Example(
        fails=(_in(ENVIRONMENT, "CONTAINER_IMAGE="), (IMAGE, '--container-image="$CONTAINER_IMAGE"')),
        at="container-image",
        passes=(
            _in(ENVIRONMENT, "CONTAINER_IMAGE=\n[[ -n $CONTAINER_IMAGE ]] || exit 1"),
            (IMAGE, '--container-image="$CONTAINER_IMAGE"'),
        ),
    ),
    "image-pin": Example(
        fails=((IMAGE, "--container-image=nvcr.io#nvidia/pytorch:latest"),),
        at="latest",
        passes=(_in(ENVIRONMENT, "CONTAINER_IMAGE="), (IMAGE, '--container-image="$CONTAINER_IMAGE"')),
    ),
    "image-registry": Example(
        fails=((IMAGE, "--container-image=nvcr.io/nvidia/pytorch:25.03-py3"),),
        at="nvcr.io",
        passes=((IMAGE, "--container-image=nvidia/cuda:12.8.0-base-ubuntu24.04"),),
    ),
    "image-name": Example(
        fails=((IMAGE, "--container-image=nvcr.io#NVIDIA/pytorch:25.03-py3"),),
        at="NVIDIA",
        passes=((IMAGE, "--container-image=nvcr.io#nvidia/pytorch:25.03-PY3"),),
    ),
    "mount-source": Example(
        fails=((MOUNTS, f"{MOUNTS},~/code:/code"),),
        at="~/code",
        passes=(
            (
                MOUNTS,
                f"{MOUNTS},your_mounts,./a:/a,tmpfs:/scratch,'/a b':/b,$HOME/code:/code,$(realpath -- c,d):/e",
            ),
        ),
    ),
    "mount-flags": Example(
        fails=((MOUNTS, f"{MOUNTS}:z"),), at=":ro:z", passes=((MOUNTS, f"{MOUNTS}+noexec"),)
    ),
    "mount-target-twice": Example(
        fails=((MOUNTS, f"{MOUNTS},/scratch/shared:/shared"),),
        at="/scratch",
        passes=((MOUNTS, f"{MOUNTS},/shared:/data"),),
    ),
    "mount-unset": Example(
        fails=(
            (
                "    --no-container-mount-home\n",
                "    --no-container-mount-home\n    --container-workdir $WORKDIR\n",
            ),
        ),
        at="$WORKDIR",
        passes=(
            _in(ENVIRONMENT, ': "${WORKDIR:=/workspace}"'),
            (
                "    --no-container-mount-home\n",
                "    --no-container-mount-home\n    --container-workdir $WORKDIR --container-save $PWD\n",
            ),
        ),
    ),
    "container-settings-twice": Example(
        fails=(_in(ENVIRONMENT, "export PYXIS_CONTAINER_MOUNTS=/data:/data"),),
        at=MOUNTS,
        passes=(
            _in(ENVIRONMENT, "export PYXIS_CONTAINER_MOUNTS=/data:/data"),
            (MOUNTS, f'{MOUNTS},"$PYXIS_CONTAINER_MOUNTS"'),
        ),
    ),
    "container-writable": Example(
        fails=flag(
            "--no-container-mount-home", "--no-container-mount-home --container-writable --container-readonly"
        ),
        at="--container-writable",
        passes=flag("--no-container-mount-home", "--no-container-mount-home --container-readonly"),
    ),
    "topology-not-mounted": Example(
        fails=((",/opt/microsoft:/opt/microsoft:ro", ""),),
        at="NCCL_TOPO_FILE",
        passes=(_in(LAUNCH, "srun --ntasks=8 --container-image=/shared/nccl.sqsh all_reduce_perf -b 8"),),
    ),
    "path-not-mounted": Example(
        fails=(("--save /shared/checkpoints", "--save /checkpoints"),),
        at="--save",
        passes=(("--save /shared/checkpoints", "--save $WORK/checkpoints"),),
    ),
    # ---- environment ----
    "misspelt-variable": Example(
        fails=(_in(ENVIRONMENT, "export NCCL_MIN_CHANNELS=32"),),
        at="NCCL_MIN_CHANNELS",
        passes=(_in(ENVIRONMENT, "NCCL_MIN_CHANNELS=32 # not exported"),),
        also=frozenset({"container-env-gap"}),
    ),
    "renamed-variable": Example(
        fails=(
            _in(ENVIRONMENT, "export NCCL_BLOCKING_WAIT=1"),
            ("NCCL_DEBUG,", "NCCL_DEBUG,NCCL_BLOCKING_WAIT,"),
        ),
        at="NCCL_BLOCKING_WAIT",
        passes=(
            _in(ENVIRONMENT, "export TORCH_NCCL_BLOCKING_WAIT=1"),
            ("NCCL_DEBUG,", "NCCL_DEBUG,TORCH_NCCL_BLOCKING_WAIT,"),
        ),
    ),
    "nccl-debug-level": Example(
        fails=(("=WARN", "=ERROR"),), at="NCCL_DEBUG", passes=(("=WARN", "=version"),)
    ),
    "variable-value": Example(
        fails=(
            _in(ENVIRONMENT, "export NCCL_IB_TIMEOUT=200"),
            ("NCCL_DEBUG,", "NCCL_DEBUG,NCCL_IB_TIMEOUT,"),
        ),
        at="NCCL_IB_TIMEOUT",
        passes=(
            _in(ENVIRONMENT, 'export NCCL_IB_TIMEOUT=22 FI_PROVIDER="$PROVIDER"'),
            ("NCCL_DEBUG,", "NCCL_DEBUG,NCCL_IB_TIMEOUT,FI_PROVIDER,"),
        ),
    ),
    "nccl-debug-flood": Example(
        fails=(("=WARN", "=INFO"),),
        at="NCCL_DEBUG",
        passes=(("=WARN", "=INFO\nexport NCCL_DEBUG_FILE=/shared/logs/nccl.%h.%p"),),
    ),
    "debugging-left-on": Example(
        fails=(
            _in(ENVIRONMENT, "export CUDA_LAUNCH_BLOCKING=1"),
            ("NCCL_DEBUG,", "NCCL_DEBUG,CUDA_LAUNCH_BLOCKING,"),
        ),
        at="CUDA_LAUNCH_BLOCKING",
        passes=(
            _in(ENVIRONMENT, "export CUDA_LAUNCH_BLOCKING=0"),
            _in(LAUNCH, "if [[ -n ${DEBUG:-} ]]; then export CUDA_LAUNCH_BLOCKING=1; fi"),
        ),
    ),
    "few-nics": Example(
        fails=(
            _in(ENVIRONMENT, "export NCCL_IB_HCA=mlx5_0:1,mlx5_1:1"),
            ("NCCL_DEBUG,", "NCCL_DEBUG,NCCL_IB_HCA,"),
        ),
        at="NCCL_IB_HCA",
        passes=(_in(ENVIRONMENT, "export NCCL_IB_HCA=mlx5_ib"), ("NCCL_DEBUG,", "NCCL_DEBUG,NCCL_IB_HCA,")),
    ),
    "transport-off": Example(
        fails=(
            _in(ENVIRONMENT, "export NCCL_P2P_DISABLE=1"),
            ("NCCL_DEBUG,", "NCCL_DEBUG,NCCL_P2P_DISABLE,"),
        ),
        at="NCCL_P2P_DISABLE",
        passes=(_in(ENVIRONMENT, "export NCCL_P2P_DISABLE=1"), ("pretrain_gpt.py", "loopback.py")),
    ),
    "gloo-interface": Example(
        fails=(("GLOO_SOCKET_IFNAME=eth0", "GLOO_SOCKET_IFNAME==eth0"),),
        at="GLOO_SOCKET_IFNAME",
        passes=(("export GLOO_SOCKET_IFNAME=eth0\n", ""),),
    ),
    "collnet-with-sharp": Example(
        fails=(
            _in(ENVIRONMENT, "export NCCL_COLLNET_ENABLE=1"),
            ("NCCL_DEBUG,", "NCCL_DEBUG,NCCL_COLLNET_ENABLE,"),
            *flag("--log-throughput", "--log-throughput --use-sharp"),
        ),
        at="NCCL_COLLNET_ENABLE",
        passes=flag("--log-throughput", "--log-throughput --use-sharp"),
    ),
    "flight-recorder": Example(
        fails=(("export TORCH_NCCL_TRACE_BUFFER_SIZE=2000\n", ""),),
        at="TORCH_NCCL_DUMP_ON_TIMEOUT",
        passes=(("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),),
    ),
    "offline-hub": Example(
        fails=flag("--log-throughput", "--log-throughput --tokenizer-model meta-llama/Llama-3.1-8B"),
        at="meta-llama",
        passes=flag("--log-throughput", "--log-throughput --tokenizer-model /shared/llama3"),
    ),
    "secret-in-script": Example(
        fails=(_in(ENVIRONMENT, "export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567"),),
        at="WANDB_API_KEY",
        passes=(
            _in(
                ENVIRONMENT,
                "export WANDB_API_KEY=CHANGE_THIS PAD_TOKEN=padding HF_TOKEN=$(cat ~/.tok) S3_SECRET_FILE=/run/s3",
            ),
        ),
    ),
    "secret-argument": Example(
        fails=(_in(LAUNCH, 'huggingface-cli login --token "$HF_TOKEN" || exit 1'),),
        at="--token",
        passes=(
            _in(
                LAUNCH,
                '[[ -n ${HF_TOKEN:-} ]] || grep -q nvcr "$ENROOT_CREDENTIALS" || ./x --moe "$MOE_TOKEN_DISPATCHER"',
            ),
        ),
    ),
    "trace-with-secrets": Example(
        fails=(("set -uo pipefail", "set -uxo pipefail\nexport HF_TOKEN=$(cat ~/.token)"),),
        at="set -uxo",
        passes=(("set -uo pipefail", "set -uxo pipefail\nset +x\nexport HF_TOKEN=$(cat ~/.token)\nset -x"),),
    ),
    "environment-in-log": Example(
        fails=(_in(LAUNCH, 'echo "$(printenv)" >> /shared/logs/environment'),),
        at="printenv",
        passes=(_in(LAUNCH, "env | grep ^NCCL_"),),
    ),
    "library-path": Example(
        fails=(_in(ENVIRONMENT, "module load cuda/12.8\nexport LD_LIBRARY_PATH=/shared/lib"),),
        at="LD_LIBRARY_PATH",
        passes=(
            _in(ENVIRONMENT, "module load cuda/12.8\nexport LD_LIBRARY_PATH=/shared/lib:$LD_LIBRARY_PATH"),
        ),
    ),
    # ---- Megatron-LM ----
    "megatron-option": Example(
        fails=flag("--log-throughput", "--log-throughput --data-parallel-size 4"),
        at="--data-parallel-size",
        passes=flag("--log-throughput", "--log-throughput --override-opt_param-scheduler"),
    ),
    "megatron-removed-option": Example(
        fails=flag("--log-throughput", "--log-throughput --checkpoint-activations"),
        at="--checkpoint-activations",
        passes=flag("--log-throughput", "--log-throughput --recompute-activations"),
    ),
    "model-shape": Example(
        fails=(("--max-position-embeddings 2048", "--max-position-embeddings 1024"),),
        at="--max-position-embeddings",
        passes=(("--max-position-embeddings 2048", "--max-position-embeddings 4096"),),
    ),
    "parallel-sizes": Example(
        fails=(("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 16"),),
        at="--pipeline-model-parallel-size",
        passes=(("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 8"),),
    ),
    "batch-size": Example(
        fails=(("--global-batch-size 1024", "--global-batch-size 1020"),),
        at="--global-batch-size",
        passes=(("--global-batch-size 1024", "--global-batch-size 1020 --rampup-batch-size 16 8 1000"),),
    ),
    "tensor-parallel-across-nodes": Example(
        fails=(
            ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 16"),
            ("--num-attention-heads 40", "--num-attention-heads 80"),
            ("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 2"),
        ),
        at="--tensor-model-parallel-size",
        passes=(
            ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 8"),
            ("--num-attention-heads 40", "--num-attention-heads 80"),
            ("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 2"),
            ("--gpus-per-node=8", "--gpus-per-node=4"),
        ),
    ),
    "learning-rate": Example(
        fails=(("--min-lr 1e-5", "--min-lr 1e-3"),),
        at="--min-lr",
        passes=(("--min-lr 1e-5", "--min-lr 0.0001"),),
    ),
    "decay-beyond-run": Example(
        fails=(("--lr-decay-iters 140000", "--lr-decay-iters 430000"),),
        at="--lr-decay-iters",
        passes=(("--lr-decay-iters 140000", "--lr-decay-iters 120000"),),
    ),
    "positions-fixed": Example(
        fails=(("--seq-length 2048", '--seq-length "${SEQ_LENGTH:-2048}"'),),
        at="--max-position-embeddings",
        passes=(("2048", '"${SEQ_LENGTH:-2048}"'),),
    ),
    "fp16": Example(
        fails=(*flag("--bf16", "--fp16"), ("gpus-per-node=8", "gpus-per-node=h100:8")),
        at="--fp16",
        passes=flag("--bf16", "--fp16"),
    ),
    "merge-file": Example(
        fails=(("merges.txt", "vocab.json"),), at="--merge-file", passes=(("merges.txt", "gpt2-merges.bpe"),)
    ),
    "max-connections": Example(
        fails=(("export CUDA_DEVICE_MAX_CONNECTIONS=1\n", ""),),
        at="srun",
        passes=(
            ("export CUDA_DEVICE_MAX_CONNECTIONS=1\n", ""),
            ("python -u", "env CUDA_DEVICE_MAX_CONNECTIONS=1 python -u"),
        ),
    ),
    "activation-offload": Example(
        fails=flag(
            "--log-throughput",
            "--log-throughput --fine-grained-activation-offloading --offload-modules core_attn",
        ),
        at="--fine-grained-activation-offloading",
        passes=flag("--log-throughput", "--log-throughput --recompute-granularity selective"),
    ),
    "document-mask-ignored": Example(
        fails=flag("--log-throughput", "--log-throughput --reset-attention-mask"),
        at="--reset-attention-mask",
        passes=flag(
            "--log-throughput", "--log-throughput --reset-attention-mask --dataloader-inter-document-masking"
        ),
    ),
    "fsdp-connections": Example(
        fails=flag("--log-throughput", "--log-throughput --use-torch-fsdp2"),
        at="CUDA_DEVICE_MAX_CONNECTIONS",
        passes=(
            *flag("--log-throughput", "--log-throughput --use-torch-fsdp2"),
            ("CONNECTIONS=1\n", "CONNECTIONS=8\n"),
        ),
    ),
    "checkpoint-worker": Example(
        fails=flag("--log-throughput", "--log-throughput --use-persistent-ckpt-worker"),
        at="--use-persistent-ckpt-worker",
        passes=flag("--log-throughput", "--log-throughput --use-persistent-ckpt-worker --async-save"),
    ),
    "save-without-load": Example(
        fails=flag("--load /shared/checkpoints/gpt3-13b", ""),
        at="--save",
        passes=(
            *flag("--load /shared/checkpoints/gpt3-13b", ""),
            ('"${output[@]}"', '"${output[@]}" $EXTRA_ARGS'),
        ),
    ),
    "resume-without-optimizer": Example(
        fails=flag("--log-throughput", "--log-throughput --no-load-optim"),
        at="--no-load-optim",
        passes=(
            *flag("--log-throughput", "--log-throughput --no-load-optim"),
            *flag("--load /shared/checkpoints/gpt3-13b", "--load /shared/checkpoints/llama"),
        ),
    ),
    "no-exit-handler": Example(
        fails=flag("--exit-signal-handler", ""),
        at="srun",
        passes=flag("--exit-signal-handler", "--exit-interval 1000"),
    ),
    "save-interval": Example(
        fails=flag("--save-interval 500", ""),
        at="--save",
        passes=(*flag("--save-interval 500", ""), *flag("--save /shared/checkpoints/gpt3-13b", "")),
    ),
    "exit-signal": Example(
        fails=flag("--exit-signal SIGUSR2", ""),
        at="trap",
        passes=(*flag("--exit-signal SIGUSR2", ""), ("B:USR2@300", "TERM@300")),
    ),
    "exit-after-limit": Example(
        fails=flag("--exit-signal-handler", "--exit-duration-in-mins 1440"),
        at="--exit-duration-in-mins",
        passes=flag("--exit-signal-handler", "--exit-duration-in-mins 1439"),
    ),
    "no-save": Example(
        fails=flag("--save /shared/checkpoints/gpt3-13b", ""),
        at="srun",
        passes=(*flag("--save /shared/checkpoints/gpt3-13b", ""), ("140000", "50")),
    ),
    "files-by-count": Example(
        fails=(_in(TASKS, 'readarray -t VALID < <(find /shared/tokens -name "*.bin" | sort | tail -n 15)'),),
        at="tail -n 15",
        passes=(_in(TASKS, 'FIRST=$(find /shared/tokens -name "*.bin" | sort | head -n 1)'),),
    ),
    "suffix-by-pattern": Example(
        fails=(_in(TASKS, 'ls /shared/tokens | sed "s/.bin//g"'),),
        at="sed",
        passes=(_in(TASKS, "ls /shared/tokens | sed 's/\\.bin$//'"),),
    ),
    # ---- shell ----
    "syntax": Example(
        fails=(_in(LAUNCH, "if [[ -e stop ]]; then"),), at="", passes=(_in(TASKS, "layers=([0]*3+[1]*58)"),)
    ),
    "unreadable": Example(
        fails=(_in(TASKS, 'echo "${name @Q}"'),), at="name @Q", passes=(_in(TASKS, 'echo "${name@Q}"'),)
    ),
    "not-a-shell-script": Example(
        fails=((SOUND, "#!/usr/bin/env python3\nimport os\n"),),
        at="python3",
        passes=(("#!/bin/bash", "#!/usr/bin/env -S bash -l"),),
    ),
    "export-words": Example(
        fails=(_in(ENVIRONMENT, "export PYTHON_OPTIONS=-u -O"),),
        at="-u -O",
        passes=(_in(ENVIRONMENT, 'export PYTHON_OPTIONS="-u -O" HOME'),),
    ),
    "similar-name": Example(
        fails=(_in(LAUNCH, "exitcode=0\n[[ $exit_code -eq 0 ]] || exit 1"),),
        at="$exit_code",
        passes=(_in(LAUNCH, "exitcode=${exit_code:-0}"),),
    ),
    "not-set-by-slurm": Example(
        fails=(_in(LAUNCH, 'cd "$PBS_O_WORKDIR" || exit'),),
        at="PBS_O_WORKDIR",
        passes=(_in(LAUNCH, 'cd "${PBS_O_WORKDIR:-$SLURM_SUBMIT_DIR}" || exit\necho "$SBATCH_SCRIPTS"'),),
    ),
    "unset-stops": Example(
        fails=(_in(LAUNCH, '[[ -z "$WANDB_ID" ]] && WANDB_ID=1'),),
        at="WANDB_ID",
        passes=(
            _in(LAUNCH, 'for NODE in 1 2; do [ -z "$NODE" ]; done\n[[ -z "${WANDB_ID:-}" ]] && WANDB_ID=1'),
            _in(
                TASKS,
                'read -r TAG < /shared/tag\n[ -z "$TAG" ]\nset +u\nset -- -u\n[ -z "$GROUP_ID" ]\nset -u',
            ),
            _in(ENVIRONMENT, 'check() { [ -z "$MODE" ]; }\nMODE=fast\ncheck'),
        ),
    ),
    "never-set": Example(
        fails=(_in(LAUNCH, 'hostname > "$run_dir/hosts"'),),
        at="$run_dir/hosts",
        passes=(
            _in(LAUNCH, '# run_dir comes from submit.sh\nhostname > "$run_dir/hosts" > "$SCRATCH/a"'),
            _in(TASKS, 'for one in a b; do echo "$one" "$https_proxy" "$PHASE" "$all_SCRATCH/x"; done'),
        ),
    ),
    "count-stops": Example(
        fails=(
            (
                "set -uo pipefail",
                'set -euo pipefail\nfailed=0\ncheck() { [ -e "$1" ] || ((failed++)); }\ncheck /data',
            ),
        ),
        at="failed++",
        passes=(
            (
                "set -uo pipefail",
                'set -euo pipefail\nfailed=0 bad=1 late=0 n=0\ncheck() { [ -e "$1" ] || ((failed++)); }\n'
                "if check /data; then check /more || true; fi\n((bad++))\n((++n))\n"
                "((late++)) || true\n((late++))\nset +e\n((n++))\nset -e",
            ),
        ),
    ),
    "terminal": Example(
        fails=(("set -uo pipefail", "set -euo pipefail\nclear"),),
        at="clear",
        passes=(("set -uo pipefail", "set -euo pipefail\nclear || true"),),
    ),
    "setting-overwritten": Example(
        fails=(_in(TASKS, "IMAGE=${IMAGE:-/shared/a.sqsh}\nIMAGE=/shared/images/b.sqsh"),),
        at="/shared/images/b.sqsh",
        passes=(
            _in(TASKS, 'IMAGE=${IMAGE:-/shared/a.sqsh}\nsrun -n1 bash -c "export IMAGE=/b.sqsh; ./check"'),
        ),
    ),
    "default-model": Example(
        fails=(_in(TASKS, "case $SIZE in\n175b) NUM_LAYERS=96 ;;\n*) NUM_LAYERS=12 ;;\nesac"),),
        at="*)",
        passes=(
            _in(
                TASKS,
                'case $SIZE in\n175b) NUM_LAYERS=96 ;;\n*) NUM_LAYERS=0; echo "unknown" >&2; exit 1 ;;\nesac',
            ),
        ),
    ),
    "subprocess-unchecked": Example(
        fails=(
            _in(LAUNCH, "python3 - <<'END'\nimport subprocess\nsubprocess.run(f'ls {d}', shell=True)\nEND"),
        ),
        at="shell=True",
        passes=(
            _in(
                LAUNCH,
                "python3 - <<'END'\nimport subprocess\nsubprocess.run('ls a | wc', shell=True, check=True)\nEND",
            ),
        ),
    ),
    "marker-after-failure": Example(
        fails=(_in(LAUNCH, "python3 /shared/tools/tokenize.py\ntouch /shared/tokens/DONE"),),
        at="touch",
        passes=(_in(LAUNCH, "python3 /shared/tools/tokenize.py && touch /shared/tokens/DONE"),),
    ),
}

PP4 = "--pipeline-model-parallel-size 4"
FINETUNE = (
    *flag("--load /shared/checkpoints/gpt3-13b", "--load /shared/starcoder --finetune"),
    ("--save /shared/checkpoints/gpt3-13b", "--save /shared/tuned/$SLURM_JOB_ID"),
)
FURTHER: dict[str, tuple[str, Example]] = {
    "layers left for the other stages": (
        "parallel-sizes",
        Example(
            fails=flag(PP4, f"{PP4} --decoder-first-pipeline-num-layers 12"),
            at="--decoder-first",
            passes=flag(PP4, f"{PP4} --decoder-first-pipeline-num-layers 13"),
        ),
    ),
    "a layout with too few layers": (
        "parallel-sizes",
        Example(
            fails=flag(PP4, f"{PP4} --pipeline-model-parallel-layout 'Et*10|t*10|t*10|t*9L'"),
            at="--pipeline-model-parallel-layout",
            passes=flag(PP4, f"{PP4} --pipeline-model-parallel-layout 'Et*9|t*11|t*11|t*9L'"),
        ),
    ),
    "weights of another directory": (
        "save-without-load",
        Example(
            fails=FINETUNE,
            at="--load",
            passes=(*FINETUNE[:1], ("--save /shared/checkpoints/gpt3-13b", "--save /shared/$RUN")),
        ),
    ),
    "a name without a tag, and a digest": (
        "image-name",
        Example(
            fails=((IMAGE, "--container-image=docker://Ubuntu"),),
            at="Ubuntu",
            passes=((IMAGE, "--container-image=docker://ubuntu@sha256:AB"),),
        ),
    ),
    "a name after a port, and a host": (
        "image-name",
        Example(
            fails=((IMAGE, "--container-image=registry:5000/Foo/bar"),),
            at="Foo",
            passes=((IMAGE, "--container-image=User@Registry:5000/foo/bar:A"),),
        ),
    ),
    "the tag is not the port": (
        "image-pin",
        Example(
            fails=((IMAGE, "--container-image=registry:5000/bar"),),
            at="registry",
            passes=((IMAGE, "--container-image=User@registry:5000/bar:1"),),
        ),
    ),
    "a suffix of an image, and a place in front of it": (
        "image-path",
        Example(
            fails=((IMAGE, "--container-image=images/pytorch.squashfs"),),
            at="images/",
            passes=((IMAGE, "--container-image='{{ images }}/pytorch.sqsh'"),),
        ),
    ),
}
"""Other ways to break a rule in SOUND: what they are, the rule, and its example. pairs.txt has small scripts."""
