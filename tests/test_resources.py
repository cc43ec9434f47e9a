from __future__ import annotations

from pathlib import Path

import pytest

from hpcgen import resources


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "hpcgen"
    package.mkdir()
    monkeypatch.setattr(resources, "_PACKAGE", package)
    return package


@pytest.mark.parametrize("folder", resources.SHIPPED_FOLDERS)
def test_the_shipped_folders_are_found(folder: str) -> None:
    assert resources.shipped(folder).is_dir()


def test_the_package_comes_first(package: Path) -> None:
    (package / "templates").mkdir()
    (package.parent / "templates").mkdir()
    (package.parent / "pyproject.toml").touch()
    assert resources.shipped("templates") == package / "templates"


def test_a_neighbor_in_site_packages_is_ignored(package: Path) -> None:
    (package.parent / "templates").mkdir()
    with pytest.raises(FileNotFoundError, match="reinstall hpcgen"):
        resources.shipped("templates")
    (package.parent / "pyproject.toml").touch()
    assert resources.shipped("templates") == package.parent / "templates"
