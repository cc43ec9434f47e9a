"""Renders every stage for every cluster with a site's templates and checks the scripts, each finding once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcgen.check.comparison import RULES
from hpcgen.check.lint import check as lint_check
from hpcgen.check.lint.check import Finding
from hpcgen.check.representative import Representative, representatives
from hpcgen.check.scripts import ReadScripts, compare
from hpcgen.config.directories import with_templates_of
from hpcgen.errors import ConfigErrors, FilePlace, HpcgenError, Problem
from hpcgen.slurm.rendering.blocks import require_known_blocks
from hpcgen.slurm.rendering.environment import (
    SHIPPED_PREFIX,
    ShellEnvironment,
    make_environment,
    template_origins,
)
from hpcgen.slurm.rendering.inventory import TemplateFile, template_chain, template_file, unused_files
from hpcgen.slurm.rendering.replaced import all_replaced
from hpcgen.slurm.rendering.script import (
    defines_hooks,
    script_text,
    template_context,
    template_sources,
)
from hpcgen.slurm.rendering.written import TemplateLines

SHELLCHECK_WHY = "shellcheck finds mistakes that bash does not report."
OTHERS: dict[str, tuple[str, str]] = {
    "syntax": ("shell code with a syntax error", "bash would stop here, in the middle of the job."),
    "template": ("a template that cannot be rendered", "The stage has no script."),
    "no-extends": (
        "a template that extends none",
        "Its scripts lack the shipped settings and functions, which `main` and the libraries use.",
    ),
    "unused-file": ("a file that no template uses", "The file has no effect."),
    "stale": (
        "a shipped function that changed after the site's version was written",
        "The site's version may lack a correction.",
    ),
    "unrecorded": (
        "a function without the comment that holds the shipped version it was written against",
        "Nobody would notice when an upgrade changes the shipped version.",
    ),
    "profile": ("a cluster profile that cannot be planned", "Nothing was checked for this cluster."),
}
"""Findings that no rule produces -> their title and why they matter."""

BLOCKS = {
    "directive-lost": "directives",
    "setting-lost": "settings",
    "variable-lost": "environment",
    "function-lost": "main",
}
"""Rule -> the block that contains what a script has lost."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A finding and the scripts that have it."""

    finding: Finding
    """`path` and `line` refer to the template or profile. If unknown, they are "" and the line in the first script."""
    scripts: tuple[str, ...]
    """Stages, each with cluster and runtime; empty for a file that no script uses."""

    @property
    def why(self) -> str:
        """The reason why the finding matters."""
        return explanation(self.finding.rule)

    @property
    def where(self) -> str:
        """FILE:LINE, or the script and its line."""
        place = self.finding.path or (f"script {self.scripts[0]}" if self.scripts else "")
        return f"{place}:{self.finding.line}" if self.finding.line else place


@dataclass(frozen=True, kw_only=True)
class Report:
    """Checked clusters, number of scripts, and findings."""

    clusters: tuple[str, ...]
    num_scripts: int
    findings: tuple[Seen, ...]


@dataclass(frozen=True, kw_only=True)
class _Template:
    """The template of one stage."""

    chain: tuple[TemplateFile, ...]
    origins: tuple[str, ...]
    sources: tuple[Path, ...]
    """Files of the chain, and files that they include or import."""
    shipped: frozenset[Path]
    """Files in `sources` that are shipped with hpcgen."""


@dataclass(frozen=True, kw_only=True)
class _Rendered:
    script: str
    stage: str
    of: Representative
    template: _Template
    reported: frozenset[int]
    """Lines with a finding of this package's rules, which other checks would repeat."""

    @property
    def label(self) -> str:
        return f"{self.stage} ({self.of.label})"


