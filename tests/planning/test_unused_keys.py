"""Keys that only have an effect with another key: a run that sets one alone is answered."""

from __future__ import annotations

import pytest

from tests.planning.cases import MTP, ROPE, errors
from trainer.contract.config import RopeScaling

FP16 = {"training__precision": "fp16"}


def yarn(**changes):
    scaling = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8192, **changes)
    return ROPE | {"model__rope_scaling": scaling}


UNUSED = {
    "the weight of MTP without MTP": (
        {"model__mtp_loss_scaling_factor": 0.3},
        "model.mtp_loss_scaling_factor has no effect, because model.mtp_num_layers is null; use 0.1, or set "
        "mtp_num_layers",
    ),
    "the base of rope without rope": (
        {"model__rotary_base": 500_000},
        "model.rotary_base has no effect, because model.position_embedding_type is learned_absolute; use 10000, or "
        "set position_embedding_type to rope",
    ),
    "half of YaRN's scales": (
        yarn(mscale=1.0),
        "model.rope_scaling.mscale has no effect unless both mscale and mscale_all_dim are above 0; set both, or "
        "remove it",
    ),
    "a scale of YaRN that is zero": (
        yarn(mscale=0.0, mscale_all_dim=1.0),
        "model.rope_scaling.mscale has no effect unless both mscale and mscale_all_dim are above 0; set both, or "
        "remove it",
    ),
    "YaRN's scales and what follows from them": (
        yarn(mscale=1.0, mscale_all_dim=0.7, attention_factor=1.1),
        "model.rope_scaling.mscale has no effect, because model.rope_scaling.attention_factor is set; remove one of "
        "the two",
    ),
    "a balancing loss of zero": (
        {
            "model__num_moe_experts": 8,
            "model__add_bias_linear": False,
            "model__moe_router_load_balancing_type": "seq_aux_loss",
        },
        "model.moe_router_load_balancing_type has no effect, because model.moe_aux_loss_coeff is 0; use none, or set "
        "moe_aux_loss_coeff",
    ),
    "Transformer Engine's cross entropy in deterministic mode": (
        {"training__deterministic_mode": True, "training__cross_entropy_fusion_impl": "te"},
        "training.cross_entropy_fusion_impl has no effect, because training.deterministic_mode = true uses "
        "Megatron-Core's cross entropy; use null, or set deterministic_mode to false",
    ),
    "the window of a fixed loss scale": (
        FP16 | {"optimizer__loss_scale": 128.0, "optimizer__loss_scale_window": 100},
        "optimizer.loss_scale_window has no effect, because optimizer.loss_scale = 128 does not change; use 1000, or "
        "set loss_scale to null",
    ),
    "batches to skip without spikes": (
        {"training__loss_spike_factor": None, "training__skip_loss_spikes": 3},
        "training.skip_loss_spikes has no effect, because training.loss_spike_factor is null; use 0, or set "
        "loss_spike_factor",
    ),
    "positions of documents with rope": (
        ROPE | {"data__reset_position_ids": True},
        "data.reset_position_ids has no effect with model.position_embedding_type = rope and without "
        "data.reset_attention_mask; use false, or set reset_attention_mask to true",
    ),
    "ranks without a profile": (
        {"logging__profile_ranks": (0, 1)},
        "logging.profile_ranks has no effect, because logging.profile_step_start is null; use [0]",
    ),
    "a team without a project": (
        {"logging__wandb_entity": "team"},
        "logging.wandb_entity has no effect, because logging.wandb_project is null; use null, or set "
        "logging.wandb_project",
    ),
}


@pytest.mark.parametrize(("changes", "message"), UNUSED.values(), ids=UNUSED)
def test_a_key_without_effect_is_answered(changes, message):
    assert errors(**changes) == [message]


USED = {
    "MTP": MTP | {"model__mtp_loss_scaling_factor": 0.3},
    "rope": ROPE | {"model__rotary_base": 500_000},
    "YaRN's scales": yarn(mscale=1.0, mscale_all_dim=0.7),
    "an adaptive loss scale": FP16 | {"optimizer__loss_scale_window": 100},
    "separate documents with rope": ROPE
    | {"data__reset_position_ids": True, "data__reset_attention_mask": True},
    "documents with learned positions": {"data__reset_position_ids": True},
    "positions of a custom model": ROPE
    | {"data__reset_position_ids": True, "model__model_provider": "my.models:Model"},
    "a project": {"logging__wandb_project": "p", "logging__wandb_entity": "team"},
}


@pytest.mark.parametrize("changes", USED.values(), ids=USED)
def test_a_key_with_an_effect_passes(changes):
    assert errors(**changes) == []
