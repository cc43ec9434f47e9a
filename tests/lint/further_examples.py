"""More examples of rules: other ways to break them, and what comes near."""

from __future__ import annotations

from tests.lint.examples import SOUND, Example, flag

HEAD = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=60
"""
BINARY = f"{HEAD}export NCCL_SOCKET_IFNAME=eth0\nsrun ./train_gpt -n $SLURM_NTASKS\n"
AGENTS = HEAD.replace("node=8\n#SBATCH --gpus", "node=1\n#SBATCH --gpus")
FREE_PORT = f"""{AGENTS}\
free_port() {{
    shuf -i 10000-20000 -n 1
}}
meet() {{
    export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    export MASTER_PORT=$(free_port)
}}
export -f free_port meet
srun -K bash -c 'meet; exec ./train'
"""
EFFDET = f"""{HEAD}\
srun -K --container-image=/shared/a.sqsh --container-mounts=/backbones:/checkpoints,/data:/data \\
    python train.py --data=/data/coco --backbone /backbones/b0.pth
"""
FINETUNE = (
    *flag("--load /shared/checkpoints/gpt3-13b", "--load /shared/starcoder --finetune"),
    ("--save /shared/checkpoints/gpt3-13b", "--save /shared/tuned/$SLURM_JOB_ID"),
)
IN_STEP = f"""{AGENTS}\
srun -K bash -c "
cd /shared/code
torchrun --standalone --nproc-per-node=8 train.py
ssh login rsync /shared/code/out /archive
"
"""
PP4 = "--pipeline-model-parallel-size 4"
LOCAL = "bash -c 'export LOCAL_RANK=$SLURM_LOCALID; exec python train.py'\n"
ALONE = f"{HEAD}#SBATCH --signal=B:USR1@300\n".replace("nodes=2", "nodes=1")
REQUEUED = f"{HEAD}#SBATCH --requeue --open-mode=append\n"
ALONE_4 = "#!/bin/bash\n#SBATCH --gres=gpu:4\n#SBATCH --time=60\n"
SAVING = "python pretrain_gpt.py --save /shared/run --load /shared/run --save-interval 500"
PLACES = f"""{AGENTS}\
options="--vocab-file <PATH TO vocab.json> --save <PATH TO RUN> --save-interval 9 --load <PATH TO RUN> --split 98,2,0"
srun -K sh -c "python pretrain_gpt.py ${{options}}"
"""


def _script(fails: str, passes: str, at: str, *also: str) -> Example:
    return Example(fails=((SOUND, fails),), at=at, passes=((SOUND, passes),), also=frozenset(also))


FURTHER: dict[str, tuple[str, Example]] = {
    "a program that nobody knows": (
        "no-kill-on-bad-exit",
        _script(BINARY, BINARY.replace("./train_gpt", "nvidia-smi"), "srun"),
    ),
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
    "tasks that do not meet": (
        "no-kill-on-bad-exit",
        _script(BINARY, BINARY.replace("export NCCL_SOCKET_IFNAME=eth0\n", ""), "srun"),
    ),
    "as many nodes as sbatch is told": (
        "no-kill-on-bad-exit",
        _script(
            f"{HEAD}srun python train.py\n".replace("#SBATCH --nodes=2\n", ""),
            f"{AGENTS}srun python train.py\n".replace("#SBATCH --nodes=2\n", ""),
            "srun",
        ),
    ),
    "torchtune": (
        "no-kill-on-bad-exit",
        _script(
            f"{AGENTS}ip=$(srun -N 1 -n 1 hostname -i)\nsrun tune run --nnodes 2 full_finetune_distributed\n",
            f"{AGENTS}ip=$(srun -N 1 -n 1 hostname -i)\nsrun -N 1 -n 1 tune download llama\n",
            "srun tune",
        ),
    ),
    "axolotl": (
        "failure-hidden",
        _script(
            f"{AGENTS}srun -K axolotl train a.yaml\necho done\n",
            f"{AGENTS}srun -K axolotl train a.yaml || exit\necho done\n",
            "srun",
        ),
    ),
    "a binary before an echo": (
        "failure-hidden",
        _script(
            BINARY.replace("srun", "srun -K") + "echo done\n",
            BINARY.replace("srun ./train_gpt", "srun bash setup_env.sh") + "echo done\n",
            "srun",
        ),
    ),
    "a training without srun": (
        "failure-hidden",
        _script(
            f"{AGENTS}torchrun --standalone main.py\necho done\n".replace("nodes=2", "nodes=1"),
            f"{AGENTS}torchrun --standalone evaluate.py\necho done\n".replace("nodes=2", "nodes=1"),
            "torchrun",
        ),
    ),
    "within bash -c": (
        "failure-hidden",
        _script(IN_STEP, IN_STEP.replace('"\ncd', '"\nset -e\ncd'), "torchrun"),
    ),
    "within bash -ec": ("failure-hidden", _script(IN_STEP, IN_STEP.replace(" -c", " -ec"), "torchrun")),
    "one task beside other steps": (
        "failure-in-pipe",
        _script(
            f"{AGENTS}srun -N 1 -n 1 ray start --head --block &\nsrun -N 1 -n 1 python -m verl.main_ppo | tee log\n",
            f"{AGENTS}srun -N 1 -n 1 ray start --head --block &\nsrun -N 1 -n 1 python -m verl.main_ppo | tee log\n"
            "exit ${PIPESTATUS[0]}\n",
            "main_ppo",
        ),
    ),
    "a binary before tee": (
        "failure-in-pipe",
        _script(
            BINARY.replace("srun", "srun -K").replace("NTASKS\n", "NTASKS | tee log\n"),
            BINARY.replace("srun", "srun -K").replace("NTASKS\n", "NTASKS | sort\n"),
            "srun",
        ),
    ),
    "ranks of an evaluation": (
        "nccl-debug-flood",
        _script(
            f"{HEAD}export NCCL_DEBUG=info\nsrun -K python -m evaluate.linear_probe\n",
            f"{HEAD}export NCCL_DEBUG=info\nsrun -K -N 1 -n 1 python -m evaluate.linear_probe\n",
            "NCCL_DEBUG",
        ),
    ),
    "sbatch in a message": (
        "script-directory",
        _script(
            f'{HEAD}here=$(dirname "$0")\necho "start it with sbatch"\nbash "$here/run.sh"\n',
            f'{HEAD}here=$(dirname "$0")\nsbatch --test-only next.sh\nbash "$here/run.sh"\n',
            "here=",
        ),
    ),
    "any work": (
        "resubmits-itself",
        _script(
            f"{HEAD}sbatch --begin=now+4hour $0\npython convert.py\n",
            f"{HEAD}sbatch --dependency=afterok:$SLURM_JOB_ID $0\npython convert.py\n",
            "sbatch",
        ),
    ),
    "a function that every task calls": (
        "port-of-each-task",
        _script(
            FREE_PORT,
            FREE_PORT.replace("srun -K bash -c 'meet; exec ./train'", "meet\nsrun -K ./train"),
            "T=",
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
    "a function that calls a program": (
        "secret-argument",
        _script(
            f'{AGENTS}x=$(register "$HUB_TOKEN")\nregister() {{\n    curl -H "Token: $HUB_TOKEN"\n}}\n',
            f'{AGENTS}x=$(register "$HUB_TOKEN")\nregister() {{\n    curl -H @header\n}}\nregister "$HUB_TOKEN"\n',
            "curl",
        ),
    ),
    "a function that gives its arguments to a program": (
        "secret-argument",
        _script(
            f'{AGENTS}run() {{\n    timeout 9 "$@"\n}}\nrun ./login "$HUB_TOKEN"\n',
            f'{AGENTS}run() {{\n    echo "$@"\n}}\nrun ./login "$HUB_TOKEN"\n',
            "run ./login",
        ),
    ),
    "a placeholder of several words": (
        "save-without-load",
        _script(PLACES.replace("--load <PATH TO RUN> ", ""), PLACES, "python"),
    ),
    "tasks of srun that are bound to one GPU each": (
        "local-rank",
        _script(
            f"{HEAD}srun -K --gpu-bind=single:1 {LOCAL}",
            f"{HEAD}srun -K --gpu-bind=closest {LOCAL}",
            "--gpu-bind",
        ),
    ),
    "one task per node with one GPU": (
        "local-rank",
        _script(
            f"{HEAD}srun -K --ntasks=16 --gpus-per-task=1 {LOCAL}",
            f"{HEAD}srun -K --ntasks=2 --nodes=2 --gpus-per-task=1 {LOCAL}",
            "--gpus-per-task",
        ),
    ),
    "an option of srun and a directive": (
        "exclusive-options",
        _script(
            f"{HEAD}srun -K --ntasks-per-gpu=1 python train.py\n",
            f"{HEAD}#SBATCH --mem=0\nsrun -K --mem-per-cpu=1G python train.py\n",
            "srun",
        ),
    ),
    "memory of the environment": (
        "exclusive-options",
        _script(
            f"{HEAD}#SBATCH --mem=0\nexport SLURM_MEM_PER_CPU=1024\nsrun -K python train.py\n",
            f"{HEAD}#SBATCH --mem=0\nexport SLURM_MEM_PER_CPU=1024\nsrun -K --mem=0 python train.py\n",
            "export",
        ),
    ),
    "options of srun": (
        "exclusive-options",
        _script(
            f"{HEAD}srun -K --exact --whole python train.py\n",
            f"{HEAD}srun -K --exact --overlap python train.py\n",
            "srun",
        ),
    ),
    "a training without srun in the foreground": (
        "foreground-step",
        _script(
            f"{ALONE}trap 'touch stop' USR1\ntorchrun --standalone train.py\n",
            f"{ALONE}trap 'touch stop' USR1\ntorchrun --standalone train.py & wait $!\n",
            "torchrun",
        ),
    ),
    "a signal that the script sends to itself": (
        "signal-not-to-script",
        _script(
            f"{ALONE.replace('B:', '')}trap 'touch stop' USR1\n./watch.sh\n",
            f"{ALONE.replace('B:', '')}trap 'touch stop' USR1\n./watch.sh && kill -USR1 $$\n",
            "--signal",
        ),
    ),
    "a choice that a comment promises": (
        "setting-overwritten",
        _script(
            f"{HEAD}# usage: SIZE=7b CLUSTER=jupiter sbatch job.sh\nCLUSTER=juwels\n",
            f"{HEAD}# usage: SIZE=7b CLUSTER=jupiter sbatch job.sh\nCLUSTER=${{CLUSTER:-juwels}}\n",
            "CLUSTER=juwels",
        ),
    ),
    "the log of a step": (
        "log-shared",
        _script(
            f"{HEAD}LOG=/shared/logs\nsrun -K --output=$LOG/train.log python train.py\n",
            f"{HEAD}srun -K --output=$LOG/train.log python a.py\nsrun -K --output=/logs/%j.log python a.py\n",
            "--output",
        ),
    ),
    "a directory that the job makes": (
        "log-directory",
        _script(
            f"{HEAD}#SBATCH --output=logs/%j.out\nmkdir -p logs\n",
            f"{HEAD}#SBATCH --output=logs/%j.out\n# mkdir -p logs\n",
            "--output",
        ),
    ),
    "a level among the subsystems": (
        "nccl-debug-level",
        _script(
            f"{HEAD}export NCCL_DEBUG_SUBSYS=WARN\nsrun -K python train.py\n",
            f"{HEAD}export NCCL_DEBUG_SUBSYS=^init,Net\nsrun -K python train.py\n",
            "SUBSYS",
        ),
    ),
    "subsystems that only print at the start": (
        "nccl-debug-flood",
        _script(
            f"{HEAD}export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL\nsrun -K python train.py\n",
            f"{HEAD}export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV\nsrun -K python train.py\n",
            "NCCL_DEBUG",
        ),
    ),
    "a variable that nothing reads": (
        "misspelt-variable",
        _script(
            f"{HEAD}export NCCL_SOCKET_TIMEOUT=60000\nsrun -K python train.py\n",
            f"{HEAD}export NCCL_LOGBOOK=/shared NCCL_OFI_X=1 NCCL_HOME=/opt NCCL_PROTO=Simple\necho $NCCL_LOGBOOK\n",
            "NCCL_SOCKET_TIMEOUT",
        ),
    ),
    "any other variable of NCCL": (
        "misspelt-variable",
        _script(
            f"{HEAD}export TORCH_NCCL_QUACK=1\nsrun -K python train.py\n",
            f"{HEAD}export TORCH_QUACK=1\nsrun -K python train.py\n",
            "TORCH_NCCL_QUACK",
        ),
    ),
    "an input of sbatch": (
        "not-set-by-slurm",
        _script(
            f"{AGENTS}srun -K torchrun --nproc_per_node $SBATCH_GPUS_PER_NODE train.py\n",
            f"{AGENTS}export SBATCH_GPUS_PER_NODE=8\necho $SBATCH_GPUS_PER_NODE\n",
            "SBATCH_GPUS_PER_NODE",
        ),
    ),
    "a directory that every attempt deletes": (
        "requeue-overwrites",
        _script(
            f"{REQUEUED}rm -rf /shared/run\nsrun -K python train.py --save-dir /shared/run\n",
            f"{REQUEUED}rm -rf /tmp/run\nsrun -K python train.py --save-dir /shared/run\n",
            "rm -rf",
        ),
    ),
    "hosts of the job before": (
        "hosts-appended",
        _script(
            f"{AGENTS}F=hosts\nscontrol show hostnames >> $F\nmpirun --hostfile $F python train.py\n",
            f"{AGENTS}F=hosts-$SLURM_JOB_ID\nscontrol show hostnames >> $F\nmpirun --hostfile $F python train.py\n",
            ">> $F",
        ),
    ),
    "a name that the user replaces": (
        "directive-placeholder",
        _script(
            f"{HEAD}#SBATCH --partition=YOUR_PARTITION\n", f"{HEAD}#SBATCH --partition=a100\n", "--partition"
        ),
    ),
    "a placeholder with blanks": (
        "directive-unknown",
        _script(
            f"{HEAD}#SBATCH --partition=<your partition>\n", f"{HEAD}#SBATCH --partition=a100\n", "<your"
        ),
    ),
    "two GPUs of a node": (
        "fixed-port",
        _script(
            f"{ALONE_4.replace('4', '2', 1)}export MASTER_PORT=29500\n",
            f"{ALONE_4.replace('gpu:4', 'gpu:8')}export MASTER_PORT=29500\n",
            "29500",
        ),
    ),
    "a signal to the steps": (
        "exit-signal",
        _script(
            f"{HEAD}#SBATCH --signal=USR1@300\nsrun -K {SAVING} --exit-signal-handler\n",
            f"{HEAD}#SBATCH --signal=TERM@300\nsrun -K {SAVING} --exit-signal-handler\n",
            "--signal",
        ),
    ),
    "a handler that no signal reaches": (
        "no-exit-handler",
        _script(
            f"{HEAD}srun -K {SAVING} --exit-signal-handler\n",
            f"{HEAD}srun -K timeout --signal=TERM 50m {SAVING} --exit-signal-handler\n",
            "srun",
        ),
    ),
    "a time after which a signal has ended the training": (
        "exit-after-limit",
        _script(
            f"{HEAD}srun -K {SAVING} --exit-duration-in-mins 60 --exit-signal-handler\n",
            f"{HEAD}#SBATCH --signal=TERM@300\nsrun -K {SAVING} --exit-duration-in-mins 60 --exit-signal-handler\n",
            "srun",
        ),
    ),
    "the path outside the container": (
        "path-not-mounted",
        _script(EFFDET, EFFDET.replace("/backbones/b0", "/checkpoints/b0"), "--backbone"),
    ),
}
"""Other ways to break a rule: what they are, the rule, and its example."""
