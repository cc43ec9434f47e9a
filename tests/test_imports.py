"""The import graph: no cycles, also counting imports inside functions and for type checkers, and no Jinja in ranks."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp
import pytest


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Module -> modules that it imports."""
    graph = grimp.build_graph("hpcgen", "trainer", exclude_type_checking_imports=False)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_no_module_imports_itself_through_others(imports: dict[str, set[str]]) -> None:
    assert "hpcgen.config.run" in imports["hpcgen.planning.kind"]
    TopologicalSorter(imports).prepare()  # the error of a cycle names its modules


def test_no_package_of_hpcgen_imports_itself_through_others(imports: dict[str, set[str]]) -> None:
    rooms: dict[str, set[str]] = {}
    for module, imported in imports.items():
        if module.count(".") and module != "hpcgen.__main__":
            rooms.setdefault(room(module), set()).update({room(other) for other in imported} - {room(module)})
    rooms = {name: found for name, found in rooms.items() if name.startswith("hpcgen.")}
    assert "hpcgen.config" in rooms["hpcgen.stages"]
    TopologicalSorter(rooms).prepare()


def test_a_rank_starts_without_jinja() -> None:
    """Only `texts_of` imports it, in a function, for prompts with messages."""
    graph = grimp.build_graph("trainer", exclude_type_checking_imports=True)
    chain = ("trainer.train", "trainer.chats.template")
    assert graph.find_shortest_chain(*chain) is not None
    graph.remove_import(importer="trainer.chats.prompts", imported="trainer.chats.files")
    assert graph.find_shortest_chain(*chain) is None


def room(module: str) -> str:
    """The package or module directly below hpcgen or trainer."""
    return ".".join(module.split(".")[:2])
