"""All scripts of a site's templates: every stage for every cluster rendered and checked, each finding once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcgen.check.lint import check as lint_check
from hpcgen.check.lint.check import Finding
from hpcgen.check.representative import Representative, representatives
from hpcgen.check.rule import RULES
from hpcgen.check.scripts import ReadScripts, compare
from hpcgen.errors import ConfigErrors, HpcgenError
from hpcgen.slurm.rendering.blocks import require_known_blocks
from hpcgen.slurm.rendering.environment import ShellEnvironment, make_environment, template_origins
from hpcgen.slurm.rendering.inventory import TemplateFile, template_chain, template_file, unused_files
from hpcgen.slurm.rendering.replaced import all_replaced
from hpcgen.slurm.rendering.script import script_text, template_context, template_sources
from hpcgen.slurm.rendering.written import TemplateLines

SHELLCHECK_WHY = "shellcheck finds mistakes that bash makes without a message."
OTHERS: dict[str, tuple[str, str]] = {
    "syntax": ("shell code that bash cannot read", "bash would stop here, with the job half done."),
    "template": ("a template that makes no script", "No script of this stage can be made."),
    "unused-file": ("a file that no script is made of", "What it should change is as before."),
    "stale": (
        "a shipped function that changed after the site's version was written",
        "A correction may be missing.",
    ),
    "profile": ("a cluster profile that cannot be planned", "Nothing was checked for this cluster."),
}
"""Findings of no rule: what they are about, and why that matters."""

BLOCKS = {
    "directive-lost": "directives",
    "setting-lost": "settings",
    "variable-lost": "environment",
    "function-lost": "main",
}
"""Rule -> the block that holds what a script has lost."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A finding, and the scripts that it was seen in."""

    finding: Finding
    """`path` and `line` are those of the template or the profile, else "" and the line of the first script."""
    scripts: tuple[str, ...]
    """Stages, each with the cluster and the runtime; empty for a file that is in no script."""

    @property
    def where(self) -> str:
        """FILE:LINE, or the script and its line."""
        place = self.finding.path or (f"script {self.scripts[0]}" if self.scripts else "")
        return f"{place}:{self.finding.line}" if self.finding.line else place


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check looked at and found."""

    clusters: tuple[str, ...]
    num_scripts: int
    findings: tuple[Seen, ...]


@dataclass(frozen=True, kw_only=True)
class _Template:
    """The template of one stage."""

    chain: tuple[TemplateFile, ...]
    origins: tuple[str, ...]
    sources: tuple[Path, ...]
    """The files of the chain, and what they include and import."""
    shipped: frozenset[Path]
    """Those of `sources` that come with hpcgen."""


@dataclass(frozen=True, kw_only=True)
class _Rendered:
    script: str
    stage: str
    of: Representative
    template: _Template
    reported: frozenset[int]
    """Lines with a finding of this package's rules, which others would only repeat."""

    @property
    def label(self) -> str:
        return f"{self.stage} ({self.of.label})"


