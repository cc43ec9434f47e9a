"""Adds the shipped YAML files to installations as JSON, because parsing them takes a quarter of a rendering's time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ParsedYaml(BuildHookInterface):  # type: ignore[misc]
    """Writes hpcgen/config/shipped.json, keyed by the SHA-256 of each file's text. Git never sees it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is written, also the wheel of an editable installation, which reads the checkout."""
        root = Path(self.root)
        sys.path.insert(0, self.root)
        from hpcgen.config.document import SHIPPED, write_shipped

        target = SHIPPED if version == "editable" else Path(self.directory) / SHIPPED.name
        target.parent.mkdir(parents=True, exist_ok=True)
        folders = ("topologies", "hpcgen/clusters", "hpcgen/presets")
        write_shipped(target, sorted(file for folder in folders for file in root.glob(f"{folder}/**/*.yaml")))
        if version == "standard":
            build_data["force_include"][str(target)] = SHIPPED.relative_to(root).as_posix()
