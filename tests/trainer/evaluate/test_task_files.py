from __future__ import annotations

import hashlib

import pytest

from trainer.contract.task_files import code_of, hashes, task_sources

TASK = "task: mine\ndoc_to_text: !function prompts.text\nprocess_docs: !function tools.documents.all\n"


@pytest.fixture
def folder(tmp_path):
    for name, text in {
        "mine.yaml": TASK + "include: base.yaml\n",
        "base.yaml": "doc_to_target: !function targets.letter\n",
        "prompts.py": "1",
        "tools.documents.py": "2",
        "targets.py": "3",
        "other.yaml": "task: other\ndoc_to_text: !function elsewhere.text\n",
        "elsewhere.py": "4",
        "plain.yaml": "task: plain\ndoc_to_text: question\n",
        "suite.yaml": "group: suite\ntask: [mine, other]\n",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_code_of_a_task_and_of_what_it_includes(folder):
    assert {path.name for path in code_of(folder / "mine.yaml")} == {
        "prompts.py",
        "tools.documents.py",
        "targets.py",
    }
    assert code_of(folder / "plain.yaml") == []


def test_a_group_has_the_task_files_of_its_directory(folder):
    assert {path.name for path in task_sources(folder / "suite.yaml")} == {
        path.name for path in folder.iterdir()
    }


def test_hashes_change_with_the_code(folder):
    before = hashes([folder / "mine.yaml"])
    assert before[str(folder / "prompts.py")] == hashlib.sha256(b"1").hexdigest()
    (folder / "targets.py").write_text("33")
    assert hashes([folder / "mine.yaml"]) != before
    assert str(folder / "plain.yaml") not in before
