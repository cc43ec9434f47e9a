"""Signatures of failures: what a line of a log or an exception means.

A match is evidence, never yet the cause: `root` decides which evidence explains the rest.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Literal, NamedTuple, cast

Role = Literal["fact", "root", "stop", "wait", "exit", "cascade"]
"""The weight of a match as an explanation.

fact: an observation of the kernel, the driver or Slurm. It explains all other failures, also earlier ones, which only
    saw its effect.
root: a cause. The first one explains what follows.
stop: Slurm or a person ended the job. It explains what follows, but not what came before.
wait: a rank waited in vain. This is the failure only if nothing else failed before.
exit: a process ended, without a reason. The failure is unexplained if there is nothing better.
cascade: the effect of a failure elsewhere. Never the root.
"""


class Kind(NamedTuple):
    """A kind of failure."""

    title: str
    """In words, after "rank 3 on node-7: " or alone."""
    fix: str = ""
    """Heading of docs/faults.md, as its anchor."""


KINDS = {
    "gpu-fault": Kind("a GPU is faulty", "a-gpu-is-faulty"),
    "gpu-peer-memory": Kind("a GPU cannot reach the memory of another one", "a-gpu-is-faulty"),
    "node-failure": Kind("a node was lost", "a-node-or-a-process-died"),
    "preempted": Kind("the job was preempted", "slurm-ended-it"),
    "time-limit": Kind("the job ran out of time", "slurm-ended-it"),
    "canceled": Kind("the job was canceled", "slurm-ended-it"),
    "host-memory": Kind("a node ran out of memory", "a-node-or-a-process-died"),
    "shared-memory": Kind("shared memory (/dev/shm) failed", "a-node-or-a-process-died"),
    "model-memory": Kind("the model does not fit into the memory of a GPU", "the-model-does-not-fit"),
    "gpu-binding": Kind("ranks use the wrong GPUs", "ranks-use-the-wrong-gpus"),
    "library": Kind("a library of the image does not work on this node", "an-import-fails"),
    "limit": Kind(
        "a limit of the node was reached: processes, open files or locked memory",
        "a-limit-of-a-node-is-reached",
    ),
    "gpu-memory": Kind("a GPU ran out of memory", "a-gpu-runs-out-of-memory"),
    "not-finite": Kind("a number is not finite", "the-loss-is-not-a-number"),
    "disk-full": Kind("the disk is full", "the-disk-is-full"),
    "import": Kind("an import failed", "an-import-fails"),
    "missing-file": Kind("a file is missing", "a-file-is-missing-or-unreadable"),
    "permission": Kind("a file may not be used", "a-file-is-missing-or-unreadable"),
    "input-output": Kind("storage failed", "a-file-is-missing-or-unreadable"),
    "checkpoint": Kind("a checkpoint does not fit or is damaged", "a-checkpoint-cannot-be-loaded"),
    "bad-sample": Kind("the data are invalid", "a-sample-is-invalid"),
    "shape": Kind("shapes do not match", "the-program-raised-an-exception"),
    "argument": Kind("an argument is invalid", "the-run-is-refused"),
    "configuration": Kind("the configuration is invalid", "the-run-is-refused"),
    "refused": Kind("the trainer refused the run", "the-run-is-refused"),
    "rendezvous": Kind("the ranks did not meet", "the-ranks-do-not-meet"),
    "download": Kind("a download failed", "a-file-is-missing-or-unreadable"),
    "launch": Kind("the step did not start", "the-step-does-not-start"),
    "crash": Kind("a process crashed", "a-node-or-a-process-died"),
    "gpu-error": Kind("a GPU kernel failed", "a-gpu-is-faulty"),
    "exception": Kind("the program raised an exception", "the-program-raised-an-exception"),
    "hang": Kind("a rank hung", "it-hangs"),
    "collective-timeout": Kind("a collective timed out", "it-hangs"),
    "network": Kind("the network between nodes failed", "it-hangs"),
    "killed": Kind("a process was killed", "a-node-or-a-process-died"),
    "bad-node": Kind("a node failed its check", "a-node-or-a-process-died"),
    "silent": Kind("a rank ended without a word", "a-node-or-a-process-died"),
    "script": Kind("the batch script ended the job", "it-does-not-start-again"),
    "exit": Kind("a process ended with an error", "the-program-raised-an-exception"),
    "unknown": Kind("unknown: the log names no cause", "the-program-raised-an-exception"),
    "lost-peers": Kind("lost their peers"),
    "nccl": Kind("NCCL failed because of another rank"),
    "cuda-earlier": Kind("met an earlier CUDA error"),
    "terminated": Kind("were terminated"),
    "elastic": Kind("torchrun reported failed workers"),
    "teardown": Kind("failed while they ended"),
}
"""All kinds. Those without a heading are cascades."""


class Signature(NamedTuple):
    """The meaning of one form of words: a row of signatures.tsv."""

    kind: str
    role: Role
    pattern: re.Pattern[str]


_TABLE = "signatures.tsv"
"""Rows of where, kind, role and pattern. Rows with `line` are searched in single lines, those with `exception` in an
exception: its type, its message and the lines after it. The first row that matches counts."""
_TASKS = r"srun: error: (?P<node>\S+): tasks? (?P<ranks>[\d,-]+): "
"""In place of {tasks} in a pattern."""


@functools.cache
def signatures(where: Literal["line", "exception"]) -> tuple[Signature, ...]:
    """The rows of the table for lines or for exceptions."""
    rows = (
        line.split("\t")
        for line in Path(__file__).with_name(_TABLE).read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    return tuple(
        Signature(kind, cast(Role, role), re.compile(pattern.replace("{tasks}", _TASKS)))
        for place, kind, role, pattern in rows
        if place == where
    )


MAX_LINE = 500
"""Characters of a line that are compared. A log can have lines of megabytes."""
_CLAUSE = re.compile(r"[^.\n:;(]*[.\n:;(]?")
_HEDGE = re.compile(
    r"\b(?:(?:may|might|could|can) (?:be|have been|indicate|result|also)"
    r"|possibl[ey]|potential(?:ly)?|likely|typically|probably|usually|often)\b"
)
"""A guess of the message about its cause. It is no evidence."""
_CPP_MESSAGE = re.compile(r"^\s*what\(\):\s+")
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*[a-z](?:Error|Exception)(?::(?: |$)|$)")
_WARNING = re.compile(
    r"\b\w*Warning: |(?<!NCCL )\b(?:WARNING|INFO|DEBUG|WARN)\b|NCCL INFO|The save is retried once"
)
_FAILS = re.compile(
    r"(?i)error|fail|kill|cancel|xid|bus|lost|oom|memory|srun|trainer: |hpcgen: |timeout|timed out|signal|abort"
    r"|terminat|nccl|gloo|exceed|segmentation|fatal|caught|assert|what\(|corrupt|free\(|malloc|shm|found|no space"
    r"|quota|module|completion|stuck"
)
"""A cheap test: lines without these words match no signature."""


class Match(NamedTuple):
    """A signature that matched."""

    kind: str
    role: Role
    node: str | None = None
    ranks: tuple[int, ...] = ()
    """Ranks that the text names. They failed; the rank that wrote the text may be another one."""


def match_line(text: str) -> Match | None:
    """The meaning of a single line. None if it is not about a failure."""
    if not _FAILS.search(text) or _WARNING.search(text):
        return None
    text = text[:MAX_LINE]
    if what := _CPP_MESSAGE.match(text):
        return match_exception(text[what.end() :])
    found = _first("line", text, _without_guesses(text))
    if found is None or found.kind not in ("refused", "script"):
        return found
    return known_cause(text) or found  # these lines have the words of an exception


def _without_guesses(text: str) -> str:
    if not _HEDGE.search(text):
        return text
    return "".join(clause for clause in _CLAUSE.findall(text) if not _HEDGE.search(clause))


def is_exception(text: str) -> bool:
    """True for the line of an exception, with which a log may begin or whose traceback it may lack."""
    return _EXCEPTION.match(text) is not None


def known_cause(text: str) -> Match | None:
    """The cause that a message names with words of the table, if there is one."""
    match = match_exception(text)
    return match if match.role in ("fact", "root") and match.kind != "exception" else None


def match_exception(text: str) -> Match:
    """The meaning of an exception, from its last lines."""
    text = "\n".join(line[:MAX_LINE] for line in text[:4000].split("\n"))
    return _first("exception", text, _without_guesses(text)) or Match("exception", "root")


def _first(where: Literal["line", "exception"], text: str, evidence: str) -> Match | None:
    """The first signature that matches. A cause must be in `evidence`, the text without guesses."""
    for signature in signatures(where):
        searched = evidence if signature.role in ("fact", "root") else text
        if found := signature.pattern.search(searched):
            named = found.groupdict()
            ranks = rank_numbers(named.get("ranks") or named.get("lost") or "")
            return Match(signature.kind, signature.role, named.get("node"), ranks)
    return None


def rank_numbers(text: str) -> tuple[int, ...]:
    """The ranks in a list such as 3, 1-4,7 or `ranks 2 and 5`."""
    found: list[int] = []
    for first, last in re.findall(r"(\d{1,7})(?:\s?(?:-|to)\s?(\d{1,7}))?", text):
        end = int(last or first)
        found.extend(range(int(first), min(end, int(first) + 100_000) + 1))
    return tuple(found)
