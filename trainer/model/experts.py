"""Mixtures of experts: Megatron-Core's MoE layers with a router that counts and scales in the same way in every layout.

Auxiliary losses. A step sums the gradients of all tokens and divides them by the number of tokens of the global batch.
So a loss that is a mean over the tokens of a microbatch must be multiplied by their number. Core 0.16 multiplies by the
tokens on one rank, or of one sequence. Then the loss is weaker by TP x CP, or by micro_batch_size. Core 0.19 is
right. The router here computes the factor itself, so that all versions and layouts train alike.

Statistics. Each router counts the tokens of its experts and adds up its losses on the GPU. `take_statistics` collects
them once per step; the all-reduce that ends the step sums them over the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear, scatter_to_sequence_parallel_region
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import unwrap_model

from trainer.contract.config import BlendConfig, ModelConfig
from trainer.contract.model.experts import moe_layer_pattern
from trainer.data.microbatch import MicroBatch
from trainer.model.kernels import Kernels

LOSSES = 3
"""Number of columns after the experts in the statistics: the load-balancing loss, the z-loss and its tokens."""

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # Core 0.16 reads this name even if Transformer Engine is not installed


class Router(TopKRouter):
    """Core's router, with auxiliary losses of the configured strength, and with statistics."""

    statistics: torch.Tensor | None = None
    """Tokens of each expert, sum of the load-balancing losses, sum of the squared logits of the z-loss, and number of
    tokens of the z-loss, in fp64.

    Not a buffer, since the bf16 wrapper would round it.
    """

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of each token of `logits` [s, b, experts] and count them.

        The losses and the biases ignore the tokens of `padding_mask` [s, b].
        """
        probs, routing_map = super().routing(logits, padding_mask=padding_mask)
        if self._has_gradients():
            is_padded = self.config.moe_pad_expert_input_to_capacity
            chosen = probs.detach() > 0 if is_padded else routing_map  # padding has a weight of zero
            tokens = chosen.sum(0)
            self._statistics(logits)[:-LOSSES].add_(tokens)
            if self.local_tokens_per_expert is not None:
                if padding_mask is not None:
                    tokens = (chosen & ~padding_mask.reshape(-1, 1)).sum(0)
                self.local_tokens_per_expert += tokens
        return probs, routing_map

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Leave the counting to `routing`. Core also counts padding, with which all experts have the same load."""

    def _maintain_float32_expert_bias(self) -> None:
        # Core restores the precision of the biases, but not of the counts. bf16 rounds counts above 256.
        super()._maintain_float32_expert_bias()
        if self.local_tokens_per_expert is not None:
            self.local_tokens_per_expert.data = self.local_tokens_per_expert.float()

    def attach_and_log_load_balancing_loss(
        self, activation: torch.Tensor, aux_loss_coeff: float, aux_loss: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Add this rank's part of the mean loss of a microbatch to what `activation` [tokens, ...] differentiates."""
        self._statistics(activation)[-LOSSES].add_(aux_loss.detach() / aux_loss_coeff)
        tokens = len(activation) * self.tp_cp_group.size()
        scaled: torch.Tensor = MoEAuxLossAutoScaler.apply(activation, aux_loss * tokens)
        return scaled

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Add the load-balancing loss of a microbatch."""
        if with_padding_mask:
            return self._balance("aux_loss", probs, scores_for_aux_loss, routing_map, groups=1)
        return super()._apply_aux_loss(probs, scores_for_aux_loss, routing_map)

    def _apply_seq_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Add the mean of the load-balancing losses of the samples of a microbatch."""
        if with_padding_mask:
            return self._balance("seq_aux_loss", probs, scores_for_aux_loss, routing_map, groups=bsz)
        return super()._apply_seq_aux_loss(probs, scores_for_aux_loss, routing_map, seq_length, bsz)

    def _balance(
        self, name: str, probs: torch.Tensor, scores: torch.Tensor, routing_map: torch.Tensor, *, groups: int
    ) -> torch.Tensor:
        """Add the losses of `groups` of tokens, whose rows alternate, each times the number of its tokens.

        A group of T tokens, of which c_e chose expert e with the mean score P_e, has the loss E / (k T) sum_e c_e P_e
        (Switch Transformer, arXiv 2101.03961, equation 4). Core would divide by zero if all tokens of a group are
        masked, and takes the mean number of tokens for that of each sample. `scores` and `routing_map`
        [tokens, experts] are zero for masked tokens.
        """
        coefficient = self.get_aux_loss_coeff(name)
        if coefficient == 0:
            return probs
        counts = routing_map.view(-1, groups, routing_map.shape[-1]).sum(0, dtype=torch.float32)
        if self.tp_cp_group.size() > 1:
            torch.distributed.all_reduce(counts, group=self.tp_cp_group)
        tokens = (counts.sum(-1) / self.topk).clamp(min=1)
        chosen = (scores.view(-1, groups, scores.shape[-1]).sum(0) * counts).sum(-1)
        losses = self.config.num_moe_experts / self.topk * chosen / tokens  # of all tokens of each group
        self._statistics(probs)[-LOSSES].add_((losses.detach() / tokens).mean())
        scaled: torch.Tensor = MoEAuxLossAutoScaler.apply(probs, losses.sum() * coefficient)
        return scaled

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Add the z-loss of ST-MoE (arXiv 2202.08906, equation 5), as a sum over tokens, to what is differentiated."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not self._has_gradients():
            return logits
        squares = torch.logsumexp(logits, dim=-1).square()
        if padding_mask is not None:
            squares = squares * ~padding_mask
        z_loss = squares.sum()
        statistics = self._statistics(logits)
        statistics[-2].add_(z_loss.detach())
        statistics[-1].add_(len(logits) if padding_mask is None else (~padding_mask).sum())
        scaled: torch.Tensor = MoEAuxLossAutoScaler.apply(logits, z_loss * coefficient)
        return scaled

    def _has_gradients(self) -> bool:
        # False in evaluations, and in the first pass of recomputed layers, so each microbatch counts once.
        return self.training and torch.is_grad_enabled()

    def _statistics(self, like: torch.Tensor) -> torch.Tensor:
        if self.statistics is None:
            columns = self.config.num_moe_experts + LOSSES
            self.statistics = torch.zeros(columns, dtype=torch.float64, device=like.device)
        return self.statistics


def needs_mask(chunk: torch.nn.Module, data: BlendConfig) -> bool:
    """True if the routers of a wrapped `chunk` must know which tokens are learned.

    A step divides by the number of learned tokens, and an auxiliary loss is multiplied by the number of its tokens.
    """
    return data.masks_tokens and unwrap_model(chunk).config.num_moe_experts is not None


def arguments(chunk: torch.nn.Module, batch: MicroBatch) -> dict[str, Any]:
    """Arguments of the forward pass of a wrapped `chunk` that needs a mask: tokens that experts are not balanced over.

    These are all tokens that are not learned. Core divides the mask over tensor-parallel ranks only in the first chunk.
    """
    model = unwrap_model(chunk)
    mask = batch.loss_mask == 0
    if model.config.sequence_parallel and not model.pre_process:
        mask = scatter_to_sequence_parallel_region(mask.t().contiguous()).t().contiguous()
    return {"padding_mask": mask}


def fuses_permutation(dispatcher: str, kernels: Kernels) -> bool:
    """True if Transformer Engine sorts the tokens by expert, which it can from version 2.1.

    It stops with an AssertionError if there are no tokens, as on a rank whose experts no token chooses. With alltoall,
    a rank sorts its own tokens, of which there are some. With allgather, it sorts those of its experts.
    """
    has_kernel = getattr(moe_utils, "fused_permute_with_probs", None) is not None
    return kernels.transformer_engine is not None and has_kernel and dispatcher == "alltoall"


def use_router(layer: ModuleSpec) -> None:
    """Make the MoE layer of a transformer layer's spec use `Router`."""
    mlp = layer.submodules.mlp
    # Core 0.19 has a partial function in place of a spec.
    submodules = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    submodules.router = Router


def store_as_transformer_engine(layer: ModuleSpec) -> None:
    """Give the norm before the MoE layer of a spec of torch's kernels the name that Transformer Engine's has.

    Core stores it as a part of the dense MLP's first matrix, which an MoE layer does not have.
    """
    names = layer.submodules.sharded_state_dict_keys_map
    layer.submodules.sharded_state_dict_keys_map = {
        name: stored for name, stored in names.items() if not name.startswith("pre_mlp_layernorm")
    }


def correct_ranks(chunk: torch.nn.Module, *, etp: int, tp: int) -> None:
    """Correct over which ranks Core adds up outputs, gradients and the gradient norm of experts.

    - Core 0.16 only separates the gradients of experts from other gradients if EP > 1. With EP = 1 and ETP different
      from TP, it would reduce them over ranks with other tokens or other shards.
    - With sequence parallelism, Core adds up the gradients of the second biases over the tensor-parallel ranks. These
      have other experts, or have already been added up.
    - For Core 0.16's norm, a parameter that is not divided is the same on all tensor-parallel ranks.
    - With EP = ETP = 1, Core adds up outputs over one rank. torch refuses to add a bias to this result in place.
    """
    for layer in chunk.modules():
        if not isinstance(layer, MoELayer):
            continue
        for parameter in layer.experts.parameters():
            parameter.sequence_parallel, parameter.tensor_model_parallel = False, True
            if etp != tp:
                parameter.allreduce = False
        for module in layer.experts.modules():
            if isinstance(module, RowParallelLinear):
                module.explicit_expert_comm = True


def routers(model: Sequence[torch.nn.Module]) -> tuple[Router, ...]:
    """The routers on this rank."""
    found = []
    for chunk in model:
        for name, module in chunk.named_modules():
            if isinstance(module, Router):
                module.is_mtp_layer = "mtp." in name  # Core 0.16 does not pass this to its routers
                found.append(module)
    return tuple(found)


def take_statistics(routers: Sequence[Router], config: ModelConfig, device: torch.device) -> torch.Tensor:
    """Return this rank's statistics since the last call, [MoE layers, experts + LOSSES] in fp64, and reset them.

    Layers on other ranks are zero. The sum over all ranks covers the global batch. Layers that predict further tokens
    (MTP) are left out. Empty for a dense model.
    """
    rows = {layer: row for row, layer in enumerate(moe_layers(config))}
    columns = (config.num_moe_experts or 0) + LOSSES
    statistics = torch.zeros(len(rows), columns, dtype=torch.float64, device=device)
    for router in routers:
        if router.statistics is not None and not router.is_mtp_layer:
            statistics[rows[router.layer_number - 1]].add_(router.statistics)
            router.statistics.zero_()
    return statistics


def moe_layers(config: ModelConfig) -> list[int]:
    """Numbers of the MoE layers, from 0."""
    return [layer for layer, has_experts in enumerate(moe_layer_pattern(config)) if has_experts]


def expert_biases(routers: Sequence[Router]) -> list[torch.Tensor]:
    """The biases of experts that balance the load without a loss."""
    return [router.expert_bias for router in routers if router.expert_bias is not None]


def frozen_biases(routers: Sequence[Router]) -> list[torch.Tensor]:
    """The biases of experts whose router is frozen. Core updates them like all others."""
    return expert_biases([router for router in routers if not router.weight.requires_grad])
