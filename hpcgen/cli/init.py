"""hpcgen init: write a commented run file to start from."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcgen.cli.options import complete_clusters, run_arguments
from hpcgen.cli.options import program as this_program
from hpcgen.config.cluster import ClusterConfig, within_limit
from hpcgen.config.defaults import read_defaults
from hpcgen.config.document import Document, constant, merge
from hpcgen.config.edits import with_values
from hpcgen.config.node_type import NodeType
from hpcgen.config.overrides import override
from hpcgen.config.presets import PRESETS, Preset, unknown_preset
from hpcgen.config.profiles import cluster_names, load_cluster
from hpcgen.config.run import OMITTED_SECTIONS, RunConfig
from hpcgen.config.schema import schema_text
from hpcgen.config.slurm import StageSettings
from hpcgen.config.stages import STAGE_ROWS
from hpcgen.config.starter import TIME, program_starter, run_file, slurm_section, starter, starter_corpus
from hpcgen.config.validation import build, check_text, located
from hpcgen.errors import ConfigErrors, HpcgenError
from hpcgen.files import is_special, require_directory, require_writable, write_output
from hpcgen.text import printable

if TYPE_CHECKING:
    from hpcgen.check.migration.leftover import Leftover
    from hpcgen.check.migration.migration import Migration


def _complete_presets(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in PRESETS if name.startswith(incomplete)]


@click.command("init")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), default="run.yaml")
@click.option("--preset", help="Model preset; see `hpcgen presets`.", shell_complete=_complete_presets)
@click.option(
    "--cluster",
    help="Cluster profile: a name or a path.  [default: the one in defaults.yaml of the user or the site, otherwise "
    "azure-ndv5; with --from, there is no other default]",
    shell_complete=complete_clusters,
)
@click.option("--name", help="Name of the run.  [default: the file's name]")
@click.option("--run-dir", help="Run directory to create.  [default: runs/NAME, relative to the run file]")
@click.option(
    "--from",
    "script",
    type=click.Path(path_type=Path),
    metavar="SCRIPT",
    help="Convert a batch script. A script of Megatron-LM's pretrain_gpt.py becomes a run of hpcgen's trainer; options "
    "that affect results and cannot be converted are errors. For any other program, or with --program, stage run "
    "starts the script's own program. Parts that are not converted are listed.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="A.B=C",
    help="With --from: override a value of the script, for example one that caused an error; repeatable.",
)
@click.option(
    "--from-hf",
    "hf_dir",
    type=click.Path(path_type=Path),
    metavar="HF_DIR",
    help="Continue the pretraining of a Hugging Face model: take the model, the tokenizer and the sequence length from "
    "this directory.",
)
@click.option(
    "--program",
    is_flag=True,
    help="Run a training program of your own, without hpcgen's trainer. With --from: the program of the script.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def command(
    path: Path,
    preset: str | None,
    cluster: str | None,
    name: str | None,
    run_dir: str | None,
    script: Path | None,
    overrides: tuple[str, ...],
    hf_dir: Path | None,
    program: bool,
    force: bool,
) -> None:
    """Also writes the JSON Schema of the run file next to it and creates the run directory.
    Default for PATH: run.yaml.
    """
    _require_no_model(program, preset, hf_dir)
    cluster = cluster or read_defaults().get("cluster")
    _require_compatible(preset, cluster, script, hf_dir, overrides)
    _require_new_file(path, force)
    cluster = cluster or "azure-ndv5"
    profile, node_type = load_cluster(cluster, path.absolute().parent)
    chosen = _chosen(overrides)
    migration = None if script is None else _migrate(script, profile, node_type, chosen, as_program=program)
    name = name or (migration and migration.name) or path.stem
    run_dir = run_dir or f"runs/{name}"
    check_text(RunConfig, {"name": name, "paths": {"run_dir": run_dir}}, "hpcgen init")
    new = _New(path, name, cluster, run_dir, profile, node_type)
    if migration is not None:
        text = new.from_script(script, migration, chosen)
    elif program:
        text = new.for_program()
    elif hf_dir is not None:
        text = new.from_huggingface(hf_dir)
    else:
        text = new.from_preset(PRESETS.get(preset or ""))
    _write(path, text, run_dir)
    if migration is not None:
        _show_leftovers(script, migration)
    steps = _next_steps(path, PRESETS.get(preset or ""), hf_dir, path.parent / new.weights)
    click.echo(f"wrote {path}; next: {' && '.join(steps)}", err=True)


@dataclass(frozen=True)
class _New:
    """A run file to write, and the texts that it can have."""

    path: Path
    name: str
    cluster: str
    run_dir: str
    profile: ClusterConfig
    node_type: NodeType

    @property
    def required(self) -> dict[str, Any]:
        """The keys that every run file has."""
        return {"name": self.name, "cluster": self.cluster, "paths": {"run_dir": self.run_dir}}

    @property
    def schema(self) -> str:
        """The JSON Schema as the run file names it for editors."""
        return f"./{_schema_of(self.path).name}"

    def of_cluster(self, stage: str) -> StageSettings:
        """The profile's Slurm settings of a stage."""
        return self.profile.slurm.merged(STAGE_ROWS[stage])

    def time(self, stage: str) -> str:
        """The time limit of a stage's jobs."""
        settings = self.of_cluster(stage)
        return within_limit(settings.time or TIME, settings, self.profile)

    @property
    def weights(self) -> str:
        """The directory of imported weights, relative to the run file."""
        return f"{self.name}-weights"

    def from_script(self, script: Path | None, migration: Migration, chosen: Document) -> str:
        """The text of a run file with what a script sets."""
        values = _complete({**self.required, **migration.sections}, chosen, str(script))
        return run_file(values, self.schema, file_name=self.path.name, notes=_notes(script, migration))

    def for_program(self) -> str:
        """The text of a run file for a program of the user."""
        return program_starter(
            self.name,
            self.cluster,
            self.run_dir,
            self.schema,
            of_cluster=self.of_cluster("run"),
            time=self.time("run"),
            file_name=self.path.name,
        )

    def from_huggingface(self, hf_dir: Path) -> str:
        """The text of a run file that starts from the model in `hf_dir`, imported to `weights`."""
        from hpcgen.config import from_huggingface

        of_cluster = self.of_cluster("train")
        nodes = {"nodes": of_cluster.nodes or 1}
        sections = from_huggingface.sections(hf_dir, self.weights)
        sections["data"] |= starter_corpus(self.name, self.node_type.gpus_per_node)
        slurm = slurm_section(of_cluster, self.time("train"), nodes)
        return run_file({**self.required, "slurm": slurm, **sections}, self.schema, file_name=self.path.name)

    def from_preset(self, preset: Preset | None) -> str:
        """The text of a run file for hpcgen's trainer."""
        from hpcgen.planning.starting_layout import starting_layout

        of_cluster = self.of_cluster("train")
        start = starting_layout(preset, self.node_type, of_cluster, self.profile)
        text = starter(
            self.name,
            self.cluster,
            self.run_dir,
            preset,
            self.schema,
            gpus_per_node=self.node_type.gpus_per_node,
            nodes=start.num_nodes,
            of_cluster=of_cluster,
            time=self.time("train"),
            file_name=self.path.name,
        )
        if start.changes:
            text = with_values(text, self.path.name, start.changes, start.reason)
        return text


