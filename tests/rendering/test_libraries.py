"""The libraries that scripts carry: plain shell, checked as files of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hpcgen.resources import shipped
from hpcgen.slurm.rendering import libraries as libraries_module
from hpcgen.slurm.rendering.libraries import stage_libraries
from hpcgen.slurm.rendering.script import render_stage
from tests.rendering.golden import planned_case, rendered

LIBRARIES = sorted((shipped("templates") / "lib").glob("*.sh"))
NAMES = [path.name for path in LIBRARIES]
OF_THE_SCRIPT = "SC2034,SC2154,SC2317"
"""Variables and functions that other parts of a script set, read or call."""


@pytest.mark.process
@pytest.mark.parametrize("path", LIBRARIES, ids=NAMES)
def test_bash_and_shellcheck_report_nothing(path: Path) -> None:
    commands = [["bash", "-n", path]]
    if shutil.which("shellcheck"):
        commands.append(["shellcheck", "--norc", "--shell=bash", f"--exclude={OF_THE_SCRIPT}", path])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("path", LIBRARIES, ids=NAMES)
def test_a_library_holds_no_value_and_starts_nothing(path: Path) -> None:
    """At its top level it assigns variables and defines functions: `main` does the rest."""
    text = path.read_text(encoding="utf-8")
    assert "{{" not in text
    assert "{%" not in text
    depth = 0
    for line in text.splitlines():
        if depth == 0 and line and not line.startswith("#"):
            assert re.match(r"[a-z_]+(\(\) [{(]|\+?=)", line), line
        if re.match(r"[a-z_]+(\(\) \{|\+?=\()$", line):
            depth += 1
        elif line in ("}", ")"):
            depth -= 1


NEWER_THAN_BASH_4_4 = re.compile(
    r"EPOCH\w+\b(?!-\})|SRANDOM|BASH_ARGV0|\$\{\w+@[UuLKk]|\bwait -\w*p|\b(local|declare) -\w*I|&>>?\||\$\{ "
)
"""Variables, operators and options of bash 5.0 to 5.3."""


def test_scripts_need_no_newer_bash_than_that_of_rhel_8() -> None:
    files = [path for path in shipped("templates").rglob("*") if path.suffix in (".sh", ".j2")]
    assert len(files) > len(LIBRARIES)
    found = {path.name: NEWER_THAN_BASH_4_4.findall(path.read_text(encoding="utf-8")) for path in files}
    assert {name: places for name, places in found.items() if places} == {}


@pytest.mark.process
def test_old_bash_records_the_time_in_seconds(tmp_path: Path) -> None:
    then = """
task_environment=() functions=
restart=0 has_started=1 secrets=() reports=$PWD job_nodes=(n1)
record queue
mkdir nodes-0
run_step() { :; }
collect_facts
node_facts "$PWD"
cat events.jsonl nodes-0/clock "${SLURMD_NODENAME:-$HOSTNAME}-facts"
"""
    done = with_libraries("base", "scratch", "ranks", "node-check", "node-health", then=then, cwd=tmp_path)
    assert done.stderr == ""
    assert (
        len(
            re.findall(r'^(?:\{"event": "queue", "time": |clock |)\d{10,}\b(?!\.)', done.stdout, re.MULTILINE)
        )
        == 4
    )


def test_a_script_carries_a_library_in_full_and_names_its_hash() -> None:
    stage = planned_case("azure-ndv5-enroot").stages["train"]
    script = rendered("azure-ndv5-enroot", "train")
    libraries = stage_libraries(stage, hooks=False)
    assert [library.path.stem for library in libraries[:3]] == ["base", "events", "scratch"]
    for library in libraries:
        assert f"{library.name} sha256 {library.sha256}" in script
        assert library.text in script


def test_every_library_is_carried_by_some_stage() -> None:
    cases = ("azure-ndv5-pyxis", "azure-ndv5-enroot", "site-group", "site-apptainer", "alps-gh200")
    stages = [stage for case in cases for stage in planned_case(case).stages.values()]
    found = {
        library.path
        for stage in stages
        for library in stage_libraries(
            dataclasses.replace(stage, environment_script="/a"), hooks=True, share="group", has_rule=True
        )
    }
    assert found == set(LIBRARIES)


def test_another_library_gives_another_hash_of_the_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that two scripts with one hash are one script."""
    shutil.copytree(shipped("templates") / "lib", tmp_path / "lib")
    plan = planned_case("local-none")
    monkeypatch.setattr(libraries_module, "shipped", lambda folder: tmp_path)
    before = hash_of_inputs(render_stage(plan, "train").text)
    with (tmp_path / "lib/train.sh").open("a") as library:
        library.write("# changed\n")
    assert hash_of_inputs(render_stage(plan, "train").text) != before


