"""Run files corrupted in transit, in an editor or by a mistake: a script, or one clean error.

Each case spoils a good run file, its profile or the command line, and gives them to `hpcgen render`. It ends with
status 0 and a script that bash can read, or with status 2 and a message of printable lines; never with a traceback,
and no planted command runs.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hpcgen.config.presets import PRESETS
from tests.cli.command import hpcgen
from tests.hostile import (
    hostile_strings,
    nothing_read_twice,
    require_no_canary,
    require_shellcheck,
    run_script,
)
from tests.patience import PATIENCE_S
from tests.runs import MODEL_STAGES

CASES_IN_CI = 100
CASES_IN_FULL = 10_000
CHUNK = 250
"""A case takes some 20 ms; one that takes this long hangs."""

PLAIN = """\
name: plain
cluster: ./site.yaml
paths:
  run_dir: runs/plain
container: &nothing {}
slurm:
  defaults: &limits
    time: 1-00:00:00
  train:
    <<: *limits
    nodes: 2
    ntasks_per_node: 8
  prepare: {num_tasks: 4, array_parallelism: 2, mem: 64G}
environment:
  NCCL_DEBUG: WARN   # a comment
  GREETING: "it's $(>canary) `>canary`"
secrets: [HF_TOKEN]
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 8, seq_length: 128, vocab_size: 50257}
parallelism:
  tensor_model_parallel_size: 2
training:
  micro_batch_size: 1
  global_batch_size: 64
  train_iters: 100
optimizer: {lr: 1e-3}
evaluation: {tasks: [hellaswag]}
generation: {prompts: /shared/prompts.jsonl}
export: {directory: /shared/exported}
data:
  mock: true
  corpus:
    directory: corpus
    source: {directory: text}
    include: ["*.jsonl.zst"]
    num_output_files: 2
