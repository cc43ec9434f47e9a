"""hpcgen topology: show node types, and compare images and live nodes with them."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.cli.found import list_found
from hpcgen.cli.lazy import CommandGroup
from hpcgen.cli.options import json_option, write_output
from hpcgen.config.node_types import find_node_type, load_node_type, load_with_files, node_type_names, set_by
from hpcgen.errors import HpcgenError
from hpcgen.text import counted
from hpcgen.topology import nccl_xml, svg, text
from hpcgen.topology import sysfs as live
from hpcgen.topology.compare import differences
from hpcgen.topology.layout import nics_of_gpus, nvlink_words, pcie
from hpcgen.topology.node import expected, unstated

if TYPE_CHECKING:
    from hpcgen.config.node_type import AllReduceThreshold, Nic, NodeType, Processor, Variable
    from hpcgen.topology.node import Topology


def _names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Node type names for shell completion."""
    return [name for name in node_type_names() if name.startswith(incomplete)]


_name_argument = click.argument("name", shell_complete=_names)


@click.group("topology", cls=CommandGroup)
def command() -> None:
    """A node type is a set of facts about one kind of node, such as an Azure NDv5 VM."""


@command.command("list")
@json_option
def list_node_types(as_json: bool) -> None:
    """List the available node types and their files."""
    list_found(
        node_type_names(),
        find_node_type,
        _description,
        "hpcgen topology show",
        as_json,
    )


def _description(name: str) -> dict[str, str | None]:
    node_type = load_node_type(name)
    return {"description": node_type.description, "tried": node_type.tried}


@command.command("show")
@_name_argument
@json_option
def show(name: str, as_json: bool) -> None:
    """Show every fact about node type NAME and its source."""
    loaded = load_with_files(name)
    node_type = loaded.config
    if as_json:
        extends = list(node_type.extends) if node_type.extends[1:] else next(iter(node_type.extends), None)
        values = {**dataclasses.asdict(node_type), "extends": extends}
        click.echo(json.dumps({"name": name, **values}, indent=1))
        return
    click.echo(click.style(name, bold=True) + f": {node_type.description}")
    for key, value in _facts(node_type):
        source = click.style(f"  [{node_type.sources[key]}]", dim=True) if key in node_type.sources else ""
        click.echo(f"{key:<18}  {value}{source}")
    _show_devices(node_type)
    _show_thresholds(node_type)
    for doubt in loaded.doubts:
        click.secho(f"\n{dataclasses.replace(doubt, subject=name)}", fg="yellow")
    for title, variables in (("environment", node_type.environment), ("sharp", node_type.sharp)):
        if variables:
            click.echo("\n" + click.style(title, bold=True))
        for variable, fact in variables.items():
            setter = set_by(loaded.document, f"{title}.{variable}.value")
            click.echo(f"{variable}={fact.value}{_conditions(fact)}")
            click.echo(click.style(f"    {fact.why} [{setter}: {fact.source}]", dim=True))
    if node_type.must_not_set:
        click.echo("\n" + click.style("must_not_set", bold=True))
    for variable, exclusion in node_type.must_not_set.items():
        click.echo(f"{variable}")
        click.echo(click.style(f"    {exclusion.why} [{exclusion.source}]", dim=True))


def _facts(node_type: NodeType) -> Iterator[tuple[str, str]]:
    """Yields the name and text of each fact that fits on one line."""
    processor, memory = node_type.processor, node_type.gpu_memory_gib
    lines: dict[str, str | None] = {
        "extends": ", ".join(node_type.extends),
        "tried": node_type.tried,
        "vm_sizes": ", ".join(node_type.vm_sizes),
        "site": node_type.site,
        "device": node_type.device,
        "gpus_per_node": str(node_type.gpus_per_node),
        "gpu_model": node_type.gpu_model,
        "compute_capability": node_type.compute_capability,
        "gpu_memory_gib": f"{memory:g} GiB" if memory else None,
        "gpu_memory_gb_s": f"{node_type.gpu_memory_gb_s:g} GB/s" if node_type.gpu_memory_gb_s else None,
        "peak_tflops": ", ".join(f"{peak:g} TFLOP/s {key}" for key, peak in node_type.peak_tflops.items()),
        "nvlink": nvlink_words(node_type),
        "cpus_per_node": str(node_type.cpus_per_node or "differs between nodes"),
        "processor": _processor_words(processor) if processor else None,
        "numa_nodes": "; ".join(
            f"{number}: CPUs {numa.cpus}" for number, numa in enumerate(node_type.numa_nodes)
        ),
        "pci_link": pcie(node_type.pci_link) if node_type.pci_link else None,
        "fabric": node_type.fabric,
        "nics_per_node": str(node_type.nics_per_node or ""),
        "topology_file": node_type.topology_file,
        "library_path": ", ".join(node_type.library_path),
        "mounts": ", ".join(node_type.mounts),
        "exclusive": "exclusive nodes" if node_type.exclusive else "shared nodes",
    }
    yield from ((key, text) for key, text in lines.items() if text)