def check_site(
    directories: Sequence[Path], clusters: Sequence[str], read_scripts: ReadScripts, *, named: bool = False
) -> Report:
    """Renders every stage for the clusters with the templates of these directories, and checks each script.

    With `named`, an error in a cluster profile is raised. Otherwise, it is a finding.

    Raises:
        HpcgenError: a directory is missing, cannot be read or can be changed by others, or a named cluster is
            invalid.
    """
    collected = _Collected()
    rendered: list[_Rendered] = []
    for cluster in clusters:
        try:
            runs = list(representatives(cluster))
        except HpcgenError as error:
            if named:
                raise
            for message in error.messages if isinstance(error, ConfigErrors) else (str(error),):
                collected.add(
                    _finding("profile", message, "correct the profile, or name others with --cluster"),
                    file=f"cluster {cluster}",
                )
            continue
        run = runs[0].plan.run
        environment = make_environment(with_templates_of(run.sites, directories), run.cluster.trusted_groups)
        with contextlib.suppress(HpcgenError):  # reported for each stage
            for unused in unused_files(environment):
                what = _finding("unused-file", f"not a template; {unused.reason}", "rename or remove it")
                collected.add(what, file=str(unused.path))
        templates = {stage: _prepare(environment, stage) for stage in runs[0].plan.stages}
        for each in runs:
            rendered += _checked(environment, templates, each, collected)
        _add_replaced(environment, collected)
    for one, findings in zip(rendered, read_scripts([one.script for one in rendered]), strict=True):
        # if a block has lost something, other checks report the consequences elsewhere
        follows = collected.has(one)
        for finding in findings:
            if finding.line not in one.reported:
                collected.add_seen(finding, one, of_site_alone=follows and finding.rule != "syntax")
    return Report(clusters=tuple(clusters), num_scripts=len(rendered), findings=collected.findings())


def _add_replaced(environment: ShellEnvironment, collected: _Collected) -> None:
    """Adds a finding for each function of the site that may have missed a change of the shipped one."""
    with contextlib.suppress(HpcgenError):  # reported for each stage
        for function in all_replaced(environment):
            name = function.path.name.partition(".")[0]
            if collected.extends_none(function.path):
                continue
            if function.is_stale:
                rule, why = "stale", f"the shipped {function.name} has changed since this one was written"
            elif function.is_unrecorded:
                rule, why = (
                    "unrecorded",
                    f"no comment holds the shipped {function.name} that this one replaces",
                )
            else:
                continue
            fix = f"adopt what `hpcgen templates diff {name}` shows, then run it with --accept to write the comment"
            found = replace(_finding(rule, why, fix), line=function.line, severity="warning")
            collected.add(found, file=str(function.path))


def explanation(rule: str) -> str:
    """The reason why findings of a rule matter."""
    if rule in OTHERS:
        return OTHERS[rule][1]
    known = RULES.get(rule) or lint_check.RULES.get(rule)
    return " ".join(known.explanation.split("\n\n")[0].split()) if known else SHELLCHECK_WHY


def _prepare(environment: ShellEnvironment, stage: str) -> _Template | HpcgenError:
    """The template of a stage, or its error."""
    name = template_file(stage)
    try:
        require_known_blocks(environment, name)
        origins = template_origins(environment, name)
        chain = template_chain(environment, stage)
    except HpcgenError as error:
        return error
    sources = template_sources(environment, origins)
    shipped = frozenset(path for path in sources if path.is_relative_to(environment.directories[-1]))
    return _Template(chain=chain, origins=origins, sources=sources, shipped=shipped)


