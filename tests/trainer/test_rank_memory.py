"""The memory that the estimate counts for each pipeline stage, against what real ranks allocate in a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcgen.planning.memory import estimate_stage
from hpcgen.planning.memory.kernels import CUBLAS_WORKSPACE_BYTES
from hpcgen.planning.memory.parameters import stage_parameter_counts
from hpcgen.planning.memory.stages import microbatches_in_flight
from hpcgen.planning.setup import Setup
from tests.trainer.forked import run_ranks
from tests.trainer.runs import GPT, environment, free_port, gpt_config
from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.model.layout import Layout
from trainer.contract.optimizers.adamw import ADAMW
from trainer.contract.record import replaced

pytestmark = pytest.mark.process

DENSE = GPT | {
    "hidden_size": 192,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 640,
    "seq_length": 256,
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
LARGE_VOCABULARY = DENSE | {"num_layers": 2, "vocab_size": 20_000}
MTP = DENSE | {"mtp_num_layers": 1}
TIED_MTP = LARGE_VOCABULARY | {
    "seq_length": 32,
    "mtp_num_layers": 1,
    "untie_embeddings_and_output_weights": False,
}
"""A table that is larger than the logits."""
MOE = DENSE | {
    "swiglu": True,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 320,
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
}
"""Experts with equal loads, as the estimate assumes."""

WIDE_EXPERTS = MOE | {"num_layers": 2, "moe_ffn_hidden_size": 1280}
DROPLESS = {key: value for key, value in MOE.items() if "capacity" not in key} | {"moe_router_topk": 4}
SMALL_EXPERTS = MOE | {
    "num_moe_experts": 16,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 192,
}
MLA = DENSE | {
    "num_query_groups": None,
    "multi_latent_attention": True,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 40,
    "qk_layernorm": True,
}
PP2, PP3, PP4 = ({"pipeline_model_parallel_size": size} for size in (2, 3, 4))
LAYOUT = "pipeline_model_parallel_layout"
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
INSTANCES = {"num_distributed_optimizer_instances": 2}
TP2, TP4 = ({"tensor_model_parallel_size": size, "sequence_parallel": True} for size in (2, 4))
EP2 = {"expert_model_parallel_size": 2}
EP4 = {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = UNIFORM | {"recompute_method": "block"}
SMALL_BATCH = {"micro_batch_size": 1, "global_batch_size": 2}
BATCH = {"micro_batch_size": 4, "global_batch_size": 8}
"""For short sequences, next to which what a step takes besides activations is small."""
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "layout", "world_size", "training", "tolerance"),
    [
        pytest.param(DENSE, {}, 1, {}, 0.02, id="one", marks=SLOW),
        pytest.param(LARGE_VOCABULARY, {}, 1, UNIFORM, 0.02, id="one-tied-full", marks=SLOW),
        pytest.param(DENSE, INSTANCES, 2, {}, 0.02, id="DP2-instances", marks=SLOW),
        pytest.param(
            MOE, INSTANCES | {"expert_model_parallel_size": 2}, 4, {}, 0.15, id="EP2-instances", marks=SLOW
        ),
        pytest.param(DENSE, PP4, 4, {}, 0.04, id="PP4", marks=SLOW),
        pytest.param(
            DENSE, PP2 | {"num_layers_in_first_pipeline_stage": 3}, 2, {}, 0.04, id="PP2-uneven", marks=SLOW
        ),
        pytest.param(MTP, PP2, 2, {}, 0.04, id="PP2-MTP", marks=SLOW),
        pytest.param(MTP, PP3 | {LAYOUT: "Ett|ttm|L"}, 3, {}, 0.04, id="PP3-MTP", marks=SLOW),
        pytest.param(MTP, PP3 | {LAYOUT: "Et*4|m|L"}, 3, {}, 0.04, id="PP3-MTP-alone", marks=SLOW),
        pytest.param(
            TIED_MTP | {"mtp_num_layers": 2},
            PP3 | {LAYOUT: "Et|tmm|L"},
            3,
            {"micro_batch_size": 1},
            0.04,
            id="PP3-tied-MTP",
            marks=SLOW,
        ),
        pytest.param(
            MTP,
            PP3 | VPP2 | {LAYOUT: "E|t|t|t|tm|L"},
            3,
            {"global_batch_size": 24},
            0.06,
            id="PP3xVPP2-MTP",
            marks=SLOW,
        ),
        pytest.param(TIED_MTP, PP2, 2, {"micro_batch_size": 1}, 0.04, id="PP2-tied-MTP", marks=SLOW),
        pytest.param(DENSE, PP2 | VPP2, 2, SMALL_BATCH, 0.04, id="VPP2", marks=SLOW),
        pytest.param(DENSE | {"num_layers": 8}, PP4 | VPP2, 4, {}, 0.06, id="PP4xVPP2", marks=SLOW),
        pytest.param(LARGE_VOCABULARY, PP2, 2, UNIFORM | SMALL_BATCH, 0.04, id="PP2-embedding"),
        pytest.param(DENSE, PP2, 2, UNIFORM, 0.06, id="PP2-full", marks=SLOW),
        pytest.param(DENSE, PP2, 2, BLOCK, 0.06, id="PP2-block", marks=SLOW),
        # Threads of gloo may release what they exchange later than NCCL's streams do.
        pytest.param(MLA, TP2, 2, {}, 0.1, id="TP2-MLA", marks=SLOW),
        pytest.param(DENSE, TP2, 2, {}, 0.12, id="TP2", marks=SLOW),
        pytest.param(DENSE | {"num_layers": 2}, {"context_parallel_size": 2}, 2, SMALL_BATCH, 0.1, id="CP2"),
        pytest.param(
            MOE | {"num_layers": 2}, {"expert_model_parallel_size": 2}, 2, SMALL_BATCH, 0.1, id="EP2"
        ),
        pytest.param(
            SMALL_EXPERTS, {"expert_model_parallel_size": 2}, 2, {}, 0.15, id="EP2-small", marks=SLOW
        ),
        pytest.param(MOE, TP2, 2, {}, 0.12, id="TP2-ETP2", marks=SLOW),
    ],
)
def test_each_rank_allocates_what_the_estimate_counts(
    model: dict[str, Any],
    layout: dict[str, Any],
    world_size: int,
    training: dict[str, Any],
    tolerance: float,
    tmp_path: Path,
) -> None:
    document = gpt_config("none", tmp_path / "run", model)
    document |= {"world_size": world_size, "parallelism": layout}
    document["training"] |= {"micro_batch_size": 4, "global_batch_size": 4 * world_size}
    document["training"]["transformer_impl"] = "torch"
    document["training"] |= training
    setup = setup_of(document)
    for rank in ranks_of(document, tmp_path / "config.json"):
        counts = stage_parameter_counts(setup, rank["stage"])
        assert counts.tables + counts.layers + counts.experts == rank["parameters"]
        found = estimate_stage(setup, rank["stage"])
        # The buffers of weights and gradients have padding, and share it among the ranks.
        assert found.parameter_bytes == pytest.approx(rank["parameter_bytes"], rel=0.01)
        assert found.kernel_bytes == 2 * CUBLAS_WORKSPACE_BYTES + rank["gathered_bytes"]
        activations = found.activation_bytes + outputs_kept_on_cpus(setup, rank["stage"])
        assert activations == pytest.approx(rank["activation_bytes"], rel=tolerance)


@pytest.mark.parametrize(
    ("model", "layout", "freeze"),
    [
        (DENSE, PP2, ["decoder.layers.[01].*", "*.linear_fc1.*", "decoder.final*"]),
        pytest.param(MOE, {"expert_model_parallel_size": 2}, ["*.experts.*", "embedding.*"], marks=SLOW),
        pytest.param(TIED_MTP, PP2, ["embedding.*", "mtp.*"], marks=SLOW),
    ],
    ids=["PP2", "EP2", "MTP"],
)
def test_frozen_parameters_take_only_their_weights(
    model: dict[str, Any], layout: dict[str, Any], freeze: list[str], tmp_path: Path
) -> None:
    document = gpt_config("none", tmp_path / "run", model)
    document |= {"world_size": 2, "parallelism": layout}
    document["training"] |= BATCH | {"transformer_impl": "torch", "freeze": freeze}
    setup = setup_of(document)
    complete = replaced(setup, training=replaced(setup.training, freeze=()))
    for rank in ranks_of(document, tmp_path / "config.json"):
        found = estimate_stage(setup, rank["stage"])
        assert found.parameter_bytes == pytest.approx(rank["parameter_bytes"], rel=0.02)
        assert found.parameter_bytes < estimate_stage(complete, rank["stage"]).parameter_bytes
        assert found.activation_bytes >= 0.9 * rank["activation_bytes"]


@pytest.mark.parametrize(
    ("model", "layout", "targets", "most"),
    [
        (DENSE, PP2, None, 1.25),
        pytest.param(MOE | {"num_layers": 2}, EP2, None, 1.25, marks=SLOW),
        (MOE | {"num_layers": 2}, EP2, ["linear_qkv", "linear_proj"], 1.1),
    ],
    ids=["PP2", "experts", "only attention"],
)
def test_adapters_take_gradients_and_state_only_for_themselves(
    model: dict[str, Any], layout: dict[str, Any], targets: list[str] | None, most: float, tmp_path: Path
) -> None:
    """Linear layers without adapters keep no inputs."""
    document = gpt_config("none", tmp_path / "run", model)
    document |= {"world_size": 2, "parallelism": layout, "lora": {"rank": 8, "target_modules": targets}}
    document["training"] |= SMALL_BATCH | {"transformer_impl": "torch"}
    document["checkpoint"] = {"load": "none", "finetune": True}
    setup = setup_of(document)
    for rank in ranks_of(document, tmp_path / "config.json"):
        found = estimate_stage(setup, rank["stage"])
        assert found.parameter_bytes == pytest.approx(rank["parameter_bytes"], rel=0.02)
        assert 0.9 < found.activation_bytes / rank["activation_bytes"] < most


@pytest.mark.parametrize(
    ("model", "layout", "world_size", "training"),
    [
        pytest.param(
            DENSE,
            PP2 | TP2 | {"pipeline_model_parallel_layout": "E|ttttL"},
            4,
            {},
            id="embedding",
            marks=SLOW,
        ),
        pytest.param(
            DENSE,
            PP2 | VPP2 | {"pipeline_model_parallel_layout": "Ett|t|t|L"},
            2,
            BLOCK,
            id="short-chunk",
            marks=SLOW,
        ),
        pytest.param(DROPLESS, TP4, 4, UNIFORM, id="ETP4", marks=SLOW),
        # test_memory_test.py trains first stages alone; those of all ranks are measured above
        pytest.param(
            WIDE_EXPERTS,
            TP4 | EP4,
            4,
            {"micro_batch_size": 1, "global_batch_size": 4},
            id="wide-experts",
            marks=SLOW,
        ),
    ],
)
def test_the_first_stage_alone_allocates_what_the_estimate_counts(
    model: dict[str, Any], layout: dict[str, Any], world_size: int, training: dict[str, Any], tmp_path: Path
) -> None:
    """Sequence parallelism gathers the gradients of the embedding. A chunk of one layer recomputes it while the longer
    chunk of the stage keeps a layer that is not recomputed. ETP gathers tokens and scatters outputs. The gradient of an
    expert's weight is larger than its activations if it has few tokens.
    """
    document = gpt_config("none", tmp_path / "run", model)
    document |= {"world_size": world_size, "parallelism": layout}
    document["training"] |= {"micro_batch_size": 4, "global_batch_size": 16, "transformer_impl": "torch"}
    document["training"] |= training
    setup = setup_of(document)
    activations = estimate_stage(setup, 0).activation_bytes + outputs_kept_on_cpus(setup, 0)
    rank = rank_alone(document, tmp_path / "config.json", 0)
    assert activations == pytest.approx(rank["activation_bytes"], rel=0.05)


def outputs_kept_on_cpus(setup: Setup, stage: int) -> int:
    """Bytes of sent outputs, which an interleaved schedule only releases on GPUs (trainer/model/core_config.py)."""
    if setup.layout.virtual_pipeline_model_parallel_size == 1:
        return 0
    in_flight = max(sum(numbers) for _, numbers in microbatches_in_flight(setup.layout, stage))
    return int(in_flight * setup.sharded_hidden_bytes * setup.tokens)


def setup_of(document: dict[str, Any]) -> Setup:
    config = resolve(configuration.from_dict(TrainerConfig, document, "test"))
    layout = Layout.make(config.model, config.parallelism, config.training, config.world_size)
    assert layout is not None
    return Setup(config.model, config.parallelism, config.training, layout, ADAMW, lora=config.lora)


def ranks_of(document: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    path.write_text(json.dumps(document))
    size, port = document["world_size"], free_port()
    done = run_ranks(
        ["-m", "tests.trainer.rank_memory", str(path)],
        [environment(rank, size, port) for rank in range(size)],
    )
    for each in done:
        assert each.returncode == 0, each.stderr
    return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(size)]


def rank_alone(document: dict[str, Any], path: Path, rank: int) -> dict[str, Any]:
    """The figures of a rank without the other ranks."""
    path.write_text(json.dumps(document))
    subprocess.run(
        [sys.executable, "-m", "tests.trainer.rank_memory", str(path)],
        env=environment(rank, document["world_size"], "1") | {"ALONE": "1"},
        check=True,
    )
    found: dict[str, Any] = json.loads(Path(f"{path}.{rank}").read_text())
    return found
