"""How the next token of a text is chosen."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.config.values import Count, NonNegative, NonNegativeFloat
from trainer.contract.problem import Problem
from trainer.contract.record import config_section


def text_problem(path: str, text: str) -> Problem | None:
    """The problem of a string at `path` that is not text and cannot be encoded; None if it is text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        reason = (
            f"has U+{code:04X} at character {error.start + 1}, which is half of a surrogate pair or a byte that is not "
            "UTF-8"
        )
        return Problem(path, reason, "remove it")
    return None


@config_section
class Choice:
    """How to continue a prompt."""

    max_new_tokens: Count = 128
    """Maximum number of new tokens per prompt."""
    temperature: NonNegativeFloat = 0.0
    """Divisor of the logits before a token is drawn. Default: 0, which always takes the most likely token."""
    top_k: Count | None = None
    """Draw only from this number of most likely tokens. Default: all."""
    top_p: NonNegativeFloat | None = None
    """Draw only from the most likely tokens whose probabilities add up to this number. Default: all."""
    repetition_penalty: NonNegativeFloat = 1.0
    """Factor by which tokens of the prompt and of the new text become less likely. Default: 1, which changes
    nothing."""
    stop: tuple[str, ...] = ()
    """Strings that end a text. They are not part of the text."""
    seed: NonNegative = 1234
    """Seed of the draws. Each prompt has its own sequence of draws, so its text does not depend on the batch size."""
    batch_size: Count = 32
    """Number of prompts that a replica of the model continues together."""

    def problems(self) -> Iterator[Problem]:
        """Yields the values that are out of range or have no effect. Their paths are the names of the keys."""
        for name, is_valid, valid in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or a positive number"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "greater than 0 and at most 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "a positive number"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("stop", all(self.stop), "strings that are not empty"),
        ):
            if not is_valid:
                yield self._problem(name, f"must be {valid}")
        for index, string in enumerate(self.stop):
            if problem := text_problem(f"stop[{index}]", string):
                yield problem
        for name in ("top_k", "top_p"):
            if getattr(self, name) is not None and self.temperature == 0:
                reason = "has no effect at temperature 0, which always takes the most likely token"
                yield self._problem(name, reason, f"set a temperature, such as 1.0, or remove {name}")

    def _problem(self, name: str, reason: str, hint: str = "") -> Problem:
        return Problem(name, reason, hint, subject=f"{name} = {getattr(self, name)!r}")
