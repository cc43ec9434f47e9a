"""Each rule for a site's scripts: the shipped script with one change breaks it, and with a similar one does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcgen import render
from hpcgen.check.comparison import RULES, Comparison, read_once
from hpcgen.check.lint.check import Finding
from hpcgen.check.scripts import compare, library_functions
from tests.rendering.golden import one_of_each_template
from tests.runs import big_run, planned
from tests.selection import select

Change = Callable[[str], str]
Compare = Callable[[Change], list[Finding]]
FILES = "\n# ==== the job's files ====\n"
"""Follows block site, which is the last of the template."""
WORDS = '"${step[@]}" "${container[@]}" env "${task_environment[@]}"'


CALLED = (
    "begin",
    "each_node",
    "make_node_scratch",
    "make_scratch",
    "read_number",
    "run_epilogue",
    "run_step",
    "set_traps",
)
"""Functions of the libraries whose statements matter to a rule."""


def without_bodies(script: str) -> str:
    """The script with most functions of its libraries emptied. Rules need their names, and reading them takes long."""
    job, libraries = script.split("\n# ==== lib/", 1)
    function = rf"(?ms)^(?!{'|'.join(CALLED)})(\w+)\(\) ([{{(])\n.*?^([}})])$"
    return f"{job}\n# ==== lib/" + re.sub(function, r"\1() \2\n    :\n\3", libraries)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of a site whose hooks are still the shipped ones."""
    directory = tmp_path_factory.mktemp("run")
    template = directory / "site/slurm/train.sbatch.j2"
    template.parent.mkdir(parents=True)
    template.write_text('{% extends "hpcgen/slurm/train.sbatch.j2" %}{# site_prologue, site_epilogue #}\n')
    plan = planned(directory, big_run(secrets=["HF_TOKEN"]))
    return without_bodies(render(plan, "train", [directory / "site"]))


@pytest.fixture
def found(shipped: str) -> Compare:
    def check(change: Change) -> list[Finding]:
        script = change(shipped)
        assert script != shipped
        assert read_once(script, follows_values=False).error is None  # otherwise nothing would be found
        return compare(script, shipped)

    return check


def replaced(old: str, new: str) -> Change:
    return lambda script: script.replace(old, new, 1)


def without(pattern: str) -> Change:
    return lambda script: re.sub(rf"(?m)^.*{pattern}.*\n", "", script)


def site(text: str) -> Change:
    """Code in block site."""
    return replaced(FILES, f"{text}\n{FILES}")


def function(name: str, *lines: str) -> Change:
    return site("\n".join((f"{name}() {{", *(f"    {line}" for line in lines), "}")))


def prologue(*lines: str) -> Change:
    return function("site_prologue", *lines)


def epilogue(*lines: str) -> Change:
    return function("site_epilogue", *lines)


def launch(*lines: str) -> Change:
    return function("launch", *lines)


def in_main(line: str, *, after: str) -> Change:
    return lambda script: re.sub(
        rf"(?m)^(    {after}.*)$", lambda old: f"{old[0]}\n    {line}", script, count=1
    )


def settings(line: str) -> Change:
    return replaced("\n# ==== environment ====\n", f"{line}\n\n# ==== environment ====\n")


