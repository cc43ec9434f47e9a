"""hpcgen init: a commented run file to start from."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpcgen.cli.options import complete_clusters
from hpcgen.errors import HpcgenError


def _complete_presets(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from hpcgen.config.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


@click.command("init")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), default="run.yaml")
@click.option(
    "--preset", help="Shape to start from; `hpcgen presets` lists them.", shell_complete=_complete_presets
)
@click.option(
    "--cluster",
    default="azure-ndv5",
    show_default=True,
    help="Cluster profile: a name or a path.",
    shell_complete=complete_clusters,
)
@click.option("--name", help="Name of the run.  [default: the file's name]")
@click.option("--run-dir", help="Directory of the run, made now.  [default: runs/NAME beside the file]")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def command(
    path: Path, preset: str | None, cluster: str, name: str | None, run_dir: str | None, force: bool
) -> None:
    """Write a commented run file to PATH (run.yaml), its JSON Schema beside it, and make its run directory."""
    from hpcgen.config.loader import load_cluster
    from hpcgen.config.presets import PRESETS
    from hpcgen.config.run import RunConfig
    from hpcgen.config.schema import json_schema
    from hpcgen.config.starter import starter
    from hpcgen.config.validation import check_text
    from hpcgen.files import write_text

    if preset is not None and preset not in PRESETS:
        raise HpcgenError(f"--preset {preset}: not a preset", f"use one of {', '.join(PRESETS)}")
    if path.exists() and not force:
        raise HpcgenError(f"{path}: exists", "choose another name, or use --force")
    _, node_type = load_cluster(cluster, path.absolute().parent)
    name = name or path.stem
    run_dir = run_dir or f"runs/{name}"
    check_text(RunConfig, {"name": name, "paths": {"run_dir": run_dir}}, "hpcgen init")
    schema = path.with_name(f"{path.stem}.schema.json")
    text = starter(
        name,
        cluster,
        run_dir,
        PRESETS.get(preset or ""),
        f"./{schema.name}",
        gpus_per_node=node_type.gpus_per_node,
        file_name=path.name,
    )
    directory = path.absolute().parent / run_dir
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise HpcgenError(
            f"{directory}: cannot be made ({error.strerror})", "choose another --run-dir"
        ) from error
    write_text(schema, json.dumps(json_schema(RunConfig), indent=1) + "\n", mode=0o666)
    write_text(path, text, mode=0o666)
    click.echo(f"wrote {path}; next: hpcgen validate -c {path}", err=True)
