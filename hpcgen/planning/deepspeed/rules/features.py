"""Rules for data efficiency, compilation, monitors and autotuning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpcgen.errors import Problem
from hpcgen.planning.deepspeed.facts import Facts, problem

SAMPLING = "data_efficiency.data_sampling"


def data_efficiency_is_complete(facts: Facts) -> Iterator[Problem]:
    """Enabled features need their required keys (runtime/data_pipeline/config.py, get_curriculum_learning and
    get_dynamic_batching)."""
    for name, key in (("curriculum_learning", "curriculum_metrics"), ("dynamic_batching", "max_tokens")):
        section = facts.get(f"{SAMPLING}.{name}")
        if isinstance(section, Mapping) and section.get("enabled", False) and key not in section:
            yield problem(f"{SAMPLING}.{name}", f"is enabled without {key}", f"set {key}")


def compiler_passes(facts: Facts) -> Iterator[Problem]:
    """Features of DeepCompile exclude each other (compile/config.py, CompileConfig; runtime/engine.py,
    get_deepspeed_compile_backend)."""
    names = ("offload_activation", "offload_parameters", "offload_opt_states")
    used = [name for name in names if facts.get(f"compile.{name}", False)]
    if len(used) > 1 and facts.get("compile.deepcompile", False):
        yield problem(f"compile.{used[1]}", f"and {used[0]} exclude each other", "disable one of them")
    passes = facts.get("compile.passes", ())
    if "autotp" in passes and len(passes) > 1:
        yield problem("compile.passes", "combines autotp with other passes", "use autotp alone")


def secrets_stay_out(facts: Facts) -> Iterator[Problem]:
    """The configuration is stored in the script and in the run directory, so it has no secrets (hpcgen's rule)."""
    if facts.get("comet.api_key") is not None:
        hint = "remove it, export COMET_API_KEY where you submit, and list COMET_API_KEY in secrets"
        yield problem("comet.api_key", "would be written into the script", hint)


def autotuning_needs_the_launcher(facts: Facts) -> Iterator[Problem]:
    """Autotuning starts jobs itself. Only the command `deepspeed --autotuning` can do this (launcher/runner.py)."""
    if facts.get("autotuning.enabled", False):
        reason = "needs the launcher deepspeed, which starts jobs by itself over ssh"
        yield problem("autotuning", reason, "remove it; run it once by hand on one node")


RULES = (
    data_efficiency_is_complete,
    compiler_passes,
    secrets_stay_out,
    autotuning_needs_the_launcher,
)
