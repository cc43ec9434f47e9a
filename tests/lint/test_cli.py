from __future__ import annotations

import io
import json
import sys
import types

import pytest

from tests.cli.command import hpcgen
from tests.lint.examples import SOUND, edited


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "job.sh") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write


def test_a_sound_script_ends_with_0(script) -> None:
    found = hpcgen("lint", script(SOUND))
    assert (found.status, found.stdout, found.stderr) == (0, "", "nothing found\n")


def test_a_finding_says_where_why_and_what_to_do(script) -> None:
    found = hpcgen("lint", script(edited((("#SBATCH --time=1-00:00:00\n", ""),))))
    assert found.status == 1
    assert found.stdout == (
        "job.sh:2: warning: the job has no time limit of its own [no-time-limit]\n"
        "    fix: #SBATCH --time=1-00:00:00\n"
    )
    assert found.stderr == "1 warning\n"


def test_notes_alone_end_with_0(script) -> None:
    found = hpcgen("lint", script(edited((("#SBATCH --exclusive\n", ""),))))
    assert found.status == 0
    assert "note:" in found.stdout
    assert found.stderr == "1 note\n"


def test_several_scripts_and_standard_input(script, monkeypatch) -> None:
    text = edited((("    --bf16\n", "    --fp16\n"),))
    stream = types.SimpleNamespace(buffer=io.BytesIO(text.encode()))
    monkeypatch.setattr(sys, "stdin", stream)
    found = hpcgen("lint", script(text), "-")
    assert found.status == 1
    assert [line.partition(":")[0] for line in found.stdout.splitlines()[::2]] == ["job.sh", "-"]
    assert found.stderr == "2 warnings in 2 scripts\n"


def test_json_is_a_list_of_plain_objects(script) -> None:
    found = hpcgen("lint", "--json", script(edited((("    --bf16\n", "    --fp16\n"),))))
    assert found.status == 1
    [finding] = json.loads(found.stdout)
    assert finding == {
        "path": "job.sh",
        "line": SOUND.split("\n").index("    --bf16") + 1,
        "rule": "fp16",
        "severity": "warning",
        "why": "fp16 overflows where bf16 does not",
        "fix": "--bf16",
    }
    assert json.loads(hpcgen("lint", "--json", script(SOUND)).stdout) == []


TWO = ((("    --bf16\n", "    --fp16\n")), ("#SBATCH --time=1-00:00:00\n", ""))


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        ((), {"fp16", "no-time-limit"}),
        (("--rule", "fp16"), {"fp16"}),
        (("--ignore", "fp16"), {"no-time-limit"}),
        (("--rule", "fp16", "--rule", "no-time-limit", "--ignore", "no-time-limit"), {"fp16"}),
        (("--ignore", "fp16", "--ignore", "no-time-limit"), set()),
        (("--rule", "fp16", "--ignore", "fp16"), set()),
    ],
)
def test_rules_are_chosen(script, options, rules) -> None:
    found = hpcgen("lint", "--json", *options, script(edited(TWO)))
    assert {finding["rule"] for finding in json.loads(found.stdout)} == rules
    assert found.status == (1 if rules else 0)


@pytest.mark.parametrize(
    "edits",
    [
        (("    --bf16\n", "    --fp16 # hpcgen: ignore=fp16\n"),),
        (("    --bf16\n", "    # hpcgen: ignore=fp16\n    --fp16\n"),),
        (("    --bf16\n", "    --fp16\n"), ("training=(", "# hpcgen: ignore=batch-size,fp16\ntraining=(")),
        (
            ("#SBATCH --time=1-00:00:00\n", ""),
            ("#SBATCH --job", "# hpcgen: ignore=no-time-limit\n#SBATCH --job"),
        ),
        (
            ('srun "${step', '# hpcgen: ignore=cpus-not-inherited\nsrun "${step'),
            ("    --cpus-per-task=12\n", ""),
        ),
    ],
)
def test_a_comment_turns_a_rule_off(script, edits) -> None:
    assert hpcgen("lint", script(edited(edits))).status == 0


@pytest.mark.parametrize(
    "edits",
    [
        (("    --bf16\n", "    --fp16 # hpcgen: ignore=batch-size\n"),),
        (("    --bf16\n", "    --fp16\n"), ("#!/bin/bash\n", "#!/bin/bash\n# hpcgen: ignore=fp16\n")),
    ],
)
def test_a_comment_for_another_rule_or_line_does_not(script, edits) -> None:
    assert hpcgen("lint", script(edited(edits))).status == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.sh",), "nowhere.sh: cannot be read"),
        ((".",), ".: cannot be read"),
        (("--rule", "fixed-prt", "job.sh"), "'fixed-prt' is not a rule; did you mean fixed-port?"),
        (("--ignore", "x", "job.sh"), "'x' is not a rule; hpcgen lint --rules lists them"),
        (("--explain", "fixed-prt"), "did you mean fixed-port?"),
        (("binary",), "binary: is not a text"),
    ],
)
def test_a_mistake_ends_with_2(script, arguments, message) -> None:
    script(SOUND)
    script("\0\0", "binary")
    found = hpcgen("lint", *arguments)
    assert (found.status, found.stdout) == (2, "")
    assert message in found.stderr


def test_all_rules_are_listed_and_explained() -> None:
    listed = hpcgen("lint", "--rules")
    assert listed.status == 0
    ids = [line.split()[0] for line in listed.stdout.splitlines()]
    assert len(ids) > 100
    for id in ids:
        explained = hpcgen("lint", "--explain", id)
        assert explained.status == 0
        assert explained.stdout.startswith(f"{id} (")
        assert f"ignore={id}" in explained.stdout


def test_nothing_in_a_script_reaches_the_terminal_as_it_is(script) -> None:
    text = edited((("--save /shared/checkpoints/gpt3-13b", "--save $'/x\\e[31m\\n'"),))
    found = hpcgen("lint", script(text))
    assert found.status == 1
    assert "\x1b" not in found.stdout


def test_nothing_of_a_script_runs(script, tmp_path) -> None:
    planted = f"touch {tmp_path}/planted"
    text = f"#!/bin/bash\n#SBATCH --time=1:00\n{planted}\nx=$({planted})\nif $({planted}); then\nbash -c '{planted}'\n"
    hpcgen("lint", script(text), script(text + "fi\n", "whole.sh"))
    assert not (tmp_path / "planted").exists()
