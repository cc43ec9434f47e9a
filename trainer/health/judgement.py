"""Compares a measured bus bandwidth with a known threshold or with the cluster's own baseline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trainer.contract.config import ConfigError, from_dict
from trainer.contract.files.regular_file import read_text
from trainer.contract.files.run_directory import publish
from trainer.contract.health import NcclTestConfig, Threshold
from trainer.contract.wording import binary_size, counted
from trainer.health.settings import Setting


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Conditions that a bandwidth depends on, apart from the health of the hardware."""

    nodes: int
    ranks_per_node: int
    nvls: bool
    """True if NCCL_NVLS_ENABLE allows NVLink SHARP. NCCL then uses it if the GPUs support it."""
    collnet: bool
    """True if NCCL_COLLNET_ENABLE turns on CollNet. Default: off."""

    def __str__(self) -> str:
        return (
            f"{counted(self.nodes, 'node')} x {counted(self.ranks_per_node, 'rank')}, "
            f"NVLS {_on(self.nvls)}, CollNet {_on(self.collnet)}"
        )


def _on(value: bool) -> str:
    return "on" if value else "off"


def make_layout(nodes: int, ranks_per_node: int, settings: Mapping[str, Setting]) -> Layout:
    """Layout of a job whose tasks have these NCCL settings."""

    def value(name: str, default: str) -> str:
        return settings[name].value if name in settings else default

    return Layout(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        nvls=value("NCCL_NVLS_ENABLE", "2") != "0",
        collnet=value("NCCL_COLLNET_ENABLE", "0") not in ("", "0"),
    )


def select(
    thresholds: Sequence[Threshold], layout: Layout, gpus_per_node: int, nvlink_nodes: int = 1
) -> Threshold | None:
    """The first threshold with matching conditions; None if there is none for this layout.

    NVLink connects all GPUs of `nvlink_nodes` nodes, so that no traffic between these passes a switch with SHARP.

    If no threshold of the node type is for NVLS, its GPUs do not support NVLS, and the setting is ignored.
    """
    if layout.ranks_per_node != gpus_per_node:
        return None
    nvls = layout.nvls and any(threshold.nvls for threshold in thresholds)
    for threshold in thresholds:
        fits = threshold.min_nodes <= layout.nodes <= (threshold.max_nodes or layout.nodes)
        same_collnet = layout.nodes <= nvlink_nodes or threshold.collnet == layout.collnet
        if fits and same_collnet and threshold.nvls == nvls:
            return threshold
    return None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Recorded bandwidth of a cluster, with which later tests are compared."""

    busbw_gb_s: float
    recorded: str
    """Time, ISO 8601."""
    job: str
    nodes: tuple[str, ...]
    software: str


def baseline_key(config: NcclTestConfig, layout: Layout) -> str:
    """Key of comparable tests in the baseline file."""
    return f"{config.node_type}: {layout}, {binary_size(config.sizes_bytes[-1])}"


def read_baseline(path: Path) -> dict[str, Entry]:
    """Read the recorded bandwidths; empty if the file does not exist.

    Raises:
        ConfigError: the file cannot be read or is not a baseline.
    """
    try:
        document = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}. Remove the file to record a new baseline", where=path) from error
    if not isinstance(document, dict):
        raise ConfigError("expected a mapping of layouts to bandwidths", where=path)
    return {key: from_dict(Entry, entry, f"{path}: {key}") for key, entry in document.items()}


def record_baseline(path: Path, key: str, entry: Entry) -> None:
    """Add or replace the bandwidth of one layout. The file is replaced atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {**read_baseline(path), key: entry}
    publish(path, json.dumps({name: asdict(each) for name, each in entries.items()}, indent=1) + "\n")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of the comparison of a bandwidth with its limits."""

    status: Literal["good", "warning", "bad", "unknown"]
    expected_gb_s: float | None
    warn_below_gb_s: float | None
    fail_below_gb_s: float | None
    source: str
    """Source of the limits; empty if there are none."""


def judge(
    busbw_gb_s: float, threshold: Threshold | None, baseline: Entry | None, config: NcclTestConfig
) -> Verdict:
    """Compare a bandwidth with the threshold, else with the baseline. With neither, the status is unknown."""
    if threshold is not None:
        expected, source = threshold.expected_gb_s, threshold.source
        warn, fail = threshold.warn_below_gb_s, threshold.fail_below_gb_s
    elif baseline is not None:
        expected = baseline.busbw_gb_s
        warn, fail = (expected * (1 - part) for part in (config.warn_deficit, config.fail_deficit))
        source = f"this cluster's baseline of {baseline.recorded}, job {baseline.job}"
    else:
        return Verdict(
            status="unknown", expected_gb_s=None, warn_below_gb_s=None, fail_below_gb_s=None, source=""
        )
    status: Literal["good", "warning", "bad"] = "good"
    if busbw_gb_s < fail:
        status = "bad"
    elif warn is not None and busbw_gb_s < warn:
        status = "warning"
    return Verdict(
        status=status, expected_gb_s=expected, warn_below_gb_s=warn, fail_below_gb_s=fail, source=source
    )