def _checked(
    environment: ShellEnvironment,
    templates: Mapping[str, _Template | HpcgenError],
    run: Representative,
    collected: _Collected,
) -> Iterator[_Rendered]:
    """Renders the scripts of a run, and adds their findings and the stages that cannot be rendered to `collected`."""
    for stage in run.plan.stages:
        template, name = templates[stage], template_file(stage)
        try:
            if isinstance(template, HpcgenError):
                raise template
            hooks = defines_hooks(template.sources)
            context = template_context(run.plan, stage, template.sources, hooks=hooks)
            script = script_text(environment, name, context)
        except HpcgenError as error:
            for mistake in error.mistakes:
                place = mistake.where if isinstance(mistake.where, FilePlace) else FilePlace("")
                what = str(replace(mistake, where="") if place else mistake)
                found = _finding("template", what, "correct it; see the rules in templates/README.md")
                found = replace(found, line=place.line or 0)
                collected.add(found, file=place.file, seen=f"{stage} ({run.label})")
            continue
        shipped = make_environment()
        sources = template_sources(shipped, template_origins(shipped, name))
        context = template_context(run.plan, stage, sources, hooks=hooks)
        findings = compare(script, script_text(shipped, name, context))
        alone = next((file for file in template.chain if file.extends is None and not file.shipped), None)
        if alone is not None and any(finding.rule in BLOCKS for finding in findings):
            # everything else that is wrong follows from this
            fix = (
                f'begin it with {{% extends "{SHIPPED_PREFIX}/{alone.name}" %}} and keep only what you change'
            )
            why = "the template has no {% extends %}, so it replaces all of the shipped one"
            found = replace(_finding("no-extends", why, fix), line=1)
            collected.add(found, file=str(alone.path), seen=f"{stage} ({run.label})")
            continue
        reported = frozenset(finding.line for finding in findings if finding.line)
        one = _Rendered(script=script, stage=stage, of=run, template=template, reported=reported)
        for finding in findings:
            collected.add_seen(finding, one)
        yield one


def _finding(rule: str, why: str, fix: str) -> Finding:
    return Finding(path="", line=0, rule=rule, severity="error", problem=Problem("", why, fix))


class _Collected:
    """Findings, each once, with all scripts that have it."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str, int], tuple[Finding, list[str]]] = {}
        self._templates = TemplateLines()

    def has(self, one: _Rendered) -> bool:
        """True if the script has a finding."""
        return any(one.label in scripts for _, scripts in self._found.values())

    def extends_none(self, path: Path) -> bool:
        """True if a file is known to replace all of the shipped template."""
        return any(rule == "no-extends" and file == str(path) for rule, _, file, _ in self._found)

    def add(self, finding: Finding, *, file: str, seen: str = "", key: str = "") -> None:
        """Adds a finding of a file. Findings with the same line and key are merged."""
        line = finding.line if file else 0
        new = (replace(finding, path=file), list[str]())
        _, scripts = self._found.setdefault((finding.rule, key or finding.problem.reason, file, line), new)
        if seen and seen not in scripts:
            scripts.append(seen)

    def add_seen(self, finding: Finding, one: _Rendered, *, of_site_alone: bool = False) -> None:
        """Adds a finding of a script, and locates its template and line.

        With `of_site_alone`, the finding is dropped unless a site's file wrote the line.
        """
        text = ["", *one.script.split("\n")][finding.line].strip()
        written = self._written(text, one.template) if text else None
        if of_site_alone and (written is None or written[0] in one.template.shipped):
            return
        place = written or (None if text else _replaced(BLOCKS.get(finding.rule, ""), one.template.chain))
        # the text of a line can differ between clusters, and with it the message
        key = finding.rule if place else f"{finding.problem.reason} {text}"
        if place:
            finding = replace(finding, line=place[1])
        self.add(finding, file=str(place[0]) if place else "", seen=one.label, key=key)

    def _written(self, text: str, template: _Template) -> tuple[Path, int] | None:
        """The line in a template. A site's files come first, because the script does not contain what they replace."""
        for path in template.sources:
            if path not in template.shipped and (found := self._templates.find(text, [path])):
                return found
        return self._templates.find(text, template.sources)

    def findings(self) -> tuple[Seen, ...]:
        """All findings, sorted by file and line."""
        found = [Seen(finding=finding, scripts=tuple(scripts)) for finding, scripts in self._found.values()]
        return tuple(
            sorted(found, key=lambda one: (one.finding.path == "", one.finding.path, one.finding.line))
        )


def _replaced(block: str, chain: Iterable[TemplateFile]) -> tuple[Path, int] | None:
    """The line where a site replaces a block."""
    for file in chain:
        if not file.shipped:
            found = next((one for one in file.blocks if one.name == block and not one.calls_super), None)
            if found is not None:
                return file.path, found.line
    return None
