"""Programs that a script starts through functions, wrappers, launchers and containers."""

from __future__ import annotations

import re

import pytest

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.reader import read

HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n"


def job(text: str) -> Job:
    return Job(read(HEAD + text))


STEP = "srun -n 16 --kill-on-bad-exit=1"
TRAINING = "python -u pretrain_gpt.py --num-layers 12 --bf16"


@pytest.mark.parametrize(
    ("call", "world"),
    [
        ("mpirun -np 16", (2, 8)),
        ("mpirun -n 16 --npernode 8 -x PATH -x A=b --bind-to none --mca pml ob1", (2, 8)),
        ("mpiexec --np 16 --map-by ppr:8:node:PE=4 -x A=$X", (2, 8)),
        ("mpirun --hostfile=hosts -N 8 --mca btl ^openib --tag-output -x A=1", (2, 8)),
        ("prterun -n 4 --prtemca a b -x A=1", (2, 2)),
        ("/opt/mpich/bin/mpiexec.hydra -genv A b -ppn 4 -np 8 -f hosts -bootstrap slurm", (2, 4)),
        ("mpiexec -genvall -genv A=b -perhost 8 -l -iface ib0", (2, 8)),
        ("mpirun -env A b -n 4 -wdir /x", (2, 2)),
        ("mpirun -envlist A,B -np 16", (2, 8)),
        ("prterun -s --set-env A=b --append-env PATH x --report-pid f -n 16", (2, 8)),
        ("mpiexec.hydra -s all -n 16 -gtoolfile f -genvlist A", (2, 8)),
        ("mpirun_rsh -np 16 -hostfile hosts A=b", (2, 8)),
        ("mpirun -np $SLURM_NTASKS $MPI_OPTIONS -x A", (2, 8)),
        ("mpirun -np $N -x A", None),
        ("mpirun -x A -np 3", None),
        ("timeout -k 5 300 singularity exec --nv image.sif mpirun -np 16 -x A", (2, 8)),
        ("srun -N1 -n1 mpirun -np 16 -x A numactl -m 0", (2, 8)),
        ("mpirun -np 16 -x A singularity exec --nv image.sif ./launch.sh", (2, 8)),
        ("ibrun -n 16 -o 0", (2, 8)),
    ],
)
def test_programs_that_mpirun_starts(call: str, world: tuple[int, int] | None) -> None:
    for text in (
        f"{call} {TRAINING}",
        f"{call} bash -lc 'cd /x && {TRAINING}'",
        f"srun -n1 bash -c '{call} {TRAINING}'",
    ):
        script = job(text)
        [launch] = script.megatron
        assert {name: flag.values[0].text for name, flag in launch.flags.items() if flag.values} == {
            "num-layers": "12"
        }
        assert script.world_size(launch) == world
        assert ("A" in launch.environment) == bool(re.search(r"\bA\b", call))


WRITTEN = f"#!/bin/bash\n{TRAINING}\n"


@pytest.mark.parametrize(
    ("text", "in_step"),
    [
        (f"cat >run.sh <<'E'\n{WRITTEN}E\nchmod +x run.sh\n{STEP} ./run.sh\n", True),
        (f"cat <<E >$X/run.sh\n{WRITTEN}E\n{STEP} bash -x $X/run.sh a\n", True),
        (f"tee run.sh <<E >/dev/null\n{WRITTEN}E\n{STEP} singularity exec --nv image bash run.sh\n", True),
        (f"cat >run.sh <<E\n{TRAINING}\nE\nbash run.sh\n", False),
        (f"cat >run.sh <<E\n{WRITTEN}E\nsed -i s/12/13/ run.sh\n{STEP} bash run.sh\n", None),
        (f"cat >run.sh <<E\n{WRITTEN}E\necho exit >>run.sh\n{STEP} bash run.sh\n", None),
        (f"cat >run.sh <<E\n{TRAINING}\nE\n{STEP} ./check run.sh\n", None),
    ],
)
def test_scripts_that_here_documents_write(text: str, in_step: bool | None) -> None:
    launches = job(text).megatron
    assert [launch.step is not None for launch in launches] == [in_step] * (in_step is not None)


