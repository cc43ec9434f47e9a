"""Where files of users and admins are looked up by name, besides the working directory and what hpcgen ships."""

from __future__ import annotations

import os
from pathlib import Path


def configuration_directories(kind: str) -> list[Path]:
    """The user's and the system's folder for one kind of file ("clusters", "templates", "topologies")."""
    user = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [user / "hpcgen" / kind, Path("/etc/hpcgen") / kind]
