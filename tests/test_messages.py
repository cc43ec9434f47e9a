"""The wording of mistakes and warnings: one golden file, read in review like code.

The tests of each rule assert its path and its name, so that a change of wording changes no test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.config import test_corrections, test_document, test_loader, test_node_types
from tests.planning import (
    test_allocation,
    test_container,
    test_data_rules,
    test_environment_problems,
    test_expert_rules,
    test_layout_rules,
    test_long_context,
    test_lora_rules,
    test_model_rules,
    test_output_rules,
    test_resources,
    test_training_rules,
    test_unused_keys,
)
from tests.planning.cases import errors, warnings
from tests.planning.deepspeed import test_check
from tests.trainer import test_resolve

MESSAGES = Path(__file__).parent / "golden/messages.txt"

TABLES = {
    "model": (errors, test_model_rules.REFUSED),
    "layout": (errors, test_layout_rules.REFUSED),
    "experts": (errors, test_expert_rules.REFUSED),
    "training": (errors, test_training_rules.REFUSED),
    "data": (errors, test_data_rules.REFUSED),
    "output": (errors, test_output_rules.REFUSED),
    "adapters": (errors, test_lora_rules.REFUSED),
    "long context": (errors, test_long_context.REFUSED),
    "unused keys": (errors, test_unused_keys.REFUSED),
    "warnings of layout": (warnings, test_resources.WARNED),
    "warnings of experts": (warnings, test_expert_rules.WARNED),
    "warnings of output": (warnings, test_output_rules.WARNED),
    "warnings of long context": (warnings, test_long_context.WARNED),
}
"""Tables of cases of rules, each with the function that returns the messages of a case."""

TABLES_OF_FILES = {
    "files": (test_loader.mistakes, test_loader.REFUSED),
    "YAML": (
        test_document.mistakes,
        {json.dumps(text)[:60]: ({"text": text},) for text in test_document.MISTAKES},
    ),
    "types": (
        test_corrections.mistakes,
        {f"{key}: {yaml}": ({"key": key, "yaml": yaml},) for key, yaml in test_corrections.CORRECTIONS},
    ),
    "resources": (test_allocation.problems, test_allocation.REFUSED),
    "container": (test_container.problems, test_container.REFUSED),
    "environment": (test_environment_problems.refused, test_environment_problems.REFUSED),
    "DeepSpeed": (
        test_check.refused,
        {json.dumps(config): (config, path) for config, path, _ in test_check.BROKEN},
    ),
    "trainer": (test_resolve.refused, test_resolve.REFUSED),
    "warnings of container": (test_container.warnings, test_container.WARNED),
    # The last, since its file stays in the working directory.
    "node types": (test_node_types.contradictions, test_node_types.CONTRADICTIONS),
}
"""Tables of cases of other checks, each with the function that writes the files of a case and returns its problems."""


def entries(directory: Path) -> Iterator[str]:
    """The name of each case, with its messages below."""
    for table, (messages, cases) in TABLES.items():
        for name, (changes, *_) in cases.items():
            yield "\n".join([f"{table}: {name}", *messages(**changes)])
    for table, (problems, cases) in TABLES_OF_FILES.items():
        for name, (settings, *_) in cases.items():
            yield "\n".join([f"{table}: {name}", *map(str, problems(directory, **settings))])


def test_the_messages_are_the_golden_ones(
    compare_golden: Callable[[Path, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    compare_golden(MESSAGES, "\n\n".join(entries(tmp_path)) + "\n")
