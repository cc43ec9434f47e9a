"""Secrets disappear from text, and text without secrets stays as it is."""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest

from hpcgen.redaction import IN_SCRIPTS, LineRedactor, redact, redact_json, secret_values
from hpcgen.resources import shipped

PLANTED = "Zq7" * 12
"""The part of each secret that no result may contain."""
HEX = "0a7b" * 10

SECRETS = {
    "a token of Hugging Face": f"401 for hf_{PLANTED}.",
    "a token of GitHub": f"git clone with ghp_{PLANTED} failed",
    "a key of OpenAI": f"key sk-proj_{PLANTED}!",
    "a password in a URL": f"cannot reach https://me:{PLANTED}@example.org/a",
    "a variable": f"env: WANDB_API_KEY={PLANTED} HOME=/root",
    "a quoted variable": f'export SITE_TOKEN="{PLANTED}"',
    "a variable with a suffix": f"SITE_SECRET_A: {PLANTED}",
    "JSON": f'{{"HF_TOKEN": "{PLANTED}", "a": 1}}',
    "a dict": f"{{'api_key': '{PLANTED}', 'b': 2}}",
    "a header": f"Authorization: Bearer {PLANTED}",
    "a fine-grained token": f"github_pat_{PLANTED}",
    "a web token": f"eyJ{PLANTED}.eyJ{PLANTED}.{PLANTED}",
    "a webhook": f"POST https://hooks.slack.com/services/T0/B0/{PLANTED}",
    "a signed URL": f"https://a.blob.core.windows.net/c/x.bin?sv=1&sig={PLANTED}%3D&se=2",
    "a URL signed by S3": f"https://b.s3.amazonaws.com/x?X-Amz-Signature={PLANTED}",
    "a password": f"mysql: password={PLANTED}",
    "a header of an API": f"X-Api-Key: {PLANTED}",
}
"""Secrets that scripts recognize too."""
OTHER_SECRETS = {
    "JSON in JSON": json.dumps(f'{{"HF_TOKEN": "{PLANTED}"}}'),
    "a password of two words": f'password="a {PLANTED}"',
    "an argument": f"login(token='{PLANTED}')",
    "an option": f"curl --api-key {PLANTED} x",
    "a private key": f"-----BEGIN RSA PRIVATE KEY-----\n{PLANTED}\n-----END RSA PRIVATE KEY-----",
    "a private key without its end": f"-----BEGIN PRIVATE KEY-----\n{PLANTED}",
}
HARMLESS = (
    "[rank3]: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "tokens_per_s: 1200000, consumed_tokens=4194304, max_tokens = 2048",
    "token_dispatcher_type=alltoall pad_token_id: 0 eos_token: </s>",
    "    token = tokenizer.encode(text)[0]",
    '  File "/code/trainer/secrets.py", line 3, in token',
    "HF_TOKEN=$HF_TOKEN HF_TOKEN is not set: export it where you submit",
    '{"secrets": ["HF_TOKEN", "WANDB_API_KEY"]}',
    "http://[::1]:29500/a tcp://10.0.0.1:29500 user@host:/path",
    "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "the secret is safe, the password wrong",
    "commit 0a7b0a7b0a7b0a7b0a7b0a7b0a7b0a7b0a7b0a7b",
)


@pytest.mark.parametrize("text", [*SECRETS.values(), *OTHER_SECRETS.values()], ids=[*SECRETS, *OTHER_SECRETS])
def test_a_secret_disappears(text: str) -> None:
    found = redact(text)
    assert PLANTED not in found
    assert "[redacted]" in found
    assert redact(f"{found}\nmore") == f"{found}\nmore"


def test_the_lines_of_a_private_key_disappear_and_those_of_other_ranks_stay() -> None:
    redactor = LineRedactor()
    begin, end = "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"
    first = redactor.redact([(0, PLANTED), (1, "step 1"), (0, end), (0, "step 1"), (1, f"key: {begin}")])
    assert first == ["[redacted]", "step 1", "[redacted]", "step 1", f"key: {begin} [redacted]"]
    assert redactor.redact([(1, PLANTED), (0, "step 2")]) == ["[redacted]", "step 2"]
    # a key without its end does not hide the rest of the log
    assert redactor.redact([(1, "step")] * 300)[-1] == "step"


def test_keys_of_weights_and_biases_are_known_by_their_neighbor() -> None:
    assert HEX not in redact(f"wandb: Appending key for api.wandb.ai to your netrc file: {HEX}")


@pytest.mark.parametrize("text", HARMLESS)
def test_other_text_stays(text: str) -> None:
    assert redact(text) == text


def test_json_stays_json_and_loses_its_secrets() -> None:
    value = {
        "text": SECRETS["a variable"],
        "HF_TOKEN": PLANTED,
        "password": [PLANTED],
        f"hf_{PLANTED}": 1,
        "secrets": ["HF_TOKEN"],
        "tokens_per_s": 1.5,
    }
    found = redact_json(value)
    assert PLANTED not in json.dumps(found)
    assert found["HF_TOKEN"] == "[redacted]"
    assert (found["secrets"], found["tokens_per_s"]) == (["HF_TOKEN"], 1.5)


def test_values_of_secret_variables_disappear_wherever_they_are() -> None:
    values = secret_values({"SITE_TOKEN": "own form", "SITE_TOKEN_LONG": "own form, longer", "HOME": "/root"})
    assert redact("a own form, longer b own form /root", values) == "a [redacted] b [redacted] /root"
    assert redact("1 of 1", secret_values({"SITE_TOKEN": "1"})) == "1 of 1"


def test_long_lines_take_no_time() -> None:
    """A user's log can have lines of 100 kB, written to make a pattern backtrack."""
    lines = ("A_" * 50_000, "a-" * 50_000, "://a:" * 20_000, "wandb " * 20_000, "TOKEN=" * 20_000)
    began = time.process_time()
    for line in lines:
        redact(line)
    assert time.process_time() - began < 20


@pytest.mark.process
def test_scripts_have_the_same_patterns() -> None:
    """Python and sed -E agree on them, so hpcgen/redaction.py is their only definition."""
    libraries = shipped("templates") / "lib"
    code = (
        f"secrets=(SITE_TOKEN); . {libraries}/events.sh; . {libraries}/redactions.sh; "
        'printf "%s\\n" "${redactions[@]}"; '
        'while IFS= read -r line; do redact line "$line"; printf "%s\\n" "$line"; done'
    )
    wandb = f"wandb: Appending key for api.wandb.ai to your netrc file: {HEX}"
    lines = "\n".join((*SECRETS.values(), wandb, "my own form", *HARMLESS, ""))
    done = subprocess.run(
        ["bash", "-c", code],
        input=lines,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"], "SITE_TOKEN": "own form"},
    )
    printed = done.stdout.splitlines()
    assert printed[: len(IN_SCRIPTS)] == [f"s#{pattern}#{text}#g" for pattern, text in IN_SCRIPTS]
    assert PLANTED not in "".join(printed)
    assert wandb.replace(HEX, "[redacted]") in printed
    assert printed[-len(HARMLESS) - 1 :] == ["my [redacted]", *HARMLESS]
