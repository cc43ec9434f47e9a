"""Ports that scripts compute, and hosts that they take from lists of nodes."""

from __future__ import annotations

import contextlib
import random
import subprocess

import pytest

from hpcgen.check.lint.arithmetic import Refused
from hpcgen.check.lint.check import Finding, lint
from hpcgen.check.lint.filters import FILTERS, Call, Unknown
from hpcgen.check.lint.reader import read
from hpcgen.check.lint.sample import Sample

HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --exclusive\n#SBATCH --time=60\n"
LEADING_ZERO = "for an octal number"
TOO_HIGH = "and ports are 1024 to 65535"
TAKEN = "may be in use"
JOB = "SLURM_JOB_ID"

PORTS = [
    # the computation, and part of the finding; "" for a port that every job can use
    (f"$((10000 + {JOB} % 20000))", ""),
    (f"$((1024 + {JOB} % 30000))", ""),
    (f"$(( ( ${{{JOB}}} + 7 ) % 10000 + 11000 ))", ""),
    (f"$((0x4000 + {JOB} % 0x3000))", ""),
    (f"$((10000 + 10#${{{JOB}: -4}}))", ""),
    ("$(expr 10000 + $(echo -n $SLURM_JOBID | tail -c 4))", ""),  # decimal for expr
    (f"$(expr 10000 + ${{{JOB}: -4}})", ""),
    (f"1${{{JOB}: -4}}", ""),
    (f'$(printf "1%04d" $(({JOB} % 10000)))', ""),
    (f'$(echo "10000 + ${JOB} % 20000" | bc)', ""),
    (f'$(python3 -c "print(10000 + ${JOB} % 20000)")', ""),
    (f"$(echo ${JOB} | awk '{{print $1 % 20000 + 10000}}')", ""),
    ("$((20000 + UID % 1000))", ""),
    (f"$((10000 + ${{{JOB}:-0}} % 20000))", ""),
    ("$((RANDOM % 1000 + 20000))", ""),
    ("$(shuf -i 20000-30000 -n 1)", ""),
    ("${MASTER_PORT:-29500}", ""),
    ("$(find_port)", ""),
    (f"$((10000 + ${{{JOB}: -4}}))", LEADING_ZERO),
    (f"$((10000 + ${{{JOB}:(-4)}}))", LEADING_ZERO),
    ("$((10000 + $(echo -n $SLURM_JOBID | tail -c 4)))", LEADING_ZERO),
    ("$(( 10000 + `echo $SLURM_JOBID | tail -c 5` ))", LEADING_ZERO),
    (f"$((10000 + $(echo ${JOB} | cut -c 4-)))", LEADING_ZERO),
    (f"$((10000 + $(rev <<< ${JOB} | cut -c1-4)))", LEADING_ZERO),
    (f"${{MASTER_PORT:-$((10000 + ${{{JOB}: -4}}))}}", LEADING_ZERO),
    (f'$(python3 -c "print(10000 + ${{{JOB}: -4}})")', "Python refuses the number"),
    (f"${{{JOB}: -4}}", TOO_HIGH),
    (f"6${{{JOB}: -4}}", TOO_HIGH),
    (f"${{{JOB}:0:5}}", TOO_HIGH),
    (f"${JOB}", TOO_HIGH),
    (f"$(({JOB} + 10000))", TOO_HIGH),
    (f"$((10000 + ${{{JOB}:-0}}))", TOO_HIGH),
    (f"${{{JOB}:-29500}}", TOO_HIGH),
    (f"$(({JOB} / 1000))", TOO_HIGH),
    (f"$(({JOB} % 60000))", TOO_HIGH),
    (f"$((50000 + {JOB} % 16000))", TOO_HIGH),
    (f"$(( ({JOB} % 1000) * 100 + 10000 ))", TOO_HIGH),
    (f"$(expr ${JOB} % 60000)", TOO_HIGH),
    (f'$(echo "30000 + ${JOB} % 40000" | bc)', TOO_HIGH),
    (f"$(echo ${JOB} | awk '{{print $1 % 60000 + 10000}}')", TOO_HIGH),
    (f"$(python3 -c \"print(10000 + int('${JOB}') % 60000)\")", TOO_HIGH),
    (f"$(($(echo ${JOB} | grep -o '....$') + 10000))", LEADING_ZERO),
    (f"$(awk -v id=${JOB} 'BEGIN{{print 10000 + id % 60000}}')", TOO_HIGH),
    ("$(python3 -c 'import os; print(10000 + int(os.environ[\"SLURM_JOB_ID\"]) % 60000)')", TOO_HIGH),
    ("$(python3 -c 'import random; print(random.randint(10000, 70000))')", "a job gets port 70000"),
    ("$((10000 + $(date +%s) % 60000))", "a job gets port 69999"),
    ("70000", "every job gets port 70000"),
    ("80", "every job gets port 80"),
    (f"$((15000 + {JOB} % 50000))", TAKEN),
    (f'$(printf "3%04d" $(({JOB} % 10000)))', TAKEN),
    ("$((RANDOM + 10000))", TAKEN),
    ("$(seq 49152 65535 | shuf -n 1)", TAKEN),
    ("$(comm -23 <(seq 49152 65535 | sort) <(sort used) | shuf | head -n 1)", TAKEN),
]


