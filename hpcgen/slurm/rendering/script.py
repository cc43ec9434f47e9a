"""Renders the batch script of a stage, and extracts the part that submitit runs before its launch line."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcgen.config.presets import PRESETS
from hpcgen.errors import FilePlace, HpcgenError
from hpcgen.planning.runtimes import ENVIRONMENT_FILE
from hpcgen.resources import shipped
from hpcgen.run_plan.plan import Plan
from hpcgen.run_plan.stage import StagePlan
from hpcgen.slurm.rendering.blocks import require_known_blocks
from hpcgen.slurm.rendering.environment import (
    SHIPPED,
    SHIPPED_PREFIX,
    ShellEnvironment,
    make_environment,
    render_template,
    template_origins,
)
from hpcgen.slurm.rendering.filters import heredoc, shell_word
from hpcgen.slurm.rendering.libraries import stage_libraries
from hpcgen.slurm.rendering.settings import has_preflight, stage_settings
from hpcgen.slurm.submission import submission_file
from hpcgen.version import __version__
from trainer.contract.record import record

_HOOK = re.compile(r"\bsite_(?:prologue|epilogue)\b")
CALL = 'main "$@"'
"""The last line of a script. All lines above it are definitions."""


@record
class Script:
    """A rendered batch script."""

    text: str
    sources: tuple[Path, ...] = ()
    """The template files and libraries that it was rendered from."""
    uses_site_templates: bool = False
    """True if one of them belongs to a site."""
    queued: Script | None = None
    """The script of the jobs that the job queues."""

    def directives(self) -> tuple[str, ...]:
        """The text after #SBATCH of each directive, in order."""
        return tuple(line[8:] for line in self._head() if line.startswith("#SBATCH "))

    def definitions(self) -> list[str]:
        """The lines between the directives and the call of `main`, which submitit's launch line replaces."""
        lines = self._lines()
        assert lines[-1] == CALL
        last = max(index for index, line in enumerate(self._head()) if line.startswith("#SBATCH "))
        return lines[last + 1 : -1]

    def _head(self) -> list[str]:
        """The lines before the first command, where sbatch reads directives. A job file may be a script, too."""
        return list(itertools.takewhile(lambda line: line[:1] in ("", "#"), self._lines()))

    def _lines(self) -> list[str]:
        return self.text.removesuffix("\n").split("\n")


def render_stage(plan: Plan, stage: str, site_directories: Sequence[Path] = ()) -> Script:
    """The batch script of a stage. The same plan and templates yield the same bytes.

    Raises:
        HpcgenError: a template is missing, unreadable or invalid.
    """
    environment = make_environment(site_directories, plan.run.cluster.trusted_groups)
    name = f"slurm/{stage}.sbatch.j2"
    origins = template_origins(environment, name)
    if site_directories:
        require_known_blocks(environment, name)
    uses_site_templates = any(not origin.startswith(SHIPPED) for origin in origins)
    versions = _replaced_versions(environment, plan.stages[stage]) if uses_site_templates else ()
    sources = template_sources(environment, origins)
    queued = _queued_script(plan, stage, site_directories)
    hooks, submission = defines_hooks(sources), submission_file(plan, plan.stages[stage], site_directories)
    context = template_context(
        plan, stage, sources, versions, hooks=hooks, queued=queued, submission=submission
    )
    text = script_text(environment, name, context)
    if uses_site_templates:
        _require_interpreter(text, name, origins)
    libraries = tuple(library.path for library in context["libraries"])
    return Script(text, (*sources, *libraries), uses_site_templates, queued)


def _require_interpreter(text: str, name: str, origins: Sequence[str]) -> None:
    """Refuses a script that sbatch refuses, because a site's template replaces all of the shipped one."""
    if not text.startswith("#!"):
        own = next(origin for origin in origins if not origin.startswith(SHIPPED))
        hint = f'begin the template with {{% extends "{SHIPPED_PREFIX}/{name}" %}}, and keep only what you change'
        where = FilePlace(own, 1)
        raise HpcgenError("the script does not begin with #!, so sbatch refuses it", hint, where=where)


