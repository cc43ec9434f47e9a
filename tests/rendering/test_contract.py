"""Each rule of the contract: a script that hpcgen makes holds to it, and the same script with one change does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcgen import render
from hpcgen.planning.plan import Plan
from hpcgen.rendering.contract import PARTS, Finding, check_script
from hpcgen.stages import STAGES
from tests.runs import big_run, planned

Change = Callable[[str], str]
REQUIRE_LINE = "# ==== launch ====\n"


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return planned(tmp_path_factory.mktemp("run"), big_run(secrets=["HF_TOKEN"]))


@pytest.fixture
def found(training: Plan) -> Callable[[Change], list[Finding]]:
    def check(change: Change) -> list[Finding]:
        script = render(training, "train")
        changed = change(script)
        assert changed != script
        return check_script(changed, training.stages["train"])

    return check


def replaced(old: str, new: str) -> Change:
    return lambda script: script.replace(old, new, 1)


def without(pattern: str) -> Change:
    return lambda script: re.sub(rf"(?m)^.*{pattern}.*\n", "", script)


def before_launch(line: str) -> Change:
    return replaced(REQUIRE_LINE, f"{line}\n{REQUIRE_LINE}")


def in_launch(line: str) -> Change:
    return lambda script: re.sub(
        r"(?m)(?<=^# ==== launch ====\n)(?:.|\n)*?(?=^# ==== conclude)", lambda _: f"{line}\n", script
    )


WORDS = '"${step[@]}" "${container[@]}" env "${task_environment[@]}"'
MARKED = "# ==== conclude ====\n"
BROKEN: dict[str, tuple[Change, str, str]] = {
    "no launch marker": (without("==== launch ===="), "frame", "found '# ==== conclude ===='"),
    "markers turned round": (
        lambda script: script.replace(MARKED, "@").replace(REQUIRE_LINE, MARKED).replace("@", REQUIRE_LINE),
        "frame",
        "in this order",
    ),
    "late directive": (
        before_launch("#SBATCH --mail-type=END"),
        "directive-order",
        "after the first command",
    ),
    "no directives": (without("#SBATCH --signal"), "directive-lost", "--signal=B:USR2@"),
    "a second value": (
        replaced("#SBATCH --requeue\n", "#SBATCH --requeue\n#SBATCH --nodes=1\n"),
        "directive-lost",
        "#SBATCH --nodes=1 changes #SBATCH --nodes=16",
    ),
    "backslash in a directive": (
        replaced("#SBATCH --requeue\n", "#SBATCH --requeue\n#SBATCH --comment=a\\ b\n"),
        "directive-form",
        "--comment=a",
    ),
    "variable gone": (without("export PYTHONNOUSERSITE="), "variable-lost", "PYTHONNOUSERSITE"),
    "not named for the container": (
        before_launch("export SITE_PROXY=http://proxy:3128"),
        "container-env",
        "container: SITE_PROXY",
    ),
    "second name of an export": (before_launch('export A="x y" B=2'), "container-env", "container: B"),
    "option of srun gone": (without("--kill-on-bad-exit=1"), "option-lost", "--kill-on-bad-exit=1"),
    "option of pyxis gone": (
        without("--no-container-mount-home"),
        "option-lost",
        "--no-container-mount-home",
    ),
    "image gone": (without('--container-image="'), "option-lost", "--container-image"),
    "status lost": (in_launch(f"srun {WORDS} python3 -m trainer &"), "launch-status", "sets rc"),
    "in the foreground": (
        in_launch(f"srun {WORDS} python3 -m trainer; rc=$?"),
        "launch-foreground",
        "is in the foreground",
    ),
    "exec": (in_launch(f"rc=0\nexec srun {WORDS} python3"), "launch-foreground", "is in the foreground"),
    "without the container": (
        in_launch('launch "${step[@]}" env "${task_environment[@]}" python3 -m trainer'),
        "launch-words",
        "${container[@]}",
    ),
    "always a success": (
        lambda script: script.split(MARKED)[0] + MARKED + "exit 0\n",
        "conclusion",
        "end the script with a failure",
    ),
    "set -x": (before_launch("set -x"), "no-trace", "`set -x`"),
    "set with other options": (before_launch("true && set -eux"), "no-trace", "set -eux"),
    "xtrace": (before_launch("set -o errexit -o xtrace"), "no-trace", "xtrace"),
    "set -x on the nodes": (
        before_launch("each_node 9 bash -c '\n    set -x\n    true\n'"),
        "no-trace",
        "set -x",
    ),
    "bash -x": (before_launch("bash -x /opt/site/check.sh"), "no-trace", "bash -x"),
    "printenv": (before_launch("printenv"), "no-environment-dump", "`printenv`"),
    "env through a pipe": (before_launch("env | sort"), "no-environment-dump", "`env | sort`"),
    "env on every node": (before_launch("each_node 9 bash -c 'hostname; env'"), "no-environment-dump", "env"),
    "export -p": (before_launch("export -p >env.txt"), "no-environment-dump", "export -p"),
    "declare -p": (before_launch("declare -px"), "no-environment-dump", "declare -px"),
    "secret": (
        before_launch("WANDB_API_KEY=0123456789abcdef"),
        "no-secret",
        "holds WANDB_API_KEY",
    ),
    "secret in an array": (
        replaced('    "HOME=$scratch"\n', '    "HOME=$scratch"\n    "HF_TOKEN=hunter2"\n'),
        "no-secret",
        "holds HF_TOKEN",
    ),
    "token of a known form": (before_launch(f"curl -H x:hf_{'a' * 34}"), "no-secret", "a known form"),
    "set -e": (before_launch("set -euo pipefail"), "no-errexit", "`set -euo pipefail` ends the script"),
    "errexit": (before_launch("set -o errexit"), "no-errexit", "set -o errexit"),
    "traps gone": (before_launch("trap - TERM USR2"), "trap-kept", "`trap - TERM USR2` takes"),
    "a trap replaced": (
        before_launch("trap 'cleanup; exit' INT SIGTERM"),
        "trap-kept",
        "takes the script's own",
    ),
    "always an end": (before_launch("exit 0"), "no-exit", "`exit 0` is always reached"),
    "always an end, after the step": (replaced(MARKED, f"{MARKED}exit\n"), "no-exit", "`exit` is always"),
    "a variable taken back": (before_launch("unset NCCL_TOPO_FILE"), "variable-lost", "back: NCCL_TOPO_FILE"),
    "no longer exported": (before_launch("export -n NCCL_DEBUG"), "variable-lost", "back: NCCL_DEBUG"),
    "another status": (replaced(MARKED, f"{MARKED}rc=0\n"), "status-kept", "`rc=0` sets rc"),
    "another step's status": (
        replaced(MARKED, f"{MARKED}each_node 60 rm -rf /nvme/x\n"),
        "status-kept",
        "sets rc",
    ),
    "mounts again": (
        before_launch("container+=(--container-mounts=/a:/a)"),
        "container-option-twice",
        "a second --container-mounts",
    ),
    "a step without a limit": (before_launch("srun nvidia-smi -pm 1"), "step-foreground", "`srun nvidia-smi"),
    "a step's output": (before_launch("version=$(srun cat /version)"), "step-foreground", "without a limit"),
    "right-to-left": (before_launch("# harmless \u202e"), "unprintable", "\\u202e"),
}
HARMLESS: dict[str, Change] = {
    "nothing of a comment counts": before_launch("# set -x; printenv; export HF_TOKEN=abc; srun"),
    "nor behind code": before_launch("module load cuda # not: set -x"),
    "nor in a here-document": before_launch("cat >/dev/null <<'END'\nset -x\nprintenv\nexport LEAK=1\nEND"),
    "one variable is printed": before_launch("printenv CUDA_HOME >/dev/null"),
    "env with a command": before_launch("env FOO=1 hostname"),
    "set with options": before_launch("set -u -o pipefail"),
    "a secret from a file": before_launch('HF_TOKEN=$(<"$HOME/.token")'),
    "for the host": before_launch("export PATH=/opt/site/bin:$PATH LD_LIBRARY_PATH=/opt/site/lib"),
    "passed by env": replaced('    "HOME=$scratch"\n', '    "HOME=$scratch"\n    "SITE_PROXY=$SITE_PROXY"\n'),
    "another launch line": in_launch(f"run_step srun {WORDS} nsys profile python3 -m trainer"),
    "errexit in a subshell": before_launch("(set -e; cd /opt; make)"),
    "a trap for another signal": before_launch("trap 'rm -f /tmp/x' EXIT"),
    "an end under a condition": before_launch(
        "[[ -d /opt ]] ||\n    exit 1\nif [[ -e x ]]; then\nexit 1\nfi"
    ),
    "an end of a function": before_launch("check() {\nexit 1\n}"),
    "a variable of its own taken back": before_launch("unset -v CDPATH"),
    "a step with a limit": before_launch("run_step timeout 60 srun hostname || say no"),
    "a step on every node": before_launch("each_node 60 hostname || die no"),
    "what rc is": replaced(MARKED, f'{MARKED}((rc == 0)) || say "rc=$rc"\n'),
    "a directive more": replaced("#SBATCH --requeue\n", "#SBATCH --requeue\n#SBATCH --mail-type=END\n"),
}


@pytest.mark.parametrize(("change", "rule", "what"), BROKEN.values(), ids=BROKEN)
def test_what_breaks_a_rule_is_found(
    found: Callable[[Change], list[Finding]], change: Change, rule: str, what: str
) -> None:
    matching = [finding for finding in found(change) if finding.rule.name == rule]
    assert [finding for finding in matching if what in " ".join((finding.what, *finding.names))], matching


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_what_is_fine_is_not_found(found: Callable[[Change], list[Finding]], change: Change) -> None:
    assert found(change) == []


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.what)
def test_every_part_is_missed_and_its_block_named(
    found: Callable[[Change], list[Finding]], part: object
) -> None:
    assert isinstance(part, type(PARTS[0]))
    lost = [
        finding for finding in found(without(part.pattern.strip("^$"))) if finding.rule.name == "part-lost"
    ]
    assert f"{part.what} is lost" in [finding.what for finding in lost]
    assert part.block in [finding.block for finding in lost]


def test_the_check_of_done_stands_before_the_launch(found: Callable[[Change], list[Finding]]) -> None:
    check = 'if (($(read_number "$run_dir/DONE") >= train_iters)) && [[ $(sed -n 2p -- "$run_dir/DONE")'
    lost = found(replaced(check, "if [[ no"))
    assert [finding.what for finding in lost] == ["the check of $run_dir/DONE is lost"]


def test_a_file_of_the_job_is_missed(found: Callable[[Change], list[Finding]]) -> None:
    lost = found(replaced('write_file "$job_dir"/trainer.json <<', "cat >/dev/null <<"))
    assert [finding.what for finding in lost] == ["the job's file trainer.json is lost"]


def test_a_finding_has_the_line_of_the_script(
    training: Plan, found: Callable[[Change], list[Finding]]
) -> None:
    [finding] = found(before_launch("set -x"))
    lines = render(training, "train").splitlines()
    assert finding.line == lines.index("# ==== launch ====") + 1


def test_secrets_are_not_repeated_in_what_is_said(found: Callable[[Change], list[Finding]]) -> None:
    findings = found(before_launch("export HF_TOKEN=hunter2"))
    said = " ".join(str(finding) for finding in findings)
    assert [finding.names for finding in findings] == [("HF_TOKEN",)]
    assert "hunter2" not in said


def test_every_stage_and_runtime_holds_to_it(tmp_path: Path) -> None:
    from hpcgen.rendering.representative import representatives

    checked = 0
    for run in representatives("azure-ndv5"):
        for name, stage in run.plan.stages.items():
            assert check_script(render(run.plan, name), stage) == [], f"{name}, {run.label}"
            checked += 1
    assert checked == 3 * (len(STAGES) + 1)