def test_the_first_of_several_programs_of_mpirun() -> None:
    script = job(f"mpirun -np 1 {TRAINING} : -np 15 python other.py")
    [launch] = script.launches
    assert [word.text for word in launch.arguments] == ["--num-layers", "12", "--bf16"]
    assert script.world_size(launch) is None


@pytest.mark.parametrize(
    "text",
    [
        f"{STEP} {TRAINING}",
        f"timeout -k 5 300 {STEP} env A=b nice -n 5 {TRAINING}",
        f'launch() {{ {STEP} "$@"; }}\nlaunch {TRAINING}',
        f'run() {{ eval "$@"; }}\nrun {STEP} {TRAINING}',
        f'run() {{ "$@"; }}\nlaunch() {{ run {STEP} "$@"; }}\nlaunch {TRAINING}',
        f'run() {{ local limit=$1; shift; timeout "$limit" "$@"; }}\nrun 300 {STEP} {TRAINING}',
        f'step=({STEP}); a=(--num-layers 12)\na+=(--bf16)\n"${{step[@]}}" python pretrain_gpt.py "${{a[@]}}"',
        f'ARGS="--num-layers 12 --bf16"\n{STEP} python pretrain_gpt.py $ARGS',
        f"{STEP} bash -c '{TRAINING}'",
        f'{STEP} bash -lc "cd /code && {TRAINING}"',
        f"{STEP} bash -c 'exec enroot start --mount a:b \"$@\"' name --env X image {TRAINING}",
        f"{STEP} enroot start --rw --mount a:b image {TRAINING}",
        f"{STEP} enroot start image sh -c ': >f; exec \"$@\"' name env --chdir=/x {TRAINING}",
        f"{STEP} bash -c 'exec enroot start \"$@\"' a --rw image sh -c ': >f; exec \"$@\"' b {TRAINING}",
        f"{STEP} nsys profile -o out {TRAINING}",
        f"{STEP} singularity --quiet exec -B /a:/b --nv image.sif {TRAINING}",
        f'{STEP} apptainer exec --bind=/a image.sif bash -c "{TRAINING}"',
        f"{STEP} shifter --image=x:y -e A=b {TRAINING}",
        f"{STEP} singularity exec image.sif ./launch.sh pretrain_gpt.py --num-layers 12 --bf16",
        f"{STEP} bash launch.sh {TRAINING}",
        f"if [[ $x ]]; then\n {STEP} \\\n  {TRAINING}\nfi",
        f"{STEP} singularity exec --nv -B /a,/b $SIF {TRAINING}",
        f"{STEP} apptainer exec $BINDS image.sif bash -c '{TRAINING}'",
        f"{STEP} shifter --image=a/b:c {TRAINING}",
        f"{STEP} uv run --with torch {TRAINING}",
        f"{STEP} uv --directory /code run --no-sync pretrain_gpt.py --num-layers 12 --bf16",
        f"{STEP} podman-hpc run --rm --gpu -v /a:/b image:1 {TRAINING}",
        f"{STEP} docker run --rm --gpus all --ipc host image:1 bash -c '{TRAINING}'",
        f"{STEP} shifter --image=x:y conda run -n env {TRAINING}",
        f"{STEP} singularity exec image.sif numactl --cpunodebind 0 --membind 0 {TRAINING}",
        f"{STEP} micromamba run -n env nsys profile -t cuda,nvtx -o out {TRAINING}",
        f"{STEP} bash -x wrapper {TRAINING}",
        f"{STEP} ./wrapper {TRAINING}",
        f"{STEP} bash ./bind.sh --cpu=exclusive --ib=single -- {TRAINING}",
        f"{STEP} $WRAPPER {TRAINING}",
        f"{STEP} ./pretrain_gpt.py --num-layers 12 --bf16",
        f"{STEP} $PYTHON_EXE pretrain_gpt.py --num-layers 12 --bf16",
    ],
)
def test_the_training_is_found_in_its_step(text: str) -> None:
    [launch] = job(text).trainings
    assert launch.is_megatron
    assert launch.flags.keys() == {"num-layers", "bf16"}
    assert launch.step is not None
    assert launch.step.option("ntasks").text == "16"
    assert launch.step.option("kill-on-bad-exit").text == "1"