def found(text: str, *rules: str) -> list[Finding]:
    return lint(f"{HEAD}{text}\n", rules=rules)


@pytest.mark.parametrize(("port", "message"), PORTS, ids=[port for port, _ in PORTS])
def test_a_port_of_every_job(port: str, message: str) -> None:
    for text in (f"export MASTER_PORT={port}", f"P={port}; export MASTER_PORT=$P"):
        findings = found(text, "port-range", "ephemeral-port")
        assert len(findings) == bool(message), findings
        assert all(message in finding.problem.reason for finding in findings)


def test_the_ports_of_launchers_and_of_arrays() -> None:
    launch = "srun torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=$HOST:{} train.py"
    [octal] = found(launch.format("$((10000+${SLURM_JOB_ID: -4}))"), "port-range")
    assert LEADING_ZERO in octal.problem.reason
    assert octal.severity == "warning"
    [fixed] = found(launch.format("70000"), "port-range")
    assert fixed.severity == "error"
    assert found(launch.format("0"), "port-range") == []  # any free port
    task = "export MASTER_PORT=$((64000 + SLURM_ARRAY_TASK_ID))"
    assert found(f"#SBATCH --array=0-1000%4\n{task}", "port-range") == []
    assert TOO_HIGH in found(f"#SBATCH --array=0-2000\n{task}", "port-range")[0].problem.reason


@pytest.mark.parametrize("port", [port for port, _ in PORTS if JOB[:9] in port])
def test_the_port_of_a_sample_is_that_of_bash(port: str) -> None:
    sample_ids = [4_460_089, random.Random(port).randrange(10_000, 67_108_864)]
    for job_id in sample_ids:
        names = {"SLURM_JOB_ID": str(job_id), "SLURM_JOBID": str(job_id)}
        done = subprocess.run(
            ["bash", "-c", f'echo "{port}"'],
            env={"PATH": "/usr/bin:/bin", **names},
            capture_output=True,
            text=True,
            check=False,
        )
        if "command not found" in done.stderr:
            pytest.skip(done.stderr)
        [item] = read(f"x={port}\n").assignments
        assert item.value is not None
        try:
            assert Sample(read("true\n"), names).text(item.value.text) == done.stdout.strip()
        except Refused:
            assert done.stderr


