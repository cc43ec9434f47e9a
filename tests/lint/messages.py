"""Complete scripts with the message of one rule, or without it where the rule has nothing to say."""

from __future__ import annotations

from dataclasses import dataclass


def head(
    *directives: str, nodes: int = 2, tasks: int = 4, gpus: int = 4, time: str = "--time=1:00:00"
) -> str:
    """The directives of a job, with more of them before the time limit."""
    given = (f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--gres=gpu:{gpus}", *directives, time)
    return "#!/bin/bash\n" + "".join(f"#SBATCH {words}\n" for words in given if words)


def template(log: str = "{{ root }}/%j.out", backend: str = "{{ backend }}") -> str:
    """A template of a script, with places in double braces."""
    return f"{BEFORE_LOG}#SBATCH --output={log}\n{AFTER_LOG} {backend}{END}"


HEAD = head()
BEFORE_LOG = """\
#!/bin/bash
{% if qos %}
#SBATCH --qos={{ qos | default("normal # low") }}
{% endif %}
#SBATCH --nodes={{ nodes }}
#SBATCH --time=1:00:00
"""
AFTER_LOG = 'LAUNCHER="torchrun --nproc_per_node={{ gpus }} --nnode={{ nodes }} --node_rank=$SLURM_NODEID'
END = """"
CMD="train.py --config {{ config }}"
srun -K1 -u $LAUNCHER $CMD
"""
TEMPLATE = template()
TRAINING = "python pretrain_gpt.py --save /shared/run"
TRACE = "set -xeuo pipefail\necho begin\nexport HF_TOKEN=$(cat ~/.token)\n"
BRANCHES = """\
if [ $N -eq 1 ]; then
    header="torchrun --nnodes=1 --rdzv_endpoint=localhost:0 train.py"
else
    header="srun torchrun --nnodes=2 --rdzv_endpoint=$HOST:0 train.py"
fi
$header
"""


@dataclass(frozen=True, kw_only=True)
class Message:
    """The expected finding of one rule in a complete script."""

    script: str
    why: str = ""
    """Part of the message; "" where the rule has nothing to say."""
    fix: str = ""
    severity: str = ""
    slurm: str | None = None


def _step(options: str, head: str = HEAD) -> str:
    return f"{head}srun {options} {TRAINING}\n"


def _mounts(flags: str) -> str:
    return _step(f"--container-image=/a.sqsh --container-mounts=/a:/b{flags}")


CPUS = head("--cpus-per-task=8")
LOG = head("--output={}")
IB_OFF = "export NCCL_IB_DISABLE=1\n"

MESSAGES: dict[str, tuple[str, Message]] = {
    "four GPUs, which may be all of a node": (
        "fixed-port",
        Message(
            script="#!/bin/bash\n#SBATCH --gres=gpu:4\n#SBATCH --time=60\nexport MASTER_PORT=29500\n",
            why="port 29500",
            severity="note",
        ),
    ),
    "a setting for debugging that a comment calls a workaround": (
        "debugging-left-on",
        Message(
            script=f"{HEAD}# do not remove\nexport CUDA_LAUNCH_BLOCKING=1\nsrun python train.py\n",
            why="CUDA_LAUNCH_BLOCKING=1 is for debugging",
            severity="note",
        ),
    ),
    # ---- templates ----
    "a place of a directive is one value": (
        "log-shared",
        Message(script=LOG.format("{{ root }}/%j.out")),
    ),
    "an image that whoever uses the script names": (
        "image-name",
        Message(script=_step("--container-image='<YOUR REGISTRY>/pytorch:latest'")),
    ),
    "a tag is no command": ("directive-after-command", Message(script=TEMPLATE)),
    "a # within a place is no comment": ("directive-cut", Message(script=TEMPLATE)),
    "a time with a unit as a second word": (
        "directive-unknown",
        Message(
            script="#!/bin/bash\n#SBATCH --time=5 days\nsrun hostname\n",
            why="'days' belongs to no option",
            fix="--time=5-00:00:00",
        ),
    ),
    "an option that a later Slurm added": (
        "directive-unknown",
        Message(
            script="#!/bin/bash\n#SBATCH --segment=16\n#SBATCH --time=60\nsrun hostname\n",
            why="sbatch of Slurm before 24.05 does not have --segment",
            fix="remove it",
            slurm="23.11",
        ),
    ),
    "an option of this Slurm": (
        "directive-unknown",
        Message(
            script="#!/bin/bash\n#SBATCH --segment=16\n#SBATCH --time=60\nsrun hostname\n", slurm="24.05"
        ),
    ),
    "an option of an unknown Slurm": (
        "directive-unknown",
        Message(script="#!/bin/bash\n#SBATCH --segment=16\n#SBATCH --time=60\nsrun hostname\n"),
    ),
    "a time with a unit": (
        "directive-value",
        Message(
            script="#!/bin/bash\n#SBATCH --time=12hours\nsrun hostname\n",
            why="--time=12hours is not a time",
            fix="--time=12:00:00",
        ),
    ),
    "a number in words": (
        "directive-value",
        Message(
            script="#!/bin/bash\n#SBATCH --nodes=two\n#SBATCH --time=60\nsrun hostname\n",
            why="--nodes=two is not a number of nodes",
            fix="write a number, or MIN-MAX",
        ),
    ),
    "a place of a directive is a value of any kind": (
        "directive-value",
        Message(script="#!/bin/bash\n#SBATCH --nodes={{ nodes }}\n#SBATCH --time=60\nsrun hostname\n"),
    ),
    "a place of a directive is no stray word": ("directive-unknown", Message(script=TEMPLATE)),
    "a log that a template names": (
        "log-shared",
        Message(script=template(log="{{ log }}")),
    ),
    "a log without %j": (
        "log-shared",
        Message(script=template(log="a.out"), why="a.out"),
    ),
    "a launcher with its backend": (
        "rank-of-batch-shell",
        Message(script=template(backend="--rdzv_backend c10d")),
    ),
    "a launcher alone on its nodes": (
        "rank-of-batch-shell",
        Message(script=template(backend="--standalone")),
    ),
    "a launcher with the static backend": (
        "rank-of-batch-shell",
        Message(script=template(backend="--rdzv-backend=static"), why="SLURM_NODEID"),
    ),
    "a place is no value": (
        "world-size",
        Message(script=f"{HEAD}export WORLD_SIZE={{{{ size }}}}\nsrun {TRAINING}\n"),
    ),
    "a brace expansion is no template": (
        "no-kill-on-bad-exit",
        Message(script=f"{HEAD}mkdir {{a,{{b,c}}}}\nsrun  {TRAINING}\n", why="one task fails"),
    ),
    # ---- directives ----
    "a placeholder in braces": (
        "directive-unknown",
        Message(
            script=head("-p { partition }"),
            why="`{ partition }` is a placeholder",
            fix="replace it",
            severity="error",
        ),
    ),
    "a placeholder in a directive": (
        "directive-unknown",
        Message(
            script=head(time="<SLURM OPTIONS> --time=1:00:00"),
            why="`<SLURM OPTIONS>` is a placeholder",
            fix="replace it",
        ),
    ),
    "a time limit that is turned off": (
        "no-time-limit",
        Message(script="#!/bin/bash\n###SBATCH -t 8:00:00\n#SBATCH -N1\n"),
    ),
    "another directive that is turned off": (
        "no-time-limit",
        Message(script="#!/bin/bash\n##SBATCH --ntasks=8\n#SBATCH -N1\n", why="no --time"),
    ),
    "a comment in a directive": (
        "directive-unknown",
        Message(script=head("-p {partition} # yours")),
    ),
    "no time limit": (
        "no-time-limit",
        Message(
            script="#!/bin/bash\n#SBATCH -N1\n", why="no --time", fix="--time=<what the run needs>, e.g."
        ),
    ),
    "a log's directory": (
        "log-directory",
        Message(
            script=LOG.format("logs/%j.out"),
            why="Slurm up to 22.05",
            fix="mkdir -p logs before",
            severity="note",
        ),
    ),
    "a log's directory before Slurm 23.02": (
        "log-directory",
        Message(script=LOG.format("logs/%j.out"), why="Slurm up to 22.05", slurm="21.08"),
    ),
    "a log's directory since Slurm 23.02": (
        "log-directory",
        Message(script=LOG.format("logs/%j.out"), slurm="23.02"),
    ),
    "a log's directory with the job's number": (
        "log-directory",
        Message(
            script=LOG.format("logs/%j/out"),
            why="Slurm up to 22.05",
            fix="use Slurm 23.02 or newer, or a directory without %",
        ),
    ),
    "a log's directory that a comment makes": (
        "log-directory",
        Message(script=LOG.format("logs/%j.out") + "# first: mkdir -p logs && sbatch job.sh\n"),
    ),
    "another directory that a comment makes": (
        "log-directory",
        Message(script=LOG.format("logs/%j.out") + "mkdir -p logs2\n", why="Slurm up to 22.05"),
    ),
    "a log's directory of a newer Slurm": (
        "log-directory",
        Message(script=LOG.format("logs/%j.out") + "srun --gres-flags=allow-task-sharing hostname\n"),
    ),
    "one variable in two directives": (
        "directive-variable",
        Message(script=LOG.format("$HOME/a.%j\n#SBATCH --error=$HOME/b.%j"), why="$HOME in --output"),
    ),
    "a variable that the submitting shell expands": (
        "directive-variable",
        Message(script=f"{HEAD}sbatch <<EOF\n#!/bin/bash\n#SBATCH --output=$HOME/a\nsrun -K ./b\nEOF\n"),
    ),
    "a variable that no shell expands": (
        "directive-variable",
        Message(
            script=f"{HEAD}sbatch <<'EOF'\n#!/bin/bash\n#SBATCH --output=$HOME/a\nsrun -K ./b\nEOF\n",
            why="$HOME in --output",
        ),
    ),
    "few CPUs for one task": (
        "few-cpus",
        Message(
            script=_step("", head("-c4", tasks=1)),
            why="1 task x 4 CPUs = 4 for the 4 GPUs",
            fix="--cpus-per-task=16: 4 for each of the 4 GPUs",
        ),
    ),
    # ---- steps ----
    "CPUs on Slurm 22.05": (
        "cpus-not-inherited",
        Message(
            script=_step("", CPUS),
            why="(--cpu-bind=cores, --exact, --hint=nomultithread, Autobind)",
            severity="note",
            slurm="22.05",
        ),
    ),
    "CPUs of an exact step": (
        "cpus-not-inherited",
        Message(script=_step("--exact", CPUS), why="each gets one CPU", severity="warning", slurm="22.05"),
    ),
    "CPUs of a bound step": (
        "cpus-not-inherited",
        Message(script=_step("--cpu-bind=v,cores", CPUS), why="each gets", severity="warning", slurm="23.02"),
    ),
    "CPUs without a version": (
        "cpus-not-inherited",
        Message(script=_step("--exact", CPUS), why="each gets one CPU", severity="note"),
    ),
    "CPUs of tasks that nothing binds": ("cpus-not-inherited", Message(script=_step("", CPUS))),
    "CPUs with a hint": (
        "cpus-not-inherited",
        Message(script=_step("--hint=nomultithread", CPUS), why="each gets one CPU", severity="note"),
    ),
    "CPUs of a newer Slurm": (
        "cpus-not-inherited",
        Message(script=_step("--exact --gres-flags=allow-task-sharing", CPUS)),
    ),
    "a failure within a step": (
        "failure-hidden",
        Message(
            script=f"{HEAD}srun bash -c '\ntorchrun --standalone /shared/train.py\nrsync a b\n'\n",
            why="`train.py` (line 7) is not noticed: the step ends with the status of `rsync` (line 8)",
        ),
    ),
    "tasks of ten minutes": ("no-kill-on-bad-exit", Message(script=_step("", head(time="--time=10")))),
    "tasks of eleven minutes": (
        "no-kill-on-bad-exit",
        Message(script=_step("", head(time="--time=11:00")), why="one task fails"),
    ),
    "a step of one task": ("no-kill-on-bad-exit", Message(script=_step("-n1"))),
    "localhost in one of two branches": ("localhost-master", Message(script=HEAD + BRANCHES)),
    "a launch at localhost in one of two branches": (
        "localhost-master",
        Message(
            script=HEAD
            + "if [ $N -eq 1 ]; then\n    torchrun --rdzv_endpoint=localhost:0 train.py\nelse\n    srun x\nfi\n"
        ),
    ),
    "localhost in all branches": (
        "localhost-master",
        Message(
            script=f"{HEAD}srun torchrun --nnodes=2 --rdzv_endpoint=localhost:0 train.py\n",
            why="cannot rendezvous at localhost:0",
        ),
    ),
    "a long address": (
        "localhost-master",
        Message(script=f"{HEAD}MASTER_ADDR=localhost:{'1' * 99}\n", why=f"localhost:{'1' * 30}..."),
    ),
    "srun in one of two branches": ("step-outside-srun", Message(script=HEAD + BRANCHES)),
    "srun in no branch": (
        "step-outside-srun",
        Message(script=f"{HEAD}run=torchrun\n$run train.py\n", why="without srun, torchrun"),
    ),
    # ---- containers ----
    "docker's label": (
        "mount-flags",
        Message(
            script=_mounts(":z"),
            why=":z of /a is a Docker flag; pyxis ignores it",
            fix="remove it",
            severity="note",
        ),
    ),
    "a flag that is not one": (
        "mount-flags",
        Message(script=_mounts(":readonly"), why="/a stays writable", fix=":ro", severity="warning"),
    ),
    "flags joined by a colon": (
        "mount-flags",
        Message(
            script=_mounts(":ro:noexec"),
            why=":ro:noexec of /a have no effect",
            fix=":ro+noexec",
            severity="error",
        ),
    ),
    "flags joined by a comma": (
        "mount-source",
        Message(
            script=_mounts(":ro,noexec"), why="'noexec' is not a path", fix=":ro+noexec", severity="error"
        ),
    ),
    "a value that the step sets itself": (
        "container-env-value",
        Message(
            script=f"{HEAD}srun --container-image=/a.sqsh --container-env=A=1 bash -c 'export A=1; ./x'\n",
            why="A has a value here",
            severity="warning",
        ),
    ),
    "a value that the step does not set": (
        "container-env-value",
        Message(
            script=f"{HEAD}srun --container-image=/a.sqsh --container-env=A=1 bash -c 'export B=1; ./x'\n",
            why="A has a value here",
            severity="error",
        ),
    ),
    "a registry with a slash": (
        "image-registry",
        Message(
            script=_step("--container-image=nvcr.io/nvidia/pytorch:25.03-py3"),
            why="before 4.0, enroot looks for nvcr.io/nvidia/pytorch:25.03-py3 on Docker Hub, because",
            fix="nvcr.io#nvidia/pytorch:25.03-py3",
        ),
    ),
    "a registry with a port and a slash": (
        "image-registry",
        Message(
            script=_step("--container-image=docker://me@registry:5000/a/b:1"),
            why="before 4.0, enroot refuses docker://me@registry:5000/a/b:1, because",
            fix="me@registry:5000#a/b:1",
        ),
    ),
    "an image of the node's Docker": (
        "image-registry",
        Message(script=_step("--container-image=dockerd://nvcr.io/nvidia/pytorch:25.03-py3")),
    ),
    "only the name becomes lower case": (
        "image-name",
        Message(
            script=_step("--container-image=A@nvcr.io#A/a:A@sha256:A"),
            why="upper-case letters",
            fix="A@nvcr.io#a/a:A@sha256:A",
        ),
    ),
    # ---- environment ----
    "InfiniBand turned off": (
        "transport-off",
        Message(
            script=HEAD + IB_OFF + f"srun {TRAINING}\n",
            why="over TCP instead of InfiniBand",
            fix="remove NCCL_IB_DISABLE on nodes with InfiniBand or RoCE",
        ),
    ),
    "InfiniBand turned off for libfabric": (
        "transport-off",
        Message(script=HEAD + IB_OFF + f"export FI_PROVIDER=efa\nsrun {TRAINING}\n"),
    ),
    "InfiniBand turned off for a plugin": (
        "transport-off",
        Message(script=HEAD + IB_OFF + f"NCCL_NET_PLUGIN=ofi srun {TRAINING}\n"),
    ),
    "a variable that some trainer may read": (
        "misspelt-variable",
        Message(
            script=f"{HEAD}export NCCL_TIMEOUT=60\n{_step('-K')}",
            why="NCCL has no timeout",
            severity="warning",
        ),
    ),
    "an unread name next to the right one": (
        "misspelt-variable",
        Message(
            script=f"{HEAD}export NCCL_MIN_CHANNELS=4 NCCL_MIN_NCHANNELS=4\n",
            why="NCCL_MIN_NCHANNELS is set too",
            fix="remove it",
            severity="warning",
        ),
    ),
    "the script's directory outside of Slurm": (
        "script-directory",
        Message(
            script=f'{HEAD}here="${{SLURM_SUBMIT_DIR:-$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)}}"\n'
            'srun -K python "$here/train.py"\n'
        ),
    ),
    "the script's directory, unless the submit directory has the program": (
        "script-directory",
        Message(
            script=f'{HEAD}here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"\nroot="$(cd "$here/.." && pwd)"\n'
            '[ -f "$SLURM_SUBMIT_DIR/train.py" ] && root=$SLURM_SUBMIT_DIR\n'
            'srun -K python "$root/train.py"\n'
        ),
    ),
    "the script's directory, which nothing reads": (
        "script-directory",
        Message(
            script=f'{HEAD}here="$(cd "$(dirname "$0")" && pwd)"\nroot="$(cd "$here/.." && pwd)"\n'
            "srun -K python /shared/train.py\n"
        ),
    ),
    "the directory above the script's": (
        "script-directory",
        Message(
            script=f'{HEAD}here="$(cd "$(dirname "$0")" && pwd)"\nroot="$(cd "$here/.." && pwd)"\n'
            'srun -K python "$root/train.py"\n',
            why="which has no other files",
        ),
    ),
    "a port of jobs that run one after the other": (
        "fixed-port",
        Message(
            script=head("--dependency=singleton", nodes=1, gpus=1)
            + "export MASTER_PORT=29500\nsrun -K python train.py\n"
        ),
    ),
    "a number of GPUs that is only printed": (
        "gpu-count",
        Message(
            script=f'{HEAD}echo "$SLURM_GPUS_PER_NODE GPUs"\n',
            why="unset",
            fix="use SLURM_GPUS_ON_NODE",
            severity="note",
        ),
    ),
    "a number of GPUs that is used as well": (
        "gpu-count",
        Message(
            script=f'{HEAD}echo "$SLURM_GPUS_PER_NODE GPUs"; ./run $SLURM_GPUS_PER_NODE\n',
            why="unset",
            severity="warning",
        ),
    ),
    "an old name": (
        "renamed-variable",
        Message(
            script=f"{HEAD}export NCCL_BLOCKING_WAIT=1\n",
            why="since PyTorch 2.2, NCCL_BLOCKING_WAIT is called TORCH_NCCL_BLOCKING_WAIT",
            fix="export both",
        ),
    ),
    "an old name whose effect is the default": (
        "renamed-variable",
        Message(
            script=f"{HEAD}export NCCL_ASYNC_ERROR_HANDLING=1\n",
            why="since PyTorch 2.2, NCCL_ASYNC_ERROR_HANDLING is called TORCH_NCCL_ASYNC_ERROR_HANDLING",
            severity="note",
        ),
    ),
    "an old name next to the new one": (
        "renamed-variable",
        Message(script=f"{HEAD}export NCCL_BLOCKING_WAIT=1 TORCH_NCCL_BLOCKING_WAIT=1\n"),
    ),
    "NCCL's lines": (
        "nccl-debug-flood",
        Message(script=f"{HEAD}export NCCL_DEBUG=INFO\nsrun {TRAINING}\n", why="hundreds of NCCL lines"),
    ),
    "NCCL's lines in an assignment that another replaces": (
        "nccl-debug-flood",
        Message(script=f"{HEAD}export NCCL_DEBUG=INFO\nexport NCCL_DEBUG=WARN\nsrun {TRAINING}\n"),
    ),
    "NCCL's lines in a step before another assignment": (
        "nccl-debug-flood",
        Message(
            script=f"{HEAD}export NCCL_DEBUG=INFO\nsrun {TRAINING}\nexport NCCL_DEBUG=WARN\nsrun {TRAINING}\n",
            why="hundreds of NCCL lines",
        ),
    ),
    "a training that no signal reaches": (
        "signal-not-to-script",
        Message(
            script=f"{HEAD}#SBATCH --signal=USR1@300\ntorchrun --standalone train.py\n",
            why="no process gets USR1",
            fix="start the training with srun",
        ),
    ),
    "a training outside of steps": (
        "signal-to-steps",
        Message(script=f"{HEAD}#SBATCH --signal=USR1@300\ntorchrun --standalone train.py\n"),
    ),
    "a training before an exit": (
        "failure-hidden",
        Message(
            script=f"{HEAD}srun {TRAINING}\nexit 0\nsrun {TRAINING}\n",
            why="the job ends with the status of line 7",
        ),
    ),
    "a training after an exit": (
        "no-kill-on-bad-exit",
        Message(script=f"{HEAD}srun -K1 {TRAINING}\nexit 0\nsrun {TRAINING}\n"),
    ),
    "a written script that ends with an exit": (
        "no-kill-on-bad-exit",
        Message(
            script=f"{HEAD}cat >a.sh <<'E'\n{TRAINING}\nexit 0\nE\nsrun bash a.sh\n",
            why="one task fails",
        ),
    ),
    "a trace among other options": (
        "trace-with-secrets",
        Message(
            script=HEAD + TRACE,
            why="set -x writes the value of HF_TOKEN into the log",
            fix="remove the x from `set -xeuo pipefail` (line 6), or `set +x` before line 8",
        ),
    ),
    "an image that the script asks for": (
        "image-empty",
        Message(
            script=f'{HEAD}IMAGE=""\nif [ -z "$IMAGE" ]; then exit 1; fi\n'
            'STEP="srun -K --container-image=$IMAGE"\n$STEP ./train\n'
        ),
    ),
    "an image that nothing asks for": (
        "image-empty",
        Message(
            script=f'{HEAD}IMAGE=""\nSTEP="srun -K --container-image=$IMAGE"\n$STEP ./train\n', why="is empty"
        ),
    ),
    "an endpoint that argparse completes": (
        "rdzv-endpoint",
        Message(
            script=f"{head(tasks=1)}srun -K torchrun --nnodes=2 --rdzv_backend c10d "
            "--rdzv_endpoin $host:29500 train.py\n"
        ),
    ),
    "a trace of another shell": (
        "trace-with-secrets",
        Message(script=f'{HEAD}srun -K bash -c "\nset -x\nhostname\n"\n[ -n "$HF_TOKEN" ] && ./upload\n'),
    ),
    "a trace of a step that has a secret": (
        "trace-with-secrets",
        Message(script=f'{HEAD}srun -K bash -c "\nset -x\n./upload $HF_TOKEN\n"\n', why="HF_TOKEN"),
    ),
    "a trace alone": (
        "trace-with-secrets",
        Message(
            script=HEAD + "set -x\necho begin\nexport HF_TOKEN=$(cat ~/.token)\n",
            why="HF_TOKEN",
            fix="remove `set -x` (line 6), or `set +x` before line 8",
        ),
    ),
    "a random port": (
        "ephemeral-port",
        Message(script=f"{HEAD}MASTER_PORT=$((1024 + RANDOM % 64511))\n", why="between 1024 and 33791"),
    ),
    "a random port that ends in time": (
        "ephemeral-port",
        Message(script=f"{HEAD}MASTER_PORT=$((RANDOM % 64511))\n"),
    ),
    "a training without a limit": (
        "no-exit-handler",
        Message(script=_step("", head(time=""))),
    ),
    "a training with a limit": ("no-exit-handler", Message(script=_step(""), why="at the time limit")),
    "a comment in a text of options": (
        "comment-in-quotes",
        Message(
            script=f'{HEAD}A="--lr 1 \\\n  # --bf16 \\\n  --fp16"\nsrun {TRAINING} $A\n',
            why="$A is text, so `#` and the words after it are arguments",
            fix="args=(...)",
        ),
    ),
    "a comment in an array of options": (
        "comment-in-quotes",
        Message(script=f'{HEAD}A=(--lr 1 \\\n  # --bf16 \\\n  --fp16)\nsrun {TRAINING} "${{A[@]}}"\n'),
    ),
    "a comment in a text in single quotes": (
        "comment-in-quotes",
        Message(script=f"{HEAD}srun bash -c '{TRAINING} \\\n  # --bf16\n'\n"),
    ),
    "torchrun on every rank of mpirun": (
        "too-many-agents",
        Message(
            script=f"{HEAD}mpirun -np 8 torchrun --nnodes=2 --nproc_per_node=4 train.py\n",
            why="each of the 4 tasks per node runs torchrun",
        ),
    ),
    "torchrun on every node of mpirun": (
        "too-many-agents",
        Message(script=f"{HEAD}mpirun -np 2 -npernode 1 torchrun --nnodes=2 --nproc_per_node=4 train.py\n"),
    ),
    "a shell that TERM ends": (
        "signal-to-steps",
        Message(
            script=f"{HEAD}#SBATCH --signal=TERM@300\nsrun bash -c '{TRAINING}; date'\n",
            why="kills the shell that starts the training",
            fix="trap : TERM at the start",
        ),
    ),
    "a written script that TERM ends": (
        "signal-to-steps",
        Message(
            script=f"{HEAD}#SBATCH --signal=TERM@300\ncat >a.sh <<'E'\n{TRAINING}\nE\nsrun bash a.sh\n",
            why="kills the shell that starts the training",
        ),
    ),
    "a shell that traps TERM": (
        "signal-to-steps",
        Message(script=f"{HEAD}#SBATCH --signal=TERM@300\nsrun bash -c 'trap : TERM; {TRAINING}; date'\n"),
    ),
    "a shell that TERM replaces": (
        "signal-to-steps",
        Message(script=f"{HEAD}#SBATCH --signal=TERM@300\nsrun bash -c 'date; {TRAINING}'\n"),
    ),
    "a file in the script's directory": (
        "script-directory",
        Message(
            script=f'{HEAD}here=$(dirname "$0")\nhosts="$here/hosts-$SLURM_JOB_ID"\n'
            'scontrol show hostnames > "$hosts"\n',
            why="which has no other files",
        ),
    ),
    "a relative of Megatron-LM": (
        "decay-beyond-run",
        Message(
            script=f"{HEAD}srun deepspeed finetune.py --num-layers 2 --hidden-size 8 --num-attention-heads 2 "
            "--seq-length 8 --micro-batch-size 1 --train-iters 10 --lr-decay-iters 90\n",
            why="over 90 iterations",
        ),
    ),
    "a program with some options of Megatron-LM": (
        "decay-beyond-run",
        Message(
            script=f"{HEAD}srun python train.py --num-layers 2 --hidden-size 8 --train-iters 10 --lr-decay-iters 90\n"
        ),
    ),
    # ---- shell ----
    "a comment within a command": (
        "continuation-lost",
        Message(
            script=f"{HEAD}srun {TRAINING} \\\n  # --lr 1 \\\n  --bf16\n",
            why="the comment on line 7 ends the command of line 6: `--bf16` is a command of its own",
            fix="move it above line 6",
        ),
    ),
    "an empty line within a command": (
        "continuation-lost",
        Message(script=f"{HEAD}srun {TRAINING} \\\n\n--bf16\n", why="the empty line 7", fix="remove it"),
    ),
    "a blank after the backslash": (
        "continuation-lost",
        Message(
            script=f"{HEAD}srun {TRAINING} \\ \n  --bf16\n", why="the blank after", fix="remove the blank"
        ),
    ),
    "a comment in the text of a step": (
        "continuation-lost",
        Message(script=f"{HEAD}srun bash -c '\n{TRAINING} \\\n  # --lr 1\n  --bf16'\n", why="line 8"),
    ),
    "a comment that ends a command": (
        "continuation-lost",
        Message(script=f"{HEAD}srun {TRAINING} \\\n    --lr 1 \\\n    # --bf16\necho done\n"),
    ),
    "a comment in an array": (
        "continuation-lost",
        Message(
            script=f"{HEAD}a=( \\\n  --lr 1 \\\n  # --bf16 \\\n  --fp16 \\\n)\nsrun {TRAINING} ${{a[@]}}\n"
        ),
    ),
    "a comment after a list": (
        "continuation-lost",
        Message(script=f"{HEAD}make && \\\n  # now\n  srun {TRAINING} | \\\n  # log\n  tee x\n"),
    ),
    "a placeholder": (
        "syntax",
        Message(
            script=f"{HEAD}export CACHE=<cache_dir>\nsrun {TRAINING}\n",
            why="`<cache_dir>` is a placeholder that bash reads as a redirection",
            fix="write the value",
        ),
    ),
    "the rest of a script with a placeholder": (
        "no-kill-on-bad-exit",
        Message(script=f"{HEAD}export CACHE=<cache_dir>\nsrun {TRAINING}\n", why="one task fails"),
    ),
    "redirections": ("syntax", Message(script=f"{HEAD}sort <names>sorted\ncat <<EOF>all\n$A\nEOF\n")),
    "a text of bash -c that bash rejects": (
        "syntax",
        Message(
            script=f"{HEAD}layers='([0]*3+[1]*58)'\nsrun bash -c \"{TRAINING} --moe-layer-freq $layers\"\n",
            why="the text of bash -c is not valid",
            fix="quote the value within the text",
        ),
    ),
    "a text of bash -c with quotes of its own": (
        "syntax",
        Message(
            script=f"{HEAD}layers='([0]*3+[1]*58)'\nsrun bash -c \"{TRAINING} --moe-layer-freq '$layers'\"\n"
        ),
    ),
    "a command with quotes that eval parses": (
        "syntax",
        Message(script=f"{HEAD}run=\"srun bash -c 'cd x && {TRAINING}'\"\necho $run\neval $run\n"),
    ),
    "a command with quotes that nothing parses": (
        "syntax",
        Message(
            script=f"{HEAD}run=\"srun bash -c 'cd x && {TRAINING}'\"\n$run\n",
            why="the text of bash -c is not valid",
        ),
    ),
    "a text of bash -c that may not run": (
        "syntax",
        Message(script=f"{HEAD}more=\n[ -e x ] && more='('\nsrun bash -c \"{TRAINING} $more\"\n"),
    ),
    "a block that is not closed": (
        "syntax",
        Message(script=f"{HEAD}if true; then\n", why="bash stops here", fix="is not closed"),
    ),
}
"""Case -> the rule and its expected finding."""
