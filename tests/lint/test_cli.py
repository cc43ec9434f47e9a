from __future__ import annotations

import io
import json
import sys
import types
from dataclasses import replace

import pytest

from hpcgen.check.lint.check import RULES
from tests.cli.command import hpcgen
from tests.lint.examples import SOUND, edited


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "job.sh") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write


def test_a_correct_script_exits_with_0(script) -> None:
    found = hpcgen("lint", script(SOUND))
    assert (found.status, found.stdout, found.stderr) == (0, "", "no findings\n")


def test_a_finding_says_where_why_and_what_to_do(script) -> None:
    found = hpcgen("lint", script(edited((("#SBATCH --time=1-00:00:00\n", ""),))))
    assert found.status == 1
    assert found.stdout == (
        "job.sh:2: warning: no --time: the job gets the partition's default limit [no-time-limit]\n"
        "    fix: #SBATCH --time=<what the run needs>, e.g. 1-00:00:00\n"
    )
    assert found.stderr == "1 warning\n"


def test_only_notes_exit_with_0(script) -> None:
    found = hpcgen("lint", script(edited((("    --exit-signal-handler\n", ""),))))
    assert found.status == 0
    assert "note:" in found.stdout
    assert found.stderr == "1 note\n"


def test_strict_fails_for_notes_alone(script) -> None:
    path = script(edited((("    --exit-signal-handler\n", ""),)))
    assert hpcgen("lint", path, "--strict").status == 1
    assert hpcgen("lint", script(edited(())), "--strict").status == 0


def test_several_scripts_and_standard_input(script, monkeypatch) -> None:
    text = edited((("    --lr-decay-iters 140000\n", "    --lr-decay-iters 430000\n"),))
    stream = types.SimpleNamespace(buffer=io.BytesIO(text.encode()))
    monkeypatch.setattr(sys, "stdin", stream)
    found = hpcgen("lint", script(text), "-")
    assert found.status == 1
    assert [line.partition(":")[0] for line in found.stdout.splitlines()[::2]] == ["job.sh", "-"]
    assert found.stderr == "2 warnings in 2 scripts\n"


def test_json_is_a_list_of_plain_objects(script) -> None:
    found = hpcgen(
        "lint",
        "--json",
        script(edited((("    --lr-decay-iters 140000\n", "    --lr-decay-iters 430000\n"),))),
    )
    assert found.status == 1
    [finding] = json.loads(found.stdout)
    assert finding == {
        "path": "job.sh",
        "line": SOUND.split("\n").index("    --lr-decay-iters 140000") + 1,
        "rule": "decay-beyond-run",
        "severity": "warning",
        "why": "the learning rate decays over 430000 iterations, but the run ends after 140000",
        "fix": "use --lr-decay-iters 140000, or remove it",
        "also": [],
    }
    assert json.loads(hpcgen("lint", "--json", script(SOUND)).stdout) == []


TWO = (
    (("    --lr-decay-iters 140000\n", "    --lr-decay-iters 430000\n")),
    ("#SBATCH --time=1-00:00:00\n", ""),
)


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        ((), {"decay-beyond-run", "no-time-limit"}),
        (("--rule", "decay-beyond-run"), {"decay-beyond-run"}),
        (("--ignore", "decay-beyond-run"), {"no-time-limit"}),
        (
            ("--rule", "decay-beyond-run", "--rule", "no-time-limit", "--ignore", "no-time-limit"),
            {"decay-beyond-run"},
        ),
        (("--ignore", "decay-beyond-run", "--ignore", "no-time-limit"), set()),
        (("--rule", "decay-beyond-run", "--ignore", "decay-beyond-run"), set()),
    ],
)
def test_rules_are_chosen(script, options, rules) -> None:
    found = hpcgen("lint", "--json", *options, script(edited(TWO)))
    assert {finding["rule"] for finding in json.loads(found.stdout)} == rules
    assert found.status == (1 if rules else 0)


@pytest.mark.parametrize(
    "edits",
    [
        (
            (
                "    --lr-decay-iters 140000\n",
                "    --lr-decay-iters 430000 # hpcgen: ignore=decay-beyond-run\n",
            ),
        ),
        (
            (
                "    --lr-decay-iters 140000\n",
                "    # hpcgen: ignore=decay-beyond-run\n    --lr-decay-iters 430000\n",
            ),
        ),
        (
            ("    --lr-decay-iters 140000\n", "    --lr-decay-iters 430000\n"),
            ("training=(", "# hpcgen: ignore=batch-size,decay-beyond-run\ntraining=("),
        ),
        (
            ("#SBATCH --time=1-00:00:00\n", ""),
            ("#SBATCH --job", "# hpcgen: ignore=no-time-limit\n#SBATCH --job"),
        ),
        (
            ('srun "${step', '# hpcgen: ignore=no-kill-on-bad-exit\nsrun "${step'),
            ("    --kill-on-bad-exit=1\n", ""),
        ),
    ],
)
def test_a_comment_turns_a_rule_off(script, edits) -> None:
    assert hpcgen("lint", script(edited(edits))).status == 0


