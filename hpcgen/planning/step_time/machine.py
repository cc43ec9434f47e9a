"""The machine that a step runs on: the facts of its GPUs and network that time depends on, and their sources."""

from __future__ import annotations

from collections.abc import Mapping

from hpcgen.config.fabric import fabric_of
from hpcgen.config.known_gpus import gpu_called
from hpcgen.config.node_type import NodeType
from hpcgen.planning.step_time.measurements import Measurements, Row, combined, measurements_of
from trainer.contract.record import record

BY_TUNE = "; hpcgen tune measures it"
"""The end of the source of a constant that can be measured on the cluster."""


@record
class Constant:
    """A figure that node types do not contain."""

    value: float
    """The value, in the unit of its use."""
    meaning: str
    """The constant in words, with its value."""
    source: str
    is_measured: bool = False
    """True if it was measured on this GPU model or this kind of fabric, by hpcgen's authors or by others."""
    by_tune: bool = False
    """True if `hpcgen tune` measures it on the cluster."""

    def __str__(self) -> str:
        return f"{self.meaning} ({self.source}{BY_TUNE if self.by_tune else ''})"


@record(kw_only=True, eq=False)
class Machine:
    """GPUs, and the networks between them. Bandwidths are bytes per second of one GPU in one direction."""

    gpu_model: str
    peak_flops: Mapping[str, float]
    """Dense peak in FLOP/s, by precision."""
    memory_bandwidth: float
    num_sms: Constant
    watts: Constant
    """Power of a GPU under full load."""
    gpus_per_node: int
    nvlink_devices: int
    """Number of GPUs that NVLink connects: `Facts.nvlink_devices`."""
    nvlink_bandwidth: Constant
    """Bandwidth of large collectives inside an NVLink domain."""
    network_bandwidth: Constant
    """Bandwidth of large collectives between NVLink domains."""
    measurements: Measurements | None = None
    """Measurements on the GPU model and on the cluster; None without any."""
    cluster: Measurements | None = None
    """Measurements on the cluster alone."""

    @classmethod
    def of(
        cls,
        node_type: NodeType,
        nvlink_devices: int,
        gpus_per_node: int | None = None,
        cluster: Measurements | None = None,
    ) -> Machine:
        """The machine of a node type that lacks no fact (`missing_facts`).

        A job may use fewer GPUs than a node has: `gpus_per_node`. Default: all. What was measured on the `cluster`
        replaces the same rows of the GPU model's table.
        """
        assert node_type.gpu_memory_gb_s is not None
        measurements = combined(measurements_of(node_type.gpu_model), cluster)
        return cls(
            gpu_model=node_type.gpu_model or "a GPU without a name",
            peak_flops={precision: tflops * 1e12 for precision, tflops in node_type.peak_tflops.items()},
            memory_bandwidth=node_type.gpu_memory_gb_s * 1e9,
            num_sms=_num_sms(node_type),
            watts=_watts(node_type, measurements),
            gpus_per_node=gpus_per_node or node_type.gpus_per_node,
            nvlink_devices=nvlink_devices,
            nvlink_bandwidth=_nvlink_bandwidth(node_type, measurements),
            network_bandwidth=_network_bandwidth(node_type, cluster),
            measurements=measurements,
            cluster=cluster,
        )


def missing_facts(node_type: NodeType, precision: str) -> list[str]:
    """Facts of a node type without which no time can be predicted; "device" for nodes without GPUs."""
    if node_type.device != "cuda":
        return ["device"]
    facts = {
        f"peak_tflops.{precision}": precision in node_type.peak_tflops,
        "gpu_memory_gb_s": node_type.gpu_memory_gb_s is not None,
    }
    return [name for name, is_known in facts.items() if not is_known]


NETWORK_SHARES = {
    "infiniband": Constant(
        0.92,
        "92% of the NICs' line rate in collectives over InfiniBand",
        "azurehpc-health-checks, ib_gdr: 360 to 380 of 400 Gb/s",
        is_measured=True,
    ),
    "gib": Constant(0.88, "88% of the NICs' line rate in collectives over gIB", "guessed from InfiniBand"),
    "roce": Constant(0.88, "88% of the NICs' line rate in collectives over RoCE", "guessed from InfiniBand"),
    "slingshot": Constant(
        0.8, "80% of the NICs' line rate in collectives over Slingshot", "guessed from InfiniBand"
    ),
    "efa": Constant(0.75, "75% of the NICs' line rate in collectives over EFA", "guessed from InfiniBand"),
    "tcpxo": Constant(
        0.75, "75% of the NICs' line rate in collectives over TCPXO", "guessed from InfiniBand"
    ),
    "ethernet": Constant(
        0.5, "50% of the NICs' line rate in collectives over Ethernet without RDMA", "guessed"
    ),
}
"""Share of the line rate that collectives reach, by fabric."""
ASSUMED_GPU_GBIT_S = 400.0
"""Line rate of the NICs of a GPU that the node type does not name: one of InfiniBand NDR, or four of AWS P5's."""
NVLINK_SHARE = 0.8
"""Large collectives reach 362 of 450 GB/s on four H200 (18 NVLinks each)."""
PCIE_SHARE = 0.8
ASSUMED_PCIE_GB_S = 25.0
"""Copies over PCIe 4.0 with 16 lanes."""
ASSUMED_SMS = 132


