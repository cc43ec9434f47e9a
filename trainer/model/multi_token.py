"""Multi-token prediction (MTP): layers after the last one, each of which predicts one token further ahead.

Megatron-Core adds their losses to the gradients, with the weight mtp_loss_scaling_factor. It logs them as means over
microbatches, which depend on the layout. `PredictingModel` provides sums and numbers of tokens instead.

Documents. Layer k combines token i with token i + k and predicts the next one. Core takes both from the sample, across
the ends of documents. If documents are separate, the loss counts only if token i + k is in the document of token i.
Such a loss involves no other document: the tokens before token i, which it attends to, have a token k further in the
document too.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from trainer.contract.config import ModelConfig, TrainerConfig
from trainer.contract.model.model_size import last_layer_has_experts
from trainer.data.documents import tokens_after
from trainer.data.microbatch import MicroBatch
from trainer.distributed.sequence import zigzag_part
from trainer.model import layers
from trainer.model.kernels import Kernels

DIVIDES_BY_TARGETS = hasattr(multi_token_prediction, "process_mtp_loss")
"""True if Core divides the losses of a layer by its own number of targets on this rank (since megatron-core 0.17).

Otherwise, they are divided by the tokens of the main loss (DeepSeek-V3, arXiv 2412.19437, equation 24).
"""


def block_spec(
    config: TrainerConfig,
    core: TransformerConfig,
    decoder: TransformerBlockSubmodules,
    vp_stage: int | None,
    kernels: Kernels,
) -> dict[str, Any]:
    """GPTModel's argument for the MTP layers. They copy the spec of the last layer, and are in the last chunk."""
    uses_engine = kernels.transformer_engine is not None
    if decoder.layer_specs:
        last = decoder.layer_specs[-1]
    else:
        with_experts = last_layer_has_experts(config.model)
        last = layers.layer_spec(config, core, with_experts, uses_engine=uses_engine)
    template = TransformerBlockSubmodules(layer_specs=[last], layer_norm=decoder.layer_norm)
    block = get_gpt_mtp_block_spec(core, template, use_transformer_engine=uses_engine, vp_stage=vp_stage)
    if block is not None and not uses_engine:
        for layer in block.layer_specs:
            parts = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = decoder.layer_norm
    return {"mtp_block_spec": block}


class PredictingModel(GPTModel):
    """A GPT whose forward pass keeps the losses of its MTP layers for `losses`."""

    _mask: torch.Tensor | None = None
    _num_tokens: torch.Tensor
    _tokens_after: torch.Tensor | None
    _losses: list[torch.Tensor]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        is_shared = self.share_embeddings_and_output_weights and not self.pre_process
        if is_shared and self.post_process and self.mtp_process:
            # The output layer multiplies by the copy of the embedding. Core refuses to save the matrix that it also
            # allocates, which nothing reads.
            self.output_layer.weight = None
            # The gradients of both uses are added up, as on a single stage (setup_embeddings_and_output_layer).
            self.embedding.word_embeddings.weight.zero_out_wgrad = True

    def forward(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        *args: Any,
        loss_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """GPTModel's forward pass. With labels, it needs the `loss_mask` [b, s].

        `attention_mask` is the boundaries of documents (`trainer.data.documents`), or None.
        """
        self._mask, self._losses = loss_mask, []
        if loss_mask is not None and self.post_process:
            self._num_tokens = loss_mask.sum()
            self._tokens_after = self._tokens_after_each(loss_mask, attention_mask)
        output: torch.Tensor = super().forward(
            input_ids, position_ids, attention_mask, *args, loss_mask=loss_mask, **kwargs
        )
        return output

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The losses [b, s]. Core calls this for each MTP layer in order, and then for the main loss."""
        if self._mask is None or len(self._losses) == 2 * self.config.mtp_num_layers:
            return self.main_loss(labels, logits)
        losses: torch.Tensor = super().compute_language_model_loss(labels, logits)
        self._mask, num_rolled = multi_token_prediction.roll_tensor(
            self._mask, shifts=-1, dims=-1, cp_group=self.cp_group
        )
        mask = self._mask
        if self._tokens_after is not None:
            is_in_document = self._tokens_after >= len(self._losses) // 2 + 1
            mask, losses = mask * is_in_document, losses * is_in_document
        self._losses += [(losses.detach().float() * mask).sum(), mask.sum()]
        # Core would multiply by the inverse, which differs between context-parallel ranks.
        return losses * (num_rolled / self._num_tokens.clamp(min=1)) if DIVIDES_BY_TARGETS else losses

    def main_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The losses [b, s] of the main output. `trainer.model.head` replaces it."""
        losses: torch.Tensor = super().compute_language_model_loss(labels, logits)
        return losses

    def _tokens_after_each(self, like: torch.Tensor, boundaries: torch.Tensor | None) -> torch.Tensor | None:
        """Number of tokens after each token of this rank in its document [b, s]; None if documents are not separate."""
        if boundaries is None:
            return None
        samples, length = like.shape
        rank, size = self.cp_group.rank(), self.cp_group.size()
        boundaries = boundaries.to(like.device, non_blocking=True)
        return zigzag_part(tokens_after(boundaries, samples, length * size), rank, size)

    def losses(self) -> list[torch.Tensor]:
        """The sum of losses and the number of tokens of each MTP layer in the last microbatch."""
        return self._losses


def names(model: ModelConfig) -> tuple[str, ...]:
    """Columns of metrics.jsonl for the losses of the MTP layers (`trainer.loss`)."""
    return tuple(f"mtp_{layer}_loss" for layer in range(1, 1 + (model.mtp_num_layers or 0)))


def sums(chunk: torch.nn.Module) -> list[torch.Tensor]:
    """The sum of losses and the number of tokens of each MTP layer of a wrapped `chunk` in the last microbatch."""
    model = unwrap_model(chunk)
    return model.losses() if isinstance(model, PredictingModel) else []


def arguments(chunk: torch.nn.Module, batch: MicroBatch) -> dict[str, Any]:
    """The loss mask, if the model in a wrapped `chunk` has MTP layers."""
    return {"loss_mask": batch.loss_mask} if isinstance(unwrap_model(chunk), PredictingModel) else {}
