"""Distillation: the student learns the teacher's most likely tokens next to the labels (arXiv 1503.02531).

training: {loss: distillation.py:Distillation}

Copy this file next to the run file and set TEACHER. Student and teacher must have the same tokenizer. Each rank that
computes the loss loads the teacher, which must fit into its memory next to the student, and needs transformers.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from transformers import AutoModelForCausalLM

from trainer.contract.config import TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.data.documents import document_numbers
from trainer.data.microbatch import MicroBatch
from trainer.distributed.sequence import zigzag_part, zigzag_positions
from trainer.model import vocab_parallel

TEACHER = "/shared/models/teacher"
"""Directory of the teacher: config.json and its weights as safetensors."""
TOP_K = 64
"""Number of the teacher's most likely tokens."""
TEMPERATURE = 1.0
LEAST_REST = 1e-6
"""Smallest probability of all other tokens together: a difference from 1 is not more exact in fp32."""
WEIGHT = 0.5
"""Weight of the divergence from the teacher. The cross entropy of the labels has the rest."""


class Distillation:
    """(1 - WEIGHT) x cross entropy + WEIGHT x TEMPERATURE^2 x KL(teacher || student).

    KL compares the probabilities of the teacher's TOP_K tokens, and those of all other tokens together. It is 0 for a
    student that has the teacher's probabilities.
    """

    terms = ("cross_entropy", "teacher_kl")
    vocab_parallel = True

    def __init__(self, config: TrainerConfig) -> None:
        dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
        teacher = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=dtype, local_files_only=True)
        if teacher.config.vocab_size < TOP_K:
            raise TrainerError(
                f"{TEACHER} has {teacher.config.vocab_size} tokens, fewer than TOP_K = {TOP_K}"
            )
        self.teacher = teacher.to(config.device).eval().requires_grad_(False)
        self.vocab_size = config.model.vocab_size
        self.context = parallel_state.get_context_parallel_group()

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The losses [b, s] from this rank's part of the logits [b, s, v / TP]."""
        cross_entropy = vocab_parallel.cross_entropy(logits, labels)
        likely, tokens = self.likely_tokens(batch)
        logs = vocab_parallel.logits_of(logits, tokens) / TEMPERATURE
        logs = with_rest(logs - vocab_parallel.log_z(logits / TEMPERATURE).unsqueeze(-1))
        divergence = (likely.exp() * (likely - logs)).sum(-1) * TEMPERATURE**2
        losses = (1 - WEIGHT) * cross_entropy + WEIGHT * divergence
        return losses, {"cross_entropy": cross_entropy, "teacher_kl": divergence}

    @torch.no_grad()
    def likely_tokens(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The teacher's log-probabilities of its likely tokens and of all others together [b, s, TOP_K + 1], and the
        likely tokens [b, s, TOP_K]."""
        tokens = self.complete(batch.tokens)
        logits = self.teacher(
            tokens, attention_mask=self.attention_mask(batch, tokens), use_cache=False
        ).logits
        rank, size = self.context.rank(), self.context.size()
        own = zigzag_part(logits[..., : self.vocab_size].transpose(1, 2), rank, size).transpose(1, 2)
        found = (own.float() / TEMPERATURE).log_softmax(-1).topk(TOP_K)
        return with_rest(found.values), found.indices

    def complete(self, tokens: torch.Tensor) -> torch.Tensor:
        """The complete samples [b, s x CP], from the tokens [b, s] of all context-parallel ranks."""
        size = self.context.size()
        parts = [torch.empty_like(tokens) for _ in range(size)]
        torch.distributed.all_gather(parts, tokens.contiguous(), group=self.context)
        length = tokens.size(1) * size
        order = torch.cat([zigzag_positions(length, rank, size) for rank in range(size)])
        return torch.cat(parts, dim=1)[:, order.argsort().to(tokens.device)]

    @staticmethod
    def attention_mask(batch: MicroBatch, tokens: torch.Tensor) -> torch.Tensor | None:
        """True where a token sees another [b, 1, s, s]; None if samples are not separated into documents."""
        if batch.boundaries is None:
            return None
        numbers = document_numbers(batch.boundaries, len(tokens)).to(tokens.device)
        is_same = numbers.unsqueeze(2) == numbers.unsqueeze(1)
        return is_same.tril().unsqueeze(1)


def with_rest(logs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of some tokens [..., k], and of all other tokens together: [..., k + 1]."""
    rest = (1 - logs.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST).log()
    return torch.cat([logs, rest], dim=-1)
