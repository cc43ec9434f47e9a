"""Generates a site's template that extends the shipped one and describes each block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcgen.resources import shipped
from hpcgen.slurm.rendering.block_docs import BlockDoc
from hpcgen.slurm.rendering.inventory import prefixed
from hpcgen.slurm.rendering.replaced import shipped_functions, with_records


def override_text(
    name: str, known: Sequence[str], docs: Mapping[str, BlockDoc], chosen: Sequence[str] = ()
) -> str:
    """A template that extends the shipped one and replaces each `chosen` block with its current content.

    Without `chosen`, every block in `known` is included as a comment. The current shipped text of each function is
    recorded above it, so that later versions of hpcgen can show what changed.
    """
    functions = shipped_functions(name)
    lines = [f'{{% extends "{prefixed(name)}" %}}', "", *_comment(_ABOUT)]
    if not chosen:
        lines += _comment("To use a block, remove the comment around it. Delete the others.")
    for block in chosen or known:
        body = ["{{ super() }}"]
        if block == "site":
            body = _site_functions()
        elif block in functions and chosen:
            body = functions[block].splitlines()  # a function can only be replaced
        example = [f"{{% block {block} %}}", *body, "{% endblock %}"]
        lines += ["", *_comment(_described(block, docs.get(block)))]
        lines += example if chosen else ["{#", *example, "#}"]
    text = "\n".join(lines) + "\n"
    return with_records(text, functions) if chosen else text


_ABOUT = (
    "{{ super() }} inserts the previous text of the block: write above it, below it, or replace it. "
    "`hpcgen templates check` checks the scripts."
)


def _site_functions() -> list[str]:
    """The shipped definitions of functions that a site can replace."""
    base = (shipped("templates") / "slurm/base.sbatch.j2").read_text(encoding="utf-8")
    _, _, functions = base.partition("# ==== functions of the site")
    lines = functions.partition("{% block site %}")[0].strip().splitlines()[1:]
    return [line for line in lines if not line.startswith("{%")]


def _described(block: str, doc: BlockDoc | None) -> str:
    return block if doc is None else f"{block}: {doc.holds}. A site may: {doc.site_may}"


def _comment(text: str) -> list[str]:
    """A Jinja comment, which does not appear in scripts."""
    return [f"{{# {text.replace('{#', '{ #').replace('#}', '# }')} #}}"]
