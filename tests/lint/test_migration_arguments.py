"""A converted run gives its program the arguments and the environment that the script gives it, in real bash."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcgen import plan
from hpcgen.check.migration.migration import migrate
from hpcgen.config.profiles import load_cluster
from tests.runs import loaded

SHOW = """\
#!/bin/bash
printf '<%s>\\n' "$@"
for name in T1 T2 T3; do printf '%s=%s\\n' "$name" "${!name-unset}"; done
"""
SRUN = """\
#!/bin/bash
while [[ $1 == -* ]]; do
    [[ $1 == --export=ALL,* ]] && export "${1#*,}"
    shift
done
exec "$@"
"""
TORCHRUN = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
[[ $1 == -m ]] && exec show "$@"
exec "$@"
"""
DIRECTIVES = "#!/bin/bash\n#SBATCH --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --time=1:00:00\n"
TASK = {
    "SLURM_PROCID": "5", "SLURM_LOCALID": "5", "SLURM_NODEID": "0", "SLURM_NTASKS": "8", "SLURM_NNODES": "1",
    "SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "8",
    "MASTER_ADDR": "n1", "MASTER_PORT": "1234",
}  # fmt: skip
"""Variables that Slurm sets for the task. In these tests, the submitting shell sets them as well."""

FORMS = """\
srun show a b
srun --label -K1 show "a b" c
srun show 'a b' "c 'd'" e\\ f
srun show "" a ''
srun show --x=$SLURM_JOB_ID "${SLURM_PROCID}" r$SLURM_LOCALID/${SLURM_NTASKS}
srun show --n "$SLURM_NNODES" --addr tcp://$MASTER_ADDR:$MASTER_PORT
srun show '$HOME' 'cost $5' '`x`' "\\$X" "\\`y\\`"
srun show '{"lr": 3e-4, "a": [1]}' "{b}"
srun show $'a "b"' $'it\\'s' | cat
srun show $(( 3 * 4 )) $((SLURM_NNODES * 8))
A="-x 1 -y '2'"; srun show $A "$A"
A=(-x "1 2" ''); srun show "${A[@]}" ${A[@]} "${A[*]}"
A=(a); A+=("b c"); srun show "${A[@]}" last
N=7; srun show OLMo-${N}B "$N"B ${N}_x
N=7B; srun show ${N/B/b} "${M:-d e}" ${M:-f}
export T1=1; srun show a
export T1="a b" T2='$x'; srun show a
T1=1 srun show a
T1=1; export T1; T1=2 srun show a
declare -x T1=1; T2=no; srun show a
T1=0 srun env T1=1 T2=2 show a
srun bash -c 'show a "b c" $SLURM_PROCID'
srun bash -c "show a 'b c' \\$SLURM_PROCID"
srun bash -c 'T1=1 T2="x y" show a'
srun bash -c 'export T1=5; exec show a $T1'
export T1=outer; srun bash -c 'export T1=inner; show "$T1"'
X=5; srun bash -c "show $X '$X' \\"$X y\\""
srun bash -c 'show "$@"' name a "b c"
srun bash -c 'exec "$@"' name show a "b c"
run() { srun show "$@"; }; run a "b c"
run() { srun "$@"; }; run show a "b c"
C="srun show a b"; $C c
C="srun show 'a b'"; eval "$C" c
if [ -n "x" ]; then A=yes; else A=no; fi; srun show $A
case big in small) A=1;; big) A=2;; esac; srun show $A
[[ -z "${A:-}" ]] && A=3; srun show $A
srun nice -n 0 show a "b c"
srun torchrun --nproc_per_node=8 show a "b c" ''
srun torchrun --nproc_per_node=8 -m pkg.show a "b c"
T1=1 srun torchrun --nproc_per_node=8 show a
srun --export=ALL,T1=1 show a
srun show --list=[a,b] x=[1] a,b c:d %e @f +g ^h !
srun show -- -a --b - --
srun show ä "日本" a=b=c
mpirun -np 8 -x T1=1 show a
cd /; srun show a
srun show \\
  a \\
  "b c"
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory with a program that prints what it gets, and stand-ins for what starts it."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name, text in (("show", SHOW), ("srun", SRUN), ("torchrun", TORCHRUN)):
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    (directory / "mpirun").write_text('#!/bin/bash\nexport T1=1\nshift 4\nexec "$@"\n')
    (directory / "mpirun").chmod(0o755)
    return directory


def printed(text: str, directory: Path, **environment: str) -> list[str]:
    path = f"{directory}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-c", text],
        env={"PATH": path, "LC_ALL": "C.UTF-8", **TASK, **environment},
        capture_output=True,
        text=True,
        check=True,
        cwd=directory,
    )
    return done.stdout.splitlines()


def forms() -> list[str]:
    return FORMS.replace("\\\n", "\\\0").replace("\0\n", "\n").split("\n")[:-1]


@pytest.mark.parametrize("form", [form.replace("\0", "\n") for form in forms()])
def test_a_program_gets_what_the_script_gives_it(form: str, programs: Path, tmp_path: Path) -> None:
    script = f"{DIRECTIVES}{form}\n"
    found = migrate(script, "job.sh", *load_cluster("azure-ndv5")).sections
    own = {"name": "mine", "cluster": "azure-ndv5", "paths": {"run_dir": str(tmp_path / "run")}}
    program = {"directory": str(programs), **found["program"]}
    is_torchrun = program.get("launcher") == "torchrun"
    if is_torchrun:  # the task's own torchrun is python -m torch.distributed.run
        command = program["command"]
        program = {
            **program,
            "command": (["show"] if command[0] == "-m" else []) + command,
            "launcher": "srun",
        }
    run = loaded(tmp_path, {**own, **found, "program": program})
    task = plan(run, ["run"], exists=lambda path: True).stages["run"].files["program.sh"]
    assert printed(task, programs, **found.get("environment", {})) == printed(script, programs)


@pytest.mark.parametrize(
    ("form", "command"),
    [
        ("srun show `pwd`/out", ["show", "{`pwd`}/out"]),
        ("srun show $(date +%s) x", ["show", "{$(date +%s)}", "x"]),
        ("srun show $@", ["show", "{$@}"]),
        ('srun show "${@}" $1 $*', ["show", "{$@}", "{1}", "{$*}"]),
        ('A="$@"; srun show $A', ["show", "{$@}"]),
        ("srun show *.txt ~/x {a,b}", ["show", "{*.txt}", "{~/x}", "{ a,b }"]),
        ("A='*.txt'; srun show $A \"$A\"", ["show", "{*.txt}", "*.txt"]),
        ("A=('*.txt' b); srun show ${A[@]}", ["show", "*.txt", "b"]),
        ("for N in 4 8; do srun show OLMo-${N}B; done", ["show", "OLMo-{N}B"]),
        (
            "srun show ${SLURM_JOB_ID%%_*} $((SLURM_PROCID + 1))",
            ["show", "{$ SLURM_JOB_ID%%_* }", "{$((SLURM_PROCID + 1))}"],
        ),
        ('if [ "$X" ]; then A=1; else A=2; fi; srun show -a $A', ["show", "-a", "{2}"]),
        (
            'case $X in a) A="-a 1";; b) A="-b 2";; esac; srun show $A',
            ["show", "{-a}", "{1}", "{-b}", "{2}"],
        ),
        ('srun bash -c "show $@"', ["bash", "-c", "show {$@}"]),
    ],
)
def test_what_only_the_job_knows_is_in_braces_and_listed(form: str, command: list[str]) -> None:
    found = migrate(f"{DIRECTIVES}{form}\n", "job.sh", *load_cluster("azure-ndv5"))
    assert found.sections["program"]["command"] == command
    listed = " ".join(f"{leftover.what} {leftover.why}" for leftover in found.leftovers)
    for argument in command:
        for text in [part.partition("}")[0] for part in argument.split("{")[1:]]:
            assert text in listed