def _queued_script(plan: Plan, stage: str, site_directories: Sequence[Path]) -> Script | None:
    """The script of the jobs that the stage's job queues."""
    queued = plan.stages[stage].queued
    if queued is None:
        return None
    return render_stage(
        dataclasses.replace(plan, stages={queued.name: queued}), queued.name, site_directories
    )


def script_text(environment: ShellEnvironment, name: str, context: Mapping[str, Any]) -> str:
    """The template with these values, the job's files, the libraries and the call of `main`."""
    parts = [
        _without_replaced_defaults(render_template(environment, name, context)),
        _write_job_files(context["job_files"], context["job_files_directory"]),
        *_environment_file_function(context["environment_file"]),
        *_queued_script_function(context["queued_script"]),
        *(f"# ==== {library.name} ====\n{library.text}" for library in context["libraries"]),
        f"{CALL}\n",
    ]
    return "\n".join(parts)


def _without_replaced_defaults(text: str) -> str:
    """The text without shipped defaults of functions that a site's block redefines."""
    for default in re.findall(r"^# .*\n(?:launch|site_\w+|prepare_node)\(\) \{ .*\n", text, re.MULTILINE):
        name = default.partition("\n")[2].partition("(")[0]
        before, _, after = text.partition(default)
        if re.search(rf"^\s*(?:function\s+)?{name}\s*\(\)", after, re.MULTILINE):
            text = before + after
    return text


def template_sources(environment: ShellEnvironment, origins: Sequence[str]) -> tuple[Path, ...]:
    """The files of `template_origins`."""
    shipped_directory = environment.directories[-1]
    return tuple(
        shipped_directory / origin.removeprefix(SHIPPED) if origin.startswith(SHIPPED) else Path(origin)
        for origin in origins
    )


def defines_hooks(sources: Sequence[Path]) -> bool:
    """True if a site's template defines site_prologue or site_epilogue. Only then does a script call them."""
    return any(
        _HOOK.search(path.read_text(encoding="utf-8"))
        for path in sources
        if not path.is_relative_to(shipped("templates"))
    )


def _replaced_versions(environment: ShellEnvironment, stage: StagePlan) -> tuple[str, ...]:
    """The functions that the site replaces, each with the shipped version it was based on."""
    from hpcgen.slurm.rendering.replaced import replaced_functions  # only sites with templates need it

    names = dict.fromkeys((stage.name, stage.kind.frame, "base"))
    return tuple(each.version for name in names for each in replaced_functions(environment, name))