def _next_steps(path: Path, preset: Preset | None, hf_dir: Path | None, weights: Path) -> Iterator[str]:
    """Yields the commands that follow: they fetch what the run file needs, and check it."""
    if preset and preset.tokenizer_repository and not (path.parent / "tokenizer.json").exists():
        yield preset.tokenizer_command(path.parent)
    if hf_dir is not None:
        yield f"{this_program()} checkpoint import {shlex.quote(str(hf_dir))} --to {shlex.quote(str(weights))}"
    yield f"{this_program()} validate {run_arguments(path, ())}"


def _require_new_file(path: Path, force: bool) -> None:
    """Checks that `path` can be written.

    Raises:
        HpcgenError: it is not a file name, its directory does not exist, or it exists and `force` is false.
    """
    if str(path) == "-" or is_special(path):
        raise HpcgenError("not a file name", "name a file; its JSON Schema is written next to it", where=path)
    require_directory(path)
    if path.exists() and not force:
        raise HpcgenError("already exists", "choose another name, or use --force", where=path)


def _require_compatible(
    preset: str | None,
    cluster: str | None,
    script: Path | None,
    hf_dir: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Checks the values of --preset, --cluster, --from, --from-hf and --set against each other.

    Raises:
        HpcgenError: the preset is unknown, or an option needs or excludes another one.
    """
    if preset is not None and preset not in PRESETS:
        raise HpcgenError(f"--preset {preset}: unknown preset", unknown_preset(preset))
    if preset is not None and script is not None:
        raise HpcgenError("--preset and --from both set the shape of the model", "use only one of them")
    if hf_dir is not None and (preset is not None or script is not None):
        other = "--preset" if preset is not None else "--from"
        raise HpcgenError(f"--from-hf and {other} both set the shape of the model", "use only one of them")
    if overrides and script is None:
        raise HpcgenError("--set requires --from", "edit the run file, which lists every key")
    if script is not None and cluster is None:
        names = ", ".join(cluster_names())
        raise HpcgenError(
            "--from requires --cluster, because the script does not name a profile",
            f"use one of {names}, or a path",
        )


def _require_no_model(program: bool, preset: str | None, hf_dir: Path | None) -> None:
    """Checks that --program is not combined with an option that sets the model.

    Raises:
        HpcgenError: it is.
    """
    for option, value in (("--preset", preset), ("--from-hf", hf_dir)):
        if program and value is not None:
            raise HpcgenError(
                f"--program excludes {option}, which sets the shape of a model", "use only one of them"
            )


def _schema_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.schema.json")


def _write(path: Path, text: str, run_dir: str) -> None:
    """Creates the run directory, and writes the run file and its JSON Schema.

    Raises:
        HpcgenError: the directory or a file cannot be written.
    """
    for target in (_schema_of(path), path):
        require_writable(target)
    directory = path.absolute().parent / run_dir
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        reason = f"{directory}: cannot be created ({error.strerror})"
        raise HpcgenError(reason, "choose another --run-dir") from error
    write_output(_schema_of(path), schema_text(RunConfig) + "\n", mode=0o666)
    write_output(path, text, mode=0o666)


def _chosen(overrides: tuple[str, ...]) -> Document:
    """The values of --set.

    Raises:
        HpcgenError: an assignment is malformed, or sets a key that has its own option.
    """
    chosen = Document({}, {"": "--set"})
    for assignment in overrides:
        key = assignment.partition("=")[0]
        if key.partition(".")[0] in ("name", "cluster", "paths"):
            raise HpcgenError(f"--set {key}: cannot be set this way", "use --name, --cluster or --run-dir")
        chosen = merge(chosen, override(RunConfig, assignment))
    return chosen


def _complete(carried: Mapping[str, Any], chosen: Document, script: str) -> dict[str, Any]:
    """The values of the run file, from the script and --set.

    Raises:
        ConfigErrors: values are not valid in a run file.
    """
    document = merge(constant(carried, script), chosen)
    checked = document
    if "program" in document.values:  # which needs no model
        checked = merge(constant(OMITTED_SECTIONS, "program"), document)
    _, problems = build(RunConfig, checked)
    if problems:
        raise ConfigErrors([located(problem, document) for problem in problems])
    return document.values


def _notes(script: Path | None, migration: Migration) -> list[str]:
    """Comments for the run file of a program. They list the parts of the script that the run file does not contain."""
    if "program" not in migration.sections or not migration.leftovers:
        return []
    lines = (
        f"  line {leftover.line}: {printable(leftover.what)}: {printable(leftover.why)}"
        for leftover in migration.leftovers
    )
    return [f"Not converted from {printable(str(script))}:", *lines]


def _show_leftovers(script: Path | None, migration: Migration) -> None:
    """Prints to standard error what was not converted."""
    if "program" in migration.sections:
        click.echo(f"{script}: the run file starts the script's own program (stage run)", err=True)
    _list(script, migration.leftovers)
    if migration.without_effect:
        options = ", ".join(map(printable, migration.without_effect))
        click.echo(f"without a key, and without effect on the results: {options}", err=True)
    if migration.own:
        click.echo(f"hpcgen's script sets these itself: {', '.join(map(printable, migration.own))}", err=True)
    if migration.usual:
        click.echo(f"the trainer does this by default: {' '.join(migration.usual)}", err=True)


def _list(script: Path | None, leftovers: Iterable[Leftover]) -> None:
    for leftover in leftovers:
        click.secho(
            f"{script}:{leftover.line}: not converted: {printable(leftover.what)}", fg="yellow", err=True
        )
        click.echo(f"    {printable(leftover.why)}", err=True)


def _migrate(
    script: Path, cluster: ClusterConfig, node_type: NodeType, chosen: Document, *, as_program: bool
) -> Migration:
    from hpcgen.check.migration.migration import Refusal, migrate

    try:
        text = script.read_bytes().decode(errors="replace")
    except OSError as error:
        raise HpcgenError(
            f"cannot be read ({error.strerror})", "name a batch script", where=script
        ) from error
    try:
        return migrate(text, str(script), cluster, node_type, chosen.values, as_program=as_program)
    except Refusal as refusal:
        _list(script, refusal.listed)
        raise
