"""Known words are exactly those that bash passes to the command."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcgen.check.lint.reader import read
from hpcgen.check.lint.script import Command, Script
from hpcgen.errors import HpcgenError


def arguments(text: str, folder: Path) -> list[list[str]]:
    """The argument vectors that bash gives to `show` while it runs a script."""
    program = folder / "show"
    program.write_text(
        '#!/bin/bash\nfor word; do printf "%s\\0" "$word" >>"$OUT"; done; printf "\\n\\0" >>"$OUT"\n'
    )
    program.chmod(0o755)
    out = folder / "out"
    out.write_bytes(b"")
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "OUT": str(out), "HOME": "/home/me"}
    subprocess.run(["bash", "-c", text], env=environment, cwd=folder, capture_output=True, check=False)
    calls: list[list[str]] = [[]]
    for word in out.read_bytes().decode().split("\0"):
        if word == "\n":
            calls.append([])
        else:
            calls[-1].append(word)
    return calls[:-1]


def shown(script: Script) -> list[Command]:
    return [command for command in script.commands if command.name == "show"]


SCRIPTS = [
    "show a 'b c' \"d e\" f\\ g $'h\\ti' j\"k\"'l'",
    'x=1; y="a b"; show $x "$x" $y "$y" x$y"z"',
    'step=(--a "b c" --d=e); step+=(f); show "${step[@]}" ${step[@]} "$step" "${step[@]}x"',
    "x=3; show $((x * 4)) $((512 * 1024)) $(($x+1)) $(( (x - 5) / 2 )) $(( 7 % x ))",
    "x=3; show $((x ** 2)) $((1 << x)) $((x > 2)) $((x ? 4 : 5)) $((-x + 1)) $((~x)) $((7 / -2)) $((-7 % x))",
    'show ${unset:-7} "${unset:-a b}" ${x:=4} $x; x=5; show ${x:-6}',
    'args="--a 1 \\\n  --b 2"; show $args "--c $args"',
    'a=(1 2); b=("${a[@]}" 3); b=("${b[@]}" 4); show "${b[@]}" ${#b[@]}',
    'show "\\$HOME" \'$HOME\' \\"; show "a\\\nb" a\\\nb',
    'f() { local x=2; show "$x"; }; x=1; f; show "$x"',
    'if true; then x=1; fi; show "$x"; y=2; (y=3; show $y); show $y',
    'for i in 1 2; do show "$i"; done; read -r z <<<"q"; show "$z"',
    'unset -v x; x=1; unset x; show "${x-none}"',
    'export A=1 B="2 3"; show "$A" "$B"; C=4 show',
    'x=; show $x \'\' "" "$x"',
    'e=(); show "${e[@]}" end',
    "bash -c 'show \"inner word\"; x=1; show $x'",
    'x=\'a\'; x+=b; x+="c d"; show $x "$x"',
    'layers=([0]*3+[1]*58 x); show "${layers[1]}" "${layers[@]}"',
    "a=1\nshow <<EOF $a\n$a\nEOF\nshow $a | cat",
    "show {a,b} *.none ~ 2>/dev/null >&2",
    "x=$'a\\x0bb\\rc d'; show $x a\x85b \u2028 \v",
    'x=false; a=(1); if [ "$x" = true ]; then a+=(2); else a+=(3); fi; show "${a[@]}"',
    'x=b; if [[ $x == a ]]; then s="$s 1"; elif ! [[ -n $x && $x != b ]]; then s="$s 2"; fi; show $s',
    'n=4; if (( n * 2 > 7 )); then y=1; else y=2; fi; show $y; [ $n -lt 3 ] && y=3; [ -z "" ] || y=4; show $y',
    "case b4 in a*) c=1 ;; x|b?) c=2 ;; *) c=3 ;; esac; show $c; case a in 'a*') c=4 ;; esac; show $c",
    'a=(1 2); a+=3; a+=(4); show ${a[@]}; a=("${a[@]}"); b="${a[@]} 5"; show $b',
    'x=2_000_000; y=${x//_}; show $((y / 2)) ${x/_/-} "${x//0/ab}" ${x/#2/3} ${x//[_]/} ${x/%0/1}',
    "x=1; f() { x=2; }; f; show $x; y=1; g() { show $y; }; y=2; g",
    "x=1; for i in 1 2; do show $x; x=2; done; show $x",
    'args="-a 1"; if [ -e /nowhere ]; then args="$args -b"; else args="$args -c"; fi; bash -c "show 0 $args"',
    "if [ -e /nowhere ]; then x=1; else x=2; fi; if [ $x = 1 ]; then y=1; else y=2; fi; show $y",
    "warned=0; trap 'warned=1' USR1; kill -USR1 $$; if ((warned)); then y=1; else y=2; fi; show $y",
    "x=1; y=$(x=2; show $x); show $x; echo | x=3; show $x; x=4 & wait; show $x; z=$((x++)); show $x",
    "show a \\\n  # b \\\n  --c d\nshow e",
    "show a # b \\\n  show c",
    "show a; if true; then # b \\\n show c # d \\\nfi # e \\\nshow f",
    "show \"# a \\\n b\" '# c \\\n d' # \u00e9 \\\nshow e",
]


@pytest.mark.parametrize("text", SCRIPTS)
def test_known_words_are_those_that_bash_computes(text: str, tmp_path: Path) -> None:
    given_ = arguments(text, tmp_path)
    commands = shown(read(text))
    if any(command.in_loop or command.function for command in commands):
        # such a command runs more often than it is written: each known word is right every time
        commands = [command for command in commands if not (command.in_loop or command.function)]
        known = {
            word.text for command in commands for word in command.words[1:] if word.known and word.certain
        }
        assert known <= {word for call in given_ for word in call}
        return
    assert len(commands) == len(given_)
    for command, call in zip(commands, given_, strict=True):
        words = command.words[1:]
        if all(word.known and word.certain for word in words):
            assert [word.text for word in words] == call


WORDS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "a",
                "b c",
                "",
                "--x=1",
                "é",
                "a'b",
                'a"b',
                "a\\b",
                "$HOME",
                "`id`",
                "$(id)",
                "a\nb",
                "*",
                "#x",
                "a#",
            ]
        ),
        st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=8),
    ),
    min_size=1,
    max_size=4,
)


def quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


@given(words=WORDS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_quoted_words_come_back_through_arrays_and_variables(words: list[str]) -> None:
    text = f"array=({' '.join(map(quoted, words))})\nx={quoted(words[0])}\n" + 'show "${array[@]}" "$x"\n'
    [command] = shown(read(text))
    assert [word.text for word in command.words[1:]] == [*words, words[0]]
    assert all(word.known and word.certain for word in command.words)


def test_values_known_only_at_run_time_stay_unknown() -> None:
    text = 'x=$(date); show "$x" "$HOME/a" $1 "$RANDOM"; if a; then y=1; else y=2; fi; show "$y"'
    first, second = shown(read(text))
    assert [word.known for word in first.words[1:]] == [False] * 4
    assert first.words[2].text == "$HOME/a"
    assert not second.words[1].certain


def test_defaults_that_the_environment_may_replace_are_assumed() -> None:
    [command] = shown(read('NODES=${NODES:-4}\nshow "$NODES" 4'))
    assert [(word.text, word.assumed) for word in command.words[1:]] == [("4", True), ("4", False)]


def test_options_of_branches_are_all_kept_and_those_around_them_are_certain() -> None:
    text = (
        'args="--a"; if $1; then args="$args --b"; else args+=" --c"; fi; args="$args --d"\n'
        'show $args; bash -c "show $args"; if [ $1 = x ]; then size=1; elif [ $1 = y ]; then size=2; else exit 1; fi\n'
        'list=(--e); $1 && list+=(--f); show "${list[@]}" $size\n'
    )
    found = [
        [word.text + ("" if word.certain else "?") for word in command.words[1:]]
        for command in shown(read(text))
    ]
    assert found == [["--a", "--b?", "--c?", "--d"]] * 2 + [["--e", "--f?", "2?"]]


def test_a_branch_that_certainly_does_not_run_is_dead() -> None:
    text = 'x=${x:-0}; if [ "$x" = 1 ]; then show 1; else show 2; fi; if false; then show 3; fi; show 4\n'
    assert [command.dead for command in shown(read(text))] == [False, False, True, False]
    assert [command.dead for command in shown(read(text, trusts_defaults=True))] == [True, False, True, False]


def test_slurms_variables_follow_from_the_directives() -> None:
    text = (
        "#!/bin/bash\n#SBATCH -N4 --ntasks-per-node 8\nshow $SLURM_NNODES $SLURM_NTASKS $((SLURM_NNODES * 8))"
    )
    [command] = shown(read(text))
    assert [word.text for word in command.words[1:]] == ["4", "32", "32"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("#SBATCH --nodes=4", [("nodes", "4")]),
        ("#SBATCH --nodes 4 -n 8 -c2", [("nodes", "4"), ("ntasks", "8"), ("cpus-per-task", "2")]),
        ("#SBATCH --exclusive --mem=0", [("exclusive", None), ("mem", "0")]),
        ("#SBATCH --job-name='a b' --comment=\"c d\"", [("job-name", "a b"), ("comment", "c d")]),
        ("#SBATCH --comment=a\\ b --comment='c\\'d'", [("comment", "a b"), ("comment", "c'd")]),
        ("#SBATCH --nodes=4 # --nodes=5", [("nodes", "4")]),
        ("#SBATCH --comment='a # b'", [("comment", "a # b")]),
        ("#SBATCH --image=nvcr.io#nvidia", [("image", "nvcr.io")]),
        ("#SBATCH", []),
        ("##SBATCH --nodes=4", []),
        ("# SBATCH --nodes=4", []),
        ("#SBATCHED --nodes=4", []),
    ],
)
def test_a_directive_is_read_as_sbatch_reads_it(line: str, expected: list[tuple[str, str | None]]) -> None:
    script = read(f"#!/bin/bash\n{line}\n")
    assert [(directive.name, directive.value) for directive in script.directives] == expected


def test_directives_in_a_here_document_are_those_of_another_script() -> None:
    script = read("#!/bin/bash\n#SBATCH --nodes=1\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=2\nEOF\n")
    assert [directive.value for directive in script.directives] == ["1"]


def test_a_syntax_error_is_reported_with_its_line() -> None:
    error = read("#!/bin/bash\necho\nif x; then\n").error
    assert error is not None
    assert error.line >= 3
    assert not error.is_ours


@pytest.mark.parametrize("text", ["a\0b", "x" * 300_000])
def test_files_that_are_not_scripts_are_refused(text: str) -> None:
    with pytest.raises(HpcgenError):
        read(text)
