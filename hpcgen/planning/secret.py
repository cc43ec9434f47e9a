"""What a secret looks like: the names of variables that hold one, and values that are one whatever their name."""

from __future__ import annotations

import re

SECRET = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?|PRIVATE_KEY|ACCESS_KEY)(_|$)", re.IGNORECASE
)
"""Names of secrets; TOKENIZERS_PARALLELISM is none."""

SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|glpat-[\w-]{20,}|sk-[A-Za-z0-9_-]{30,}|AKIA[A-Z0-9]{16}"
    r"|xox[abp]-[\w-]{10,}|nvapi-[\w-]{20,})\b|://[^\s/:@$]+:[^\s/@$]+@"
)
"""Tokens of Hugging Face, GitHub, GitLab, OpenAI, AWS, Slack and NVIDIA by their prefixes; a password in a URL."""
