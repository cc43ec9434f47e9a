"""Downsampling of up to half a million steps to a few hundred buckets that keep the extremes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcgen.runs.history import Column

MAX_BUCKETS = 400
"""Maximum number of buckets: about the width of a chart in pixels. Finer details would be invisible."""
SMOOTHED_SHARE = 150
"""Ratio of the number of steps to the window of the smoothed line, which is a running median."""
MIN_SMOOTHED = 15
"""Minimum number of steps in the window of the smoothed line, limited to a quarter of the run."""


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """A downsampled curve; NaN for buckets without a number."""

    x: Column
    """Last x of each bucket."""
    low: Column
    high: Column
    last: Column
    """Value at `x`."""
    middle: Column
    """Median of the `window` steps around the bucket."""
    window: int


def downsample(x: Column, y: Column, most: int = MAX_BUCKETS) -> Buckets:
    """Splits log lines into at most `most` buckets of equal size. Lines without a number count as gaps."""
    edges = bucket_edges(len(x), most)
    last = np.append(edges[1:], len(x)) - 1
    window = max(1, len(x) // SMOOTHED_SHARE, min(MIN_SMOOTHED, len(x) // 4)) | 1
    return Buckets(
        x=x[last],
        low=np.fmin.reduceat(y, edges),
        high=np.fmax.reduceat(y, edges),
        last=y[last],
        middle=_medians(y, (edges + last) // 2, window),
        window=window,
    )


def bucket_means(y: Column, weights: Column, most: int = MAX_BUCKETS) -> Column:
    """Weighted mean of each bucket, ignoring log lines without a number."""
    edges = bucket_edges(len(y), most)
    is_number = np.isfinite(y)
    sums = np.add.reduceat(np.where(is_number, y, 0) * weights, edges)
    counts = np.add.reduceat(np.where(is_number, weights, 0), edges)
    means: Column = np.divide(sums, counts, out=np.full(len(edges), np.nan), where=counts > 0)
    return means


def bucket_edges(lines: int, most: int = MAX_BUCKETS) -> NDArray[np.int64]:
    """Index of the first log line of each bucket."""
    return np.arange(min(lines, most), dtype=np.int64) * lines // min(lines, most)


def _medians(y: Column, centers: NDArray[np.int64], window: int) -> Column:
    """Median of `window` values around each center, or fewer at the ends."""
    half = window // 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a window of only gaps is a gap
        return np.array([np.nanmedian(y[max(0, center - half) : center + half + 1]) for center in centers])
