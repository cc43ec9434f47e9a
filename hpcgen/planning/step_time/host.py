"""Time that the host needs to launch the kernels of a layer. A GPU that computes it in less time waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time.machine import Constant, Machine
from hpcgen.planning.step_time.measurements import Row
from hpcgen.planning.step_time.work import Passes, Seconds
from trainer.contract.model.adapters import targets
from trainer.contract.model.experts import moe_layer_pattern
from trainer.contract.model.model_size import last_layer_has_experts

FORWARD_SHARE = 0.4
"""Share of the forward pass in the launches of a layer. Recomputation launches it again."""
AFTER_TRANSFERS = Constant(
    1e-3,
    "the GPU waits 1 ms for the host in each pass of a pipeline without interleaving and CUDA graphs",
    "guessed: Megatron-Core synchronizes after each transfer (p2p_communication.py, batch_p2p_sync)",
)
"""With CUDA graphs, two stages of GPT 1.3B on H100s showed no such waits."""
AFTER_ROUTING = Constant(
    0.3e-3,
    "the GPU waits 0.3 ms for the host in each layer with experts",
    "guessed: the host reads the numbers of tokens (moe/token_dispatcher.py, _maybe_dtoh_and_synchronize)",
)
KERNEL_S = 0.09e-3
"""Time to launch a kernel: 75 kernels of a dense layer with tensor parallelism in 6.7 ms (docs/performance.md, "Several
GPUs")."""
ADAPTER_S = 18 * KERNEL_S
"""Time to launch the adapter of a linear layer: 14 to 24 kernels in both passes, without those of views."""
SEPARATE_EXPERT_S = 8 * KERNEL_S
"""Time to launch an expert whose products are not grouped: six products, and its activation function in both passes."""
EXPERT_ADAPTER_S = 4e-3
"""Time to launch the adapter of a linear layer of one expert. A step of Mixtral's width with adapters of experts took
815 ms on two H200s (docs/performance.md, "LoRA, frozen weights and averages"). With ADAPTER_S, it would be 520 ms."""
GENERAL = (
    {"layer": "dense", "tensor_parallel": False, "graphs": False, "precision": "bf16", "us": 4500.0},
    {"layer": "dense", "tensor_parallel": True, "graphs": False, "precision": "bf16", "us": 6700.0},
    {"layer": "dense", "tensor_parallel": False, "graphs": True, "precision": "bf16", "us": 500.0},
    {"layer": "dense", "tensor_parallel": True, "graphs": True, "precision": "bf16", "us": 1000.0},
    {"layer": "dense", "tensor_parallel": False, "graphs": False, "precision": "fp8", "us": 6400.0},
    {"layer": "experts", "tensor_parallel": False, "graphs": False, "precision": "bf16", "us": 12000.0},
    {"layer": "experts", "tensor_parallel": True, "graphs": False, "precision": "bf16", "us": 20000.0},
)
"""Rows for GPU models without measured ones: those of one host with H100s, rounded."""


class Launches(NamedTuple):
    """Properties of a layer that its launches depend on."""

    layer: Literal["dense", "experts"]
    tensor_parallel: bool
    graphs: bool
    precision: Literal["bf16", "fp8"]


def host_time(setup: Setup, machine: Machine, *, has_experts: bool) -> Constant:
    """Seconds per layer and microbatch, for both passes. A guess unless the cluster has measured such layers, because
    it is not a property of the GPU."""
    launches, layers = _launches(setup, has_experts=has_experts), layers_of(setup, has_experts=has_experts)
    table = machine.measurements.host if machine.measurements else ()
    plain = ", ".join(_parts(setup, has_experts=has_experts))
    # later rows replace others
    rows = sorted(
        (*GENERAL, *table), key=lambda row: (row.get("layers") == layers, row.get("layers") == plain)
    )
    seconds = _seconds(rows, launches)
    if not _is_measured(launches, layers, machine):
        seconds += _additional_time(setup, has_experts=has_experts)
    what = "a layer with experts" if has_experts else "a dense layer"
    meaning = f"the host launches {what} for one microbatch in {seconds * 1e3:.1f} ms"
    if _is_measured(launches, layers, machine):
        return Constant(seconds, meaning, "measured on this cluster", is_measured=True)
    if others := [row for row in _of_cluster(machine) if launches in _measured([row])]:
        source = f"measured on this cluster for other layers: {others[-1].get('layers', 'of a Llama')}"
    else:
        source = "measured on one machine with H100s; hosts differ by a factor of two"
        if has_experts:
            source += ", and more experts per GPU than the 8 measured, or latent attention, take longer"
    adapted = _adapted_linears(setup, has_experts=has_experts)
    if adapted.experts:
        source += "; with adapters of experts guessed from a single step on two H200s"
    elif adapted.layers:
        source += "; with adapters guessed from the number of their kernels"
    return Constant(seconds, meaning, source, by_tune=True)


def host_is_measured(setup: Setup, machine: Machine) -> bool:
    """True if the launches of all kinds of layers of a run were measured on the cluster."""
    return bool(_of_cluster(machine)) and all(
        _is_measured(_launches(setup, has_experts=kind), layers_of(setup, has_experts=kind), machine)
        for kind in set(moe_layer_pattern(setup.model))
    )


def outside_time(setup: Setup, machine: Machine) -> float:
    """Seconds per microbatch in which the host launches what is outside the layers, with its part of the update; 0 if
    the cluster has not measured it."""
    launches = _launches(setup, has_experts=last_layer_has_experts(setup.model))
    rows = [row for row in _of_cluster(machine) if launches in _measured([row])]
    return max((row.get("outside_us", 0.0) for row in rows[-1:]), default=0.0) * 1e-6


def host_rows(setup: Setup, machine: Machine) -> list[tuple[dict[str, Any], bool]]:
    """The rows for layers of a run that the cluster has not measured, without times, and whether they have experts."""
    found = []
    for has_experts in sorted(set(moe_layer_pattern(setup.model))):
        launches = _launches(setup, has_experts=has_experts)
        layers = layers_of(setup, has_experts=has_experts)
        if not _is_measured(launches, layers, machine):
            found.append(({**launches._asdict(), "layers": layers}, has_experts))
    return found


class Adapted(NamedTuple):
    """Mean number of linear layers with adapters in a layer."""

    layers: float
    """Outside of routed experts."""
    experts: float
    """In each routed expert."""


def layers_of(setup: Setup, *, has_experts: bool) -> str:
    """The parts of a layer on which its launches depend, in words."""
    return ", ".join((*_parts(setup, has_experts=has_experts), *_additions(setup, has_experts=has_experts)))


def _parts(setup: Setup, *, has_experts: bool) -> list[str]:
    """The parts of a layer of the model."""
    model = setup.model
    parts = {
        model.normalization: True,
        "norms of queries and keys": model.qk_layernorm,
        "latent attention": model.multi_latent_attention,
        model.position_embedding_type: model.position_embedding_type == "rope",
        "swiglu" if model.swiglu else str(model.activation_func): True,
        "biases": model.add_bias_linear,
        "biases of queries, keys and values": bool(model.add_qkv_bias) and not model.add_bias_linear,
        "dropout": model.hidden_dropout > 0,
    }
    if has_experts:
        parts[f"{setup.local_experts} experts"] = True
        parts["shared experts"] = model.moe_shared_expert_intermediate_size is not None
    return [name for name, is_there in parts.items() if is_there]


def _additions(setup: Setup, *, has_experts: bool) -> list[str]:
    """Parts that no general row has."""
    adapted = _adapted_linears(setup, has_experts=has_experts)
    parts = {
        "separate products": has_experts and not setup.groups_experts,
        f"{adapted.layers:.3g} adapters": adapted.layers > 0,
        f"{adapted.experts:.3g} adapters of each expert": adapted.experts > 0,
    }
    return [name for name, is_there in parts.items() if is_there]


def _additional_time(setup: Setup, *, has_experts: bool) -> float:
    """Seconds per layer and microbatch to launch adapters, and experts that are computed one after another."""
    adapted = _adapted_linears(setup, has_experts=has_experts)
    of_expert = EXPERT_ADAPTER_S * adapted.experts + (0 if setup.groups_experts else SEPARATE_EXPERT_S)
    return ADAPTER_S * adapted.layers + of_expert * (setup.local_experts if has_experts else 0)


def _adapted_linears(setup: Setup, *, has_experts: bool) -> Adapted:
    if setup.lora.rank is None:
        return Adapted(0.0, 0.0)
    pattern = moe_layer_pattern(setup.model)
    kinds = [
        bool(linear.num_experts)
        for linear in targets(setup.lora, setup.model)
        if pattern[linear.layer] is has_experts
    ]
    number = pattern.count(has_experts)
    return Adapted(kinds.count(False) / number, kinds.count(True) / number)


def _of_cluster(machine: Machine) -> tuple[Row, ...]:
    return machine.cluster.host if machine.cluster else ()


def _is_measured(launches: Launches, layers: str, machine: Machine) -> bool:
    rows = [row for row in _of_cluster(machine) if row.get("layers") == layers]
    return launches in _measured(rows)


def _launches(setup: Setup, *, has_experts: bool) -> Launches:
    return Launches(
        "experts" if has_experts else "dense",
        setup.layout.tensor_model_parallel_size > 1,
        setup.training.cuda_graph_impl != "none",
        "fp8" if setup.training.fp8 else "bf16",
    )


def _measured(rows: Iterable[Row]) -> dict[Launches, float]:
    """Seconds of the rows."""
    return {Launches(*(row[name] for name in Launches._fields)): row["us"] * 1e-6 for row in rows}


def _seconds(rows: Iterable[Row], launches: Launches) -> float:
    """The time of the row for `launches`, or what follows from others: experts are not recorded as CUDA graphs, and FP8
    launches as many casts in other layers as in dense ones."""
    measured = _measured(rows)
    if launches in measured:
        return measured[launches]
    if launches.precision == "fp8":
        dense = Launches("dense", tensor_parallel=False, graphs=False, precision="fp8")
        casts = measured[dense] - measured[dense._replace(precision="bf16")]
        return casts + _seconds(rows, launches._replace(precision="bf16"))
    dense = launches._replace(layer="dense")
    recorded = measured[dense._replace(graphs=False)] - measured[dense]
    return measured[launches._replace(graphs=False)] - recorded


def with_waits(passes: Passes, host: float) -> Passes:
    """`passes` of a layer with the time in which the GPU waits for the `host`, in proportion to the passes."""
    computed = passes.forward.total + passes.backward.total
    factor = max(0.0, host / computed - 1)
    return passes + Passes(
        Seconds(host=factor * passes.forward.total), Seconds(host=factor * passes.backward.total)
    )
