"""Memory of what follows the layers on the last stage: the output layer with the loss, and MTP layers."""

from __future__ import annotations

from hpcgen.planning.frozen import frozen_shares
from hpcgen.planning.memory.parameters import table_parameter_count
from hpcgen.planning.setup import Setup


def loss_bytes(setup: Setup) -> int:
    """Bytes of the logits of a microbatch and what exists with them, at the most.

    These are the inputs of the final norm and of the output layer, and the logits with their gradients. MTP layers have
    all of them as well, but one set of gradients exists at a time. The most memory is in use in the backward pass of
    the cross entropy or of the output layer. The latter also has the gradients of its input and of its weight
    (LinearWithGradAccumulationAndAsyncCommunication in megatron/core/tensor_parallel/layers.py). The gradient of the
    weight from one output waits for that of the next, which begins without the logits of the former.
    """
    assert setup.model.padded_vocab_size
    outputs, tokens = 1 + (setup.model.mtp_num_layers or 0), setup.tokens
    logits = tokens * setup.model.padded_vocab_size / setup.layout.tensor_model_parallel_size
    kept, more = _bytes_per_logit(setup)
    of_weight = setup.value_bytes * table_parameter_count(setup) if not frozen_shares(setup).output else 0.0
    gradients = setup.hidden_bytes * tokens + of_weight
    added = max(more * logits, (setup.value_bytes - kept) * logits + gradients)
    if setup.training.metrics and setup.training.loss is None:
        added = max(added, (_bytes_for_metrics(setup) - kept) * logits)
    of_output = 2 * setup.sharded_hidden_bytes * tokens + kept * logits
    last = max(of_output, of_weight) if outputs > 1 else of_output
    return int((outputs - 1) * of_output + last + added)


def mtp_bytes(setup: Setup, layer: float) -> float:
    """Bytes per token that MTP layers keep, each with a `layer` of these bytes. 0 without MTP layers.

    Each keeps the inputs of two norms and of its projection, which is twice as wide. With uniform recomputation it
    keeps the embeddings instead (megatron/core/transformer/multi_token_prediction.py, _checkpointed_forward).
    """
    hidden = setup.sharded_hidden_bytes
    own = hidden if recomputes_mtp(setup) else layer + 4 * hidden
    return (setup.model.mtp_num_layers or 0) * own


def recomputes_mtp(setup: Setup) -> bool:
    """True if MTP layers are recomputed."""
    return setup.recomputes_layers and setup.training.recompute_method == "uniform"


def _bytes_for_metrics(setup: Setup) -> int:
    """Bytes per logit of a rank while metrics of the user are computed, which precedes the cross entropy.

    The complete logits are gathered, put into order and converted to fp32.
    """
    ranks = setup.layout.tensor_model_parallel_size
    gathered = 2 * setup.value_bytes * ranks if ranks > 1 else 0
    return setup.value_bytes + gathered + 4 * ranks


def _bytes_per_logit(setup: Setup) -> tuple[int, int]:
    """Bytes that the cross entropy keeps for each logit, and those that its backward pass adds.

    - Transformer Engine's replaces the logits by their gradient (its common/triton/cross_entropy.py).
    - Megatron-Core's keeps the softmax in fp32. The fused one copies it before it rounds the gradient to bf16, because
      torch.compile does not add to the softmax in place (megatron/core/fusions/fused_cross_entropy.py).
    - In fp16 and fp32, Megatron-Core's is not fused. In fp32, it replaces the logits.
    - A loss of the user gets complete logits in fp32. Most keep as much for the backward pass, such as a softmax, and
      add their gradients, in fp32 and rounded (trainer/model/user_losses.py). What others need is not known.
    """
    if setup.training.loss is not None:
        ranks = setup.layout.tensor_model_parallel_size
        return setup.value_bytes + 8 * ranks, setup.value_bytes + 4 * ranks
    if setup.training.precision == "fp32":
        return 4, 0
    kept, added = {"te": (2, 0), "fused": (4, 6), "unfused": (4, 2)}[setup.cross_entropy]
    return kept, added
