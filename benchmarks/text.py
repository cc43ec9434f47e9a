"""Text of this machine, packed into JSON Lines for benchmarks.data."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import zstandard

from hpcgen.data.compression import content
from hpcgen.data.jsonl import read_blocks

SUFFIXES = {
    ".py",
    ".h",
    ".hpp",
    ".c",
    ".cpp",
    ".txt",
    ".html",
    ".rst",
    ".md",
    ".pyi",
    ".xml",
    ".po",
    ".js",
    ".rs",
}
LONGEST_TEXT = 2_000_000


def default_roots() -> list[Path]:
    paths = sysconfig.get_paths()
    usual = (
        "/usr/share/doc",
        "/usr/share/man",
        "/usr/include",
        "/usr/src",
        "/usr/share/perl",
        "/usr/lib/python3",
    )
    return [*map(Path, usual), Path(paths["stdlib"]), Path(paths["purelib"])]


def texts(roots: list[Path]) -> Iterator[str]:
    """Every text below `roots` once, in a fixed order."""
    seen = set()
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                digest = hashlib.sha256(data).digest()
                if digest not in seen and 200 < len(data) < LONGEST_TEXT:
                    seen.add(digest)
                    try:
                        yield str(data, "utf-8")
                    except UnicodeDecodeError:
                        continue


def collect(roots: list[Path], folder: Path, most_bytes: int, num_files: int) -> list[Path]:
    """Pack texts into `num_files` .jsonl.zst files of similar size and mixture."""
    folder.mkdir()
    paths = [folder / f"part-{number:04d}.jsonl.zst" for number in range(num_files)]
    writers = [
        zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(path.open("wb"))
        for path in paths
    ]
    for number, text in enumerate(texts(roots)):
        line = json.dumps({"text": text, "meta": {"source": "here"}}, ensure_ascii=False).encode() + b"\n"
        writers[number % num_files].write(line)
        most_bytes -= len(line)
        if most_bytes < 0:
            break
    for writer in writers:
        writer.close()
    return paths


def write_portion(files: list[Path], target: Path, most_bytes: int) -> Path:
    """Write the first documents of every file, uncompressed."""
    with target.open("wb") as portion:
        for path in files:
            left = most_bytes // len(files)
            with path.open("rb") as file:
                for block in read_blocks(path, content(path, file)):
                    for line in block.data.splitlines(keepends=True):
                        if left > 0:
                            portion.write(line)
                            left -= len(line)
                    if left <= 0:
                        break
    return target