BROKEN: dict[str, tuple[str, Change, str]] = {
    "a directive gone": ("directive-lost", without("#SBATCH --signal"), "--signal=B:USR2@"),
    "a second value": (
        "directive-lost",
        replaced("#SBATCH --requeue\n", "#SBATCH --requeue\n#SBATCH --nodes=1\n"),
        "--nodes=1 overrides --nodes=16",
    ),
    "a backslash in a directive": (
        "directive-form",
        replaced("#SBATCH --requeue\n", "#SBATCH --requeue\n#SBATCH --comment=a\\ b\n"),
        "backslash",
    ),
    "settings gone": ("setting-lost", without("^train_iters="), "not set as planned: train_iters"),
    "a setting changed": ("setting-lost", settings("run_dir=/shared/other"), "changes the setting run_dir"),
    "a setting changed in a hook": ("setting-lost", prologue("nodes=3"), "changes the setting nodes"),
    "step assigned again": ("option-lost", settings("step=(--label)"), "lost: --nodes=16, --ntasks=128"),
    "container assigned again": ("option-lost", prologue("container=(sh -c true)"), "replaces the array"),
    "the tasks' environment assigned again": (
        "option-lost",
        prologue('task_environment=("SITE=1")'),
        'lost: "HOME=$scratch"',
    ),
    "a variable gone": ("variable-lost", without("export PYTHONNOUSERSITE="), "PYTHONNOUSERSITE"),
    "a variable taken back": ("variable-lost", prologue("unset NCCL_TOPO_FILE"), "removes NCCL_TOPO_FILE"),
    "no longer exported": ("variable-lost", prologue("export -n NCCL_DEBUG"), "removes NCCL_DEBUG"),
    "an emptied block": (
        "function-lost",
        lambda script: re.sub(r"(?ms)^main\(\) \{$.*?^\}$\n", "", script, count=1),
        "function main is missing",
    ),
    "a library's function": ("overwritten", function("requeue", "exit 0"), "a library also defines requeue"),
    "a hook twice": (
        "overwritten",
        site("site_epilogue() { say a; }\nsite_epilogue() { say b; }"),
        "the site also defines site_epilogue",
    ),
    "a library's variable": (
        "overwritten",
        settings('task_environment+=("SITE=1")'),
        "a library sets task_environment",
    ),
    "a function of another stage": (
        "unknown-command",
        prologue("claim_task"),
        "this stage has no function claim_task",
    ),
    "a step of main gone": (
        "step-lost",
        without("    claim_run_directory "),
        "does not call claim_run_directory",
    ),
    "steps in another order": (
        "step-lost",
        lambda script: script.replace("prepare_nodes && rendezvous", "rendezvous && prepare_nodes"),
        "too early or too late",
    ),
    "a step after the conclusion": (
        "step-lost",
        in_main("say bye", after="conclude"),
        "main does not end with conclude",
    ),
    "without the container": (
        "launch-words",
        launch('run_step srun "${step[@]}" env "${task_environment[@]}" "$@"'),
        '"${container[@]}"',
    ),
    "another command": ("launch-words", launch(f"run_step srun {WORDS} python3 -m trainer"), '"$@"'),
    "in the foreground": ("launch-foreground", launch(f'srun {WORDS} "$@"'), "srun runs without run_step"),
    "exec": ("launch-foreground", launch(f'exec srun {WORDS} "$@"'), "srun runs without run_step"),
    "a limit is no run_step": (
        "launch-foreground",
        launch(f'timeout 60 srun {WORDS} "$@"'),
        "srun runs without run_step",
    ),
    "run_step in a pipeline": (
        "launch-foreground",
        launch(f'run_step srun {WORDS} "$@" | tee log'),
        "does not call run_step in the script's shell",
    ),
    "no srun": ("launch-foreground", launch(f'mpirun {WORDS} "$@"'), "does not call run_step"),
    "a step without a limit": ("step-foreground", prologue("srun nvidia-smi"), "without a timeout"),
    "a step's output": ("step-foreground", prologue("say $(srun cat /version)"), "without a timeout"),
    "an unset variable in the epilogue": (
        "unset-variable",
        epilogue('cp -- "$results/log" /shared/kept'),
        "nothing sets results",
    ),
    "a local variable of a library": ("unset-variable", epilogue('say "at $after"'), "nothing sets after"),
    "a misspelled array": (
        "unset-variable",
        launch(f'run_step srun {WORDS} "${{taks[@]}}" "$@"'),
        "sets taks",
    ),
    "unset in arithmetic": ("unset-variable", epilogue("((exit_code == 0)) || say failed"), "exit_code"),
    "unset in a here-document": (
        "unset-variable",
        site("site_epilogue() { cat <<END\n$message\nEND\n}"),
        "message",
    ),
    "no restart yet": ("unset-variable", prologue('say "$SLURM_RESTART_COUNT"'), "only for a requeued job"),
    "no array": ("unset-variable", prologue('say "$SLURM_ARRAY_TASK_ID"'), "only in job arrays"),
    "the script's variable on a node": (
        "unset-variable",
        function("prepare_node", 'rm -rf -- "$run_dir/old"'),
        "runs on each node, in a shell without the script's variable run_dir",
    ),
    "lower case in spite of modules": (
        "unset-variable",
        prologue("module load cuda || die no", 'say "$cuda_version"'),
        "nothing sets cuda_version",
    ),
    "not named for the container": (
        "container-env",
        prologue("export SITE_PROXY=http://proxy:3128"),
        "SITE_PROXY is exported, but not listed",
    ),
    "the second name of an export": (
        "container-env",
        prologue('export PATH="$PATH:/x" B=2'),
        "B is exported",
    ),
    "declare -x in a function": ("export-local", prologue("declare -x SITE=1"), "until the function ends"),
    "traps gone": ("trap-kept", in_main("trap - TERM USR2", after="begin"), "trap for TERM, USR2"),
    "a trap replaced": ("trap-kept", site("trap 'rm -f /tmp/x; exit' INT SIGTERM"), "trap for TERM"),
    "the epilogue's trap": ("trap-kept", in_main("trap 'rm -f /tmp/x' EXIT", after="begin"), "trap for EXIT"),
    "the prologue's trap": ("trap-kept", prologue("trap 'rm -f /tmp/x' EXIT"), "trap for EXIT"),
    "set -e": ("no-errexit", site("set -euo pipefail"), "`set -euo pipefail` ends the job"),
    "errexit": ("no-errexit", in_main("set -o errexit", after="begin"), "`set -o errexit`"),
    "always an end": ("no-exit", prologue("exit 0"), "`exit` always runs"),
    "always an end at the top level": ("no-exit", site("exit 0"), "`exit` always runs"),
    "a return from main": ("no-exit", in_main("return", after="set_environment"), "`return` always runs"),
    "another status": ("status-kept", in_main("rc=0", after="check_trainer"), "this replaces rc"),
    "another step's status": (
        "status-kept",
        in_main("each_node 60 rm -rf /nvme/x", after="check_trainer"),
        "each_node replaces rc",
    ),
    "another step's status in a function": (
        "status-kept",
        lambda script: site("tidy() { run_step timeout 9 srun true; }")(
            in_main("tidy", after="check_trainer")(script)
        ),
        "tidy replaces rc",
    ),
    "mounts again": (
        "container-option-twice",
        settings("container+=(--container-mounts=/a:/a)"),
        "a second --container-mounts",
    ),
    "mounts again in the launch": (
        "container-option-twice",
        launch(f'run_step srun --container-mounts=/a:/a {WORDS} "$@"'),
        "a second --container-mounts",
    ),
    "set -x": ("no-trace", prologue("set -x"), "`set -x` prints"),
    "set with other options": ("no-trace", prologue("true && set -ux"), "`set -ux`"),
    "xtrace": ("no-trace", prologue("set -o xtrace"), "`set -o xtrace`"),
    "set -x on the nodes": ("no-trace", prologue("each_node 9 bash -c '", "set -x", "true", "'"), "`set -x`"),
    "bash -x": ("no-trace", prologue("bash -x /opt/site/check.sh"), "bash -x"),
    "printenv": ("no-environment-dump", epilogue("printenv"), "`printenv`"),
    "env through a pipe": ("no-environment-dump", epilogue("env | sort"), "`env`"),
    "env on every node": ("no-environment-dump", prologue("each_node 9 bash -c 'hostname; env'"), "`env`"),
    "export -p": ("no-environment-dump", epilogue("export -p >env.txt"), "`export -p`"),
    "declare -px": ("no-environment-dump", epilogue("declare -px"), "`declare -px`"),
    "a secret": ("no-secret", prologue("WANDB_API_KEY=0123"), "the value of WANDB_API_KEY"),
    "a secret for the tasks": ("no-secret", prologue('task_environment+=("HF_TOKEN=hunter2")'), "HF_TOKEN"),
    "a token of a known form": ("no-secret", prologue(f"curl -H x:hf_{'a' * 34}"), "an access token"),
    "a path replaced": ("path-replaced", prologue("export PATH=/opt/site/bin"), "leaves out $PATH"),
    "a path replaced on the nodes": (
        "path-replaced",
        function("prepare_node", 'PATH="/opt/site/bin:/usr/bin"'),
        "leaves out $PATH",
    ),
    "a module that may not exist": (
        "module-unchecked",
        prologue("module load gcc"),
        "`module load gcc` fails",
    ),
    "a module by its short name": ("module-unchecked", prologue("ml cuda/12.8"), "`ml cuda/12.8` fails"),
    "a package that may not exist": ("module-unchecked", prologue("spack load hwloc"), "`spack load hwloc`"),
    "a requeue by the epilogue": (
        "epilogue-requeue",
        epilogue('((rc == 0)) || scontrol requeue "$SLURM_JOB_ID"'),
        "runs after the job's verdict",
    ),
    "a requeue by a function of the epilogue": (
        "epilogue-requeue",
        site('site_epilogue() { again; }\nagain() { scontrol requeuehold "$SLURM_JOB_ID"; }'),
        "runs after the job's verdict",
    ),
    "another job of the same script": ("epilogue-requeue", epilogue('sbatch "$0"'), "`sbatch"),
    "an end by the epilogue": ("epilogue-requeue", epilogue('scancel "$SLURM_JOB_ID"'), "`scancel"),
    "persistence mode": (
        "needs-root",
        function("prepare_node", "nvidia-smi -pm 1"),
        "`nvidia-smi -pm` needs root",
    ),
    "clocks on every node": (
        "needs-root",
        prologue("each_node 60 nvidia-smi --lock-gpu-clocks=1980 || die no"),
        "`nvidia-smi --lock-gpu-clocks=1980` needs root",
    ),
    "a setting of the kernel": (
        "needs-root",
        function("prepare_node", "sysctl -w vm.swappiness=1"),
        "`sysctl -w`",
    ),
    "a file of the kernel": (
        "needs-root",
        function("prepare_node", "echo 3 >/proc/sys/vm/drop_caches"),
        "drop_caches` needs root",
    ),
    "right-to-left": ("unprintable", site("# harmless \u202e"), "\\u202e"),
}
HARMLESS: dict[str, Change] = {
    "comments": prologue("true # set -x; printenv; export HF_TOKEN=abc; srun; exit"),
    "a here-document": site("site_prologue() { cat <<'END'\nset -x\nprintenv\n$nothing\nEND\n}"),
    "one variable is printed": prologue("printenv CUDA_HOME >/dev/null"),
    "chosen variables are printed": prologue("env | grep ^NCCL_"),
    "env with a command": prologue("env FOO=1 hostname"),
    "set with options": prologue("set -u -o pipefail"),
    "errexit in the prologue": prologue("set -e", "cd /opt/site"),
    "errexit in a subshell": in_main("(set -e; cd /opt; make)", after="begin"),
    "modules": prologue(
        "set +u", "source /etc/profile.d/modules.sh", "module load cuda || die no", 'say "$CUDA_HOME"'
    ),
    "modules under set -e": prologue("set -e", "module purge", "module load cuda"),
    "a path restored": prologue("saved_PATH=$PATH", "PATH=/opt/bin:$PATH", "PATH=$saved_PATH"),
    "what root may do, without harm": function(
        "prepare_node",
        "nvidia-smi -pm 1 || true",
        "sudo nvidia-smi -pm 1",
        "nvidia-smi -q -i 0",
        "sysctl vm.swappiness",
    ),
    "a job after the run": epilogue('sbatch --dependency="afterok:$SLURM_JOB_ID" /opt/site/archive.sh'),
    "without set -u": prologue("set +u", 'say "$anything"', "set -u"),
    "a default": epilogue('say "${anything-} ${SLURM_RESTART_COUNT:-0}"'),
    "a test": epilogue("[[ ! -v reason ]] || say $reason"),
    "set by read": epilogue("while read -r name; do say $name; done </etc/hosts"),
    "set by a loop": epilogue("for name in a b; do say $name; done", "for ((i = 0; i < 3; i++)); do :; done"),
    "set by printf and mapfile": epilogue("printf -v a %d 1", "mapfile -t b </etc/hosts", 'say "$a ${b[0]}"'),
    "set by a function of the script": epilogue('read_number count "$run_dir/count"', 'say "$count"'),
    "set by the prologue": lambda script: prologue("rack=$(</etc/rack)")(epilogue('say "$rack"')(script)),
    "set by the caller": site('site_epilogue() { local x=1; tell; }\ntell() { say "$x"; }'),
    "variables of the script": epilogue(
        'say "$rc $run_dir $job_dir $restart $SLURM_JOB_ID $HF_TOKEN $HOME $1"'
    ),
    "variables of the node": function("prepare_node", 'touch "$scratch/$node"', 'ls "$NCCL_TOPO_FILE"'),
    "a secret from a file": prologue('HF_TOKEN=$(<"$HOME/.token")'),
    "for the host": prologue("export PATH=/opt/site/bin:$PATH LD_LIBRARY_PATH=/opt/site/lib"),
    "passed on": prologue("export SITE_PROXY=x", 'task_environment+=("SITE_PROXY=$SITE_PROXY")'),
    "options appended": settings("step+=(--network=sharp)\ncontainer+=(numactl --localalloc)"),
    "words in front": prologue('container=("${container[@]}" numactl)'),
    "another launch": launch(f'run_step srun {WORDS} nsys profile "$@"'),
    "a launch in two functions": site(
        f'launch() {{ run_step profiled "$@"; }}\nprofiled() {{ srun {WORDS} "$@"; }}'
    ),
    "a launch with a message": launch(
        "local status=0", f'run_step srun {WORDS} "$@" || status=$?', "return $status"
    ),
    "a trap for another signal": in_main("trap 'rm -f /tmp/x' HUP", after="begin"),
    "a trap in a subshell": epilogue("trap 'rm -f /tmp/x' TERM"),
    "an end under a condition": prologue("[[ -d /opt ]] ||", "exit 1", "if [[ -e x ]]; then", "exit 1", "fi"),
    "an end of a function": site("check() { exit 1; }"),
    "an end of the epilogue": epilogue("((rc)) || exit 0", "exit 0"),
    "a variable of its own taken back": prologue("unset -v CDPATH"),
    "a step with a limit": prologue("run_step timeout 60 srun hostname || say no"),
    "a step on every node": prologue("each_node 60 hostname || die no"),
    "a step in the epilogue": epilogue('srun "${on_nodes[@]}" nvidia-smi'),
    "a step in the background": prologue("srun --overlap dcgm-exporter &"),
    "the status is read": epilogue('((rc == 0)) || say "rc=$rc"'),
    "the status is kept": lambda script: script.replace(
        "    check_trainer ",
        "    local status=$rc\n    each_node 60 true\n    rc=$status\n    check_trainer ",
        1,
    ),
    "a step more in main": in_main("say prepared", after="prepare_nodes"),
    "a step behind a function": lambda script: site("checks() { check_datasets; say checked; }")(
        script.replace("    check_datasets\n", "    checks\n", 1)
    ),
    "a directive more": replaced("#SBATCH --requeue\n", "#SBATCH --requeue\n#SBATCH --mail-type=END\n"),
}


