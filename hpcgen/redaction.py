"""Secrets: how they look, and how to remove them from text that leaves the machine."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"

SECRET = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?|PRIVATE_KEY|ACCESS_KEY)(_|$)", re.IGNORECASE
)
"""Names of variables with secrets. Does not match TOKENIZERS_PARALLELISM."""

_TOKEN = (
    r"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{20,}"
    r"|sk-[A-Za-z0-9_-]{30,}|A[KS]IA[A-Z0-9]{16}|xox[abp]-[A-Za-z0-9_-]{10,}|nvapi-[A-Za-z0-9_-]{20,}"
    r"|wandb_v1_[A-Za-z0-9_]{20,}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+)\b"
)
_PASSWORD_IN_URL = r"://[^ \t\n/:@$]+:[^ \t\n/@$]+@"

SECRET_VALUE = re.compile(f"{_TOKEN}|{_PASSWORD_IN_URL}")
"""Tokens of Hugging Face, GitHub, GitLab, OpenAI, AWS, Slack, NVIDIA and Weights & Biases, JSON web tokens, and
passwords in URLs."""

_UPPER_NAME = (
    r"(TOKEN|SECRET|PASSWORD|PASSWD|APIKEY|API_KEY|CREDENTIALS?|PRIVATE_KEY|ACCESS_KEY)"
    r"(_[A-Z0-9_]*)?"
)
_LOWER_NAME = (
    r"([Pp]assword|[Pp]asswd|[Ss]ecret|[Aa]pi[_-]?[Kk]ey|[Pp]rivate[_-][Kk]ey|[Aa]ccess[_-][Kk]ey"
    r"|([Hh]f|[Hh]ub|[Aa]ccess|[Aa]uth|[Aa]pi)[_-][Tt]oken)"
)
_NAMED = rf"""({_UPPER_NAME}|{_LOWER_NAME})\\?["']? *[=:] *"""
_UNQUOTED = r"""[^] \t\n"'$\\[][^ \t\n"']*"""
IN_SCRIPTS: tuple[tuple[str, str], ...] = (
    (_PASSWORD_IN_URL, f"://{REDACTED}@"),
    (_TOKEN, REDACTED),
    (rf"""({_NAMED}\\?["']?){_UNQUOTED}""", rf"\1{REDACTED}"),
    # The address of a webhook is the secret. URLs of Azure (sig), S3 and Google Cloud Storage have a signature.
    (
        r"(https://(hooks\.slack\.com|discord(app)?\.com/api/webhooks|[A-Za-z0-9.-]+\.webhook\.office\.com)/"
        r"|[?&](sig|[A-Za-z-]*[Ss]ignature|X-Amz-Credential|X-Amz-Security-Token|token|key|api_key|access_token)=)"
        r"""[^ \t\n"'<>&]+""",
        rf"\1{REDACTED}",
    ),
    (r"\b(Bearer +|Authorization: *Basic +)[A-Za-z0-9+/=._~-]{16,}", rf"\1{REDACTED}"),
    (r"(([Ww]andb|WANDB).{0,60})\b[0-9a-f]{40}\b", rf"\1{REDACTED}"),
)
"""Patterns and replacements of batch scripts (templates/lib/redactions.sh). sed -E reads them in the same way."""

_QUOTED = r"""(?P<quote>\\?["']))(?:(?!(?P=quote))[^\n])+"""
_PATTERNS = (
    (rf"({_NAMED}{_QUOTED}", rf"\1{REDACTED}"),
    (rf"(-(?:password|secret|api-?key|access-key|auth-token) +){_UNQUOTED}", rf"\1{REDACTED}"),
    # A vocabulary has tokens too, so only what looks like a secret.
    (r"""(\btoken\\?["']? *[=:] *\\?["'])[A-Za-z0-9_./+=-]{8,}""", rf"\1{REDACTED}"),
    *IN_SCRIPTS,
    (
        r"(?s)(-----BEGIN [A-Z ]*PRIVATE KEY-----)(?! \[redacted\]).*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        rf"\1 {REDACTED}",
    ),
)
_KEY_MARK = re.compile(r"-----(BEGIN|END) [A-Z ]*PRIVATE KEY-----")
_KEY_LINES = 256
"""Most lines of a private key. Its end may be missing in a log, and what follows should be shown."""
_SHORTEST = 6
"""Length of the shortest value that is removed: a shorter one, such as 1, is part of many texts."""


@functools.cache
def _compiled() -> tuple[tuple[re.Pattern[str], str], ...]:
    """The patterns. Most commands import this module and redact nothing."""
    return tuple((re.compile(pattern), replacement) for pattern, replacement in _PATTERNS)


def redact(text: str, values: Iterable[str] = ()) -> str:
    """The text with [redacted] in place of what looks like a secret, and of these values."""
    for value in values:
        if len(value) >= _SHORTEST:
            text = text.replace(value, REDACTED)
    for pattern, replacement in _compiled():
        text = pattern.sub(replacement, text)
    return text


class LineRedactor:
    """Redacts lines of several sources, such as ranks, that belong together: a private key has many lines."""

    def __init__(self) -> None:
        self._left: dict[Hashable, int] = {}
        """Number of lines that may still be of a private key, for each source that has shown one."""

    def redact(self, lines: Sequence[tuple[Hashable, str]], values: Collection[str] = ()) -> list[str]:
        """The texts of lines, each given with its source. The first ones may be the end of a private key."""
        for source, text in lines:
            if source not in self._left and (mark := _KEY_MARK.search(text)):
                self._left[source] = _KEY_LINES if mark[1] == "END" else 0
        return [self._redacted(source, text, values) for source, text in lines]

    def _redacted(self, source: Hashable, text: str, values: Collection[str]) -> str:
        left = self._left.get(source, 0)
        if marks := _KEY_MARK.findall(text):
            self._left[source] = _KEY_LINES if marks[-1] == "BEGIN" else 0
        elif left:
            self._left[source] = left - 1
        return REDACTED if left else redact(text, values)


def redact_json(value: Any, values: Iterable[str] = ()) -> Any:
    """A JSON value with all its texts redacted, also those that only the name of their key calls a secret."""
    return _redacted("", value, tuple(values))


def _redacted(name: str, value: Any, values: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        if name and redact(f"{name}: x") != f"{name}: x":
            return REDACTED
        return redact(value, values)
    if isinstance(value, list | tuple):
        return [_redacted(name, each, values) for each in value]
    if isinstance(value, dict):
        return {redact(str(key), values): _redacted(str(key), each, values) for key, each in value.items()}
    return value


def secret_values(environment: Mapping[str, str], names: Collection[str] = ()) -> tuple[str, ...]:
    """Values of the variables with these names, or with names of secrets, the longest first."""
    found = {value for name, value in environment.items() if name in names or SECRET.search(name)}
    return tuple(sorted(found, key=lambda value: (-len(value), value)))
