"""The software of the tasks: the runtime, NVIDIA's release, PyTorch."""

from __future__ import annotations

import pytest

from hpcgen.planning.software import holds_for, ngc_release, runtime, torch_version
from tests.runs import big_run, loaded, write_yaml


def of_container(directory, cluster=None, **container):
    if cluster is not None:
        write_yaml(directory / "site.yaml", {"extends": "azure-ndv5", "container": cluster})
    run = loaded(directory, big_run(cluster="./site.yaml" if cluster else "azure-ndv5", container=container))
    return run.config, run.cluster


def test_the_runs_runtime_wins_over_the_clusters(tmp_path):
    assert runtime(*of_container(tmp_path)) == "pyxis"
    assert runtime(*of_container(tmp_path, runtime="none")) == "none"
    assert runtime(*of_container(tmp_path, {"runtime": "enroot"}, runtime="pyxis")) == "pyxis"
    assert runtime(*of_container(tmp_path, {"runtime": "enroot"}, image="/x.sqsh")) == "enroot"


@pytest.mark.parametrize(
    ("image", "release"),
    [
        ("nvcr.io#nvidia/pytorch:25.03-py3", (25, 3)),
        ("nvcr.io#nvidia/pytorch:24.12-py3-igpu", (24, 12)),
        (f"nvcr.io#nvidia/pytorch:25.01-py3@sha256:{'a' * 64}", (25, 1)),
        ("registry.example#mirror/nvidia/pytorch:25.03-py3", (25, 3)),
        ("nvcr.io#nvidia/nemo:25.02", None),
        ("reg#lab/gpt:25.03-py3", None),
        ("/shared/pytorch-25.03.sqsh", None),
    ],
)
def test_the_release_is_read_from_nvidias_tags_alone(tmp_path, image, release):
    assert ngc_release(*of_container(tmp_path, image=image)) == release


def test_an_unused_image_does_not_determine_the_software(tmp_path):
    """The profile has an image, but the run uses the host."""
    assert ngc_release(*of_container(tmp_path, runtime="none")) is None


@pytest.mark.parametrize(
    ("tag", "version"),
    [
        ("24.07", None),
        ("24.08", (2, 5)),
        ("24.10", (2, 5)),
        ("25.01", (2, 6)),
        ("25.03", (2, 7)),
        ("25.08", (2, 8)),
        ("25.10", (2, 9)),
        ("26.06", None),
    ],
)
def test_the_image_tag_determines_the_pytorch_version_of_known_releases(tmp_path, tag, version):
    image = f"nvcr.io#nvidia/pytorch:{tag}-py3"
    assert torch_version(*of_container(tmp_path, image=image)) == version


def test_an_explicit_version_overrides_the_tag(tmp_path):
    image = "nvcr.io#nvidia/pytorch:25.03-py3"
    assert torch_version(*of_container(tmp_path, image=image, torch_version="2.10")) == (2, 10)
    assert torch_version(*of_container(tmp_path, {"torch_version": "2.6"}, image="/x.sqsh")) == (2, 6)
    assert torch_version(*of_container(tmp_path, {"torch_version": "2.6"}, torch_version="2.8")) == (2, 8)


@pytest.mark.parametrize(
    ("wanted", "version", "holds"),
    [
        (None, (2, 9), True),
        ("<2.9", None, True),
        ("<2.9", (2, 8), True),
        ("<2.9", (2, 9), False),
        ("<2.9", (2, 10), False),
        (">=2.9", (2, 8), False),
        (">=2.9", (2, 9), True),
        (">=2.9", (2, 10), True),
        (">=2.10", (2, 9), False),
        ("<3.0", (2, 13), True),
    ],
)
def test_ranges_compare_numbers_not_texts(wanted, version, holds):
    assert holds_for(wanted, version) is holds