def check_site(
    directories: Sequence[Path], clusters: Sequence[str], read_scripts: ReadScripts, *, named: bool = False
) -> Report:
    """Renders every stage for the clusters with the templates of these directories, and checks each script.

    Clusters that the caller `named` must be right. An error in another one is a finding.

    Raises:
        HpcgenError: a directory is missing, cannot be read or can be changed by others; a named cluster is
            wrong.
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
        environment = make_environment(directories, runs[0].plan.run.cluster.trusted_groups)
        with contextlib.suppress(HpcgenError):  # each stage will report it
            for unused in unused_files(environment):
                what = _finding("unused-file", f"not a template; {unused.reason}", "rename or remove it")
                collected.add(what, file=str(unused.path))
            _add_stale(environment, collected)
        templates = {stage: _prepare(environment, stage) for stage in runs[0].plan.stages}
        for run in runs:
            rendered += _checked(environment, templates, run, collected)
    for one, findings in zip(rendered, read_scripts([one.script for one in rendered]), strict=True):
        # what a block has lost, other checks miss in the rest of the script
        follows = collected.has(one)
        for finding in findings:
            if finding.line not in one.reported:
                collected.add_seen(finding, one, of_site_alone=follows and finding.rule != "syntax")
    return Report(clusters=tuple(clusters), num_scripts=len(rendered), findings=collected.findings())


def _add_stale(environment: ShellEnvironment, collected: _Collected) -> None:
    """Adds a finding for each function of the site whose shipped version has changed since."""
    with contextlib.suppress(HpcgenError):  # each stage will report it
        for function in all_replaced(environment):
            if function.is_stale:
                name = function.path.name.partition(".")[0]
                why = f"the shipped {function.name} has changed since this one was written"
                fix = f"take over what `hpcgen templates diff {name}` shows, then run it with --accept"
                found = replace(_finding("stale", why, fix), line=function.line, severity="warning")
                collected.add(found, file=str(function.path))


def explanation(rule: str) -> str:
    """Why a finding of a rule matters."""
    if rule in OTHERS:
        return OTHERS[rule][1]
    known = RULES.get(rule) or lint_check.RULES.get(rule)
    return " ".join(known.explanation.split("\n\n")[0].split()) if known else SHELLCHECK_WHY


def _prepare(environment: ShellEnvironment, stage: str) -> _Template | HpcgenError:
    """The template of a stage, or what is wrong with it."""
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
    """The scripts of a run, their findings told to `collected`; a stage that cannot be rendered is one itself."""
    for stage in run.plan.stages:
        template, name = templates[stage], template_file(stage)
        try:
            if isinstance(template, HpcgenError):
                raise template
            script = script_text(environment, name, template_context(run.plan, stage, template.sources))
        except HpcgenError as error:
            file, line, what = _place(str(error))
            found = replace(
                _finding("template", what, "correct it; templates/README.md has the rules"), line=line
            )
            collected.add(found, file=file, seen=f"{stage} ({run.label})")
            continue
        shipped = make_environment()
        sources = template_sources(shipped, template_origins(shipped, name))
        findings = compare(script, script_text(shipped, name, template_context(run.plan, stage, sources)))
        reported = frozenset(finding.line for finding in findings if finding.line)
        one = _Rendered(script=script, stage=stage, of=run, template=template, reported=reported)
        for finding in findings:
            collected.add_seen(finding, one)
        yield one


def _finding(rule: str, why: str, fix: str) -> Finding:
    return Finding(path="", line=0, rule=rule, severity="error", why=why, fix=fix)


def _place(message: str) -> tuple[str, int, str]:
    """File, line and the rest of a message that begins with FILE:LINE or FILE."""
    found = re.match(r"(/[^:]*)(?::(\d+))?: (.*)", message, re.DOTALL)
    return (found[1], int(found[2] or 0), found[3]) if found else ("", 0, message)


class _Collected:
    """Findings, each once, with all the scripts that it was seen in."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str, int], tuple[Finding, list[str]]] = {}
        self._templates = TemplateLines()

    def has(self, one: _Rendered) -> bool:
        """Whether something was found in this script."""
        return any(one.label in scripts for _, scripts in self._found.values())

    def add(self, finding: Finding, *, file: str, seen: str = "", key: str = "") -> None:
        """Adds a finding of a file. Those of one line and one key are the same."""
        line = finding.line if file else 0
        new = (replace(finding, path=file), list[str]())
        _, scripts = self._found.setdefault((finding.rule, key or finding.why, file, line), new)
        if seen and seen not in scripts:
            scripts.append(seen)

    def add_seen(self, finding: Finding, one: _Rendered, *, of_site_alone: bool = False) -> None:
        """Adds a finding of a script, whose template and line are looked for.

        With `of_site_alone` it counts only when a site's file wrote the line.
        """
        text = ["", *one.script.split("\n")][finding.line].strip()
        written = self._written(text, one.template) if text else None
        if of_site_alone and (written is None or written[0] in one.template.shipped):
            return
        place = written or (None if text else _replaced(BLOCKS.get(finding.rule, ""), one.template.chain))
        # the text of a line differs between clusters, and so may what is said of it
        key = finding.rule if place else f"{finding.why} {text}"
        if place:
            finding = replace(finding, line=place[1])
        self.add(finding, file=str(place[0]) if place else "", seen=one.label, key=key)

    def _written(self, text: str, template: _Template) -> tuple[Path, int] | None:
        """The template's line: of a site's files where one has it, since what they replace is not in the script."""
        for path in template.sources:
            if path not in template.shipped and (found := self._templates.find(text, [path])):
                return found
        return self._templates.find(text, template.sources)

    def findings(self) -> tuple[Seen, ...]:
        """All, by file and line."""
        found = [Seen(finding=finding, scripts=tuple(scripts)) for finding, scripts in self._found.values()]
        return tuple(
            sorted(found, key=lambda one: (one.finding.path == "", one.finding.path, one.finding.line))
        )


def _replaced(block: str, chain: Iterable[TemplateFile]) -> tuple[Path, int] | None:
    """Where a site replaces the block that lost something; without a block, the template that extends nothing."""
    for file in chain:
        if not file.shipped:
            found = next((one for one in file.blocks if one.name == block and not one.calls_super), None)
            if found is not None:
                return file.path, found.line
            if file.extends is None:
                return file.path, 1
    return None