@pytest.mark.parametrize(
    ("text", "launcher", "world"),
    [
        ("srun python pretrain_gpt.py", "python", (2, 8)),
        ("srun -n 4 python -m trainer", "python", (2, 2)),
        (
            "srun -n2 torchrun --nnodes $SLURM_NNODES --nproc_per_node=$SLURM_GPUS_PER_NODE train.py",
            "torchrun",
            (2, 8),
        ),
        ("srun -n2 python -m torch.distributed.run --nproc-per-node 4 train.py", "torchrun", (2, 4)),
        ("srun -n2 torchrun --nnodes=${N:-1} train.py", "torchrun", None),
        ("srun -n2 accelerate launch --num_processes 16 train.py", "accelerate", (2, 1)),
        ("srun -n2 singularity exec a.sif composer -n 8 train.py", "composer", (2, 1)),
        ("srun -n2 bash launch.sh torchrun --nnodes=2 --nproc-per-node=8 train.py", "torchrun", (2, 8)),
        ("python train.py", "python", None),
    ],
)
def test_launchers_and_the_ranks_they_start(text: str, launcher: str, world: tuple[int, int] | None) -> None:
    found = job(text)
    [launch] = found.trainings
    assert launch.launcher == launcher
    assert found.world_size(launch) == world


@pytest.mark.parametrize(
    ("program", "trains"),
    [
        ("-m open_clip_train.main", True),
        ("-m open_lm.main", True),
        ("-m torchtitan.train", True),
        ("train/finetuning.py", True),
        ("src/open_clip_train/main.py", True),
        ("scripts/training/run_recipe.py", True),
        ("scripts/data/main.py", False),
        ("multinode_ddp_train.py", True),
        ("prepare_training_data.py", False),
        ("test_train.py", False),
        ("constraint.py", False),
    ],
)
def test_what_counts_as_a_training(program: str, trains: bool) -> None:
    assert bool(job(f"srun python {program}").trainings) == trains


@pytest.mark.parametrize(
    ("text", "background"),
    [
        ("srun a", False),
        ("srun a &", True),
        ('run() { "$@" & wait; }\nrun srun a', True),
        ('run() { "$@"; }\nrun srun a &', True),
    ],
)
def test_steps_in_the_background(text: str, background: bool) -> None:
    [step] = job(text).steps
    assert step.background == background


def test_options_from_a_variable_leave_a_step_open() -> None:
    [first, second] = job("srun $SRUN_ARGS -n 4 python train.py\nsrun -n 4 python train.py").steps
    assert first.is_open
    assert first.option("ntasks") is not None
    assert not second.is_open


@pytest.mark.parametrize(
    ("directives", "gpus"),
    [
        ("--gpus-per-node=8", 8),
        ("--gpus-per-node=h100:4", 4),
        ("--gres=gpu:8", 8),
        ("--gres=gpu:a100:4,nvme:1", 4),
        ("--gpus-per-task=2", 16),
        ("-G 16", 8),
        ("--gres=nvme:1", None),
    ],
)
def test_gpus_of_a_node(directives: str, gpus: int | None) -> None:
    text = HEAD.replace("#SBATCH --gpus-per-node=8", f"#SBATCH {directives}")
    assert Job(read(text)).gpus_per_node == gpus