HOSTS = [
    # how MASTER_ADDR is set, and whether it is a host
    ("MASTER_ADDR=$SLURM_JOB_NODELIST", False),
    ("MASTER_ADDR=$(echo $SLURM_JOB_NODELIST | cut -d, -f1)", False),
    ("MASTER_ADDR=$(echo \"$SLURM_JOB_NODELIST\" | tr ',' '\\n' | head -n 1)", False),
    ("MASTER_ADDR=$(echo $SLURM_NODELIST | sed 's/,.*//')", False),
    ("MASTER_ADDR=$(awk -F'[,-]' '{print $1}' <<< $SLURM_NODELIST)", False),
    ("MASTER_ADDR=${SLURM_NODELIST%%,*}", False),
    ("MASTER_ADDR=${SLURM_NODELIST/,*/}", False),
    ("nodes=($SLURM_JOB_NODELIST); MASTER_ADDR=${nodes[0]}", False),
    ("nodes=(${SLURM_JOB_NODELIST//,/ }); MASTER_ADDR=$nodes", False),
    ('IFS=, read -ra nodes <<< "$SLURM_JOB_NODELIST"; MASTER_ADDR=${nodes[0]}', False),
    ("list=$SLURM_JOB_NODELIST; head=${list%%,*}; MASTER_ADDR=$head", False),
    ("for node in ${SLURM_JOB_NODELIST//,/ }; do ssh $node hostname; done", False),
    ("srun -w ${SLURM_JOB_NODELIST%%,*} hostname", False),
    ("srun torchrun --nnodes=2 --rdzv_endpoint=${SLURM_JOB_NODELIST%%,*}:29500 train.py", False),
    ("srun -w $SLURM_JOB_NODELIST hostname", True),
    ("MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)", True),
    ("nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST)); MASTER_ADDR=${nodes[0]}", True),
    ("MASTER_ADDR=$(nodeset -e $SLURM_JOB_NODELIST | cut -d' ' -f1)", True),
    ("MASTER_ADDR=$(echo $SLURM_NODELIST | sed 's/\\[\\([0-9]*\\).*/\\1/')", True),
    (
        "MASTER_ADDR=$(echo $SLURM_NODELIST | sed -e 's/\\[//' -e 's/[-,].*//')",
        True,
    ),  # for names without a hyphen
    ("MASTER_ADDR=$(echo $SLURM_NODELIST | cut -c1-8)", True),  # may be right for one site's names
    ("MASTER_ADDR=${SLURM_NODELIST:0:9}${SLURM_NODELIST:10:4}", True),
    ("for node in $(scontrol show hostnames); do ssh $node hostname; done", True),
    ("MASTER_ADDR=$SLURMD_NODENAME", True),
]


@pytest.mark.parametrize(("text", "is_host"), HOSTS, ids=[text for text, _ in HOSTS])
def test_a_list_of_nodes_is_no_host(text: str, is_host: bool) -> None:
    findings = found(text, "nodelist-as-host")
    assert bool(findings) != is_host
    assert all(finding.severity == "error" for finding in findings)


def test_programs_with_any_arguments_are_known_or_unknown() -> None:
    draw = random.Random(5)
    texts = (
        *"-+(*/[$\\",
        "",
        "-1",
        "1-",
        "0",
        "z-a",
        "s/[/b/",
        "s/a/\\9/",
        "{print $9 % 0}",
        "BEGIN{print 1/0}",
        "%04d",
    )
    texts += (
        "-f",
        "-d",
        "-c",
        "-n",
        "-F[",
        "-oE",
        "print(1/0)",
        "-cprint(int('a'))",
        "x=1",
        "9" * 30,
        "node[1-2]",
    )
    for _ in range(3000):
        call = Call(
            draw.choices(texts, k=draw.randrange(4)),
            draw.choice(("", "\n", "a b,c\n", "12\n")),
            greatest=True,
        )
        with contextlib.suppress(Unknown, Refused):
            FILTERS[draw.choice(sorted(FILTERS))](call)


@pytest.mark.parametrize(
    "text",
    [
        "printf -v MASTER_PORT '%d' $((SLURM_JOB_ID % 70000)); export MASTER_PORT",
        "let MASTER_PORT=10000+SLURM_JOB_ID",
        'let "MASTER_PORT=10000+SLURM_JOB_ID%60000"',
        "(( MASTER_PORT = 10000 + SLURM_JOB_ID ))",
    ],
)
def test_a_port_that_is_not_assigned_by_name(text: str) -> None:
    [finding] = found(text, "port-range")
    assert TOO_HIGH in finding.problem.reason
    assert found("let MASTER_PORT=10000+SLURM_JOB_ID%20000; (( MASTER_PORT == 1 ))", "port-range") == []


