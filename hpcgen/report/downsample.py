"""Half a million steps as a few hundred buckets that keep the extremes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcgen.report.history import Column

MOST_BUCKETS = 400
"""About as many as a chart has pixels; what is finer could not be seen."""
SMOOTHED_SHARE = 150
"""The smoothed line takes the median over one part in so many of the run,"""
FEWEST_SMOOTHED = 15
"""and over no fewer steps than this, as long as they are at most a quarter of it."""


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """A line over the run, left to right; NaN where a bucket has no number."""

    x: Column
    """The last x of each bucket."""
    low: Column
    high: Column
    last: Column
    """The value at `x`."""
    middle: Column
    """The median of the steps around the bucket, `window` of them."""
    window: int


def downsample(x: Column, y: Column, most: int = MOST_BUCKETS) -> Buckets:
    """Buckets of equally many lines each, at most `most`. Lines without a number count as gaps."""
    edges = bucket_edges(len(x), most)
    last = np.append(edges[1:], len(x)) - 1
    window = max(1, len(x) // SMOOTHED_SHARE, min(FEWEST_SMOOTHED, len(x) // 4)) | 1
    return Buckets(
        x=x[last],
        low=np.fmin.reduceat(y, edges),
        high=np.fmax.reduceat(y, edges),
        last=y[last],
        middle=_medians(y, (edges + last) // 2, window),
        window=window,
    )


def bucket_means(y: Column, weights: Column, most: int = MOST_BUCKETS) -> Column:
    """The weighted mean of each bucket; lines without a number do not count."""
    edges = bucket_edges(len(y), most)
    is_number = np.isfinite(y)
    sums = np.add.reduceat(np.where(is_number, y, 0) * weights, edges)
    counts = np.add.reduceat(np.where(is_number, weights, 0), edges)
    means: Column = np.divide(sums, counts, out=np.full(len(edges), np.nan), where=counts > 0)
    return means


def bucket_edges(lines: int, most: int = MOST_BUCKETS) -> NDArray[np.int64]:
    """Where each bucket begins."""
    return np.arange(min(lines, most), dtype=np.int64) * lines // min(lines, most)


def _medians(y: Column, centres: NDArray[np.int64], window: int) -> Column:
    """The median of `window` values around each centre, fewer at the ends."""
    half = window // 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a window of nothing but gaps is a gap
        return np.array([np.nanmedian(y[max(0, centre - half) : centre + half + 1]) for centre in centres])
