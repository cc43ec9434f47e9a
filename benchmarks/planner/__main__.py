"""Compares predicted steps with measured ones, and prints the tables of docs/planning.md.

    python -m benchmarks.planner [--only TABLE ...] [--json]
    python -m benchmarks.planner --freeze

It needs no GPU. --freeze writes the predictions to a file, which is committed before they are compared with anything.
Configurations count once, however many releases of a software were measured.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.planner.predictions import freeze
from benchmarks.planner.tables import TABLES, markdown, predictions


def main() -> None:
    arguments = parser().parse_args()
    if arguments.freeze:
        freeze(predictions())
        return
    for name in arguments.only:
        rows = TABLES[name]()
        if arguments.json:
            print(json.dumps({"table": name, "rows": rows}))
        else:
            print(f"## {name}\n\n{markdown(rows)}\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), metavar="TABLE")
    options.add_argument("--freeze", action="store_true", help="write the predictions to their file")
    options.add_argument("--json", action="store_true", help="print one JSON object per table")
    return options


if __name__ == "__main__":
    main()
