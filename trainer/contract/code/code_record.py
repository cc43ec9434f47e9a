"""The record of the user's code in checkpoints, and its differences from the present code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract.code.imports import file_of
from trainer.contract.code.user_code import UserCode
from trainer.contract.files.hashing import sha256
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.resuming.change import Change, and_more

SHA256_DIGITS = 12
"""Digits of a SHA-256 in messages and in the names of copies."""


@dataclass(frozen=True)
class CodeRecord:
    """Hashes of the files behind one import path."""

    directory: Path
    file: str
    """File of the function, relative to `directory`."""
    hashes: dict[str, str]
    """SHA-256 of this file and of the files that it imports, by their paths relative to `directory`."""

    @classmethod
    def of(cls, code: UserCode) -> CodeRecord:
        """Record of code that was read."""
        return cls(code.directory, code.file, code.hashes())

    @classmethod
    def found(cls, path: str, saved: Mapping[str, Any] | None) -> CodeRecord | None:
        """Record of the file in an import path and of the files that a checkpoint `saved`, without following imports.

        None for a module, which only a process on a compute node can find, and for a missing file.
        """
        name = file_of(path)
        file = Path(name).absolute() if name is not None else None
        if file is None or not file.is_file():
            return None
        names = (file.name, *((saved or {}).get("modules") or ()))
        there = {name: file.parent / name for name in names if (file.parent / name).is_file()}
        return cls(file.parent, file.name, {name: sha256(read_bytes(each)) for name, each in there.items()})

    def entry(self) -> dict[str, Any]:
        """The record as plain data. Version 0.2.0 recorded no `modules`."""
        others = {name: digest for name, digest in sorted(self.hashes.items()) if name != self.file}
        file = self.directory / self.file
        return {"file": str(file), "sha256": self.hashes[self.file], "modules": others}

    def change(self, name: str, saved: Mapping[str, Any]) -> Change | None:
        """The first file that differs from the checkpoint's. None if all files are the same. `name` is the key with the
        import path."""
        modules = saved.get("modules")
        before = {self.file: saved["sha256"], **(modules or {})}
        now = self.hashes if modules is not None else {self.file: self.hashes[self.file]}
        names = [file for file in dict.fromkeys((*before, *sorted(now))) if before.get(file) != now.get(file)]
        if not names:
            return None
        was, is_now = (self._described(names[0], digests.get(names[0])) for digests in (before, now))
        return Change(name, was, f"{is_now}{and_more(len(names))}", is_content=True)

    def _described(self, name: str, digest: str | None) -> str:
        path = self.directory / name
        return f"{path} (SHA-256 {digest[:SHA256_DIGITS]})" if digest else f"no {path}"
