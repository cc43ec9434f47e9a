"""The settings that the memory of a device and the time of a step depend on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, TypeVar

from trainer.contract.attention.visibility import exchange
from trainer.contract.config import (
    LoraConfig,
    ModelConfig,
    ParallelismConfig,
    TrainerConfig,
    TrainingConfig,
)
from trainer.contract.config.training import RECOMPUTED_BY_DEFAULT, RecomputeModule
from trainer.contract.model.adapters import WITHOUT_ADAPTERS
from trainer.contract.model.layout import Layout
from trainer.contract.optimizers import optimizer_of
from trainer.contract.optimizers.kind import Optimizer
from trainer.contract.record import record
from trainer.contract.rules.facts import Facts

ValueT = TypeVar("ValueT")


def once_per_setup(function: Callable[[Setup], ValueT]) -> Callable[[Setup], ValueT]:
    """Keeps what `function` returns with the setup, which never changes.

    A cache of the function would hash the setup at each call, which takes longer than most of these functions.
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def kept(setup: Setup) -> ValueT:
        values = vars(setup)
        if name not in values:
            values[name] = function(setup)
        found: ValueT = values[name]
        return found

    return kept


@record
class Setup:
    """A resolved model, its layout, and how it is trained."""

    model: ModelConfig
    parallelism: ParallelismConfig
    training: TrainingConfig
    layout: Layout
    optimizer: Optimizer
    separates_documents: bool = False
    """True if tokens attend only to their document or chat."""
    lora: LoraConfig = WITHOUT_ADAPTERS
    gradient_bytes: int = 4
    """Size of an accumulated gradient. The trainer always accumulates in fp32; other programs may use bf16."""

    @classmethod
    def of(cls, trainer: TrainerConfig, layout: Layout) -> Setup:
        """The setup of a resolved training run."""
        return cls(
            trainer.model,
            trainer.parallelism,
            trainer.training,
            layout,
            optimizer_of(trainer.optimizer),
            separates_documents=trainer.data.separates_documents,
            lora=trainer.lora,
        )

    @classmethod
    def of_facts(cls, facts: Facts, layout: Layout) -> Setup:
        """The setup of a run with this layout."""
        return cls(
            facts.resolved_model,
            facts.parallelism,
            facts.training,
            layout,
            optimizer_of(facts.optimizer),
            separates_documents=facts.data.separates_documents,
            lora=facts.lora,
        )

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens of a microbatch on one device, between the layers."""
        return self.training.micro_batch_size * self.model.seq_length // self.layout.context_parallel_size

    @functools.cached_property
    def value_bytes(self) -> int:
        """Size of an activation."""
        return 4 if self.training.precision == "fp32" else 2

    @property
    def trains_weights(self) -> bool:
        """False if only adapters are trained."""
        return self.lora.rank is None

    @property
    def operand_bytes(self) -> int:
        """Size of a value in the input of a product of a dense layer, as the product keeps it."""
        return 1 if self.training.fp8 else self.value_bytes

    @property
    def uses_engine(self) -> bool:
        """True if Transformer Engine computes the layers. The estimate assumes that it is installed."""
        return self.training.transformer_impl != "torch"

    @property
    def accumulates_in_products(self) -> bool:
        """True if matrix products add weight gradients to the fp32 buffer (trainer/model/kernels.py)."""
        return self.training.precision != "fp32"

    @property
    def hidden_bytes(self) -> int:
        """A hidden state."""
        return self.value_bytes * self.model.hidden_size

    @functools.cached_property
    def sharded_hidden_bytes(self) -> float:
        """A hidden state between the layers, where sequence parallelism divides it."""
        return self.sharded(self.hidden_bytes)

    @property
    def sharded_operand_bytes(self) -> float:
        """A hidden state between the layers, as a product keeps it."""
        return self.sharded(self.operand_bytes * self.model.hidden_size)

    @property
    def gathered_hidden_bytes(self) -> int:
        """A hidden state that sequence parallelism gathers for a matrix product."""
        is_divided = self.parallelism.sequence_parallel and self.layout.tensor_model_parallel_size > 1
        return self.hidden_bytes if is_divided else 0

    def sharded(self, size: float) -> float:
        """`size` on one tensor-parallel rank, if only sequence parallelism divides it."""
        return size / self.layout.tensor_model_parallel_size if self.parallelism.sequence_parallel else size

    def recomputes(self, module: RecomputeModule) -> bool:
        """True if selective recomputation includes `module`."""
        if self.training.recompute_granularity != "selective":
            return False
        return module in (self.training.recompute_modules or RECOMPUTED_BY_DEFAULT)

    @property
    def recomputes_layers(self) -> bool:
        """True with full recomputation."""
        return self.training.recompute_granularity == "full"

    @property
    def groups_experts(self) -> bool:
        """True if the products of all experts of a device are computed together (trainer/model/kernels.py). torch's
        kernels compute them one after another."""
        chosen = self.parallelism.moe_grouped_gemm
        return self.uses_engine and (not self.model.add_bias_linear if chosen is None else chosen)

    @property
    def local_experts(self) -> int:
        """Number of routed experts on a device. The model must have some."""
        assert self.model.num_moe_experts
        return self.model.num_moe_experts // self.layout.expert_model_parallel_size

    @property
    def received_copies(self) -> float:
        """Copies of tokens that the experts of a device receive, per token of the sequence, with equal loads.

        A tensor-parallel rank sends its share of the tokens to moe_router_topk experts each. The ranks of an expert
        receive all its tokens (megatron/core/transformer/moe/token_dispatcher.py), and divide its width.
        """
        model, layout = self.model, self.layout
        copies: float = model.moe_router_topk
        if (capacity := model.moe_expert_capacity_factor) is not None:
            copies *= capacity if model.moe_pad_expert_input_to_capacity else min(1.0, capacity)
        return copies * layout.expert_tensor_parallel_size / layout.tensor_model_parallel_size

    @property
    def gathers_keys(self) -> bool:
        """True if the trainer gathers keys and values of context-parallel ranks itself: within documents, and with
        torch's kernels."""
        return self.separates_documents or not self.uses_engine

    @property
    def context_exchange(self) -> str:
        """How context-parallel ranks exchange keys and values."""
        return "all_gather" if self.gathers_keys else exchange(self.model, self.parallelism.cp_comm_type)

    @property
    def cross_entropy(self) -> Literal["te", "fused", "unfused"]:
        """Transformer Engine's cross entropy, or Megatron-Core's, fused or not (trainer/model/kernels.py)."""
        training = self.training
        is_bf16 = training.precision == "bf16"
        default = "te" if is_bf16 and self.uses_engine else "native"
        if training.deterministic_mode:
            return "unfused"
        if (training.cross_entropy_fusion_impl or default) == "te":
            return "te"
        return "fused" if is_bf16 else "unfused"
