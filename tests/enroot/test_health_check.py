"""health_check.py on this machine: what is there, what is missing, what pretends to be something else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.enroot.conftest import ENROOT

HEALTH_CHECK = str(ENROOT / "health_check.py")


def health_check(
    *options: str, python: tuple[str, ...] = (sys.executable,), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python, HEALTH_CHECK, *options],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def finding(name: str, python: tuple[str, ...] = (sys.executable,), **environment: str) -> dict[str, str]:
    done = health_check("--json", "--only", f"--need={name}", python=python, **environment)
    found: dict[str, str] = json.loads(done.stdout)["found"][name]
    return found


def package(folder: Path, files: dict[str, str]) -> str:
    """A folder for PYTHONPATH with these files."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def test_installed_components_are_found(stand_in: str) -> None:
    done = health_check("--only", "--need=torch,trainer,zstd", "--json", python=(stand_in,))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ok"] is True
    states = {name: one["state"] for name, one in document["found"].items()}
    assert states == {"torch": "ok", "trainer": "ok", "zstd": "ok"}
    assert "megatron-core" in document["found"]["trainer"]["detail"]


def test_without_packages_it_still_runs_and_fails_by_name() -> None:
    done = health_check("--need=torch,apex,zstd", python=(sys.executable, "-S", "-I"))
    assert done.returncode == 1
    assert done.stderr == "health_check: missing: torch, apex\n"
    lines = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()}
    assert (lines["torch"], lines["apex"], lines["te"], lines["zstd"]) == (
        "MISSING",
        "MISSING",
        "missing",
        "ok",
    )


def test_components_that_are_not_needed_may_be_missing() -> None:
    assert health_check(python=(sys.executable, "-S", "-I")).returncode == 0


@pytest.mark.parametrize("option", ["--need=gpus", "--bogus"])
def test_wrong_usage(option: str) -> None:
    done = health_check(option)
    assert (done.returncode, done.stdout) == (2, "")


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    assert "megatron-core" in health_check("--need=megatron").stderr


def test_no_color_in_a_pipe() -> None:
    assert "\033" not in health_check("--only", "--need=zstd,ucx").stdout


def test_save_lists_the_installed_components(tmp_path: Path) -> None:
    health_check("--only", "--need=zstd,infiniband", f"--save={tmp_path / 'found'}")
    assert (tmp_path / "found").read_text().startswith("zstd ")


# ==== apex ====

TORCH = {"torch/__init__.py": ""}
"""A torch that is imported in no time."""
APEX = {"apex/__init__.py": "", "apex/multi_tensor_apply/__init__.py": ""}
KERNELS = ("amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda")


def test_the_apex_of_pypi_is_not_nvidias(tmp_path: Path) -> None:
    path = package(tmp_path, {"apex/__init__.py": "import pyramid"})
    assert "is PyPI's apex, another program" in finding("apex", PYTHONPATH=path)["detail"]


def test_apex_without_its_kernels_does_not_count(tmp_path: Path) -> None:
    path = package(tmp_path, APEX | TORCH | {"amp_C.py": ""})
    found = finding("apex", PYTHONPATH=path)
    assert found["state"] == "missing"
    assert "without its kernels fused_layer_norm_cuda, fused_weight_gradient_mlp_cuda" in found["detail"]


def test_apex_with_its_kernels_counts(tmp_path: Path) -> None:
    path = package(tmp_path, APEX | TORCH | {f"{name}.py": "" for name in KERNELS})
    assert finding("apex", PYTHONPATH=path)["state"] == "ok"


# ==== imports ====


def te(folder: Path, text: str) -> str:
    modules = {"transformer_engine/__init__.py": ""}
    return package(folder, TORCH | modules | {"transformer_engine/pytorch.py": text})


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has a GPU driver")
def test_a_component_that_only_lacks_the_driver_is_installed(tmp_path: Path) -> None:
    path = te(tmp_path, 'raise ImportError("libcuda.so.1: cannot open shared object file")')
    found = finding("te", PYTHONPATH=path)
    assert (found["state"], found["fails"]) == ("installed", False)


def test_a_component_that_cannot_be_imported_is_missing(tmp_path: Path) -> None:
    found = finding("te", PYTHONPATH=te(tmp_path, 'raise OSError("undefined symbol: x")'))
    assert found["state"] == "missing"
    assert "OSError: undefined symbol: x" in found["detail"]


