"""`hpcgen init --from` loses nothing in silence: each word of a launch is in the run file, listed or refused."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator

import pytest

from hpcgen.check.migration.migration import migrate
from hpcgen.config.profiles import load_cluster
from hpcgen.config.slurm import PASSED_ON
from hpcgen.errors import ConfigErrors

Token = Callable[[], str]

DIRECTIVES = (
    "--mem={0}", "--mem-per-cpu={0}", "--cpus-per-task={n}", "--hint={0}", "--mail-user={0}", "--mail-type={0}",
    "--open-mode=truncate --comment={0}", "--signal=B:USR1@{n}", "--gres=gpu:{0}:8", "--chdir=/{0}", "--nice={n}",
    "--network={0}", "--dependency={0}", "--exclude={0}", "--nodelist={0}", "--export=ALL,{v}={0}", "--array=0-{n}",
    "--output={0}", "--error={0}", "--input={0}", "--distribution={0}", "--cpus-per-gpu={n}", "--job-name=+{0}",
    "--partition={0}", "--account={0}", "--qos={0}", "--constraint={0}", "--reservation={0}", "--licenses={0}",
    "--container-image={0}", "--profile={0}", "--gpu-bind={0}", "--tmp={0}", "--begin={0}",
)  # fmt: skip
STEP = (
    "--environment={0}", "--network={0}", "--cpu-bind={0}", "--gpu-bind={0}", "--mpi={0}", "--mem={0}",
    "--container-env={0}", "--container-name={0}", "--container-image=/{0}.sqsh", "--container-mounts=/{0}:/m",
    "--export=ALL,{v}={0}", "--export={0}", "-w {0}", "--chdir=/{0}", "-D {0}", "-c {n}",
    "--hint={0}", "--multi-prog --comment={0}", "--output={0}", "-e {0}", "--distribution={0}", "--time={0}",
    "--kill-on-bad-exit=0 --comment={0}", "--propagate={0}", "--prolog={0}", "--task-prolog={0}", "--gres={0}",
)  # fmt: skip
SETUP = (
    "export {v}={0}", "{v}={0}; export {v}", "declare -x {v}={0}", "source /{0}.sh", ". /{0}.sh", "module load {0}",
    "conda activate {0}", "ulimit -n {n}", "rsync -a {0} /tmp", "cat > {0}.json <<EOF\n{{}}\nEOF", "sed -i s/a/b/ {0}",
    "cd /{0}", "cd {0}", "export {v}=$({0})", "[ -d /x ] && export {v}={0}", "unset {v}", "python prepare.py --{0}",
    "setup_{0}() {{ module load {0}; }}\nsetup_{0}", "if [ $1 ]; then export {v}={0}; else export {v}=b; fi",
    "srun -n 1 ./check_{0}.sh", "export SLURM_CPU_BIND_{v}={0}", "export TORCHELASTIC_{v}={0}", "eval \"$({0} hook)\"",
    "trap 'cp {0} /tmp' EXIT", "sbatch {0}.sh", "scontrol update job={0}", "nvidia-smi -pl {n}", "env A=1 ./{0}.sh",
    "echo a > hosts_{0}", "python -c 'import {0}'", "pip install {0}",
)  # fmt: skip
IN_TEXT = (
    "export {v}={0}", "source /{0}.sh", "cd /{0}", "module load {0}", "ulimit -n {n}", "./setup_{0}.sh", "unset {v}",
    "{v}={0}; export {v}",
)  # fmt: skip
WRAPPERS = (
    "numactl --membind={n}", "nsys profile -o {0}", "/w/{0}.sh", "env {v}={0}", "stdbuf -o{n}", "timeout {n}", "time",
    "singularity exec --bind /{0} /{0}.sif", "apptainer exec --env {v}={0} /i.sif", "nice -n {n}", "taskset -c {n}",
    "/bin/launch_{0} --bind {0}",
)  # fmt: skip
LAUNCHERS = (
    "python", "python -u -W{0}", "/opt/{0}/bin/python", "torchrun --nproc_per_node=8 --max_restarts={n}",
    "torchrun --nproc-per-node 8 --log-dir {0} --rdzv-conf=timeout={n}", "python -m torch.distributed.run --tee {n}",
    "python -m torch.distributed.launch --nproc_per_node=8", "accelerate launch --mixed_precision={0}",
    "deepspeed --include {0}", "python -O", "./launch_{0}", "singularity exec /{0}.sif bash",
    "shifter -i {0} ./run_{0}",
)  # fmt: skip
ARGUMENTS = (
    "--a {0}", "--a={0}", '"--a {0}"', "'{0} $5'", "\\{0}", '"$SLURM_JOB_ID-{0}"', "$({0})", "`{0}`", "${{{v}:-{0}}}",
    "*.{0}", "~/{0}", "{{{0},b}}", "$'{0}'", '"${{{v}}}{0}"', "{0}''", '""', "$@", "[{0}]", "a=[{0}]",
)  # fmt: skip
MEGATRON = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 256 --train-iters 1000 --lr 1e-4 --mock-data"
)
ENDS = (
    "",
    "",
    " > {0}.log 2>&1",
    " 2> {0}.err",
    " | tee {0}.log",
    " < {0}.txt",
    " &> {0}",
    " <<< {0}",
    " |& grep {0}",
)


class Script:
    """A random script, and the words in it that a conversion must not lose."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.tokens: list[str] = []
        self._numbers = itertools.count(1)
        self.text = "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --time=1:00:00"
        for form in self.chance.sample(DIRECTIVES, 4):
            yield f"#SBATCH {self._made(form)}"
        for form in self.chance.sample(SETUP, 3):
            yield self._made(form)
        command = self._command()
        match self.chance.randrange(2 if "bash -c" in command else 0, 6):
            case 0:
                first, second = self._made("--b {0}"), self._made("--b {0}")
                yield f'if [ "$X" ]; then B="{first}"; else B="{second}"; fi'
                yield f"{command} $B"
            case 1:
                yield f'A=({self._made("--b {0}")})\n[ "$X" ] && A+=({self._made("--c {0}")})'
                yield f'{command} "${{A[@]}}"'
            case 2:
                yield f"for i in 1 2; do\n{command}\ndone"
            case 3:
                yield f"run() {{\n{command}\n}}\nrun"
            case _:
                yield command + self._made(self.chance.choice(ENDS))

    def _command(self) -> str:
        options = " ".join(self._made(form) for form in self.chance.sample(STEP, 3))
        wrapper = self._made(self.chance.choice(("", "", *WRAPPERS)))
        launcher = self._made(self.chance.choice(LAUNCHERS))
        if self.chance.random() < 0.3:
            program = (
                f"{wrapper} {launcher} /c/pretrain_gpt.py {MEGATRON} --manual-gc-interval {self._number()}"
            )
        else:
            arguments = " ".join(self._made(form) for form in self.chance.sample(ARGUMENTS, 3))
            program = f"{wrapper} {launcher} /c/train.py {arguments}"
        if "'" not in program and self.chance.random() < 0.4:
            before = "\n".join(self._made(form) for form in self.chance.sample(IN_TEXT, 2))
            prefix = self._made(self.chance.choice(("", "{v}={0} ")))
            around = self._made(self.chance.choice(("", "", *WRAPPERS)))
            program = f"{around} bash -c '{before}\n{prefix}{program}'"
        return f"{self._made(self.chance.choice(('', '{v}={0} ')))}srun {options} {program}"

    def _made(self, form: str) -> str:
        """A form with new words in its places: {0} and {v} are names, {n} a number."""
        values = {"0": self._token, "v": self._name, "n": self._number}
        used = {place: make() for place, make in values.items() if f"{{{place}}}" in form}
        if {"0", "v"} <= used.keys():  # a variable is listed by its name
            self.tokens.remove(used["0"])
        return form.format(used.get("0", ""), v=used.get("v", ""), n=used.get("n", ""))

    def _token(self) -> str:
        self.tokens.append(f"word{next(self._numbers)}x")
        return self.tokens[-1]

    def _name(self) -> str:
        self.tokens.append(f"WORD{next(self._numbers)}X")
        return self.tokens[-1]

    def _number(self) -> str:
        self.tokens.append(str(7000 + next(self._numbers)))
        return self.tokens[-1]


