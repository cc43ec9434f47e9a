"""The table of NVIDIA's all_reduce_perf, as versions of nccl-tests print it."""

from __future__ import annotations

import pytest

from trainer.contract.errors import TrainerError
from trainer.health.all_reduce_perf import parse

HEAD = """\
# nThread 1 nGpus 1 minBytes 1073741824 maxBytes 17179869184 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1 \
validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid  37863 on     ndv5-1 device  0 [0001:00:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  37864 on     ndv5-1 device  1 [0002:00:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
ROWS = """\
  1073741824     268435456     float     sum      -1   4137.1  259.54  486.63      0   4127.2  260.16  487.80      0
 17179869184    4294967296     float     sum      -1    65134  263.76  494.55      0    65041  264.14  495.26      0
"""
TAIL = """\
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 491.061
#
"""


def test_the_figures_in_place_are_taken() -> None:
    small, large = parse(HEAD + ROWS + TAIL, 2)
    assert (small.size_bytes, large.size_bytes) == (2**30, 2**34)
    assert (large.busbw_gb_s, large.algbw_gb_s, large.correct) == (495.26, 264.14, True)
    assert large.time_s == pytest.approx(0.065041)


def test_lines_that_srun_labels_are_read_too() -> None:
    text = "".join(f" 0: {line}\n" for line in (HEAD + ROWS + TAIL).splitlines())
    assert [sample.busbw_gb_s for sample in parse(text, 2)] == [487.80, 495.26]


def test_other_lines_between_do_not_matter() -> None:
    noisy = ROWS.replace("\n", "\nndv5-1:1:1 [0] NCCL INFO Using network IBext_v8\n")
    assert len(parse(HEAD + noisy + TAIL, 2)) == 2


def test_large_times_and_unchecked_sums() -> None:
    row = "17179869184 4294967296 float sum -1 1.2e+06 14.32 26.84 N/A 1.2e+06 14.32 26.84 N/A\n"
    [sample] = parse(row, 16)
    assert (sample.time_s, sample.busbw_gb_s, sample.correct) == (1.2, 26.84, True)


def test_wrong_sums_are_seen() -> None:
    samples = parse(HEAD + ROWS.replace("495.26      0", "495.26      3"), 2)
    assert [sample.correct for sample in samples] == [True, False]


def test_a_build_without_mpi_measures_each_process_alone() -> None:
    with pytest.raises(TrainerError, match=r"ran over 2 of 16 ranks.*MPI=1"):
        parse(HEAD + ROWS, 16)


@pytest.mark.parametrize("text", ["", HEAD, "Test NCCL failure common.cu:958 'unhandled system error'"])
def test_output_without_a_table_is_refused(text: str) -> None:
    with pytest.raises(TrainerError, match="printed no table"):
        parse(text, 2)
