"""Choice of the threshold for a layout, comparison of bandwidths with it, and the cluster's own baseline."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.contract.config import ConfigError
from trainer.contract.health import NcclTestConfig, Threshold
from trainer.health.judgement import (
    Entry,
    Layout,
    baseline_key,
    judge,
    make_layout,
    read_baseline,
    record_baseline,
    select,
)
from trainer.health.settings import Setting

GIB = 2**30


def threshold(low: int, high: int | None, nvls: bool, collnet: bool, fail: float) -> Threshold:
    return Threshold(
        min_nodes=low, max_nodes=high, nvls=nvls, collnet=collnet, fail_below_gb_s=fail, source="x"
    )


NDV5 = (
    threshold(1, 1, True, False, 460),
    threshold(1, 1, False, False, 331),
    threshold(2, None, True, True, 300),
)
NDV4 = (threshold(1, 1, False, False, 228), threshold(2, None, False, False, 180))
CONFIG = NcclTestConfig(
    device="cuda", node_type="ndv5", nodes=4, ranks_per_node=8, sizes_bytes=(GIB, 16 * GIB), baseline="/b"
)
LAYOUT = Layout(nodes=4, ranks_per_node=8, nvls=True, collnet=False)
ENTRY = Entry(
    busbw_gb_s=400.0, recorded="2026-01-02T03:04:05+00:00", job="7", nodes=("a", "b"), software="NCCL 2.26"
)


@pytest.mark.parametrize("nodes", [1, 2, 3, 64])
@pytest.mark.parametrize(("nvls", "collnet"), [*itertools.product((True, False), repeat=2)])
@pytest.mark.parametrize("ranks", [8, 4])
def test_a_threshold_applies_only_to_its_own_layout(
    nodes: int, nvls: bool, collnet: bool, ranks: int
) -> None:
    found = select(
        NDV5, Layout(nodes=nodes, ranks_per_node=ranks, nvls=nvls, collnet=collnet), gpus_per_node=8
    )
    expected = None
    if ranks == 8 and nodes == 1:
        expected = 460 if nvls else 331  # CollNet is between nodes: one has no use for it
    elif ranks == 8 and nvls and collnet:
        expected = 300
    assert (found and found.fail_below_gb_s) == expected


@pytest.mark.parametrize(("nodes", "limit"), [(1, 460), (18, 460), (19, None)])
def test_nodes_that_nvlink_connects_do_not_use_collnet(nodes: int, limit: int | None) -> None:
    thresholds = (threshold(1, 18, True, True, 460),)
    layout = Layout(nodes=nodes, ranks_per_node=4, nvls=True, collnet=False)
    found = select(thresholds, layout, gpus_per_node=4, nvlink_nodes=18)
    assert (found and found.fail_below_gb_s) == limit


@pytest.mark.parametrize("nvls", [True, False])
def test_gpus_without_nvlink_sharp_have_thresholds_whatever_is_set(nvls: bool) -> None:
    found = select(NDV4, Layout(nodes=2, ranks_per_node=8, nvls=nvls, collnet=False), gpus_per_node=8)
    assert found is NDV4[1]


@pytest.mark.parametrize(
    ("settings", "nvls", "collnet"),
    [
        ({}, True, False),
        ({"NCCL_NVLS_ENABLE": "0"}, False, False),
        ({"NCCL_NVLS_ENABLE": "1", "NCCL_COLLNET_ENABLE": "1"}, True, True),
        ({"NCCL_NVLS_ENABLE": "2", "NCCL_COLLNET_ENABLE": "0"}, True, False),
    ],
)
def test_the_layout_is_read_from_what_nccl_reads(settings: dict[str, str], nvls: bool, collnet: bool) -> None:
    found = make_layout(2, 8, {name: Setting(name, value, "x") for name, value in settings.items()})
    assert (found.nvls, found.collnet) == (nvls, collnet)


@pytest.mark.parametrize(
    ("busbw", "status"), [(500, "good"), (400, "good"), (399, "warning"), (300, "warning"), (299, "bad")]
)
def test_a_threshold_has_a_warning_and_a_failure(busbw: float, status: str) -> None:
    limits = replace(NDV5[2], expected_gb_s=450.0, warn_below_gb_s=400.0)
    assert judge(busbw, limits, ENTRY, CONFIG).status == status


def test_without_a_warning_there_is_nothing_between_good_and_bad() -> None:
    assert [judge(busbw, NDV5[0], None, CONFIG).status for busbw in (460, 459.9)] == ["good", "bad"]


@pytest.mark.parametrize(
    ("busbw", "status"), [(400, "good"), (360, "good"), (359, "warning"), (300, "warning"), (299, "bad")]
)
def test_a_baseline_warns_a_tenth_and_fails_a_quarter_below(busbw: float, status: str) -> None:
    verdict = judge(busbw, None, ENTRY, CONFIG)
    assert verdict.status == status
    assert "baseline of 2026-01-02T03:04:05+00:00, job 7" in verdict.source


def test_without_threshold_and_baseline_the_status_is_unknown() -> None:
    verdict = judge(1.0, None, None, CONFIG)
    assert (verdict.status, verdict.fail_below_gb_s) == ("unknown", None)


def test_a_recorded_baseline_is_read_back_with_those_of_other_layouts(tmp_path: Path) -> None:
    path = tmp_path / "new" / "baseline.json"
    assert read_baseline(path) == {}
    keys = [baseline_key(CONFIG, layout) for layout in (LAYOUT, replace(LAYOUT, nvls=False))]
    assert keys[0] == "ndv5: 4 nodes x 8 ranks, NVLS on, CollNet off, 16 GiB"
    record_baseline(path, keys[0], ENTRY)
    record_baseline(path, keys[1], replace(ENTRY, busbw_gb_s=300.0))
    record_baseline(path, keys[0], replace(ENTRY, busbw_gb_s=410.0))
    found = read_baseline(path)
    assert {key: entry.busbw_gb_s for key, entry in found.items()} == {keys[0]: 410.0, keys[1]: 300.0}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({"x": {"busbw_gb_s": "fast"}})])
def test_a_file_that_is_not_a_baseline_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        read_baseline(path)