preflight: {node_health: true, spare_nodes: 1}
image: {output: /images/new.sqsh, base: nvcr.io#nvidia/pytorch:25.03-py3}
"""
SITE = """\
extends: azure-ndv5
code_dir: /shared/code
partitions: {hpc: {max_time: 7-00:00:00, max_nodes: 64}}
container: {image: /images/gpt.sqsh, mounts: [{source: /opt, read_only: true}]}
environment: {NCCL_IB_TIMEOUT: "23"}
health_command: [/opt/check, --all]
"""

# fmt: off
VALUES = (
    "no", "on", "~", "null", "True", "010", "0x10", "0o7", "1_000", "1e3", "1e-4", "1.5", "-1", "0", "2", "8",
    "24:00:00", "190:20:30", "2026-11-20", "2026-11-20T10:00:00Z", "1e400", ".inf", "-.inf", ".nan", "9" * 400,
    "9" * 5000, str(2**63), "1e308", "''", '""', "' '", "[]", "{}", "[[]]", "{a: {b: c}}", "[1, 2, 3]", "[null]",
    "|", ">-", "- a", "a: b", "? a", "*nothing", "*limits", "*unknown", "&a [*a]", "&a {b: *a}", "<<: *nothing",
    "!!python/object/apply:os.system ['>canary']", "!!binary aGVsbG8=", "!!set {a, b}", "!custom x", "!!str 5",
    "!!timestamp 2026-11-20", "!!int x", "!!float x", "!!null x", "!!bool maybe", "!!omap [a: 1]", "%TAG", "@x",
    "`x", "'$(>canary)'", "'`>canary`'", "'{{ 7 }}'", "'../../etc/passwd'", "/etc/shadow", "a b", "#", "x # y",
    "''''", r'"\u2028"', r'"\ud800"', r'"\0"', r'"\x1b[31m"', r'"a\nb"', "é", "日本", "x" * 3000, "azure-ndv5",
    "local", "ndv5", "cpu", "pyxis", "enroot", "none", "bf16", "full", "uniform", "rope", "group", "gpu:h100:8",
    "gpus-per-node", "gpu:4",
)
"""Values that YAML 1.1, people and other programs write although they mean something else."""
KEYS = (
    "name", "a", "", "<<", "nodes", "time", "'no'", "yes", "1", "null", "? [a]", "é", "a.b", "a[0]", "__class__",
    "x" * 300,
)
# fmt: on
CHARACTERS = "\0\t\r\n\x07\x1b\x7f\x85\u2028\ufeff{}[]&*!|>'\"%@`#-:,? \\$0aZé日"

# fmt: off
SOUND = (
    ("nodes: 2", "nodes: 16"), ("nodes: 2", "nodes: 1"), ("1-00:00:00", "12:00:00"),
    ("mock: true", "datasets: [{prefix: c}]"), ("&nothing {}", "&nothing {runtime: none}"),
    ("global_batch_size: 64", "global_batch_size: 512"), ("train_iters: 100", "train_iters: 1"), ("1e-3", "3.0e-4"),
    ("tensor_model_parallel_size: 2", "pipeline_model_parallel_size: 4"), ("spare_nodes: 1", "spare_nodes: 0"),
    ("node_health: true", "node_health: false"), ("secrets: [HF_TOKEN]", "secrets: []"),
    ("&nothing {}", "&nothing {runtime: enroot, copy_image: true}"), ("&nothing {}", "&nothing {writable: true}"),
    ("NCCL_DEBUG: WARN", "NCCL_DEBUG: INFO"), ("run_dir: runs/plain", "run_dir: runs/plain\nshare: group"),
    ("{directory: text}", "{huggingface: {repo_id: a/b, revision: v1}, token_variable: HF_TOKEN}"),
    ("{directory: text}", "{url: {template: 'https://h/{index:05d}.zst', count: 9}}"),
    ("num_output_files: 2", "splits: {train: [train/*], valid: [valid/*]}"), ("num_tasks: 4", "num_tasks: 4000"),
    ("it's", "größe 日本"), ("name: plain", "name: other.1"), ("vocab_size: 50257", "vocab_size: 128"),
)
"""Changes after which the run file is as good as before."""
# fmt: on

Spoil = Callable[[str, random.Random], str]


@dataclass(frozen=True)
class Case:
    """The files and arguments of the command."""

    run: bytes
    site: bytes
    overrides: tuple[str, ...] = ()


def change_value(text: str, rng: random.Random) -> str:
    """Another value after some key."""
    lines = text.split("\n")
    at = _line_with_value(lines, rng)
    lines[at] = f"{lines[at].partition(': ')[0]}: {rng.choice(VALUES)}"
    return "\n".join(lines)


def change_flow_value(text: str, rng: random.Random) -> str:
    """Another value within { } or [ ]."""
    places = [index for index, character in enumerate(text) if character in ",[{"]
    if not places:
        return text
    start = rng.choice(places) + 1
    end = min((text.find(mark, start) for mark in ",]}" if text.find(mark, start) >= 0), default=len(text))
    key, colon, _ = text[start:end].partition(": ")
    return text[:start] + key + colon + rng.choice(VALUES) + text[end:]


def misspell(text: str, rng: random.Random) -> str:
    """A letter of a key lost, doubled, in upper case or swapped with the next."""
    ends = [index for index, character in enumerate(text) if index and character == ":"]
    if not ends:
        return text
    at = max(rng.choice(ends) - rng.randint(1, 4), 0)
    one, two = text[at : at + 1], text[at + 1 : at + 2]
    wrong, length = rng.choice((("", 1), (one * 2, 1), (one.upper(), 1), ("_", 1), ("-", 1), (two + one, 2)))
    return text[:at] + wrong + text[at + length :]


def add_key(text: str, rng: random.Random) -> str:
    """A key too many, or a second time, at some depth."""
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    line = " " * rng.choice((0, 0, 2, 2, 4, 1, 3)) + f"{rng.choice(KEYS)}: {rng.choice(VALUES)}"
    return "\n".join([*lines[:at], rng.choice(lines) if rng.random() < 0.4 else line, *lines[at:]])


def lose_lines(text: str, rng: random.Random) -> str:
    """Some lines are gone, or in another place."""
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    lost = lines[at : at + rng.randint(1, 3)]
    del lines[at : at + len(lost)]
    if rng.random() < 0.5:
        other = rng.randrange(len(lines) + 1)
        lines[other:other] = lost
    return "\n".join(lines)


def indent(text: str, rng: random.Random) -> str:
    """A line further in or out, with blanks or a tab."""
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    further = rng.choice((" ", "  ", "\t", "    ")) + lines[at]
    lines[at] = further if rng.random() < 0.6 else lines[at].lstrip()
    return "\n".join(lines)


def nest(text: str, rng: random.Random) -> str:
    """Deeper than anybody writes, or than Python can follow."""
    depth = rng.choice((3, 30, 33, 200, 3000, 50_000))
    opening, closing = rng.choice((("[", "]"), ("{a: ", "}"), ("- ", ""), ("? ", ""), ("&a [", "]")))
    value = (opening * depth + "x" + closing * depth)[:250_000]
    return f"{text}\n{rng.choice(('deep', 'environment', 'data', 'name'))}: {value}\n"


def multiply(text: str, rng: random.Random) -> str:
    """Aliases of aliases: a few lines that expand to billions of values."""
    width, height = rng.choice(((2, 3), (10, 9), (9, 12)))
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]" for level in range(1, height)]
    return "\n".join([*lines, text, f"{rng.choice(('environment', 'secrets', 'b'))}: *a{height - 1}", ""])


def merge(text: str, rng: random.Random) -> str:
    """Merge keys: of a mapping, of several, of something else, of themselves."""
    merged = ("*limits", "[*limits, *nothing]", "*nothing", "[]", "x", "[x]", "{a: 1}", "&z {<<: *z}", "null")
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    return "\n".join([*lines[:at], f"{' ' * rng.choice((0, 2, 4))}<<: {rng.choice(merged)}", *lines[at:]])


def swell(text: str, rng: random.Random) -> str:
    """Very many or very long things."""
    size = rng.choice((100, 3000, 30_000, 300_000))
    many = ", ".join(f"A{index}" for index in range(size // 8))
    return rng.choice(
        (
            f"{text}\nsecrets: [{many}]\n",
            f"{text}\nenvironment: {{A: '{'x' * size}'}}\n",
            f"{text}{'#' * size}",
            text + "\n" * size,
        )
    )


def other_preset(text: str, rng: random.Random) -> str:
    """A preset that contradicts the values of the file; another cluster."""
    preset = rng.choice((*PRESETS, "175B", "tiny ", "../tiny", "null"))
    clusters = ("azure-ndv5", "local", "./site.yaml", "./run.yaml", "site.yaml", "nowhere", "/", ".")
    return text.replace("cluster: ./site.yaml", f"cluster: {rng.choice(clusters)}\npreset: {preset}")


def other_parent(text: str, rng: random.Random) -> str:
    """The profile extends something else: itself, the run file, nothing, a list."""
    parents = (
        "./site.yaml",
        "site",
        "./run.yaml",
        "local",
        "[local]",
        "null",
        "./nowhere.yaml",
        "/etc/passwd",
    )
    return text.replace("extends: azure-ndv5", f"extends: {rng.choice(parents)}")


def plant(text: str, rng: random.Random) -> str:
    """A hostile string as some value, quoted so that YAML takes it."""
    quoted = next(hostile_strings(rng)).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = text.split("\n")
    at = _line_with_value(lines, rng)
    lines[at] = f'{lines[at].partition(": ")[0]}: "{quoted}"'
    return "\n".join(lines)


def strew(text: str, rng: random.Random) -> str:
    """Characters that went in by accident."""
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(CHARACTERS) + text[at + rng.choice((0, 0, 1)) :]
    return text


def cut(text: str, rng: random.Random) -> str:
    """Only the beginning or the end arrived, or a part twice, or two documents, or nothing."""
    at = rng.randrange(len(text) + 1)
    twice = text[:at] + text[at // 2 :]
    return rng.choice((text[:at], text[at:], twice, f"{text}\n---\n{text}", f"{text}\n...\nx", ""))


def _line_with_value(lines: Sequence[str], rng: random.Random) -> int:
    return rng.choice([index for index, line in enumerate(lines) if ": " in line] or [0])


# fmt: off
SPOILS: tuple[Spoil, ...] = (
    change_value, change_value, change_value, change_flow_value, change_flow_value, misspell, add_key, lose_lines,
    indent, nest, multiply, merge, swell, other_preset, other_parent, plant, plant, strew, cut,
)
OVERRIDDEN = (
    "slurm.train.nodes", "training.global_batch_size", "optimizer.lr", "name", "container.runtime", "preset",
    "parallelism.pipeline_model_parallel_size", "slurm.defaults.time", "environment.NCCL_DEBUG", "secrets",
    "data.datasets", "model", "model.num_layers.x", "slurm..nodes", "", ".", "slurm", "no.such.key", "cluster",
    "share", "image.base", "preflight.spare_nodes", "paths.run_dir", "environment",
    "data.corpus", "data.corpus.source", "data.corpus.include", "data.corpus.splits.train", "slurm.prepare.num_tasks",
    "slurm.download.array_parallelism", "data.tokenize",
)
# fmt: on


def spoil_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes that are not text, another encoding, line ends of another system."""
    at = rng.randrange(len(data) + 1)
    noise = bytes(rng.randrange(256) for _ in range(rng.randint(1, 40)))
    flipped = bytearray(data or b"x")
    flipped[at % len(flipped)] ^= 1 << rng.randrange(8)
    text = data.decode("utf-8", errors="replace")
    return rng.choice(
        (
            data[:at] + noise + data[at:],
            bytes(flipped),
            b"\xef\xbb\xbf" + data,
            text.encode("utf-16"),
            text.encode("latin-1", errors="replace"),
            data.replace(b"\n", b"\r\n"),
            data.replace(b"\n", b"\r"),
            noise * 50,
        )
    )


def make_case(rng: random.Random) -> Case:
    """A valid run file and profile, corrupted up to three times; some with values of the command line."""
    run, site = PLAIN, SITE
    for before, after in rng.sample(SOUND, k=rng.randint(0, 4)):
        run = run.replace(before, after)
    if rng.random() < 0.1:
        return Case(run.encode(), site.encode())
    overrides = tuple(
        rng.choice(OVERRIDDEN) + rng.choice(("=", "=", "=", "=", "", "==", "= ")) + rng.choice(VALUES)
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2)))
    )
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3)) if overrides else rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.75:
            run = rng.choice(SPOILS)(run, rng)
        else:
            site = rng.choice(SPOILS)(site, rng)
    case = Case(run.encode("utf-8", "surrogatepass"), site.encode("utf-8", "surrogatepass"), overrides)
    return replace(case, run=spoil_bytes(case.run, rng)) if rng.random() < 0.07 else case