def first_of_each_rule() -> set[str]:
    """The first example of each rule. To read one takes half a second."""
    return set({rule: name for name, (rule, *_) in reversed(BROKEN.items())}.values())


@pytest.mark.parametrize(("rule", "change", "what"), select(BROKEN, first_of_each_rule()))
def test_a_script_that_breaks_a_rule(found: Compare, rule: str, change: Change, what: str) -> None:
    matching = [finding.problem.reason for finding in found(change) if finding.rule == rule]
    assert any(what in why for why in matching), matching


@pytest.mark.parametrize("change", select(HARMLESS, list(HARMLESS)[::3]))
def test_a_script_that_breaks_none(found: Compare, change: Change) -> None:
    assert found(change) == []


@pytest.mark.parametrize("path", one_of_each_template(), ids=lambda path: path.stem)
def test_shipped_code_relies_on_no_unset_variable(path: Path) -> None:
    """Treats all shipped code as a site's, which tests the rule with every kind of variable."""
    script = path.read_text(encoding="utf-8")
    assert unset_variables(script) == set()
    if path.stem == "nccl-test":
        assert unset_variables(script.replace(" restart=", " earlier=")) == {"nothing sets restart"}


def unset_variables(script: str) -> set[str]:
    """The findings of one rule, which does not need the values of variables. Reading those takes as long again."""
    directives = [line for line in script.split("\n") if line.startswith("#SBATCH")]
    both = Comparison(script, "\n".join(directives), library_functions())
    return {hit.problem.reason for hit in RULES["unset-variable"].check(both)}


