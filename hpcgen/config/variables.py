"""Environment variables that run files and profiles may not set, and variables that hold secrets."""

from __future__ import annotations

import itertools
import re

from hpcgen.config.stages import STAGE_ROWS

ON_SCRATCH = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that the script sets so that the tasks' caches are on the node."""

# fmt: off
BASH_VARIABLES = (
    "PATH", "ENV", "IFS", "SHELLOPTS", "POSIXLY_CORRECT", "GLOBIGNORE", "TMOUT", "FUNCNEST", "UID",
    "EUID", "PPID", "GROUPS", "DIRSTACK", "PIPESTATUS", "LD_PRELOAD", "LD_AUDIT",
)
# fmt: on
"""Variables that change how bash runs the script, or that must not be set."""

RESERVED = frozenset(
    (
        *itertools.chain.from_iterable(stage.script_variables for stage in STAGE_ROWS.values()),
        *ON_SCRATCH,
        *BASH_VARIABLES,
        "CHECK_MEMLOCK",
        "RANK",
        "LOCAL_RANK",
        "PYTHONPATH",
        "PYTHONHOME",
    )
)
"""Variables that run files and profiles may not set, because the script, the image or bash depends on them."""

RESERVED_PREFIXES = ("TORCHELASTIC_", "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "BASH")

SECRET = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?|PRIVATE_KEY|ACCESS_KEY)(_|$)", re.IGNORECASE
)
"""Names of variables with secrets. Does not match TOKENIZERS_PARALLELISM."""

SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|glpat-[\w-]{20,}|sk-[A-Za-z0-9_-]{30,}|AKIA[A-Z0-9]{16}"
    r"|xox[abp]-[\w-]{10,}|nvapi-[\w-]{20,})\b|://[^\s/:@$]+:[^\s/@$]+@"
)
"""Token prefixes of Hugging Face, GitHub, GitLab, OpenAI, AWS, Slack and NVIDIA, and passwords in URLs."""