@contextmanager
def patience() -> Iterator[None]:
    """Ends a case that hangs."""

    def give_up(signum: int, frame: object) -> None:
        raise TimeoutError(f"no answer within {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def write_corpus() -> None:
    """The manifest of the corpus that the good run file names."""
    Path("corpus").mkdir(exist_ok=True)
    Path("corpus/manifest.jsonl").touch()


def render(case: Case, stage: str) -> str | None:
    """The script that comes of a case, or None after one clean error."""
    Path("run.yaml").write_bytes(case.run)
    Path("site.yaml").write_bytes(case.site)
    with patience():
        ended = hpcgen("render", stage, "-c", "run.yaml", *(f"--set={each}" for each in case.overrides))
    lines = ended.stderr.split("\n")[:-1]
    assert all(line.isprintable() for line in lines), ended.stderr
    assert "Traceback" not in ended.stderr
    if ended.status == 0:
        return ended.stdout
    assert ended.status == 2, ended
    assert ended.stdout == ""
    assert 1 <= len(lines) <= 100, lines
    assert max(map(len, lines)) < 4000, lines
    return None


def require_readable(scripts: Sequence[str]) -> None:
    """bash can read each of them."""
    for index, script in enumerate(scripts):
        Path(f"{index}.sh").write_text(script, encoding="utf-8")
    check = 'for script; do bash -n "$script" || exit; done'
    names = [f"{index}.sh" for index in range(len(scripts))]
    found = subprocess.run(
        ["bash", "-c", check, "check", *names], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


def go_through(seed: int, num_cases: int) -> Counter[str]:
    """Spoils files in a directory of its own; what became of them."""
    rng = random.Random(seed)
    count: Counter[str] = Counter()
    scripts = []
    with tempfile.TemporaryDirectory() as name, nothing_read_twice():
        directory = Path(name).resolve()
        os.chdir(directory)
        os.environ["XDG_CONFIG_HOME"] = str(directory / "xdg")
        write_corpus()
        for index in range(num_cases):
            case, stage = make_case(rng), rng.choice((*MODEL_STAGES, "train", "train"))
            try:
                script = render(case, stage)
            except BaseException as error:
                raise AssertionError(f"seed {seed}, case {index}: {stage} {case}") from error
            count["refused" if script is None else "scripts"] += 1
            if script is not None:
                scripts.append(script)
        require_readable(scripts)
        sample = scripts[:: max(1, len(scripts) // 5)]
        require_shellcheck(sample[0])
        for script in sample:
            run_script(script, directory, str(directory / "runs" / "plain"), ["HF_TOKEN"])
            count["run"] += 1
        require_no_canary(directory)
        os.chdir("/")
    return count


@pytest.fixture(autouse=True)
def undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("HPCGEN_TEMPLATES", raising=False)
    write_corpus()


def test_the_files_are_valid_before_they_are_corrupted() -> None:
    for stage in MODEL_STAGES:
        assert render(Case(PLAIN.encode(), SITE.encode()), stage) is not None


@pytest.mark.process
def test_corrupted_run_files_give_a_script_or_one_clean_error() -> None:
    count = go_through(seed=1, num_cases=CASES_IN_CI)
    assert count["scripts"] > 0.05 * CASES_IN_CI
    assert count["refused"] > 0.2 * CASES_IN_CI


@pytest.mark.process
@pytest.mark.slow
def test_ten_thousand_corrupted_run_files() -> None:
    seeds = range(100, 100 + CASES_IN_FULL // CHUNK)
    with ProcessPoolExecutor() as processes:
        count = sum(processes.map(go_through, seeds, [CHUNK] * len(seeds)), Counter[str]())
    print(dict(count))
    assert count["scripts"] + count["refused"] == CASES_IN_FULL
