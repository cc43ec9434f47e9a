"""Numbers of chats that a run reads of a pair, cuts and leaves out."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.contract.wording import counted

MIN_KEPT = 0.1
"""Smallest fraction of the training chats of a pair that may fit into samples. A smaller one is a mistake, not a
choice."""


@dataclass(frozen=True)
class Counts:
    """Chats of a pair, and their tokens in an epoch."""

    chats: int
    """All chats of the split."""
    cut: int
    """Chats that end after an answer in their middle."""
    too_long: int
    """Chats that are left out, since no answer ends within a sample."""
    unanswered: int
    """Chats that are left out, since they have nothing to learn."""
    tokens: int
    """Inputs of the chats that are read."""
    learned: int
    """Labels of these that count in the loss."""

    @property
    def read(self) -> int:
        """Chats that are read."""
        return self.chats - self.too_long - self.unanswered

    def problem(self, split: str, seq_length: int) -> str | None:
        """Why a split has too few chats of a pair; None if it has enough."""
        needed = MIN_KEPT * self.chats if split == "train" else 0
        if self.read and self.read >= needed:
            return None
        reasons = (
            (self.too_long, "have no answer that ends within a sample"),
            (self.unanswered, "have nothing to learn"),
        )
        left_out = " and ".join(f"{number:,} {reason}" for number, reason in reasons if number)
        return (
            f"only {self.read:,} of its {counted(self.chats, 'chat')} for {split} can be read with model.seq_length = "
            f"{seq_length}: {left_out}"
        )

    def left_out(self) -> list[str]:
        """The numbers of chats that are not read, or not to their end, with the reason of each."""
        reasons = (
            (self.cut, "cut after their last answer that fits"),
            (self.too_long, "left out, since no answer fits"),
            (self.unanswered, "left out, since nothing is learned"),
        )
        return [f"{number:,} {reason}" for number, reason in reasons if number]
