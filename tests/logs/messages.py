"""Logs that have a message of a real failure among what the other ranks write: messages.txt.

`kinds` are those that name the failure. The first one is the best.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hpcgen.logs.evidence import collect
from hpcgen.logs.failure import Failure
from hpcgen.logs.lines import parse
from hpcgen.logs.root import find_root

LAUNCHERS = ("srun", "torchrun")
_TRACEBACK = 'Traceback (most recent call last):\n  File "/app/train.py", line 7, in <module>\n    main()'
_OTHERS = (1, 2)
"""Ranks that lose their peers."""


@dataclass(frozen=True)
class Message:
    """Text that a process wrote when it failed, and the cause."""

    name: str
    cause: str
    kinds: tuple[str, ...]
    rank: int | None
    """None for what Slurm, the kernel or a launcher writes about the job."""
    node: str | None
    text: str

    def log(self, launcher: str) -> str:
        """A job's log with this message. `launcher` labels the lines of ranks."""
        label = "{}: {}" if launcher == "srun" else "[rank{}]: {}"
        message = [
            line if self.rank is None else label.format(self.rank, line) for line in self.text.splitlines()
        ]
        cascade = [label.format(rank, line.format(rank)) for line in _LOST[launcher] for rank in _OTHERS]
        if self.rank is None:
            cascade = [] if "launch" in self.kinds else cascade
        mixed = [*message[:-1], *cascade[:2], *message[-1:], *cascade[2:]]
        before = [label.format(rank, line) for line in _BEFORE for rank in range(4)]
        return "\n".join((*before, *mixed, *_AFTER[launcher].format(rank=self.rank or 0).splitlines()))

    def found(self, launcher: str) -> Failure | None:
        """The failure that hpcgen finds in the log."""
        return find_root(collect(parse(self.log(launcher).splitlines())), lambda rank: None)

    def mistake(self, launcher: str) -> str:
        """The mistake in that; "" if there is none."""
        failure = self.found(launcher)
        if failure is None:
            return "no failure is found"
        shown = f"{failure.message}\n{failure.traceback}"
        if failure.kind not in self.kinds:
            return f"the kind is {failure.kind} instead of {self.kinds[0]}: {failure.message}"
        if self.rank is not None and failure.rank not in (self.rank, None):
            return f"the rank is {failure.rank} instead of {self.rank}"
        if self.node and failure.node != self.node:
            return f"the node is {failure.node} instead of {self.node}"
        if not any(line.strip() in shown for line in self.text.splitlines() if len(line) > 12):
            return f"the message is not shown, but {failure.message}"
        return ""


_BEFORE = (
    "/venv/torch/cuda/__init__.py:51: FutureWarning: The pynvml package is deprecated. If you did not install "
    "pynvml directly, report this error to the maintainers.",
    "n1:2041:2041 [0] NCCL INFO NET/Plugin: Failed to find ncclNetPlugin_v8 symbol.",
    "n1:2041:2041 [0] NCCL INFO cudaDriverVersion 12040",
    "libibverbs: Warning: couldn't load driver 'libvmw_pvrdma-rdmav34.so': cannot open shared object file",
    "WARNING:megatron.core.utils:fused_indices_to_multihot has reached end of life and can fail",
    "check_for_nan_in_loss_and_grad ......................... True",
    "iteration 12/100: loss 2.5, grad norm 1.0, lr 1e-3",
)
_LOST = {
    "srun": ("trainer: rank {} on n1 lost its peers after iteration 12 (train) (Connection closed by peer)",),
    "torchrun": (
        "Traceback (most recent call last):",
        '  File "/app/train.py", line 7, in <module>',
        "    main()",
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:94, remote process exited or "
        "there was a network error, NCCL version 2.27.3",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ),
}
_AFTER = {
    "srun": """\
srun: error: n2: task {rank}: Exited with exit code 1
srun: Terminating StepId=7.0
slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-26T16:43:32 ***
srun: error: n1: tasks 1-2: Terminated
srun: Force Terminated StepId=7.0""",
    "torchrun": """\
W1126 16:43:30.983 41207 torch/distributed/elastic/api.py:900] Sending process 41240 closing signal SIGTERM
E1126 16:43:32.1 41207 torch/distributed/elastic/api.py:874] failed (exitcode: 1) local_rank: {rank} (pid: 41239)
srun: error: n1: task 0: Exited with exit code 1""",
}


def messages() -> list[Message]:
    """All messages, in the order of the file."""
    text = Path(__file__).with_name("messages.txt").read_text(encoding="utf-8")
    return [_read(entry) for entry in re.split(r"^== ", text, flags=re.MULTILINE)[1:]]


def _read(entry: str) -> Message:
    name, _, rest = entry.strip("\n").partition("\n")
    label: dict[str, str] = {}
    while found := re.match(r"(source|cause|kinds|from|node): (.*)\n", rest):
        label[found[1]] = found[2]
        rest = rest[found.end() :]
    return Message(
        name=name,
        cause=label["cause"],
        kinds=tuple(label["kinds"].split()),
        rank=None if label["from"] == "job" else int(label["from"]),
        node=label.get("node"),
        text=rest.replace("Traceback:", _TRACEBACK),
    )