def test_every_rule_has_an_example() -> None:
    assert {rule for rule, _, _ in BROKEN.values()} == set(RULES)


def test_a_finding_has_the_line_of_the_script(shipped: str) -> None:
    script = prologue("true", "set -x")(shipped)
    [finding] = compare(script, shipped)
    assert script.split("\n")[finding.line - 1] == "    set -x"


def test_a_comment_turns_a_rule_off(shipped: str) -> None:
    assert compare(prologue("set -x # hpcgen: ignore=no-trace")(shipped), shipped) == []


def test_the_value_of_a_secret_is_not_repeated(found: Compare) -> None:
    said = " ".join(
        f"{finding.problem.reason} {finding.problem.hint}"
        for finding in found(prologue("export HF_TOKEN=hunter2"))
    )
    assert "HF_TOKEN" in said
    assert "hunter2" not in said


def test_the_guide_explains_every_rule() -> None:
    from hpcgen.check.site import OTHERS

    guide = (Path(__file__).parents[2] / "docs/templates.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| (\w+) \| (.+) \|$", guide, re.MULTILINE)
    expected = [(rule.id, rule.severity, rule.title) for rule in RULES.values()]
    assert rows == sorted(expected) + [
        (id, "warning" if id in ("stale", "unrecorded") else "error", title)
        for id, (title, _) in OTHERS.items()
    ]
