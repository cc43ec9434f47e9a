"""What ended the last attempt of a run: a hang, a failure that would come again, or an end without a save."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.doctor.cause import Cause
from hpcgen.doctor.run_files import RunFiles
from trainer.contract.files.run_directory import RunDirectory

DONE, FAILED = RunDirectory.DONE, RunDirectory.FAILED


def causes(files: RunFiles) -> Iterator[Cause]:
    """Yields what ended the last attempt. A finished run has no failure of its own."""
    if DONE in files.markers:
        return
    if files.run is not None and files.run.state == "hung":
        yield _hang(files, files.run.word)
    elif FAILED in files.markers:
        yield _failed(files)


def _hang(files: RunFiles, word: str) -> Cause:
    return Cause(
        name="hung",
        effect="ended",
        what="The run hung: ranks waited for each other until the timeout",
        evidence=(f"{files.directory}/stacks: {word}",),
        fix="Test the nodes of the ranks that it names first (stage node-health), and the fabric with nccl-test. Then "
        "submit again: the run resumes from its newest checkpoint.",
        page="faults.md#it-hangs",
    )


def _failed(files: RunFiles) -> Cause:
    path, text = files.directory / FAILED, files.markers[FAILED].strip()
    if not text:
        return Cause(
            name="failed-without-reason",
            effect="ended",
            what="The run failed, and there was no room to write why",
            evidence=(f"{path}: it is empty", *_end(files)),
            fix="Free space on the disk and submit again. The job's log has the reason.",
            page="faults.md#the-disk-is-full",
        )
    return Cause(
        name="failed",
        effect="ended",
        what="The run failed, and the next attempt would fail in the same way",
        evidence=(f"{path}:1: {text}",),
        fix="Correct what it names and submit again; the trainer removes FAILED.",
        page="faults.md#it-does-not-start-again",
    )


def _end(files: RunFiles) -> Iterator[str]:
    last = files.last
    if last is not None and last.reason:
        yield f"{files.directory}/jobs/{last.job}/events.jsonl: {last.reason}"