def _processor_words(processor: Processor) -> str:
    numbers = (("family", processor.family), ("model", processor.model))
    known = [f"{name} {number}" for name, number in numbers if number is not None]
    cpuid = " ".join(filter(None, (processor.vendor, *known)))
    return ", ".join(filter(None, (cpuid, processor.arch)))


def _show_devices(node_type: NodeType) -> None:
    """Prints GPUs, their NICs and CPU masks side by side."""
    keys = [key for key in ("gpus", "nics", "cpu_masks") if getattr(node_type, key)]
    if not keys:
        return
    sources = "; ".join(dict.fromkeys(node_type.sources[key] for key in keys if key in node_type.sources))
    source = click.style(f"  [{sources}]", dim=True) if sources else ""
    click.echo("\n" + click.style(", ".join(keys), bold=True) + source)
    for gpu, nic, mask in _rows(node_type):
        click.echo(f"{gpu:<30}  {nic:<45}  {mask}".rstrip())


def _rows(node_type: NodeType) -> Iterator[tuple[str, str, str]]:
    """Yields each GPU with its first NIC and the mask of its rank, further NICs below it, and at last unused NICs."""
    used, masks = nics_of_gpus(node_type), node_type.cpu_masks
    shown: list[Nic] = []
    for index in range(max(len(used), len(masks))):
        gpu = node_type.gpus[index] if index < len(used) else None
        own = used[index] if index < len(used) else ()
        shown += own
        left = f"GPU {index}  {gpu.bus_id}  NUMA {gpu.numa}" if gpu else ""
        yield left, _nic_words(own[0]) if own else "", masks[index] if index < len(masks) else ""
        yield from (("", _nic_words(nic), "") for nic in own[1:])
    yield from (("", _nic_words(nic), "") for nic in node_type.nics if nic not in shown)


def _nic_words(nic: Nic) -> str:
    numa = None if nic.numa is None else f"NUMA {nic.numa}"
    return "  ".join(filter(None, (nic.name, nic.bus_id, numa, f"{nic.rate_gbit_s:g} Gb/s")))


def _show_thresholds(node_type: NodeType) -> None:
    health = node_type.health
    if health is None:
        return
    source = f"  [{node_type.sources['health']}]" if "health" in node_type.sources else ""
    click.echo("\n" + click.style("health", bold=True) + click.style(source, dim=True))
    figures = {
        "memory": health.memory_mb and f"{health.memory_mb} MB +/- {health.memory_tolerance:.0%}",
        "NVMe disks": health.nvme_disks,
        "host to GPU": health.host_device_gb_s and f"at least {health.host_device_gb_s:g} GB/s",
        "GPU to GPU": health.peer_gb_s and f"at least {health.peer_gb_s:g} GB/s",
        "GPUDirect RDMA": health.ib_gdr_gbit_s and f"at least {health.ib_gdr_gbit_s:g} Gb/s per NIC",
    }
    for name, figure in figures.items():
        if figure is not None:
            click.echo(f"{name:<16}  {figure}")
    for threshold in health.all_reduce:
        conditions = (
            f"{_node_range(threshold)}, {threshold.message_gib:g} GiB, "
            f"NVLS {'on' if threshold.nvls else 'off'}, CollNet {'on' if threshold.collnet else 'off'}"
        )
        levels = {
            "expected": threshold.expected_gb_s,
            "warns below": threshold.warn_below_gb_s,
            "fails below": threshold.fail_below_gb_s,
        }
        words = ", ".join(f"{level} {value:g}" for level, value in levels.items() if value is not None)
        click.echo(f"{'all-reduce':<16}  {conditions}: {words} GB/s")
        click.echo(click.style(f"{'':<18}[{threshold.source}]", dim=True))