NESTED = "(" * 150 + JOB + " % 20000 + 10000)" * 150
HOSTILE = [
    # computations that would take minutes or gigabytes
    "A0=$SLURM_JOB_ID\n" + "".join(f'A{i + 1}="$A{i}$A{i}"\n' for i in range(18)) + "MASTER_PORT=${#A18}",
    f"A0={JOB}\n"
    + "".join(f"A{i + 1}=$((A{i} + A{i}))\n" for i in range(18))
    + "MASTER_PORT=$((A18 % 20000 + 10000))",
    f"MASTER_PORT=$(({NESTED}))",
    "".join(f"MASTER_PORT=$((10000 + {JOB} % {i}))\n" for i in range(10, 400)),
    f"X=${JOB}{'a' * 80}\nMASTER_PORT=${{X%{'*a' * 20}b}}",
    f"MASTER_PORT=$(echo ${JOB}{'a' * 80} | sed -E 's/(a*)*(a|aa)+b//')",
    f"MASTER_PORT=$(echo ${JOB}{'a' * 80} | grep -oE '{'a?' * 40}b')",
    f'MASTER_PORT=$(printf "%0999999999d" ${JOB} | tail -c 5)',
    "MASTER_PORT=$(seq 1 999999999 | tail -n 1)",
    f"MASTER_PORT=$(echo ${JOB} | head -c {'9' * 5000})",
    "read " + "PORT " * 2000 + "x\nMASTER_PORT=$PORT",
]


@pytest.mark.parametrize("text", HOSTILE, ids=[text[-40:].strip() for text in HOSTILE])
def test_a_computation_that_is_too_long_is_not_judged(text: str) -> None:
    assert found(text.replace("MASTER_PORT=", "export MASTER_PORT="), "ephemeral-port") == []


COMPUTED = [
    # what other programs print, which is not a port in each case
    "$(seq 20000 20005 | head -n 3 | tail -n 1)",
    "$(seq 20000 2 20009 | tail -n 1)",
    "$(seq 5 1)",
    f"$(printf '%s-%04d' ${JOB} 7)",
    f"${{{JOB}//[^3-6]/2}}",
    f"${{{JOB}//[!3-6]/2}}",
    f"$(echo ${JOB} | cut -c4,2)",
    f"$(echo ${JOB} | awk '{{print substr($0, 2, 4)}}')",
    f'$(echo "${JOB} / 7" | bc)',
]


@pytest.mark.parametrize("text", COMPUTED)
def test_what_programs_print_is_computed_as_they_do(text: str) -> None:
    test_the_port_of_a_sample_is_that_of_bash(text)


@pytest.mark.parametrize(
    "text",
    [
        "$(printf '%s' 1 2)",
        "$(printf '%x' 12)",
        "$(echo 12345 | cut --complement -c1-3)",
        '$(awk "BEGIN {print 10 / 7}")',
        "$(echo '10 / 7' | bc -l)",
        "$(echo -e '1\\n2')",
        "$(echo 123 | awk '{print substr($0, 0, 3)}')",
        '$(python3 -c "print(-7 // 2 + 20000)")',
        "$(seq 1 0 5)",
        "$(seq 1 999 | head -n 300 | tail -n 1)",
    ],
)
def test_what_is_computed_in_another_way_is_unknown(text: str) -> None:
    with pytest.raises(Unknown):
        Sample(read("true\n"), {}).text(text)


def test_the_remainder_of_a_random_number_can_be_any() -> None:
    for number in ("$RANDOM", "$(shuf -i 1-30000 -n 1)"):
        assert found(f"X={number}\nexport MASTER_PORT=$((30000 + X % 3000))", "ephemeral-port"), number


def test_what_only_a_run_can_tell() -> None:
    for text in (
        "$(date +%s)",
        "$X",
        "$(cut -c1 file; echo)",
        "$(expr a + b)",
        "${X:-$(hostname)}",
        "$((X))",
    ):
        with pytest.raises(Unknown):
            Sample(read("true\n"), {}).text(text)
