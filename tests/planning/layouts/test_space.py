"""The layouts that a search tries."""

from __future__ import annotations

import pytest

from trainer.contract.model.pipeline import layout_of, layout_rows


@pytest.mark.parametrize(
    ("layers", "mtp", "text"),
    [
        ((2, 1), 0, "Ett|tL"),
        ((3, *(4,) * 14, 2), 1, "Et*3|(t*4|)*14ttmL"),
        ((1, *(2,) * 30, 0), 1, "Et|(tt|)*30mL"),
        ((0, 3, 2, 2, 0), 0, "E|t*3|(tt|)*2L"),
    ],
)
def test_chunks_as_a_pipeline_layout(layers: tuple[int, ...], mtp: int, text: str) -> None:
    assert layout_of(layers, mtp) == text
    assert tuple(row.count("t") for row in layout_rows(text)) == layers