def _node_range(threshold: AllReduceThreshold) -> str:
    first, last = threshold.min_nodes, threshold.max_nodes
    if last is None:
        return f"{first} or more nodes"
    return f"{first} to {last} nodes" if last > first else counted(first, "node")


def _conditions(fact: Variable) -> str:
    conditions = [*fact.stages, *fact.runtimes, *([f"torch {fact.torch}"] if fact.torch else [])]
    return f"  ({', '.join(conditions)})" if conditions else ""


@command.command("xml")
@_name_argument
def xml(name: str) -> None:
    """Print NCCL's topology file (NCCL_TOPO_FILE) for node type NAME."""
    click.echo(nccl_xml.write(name, load_node_type(name)), nl=False)


@command.command("draw")
@_name_argument
@click.option("--svg", "as_svg", is_flag=True, help="Print SVG in place of text.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Write SVG to this file; - is standard output.",
)
def draw(name: str, as_svg: bool, output: Path | None) -> None:
    """Draw node type NAME as text or SVG."""
    node_type = load_node_type(name)
    if output is not None:
        if output.suffix.lower() not in ("", ".svg"):
            raise HpcgenError("the file would be SVG", f"name it {output.with_suffix('.svg')}", where=output)
        write_output(output, svg.draw(name, node_type), mode=0o666)
    elif as_svg:
        click.echo(svg.draw(name, node_type), nl=False)
    else:
        click.echo(text.draw(name, node_type, ascii_only=not _shows_lines()), nl=False)


def _shows_lines() -> bool:
    try:
        "├─".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


@command.command("verify")
@_name_argument
@click.option("--xml", "xml_file", type=click.Path(path_type=Path), help="Compare this NCCL topology file.")
@click.option(
    "--sysfs",
    type=click.Path(path_type=Path),
    help="Compare a node using its /sys or a copy of it.  [default: /sys of this machine]",
)
@json_option
@click.pass_context
def verify(ctx: click.Context, name: str, xml_file: Path | None, sysfs: Path | None, as_json: bool) -> None:
    """Compare a topology file or a live node with node type NAME.

    Facts that are missing from the node type, the file or the node are not compared: virtual machines hide PCI bridges
    and often NUMA nodes. Exits with status 1 if there are differences.
    """
    if xml_file is not None and sysfs is not None:
        raise click.UsageError("--xml and --sysfs cannot be used together")
    node_type = load_node_type(name)
    wanted = expected(name, node_type, nics_have_names=xml_file is None)
    source, found = _found(node_type, xml_file, sysfs)
    different = differences(wanted, found)
    if missing := unstated(node_type, nics_have_names=xml_file is None):
        click.echo(f"not compared, because {name} does not state it: {', '.join(missing)}", err=True)
    if as_json:
        click.echo(json.dumps([vars(difference) for difference in different], indent=1))
    for difference in () if as_json else different:
        click.echo(str(difference))
    if different:
        click.secho(
            f"{source} does not match {name}: {counted(len(different), 'difference')}", fg="red", err=True
        )
        ctx.exit(1)
    if not as_json:
        gpus, nics = len(found.of_kind("GPU")), len(found.of_kind("NIC"))
        nodes = counted(len(found.numa_nodes), "NUMA node")
        click.echo(f"{source} matches {name}: {nodes}, {counted(gpus, 'GPU')}, {counted(nics, 'NIC')}")


def _found(node_type: NodeType, xml_file: Path | None, sysfs: Path | None) -> tuple[str, Topology]:
    """The name and topology of the file or the live node to compare."""
    if xml_file is not None:
        return str(xml_file), nccl_xml.read(xml_file)
    directory = sysfs or Path("/sys")
    return str(directory), live.read(directory, node_type.fabric or "infiniband")
