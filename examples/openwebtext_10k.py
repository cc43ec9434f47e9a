"""Converts the archive of stas/openwebtext-10k, a .tar.xz with .tar.xz archives of text files, to JSON Lines.

    python examples/openwebtext_10k.py openwebtext-10k.tar.xz openwebtext-10k.jsonl

Requires only Python. Documents are in the order of their names, and cleaned as in the dataset's loading script: at most
one consecutive empty line, and none at the ends.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path


def documents(archive: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each text file in the archives within `archive`."""
    with tarfile.open(archive) as outer:
        for member in sorted(outer.getmembers(), key=lambda member: member.name):
            if member.isfile() and member.name.endswith(".xz"):
                with tarfile.open(fileobj=outer.extractfile(member), mode="r:xz") as inner:
                    yield from sorted(texts(inner))


def texts(archive: tarfile.TarFile) -> Iterator[tuple[str, str]]:
    """Name and text of each text file in one inner archive, in the archive's order."""
    for member in archive:
        file = archive.extractfile(member) if member.name.endswith(".txt") else None
        if file is not None:
            yield member.name, re.sub(r"\n\n\n+", "\n\n", file.read().decode()).strip()


def main() -> None:
    """Write one line for each document."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, target = map(Path, sys.argv[1:])
    target.parent.mkdir(parents=True, exist_ok=True)
    private, count = target.with_name(target.name + ".tmp"), 0
    with private.open("w", encoding="utf-8") as file:
        for _, text in documents(source):
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            count += 1
    private.replace(target)
    print(f"{target}: {count:,} documents")


if __name__ == "__main__":
    main()
