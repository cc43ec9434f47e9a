"""A site's templates held against the contract: every stage of every cluster rendered, and what is wrong with it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcgen.errors import ConfigErrors, HpcgenError
from hpcgen.rendering.blocks import require_known_blocks
from hpcgen.rendering.contract import SYNTAX, check_script
from hpcgen.rendering.environment import ShellEnvironment, make_environment, template_origins
from hpcgen.rendering.findings import Finding, Rule
from hpcgen.rendering.inventory import TemplateFile, template_chain, template_file, unused_files
from hpcgen.rendering.representative import Representative, representatives
from hpcgen.rendering.script import script_text, template_context, template_sources
from hpcgen.rendering.written import TemplateLines

TEMPLATE = Rule(
    name="template",
    why="no script of this stage can be made",
    fix="mend it; templates/README.md has the rules of templates",
)
UNUSED = Rule(
    name="unused-file",
    why="no script is made of it, and what it should change is as before",
    fix="rename or remove it",
)
PROFILE = Rule(
    name="profile",
    why="nothing was checked for this cluster",
    fix="mend the profile, or name others with --cluster",
)
MOST_NAMES = 4
OWN_RULES = (TEMPLATE, UNUSED, PROFILE)

ReadScripts = Callable[[Sequence[str]], Sequence[Sequence[Finding]]]
"""What bash, shellcheck and `hpcgen lint` find in scripts: one list for each."""


@dataclass(frozen=True, kw_only=True)
class SiteFinding:
    """A finding, where it comes from, and in which scripts it was seen."""

    rule: Rule
    what: str
    names: tuple[str, ...]
    """What it is about, where there can be many."""
    file: str
    """The template or the profile; "" where it cannot be told."""
    line: int
    """Of the file, else of the first script; 0 where something is missing."""
    seen: tuple[str, ...]
    """Stages, each with the clusters and runtimes; empty for a file that is in no script."""

    @property
    def said(self) -> str:
        """What is wrong, with a few of the names."""
        more = f" and {len(self.names) - MOST_NAMES} more" if len(self.names) > MOST_NAMES else ""
        return f"{self.what} {', '.join(self.names[:MOST_NAMES])}{more}" if self.names else self.what

    @property
    def where(self) -> str:
        """FILE:LINE, or the script and its line."""
        place = self.file or (f"script {self.seen[0]}" if self.seen else "")
        return f"{place}:{self.line}" if self.line else place


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check looked at and found."""

    clusters: tuple[str, ...]
    num_scripts: int
    findings: tuple[SiteFinding, ...]


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
    told: frozenset[int]
    """Lines with a finding of the contract."""

    @property
    def label(self) -> str:
        return f"{self.stage} ({self.of.label})"


def check_site(
    directories: Sequence[Path], clusters: Sequence[str], read_scripts: ReadScripts, *, named: bool = False
) -> Report:
    """Renders every stage for the clusters with the templates of these directories, and checks each script.

    Clusters that the caller `named` must be right; of others, what is wrong is a finding.

    Raises:
        HpcgenError: a directory is missing, cannot be read or can be changed by strangers; a named cluster is
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
                collected.add(Finding(rule=PROFILE, what=message), file=f"cluster {cluster}")
            continue
        environment = make_environment(directories, runs[0].plan.run.cluster.trusted_groups)
        with contextlib.suppress(HpcgenError):  # each stage will say it
            for unused in unused_files(environment):
                collected.add(
                    Finding(rule=UNUSED, what=f"no template; {unused.reason}"), file=str(unused.path)
                )
        templates = {stage: _prepare(environment, stage) for stage in runs[0].plan.stages}
        for run in runs:
            rendered += _checked(environment, templates, run, collected)
    for one, findings in zip(rendered, read_scripts([one.script for one in rendered]), strict=True):
        for finding in findings:
            if finding.line in one.told:
                continue  # in other words
            # what a block has lost, shellcheck misses in the rest of the script
            follows = collected.has(one) and finding.rule != SYNTAX
            collected.add_seen(finding, one, of_site_alone=follows)
    return Report(clusters=tuple(clusters), num_scripts=len(rendered), findings=collected.findings())


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
    for stage, planned in run.plan.stages.items():
        template, name = templates[stage], template_file(stage)
        try:
            if isinstance(template, HpcgenError):
                raise template
            context = template_context(run.plan, stage, template.sources)
            script = script_text(environment, name, context)
        except HpcgenError as error:
            file, line, what = _place(str(error))
            finding = Finding(rule=TEMPLATE, what=what, line=line)
            collected.add(finding, file=file, seen=f"{stage} ({run.label})")
            continue
        findings = check_script(script, planned, context["settings"])
        told = frozenset(finding.line for finding in findings if finding.line)
        one = _Rendered(script=script, stage=stage, of=run, template=template, told=told)
        for finding in findings:
            collected.add_seen(finding, one)
        yield one


def _place(message: str) -> tuple[str, int, str]:
    """File, line and the rest of a message that begins with FILE:LINE or FILE."""
    found = re.match(r"(/[^:]*)(?::(\d+))?: (.*)", message, re.DOTALL)
    return (found[1], int(found[2] or 0), found[3]) if found else ("", 0, message)


@dataclass
class _Occurrences:
    """One finding, and where it was seen."""

    finding: Finding
    names: list[str]
    seen: list[str]


class _Collected:
    """Findings, each once, with all the scripts that it was seen in."""

    def __init__(self) -> None:
        self._found: dict[tuple[Rule, str, str, int], _Occurrences] = {}
        self._templates = TemplateLines()

    def has(self, one: _Rendered) -> bool:
        """Whether something was found in this script."""
        return any(one.label in found.seen for found in self._found.values())

    def add(self, finding: Finding, *, file: str, seen: str = "", key: str = "") -> None:
        """Adds a finding with the file that it comes from; those of one line and one key are the same."""
        line = finding.line if file else 0
        new = _Occurrences(finding=finding, names=[], seen=[])
        found = self._found.setdefault((finding.rule, key or finding.what, file, line), new)
        found.names += [name for name in finding.names if name not in found.names]
        if seen and seen not in found.seen:
            found.seen.append(seen)

    def add_seen(self, finding: Finding, one: _Rendered, *, of_site_alone: bool = False) -> None:
        """Adds a finding of a script, whose template and line are looked for.

        With `of_site_alone` it counts only when a site's file wrote the line.
        """
        lines = ["", *one.script.split("\n")]
        text = lines[finding.line].strip()
        written = self._templates.find(text, one.template.sources) if text else None
        if of_site_alone and (written is None or written[0] in one.template.shipped):
            return
        place = written or (None if text else _replaced(finding.block, one.template.chain))
        # the text of a line differs between clusters, and so may what is said of it
        key = finding.rule.name if written else f"{finding.what} {text}"
        if place:
            finding = dataclasses.replace(finding, line=place[1])
        self.add(finding, file=str(place[0]) if place else "", seen=one.label, key=key)

    def findings(self) -> tuple[SiteFinding, ...]:
        """All, by file and line."""
        found = [
            SiteFinding(
                rule=one.finding.rule,
                what=one.finding.what,
                names=tuple(one.names),
                file=file,
                line=one.finding.line,
                seen=tuple(one.seen),
            )
            for (_, _, file, _), one in self._found.items()
        ]
        return tuple(sorted(found, key=lambda one: (one.file == "", one.file, one.line)))


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
