"""Patterns that recognize secrets by the name or the value of a variable."""

from __future__ import annotations

import re

SECRET = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?|PRIVATE_KEY|ACCESS_KEY)(_|$)", re.IGNORECASE
)
"""Names of variables with secrets. Does not match TOKENIZERS_PARALLELISM."""

SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|glpat-[\w-]{20,}|sk-[A-Za-z0-9_-]{30,}|AKIA[A-Z0-9]{16}"
    r"|xox[abp]-[\w-]{10,}|nvapi-[\w-]{20,})\b|://[^\s/:@$]+:[^\s/@$]+@"
)
"""Token prefixes of Hugging Face, GitHub, GitLab, OpenAI, AWS, Slack and NVIDIA, and passwords in URLs."""
