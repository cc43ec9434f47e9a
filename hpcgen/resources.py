"""Where the files that hpcgen ships lie, in an installed package or a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent

SHIPPED_FOLDERS = ("templates", "topologies", "enroot")


def shipped(folder: str) -> Path:
    """The shipped folder of that name, one of SHIPPED_FOLDERS.

    A wheel carries it inside the package. A checkout (also an editable install of one) has it beside the
    package; only there, where pyproject.toml lies too, is the package's neighbour looked at, so that nothing
    in site-packages is ever taken for ours. Raises FileNotFoundError, since then the installation is broken.
    """
    inside = _PACKAGE / folder
    if inside.is_dir():
        return inside
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / folder).is_dir():
        return checkout / folder
    raise FileNotFoundError(f"hpcgen's own folder {folder!r} is not in {_PACKAGE}: reinstall hpcgen")
