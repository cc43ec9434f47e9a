"""Whatever is done to a script, lint says what it finds, or one clean error: it neither fails nor hangs."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from hpcgen.check.lint.check import lint
from hpcgen.check.lint.reader import read
from hpcgen.check.lint.words import MAX_EXPANDED, PIECE_COST
from hpcgen.check.migration.migration import migrate
from hpcgen.config.profiles import load_cluster
from hpcgen.errors import HpcgenError
from tests.lint.examples import EXAMPLES, FURTHER, SOUND, edited
from tests.lint.messages import MESSAGES
from tests.lint.odd_commands import ODD_COMMANDS
from tests.lint.pairs import PAIRS

DEFECTS = Path(__file__).with_name("scripts") / "defects.sh"
PIECES = [
    "'", '"', "`", "$(", "${", "))", "((", "<<EOF\n", "\\", "\n", "#", "|", "&", ";", "[", "]", "{", "}", "\x01", "é",
    "${x[@]}", "$((1/0))", "$((2**99999))", "${!x}", "x=(", "esac", "done", "fi", "\r\n", "\ufffd", "[[", "bash -c '",
    "--", "-N", "#SBATCH -", "#SBATCH --a='", "srun", "srun --container-mounts", "${a:-${b:=$(c)}}", "'\\''", "1" * 400,
    "--global-batch-size 0", "--tensor-model-parallel-size 0", "--num-layers -3", "0" * 30, "trap", "kill -", "case",
]  # fmt: skip


def mutated(text: str, seed: int) -> str:
    """A script with some of its text cut, copied, moved or replaced."""
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 6)):
        start = chance.randrange(len(text) + 1)
        end = min(len(text), start + chance.choice([0, 1, 5, 40, 400]))
        match chance.randrange(4):
            case 0:
                text = text[:start] + chance.choice(PIECES) + text[start:]
            case 1:
                text = text[:start] + text[end:]
            case 2:
                text = text[:end] + text[start:end] + text[end:]
            case _:
                text = text[:start] + chance.choice(PIECES) + text[end:]
    return text


@pytest.mark.parametrize(
    "seed", [0, pytest.param(20, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.slow)]
)
def test_no_change_breaks_lint(seed: int) -> None:
    cluster, node_type = load_cluster("azure-ndv5")
    sources = [SOUND, DEFECTS.read_text()]
    for number in range(seed, seed + 20):
        text = mutated(sources[number % 2], number)
        for finding in _outcome(lambda text=text: lint(text)) or ():
            assert 1 <= finding.line <= text.count("\n") + 1
        _outcome(lambda text=text: migrate(text, "x", cluster, node_type))


def test_unusual_commands_do_not_break_lint() -> None:
    for statement in ODD_COMMANDS:
        _outcome(
            lambda statement=statement: lint(
                f"#!/bin/bash\n#SBATCH --nodes=2\n{statement}\nsrun python train.py\n"
            )
        )


def changed_words(text: str, seed: int) -> str:
    """A script with words dropped, emptied or replaced, and with unusual commands between its own."""
    chance = random.Random(seed)
    lines = text.split("\n")
    for _ in range(chance.randint(1, 8)):
        number = chance.randrange(len(lines))
        words = lines[number].split(" ")
        place = chance.randrange(len(words))
        match chance.randrange(6):
            case 0:
                words[place : place + chance.randint(1, 9)] = []
            case 1:
                words[place] = chance.choice(
                    ["''", '""', "$X", "--", "-", "\\", "# x", "\x80", "$'\\x01'", "{a,b}", "*"]
                )
            case 2:
                words[place:] = [chance.choice(ODD_COMMANDS)]
            case 3:
                words = ["bash", "-c", "'" + lines[number].replace("'", '"') + "'"]
            case 4:
                words = [chance.choice(ODD_COMMANDS) + "\n" + lines[number]]
            case _:
                words = [lines[number], "|", chance.choice(ODD_COMMANDS)]
        lines[number] = " ".join(words)
    return "\n".join(lines)


def _sources() -> list[str]:
    """Every script and example of these tests."""
    examples = [example for _, example in (*EXAMPLES.items(), *FURTHER.values())]
    scripts = [path.read_text() for path in sorted(DEFECTS.parent.iterdir()) if path.is_file()]
    return [
        *scripts,
        *(edited(example.fails) for example in examples),
        *(pair.breaks for pair in PAIRS.values()),
        *(m.script for _, m in MESSAGES.values()),
    ]


def test_no_change_of_words_breaks_lint() -> None:
    _read_changed(0, _sources()[::16])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_no_change_of_words_in_any_example_breaks_lint(seed: int) -> None:
    _read_changed(seed, _sources())


def _read_changed(seed: int, sources: list[str]) -> None:
    cluster, node_type = load_cluster("azure-ndv5")
    for number, source in enumerate(sources):
        text = changed_words(source, 1000 * seed + number)
        start = time.process_time()
        for finding in _outcome(lambda text=text: lint(text)) or ():
            assert 1 <= finding.line <= text.count("\n") + 1
        _outcome(lambda text=text: migrate(text, "x", cluster, node_type))
        assert time.process_time() - start < 2, text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 6000, 100))
def test_no_change_of_many_breaks_lint(seed: int) -> None:
    for number in range(seed, seed + 5):
        test_no_change_breaks_lint(number * 20)


def _outcome(action):
    """The result of an action; None if it ends with one clean error."""
    try:
        return action()
    except HpcgenError:
        return None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "#!",
        "#SBATCH\n",
        "#SBATCH --nodes\n",
        "#SBATCH -\n#SBATCH --\n#SBATCH -N",
        "\\",
        "(" * 20_000,
        "$(" * 5_000 + ")" * 5_000,
        "{ " * 3_000 + "; }" * 3_000,
        "if a; then " * 300 + "b" + "; fi" * 300,
        "x=a\n" + "x=$x$x\n" * 60,
        "x=(a b)\n" + 'x=("${x[@]}" "${x[@]}")\n' * 60 + 'srun "${x[@]}"\n',
        'f() { f "$@"; }\nf srun a\n',
        'f() { g "$@" "$@"; }\ng() { f "$@" "$@"; }\nf srun python pretrain_gpt.py\n',
        "a" * 200_000,
        "# hpcgen: ignore=" + "x," * 50_000,
        "srun python pretrain_gpt.py " + "--num-layers 1 " * 10_000,
        "srun python pretrain_gpt.py " + " ".join(f"--walrus-{i}" for i in range(300)),
        "x=([0]*3 [1]*4)\n" * 100,
        "bash -c " + "'bash -c " * 20 + "a" + "'" * 20,
        "\u202e\u0000".replace("\0", "") * 100,
        "y=$((" + "1+" * 2000 + "1))",
        "cat <<EOF\n$A \\\n$B\nEOF\n",
    ],
    ids=lambda text: text[:20].encode("unicode_escape").decode(),
)
def test_unusual_scripts_do_not_break_lint(text: str) -> None:
    _outcome(lambda: lint(text))


@pytest.mark.parametrize(
    "text",
    [
        "a=x\n" + "a=$a$a\n" * 500,
        "a=" + "x" * 90_000 + "\n" + "b=$a\n" * 500,
        "a='" + "x " * 45_000 + "'\n" + "b $a\n" * 100,
        "x=(" + "a " * 10_000 + ")\n" + 'y=("${x[@]}")\n' * 100,
        "x=(" + "a " * 10_000 + ")\n" + 'echo "${x[*]}"\n' * 500,
    ],
    ids=lambda text: text[-12:].strip(),
)
def test_a_script_of_growing_variables_is_bounded_work(text: str) -> None:
    """The total size of expansions is limited, regardless of the number of lines."""
    script = read(text)
    words = [word for command in script.commands for word in command.words]
    for assignment in script.assignments:
        words += [word for word in (assignment.value, *(assignment.items or ())) if word]
    assert sum(len(word.text) for word in words) < len(text) + MAX_EXPANDED + 100 * len(script.lines)
    assert len(words) < len(text) + MAX_EXPANDED // PIECE_COST


def test_the_limit_is_far_above_real_scripts() -> None:
    text = SOUND + "x=(" + "--option value " * 100 + ")\n" + 'y=("${x[@]}")\necho "${y[*]}"\n' * 50
    [*_, last] = read(text).commands
    assert last.words[1].known
