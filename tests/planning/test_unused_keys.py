"""Keys that only have an effect with another key: a run that sets one alone is answered."""

from __future__ import annotations

import pytest

from tests.planning.cases import MTP, ROPE, broken, errors
from trainer.contract.config import RopeScaling
from trainer.contract.rules import batch, data, experts, logging, model, multi_token, precision

FP16 = {"training__precision": "fp16"}


def yarn(**changes):
    scaling = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8192, **changes)
    return ROPE | {"model__rope_scaling": scaling}


REFUSED = {
    "the weight of MTP without MTP": (
        {"model__mtp_loss_scaling_factor": 0.3},
        "model.mtp_loss_scaling_factor",
        multi_token.mtp_weight_needs_mtp,
    ),
    "the base of rope without rope": (
        {"model__rotary_base": 500_000},
        "model.rotary_base",
        model.rotary_base_needs_rope,
    ),
    "half of YaRN's scales": (
        yarn(mscale=1.0),
        "model.rope_scaling.mscale",
        model.yarn_uses_its_scales,
    ),
    "a scale of YaRN that is zero": (
        yarn(mscale=0.0, mscale_all_dim=1.0),
        "model.rope_scaling.mscale",
        model.yarn_uses_its_scales,
    ),
    "YaRN's scales and what follows from them": (
        yarn(mscale=1.0, mscale_all_dim=0.7, attention_factor=1.1),
        "model.rope_scaling.mscale",
        model.yarn_uses_its_scales,
    ),
    "a balancing loss of zero": (
        {
            "model__num_moe_experts": 8,
            "model__add_bias_linear": False,
            "model__moe_router_load_balancing_type": "seq_aux_loss",
        },
        "model.moe_router_load_balancing_type",
        experts.balancing_loss_has_a_coefficient,
    ),
    "Transformer Engine's cross entropy in deterministic mode": (
        {"training__deterministic_mode": True, "training__cross_entropy_fusion_impl": "te"},
        "training.cross_entropy_fusion_impl",
        precision.cross_entropy_is_deterministic,
    ),
    "the window of a fixed loss scale": (
        FP16 | {"optimizer__loss_scale": 128.0, "optimizer__loss_scale_window": 100},
        "optimizer.loss_scale_window",
        precision.loss_scale_needs_fp16,
    ),
    "batches to skip without spikes": (
        {"training__loss_spike_factor": None, "training__skip_loss_spikes": 3},
        "training.skip_loss_spikes",
        batch.skipped_batches_have_spikes,
    ),
    "positions of documents with rope": (
        ROPE | {"data__reset_position_ids": True},
        "data.reset_position_ids",
        data.positions_are_learned,
    ),
    "ranks without a profile": (
        {"logging__profile_ranks": (0, 1)},
        "logging.profile_ranks",
        logging.profile_ends_after_its_start,
    ),
    "a team without a project": (
        {"logging__wandb_entity": "team"},
        "logging.wandb_entity",
        logging.names_in_wandb_need_project,
    ),
    "a port without figures": (
        {"logging__prometheus_port": 9400},
        "logging.prometheus_port",
        logging.figures_need_prometheus,
    ),
    "an address without a port": (
        {"logging__prometheus": True, "logging__prometheus_address": "0.0.0.0"},
        "logging.prometheus_address",
        logging.figures_need_prometheus,
    ),
}


@pytest.mark.parametrize(("changes", "path", "rule"), REFUSED.values(), ids=REFUSED)
def test_a_key_without_effect_is_answered(changes, path, rule):
    assert broken(**changes) == [(path, rule)]


ACCEPTED = {
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


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_a_key_with_an_effect_passes(changes):
    assert errors(**changes) == []
