"""The text of a site's template to start from: it extends the shipped one and says what each block holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcgen.resources import shipped
from hpcgen.slurm.rendering.block_docs import BlockDoc
from hpcgen.slurm.rendering.inventory import prefixed
from hpcgen.slurm.rendering.replaced import shipped_functions, with_records


def override_text(
    name: str, known: Sequence[str], docs: Mapping[str, BlockDoc], chosen: Sequence[str] = ()
) -> str:
    """A template that replaces the `chosen` blocks of a template with themselves.

    Without `chosen` every block of `known` is there as a comment. Above each function that is there to be changed,
    the shipped text of today is recorded, so that later versions of hpcgen can tell what changed.
    """
    functions = shipped_functions(name)
    lines = [f'{{% extends "{prefixed(name)}" %}}', "", *_comment(_ABOUT)]
    if not chosen:
        lines += _comment("To use a block, take it out of its comment; delete the others.")
    for block in chosen or known:
        body = ["{{ super() }}"]
        if block == "site":
            body = _site_functions()
        elif block in functions and chosen:
            body = functions[block].splitlines()  # a function cannot be added to
        example = [f"{{% block {block} %}}", *body, "{% endblock %}"]
        lines += ["", *_comment(_described(block, docs.get(block)))]
        lines += example if chosen else ["{#", *example, "#}"]
    text = "\n".join(lines) + "\n"
    return with_records(text, functions) if chosen else text


_ABOUT = (
    "{{ super() }} is what the block held before: write above it, below it, or instead of it. "
    "`hpcgen templates check` checks the scripts."
)


def _site_functions() -> list[str]:
    """The functions that a site replaces, as the shipped template defines them."""
    base = (shipped("templates") / "slurm/base.sbatch.j2").read_text(encoding="utf-8")
    _, _, functions = base.partition("# ==== functions of the site ====\n")
    return functions.partition("{% block site %}")[0].strip().splitlines()


def _described(block: str, doc: BlockDoc | None) -> str:
    return block if doc is None else f"{block}: {doc.holds}. A site may: {doc.site_may}"


def _comment(text: str) -> list[str]:
    """A comment of the template; it appears in no script."""
    return [f"{{# {text.replace('{#', '{ #').replace('#}', '# }')} #}}"]