def told(text: str) -> str:
    """Everything that the user gets: the values of the run file, what is listed, and what is refused."""
    try:
        found = migrate(text, "job.sh", *load_cluster("azure-ndv5"))
    except ConfigErrors as error:
        return str(error)
    listed = "\n".join(f"{leftover.what}: {leftover.why}" for leftover in found.leftovers)
    return "\n".join((json.dumps(found.sections), listed, *found.own, *found.usual, *found.without_effect))


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (20, 40, 60))]
)
def test_no_word_of_a_random_launch_is_lost(first: int) -> None:
    lost = {}
    for seed in range(first, first + 20):
        script = Script(seed)
        message = told(script.text)
        refused = message.startswith("job.sh:")
        if missing := [token for token in script.tokens if token not in message]:
            if refused:  # all that is refused, and nothing else, is in the message
                continue
            lost[seed] = (missing, script.text)
    assert lost == {}, "\n".join(f"{seed}: {missing}\n{text}" for seed, (missing, text) in lost.items())


DIRECTIVES_OF_2_NODES = "#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --time=1:00:00\n"


@pytest.mark.parametrize(
    ("script", "texts"),
    [
        # the words in front of a program that is not Python, or of a shell
        ("srun singularity exec --nv /i.sif bash run.sh", ['"runtime": "apptainer", ', '"image": "/i.sif"']),
        ("srun shifter bash -c 'source e.sh; python train.py'", ["in place of shifter", "source e.sh"]),
        ("srun numactl -m 0 bash -c 'python train.py'", ["numactl -m 0 in front of the shell"]),
        ("srun env A_B=3 bash -c 'python train.py'", ['"A_B": "3"']),
        (
            "cat > r.sh <<'E'\npython train.py\nE\nsrun apptainer exec /i.sif bash r.sh",
            ['"image": "/i.sif"'],
        ),
        # redirections of a group, a condition and a loop
        ("{ srun ./run; echo a; } > log.txt 2>&1", ["> log.txt"]),
        ("if true; then\n  ( srun ./run ) 2> err.txt\nfi >> out.txt", ["2> err.txt", ">> out.txt"]),
        (
            "while read x; do srun ./run $x; done < list.txt",
            ["< list.txt: the program gets no standard input"],
        ),
        # login shells
        ("srun bash -lc 'python train.py'", ["bash -lc: it reads /etc/profile"]),
        # what runs around the program
        ("trap 'cp /o /h' EXIT\nsrun python train.py", ["trap cp /o /h EXIT"]),
        ("srun python train.py\nsbatch next.sh", ["sbatch next.sh: the run file submits nothing"]),
        ("srun python train.py\nrm -rf /s", ["rm -rf /s: it runs after the program"]),
        ("srun python train.py\necho done >> f", ["echo done >> f: it runs after the program"]),
        ('eval "$(conda shell.bash hook)"\nsrun python train.py', ["hook): put it into the prologue"]),
    ],
)
def test_what_is_around_a_program_is_listed(script: str, texts: list[str]) -> None:
    message = told(f"#!/bin/bash\n{DIRECTIVES_OF_2_NODES}{script}\n")
    assert [text for text in texts if text not in message] == []


