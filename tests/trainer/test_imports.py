"""Import paths of users' functions."""

from __future__ import annotations

import re

from trainer.contract.code import imports


def test_the_file_of_an_import_path() -> None:
    assert imports.file_of("../my/layers.py:spec") == "../my/layers.py"
    assert imports.file_of("my.layers:spec") is None
    assert imports.file_of("layers.py") is None
    assert imports.with_file("layers.py:spec", "/home/me/layers.py") == "/home/me/layers.py:spec"
    assert re.fullmatch(imports.IMPORT_PATH, "a.b.py:f")
