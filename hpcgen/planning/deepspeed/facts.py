"""The input of the rules: values of DeepSpeed's configuration with its defaults, and the ranks of the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcgen.errors import Problem
from hpcgen.planning.deepspeed.file import CONFIG

ZERO = "zero_optimization"
Precision = Literal["bf16", "fp16", "fp32"]
Device = Literal["none", "cpu", "nvme"]
_DTYPES: dict[str, Precision] = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}
"""runtime/config.py, DtypeEnum."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A configuration whose values have valid types, and the numbers of ranks of the job."""

    config: Mapping[str, Any]
    ranks: int
    ranks_per_node: int
    nvlink_nodes: int = 1
    """Nodes whose GPUs are all connected by NVLink."""
    model_parallel_size: int

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path; `default` if it is missing or "auto", as in DeepSpeed's own models."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None or value == "auto" else value

    def zero(self, name: str, default: Any = None) -> Any:
        """The value of a key of zero_optimization, with or without the prefix `stage3_`."""
        return self.get(f"{ZERO}.{name}", self.get(f"{ZERO}.stage3_{name}", default))

    def has(self, path: str) -> bool:
        """True if the configuration sets a value at the path, even "auto"."""
        section, _, name = path.rpartition(".")
        return name in (self.get(section, {}) if section else self.config)

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.zero("stage", 0))

    @property
    def precision(self) -> Precision:
        """Data type of the parameters (runtime/engine.py, get_data_types)."""
        if self.get("fp16.enabled", False):
            return "fp16"
        section = "bf16" if "bf16" in self.config else "bfloat16"
        return "bf16" if self.get(f"{section}.enabled", False) else "fp32"

    @property
    def precision_is_auto(self) -> bool:
        """True if Hugging Face's Trainer chooses the data type."""
        values = [self.config.get(name) for name in ("fp16", "bf16", "bfloat16")]
        return any(isinstance(value, Mapping) and value.get("enabled") == "auto" for value in values)

    @property
    def grad_accum_dtype(self) -> Precision:
        """Data type in which gradients accumulate. Default: the parameters' (engine.py, get_data_types)."""
        return self.dtype("grad_accum_dtype") or self.precision

    def dtype(self, name: str) -> Precision | None:
        """A data type of the section data_types; None if it is not set."""
        value = self.get(f"data_types.{name}")
        return _DTYPES[value] if value else None

    def offload(self, what: Literal["optimizer", "param"]) -> Device:
        """Device to which the optimizer state or the parameters are offloaded."""
        device: Device = self.zero(f"offload_{what}.device", "none")
        return device

    @property
    def optimizer_type(self) -> str | None:
        """Type of the optimizer in lower case; None if the program creates its own optimizer."""
        value = self.get("optimizer.type")
        return value.lower() if value else None

    @property
    def uses_cpu_adam(self) -> bool:
        """True unless the configuration rules out DeepSpeedCPUAdam (runtime/engine.py, get_optimizer_configuration)."""
        is_adam = self.optimizer_type in (None, "adam", "adamw")
        return (
            is_adam
            and self.offload("optimizer") != "none"
            and not self.get("optimizer.params.torch_adam", False)
        )


def problem(path: str, reason: str, hint: str = "") -> Problem:
    """A problem with a key of DeepSpeed's configuration."""
    return Problem(f"{CONFIG}.{path}" if path else CONFIG, reason, hint)
