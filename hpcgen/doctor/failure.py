"""The end of the last attempt of a run: the root failure in its logs, a hang, or the reason in FAILED."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.doctor.cause import Cause
from hpcgen.doctor.run_files import RunFiles
from hpcgen.logs.failure import Failure
from hpcgen.logs.signatures import KINDS, match_line
from trainer.contract.files.run_directory import RunDirectory

DONE, FAILED = RunDirectory.DONE, RunDirectory.FAILED
MAX_SHOWN = 600
"""Characters of a message. FAILED and exceptions may have many lines."""

FIXES = {
    "it-hangs": "Test the nodes of the ranks that are named first (stage node-health) and the fabric (nccl-test). Then "
    "submit again. A timeout longer than the slowest step is "
    "training.distributed_timeout_seconds_after_init.",
    "the-loss-is-not-a-number": "Submit once more. If the same step fails again, its batch is bad or the run is "
    "unstable: remove its documents, or resume from an older checkpoint with a lower optimizer.lr. Otherwise test the "
    "named rank's node with node-health.",
    "a-gpu-runs-out-of-memory": "Use a smaller training.micro_batch_size, training.recompute_modules, or more tensor, "
    "context or pipeline parallelism. hpcgen layouts finds a layout that fits.",
    "the-model-does-not-fit": "Use more tensor, pipeline or expert parallelism, or a smaller model. Microbatches and "
    "recomputation do not help before the first step. hpcgen layouts finds a layout that fits.",
    "ranks-use-the-wrong-gpus": "Give each rank a GPU of its own: compare tasks and GPUs per node, --gpus-per-task and "
    "CUDA_VISIBLE_DEVICES. scontrol show job -d JOB shows the GPUs of each node.",
    "a-node-or-a-process-died": "Submit again, or let the requeued job continue. If the same node fails again, exclude "
    "it. If a node ran out of memory, use fewer data.num_workers.",
    "a-gpu-is-faulty": "Exclude the node (sbatch --exclude), report it to the admins, and submit again.",
    "a-limit-of-a-node-is-reached": "Compare the limit in a job (srun bash -c 'ulimit -a') with what the ranks use, "
    "and ask an admin to raise it for slurmd.",
    "an-import-fails": "Install the package in the image, or set code_dir of the profile (hpcgen install-code). If it "
    "is there and cannot be loaded, such as cuDNN, use an image whose libraries are complete and of one version.",
    "a-file-is-missing-or-unreadable": "Correct the path, or give the jobs access to the file on every node. hpcgen "
    "doctor -c run.yaml --nodes checks the paths there.",
    "a-checkpoint-cannot-be-loaded": "List the checkpoints with their states: hpcgen checkpoint list RUN_DIR. Set back "
    "what differs from the checkpoint, or load another one.",
    "a-sample-is-invalid": "Make the pair again, or check it: hpcgen data verify.",
    "the-run-is-refused": "Correct what the message names and submit again. hpcgen validate shows the same before the "
    "job waits.",
    "the-ranks-do-not-meet": "Check the address and the interface of the rendezvous, and that all ranks started.",
    "the-step-does-not-start": "Run hpcgen doctor -c run.yaml: it checks the image, the container runtime and the "
    "paths.",
    "the-program-raised-an-exception": "Read the first traceback: hpcgen logs RUN_DIR.",
    "the-disk-is-full": "Free space (hpcgen checkpoint prune --dry-run shows what it would remove), then submit again.",
    "slurm-ended-it": "Submit again, unless Slurm has requeued the job: the run resumes from its newest checkpoint.",
    "it-does-not-start-again": "Correct what it names and submit again; the trainer removes FAILED.",
}
"""Heading of docs/faults.md -> what to do in short."""


def causes(files: RunFiles) -> Iterator[Cause]:
    """Yields what ended the last attempt. A finished run has no failure of its own."""
    if DONE in files.markers:
        return
    hang = files.run.word if files.run is not None and files.run.state == "hung" else ""
    if files.failure is not None:
        yield _of_logs(files, files.failure, hang)
    elif hang:
        yield _cause(
            "hung", "The run hung: ranks waited for each other until the timeout", "it-hangs", _stacks(files)
        )
    elif FAILED in files.markers:
        yield _failed(files)


def _of_logs(files: RunFiles, failure: Failure, hang: str) -> Cause:
    where = " on ".join(
        filter(None, (f"rank {failure.rank}" if failure.rank is not None else "", failure.node or ""))
    )
    what = f"{failure.title[:1].upper()}{failure.title[1:]}{f' ({where})' if where else ''}"
    message = f"{failure.place}: {_short(failure.message)}" if failure.place else _short(failure.message)
    failed = files.markers.get(FAILED, "").strip()
    is_new = bool(failed) and _short(failed) not in message and failure.message not in failed
    evidence = (
        *((message,) if failure.message else ()),
        *(f"{each}" for each in failure.cascade),
        *((f"{files.directory / FAILED}:1: {_short(failed)}",) if is_new else ()),
        *(_stacks(files) if hang else ()),
        *((f"the attempt has no end; {files.slurm_says}",) if files.slurm_says else ()),
    )
    attempt = files.last
    said = f"job {attempt.job}: {attempt.reason}" if attempt else f"{files.directory}"
    return _cause(failure.kind, what, failure.fix.partition("#")[2], evidence or (said,))


def _failed(files: RunFiles) -> Cause:
    """The cause that FAILED tells, for a run without events or logs."""
    path, text = files.directory / FAILED, files.markers[FAILED].strip()
    if not text:
        what = "The run failed, and there was no room to write why"
        return _cause("failed-without-reason", what, "the-disk-is-full", (f"{path}: it is empty",))
    evidence = (f"{path}:1: {_short(text)}",)
    found = match_line(f"trainer: {text}")
    if found is None or not KINDS[found.kind].fix or found.kind == "refused":
        what = "The run failed, and the next attempt would fail in the same way"
        return _cause("failed", what, "it-does-not-start-again", evidence)
    kind = KINDS[found.kind]
    return _cause(found.kind, f"{kind.title[:1].upper()}{kind.title[1:]}", kind.fix, evidence)


def _cause(name: str, what: str, heading: str, evidence: tuple[str, ...]) -> Cause:
    heading = heading or "the-program-raised-an-exception"
    return Cause(
        name=name,
        effect="ended",
        what=what,
        evidence=evidence,
        fix=FIXES[heading],
        page=f"faults.md#{heading}",
    )


def _stacks(files: RunFiles) -> tuple[str, ...]:
    return (f"{files.directory}/stacks: {files.run.word if files.run else ''}",)


def _short(text: str) -> str:
    """The beginning of a message, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]} ..."
