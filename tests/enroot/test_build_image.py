"""build-image.sh from its options to the published image: on a stand-in for enroot, and on the real one where it is."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.enroot.conftest import ENROOT, STAND_IN, ImageBuild, executable
from tests.enroot.registry import registry

DIGEST = "sha256:" + "0123456789abcdef" * 4


def refused(build: ImageBuild, *options: str) -> str:
    done = build.run(*options)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


# ==== options ====


def test_help_prints_the_usage_and_exits_with_0() -> None:
    done = subprocess.run([ENROOT / "build-image.sh", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: build-image.sh --output FILE.sqsh")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--base=nvcr.io#nvidia/pytorch", "has no tag"),
        ("--base=nvcr.io#nvidia/pytorch:latest", "the tag latest can change"),
        ("--base=nvcr.io#NVIDIA/pytorch:1", "lower case"),
        ("--base=nvcr.io#nvidia/pytorch:1;rm", "is neither [REGISTRY#]NAME:TAG"),
        ("--base=nvcr.io#nvidia/pytorch:1@sha256:12", "is neither [REGISTRY#]NAME:TAG"),
        ("--base=/nowhere/x.sqsh", "no such file"),
        ("--output=/nowhere/x.sqsh", "its directory does not exist"),
        ("--output=x.img", "must end in .sqsh"),
        ("--code=/nowhere", "no such file or directory"),
        ("--code=/usr", "neither a directory of 'hpcgen install-code', nor a wheel, nor a checkout"),
        ("--package=zstd;rm", "is not the name of a Debian package"),
        ("--megatron-core=1.0", "contains its own Megatron-Core"),
        ("--doca=newest", "is not a version"),
        ("--topology=/nowhere", "no such file"),
        ("--work=/nowhere", "is not a directory"),
        ("--base=", "needs a value"),
        ("--need=torch,tea", "--need 'tea' is none of: driver gpu torch te"),
        ("--need=torch te", "is not a comma-separated list"),
        ("--need=*", "is not a comma-separated list"),
        ("--megatron-deepspeed=/usr", "needs DeepSpeed: add --deepspeed"),
        ("--bogus", "unknown argument"),
    ],
)
def test_wrong_options_are_refused_in_one_line(stand_in_build: ImageBuild, option: str, said: str) -> None:
    assert said in refused(stand_in_build, option)
    assert stand_in_build.calls() == []


@pytest.mark.parametrize("version", ["3.4.1", pytest.param("4.1.2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("base", "imported"),
    [
        ("nvcr.io#nvidia/pytorch:25.03-py3", "docker://nvcr.io#nvidia/pytorch:25.03-py3"),
        ("nvcr.io/nvidia/pytorch:25.03-py3", "docker://nvcr.io#nvidia/pytorch:25.03-py3"),
        ("reg:5000/a/b:1", "docker://reg:5000#a/b:1"),
        ("ubuntu:24.04", "docker://ubuntu:24.04"),
        # the form that enroot 3 refuses, as one that all take
        (f"nvcr.io#nvidia/pytorch:25.03-py3@{DIGEST}", f"docker://nvcr.io#nvidia/pytorch:{DIGEST}"),
        (f"nvcr.io/nvidia/pytorch@{DIGEST}", f"docker://nvcr.io#nvidia/pytorch:{DIGEST}"),
    ],
)
def test_references_are_given_as_every_enroot_takes_them(
    stand_in_build: ImageBuild, version: str, base: str, imported: str
) -> None:
    done = stand_in_build.run(f"--base={base}", STAND_IN_VERSION=version, STAND_IN_FAIL="create")
    assert "could not unpack" in done.stderr  # so it was imported
    assert stand_in_build.calls()[0].split()[-1] == imported


def test_the_stand_in_refuses_what_enroot_3_refuses(tmp_path: Path) -> None:
    """Or the test above would prove nothing."""
    done = subprocess.run(
        [STAND_IN, "import", "-o", tmp_path / "x.sqsh", f"docker://nvcr.io#nvidia/pytorch@{DIGEST}"],
        env={**os.environ, "STAND_IN_VERSION": "3.4.1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "Invalid image reference" in done.stderr) == (1, True)


# ==== a good build ====


def test_a_build_leaves_the_image_and_its_record(stand_in_build: ImageBuild) -> None:
    done = stand_in_build.run("--doca=2.9.1")
    assert done.returncode == 0, done.stderr
    assert stand_in_build.is_whole()
    assert stand_in_build.fits_its_record()
    assert stand_in_build.leftovers() == []
    recorded = stand_in_build.recorded()
    assert recorded["megatron-core"] == "0.16.1"
    assert recorded["base-digest"] == f"sha256:{'d' * 64}"
    assert recorded["doca"] == "2.9.1"
    assert "inode" not in recorded


def test_only_packages_are_installed_as_the_root_of_the_namespace(finished: ImageBuild) -> None:
    started = [call for call in finished.calls() if call.startswith("enroot start")]
    assert ["--root" in call for call in started] == [True, False, False]
    assert ["--rw" in call for call in started] == [True, True, False]
    assert " packages none zstd ibverbs-utils infiniband-diags perftest" in started[0]
    assert f"{finished.folder}/hpcgen-0.1.0-abc:/mnt/code/hpcgen-0.1.0-abc:none:bind,ro" in started[1]
    assert "check torch,te,apex,megatron-core,nccl,ucx,zstd,topology,trainer" in started[2]


def test_zstd_is_needed_where_it_is_installed(stand_in_build: ImageBuild) -> None:
    assert stand_in_build.run("--package=none").returncode == 0
    assert any(
        "check torch,te,apex,megatron-core,nccl,ucx,topology,trainer" in call
        for call in stand_in_build.calls()
    )


def megatron_deepspeed(folder: Path) -> Path:
    """The part of a checkout that the recipe looks for."""
    data = folder / "Megatron-DeepSpeed/megatron/data"
    data.mkdir(parents=True)
    (data / "Makefile").write_text("default:\n\techo built >helpers.so\n")
    return data.parents[1]


def test_deepspeed_is_installed_and_needed(stand_in_build: ImageBuild) -> None:
    checkout = megatron_deepspeed(stand_in_build.folder)
    done = stand_in_build.run("--deepspeed", f"--megatron-deepspeed={checkout}")
    assert done.returncode == 0, done.stderr
    started = [call for call in stand_in_build.calls() if call.startswith("enroot start")]
    assert " packages none zstd ibverbs-utils infiniband-diags perftest libaio-dev" in started[0]
    assert started[2].endswith(" deepspeed /mnt/megatron-deepspeed")
    assert f"{checkout}:/mnt/megatron-deepspeed:none:bind,ro" in started[2]
    assert "--root" not in started[2]
    assert "check torch,te,apex,megatron-core,nccl,ucx,zstd,topology,trainer,deepspeed" in started[3]
    record = stand_in_build.record.read_text()
    assert "\nrecipe deepspeed.txt " in record
    assert "\nmegatron-deepspeed " in record


def test_an_image_without_deepspeed_is_not_one_with_it(finished_build: ImageBuild) -> None:
    assert " deepspeed" not in "".join(finished_build.calls())
    assert "made from other inputs" in refused(finished_build, "--deepspeed")


def test_a_changed_checkout_of_megatron_deepspeed_is_another_input(stand_in_build: ImageBuild) -> None:
    checkout = megatron_deepspeed(stand_in_build.folder)
    options = ("--deepspeed", f"--megatron-deepspeed={checkout}")
    assert stand_in_build.run(*options).returncode == 0
    assert "already there" in stand_in_build.run(*options).stderr
    (checkout / "pretrain_gpt.py").write_text("changed")
    assert "made from other inputs" in refused(stand_in_build, *options)
    assert "it has no megatron/data/Makefile" in refused(
        stand_in_build, "--deepspeed", "--megatron-deepspeed=/usr"
    )


def test_the_same_again_is_already_there(finished_build: ImageBuild) -> None:
    before = finished_build.output.stat()
    done = finished_build.run()
    assert done.returncode == 0
    assert "already there" in done.stderr
    assert finished_build.calls() == []
    assert finished_build.output.stat() == before
    assert finished_build.leftovers() == []


def test_need_accepts_exactly_the_checks_of_the_image() -> None:
    done = subprocess.run([ENROOT / "build-image.sh", "--help"], capture_output=True, text=True, check=True)
    offered = done.stdout.partition("Possible names:")[2].partition("--work")[0].split()
    command = [sys.executable, ENROOT / "health_check.py", "--need=nothing"]
    refusal = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert offered == re.search(r"\(known names: (.*)\)", refusal)[1].split(", ")


def test_an_image_that_is_there_must_have_been_checked_for_what_is_needed(stand_in_build: ImageBuild) -> None:
    assert stand_in_build.run("--need=torch,te").returncode == 0
    assert "already there" in stand_in_build.run("--need=te").stderr
    done = stand_in_build.run("--need=te,sharp,apex")
    assert (done.returncode, "never checked for sharp apex;" in done.stderr) == (1, True)
    assert stand_in_build.fits_its_record()
    with stand_in_build.record.open("a") as record:
        record.write("found sharp 3.9.0\n")  # looked for in every build, needed or not
    assert "never checked for apex;" in stand_in_build.run("--need=te,sharp,apex").stderr
    assert stand_in_build.run("--need=te,sharp,apex", "--force").returncode == 0
    assert "already there" in stand_in_build.run("--need=apex").stderr


def test_force_rebuilds_the_image(finished_build: ImageBuild) -> None:
    before = finished_build.output.stat().st_ino
    assert finished_build.run("--force").returncode == 0
    assert finished_build.output.stat().st_ino != before
    assert finished_build.fits_its_record()


def test_on_lustre_the_image_is_striped_and_nothing_else(stand_in_build: ImageBuild) -> None:
    executable(
        stand_in_build.folder / "bin/lfs", f'#!/bin/bash\necho "$*" >{stand_in_build.folder}/striped\n'
    )
    assert stand_in_build.run().returncode == 0
    # A directory of the build's own: the layout of the images' directory is its owner's.
    assert (stand_in_build.folder / "striped").read_text() == (
        f"setstripe -E -1 -c -1 -S 1M {stand_in_build.output.parent}/.hpc.sqsh.building\n"
    )


def test_without_lustre_the_build_continues(stand_in_build: ImageBuild) -> None:
    executable(stand_in_build.folder / "bin/lfs", "#!/bin/bash\nexit 1\n")
    assert stand_in_build.run().returncode == 0


# ==== what is there already ====


def test_an_image_from_other_inputs_is_kept(finished_build: ImageBuild) -> None:
    before = finished_build.output.read_bytes()
    assert "made from other inputs" in refused(finished_build, "--base=nvcr.io#nvidia/pytorch:25.04-py3")
    assert finished_build.output.read_bytes() == before
    assert finished_build.fits_its_record()


def test_an_image_of_unknown_origin_is_kept(stand_in_build: ImageBuild) -> None:
    stand_in_build.output.write_text("someone's")
    assert "without a record" in refused(stand_in_build)
    assert stand_in_build.output.read_text() == "someone's"


def test_a_damaged_image_is_noticed(finished_build: ImageBuild) -> None:
    with finished_build.output.open("ab") as file:
        file.write(b"x")
    done = finished_build.run()
    assert (done.returncode, "changed or damaged" in done.stderr) == (1, True)
    assert finished_build.run("--force").returncode == 0
    assert finished_build.fits_its_record()


def test_a_new_time_alone_is_recorded(finished_build: ImageBuild) -> None:
    os.utime(finished_build.output, (1, 1))
    done = finished_build.run()
    assert (done.returncode, "already there" in done.stderr) == (0, True)
    assert finished_build.fits_its_record()


def test_two_builds_of_one_image_do_not_mix(stand_in_build: ImageBuild) -> None:
    building = stand_in_build.output.parent / ".hpc.sqsh.building"
    building.mkdir(mode=0o700)
    with (building / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        (building / "image.sqsh").write_text("half of the other build's")
        done = stand_in_build.run()
        assert (done.returncode, "another build" in done.stderr) == (1, True)
        assert (building / "image.sqsh").read_text() == "half of the other build's"
    assert stand_in_build.run().returncode == 0
    assert stand_in_build.leftovers() == []


# ==== what goes wrong ====


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("import", "could not import"),
        ("create", "could not unpack"),
        ("packages", "installing packages failed"),
        ("code", "installing the code failed"),
        ("check", "lacks what --need names"),
        ("export", "could not export"),
    ],
)
def test_a_failing_step_leaves_nothing(stand_in_build: ImageBuild, word: str, said: str) -> None:
    done = stand_in_build.run(STAND_IN_FAIL=word)
    assert done.returncode == 1
    assert said in done.stderr
    assert not stand_in_build.output.exists()
    assert not stand_in_build.record.exists()
    assert stand_in_build.leftovers() == []


def test_a_failing_rebuild_keeps_the_old_image(finished_build: ImageBuild) -> None:
    before = finished_build.output.read_bytes()
    assert finished_build.run("--force", STAND_IN_FAIL="export").returncode == 1
    assert finished_build.output.read_bytes() == before
    assert finished_build.fits_its_record()


def test_a_full_disk_leaves_nothing(stand_in_build: ImageBuild) -> None:
    """A file system of eight pages, in a namespace where this user may mount one."""
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine gives no user namespaces")
    images = stand_in_build.output.parent
    script = f'mount -t tmpfs -o size=32k none {images} && "$@"; status=$?; ls -A {images}; exit $status'
    stand_in_build.within = ("unshare", "-Urm", "bash", "-c", script, "full")
    done = stand_in_build.run()
    assert done.returncode == 1
    assert "is there room" in done.stderr
    assert done.stdout == ""
    assert stand_in_build.leftovers() == []


def test_term_cleans_up(stand_in_build: ImageBuild) -> None:
    ending = stand_in_build.folder / "bin/mv"
    ending.write_text("#!/bin/bash\nkill -TERM $PPID\nexit 0\n")
    done = stand_in_build.run()
    assert done.returncode == 143
    assert not stand_in_build.output.exists()
    assert stand_in_build.leftovers() == []


def test_a_record_that_cannot_be_written_fails_the_build(stand_in_build: ImageBuild) -> None:
    """The image is in its place and its record is not: the build fails, and the next one ends it."""
    ending = stand_in_build.folder / "bin/mv"
    whole = ending.read_text()
    executable(ending, f"#!/bin/bash\n[[ $* != *.record ]] || exit 1\n{whole.partition(chr(10))[2]}")
    done = stand_in_build.run()
    assert (done.returncode, "cannot write" in done.stderr, "made" in done.stderr) == (1, True, False)
    assert stand_in_build.is_whole()
    assert not stand_in_build.record.exists()
    assert stand_in_build.run().returncode == 1
    executable(ending, whole)
    done = stand_in_build.run()
    assert (done.returncode, "published the record" in done.stderr) == (0, True), done.stderr
    assert stand_in_build.fits_its_record()
    assert stand_in_build.leftovers() == []


def test_a_link_in_the_place_of_the_work_directory_is_not_followed(stand_in_build: ImageBuild) -> None:
    stand_in_build.run(STAND_IN_FAIL="create")
    [scratch] = {
        word for call in stand_in_build.calls() for word in re.findall(r"(/\S*/hpcgen-image-[^/\s]*)", call)
    }
    target = stand_in_build.folder / "mine"
    target.mkdir()
    (target / "file").write_text("")
    (target / "file").chmod(0o400)
    Path(scratch).symlink_to(target)
    done = stand_in_build.run()
    assert (done.returncode, "or is a link" in done.stderr) == (1, True)
    assert stat.S_IMODE((target / "file").stat().st_mode) == 0o400
    assert Path(scratch).is_symlink()


# ==== killed ====


def kill_and_go_on(build: ImageBuild, *options: str, **kill: str) -> None:
    """After a kill, only a complete image has the final name, and the next build ends with a valid one."""
    existed = build.output.exists()
    done = build.run(*options, **kill)
    assert done.returncode == -9, done.stderr
    assert build.output.exists() or not existed
    if build.output.exists():
        assert build.is_whole()
    done = build.run(*(() if build.output.exists() else options))
    assert done.returncode == 0, done.stderr
    assert build.is_whole()
    assert build.fits_its_record()
    assert build.leftovers() == []


def forget(build: ImageBuild) -> None:
    build.output.unlink()
    build.record.unlink()


@pytest.mark.slow
def test_killed_before_any_call(finished_build: ImageBuild) -> None:
    for number in range(1, len(finished_build.calls()) + 1):
        forget(finished_build)
        kill_and_go_on(finished_build, KILL_BEFORE=str(number))


def test_killed_before_each_kind_of_call(finished_build: ImageBuild) -> None:
    calls = finished_build.calls()
    starts = ("enroot create", "mv -fT")
    first = [
        next(number for number, call in enumerate(calls, 1) if call.startswith(start)) for start in starts
    ]
    # between the image and its record
    [*_, last] = [number for number, call in enumerate(calls, 1) if call.startswith("mv")]
    for number in (*first, last):
        forget(finished_build)
        kill_and_go_on(finished_build, KILL_BEFORE=str(number))


@pytest.mark.parametrize("call", ["enroot import", "enroot export"])
def test_killed_while_a_file_is_written(stand_in_build: ImageBuild, call: str) -> None:
    kill_and_go_on(stand_in_build, KILL_DURING=call)


def test_killed_while_an_image_is_replaced(finished_build: ImageBuild) -> None:
    calls = finished_build.calls()
    publishing = [number for number, call in enumerate(calls, 1) if call.startswith("mv")]
    assert len(publishing) == 2
    for number in publishing:
        kill_and_go_on(finished_build, "--force", KILL_BEFORE=str(number))


# ==== the real enroot ====


def test_the_real_enroot_makes_an_image(real_build: ImageBuild) -> None:
    done = real_build.run()
    assert done.returncode == 0, done.stderr
    assert real_build.is_whole()
    assert real_build.fits_its_record()
    assert real_build.leftovers() == []
    assert "8 GPUs, 8 NICs" in done.stdout

    listing = subprocess.run(
        ["unsquashfs", "-ll", real_build.output], capture_output=True, text=True, check=True
    ).stdout
    # Files that only their owner could read in the code directory: users of the image are others.
    [code] = [line for line in listing.splitlines() if line.endswith("/opt/hpcgen/python/hello/__init__.py")]
    assert code.startswith("-rw-r--r-- root/root")
    assert "/opt/microsoft/ndv5-topo.xml" in listing
    assert "/mnt/install-inside.sh" not in listing
    environment = subprocess.run(
        ["unsquashfs", "-cat", real_build.output, "etc/environment"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert environment.stdout == "PYTHONPATH=/opt/hpcgen/python\n"

    assert "already there" in real_build.run().stderr


def test_the_real_enroot_and_a_missing_need(real_build: ImageBuild) -> None:
    done = real_build.run("--need=te")
    assert (done.returncode, "missing: te" in done.stderr) == (1, True)
    assert not real_build.output.exists()
    assert real_build.leftovers() == []


def test_the_real_enroot_killed(real_build: ImageBuild) -> None:
    for call in ("enroot create", "enroot export"):
        kill_and_go_on(real_build, KILL_DURING=call)
        forget(real_build)


@pytest.mark.parametrize("pinned", [False, True])
def test_the_real_enroot_imports_from_a_registry(real_build: ImageBuild, pinned: bool) -> None:
    """By tag and by digest: whichever generation is installed takes the reference that the script gives it."""
    with registry(real_build.folder / "rootfs", "hpc/base", "1.0") as (address, digest):
        real_build.base = f"{address}#hpc/base:1.0" + (f"@{digest}" if pinned else "")
        done = real_build.run(ENROOT_ALLOW_HTTP="yes")
    assert done.returncode == 0, done.stderr
    assert real_build.fits_its_record()
    assert real_build.recorded()["base"] == real_build.base
    if (
        "digest"
        in subprocess.run([real_build.enroot, "help"], capture_output=True, text=True, check=False).stdout
    ):
        assert real_build.recorded()["base-digest"] == digest