def test_a_failing_import_happens_once(tmp_path: Path) -> None:
    """Five checks need torch. Each import would take time and leave traces."""
    text = f"with open({str(tmp_path / 'tries')!r}, 'a') as file: file.write('x')\nraise OSError('broken')"
    path = package(tmp_path, {"torch/__init__.py": text})
    health_check("--need=torch,te,gpu,nccl", "--only", PYTHONPATH=path)
    assert (tmp_path / "tries").read_text() == "x"


def test_output_of_a_module_is_not_in_the_document(tmp_path: Path) -> None:
    path = te(tmp_path, "print('hello from an import')")
    assert finding("te", PYTHONPATH=path)["state"] == "ok"


# ==== DeepSpeed ====

FACTS = "installed_ops = {'cpu_adam': True, 'async_io': True, 'fused_adam': False}\ntorch_info = {'version': '2.7'}\n"
COMPANIONS = {
    f"{name}.py": "__version__ = '9'" for name in ("transformers", "trl", "peft", "accelerate", "datasets")
}


def deepspeed(folder: Path, torch_version: str, facts: str = FACTS) -> str:
    modules = {
        "torch.py": f"__version__ = {torch_version!r}",
        "deepspeed/__init__.py": "__version__ = '0.19.8'",
    }
    return package(folder, modules | {"deepspeed/git_version_info.py": facts})


def test_deepspeed_is_shown_with_its_kernels_and_companions(tmp_path: Path) -> None:
    path = package(tmp_path, COMPANIONS) and deepspeed(tmp_path, "2.7.0a0+nv25.3")
    found = finding("deepspeed", PYTHONPATH=path)
    assert found["state"] == "ok", found
    assert found["detail"].startswith("0.19.8, transformers ")
    assert found["detail"].endswith("; kernels: async_io, cpu_adam")


def test_deepspeed_built_for_another_torch_does_not_count(tmp_path: Path) -> None:
    found = finding("deepspeed", PYTHONPATH=package(tmp_path, COMPANIONS) and deepspeed(tmp_path, "2.9.1"))
    assert found["state"] == "missing"
    assert "kernels for PyTorch 2.7, and this is 2.9.1" in found["detail"]


def test_deepspeed_without_compiled_kernels_says_when_they_are_compiled(tmp_path: Path) -> None:
    facts = "installed_ops = {'cpu_adam': False}\ntorch_info = {'version': '0.0'}\n"
    path = package(tmp_path, COMPANIONS) and deepspeed(tmp_path, "2.9.1", facts)
    assert finding("deepspeed", PYTHONPATH=path)["detail"].endswith("none (the first job compiles them)")


def test_deepspeed_without_its_companions_does_not_count(tmp_path: Path) -> None:
    others = {name: text for name, text in COMPANIONS.items() if name != "trl.py"}
    path = package(tmp_path, others) and deepspeed(tmp_path, "2.7.0")
    found = finding("deepspeed", python=(sys.executable, "-S"), PYTHONPATH=path)
    assert (found["state"], found["detail"]) == ("missing", "no module trl")


# ==== files ====


def test_the_shipped_topology() -> None:
    path = str(ENROOT / "topology/ndv5-topo.xml")
    found = finding("topology", NCCL_TOPO_FILE=path)
    assert (found["state"], found["detail"]) == ("ok", f"{path}: 8 GPUs, 8 NICs")


@pytest.mark.parametrize("text", ["", "<system", "<system version='1'/>", "<html/>"])
def test_a_file_that_is_not_a_topology(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.xml").write_text(text)
    assert finding("topology", NCCL_TOPO_FILE=str(tmp_path / "x.xml"))["state"] == "missing"


def test_sharp_is_its_plugin_and_its_library(tmp_path: Path) -> None:
    (tmp_path / "libnccl-net.so").touch()
    assert "no libsharp_coll.so" in finding("sharp", LD_LIBRARY_PATH=str(tmp_path))["detail"]
    (tmp_path / "libsharp_coll.so.5").touch()
    assert finding("sharp", LD_LIBRARY_PATH=str(tmp_path))["state"] == "ok"
