"""Rules about recording layers as CUDA graphs. The sources are files of megatron/core/transformer."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.planning.rules.facts import Facts, Rule, Violation

KEY = "training.cuda_graph_impl"


def cuda_graphs_need_transformer_engine(facts: Facts) -> Iterator[Violation]:
    """cuda_graph_impl = transformer_engine needs a GPU and its layers (cuda_graphs.py, TECudaGraphHelper)."""
    if facts.training.cuda_graph_impl == "none":
        return
    if facts.device != "cuda":
        yield Violation(path=KEY, reason="needs GPUs, and the cluster's nodes have none", candidates=["none"])
    elif facts.training.transformer_impl == "torch":
        yield Violation(
            path="training.transformer_impl",
            reason="has no layers that can be recorded, which training.cuda_graph_impl asks for",
            candidates=["transformer_engine", None],
            advice=f"{KEY}: none",
        )


def cuda_graphs_are_of_bf16(facts: Facts) -> Iterator[Violation]:
    """What a graph is recorded with is bf16 (module.py, get_layer_static_inputs)."""
    if facts.training.cuda_graph_impl != "none" and facts.training.precision != "bf16":
        yield Violation(
            path="training.precision",
            reason="cannot be recorded, which training.cuda_graph_impl asks for",
            candidates=["bf16"],
            advice=f"{KEY}: none",
        )


def cuda_graphs_draw_nothing(facts: Facts) -> Iterator[Violation]:
    """No dropout (ours): each step seeds its generators anew, and a graph would go on with its own."""
    if facts.training.cuda_graph_impl == "none":
        return
    for key in ("attention_dropout", "hidden_dropout"):
        if getattr(facts.model, key) > 0:
            yield Violation(
                path=f"model.{key}",
                depends_on=("training",),
                reason="would be drawn outside of the seeds of the run in layers that "
                "training.cuda_graph_impl records",
                candidates=[0.0],
                advice=f"{KEY}: none",
            )


def cuda_graphs_recompute_no_layer(facts: Facts) -> Iterator[Violation]:
    """Whole layers are not recomputed (transformer_config.py, __post_init__)."""
    if facts.training.cuda_graph_impl != "none" and facts.training.recompute_granularity == "full":
        yield Violation(
            path=KEY,
            reason="records layers that training.recompute_granularity = full would run again",
            candidates=["none"],
            advice="recompute_granularity: selective",
        )


def cuda_graphs_of_a_pipeline_keep_their_batch(facts: Facts) -> Iterator[Violation]:
    """A stage has a graph for each micro-batch (cuda_graphs.py, _get_cuda_graph_input_data): no ramp-up."""
    is_pipeline = facts.parallelism.pipeline_model_parallel_size > 1
    if facts.training.cuda_graph_impl != "none" and is_pipeline and facts.training.rampup_batch_size:
        yield Violation(
            path=KEY,
            depends_on=("parallelism",),
            reason="records one number of micro-batches of a pipeline, and training.rampup_batch_size changes it",
            candidates=["none"],
            advice="rampup_batch_size: null",
        )


RULES: tuple[Rule, ...] = (
    cuda_graphs_need_transformer_engine,
    cuda_graphs_are_of_bf16,
    cuda_graphs_draw_nothing,
    cuda_graphs_recompute_no_layer,
    cuda_graphs_of_a_pipeline_keep_their_batch,
)
