"""Rules for CUDA graphs of transformer layers. The sources are files of megatron/core/transformer."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.attention import attention_of
from trainer.contract.problem import Problem, Setting
from trainer.contract.rules.facts import Facts, Rule

KEY = "training.cuda_graph_impl"


def cuda_graphs_need_transformer_engine(facts: Facts) -> Iterator[Problem]:
    """cuda_graph_impl = transformer_engine needs GPUs and TE's layers (cuda_graphs.py, TECudaGraphHelper)."""
    if facts.training.cuda_graph_impl == "none":
        return
    if facts.device != "cuda":
        yield Problem(path=KEY, reason=f"requires GPUs, but {facts.why_no_gpus}", candidates=["none"])
    elif facts.training.transformer_impl == "torch":
        yield Problem(
            path="training.transformer_impl",
            reason=f"does not support {KEY} = {facts.training.cuda_graph_impl}",
            candidates=["transformer_engine", None],
            settings=(Setting(KEY, "none"),),
            about=("training.cuda_graph_impl",),
        )


def cuda_graphs_need_bf16(facts: Facts) -> Iterator[Problem]:
    """The static inputs of a graph are bf16 (module.py, get_layer_static_inputs)."""
    if facts.training.cuda_graph_impl != "none" and facts.training.precision != "bf16":
        yield Problem(
            path="training.precision",
            reason=f"does not support {KEY} = {facts.training.cuda_graph_impl}",
            candidates=["bf16"],
            settings=(Setting(KEY, "none"),),
            about=("training.cuda_graph_impl",),
        )


def cuda_graphs_need_no_dropout(facts: Facts) -> Iterator[Problem]:
    """No dropout (hpcgen's rule: each step reseeds the generators, but a graph would keep its own generator state)."""
    if facts.training.cuda_graph_impl == "none":
        return
    for key in ("attention_dropout", "hidden_dropout"):
        if getattr(facts.model, key) > 0:
            yield Problem(
                path=f"model.{key}",
                reason=f"would not follow the run's seed with {KEY} = {facts.training.cuda_graph_impl}",
                candidates=[0.0],
                settings=(Setting(KEY, "none"),),
                about=("training.cuda_graph_impl",),
            )


def cuda_graphs_need_no_full_recompute(facts: Facts) -> Iterator[Problem]:
    """No full recomputation (transformer_config.py, __post_init__)."""
    if facts.training.cuda_graph_impl != "none" and facts.training.recompute_granularity == "full":
        yield Problem(
            path=KEY,
            reason="does not support training.recompute_granularity = full",
            candidates=["none"],
            settings=(Setting("training.recompute_granularity", "selective"),),
            about=("training.recompute_granularity",),
        )


def cuda_graphs_in_pipelines_need_constant_batch(facts: Facts) -> Iterator[Problem]:
    """No ramp-up, since a stage has a graph per microbatch (cuda_graphs.py, _get_cuda_graph_input_data)."""
    is_pipeline = facts.parallelism.pipeline_model_parallel_size > 1
    if facts.training.cuda_graph_impl != "none" and is_pipeline and facts.training.rampup_batch_size:
        yield Problem(
            path=KEY,
            reason="requires a fixed number of microbatches in a pipeline, but training.rampup_batch_size changes it",
            candidates=["none"],
            settings=(Setting("training.rampup_batch_size", None),),
            about=("training.rampup_batch_size",),
        )


def cuda_graphs_need_tested_layers(facts: Facts) -> Iterator[Problem]:
    """No graphs with some kinds of attention or with MTP (hpcgen's rule: losses with and without graphs were not
    compared)."""
    if facts.training.cuda_graph_impl == "none":
        return
    attention = attention_of(facts.model)
    for key, is_used in (
        (attention.key, not attention.has_cuda_graphs),
        ("mtp_num_layers", facts.model.mtp_num_layers is not None),
    ):
        if is_used:
            yield Problem(
                path=KEY,
                reason=f"is not tested with model.{key}",
                candidates=["none"],
                about=(f"model.{key}",),
            )
            return


def cuda_graphs_need_dense_layers(facts: Facts) -> Iterator[Problem]:
    """No CUDA graphs of layers with experts (transformer_config.py, __post_init__).

    Core records an MoE layer only if it drops and pads, and the trainer records complete layers.
    """
    if facts.model.num_moe_experts is not None and facts.training.cuda_graph_impl != "none":
        yield Problem(
            path=KEY,
            reason="cannot record layers with experts, because the number of their tokens changes",
            candidates=["none"],
        )


def cuda_graphs_need_one_document(facts: Facts) -> Iterator[Problem]:
    """No separate documents (hpcgen's rule: graphs have fixed shapes, but the number of documents varies)."""
    if facts.training.cuda_graph_impl != "none" and facts.data.separates_documents:
        key = facts.data.separating_key
        yield Problem(
            path=KEY,
            reason=f"has fixed shapes, but with {key} = true the number of documents varies",
            candidates=["none"],
            settings=() if facts.data.sft else (Setting(key, False),),
            about=(key,),
        )


RULES: tuple[Rule, ...] = (
    cuda_graphs_need_transformer_engine,
    cuda_graphs_need_bf16,
    cuda_graphs_need_no_dropout,
    cuda_graphs_need_no_full_recompute,
    cuda_graphs_in_pipelines_need_constant_batch,
    cuda_graphs_need_tested_layers,
    cuda_graphs_need_dense_layers,
    cuda_graphs_need_one_document,
)

WARNINGS: tuple[Rule, ...] = ()

OF_MODEL: tuple[Rule, ...] = ()
