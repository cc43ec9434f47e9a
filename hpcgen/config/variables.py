"""Environment variables that run files and profiles may not set."""

from __future__ import annotations

import itertools

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