FIRST = """\
set -uo pipefail
stage=train nodes=2 scratch_root=/tmp checkpoints=$PWD run_dir=$PWD job_dir=$PWD rc=1
container=() task=(python3 -m trainer) max_exclusions=3 num_job_nodes=2
SLURM_JOB_ID=7 num_rendezvous=1
unset -v EPOCHREALTIME EPOCHSECONDS SRANDOM
"""
"""The last line makes bash 5 lack what bash 4.4 (RHEL 8) does not have."""


def with_libraries(*names: str, then: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs bash code after these libraries."""
    texts = [
        (shipped("templates") / "lib" / f"{name}.sh").read_text(encoding="utf-8")
        for name in dict.fromkeys(("base", "events", *names))
    ]
    script = "\n".join([FIRST, *texts, "held=$PWD", then])
    return subprocess.run(["bash", "-c", script], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.process
@pytest.mark.parametrize(
    ("attempts", "ends"),
    [
        ("1:0 1:0 1:0", "three attempts without progress beyond iteration 0"),
        ("1:0 0:9 1:9 0:20 1:20", "back into the queue"),
        ("1:0 1:0 1:9 1:9", "back into the queue"),
    ],
    ids=["in a row", "stops with progress between them", "failures with progress between them"],
)
def test_only_failures_in_a_row_end_a_run(attempts: str, ends: str, tmp_path: Path) -> None:
    """Each attempt is STATUS:ITERATION; status 0 is a stop at a checkpoint before the time limit."""
    then = f"""
max_restarts=100 train_iters=100 restart=0 fingerprint=x
requeue_job() {{ :; }}
for attempt in {attempts}; do
    rc=${{attempt%:*}}
    echo "${{attempt#*:}}" >"$tracker"; mkdir -p "$(printf iter_%07d "${{attempt#*:}}")"
    rm -f STOPPED; ((rc)) || : >STOPPED
    (conclude)
    read_progress before
done
"""
    done = with_libraries("base", "scratch", "attempts", "train", then=then, cwd=tmp_path)
    assert ends in (done.stdout + done.stderr).splitlines()[-1], done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("complete", "incomplete", "tracker", "newest"),
    [
        ((), (), None, 0),
        ((), (), 60, 0),
        ((8, 40), (60,), 40, 40),
        ((8, 40), (50,), 60, 40),
        ((), (50000,), 50000, 50000),
        ((9_999_999, 10_000_000), (), None, 10_000_000),
    ],
    ids=[
        "new run",
        "all moved away",
        "save in progress",
        "newest moved away",
        "Megatron-LM's",
        "many digits",
    ],
)
def test_a_job_finds_the_newest_checkpoint_that_was_not_moved_away(
    complete: tuple[int, ...],
    incomplete: tuple[int, ...],
    tracker: int | None,
    newest: int,
    tmp_path: Path,
) -> None:
    for iteration in complete + incomplete:
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    for iteration in complete:
        (tmp_path / f"iter_{iteration:07d}/COMPLETE").touch()
    for set_aside in ("iter_0000070.broken", "iter_0000070.broken-2", "iter_0000070.bad"):
        (tmp_path / set_aside).mkdir()
        (tmp_path / set_aside / "COMPLETE").touch()
    if tracker is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(tracker))
    done = with_libraries("base", "train", then='read_progress before; echo "$before"', cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f"{newest}\n", "")


@pytest.mark.process
@pytest.mark.parametrize(
    ("library", "reason", "status", "message"),
    [
        ("train", "TimeLimit", 0, "out of time at iteration 0 of 100: back into the queue"),
        ("train", "None", 143, "the newest checkpoint is of iteration 0; requeueing is Slurm's decision"),
        ("run", "TimeLimit", 0, "out of time: back into the queue"),
        ("run", "None", 143, "or a node failed); requeueing is Slurm's decision"),
        ("run", "None Restarts=0", 143, "ended by Slurm (canceled); requeueing"),
        ("run", "None Restarts=1", 143, "ended by Slurm (preempted, requeued, or a node failed); requeueing"),
        ("run", "None PreemptTime=2026-11-26T15:53:55", 143, "ended by Slurm (preempted); requeueing"),
    ],
)
def test_a_job_out_of_time_is_requeued_and_a_canceled_one_is_not(
    library: str, reason: str, status: int, message: str, tmp_path: Path
) -> None:
    """The controller does not answer at first."""
    then = f"""
max_restarts=100 train_iters=100 restart=0 fingerprint=x terminated=1 done_file= progress_kind= nodes=1
sleep() {{ :; }}
requeue_job() {{ :; }}
scontrol() {{ [[ -e asked ]] || {{ : >asked; return 1; }}; echo "JobId=7 Reason={reason} X=1"; }}
conclude
"""
    done = with_libraries("base", "scratch", "attempts", library, then=then, cwd=tmp_path)
    assert (done.returncode, message in done.stdout) == (status, True), done


@pytest.mark.process
@pytest.mark.parametrize(
    ("stop", "status", "message", "stalled"),
    [
        ("", 0, "done", None),
        ("", 1, "failed with status 1: back into the queue", "1"),
        ("yes", 0, "stopped with status 0 before the time limit: back into the queue", None),
        ("yes", 1, "stopped with status 1 before the time limit: back into the queue", None),
    ],
)
def test_a_program_that_cannot_be_asked_to_stop_ends_as_without_a_signal(
    stop: str, status: int, message: str, stalled: str | None, tmp_path: Path
) -> None:
    then = f"""
max_restarts=100 restart=0 terminated=0 done_file= progress_kind= nodes=1 asks_to_stop={stop} stop_signal=
requeue_job() {{ :; }}
scontrol() {{ echo "JobId=7 Reason=None Restarts=0"; }}
set_traps
kill -USR2 $$
run_step exit {status}
conclude
"""
    done = with_libraries("base", "scratch", "attempts", "run", then=then, cwd=tmp_path)
    assert message in done.stdout.splitlines()[-1], done
    count = tmp_path / "stalled"
    assert (count.read_text().strip() if count.exists() else None) == stalled


@pytest.mark.process
@pytest.mark.parametrize(
    ("library", "stopped", "scontrol", "max_restarts", "end"),
    [
        ("train", "train", ":", 9, ("requeued", "yes")),
        ("train", "program", ":", 9, ("requeued", None)),
        ("train", "train", ":", 0, ("failed", "yes")),
        ("train", "train", "false", 9, ("failed", None)),
        ("run", "program", ":", 9, ("requeued", "yes")),
        ("run", "", ":", 9, ("requeued", None)),
    ],
    ids=["saved", "crashed", "saved, last restart", "saved, no requeue", "asked to stop", "failed"],
)
def test_the_event_of_the_end_tells_whether_the_work_ended_as_planned(
    library: str, stopped: str, scontrol: str, max_restarts: int, end: tuple[str, str | None], tmp_path: Path
) -> None:
    then = f"""
SLURM_JOB_NODELIST=n1 run_dir=$PWD restart=0 secrets=() max_restarts={max_restarts} train_iters=100 done_file=
progress_kind= nodes=1 before=0 details=above stage={library} requeued=0 fingerprint=x
sleep() {{ :; }}
scontrol() {{ [[ $1 != requeue ]] || {scontrol}; }}
[[ "{stopped}" != train ]] || : >STOPPED
[[ "{stopped}" != program ]] || {{ rc=1; warned=1; }}
[[ "{stopped}" ]] || rc=1
record_start
conclude
"""
    done = with_libraries("base", "scratch", "attempts", library, then=then, cwd=tmp_path)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (events[-1]["verdict"], events[-1].get("planned")) == end, done


@pytest.mark.process
@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        ("Restarts=0", "Restarts=0", "canceled"),
        ("Restarts=2", "Restarts=2", "canceled"),  # the Prolog failed twice before the first start
        ("Restarts=2", "Restarts=3", "preempted, requeued, or a node failed"),
        ("Restarts=0", "Restarts=0 PreemptTime=2026-11-26T15:53:55", "preempted"),
        ("Restarts=0", "Reason=NodeDown Restarts=0", "a node failed"),
    ],
)
def test_only_a_cancellation_takes_the_next_job_of_a_chain_along(
    before: str, after: str, cause: str, tmp_path: Path
) -> None:
    """SIGTERM comes while the nodes are checked."""
    then = f"""
SLURM_JOB_NODELIST=n1 restart=0 secrets=() chain=3 next_job=8 answer='{before}'
scontrol() {{ echo "JobId=7 Reason=None $answer X=1"; }}
scancel() {{ echo "scancel $*"; }}
list_nodes() {{ :; }}
check_nodes() {{ answer='{after}'; kill -TERM $$; }}
set_traps
record_start
record_queue
choose_good_nodes
"""
    done = with_libraries("base", "events", "attempts", "chain", "preflight", then=then, cwd=tmp_path)
    assert done.returncode == 143, done
    end = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert (end["verdict"], end["cause"]) == ("terminated", cause)
    assert ("scancel 8" in done.stdout) == (cause == "canceled")


@pytest.mark.process
@pytest.mark.parametrize(("chain", "calls"), [("''", 3), ("3", 0)])
def test_a_job_of_a_chain_never_allows_requeues(chain: str, calls: int, tmp_path: Path) -> None:
    """Its site forbids them."""
    then = f"""
chain={chain} verdict='done' leaks='SBATCH_*' kept_variables='' secrets=()
scontrol() {{ echo "scontrol $*"; }}
export SBATCH_NO_REQUEUE=1
drop_leaks
allow_requeues 0
allow_requeues 1
"""
    done = with_libraries("base", "hooks", then=then, cwd=tmp_path)
    assert done.stdout.count("scontrol update JobId=7 Requeue=") == calls, done


@pytest.mark.process
@pytest.mark.parametrize(("options", "status"), [("--container-image=", 0), ("--nodes=", 1)])
def test_a_job_without_pyxis_ends_with_one_line(options: str, status: int, tmp_path: Path) -> None:
    script = (Path(__file__).parents[1] / "golden/azure-ndv5-pyxis/train.sbatch").read_text()
    [function] = [line for line in script.splitlines() if line.startswith("require_pyxis() ")]
    then = f"{function}\nsrun() {{ seq 100000; echo {options}; seq 100000; }}\nrequire_pyxis"
    done = with_libraries("base", then=then, cwd=tmp_path)
    assert done.returncode == status
    assert ("pyxis is not installed on " in done.stderr) == bool(status)


@pytest.mark.process
@pytest.mark.parametrize(
    ("srun", "is_final"),
    [
        ("echo 'srun: error: Unable to create step' >&2; exit 1", False),
        ("sleep 1000", False),
        ('while [[ $1 != sh ]]; do shift; done; "$@"; exit 1', True),
    ],
    ids=["no step", "no answer in time", "no trainer"],
)
def test_only_a_trainer_that_was_started_can_be_found_missing(
    srun: str, is_final: bool, tmp_path: Path
) -> None:
    """A node or a controller that does not answer says nothing about the image."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(f"#!/bin/bash\n{srun}\n")
    (programs / "python3").write_text("#!/bin/bash\nexit 1\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    then = f'rc=1 PATH={programs}:$PATH\ntimeout() {{ command timeout 2 "${{@:3}}"; }}\ncheck_trainer\necho "rc $rc"'
    done = with_libraries("base", "scratch", "attempts", "train", then=then, cwd=tmp_path)
    assert done.stdout.endswith("rc 1\n"), done.stderr
    assert (tmp_path / "FAILED").exists() == is_final


@pytest.mark.process
def test_a_query_that_the_controller_does_not_answer_is_retried(tmp_path: Path) -> None:
    """The nodes that the user excluded are known once it answers, and not taken for none."""
    then = """
run_step() { :; }
scontrol() { [[ -e asked ]] || { : >asked; return 1; }; echo "JobId=7 ReqNodeList=(null) ExcNodeList=bad[1-2] X=1"; }
show_job
echo "excluded: $(job_field ExcNodeList), required: $(job_field ReqNodeList)."
"""
    done = with_libraries("base", "preflight", then=then, cwd=tmp_path)
    assert done.stdout.endswith("excluded: bad[1-2], required: .\n"), done.stderr
    assert "scontrol cannot show this job" in done.stdout


@pytest.mark.process
@pytest.mark.parametrize(
    ("scontrol", "expected"),
    [
        ("[[ -e asked ]] || { : >asked; return 1; }; echo good; echo bad", "0 good bad"),
        ("return 1", "1 "),
        ("return 0", "1 "),
    ],
    ids=["once", "always", "nothing"],
)
def test_the_nodes_of_a_job_are_known_or_the_attempt_fails(
    scontrol: str, expected: str, tmp_path: Path
) -> None:
    then = f"""
SLURM_JOB_NODELIST=x
sleep() {{ :; }}
scontrol() {{ {scontrol}; }}
list_nodes; echo "$rc ${{job_nodes[*]}}"
"""
    done = with_libraries("base", "ranks", then=then, cwd=tmp_path)
    assert done.stdout == f"{expected}\n"
    assert ("scontrol cannot list the nodes of this job" in done.stderr) == (expected == "1 ")


@pytest.mark.process
@pytest.mark.parametrize(
    ("answer", "kept"), [("Node sick not found", False), ("Unable to contact slurm controller", True)]
)
def test_a_bad_node_is_forgotten_only_if_slurm_does_not_know_it(
    answer: str, kept: bool, tmp_path: Path
) -> None:
    (tmp_path / "excluded_nodes").write_text("sick 99999999999\n")
    then = f"""
good=() bad=() excluded_s=60
scontrol() {{ echo "{answer}" >&2; return 1; }}
note_nodes
"""
    done = with_libraries("base", "node-check", then=then, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("sick" in (tmp_path / "excluded_nodes").read_text()) == kept


@pytest.mark.process
def test_each_cluster_keeps_its_own_bad_nodes(tmp_path: Path) -> None:
    """Two clusters can share a run directory. Lines of 0.2.0 name no cluster."""
    known = tmp_path / "excluded_nodes"
    known.write_text(
        "a 99999999999 other\nb 99999999999 here\nc 99999999999\nd 5 other\ne 99999999999 here\n"
    )
    then = """
good=(e) bad=(a) excluded_s=60 SLURM_CLUSTER_NAME=here
scontrol() { echo "NodeName=$3"; }
note_nodes
printf '%s\n' "${excluded[@]}" | sort
"""
    done = with_libraries("base", "node-check", then=then, cwd=tmp_path)
    assert done.stdout.split() == ["a", "b", "c"], done.stderr
    lines = [line.split() for line in known.read_text().splitlines()]
    assert {(name, cluster) for name, _, cluster in lines} == {
        ("a", "here"),
        ("a", "other"),
        ("b", "here"),
        ("c", "here"),
    }


@pytest.mark.process
@pytest.mark.parametrize(
    ("steps", "settings", "starts"),
    [
        ("1:8 1:9 0:9", "", "3"),
        ("1:8 1:8 0:9", "", "2"),
        ("1:0 0:9", "", "1"),
        ("2:8 0:9", "", "1"),
        ("1:8 0:9", "max_restarts=0", "1"),
        ("1:8 1:9 0:9", "max_restarts=1", "2"),
        ("1:8 0:9", "warned=1", "1"),
        ("1:8 0:9", "terminated=1", "1"),
        ("1:8 0:9", "shown='PreemptTime=2026-11-26T15:53:55 Restarts=0'", "1"),
        ("1:8 0:9", ": >FAILED", "1"),
    ],
)
def test_a_step_that_crashes_after_progress_starts_again_in_the_job(
    steps: str, settings: str, starts: str, tmp_path: Path
) -> None:
    """Each step is STATUS:ITERATION."""
    then = f"""
max_restarts=100 restart=0 before=0 shown='PreemptTime=None Restarts=0' num=0 steps=({steps}) has_started=1
unset -v max_exclusions
{settings}
scontrol() {{ echo " JobId=7 $shown X=1"; }}
rendezvous() {{ :; }}
: >events.jsonl
step() {{
    local each=${{steps[num++]}}
    echo "${{each#*:}}" >"$tracker"
    mkdir -p "$(printf iter_%07d "${{each#*:}}")"
    return "${{each%:*}}"
}}
run_until_good step >/dev/null
echo "$num $rc $(grep -c restart_in_job events.jsonl)"
"""
    done = with_libraries("base", "attempts", "train", then=then, cwd=tmp_path)
    [num, status, recorded] = done.stdout.split()
    last = steps.split()[int(starts) - 1].partition(":")[0]
    assert (num, status, int(recorded)) == (starts, last, int(starts) - 1), done.stderr


@pytest.mark.process
def test_ranks_look_up_the_name_of_a_node_that_slurm_does_not_show(tmp_path: Path) -> None:
    """As with PrivateData=nodes in slurm.conf."""
    then = """
restart=0 ntasks_per_node=8 step_nodes=(uni1 uni2)
sleep() { :; }
scontrol() { echo "slurm_load_node error: Access/permission denied" >&2; return 1; }
rendezvous && echo "$MASTER_ADDR"
"""
    done = with_libraries("base", "ranks", then=then, cwd=tmp_path)
    assert done.stdout.endswith("\nuni1\n"), done.stderr
    assert "PrivateData=nodes" in done.stdout


@pytest.mark.process
@pytest.mark.parametrize(
    ("rule", "node", "address"),
    [
        ("suffix t", "localhos", r"(127\.0\.0\.1|::1)"),
        (
            "suffix .invalid",
            "uni1",
            r"uni1\.invalid does not resolve \(rendezvous\.suffix = \.invalid in .*\)",
        ),
        ("interface lo", "uni1", r"127\.0\.0\.1"),
        (
            "interface ib9",
            "uni1",
            r"interface ib9 of uni1 has no address \(rendezvous\.interface = ib9 in .*\)",
        ),
    ],
)
def test_ranks_meet_where_the_profile_says(rule: str, node: str, address: str, tmp_path: Path) -> None:
    then = f"""
restart=0 ntasks_per_node=1 step_nodes=({node}) rendezvous_rule=({rule})
sleep() {{ :; }}
num_hosts() {{ echo 1; }}
srun() {{ "${{@: -6}}"; }}
rendezvous && echo "$MASTER_ADDR"
"""
    done = with_libraries("base", "ranks", "rendezvous", then=then, cwd=tmp_path)
    assert re.search(rf"{address}$", (done.stdout + done.stderr).strip()), done
    assert (done.returncode == 0) == address.endswith(("1", "1)"))


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, r"node\.sh is missing or not readable on \S+ \(environment_script of the node type\)"),
        ("echo why; false", r"node\.sh failed with status 1 \(above\)"),
        ("exit 0", r"node\.sh ends its shell, so its variables are lost: it must not call exit"),
    ],
)
def test_an_environment_script_that_fails_ends_the_job(
    script: str | None, message: str, tmp_path: Path
) -> None:
    if script is not None:
        (tmp_path / "node.sh").write_text(script)
    then = 'run_environment_script "$PWD/node.sh" ""; echo continued'
    done = with_libraries("base", "scratch", "node-environment", then=then, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(rf"ERROR: {tmp_path}/{message}\n$", done.stderr), done.stderr
    assert "continued" not in done.stdout


@pytest.mark.process
def test_an_environment_script_replaces_what_the_node_type_sets(tmp_path: Path) -> None:
    (tmp_path / "node.sh").write_text(
        "export NCCL_A=2 NCCL_C=3 LD_LIBRARY_PATH=/x; unset NCCL_B; export lower=1\n"
    )
    then = """
export NCCL_A=1 NCCL_B=1
run_environment_script "$PWD/node.sh" "" && echo "$NCCL_A ${NCCL_B-none} $NCCL_C ${LD_LIBRARY_PATH-none}"
printf '%s\n' "${task_environment[@]}" | grep NCCL
"""
    done = with_libraries("base", "scratch", "node-environment", then=then, cwd=tmp_path)
    assert done.stdout.splitlines()[-3:] == ["2 none 3 none", "NCCL_A=2", "NCCL_C=3"], (
        done.stdout + done.stderr
    )
    assert f"{tmp_path}/node.sh set NCCL_A NCCL_B (removed) NCCL_C (values: " in done.stdout
    assert re.search(r"not taken from \S+: LD_LIBRARY_PATH lower\n", done.stdout)


@pytest.mark.process
def test_a_message_names_the_logs_of_tasks_only_if_this_attempt_has_some(tmp_path: Path) -> None:
    """A failed prologue leaves none, and a requeued job keeps its number."""
    then = """
restart=0 max_restarts=9 before=0 after=0 task_logs="$PWD/8_*_log.out"
requeue() { echo "$1"; rm -f stalled; }
touch -d '-1 hour' 8_0_log.out; touch -d '-1 min' begun
say() { :; }
rc=7; retry_or_give_up . x
run_step false; retry_or_give_up . x
touch 8_1_log.out; run_step false; retry_or_give_up . x
"""
    done = with_libraries("base", "attempts", then=then, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "failed with status 7.",
        "failed with status 1.",
        f"failed with status 1 (see {tmp_path}/8_*_log.out).",
    ], done.stderr


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize(
    ("config", "owner", "warned"), [("jobs,users", 65534, 1), ("jobs", 0, 0), ("none", 65534, 0)]
)
def test_a_job_that_slurm_hides_is_said_to_be_unknown(
    config: str, owner: int, warned: int, tmp_path: Path
) -> None:
    (tmp_path / "RUNNING").write_text("12\n")
    os.chown(tmp_path / "RUNNING", owner, -1)
    then = f"""
run_dir=$PWD restart=0 share=group
scontrol() {{ echo "PrivateData             = {config}"; }}
squeue() {{ echo "$SLURM_JOB_ID"; }}
claim
"""
    done = with_libraries("base", "scratch", "share", "attempts", then=then, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("If job 12 of nobody is still running") == warned


@pytest.mark.process
@pytest.mark.parametrize(
    ("partition", "reservation", "left"),
    [
        ("", "", "4"),
        ("a idle~\nb down#\nc drain%\nd down^\ne down*\nhidden", "", "5"),
        ("a idle\nb alloc\nc drain\nbad idle", "", "2"),
        ("a maint\nb idle", "", "1"),
        ("a idle\nb alloc\nbad idle", "b,bad", "1"),
        ("a maint\nb idle", "a", "1"),
        ("a idle\nb idle", "unknown", "2"),
    ],
    ids=[
        "nodes are private",
        "suspended or on their way",
        "partition",
        "maintenance",
        "reservation",
        "reserved for it",
        "no answer",
    ],
)
def test_usable_nodes_are_those_that_the_job_can_get(
    partition: str, reservation: str, left: str, tmp_path: Path
) -> None:
    lines = "".join(f"{node} p\\n" for node in partition.splitlines() if " " in node)
    nodes = ",".join(node.split()[0] for node in partition.splitlines())
    then = f"""
excluded=(bad) num_job_nodes=4 SLURM_JOB_PARTITION=p
sleep() {{ :; }}
sinfo() {{ [[ " $* " == *" --all "* && "$*" != *--partition* ]] && printf '%b' '{lines}x idle other\\n'; }}
scontrol() {{
    case $2 in
        partition) [[ '{nodes}' ]] && echo "PartitionName=p AllocNodes=ALL Nodes={nodes} State=UP" ;;
        reservation) [[ $4 != unknown ]] && echo "ReservationName=$4 StartTime=x Nodes=$4 NodeCnt=1" ;;
        hostnames) echo "$3" | tr , '\\n' ;;
    esac
}}
nodes_left '{reservation}'
"""
    done = with_libraries("base", "ranks", "preflight", then=then, cwd=tmp_path)
    assert done.stdout == f"{left}\n", done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("tries", "status"), [(4, 0), (101, 1)], ids=["accepted in the end", "never accepted"]
)
def test_each_new_refusal_of_an_exclusion_is_printed_at_once(tries: int, status: int, tmp_path: Path) -> None:
    """Slurm may end the batch shell while it tries again."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"""#!/bin/bash
[[ $1 == update ]] || exit 0
echo >>asked; try=$(wc -l <asked)
((try < {tries})) || exit 0
if ((try == 1)); then echo "Job is completing" >&2; else echo "Invalid node name specified" >&2; fi
exit 1
""")
    scontrol.chmod(0o755)
    then = """
PATH=$PWD:$PATH good=(a) bad=(b) SLURM_JOB_PARTITION=p restart=0
show_job() { job_text=; }; note_nodes() { excluded=(b); }; nodes_left() { echo 2; }; sleep() { echo "sleeps"; }
exclude_and_requeue 2>&1
"""
    done = with_libraries("base", "attempts", "node-check", "preflight", then=then, cwd=tmp_path)
    lines = [line.partition("hpcgen: ")[2] for line in done.stdout.splitlines()]
    refused = "Slurm does not accept the list of bad nodes yet:"
    assert lines[:5] == [f"{refused} Job is completing", "", f"{refused} Invalid node name specified", "", ""]
    assert sum(line.startswith(refused) for line in lines) == 2
    last = "back into the queue without b" if status == 0 else "ERROR: back in the queue, but Slurm did not"
    assert lines[-1].startswith(last)
    assert done.returncode == status


@pytest.mark.process
def test_a_job_that_is_canceled_during_the_checks_excludes_no_node(tmp_path: Path) -> None:
    """The checks of a node can fail because Slurm ends the job, before the script has SIGTERM."""
    then = """
restart=0 good=(a) bad=(b) terminated=0
scontrol() { echo "scontrol $*" >>asked; echo "JobId=7 JobState=COMPLETING Reason=None Restarts=0 X=1"; }
exclude_and_requeue
"""
    done = with_libraries("base", "attempts", "node-check", "preflight", then=then, cwd=tmp_path)
    assert "ended by Slurm (canceled); bad nodes: b; requeueing is Slurm's decision" in done.stdout
    assert done.returncode == 143
    assert "requeue" not in (tmp_path / "asked").read_text()


@pytest.mark.process
def test_a_stage_that_cannot_be_asked_to_stop_says_so(tmp_path: Path) -> None:
    done = with_libraries("base", then="set_traps; kill -USR2 $$; run_step true; echo $rc", cwd=tmp_path)
    assert "USR2: this stage goes on" in done.stdout
    assert done.stdout.endswith("\n0\n"), done.stderr


def hash_of_inputs(script: str) -> str:
    """The last line of the header."""
    found = re.search(r"^# inputs: sha256 ([0-9a-f]{64})$", script, re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "pattern", "expected"),
    [
        ("checkpoints", "ckpt-7b/step_*", "1200 1"),
        ("checkpoints", "ckpt-7b/*/COMPLETE", "900 1"),
        ("checkpoints", "ckpt-7b/epoch*", "0 0"),
        ("file", "newest.txt", "1000 1"),
        ("file", "missing.txt", "0 0"),
        ("file", "words.txt", "0 0"),
        ("log", "step +([0-9]+)/", "37 1"),
        ("log", "loss ([0-9.]+)", "0 0"),
        ("log", "epoch ([0-9]+)", "0 0"),
    ],
)
def test_the_progress_of_a_program_is_read_from_each_source(
    kind: str, pattern: str, expected: str, tmp_path: Path
) -> None:
    """The log of an earlier attempt, names without a number and fractions do not count."""
    for name in ("step_0900", "step_1200", "epoch"):
        (tmp_path / "ckpt-7b" / name).mkdir(parents=True)
    (tmp_path / "ckpt-7b" / "step_0900" / "COMPLETE").touch()
    (tmp_path / "newest.txt").write_text("1000")
    (tmp_path / "words.txt").write_text("release\n")
    then = f"""
log=a.log held=.
echo "0: step 99/100 epoch 3" >"$log"
log_start=$(stat -c %s "$log")
printf '%s\\n' "0: step   36/100 loss 2.5" "1: step   37/100 loss 2.4" "0: evaluating" >>"$log"
progress_kind={kind} progress_pattern='{pattern}'
read_progress value
echo "$value $found"
"""
    done = with_libraries("base", "scratch", "attempts", "run", then=then, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == expected, done.stderr


@pytest.mark.process
def test_the_log_does_not_get_a_private_file_to_which_a_marker_leads(tmp_path: Path) -> None:
    """The group reads the log of a shared run, and can replace FAILED."""
    (tmp_path / "private").write_text("secret\n")
    (tmp_path / "link").symlink_to("private")
    (tmp_path / "FAILED").write_text("no such corpus\n")
    then = 'print_own "$run_dir/link"; print_own "$run_dir/FAILED"'
    private = with_libraries("base", then=then, cwd=tmp_path)
    assert private.stdout.splitlines() == ["secret", "no such corpus"]
    group = with_libraries("base", "share", then=then, cwd=tmp_path)
    assert group.stdout.splitlines() == [
        f"{tmp_path}/link is a link, or others made it",
        "no such corpus",
    ]


@pytest.mark.process
def test_queueing_an_evaluation_keeps_its_lines_and_replaces_a_link(tmp_path: Path) -> None:
    (tmp_path / "evaluation").mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious\niter_0000002 5\n")
    (tmp_path / "evaluation/queued").symlink_to(victim)
    then = """
job=7 submitted=0
squeue() { echo "7 /var/job"; }
queued_script() { :; }
timeout() { shift 2; if [[ $1 == sbatch ]]; then echo 6; else "$@"; fi; }
queue_evaluation iter_0000004
"""
    done = with_libraries("base", "evaluate-queue", then=then, cwd=tmp_path)
    assert "queued job 6 to evaluate iter_0000004" in done.stdout, done.stderr
    assert victim.read_text() == "precious\niter_0000002 5\n"
    assert (tmp_path / "evaluation/queued").read_text() == "iter_0000002 5\niter_0000004 6\n"


SEGMENTS = {
    "all are good": ("1:a 2:a 3:b 4:b 5:c 6:c", "", "1 2 3 4"),
    "a bad node in a segment": ("1:a 3:b 4:b 5:c 6:c", "2", "3 4 5 6"),
    "spare nodes in each block": ("1:a 2:a 4:b 5:b 6:b", "3", "1 2 4 5"),
    "two segments in one block": ("1:a 2:a 3:a 4:a 5:a", "6", "1 2 3 4"),
    "blocks whose nodes alternate": ("1:a 2:b 3:a 4:b 5:a", "", "1 2 3 4"),
    "too few whole segments": (
        "1:a 3:b 5:c 6:c",
        "2 4",
        "the good nodes contain 2 of 4 nodes in whole segments of 2",
    ),
    "no segments": ("1:a 3:b 5:c 7:d", "", "WARNING: Slurm did not place the nodes in segments of 2"),
    "no block topology": ("1: 2: 3: 4: 5:", "6", "1 2 3 4"),
    "a block with a hostile name": (
        "1:$(touch${IFS}x)] 2:$(touch${IFS}x)] 3:`touch${IFS}x`[ 4:`touch${IFS}x`[",
        "",
        "1 2 3 4",
    ),
}
"""Good nodes with their blocks, bad nodes, and the four chosen nodes in segments of two, or what the log says."""


@pytest.mark.process
@pytest.mark.parametrize(("good", "bad", "expected"), SEGMENTS.values(), ids=SEGMENTS)
def test_spare_nodes_keep_segments_whole(good: str, bad: str, expected: str, tmp_path: Path) -> None:
    names = []
    for word in good.split():
        node, _, block = word.partition(":")
        (tmp_path / f"{node}.ok").write_text(f"{block}\n")
        names.append(node)
    then = f"""nodes=4 nodes_per_segment=2 reports=$PWD step=() good=({" ".join(names)}) bad=({bad})
choose_nodes && echo "CHOSEN ${{step_nodes[*]}}"
"""
    done = with_libraries("base", "node-check", "preflight", "segments", then=then, cwd=tmp_path)
    if expected[0].isdecimal():
        assert done.stdout.splitlines()[-1] == f"CHOSEN {expected}", done.stderr
    else:
        assert expected in done.stdout + done.stderr
    assert ("CHOSEN" in done.stdout) == (not expected.startswith("the good"))
    assert not (tmp_path / "x").exists()