def template_context(
    plan: Plan,
    stage_name: str,
    sources: Sequence[Path],
    replaced: Sequence[str] = (),
    *,
    hooks: bool = False,
    queued: Script | None = None,
    submission: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The plain values that a template can use. templates/README.md documents each."""
    stage = plan.stages[stage_name]
    container, settings = stage.container, stage_settings(plan, stage)
    context: dict[str, Any] = {
        **{setting.name: setting.value for setting in settings},
        "settings": settings,
        "directives": [_option(directive) for directive in stage.directives],
        "environment": [
            {"name": variable.name, "value": variable.value, "layer": variable.layer, "why": variable.why}
            for variable in stage.environment
        ],
        "environment_script": stage.environment_script or "",
        "given_variables": " ".join(_given_variables(stage)),
        "device": stage.device,
        "runtime": container.runtime if container else "none",
        "image_is_file": container is not None and container.image_is_file,
        "copy_image": container is not None and container.copy_image,
        "environment_file": stage.environment_file,
        "creates_containers": container is not None and bool(container.kind.library),
        "preflight": has_preflight(stage),
        "spare_nodes": stage.allocation.spare_nodes,
        "job_files": [
            {"name": name, "text": text} for name, text in {**stage.files, **(submission or {})}.items()
        ],
        "queued_script": queued.text if queued else "",
        # the image stage runs its job files, so no other user may have write access to their directory
        "job_files_directory": "scratch" if stage.kind.runs_own_files else "held",
        "hooks": hooks,
        "modules": stage.modules,
        "libraries": stage_libraries(
            stage,
            hooks=hooks,
            share=plan.config.share,
            has_rule="rendezvous_rule" in {each.name for each in settings},
        ),
    }
    context["header"] = _header(plan, stage, context, sources, replaced)
    context["queues_jobs"] = (
        queued is not None
    )  # follows from queued_script, which the hash in the header covers
    return context


def _given_variables(stage: StagePlan) -> Iterator[str]:
    """Names of the variables that the script of the nodes may not change: all but those of lower layers."""
    yield from (each.name for each in stage.environment if each.layer not in ("built-in", "node type"))
    yield from stage.kind.script_variables
    yield from stage.secrets


def _write_job_files(files: Sequence[Mapping[str, str]], directory: str) -> str:
    """The shell function that writes the job's files into the directory in the variable `directory`."""
    if not files:
        return "write_job_files() { :; }\n"
    commands = "\n".join(
        f'    write_file "${directory}"/{shell_word(file["name"])} {heredoc(file["text"])}' for file in files
    )
    return f"# ==== the job's files ====\nwrite_job_files() {{\n{commands}\n}}\n"


def _environment_file_function(text: str) -> Iterator[str]:
    """The shell function that writes the description of the container into the job's directory."""
    if text:
        write = f'write_file "$held"/{ENVIRONMENT_FILE} {heredoc(text)}'
        yield f"# ==== the container ====\nwrite_environment_file() {{\n    {write}\n}}\n"


def _queued_script_function(text: str) -> Iterator[str]:
    """The shell function that prints the script of the jobs that the job queues. A file could be replaced by others."""
    if text:
        yield f"# ==== the jobs that this job queues ====\nqueued_script() {{\n    cat {heredoc(text)}\n}}\n"


def _option(directive: str) -> dict[str, str]:
    name, _, value = directive.removeprefix("--").partition("=")
    return {"name": name, "value": value}


def _header(
    plan: Plan, stage: StagePlan, context: dict[str, Any], sources: Sequence[Path], replaced: Sequence[str]
) -> list[str]:
    run, libraries = plan.run, context["libraries"]
    templates = [(_origin(path), _sha256(path.read_bytes())) for path in sources]
    known = {
        **context,
        "job_files": [
            *stage.files.items()
        ],  # without the record of the submission, which names directories here
        "libraries": [(each.name, each.sha256) for each in libraries],
        "templates": templates,
    }
    inputs = json.dumps({"version": __version__, **known}, sort_keys=True, default=str)
    lines = [f"{plan.config.name}: {stage.name} on {run.cluster_name} ({run.node_type.description})"]
    if plan.layout is not None and stage.kind.trains:
        lines.append(f"layout: {plan.layout}")
    lines.append(f"Generated by hpcgen {__version__}: hpcgen render {stage.name}")
    if run.file is not None:
        lines.append(f"run file: {run.file} sha256 {run.sha256}")
    if run.config.preset and (preset := PRESETS[run.config.preset].file):
        lines.append(f"preset: {preset} sha256 {_sha256(preset.read_bytes())}")
    lines.append(f"profile: {', '.join(run.cluster_files)}")
    if run.from_defaults:
        lines.append(
            f"defaults: {', '.join(f'{key} {place}' for key, (_, place) in run.from_defaults.items())}"
        )
    if not all(file.startswith(SHIPPED) for file in run.node_type_files):
        lines.append(f"node type: {', '.join(run.node_type_files)}")
    lines += [
        f"{what}: {', '.join(f'{name} sha256 {digest}' for name, digest in hashes)}"
        for what, hashes in (("templates", templates), ("libraries", known["libraries"]))
    ]
    if replaced:
        lines.append(f"replaced by the site: {', '.join(replaced)}")
    return [*lines, f"inputs: sha256 {_sha256(inputs.encode())}"]


def _origin(path: Path) -> str:
    """The name of a file in a header, such as "shipped:slurm/train.sbatch.j2" for a shipped template."""
    shipped_directory = shipped("templates")
    return (
        f"{SHIPPED}{path.relative_to(shipped_directory).as_posix()}"
        if path.is_relative_to(shipped_directory)
        else str(path)
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