@pytest.mark.parametrize(
    "script",
    [
        "srun bash -c 'export A=1; cd /z; ./run'",  # program.command has the complete text
        "trap - EXIT\nsrun ./run",
        "command -v sbatch\nsrun ./run > log\necho done >> log",
    ],
)
def test_nothing_is_listed_that_the_run_file_has_or_that_only_prints(script: str) -> None:
    found = migrate(f"#!/bin/bash\n{DIRECTIVES_OF_2_NODES}{script}\n", "job.sh", *load_cluster("azure-ndv5"))
    assert [leftover.what for leftover in found.leftovers if leftover.what != "> log"] == []


def test_a_login_shell_of_the_script_is_listed() -> None:
    assert "#!/bin/bash -l: it reads" in told(f"#!/bin/bash -l\n{DIRECTIVES_OF_2_NODES}srun ./run\n")


@pytest.mark.parametrize(
    ("directive", "time"),
    [
        ("00:5:00", "00:05:00"), ("72:0:0", "3-00:00:00"), ("500:00:00", "20-20:00:00"), ("90", "90:00"),
        ("1-2", "1-2"), ("12:00:00", "12:00:00"),
    ],
)  # fmt: skip
def test_every_time_of_slurm_is_a_time_limit(directive: str, time: str) -> None:
    script = f"#SBATCH --nodes=1 --ntasks=8 --gpus-per-node=8 --time={directive}\nsrun ./run\n"
    found = migrate(script, "job.sh", *load_cluster("azure-ndv5"))
    assert (found.sections["slurm"]["defaults"]["time"], found.leftovers) == (time, ())


def test_a_job_without_a_limit_is_told_the_limit_that_is_filled_in() -> None:
    message = told("#SBATCH --nodes=1 --ntasks=8 --time=UNLIMITED\nsrun ./run\n")
    assert "--time=UNLIMITED" in message
    assert "the time limit: the script sets none that a run file has" in message


