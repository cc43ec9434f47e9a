"""The number of nodes with which a new run starts: as few as hold its preset."""

from __future__ import annotations

from hpcgen.config.node_type import NodeType
from hpcgen.config.presets import Preset
from hpcgen.config.slurm import StageSettings
from hpcgen.config.starter import micro_batch, parallelism_of
from hpcgen.config.tokenizer import TokenizerConfig, vocab_size
from hpcgen.planning.resources import nodes_that_fit
from trainer.contract.config import BlendConfig, ModelConfig, OptimizerConfig, TrainingConfig, from_dict
from trainer.contract.model.layout import fewest_ranks
from trainer.contract.rules.facts import Facts, World


def starting_nodes(preset: Preset | None, node_type: NodeType, of_cluster: StageSettings) -> int:
    """The number of nodes of the profile's settings, or as many as the layout and the memory of the preset need.

    If no number of nodes gives the GPUs enough memory, only the layout counts.
    """
    ranks_per_node = of_cluster.ntasks_per_node or node_type.gpus_per_node
    if preset is None or not ranks_per_node:
        return of_cluster.nodes or 1
    ranks = fewest_ranks(parallelism_of(preset))
    nodes = max(of_cluster.nodes or 1, -(-ranks // ranks_per_node))
    return nodes_that_fit(_facts(preset, node_type, nodes, ranks_per_node)) or nodes


def _facts(preset: Preset, node_type: NodeType, nodes: int, ranks_per_node: int) -> Facts:
    sections = preset.sections
    model = {"vocab_size": vocab_size(TokenizerConfig()), **sections["model"]}
    training = sections["training"] | micro_batch(preset, nodes * ranks_per_node)
    return Facts(
        model=from_dict(ModelConfig, model, preset.origin),
        parallelism=parallelism_of(preset),
        training=from_dict(TrainingConfig, training, preset.origin),
        optimizer=from_dict(OptimizerConfig, sections["optimizer"], preset.origin),
        data=BlendConfig(mock=True),
        world=World(path="slurm.train.nodes", count=nodes, ranks_each=ranks_per_node),
        gpus_per_node=ranks_per_node,
        device_memory_gib=node_type.gpu_memory_gib,
    )
