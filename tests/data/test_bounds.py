"""Small files that hold very much are processed in bounded memory, or refused with the limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.patience import PATIENCE_S

pytestmark = pytest.mark.process

MB = 1_000_000
LONG = "x" * MB
LIMIT = 80
"""MiB that the process that decodes Parquet may use here, so that the files can be small even when decoded."""
READ = f"""
import json, resource, sys
from functools import partial
from pathlib import Path
from hpcgen.data import parquet
from hpcgen.data.hashed_files import CheckedFile
from hpcgen.data.unit import Input
from hpcgen.errors import HpcgenError

parquet.confined = partial(parquet.confined, max_memory={LIMIT} << 20)
readers = {{
    "texts": lambda path, source: (rows.num_bytes for rows in parquet.read_rows(path, source, "text")),
    "lines": lambda path, source: map(len, parquet.json_lines(path, source, "text")),
}}
outcomes = {{}}
for path in map(Path, sys.argv[1:]):
    for name, read in readers.items():
        try:
            with CheckedFile(Input(name="input", path=path)) as source:
                outcome = sum(read(path, source))
                source.finish()
        except HpcgenError as error:
            outcome = str(error)
        outcomes[f"{{path.name}} {{name}}"] = outcome
# ru_maxrss of this process would include the memory of the one that started it
own = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
print(json.dumps([outcomes, own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""


def outcomes(paths: list[Path]) -> tuple[dict[str, Any], int, int]:
    """What reading each file gives, and the peak memory in bytes of the reader and of the processes that decode."""
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert not done.stderr
    found, own, children = json.loads(done.stdout)
    return found, own * 1024, children * 1024


def repeated(count: int) -> Any:
    """A dictionary column that is `count` times the same long text."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([LONG]))


KINDS = ["dictionary", "page", "list"]


def parquet_bombs(directory: Path, kinds: list[str] | None) -> dict[str, tuple[int | None, int | None]]:
    """Writes files of a few kB that hold 100 MB: all, or those of some kinds.

    Returns how much each reader gets from each, None if it refuses.
    """
    made: dict[str, tuple[int | None, int | None]] = {}
    num_lines = 100
    size = num_lines * MB
    texts = pa.array([LONG] * num_lines)
    all_lines = size + num_lines * len('{"text":""}\n')

    def write(
        name: str, columns: dict[str, Any], sizes: tuple[int | None, int | None], **settings: Any
    ) -> None:
        if kinds is not None and name not in kinds:
            return
        made[f"{name}.parquet"] = sizes
        defaults = {"compression": "zstd", "use_dictionary": False, "dictionary_pagesize_limit": 1 << 24}
        pq.write_table(pa.table(columns), directory / f"{name}.parquet", **{**defaults, **settings})

    read = (size, all_lines)
    write("dictionary", {"text": repeated(num_lines)}, read, use_dictionary=True)
    write("untyped", {"text": repeated(num_lines)}, read, use_dictionary=True, store_schema=False)
    write("delta", {"text": texts}, read, column_encoding={"text": "DELTA_BYTE_ARRAY"})
    refused = (None, None)
    large_page = {"data_page_size": 1 << 30, "write_batch_size": 1 << 20}
    write("page", {"text": texts}, refused, **large_page)
    lengths = {"text": "DELTA_LENGTH_BYTE_ARRAY"}
    write("lengths", {"text": texts}, refused, column_encoding=lengths, **large_page)
    write("one-text", {"text": pa.array(["x" * size])}, refused)
    numbers = pa.ListArray.from_arrays(
        pa.array([0, size // 4], pa.int32()), pa.array(np.zeros(size // 4, np.int64))
    )
    write("list", {"text": pa.array(["a"]), "list": numbers}, (1, None), use_dictionary=True)
    many = {f"c{index}": repeated(num_lines) for index in range(100)}
    write("columns", {"text": pa.array(["a"] * num_lines), **many}, (num_lines, None), use_dictionary=True)
    nested = pa.StructArray.from_arrays([repeated(num_lines)] * 100, [f"c{index}" for index in range(100)])
    write(
        "struct",
        {"text": pa.array(["a"] * num_lines), "struct": nested},
        (num_lines, None),
        use_dictionary=True,
    )
    return made


@pytest.mark.parametrize("kinds", [KINDS, pytest.param(None, marks=pytest.mark.slow)], ids=["few", "all"])
def test_parquet_files(tmp_path, kinds):
    bombs = parquet_bombs(tmp_path, kinds)
    assert {f"{kind}.parquet" for kind in KINDS} <= bombs.keys()
    found, own, child = outcomes([tmp_path / name for name in bombs])
    for name, sizes in bombs.items():
        for reader, size in zip(("texts", "lines"), sizes, strict=True):
            outcome = found[f"{name} {reader}"]
            if size is None:
                assert str(outcome).startswith(f"{tmp_path / name}: "), (name, reader, outcome)
                assert f"needs more than {LIMIT} MiB of memory; write the file again" in outcome
            else:
                assert outcome == size, (name, reader)
    assert own < 300 * MB
    assert child < 300 * MB
