"""The number of nodes and the layout with which a new run of a preset starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from hpcgen.config.cluster import ClusterConfig, limits_of
from hpcgen.config.node_type import NodeType
from hpcgen.config.presets import Preset
from hpcgen.config.slurm import StageSettings
from hpcgen.config.starter import micro_batch, parallelism_of
from hpcgen.config.tokenizer import TokenizerConfig, vocab_size
from hpcgen.errors import HpcgenError
from hpcgen.planning.layouts.nodes import ladder, most_nodes
from hpcgen.planning.resources import nodes_that_fit
from hpcgen.text import counted, one_of
from trainer.contract.config import BlendConfig, ModelConfig, OptimizerConfig, TrainingConfig, from_dict
from trainer.contract.model.layout import fewest_ranks
from trainer.contract.record import record
from trainer.contract.rules.engine import ERRORS
from trainer.contract.rules.facts import Facts, World


@record
class Start:
    """Values that a new run file sets."""

    num_nodes: int
    changes: Mapping[str, object] = field(default_factory=dict)
    """Keys of the layout that differ from the preset's, and their values."""
    reason: str = ""
    """Why they differ, as a comment."""


def starting_layout(
    preset: Preset | None, node_type: NodeType, of_cluster: StageSettings, cluster: ClusterConfig
) -> Start:
    """The preset's layout on as few nodes as hold it, but at least those of the profile's settings.

    If the layout does not suit the nodes or needs more of them than a job may have, another one that does. If memory or
    speed of the GPUs are unknown, only the size of the preset's layout counts.

    Raises:
        HpcgenError: no layout fits on the nodes that a job may have.
    """
    ranks_per_node = of_cluster.ntasks_per_node or node_type.gpus_per_node
    if preset is None or not ranks_per_node:
        return Start(of_cluster.nodes or 1)
    new = _New(preset, node_type, of_cluster, ranks_per_node)
    nodes, most = new.fewest_nodes, most_nodes(of_cluster, cluster)
    enough = nodes_that_fit(new.facts(nodes)) or (None if node_type.gpu_memory_gib else nodes)
    if enough is not None and enough <= most and _suits(new.facts(enough)):
        return Start(enough)
    is_divided = new.facts(nodes).layout is not None
    if nodes == of_cluster.nodes and not is_divided:
        return Start(nodes)  # the site's number stays, and `validate` says which batch it needs
    why = "does not suit the nodes"
    if enough is None and is_divided:
        why = f"does not fit GPUs of {node_type.gpu_memory_gib:g} GiB"
    elif enough is not None and enough > most:
        why = f"needs {counted(enough, 'node')}"
    return _other_layout(new, cluster, f"The preset's layout {why}") or Start(enough or nodes)


@record
class _New:
    """A new run."""

    preset: Preset
    node_type: NodeType
    of_cluster: StageSettings
    ranks_per_node: int

    @property
    def fewest_nodes(self) -> int:
        """The nodes of the profile's settings, or as many as the preset's layout needs."""
        ranks = fewest_ranks(parallelism_of(self.preset))
        return max(self.of_cluster.nodes or 1, -(-ranks // self.ranks_per_node))

    @property
    def nvlink_nodes(self) -> int:
        """Nodes whose GPUs NVLink connects."""
        domain = self.node_type.nvlink.domain_nodes if self.node_type.nvlink else 1
        return min(domain, self.of_cluster.segment or domain)

    def facts(self, nodes: int) -> Facts:
        """The facts of the run with the preset's layout on `nodes` nodes."""
        preset, sections = self.preset, self.preset.sections
        model = {"vocab_size": vocab_size(TokenizerConfig()), **sections["model"]}
        training = sections["training"] | micro_batch(preset, nodes * self.ranks_per_node)
        return Facts(
            model=from_dict(ModelConfig, model, preset.origin),
            parallelism=parallelism_of(preset),
            training=from_dict(TrainingConfig, training, preset.origin),
            optimizer=from_dict(OptimizerConfig, sections["optimizer"], preset.origin),
            data=BlendConfig(mock=True),
            world=World(path="slurm.train.nodes", count=nodes, ranks_each=self.ranks_per_node),
            gpus_per_node=self.ranks_per_node,
            nvlink_nodes=self.nvlink_nodes,
            device=self.node_type.device,
            device_memory_gib=self.node_type.gpu_memory_gib,
        )


def _suits(facts: Facts) -> bool:
    """True if a layout obeys the rules, and if its tensor parallelism stays within what NVLink connects."""
    is_valid = not any(True for rule in ERRORS for _ in rule(facts))
    return is_valid and not facts.crosses_network(facts.parallelism.tensor_model_parallel_size)


def _other_layout(new: _New, cluster: ClusterConfig, why: str) -> Start | None:
    """The fastest layout on as few nodes as hold the model. None if the time of a step cannot be predicted.

    Raises:
        HpcgenError: none fits on the nodes that a job may have.
    """
    # Predictions, which few new runs need.
    from hpcgen.planning.layouts.fewest_nodes import layout_on_fewest_nodes
    from hpcgen.planning.predicted_step import NoPrediction, machine_of

    most = most_nodes(new.of_cluster, cluster)
    fewest = min(new.of_cluster.nodes or 1, most)
    counts = new.ranks_per_node, new.nvlink_nodes
    try:
        machine = machine_of(new.facts(fewest).training, cluster.node_type, new.node_type, *counts)
        numbers = (number for number in ladder(most) if number >= fewest)
        layout = layout_on_fewest_nodes(new.facts, machine, numbers)
    except NoPrediction:
        return None
    if layout is None:
        limits = [name for name, limit in limits_of(new.of_cluster, cluster) if limit.max_nodes]
        where = f", the maximum of {one_of(limits)}" if limits else ""
        raise HpcgenError(
            f"--preset {new.preset.name}: no layout fits into the memory of the GPUs of {counted(most, 'node')}{where}",
            "use a smaller model, another partition or another cluster",
        )
    rate = layout.tokens_per_s / layout.facts.world.size
    reason = f"hpcgen init: {rate:,.0f} tokens/s per GPU predicted. {why}"
    return Start(layout.facts.world.count, layout.changes, reason)
