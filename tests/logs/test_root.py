"""The root failure in logs of real failures: those injected on a Slurm cluster, and those that others published."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcgen.logs.evidence import collect
from hpcgen.logs.lines import parse
from hpcgen.logs.root import find_root
from hpcgen.logs.signatures import KINDS, match_line, signatures
from tests.logs.cases import Case, cases
from tests.logs.messages import LAUNCHERS, Message, messages

FAULTS = Path(__file__).parents[2] / "docs" / "faults.md"
CASCADES = {kind for kind, row in KINDS.items() if not row.fix}


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_root_is_named(case: Case) -> None:
    assert case.mistake() == ""


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("message", messages(), ids=lambda message: message.name)
def test_a_published_message_is_found_among_those_of_other_ranks(message: Message, launcher: str) -> None:
    assert message.mistake(launcher) == ""


def test_no_cascade_counts_as_a_right_answer() -> None:
    assert not CASCADES & {kind for case in cases() for kind in case.kinds}


@pytest.mark.parametrize("before", [True, False])
def test_a_cancellation_explains_only_what_follows(before: bool) -> None:
    killed, canceled = (
        "srun: error: n1: task 2: Killed",
        "*** JOB 7 ON n1 CANCELLED AT 2026-11-26T16:54:59 ***",
    )
    lines = [killed, canceled] if before else [canceled, killed]
    failure = find_root(collect(parse(lines)), lambda rank: None)
    assert failure is not None
    assert failure.kind == ("killed" if before else "canceled")


OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has 79 GiB"
NCCL_ERROR = "torch.distributed.DistBackendError: NCCL error in: x.cpp:49, invalid usage, NCCL version 2.21.5"


@pytest.mark.parametrize(
    ("frame", "error", "kind"),
    [
        ("__init__", OUT_OF_MEMORY, "model-memory"),
        ("forward", OUT_OF_MEMORY, "gpu-memory"),
        (
            "forward",
            "RuntimeError: CUDA error: an illegal memory access was encountered\n"
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
            "gpu-error",
        ),
        ("forward", "TypeError: forward() got an unexpected keyword argument 'cu_seqlens'", "argument"),
        ("forward", "RuntimeError: Unexpected key(s) in state_dict: 'a.weight'", "checkpoint"),
        (
            "forward",
            "RuntimeError: /te/cuda_driver.cu:12 in function f: CUDA Error: out of memory",
            "gpu-memory",
        ),
        ("login", "ValueError: Invalid token passed!", "exception"),
        ("sample", "ValueError: the tokens of document 7 are corrupt", "bad-sample"),
        ("forward", "IndexError: list index out of range", "exception"),
        ("forward", "IndexError: index out of range in self", "bad-sample"),
        (
            "setup",
            "RuntimeError: Timed out initializing process group in store based barrier on rank: 3",
            "rendezvous",
        ),
        ("setup", "RuntimeError: Found no NVIDIA driver on your system.", "gpu-binding"),
        ("setup", "AssertionError: Torch not compiled with CUDA enabled", "library"),
        ("load_checkpoint", "KeyError: 'iteration'", "checkpoint"),
        ("forward", "KeyError: 'iteration'", "exception"),
        ("forward", "RuntimeError: cuDNN error: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED", "library"),
        ("forward", "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "gpu-error"),
        (
            "setup",
            f"{NCCL_ERROR}\nncclInvalidUsage: x\nLast error:\nDuplicate GPU detected : rank 1 and 0",
            "gpu-binding",
        ),
        ("setup", "RuntimeError: CUDA error: invalid device ordinal", "gpu-binding"),
    ],
)
def test_failures_with_similar_words_and_other_fixes_differ(frame: str, error: str, kind: str) -> None:
    lines = [
        "Traceback (most recent call last):",
        f'  File "model.py", line 3, in {frame}',
        *error.splitlines(),
    ]
    every_rank = [f"{rank}: {line}" for rank in (0, 1) for line in lines]
    failure = find_root(collect(parse(every_rank)), lambda rank: None)
    assert failure is not None
    assert (failure.kind, failure.ranks) == (kind, (0, 1))


def test_a_node_that_failed_its_check_is_named_if_no_rank_gave_a_cause() -> None:
    check = "2026-11-26T15:48:34+0000 hpcgen: bad nodes: n2 (reports: /runs/a/jobs/7/reports)"
    lost = "1: trainer: rank 1 on n1 lost its peers after iteration 3 (train) (closed by peer)"
    error = ["2: Traceback (most recent call last):", "2:   File 'a', line 3", "2: ValueError: bad"]
    found = [
        find_root(collect(parse(lines)), lambda rank: None)
        for lines in ([lost, check], [lost, *error, check])
    ]
    assert [(each.kind, each.node) for each in found if each] == [("bad-node", "n2"), ("exception", None)]


def test_every_cause_has_a_heading_that_says_what_to_do() -> None:
    headings = re.findall(r"^##+ (.*)$", FAULTS.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert {kind.fix for kind in KINDS.values() if kind.fix} <= anchors


@pytest.mark.parametrize("where", ["line", "exception"])
def test_cascades_and_only_they_have_kinds_without_a_heading(where: str) -> None:
    for signature in signatures(where):
        assert (signature.kind in CASCADES) == (signature.role == "cascade"), signature


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("mlx5: n1: got completion with error:", "network"),
        ("[n1:41:0] ib_mlx5_log.c:171 UCX  ERROR Transport retry count exceeded on mlx5_0:1/IB", "network"),
        ("OpenBLAS: pthread_create failed for thread 63 of 64: Resource temporarily unavailable", "limit"),
        ("slurm_script: line 12: python: command not found", "import"),
        (
            "/var/spool/slurmd/job7/slurm_script: line 9:  4727 Killed                  python train.py",
            "killed",
        ),
        ("slurmstepd: error: couldn't chdir to /tmp either. dying.", "launch"),
    ],
)
def test_lines_of_libraries_have_a_meaning(text: str, kind: str) -> None:
    match = match_line(text)
    assert match is not None
    assert match.kind == kind


@pytest.mark.parametrize(
    "text",
    [
        "iteration 12/100: loss 2.5, grad norm 1.0, lr 1e-3",
        "slurmstepd: error: couldn't chdir to `/home/u': Permission denied: going to /tmp instead",
        "0: UserWarning: CUDA out of memory is possible with this setting",
        "check_for_nan_in_loss_and_grad ......................... True",
        "[rank0]: NCCL INFO NET/IB : Using [0]mlx5_0:1/IB; error counters are 0",
        "2026-11-26T15:48:34+0000 hpcgen: tiny: train job 1, restart 0, on ndv5-[1-2]",
        "0: a checkpoint could not be saved: No space left on device. The save is retried once",
    ],
)
def test_a_line_without_a_failure_means_nothing(text: str) -> None:
    assert match_line(text) is None