@pytest.mark.parametrize(
    ("directives", "ranks"),
    [
        ("--gres=gpu:1", 1),  # Slurm starts one task if nothing sets their number
        ("--ntasks=2 --gres=gpu:1", 2),
        ("--ntasks=2 --ntasks-per-gpu=2 --gres=gpu:1", 2),
        ("--nodes=1 --ntasks-per-node=3", 3),
        ("--ntasks-per-node=3", 3),
    ],
)
def test_the_run_file_starts_as_many_tasks_as_the_script(directives: str, ranks: int) -> None:
    found = migrate(f"#SBATCH --time=1:00 {directives}\nsrun ./run\n", "job.sh", *load_cluster("azure-ndv5"))
    assert found.sections["slurm"]["run"] == {"nodes": 1, "ntasks_per_node": ranks}
    assert "extra_directives" not in found.sections["slurm"]["defaults"]


@pytest.mark.parametrize(("value", "segment"), [("16", 16), ("0", None)])
def test_a_segment_becomes_a_key(value: str, segment: int | None) -> None:
    script = f"#SBATCH --nodes=32 --ntasks-per-node=8 --time=90 --segment={value}\nsrun ./run\n"
    found = migrate(script, "job.sh", *load_cluster("azure-ndv5")).sections["slurm"]["defaults"]
    assert found.get("segment") == segment
    assert found.get("extra_directives") == (None if segment else ["--segment=0"])


@pytest.mark.parametrize("option", PASSED_ON)
def test_a_value_that_a_key_does_not_take_is_listed(option: str) -> None:
    """As an extra directive, hpcgen would refuse it."""
    key = PASSED_ON[option]
    for value in ("gpu-1", "_gpu", "gpu/a"):
        script = f"#SBATCH --nodes=1 --ntasks=8 --time=90 --{option}={value}\nsrun ./run\n"
        found = migrate(script, "job.sh", *load_cluster("azure-ndv5"))
        assert "extra_directives" not in found.sections["slurm"]["defaults"]
        listed = [(leftover.what, leftover.why) for leftover in found.leftovers]
        if value == "gpu-1":
            assert (found.sections["slurm"]["defaults"][key], listed) == (value, [])
        else:
            why = f"slurm.defaults.{key} does not take this value"
            assert listed == [(f"--{option}={value}", why)]


@pytest.mark.parametrize("gres", ["gpu:rtx8000:1", "gpu:1,vram:50GB", "gpu:a100:4"])
def test_the_type_of_the_gpus_is_listed(gres: str) -> None:
    assert f"--gres={gres}" in told(f"#SBATCH --nodes=1 --ntasks=1 --gres={gres}\nsrun ./run\n")


@pytest.mark.parametrize(
    ("script", "program"),
    [
        ("srun -n1 -N1 bash serve.sh &\nsrun -n1 -N1 bash rl.sh", "rl.sh"),
        ("srun -N1 -n2 python prepare_data.py\nsrun python main.py", "main.py"),
        ("python generate_data.py\npython main.py", "main.py"),
        ("srun ray start --block &\npython -m trlx.sweep", "trlx.sweep"),
        ("python fix.py\nsrun python main.py &\nwait", "main.py"),
        ("srun python a.py &\nsrun python b.py &\nwait", "a.py"),
    ],
)
def test_the_program_is_the_one_that_the_job_is_for(script: str, program: str) -> None:
    found = migrate(
        f"#SBATCH --nodes=2 --ntasks-per-node=8 --time=1:00:00\n{script}\n",
        "job.sh",
        *load_cluster("azure-ndv5"),
        {"slurm": {"run": {"nodes": 1}}},
    )
    assert program in found.sections["program"]["command"]


@pytest.mark.parametrize(
    ("directives", "argument"),
    [
        ("--ntasks=1", "{$ SLURM_NTASKS_PER_NODE:-4 }"),  # validate refuses it
        ("--ntasks-per-node=4", "4"),
    ],
)
def test_a_default_counts_where_slurm_does_not_set_the_variable(directives: str, argument: str) -> None:
    script = f"#SBATCH --nodes=1 --time=1:00:00 {directives}\nsrun ./run ${{SLURM_NTASKS_PER_NODE:-4}}\n"
    found = migrate(script, "job.sh", *load_cluster("azure-ndv5"))
    assert found.sections["program"]["command"] == ["./run", argument]