@pytest.mark.parametrize(
    "edits",
    [
        (("    --lr-decay-iters 140000\n", "    --lr-decay-iters 430000 # hpcgen: ignore=batch-size\n"),),
        (
            ("    --lr-decay-iters 140000\n", "    --lr-decay-iters 430000\n"),
            ("#!/bin/bash\n", "#!/bin/bash\n# hpcgen: ignore=decay-beyond-run\n"),
        ),
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
        (("--slurm-version", "22", "job.sh"), "'22' is not a Slurm version; give one such as 22.05"),
    ],
)
def test_a_mistake_exits_with_2(script, arguments, message) -> None:
    script(SOUND)
    script("\0\0", "binary")
    found = hpcgen("lint", *arguments)
    assert (found.status, found.stdout) == (2, "")
    assert message in found.stderr


@pytest.mark.parametrize(
    ("options", "severity"),
    [
        ((), "note"),
        (("--slurm-version", "22.05.8"), "warning"),
        (("--slurm-version", "23.02"), "warning"),
        (("--slurm-version", "23.11"), None),
        (("--slurm-version", "21.08.5"), None),
    ],
)
def test_a_finding_for_some_slurm_versions_is_a_warning_only_for_them(script, options, severity) -> None:
    text = edited((("    --cpus-per-task=12\n", "    --cpu-bind=cores\n"),))
    found = json.loads(hpcgen("lint", "--json", *options, script(text)).stdout)
    assert [finding["severity"] for finding in found] == ([severity] if severity else [])
    assert all("22.05 and 23.02" in finding["why"] for finding in found)


def test_one_mistake_in_several_lines_is_one_finding(script) -> None:
    mounts = "~/a:/a,~/b:/b"
    text = (
        "#!/bin/bash\n#SBATCH --time=1:00\n"
        f"srun --container-image=/x.sqsh --container-mounts={mounts} ./a\n"
        f"srun --container-image=/x.sqsh --container-mounts={mounts} ./b\n"
    )
    found = hpcgen("lint", script(text))
    assert found.stdout == (
        "job.sh:3: error: the mount source '~/a' is not a path: it does not begin with / or a dot [mount-source]\n"
        "    also: line 4\n"
        '    fix: write "$HOME" for ~, and ./ before a relative path\n'
    )
    [finding] = json.loads(hpcgen("lint", "--json", "job.sh").stdout)
    assert (finding["line"], finding["also"]) == (3, [4])


def test_all_rules_are_listed_and_explained() -> None:
    listed = hpcgen("lint", "--rules")
    assert listed.status == 0
    ids = [line.split()[0] for line in listed.stdout.splitlines()]
    assert len(ids) > 90
    for id in ids:
        explained = hpcgen("lint", "--explain", id)
        assert explained.status == 0
        assert explained.stdout.startswith(f"{id} (")
        assert f"ignore={id}" in explained.stdout


def test_control_characters_of_a_script_are_escaped(script) -> None:
    text = edited((("--save /shared/checkpoints/gpt3-13b", "--save $'/x\\e[31m\\n'"),))
    found = hpcgen("lint", script(text))
    assert found.status == 1
    assert "\x1b" not in found.stdout


def test_nothing_of_a_script_runs(script, tmp_path) -> None:
    planted = f"touch {tmp_path}/planted"
    text = f"#!/bin/bash\n#SBATCH --time=1:00\n{planted}\nx=$({planted})\nif $({planted}); then\nbash -c '{planted}'\n"
    hpcgen("lint", script(text), script(text + "fi\n", "whole.sh"))
    assert not (tmp_path / "planted").exists()


def test_a_bug_in_one_rule_loses_no_other_finding(script, monkeypatch) -> None:
    """The traceback follows the findings of all scripts, once for all scripts with the bug."""
    broken = replace(RULES["no-wait"], check=lambda job: iter([job.nonexistent]))
    monkeypatch.setitem(RULES, "no-wait", broken)
    path = script(edited((("--time=1-00:00:00", "--nodes=2"),)))
    done = hpcgen("lint", path, path)
    assert done.status == 1
    assert done.stdout.count("[no-time-limit]") == 2
    assert f"{path}, rule no-wait: this is a bug in hpcgen; findings may be missing" in done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    "submit", ["sbatch --time=60 <<EOF\n{}EOF\n", "cat >job.sh <<EOF\n{}EOF\nsbatch -t60 job.sh\n"]
)
def test_options_of_sbatch_override_the_directives_of_a_here_document(script, submit) -> None:
    text = "#!/bin/bash\n#SBATCH --nodes=2\nexport NCCL_MIN_CHANNELS=32\nsrun -K python train.py\n"
    found = json.loads(hpcgen("lint", "--json", script("#!/bin/bash\n" + submit.format(text))).stdout)
    assert [(finding["rule"], finding["line"]) for finding in found] == [("misspelt-variable", 5)]


def test_a_file_without_an_end_is_refused() -> None:
    found = hpcgen("lint", "/dev/zero")
    assert found.status == 2
    assert found.stderr.startswith("/dev/zero: is larger than 16 MiB")