def _num_sms(node_type: NodeType) -> Constant:
    known = gpu_called(node_type.gpu_model or "")
    if known is not None:
        return Constant(known.sms, f"{known.sms} SMs", "data sheet", is_measured=True)
    return Constant(ASSUMED_SMS, f"{ASSUMED_SMS} SMs of the GPU", "guessed as an H100's")


def _watts(node_type: NodeType, measurements: Measurements | None) -> Constant:
    if measurements and measurements.power:
        watts = max(row["watts"] for row in measurements.power)
        return Constant(watts, f"{watts:.0f} W of a GPU under load", "measured", is_measured=True)
    known = gpu_called(node_type.gpu_model or "")
    if known is not None:
        return Constant(
            known.watts,
            f"{known.watts:g} W of a GPU under load",
            "its power limit in the data sheet",
            by_tune=True,
        )
    return Constant(700, "700 W of a GPU under load", "guessed as an H100's", by_tune=True)


def _nvlink_bandwidth(node_type: NodeType, measurements: Measurements | None) -> Constant:
    if node_type.nvlink is not None and (rate := _measured_gb_s(measurements)):
        return Constant(
            rate * 1e9, f"{rate:.0f} GB/s per GPU in collectives over NVLink", "measured", is_measured=True
        )
    if node_type.nvlink is None:
        rate, link = _pcie_gb_s(node_type), "PCIe"
        source = "guessed"
    else:
        # collectives send and receive at the same time, so each direction has half of the links' sum
        rate, link = NVLINK_SHARE * node_type.nvlink.bandwidth_gb_s / 2, "NVLink"
        source = "guessed: 80% of one direction, as on four H200s"
    return Constant(rate * 1e9, f"{rate:.0f} GB/s per GPU in collectives over {link}", source, by_tune=True)


def _measured_gb_s(measurements: Measurements | None, *, between_domains: bool = False) -> float:
    """The highest bandwidth that an all-gather reached per GPU, inside domains or between them; 0 if not measured."""
    rows = measurements.collectives if measurements else ()
    return max(
        (
            row["bytes"] * (row["ranks"] - 1) / row["ranks"] / _links(row) / row["us"] / 1e3
            for row in rows
            if row["collective"] == "all_gather" and (row.get("domains", 1) > 1) is between_domains
        ),
        default=0.0,
    )


def _links(row: Row) -> float:
    """Number of links that share what a ring carries: one, or between domains that of each GPU in a domain."""
    domains: int = row.get("domains", 1)
    return row["ranks"] / domains if domains > 1 else 1


def _network_bandwidth(node_type: NodeType, cluster: Measurements | None) -> Constant:
    fabric = fabric_of(node_type)
    if rate := _measured_gb_s(cluster, between_domains=True):
        meaning = f"{rate:.0f} GB/s per GPU in collectives between nodes"
        return Constant(rate * 1e9, meaning, "measured on this cluster", is_measured=True)
    share = NETWORK_SHARES[node_type.fabric or "infiniband"]
    gbit_s, rate_source = ASSUMED_GPU_GBIT_S, f"line rate guessed: {ASSUMED_GPU_GBIT_S:g} Gb/s per GPU; "
    if node_type.nics:
        gbit_s, rate_source = sum(nic.rate_gbit_s for nic in node_type.nics) / node_type.gpus_per_node, ""
    title = fabric.title if fabric else "an unknown network, taken as InfiniBand"
    value = share.value * gbit_s / 8 * 1e9
    return Constant(
        value,
        f"{value / 1e9:.0f} GB/s per GPU in collectives over {title}",
        f"{rate_source}{share.value:.0%} of the line rate: {share.source}",
        is_measured=share.is_measured and fabric is not None and not rate_source,
        by_tune=True,
    )


def _pcie_gb_s(node_type: NodeType) -> float:
    if node_type.pci_link is None:
        return ASSUMED_PCIE_GB_S
    return PCIE_SHARE * node_type.pci_link.speed_gt_s * node_type.pci_link.width / 8
