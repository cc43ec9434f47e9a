#!/usr/bin/env bash
# Runs in the container that becomes the image, with the recipe's files next to this script.
# build-image.sh and the Dockerfile call it:
#
#   install-inside.sh packages DOCA|none NAME...         Debian packages; as root
#   install-inside.sh code KIND SOURCE MEGATRON_CORE     the Python code, the topology file, the health check
#   install-inside.sh deepspeed [MEGATRON_DEEPSPEED]     DeepSpeed and its companions; a checkout to copy
#   install-inside.sh check NAMES [FILE]                 fails unless the image has NAMES; writes what it has to FILE
#
# KIND is directory (made by hpcgen install-code), wheel, checkout or none.
set -euo pipefail
# Users of the image are neither root nor its builder, and must be able to read all files.
umask 022

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
readonly here
readonly prefix=/opt/hpcgen
# Directory of the topology file in Azure's HPC images, and in NCCL_TOPO_FILE.
readonly topologies=/opt/microsoft
readonly doca_repository=https://linux.mellanox.com/public/repo/doca

die() {
    printf 'install-inside: %s\n' "$*" >&2
    exit 1
}

# ==== Debian packages ====

install_packages() {
    local doca=$1 name
    local -a missing=()
    shift
    for name in "$@"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null) == installed ]] || missing+=("$name")
    done
    [[ $doca != none ]] || ((${#missing[@]} > 0)) || return 0
    export DEBIAN_FRONTEND=noninteractive
    [[ $doca == none ]] || add_doca_repository "$doca"
    apt-get update -qq
    if ((${#missing[@]} > 0)); then
        keep_what_is_there "${missing[@]}"
        apt-get install -y -qq --no-install-recommends --no-remove "${missing[@]}"
    fi
    # DOCA may replace packages of the image: that is the purpose of --doca.
    [[ $doca == none ]] || apt-get install -y -qq --no-install-recommends doca-ofed-userspace
    apt-get clean
    rm -rf /var/lib/apt/lists/*
}

# NVIDIA built libibverbs, UCX and the rest of the image together. Fails if a new package would replace one of them.
keep_what_is_there() {
    local changes
    changes=$(apt-get install --simulate --no-install-recommends --no-remove "$@" | sed -n 's/^Inst \([^ ]*\) \[.*/\1/p')
    [[ -z $changes ]] ||
        die "installing $* would replace packages of the image: ${changes//$'\n'/ }; omit the one that does"
}

add_doca_repository() {
    local version=$1 architecture system url key=/usr/share/keyrings/doca.asc
    # shellcheck source=/dev/null
    system=$(. /etc/os-release && printf '%s%s' "$ID" "$VERSION_ID")
    architecture=$(uname -m)
    [[ $architecture != aarch64 ]] || architecture=arm64-sbsa
    url=$doca_repository/$version/$system/$architecture
    python3 -c 'import sys, urllib.request; sys.stdout.buffer.write(urllib.request.urlopen(sys.argv[1], timeout=60).read())' \
        "$doca_repository/GPG-KEY-Mellanox.pub" >"$key" || die "cannot get the key of $doca_repository"
    printf 'deb [signed-by=%s] %s/ ./\n' "$key" "$url" >/etc/apt/sources.list.d/doca.list
}

# ==== Python code ====

install_code() {
    local kind=$1 source=$2 megatron_core=$3
    mkdir -p -- "$prefix" "$topologies"
    case $kind in
    directory) copy_code_directory "$source" ;;
    wheel | checkout) install_with_pip "$megatron_core" "${source}[data,submit]" ;;  # the extras that jobs need
    none) install_with_pip "$megatron_core" ;;
    *) die "unknown kind of code: $kind" ;;
    esac
    cp -- "$here/health_check.py" "$prefix/"
    [[ ! -f $here/image.txt ]] || cp -- "$here/image.txt" "$prefix/"
    cp -R -- "$here/topology/." "$topologies/"
    # cp keeps the modes of files that only their owner may read
    chmod -R u+rwX,go+rX,go-w -- "$prefix" "$topologies"
}

# A directory made by `hpcgen install-code` has all modules that NVIDIA's image lacks, for one version of Python.
copy_code_directory() {
    local source=$1
    rm -rf -- "$prefix/python"
    # Copies only what the manifest names, as it was hashed: no bytecode caches, and nothing that was added later.
    python3 - "$source" "$prefix/python" <<'END' || die "the code directory does not fit this image (above)"
import hashlib, json, pathlib, sys

source, target = map(pathlib.Path, sys.argv[1:])
text = (source / "manifest.json").read_bytes()
manifest = json.loads(text)
running = "{}.{}".format(*sys.version_info)
if manifest["python_version"] != running:
    sys.exit(
        f"it is for Python {manifest['python_version']}, and the image has {running}: "
        f"make it with hpcgen install-code --python-version {running}"
    )
target.mkdir()
(target / "manifest.json").write_bytes(text)
for name, digest in manifest["files"].items():
    file, copy = source / name, target / name
    content = file.read_bytes() if file.is_file() else b""
    if not file.is_file() or hashlib.sha256(content).hexdigest() != digest:
        sys.exit(f"{name} is missing or was changed since the directory was made")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(content)
    copy.chmod(0o755 if file.stat().st_mode & 0o100 else 0o644)
END
    # enroot reads a container's environment from this file. A job overrides PYTHONPATH by passing it to the container.
    sed -i '/^PYTHONPATH=/d' /etc/environment
    printf 'PYTHONPATH=%s\n' "$prefix/python" >>/etc/environment
}

# MEGATRON_CORE [REQUIREMENT]: installs Megatron-Core, and a wheel or checkout of hpcgen, without replacing packages of
# the image.
install_with_pip() {
    local megatron_core=$1 constraints
    shift
    constraints=$(mktemp)
    list_installed >"$constraints"
    # No package here needs apex, and apex on PyPI is an unrelated program.
    grep -qi '^apex==' "$constraints" || echo 'apex<0' >>"$constraints"
    # --no-deps, because the image has torch and numpy. Without psutil, installed below, the checkpoint writer hangs.
    pip_install --no-deps "megatron-core==$megatron_core"
    pip_install --constraint "$constraints" psutil tqdm packaging "$@"
    nothing_replaced "$constraints"
    rm -f -- "$constraints"
}

# PIP_CONSTRAINT is the image's list of pins, which may not suit these packages.
pip_install() {
    env -u PIP_CONSTRAINT PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
        python3 -m pip install --no-cache-dir --no-warn-script-location --progress-bar off "$@"
}

list_installed() {
    python3 - <<'END'
import importlib.metadata
import re

found = {}
for one in importlib.metadata.distributions():
    name, version = one.metadata["Name"], one.version
    # megatron-core may replace an older version
    if name and re.fullmatch(r"[A-Za-z0-9._-]+", name) and re.fullmatch(r"\d[A-Za-z0-9.!+_-]*", version or ""):
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key not in ("megatron-core", "hpcgen"):
            found.setdefault(key, version)
for name, version in sorted(found.items()):
    print(f"{name}=={version}")
END
}

nothing_replaced() {
    local changed
    changed=$(LC_ALL=C comm -23 <(grep -v '^apex<0$' "$1" | LC_ALL=C sort) <(list_installed | LC_ALL=C sort))
    [[ -z $changed ]] || die "pip replaced packages of the image: ${changed//$'\n'/ }"
}

# ==== DeepSpeed ====

# [MEGATRON_DEEPSPEED]: installs the packages of deepspeed.txt that the image lacks. pip checks their hashes.
install_deepspeed() {
    local before lacking line problems target=$prefix/Megatron-DeepSpeed
    before=$(mktemp)
    lacking=$(mktemp)
    list_installed >"$before"
    # Names in both lists are in lower case, with hyphens.
    while IFS= read -r line; do
        [[ $line == '#'* ]] || grep -q "^${line%%==*}==" "$before" || printf '%s\n' "$line"
    done <"$here/deepspeed.txt" >"$lacking"
    if grep -v '^deepspeed==' "$lacking" >"$lacking.others"; then
        pip_install --no-deps --require-hashes --requirement "$lacking.others"
    fi
    if grep '^deepspeed==' "$lacking" >"$lacking.deepspeed"; then
        # Compiled here, kernels need no compiler in a job, where each rank would wait a minute for them. Without the
        # headers of libaio, async_io (NVMe) is left out. Architectures: A100 and H100 or H200. On a node without GPUs,
        # DeepSpeed would build for CPUs.
        DS_ACCELERATOR=$(python3 -c 'import torch; print("cuda" if getattr(torch.version, "cuda", None) else "cpu")')
        export DS_ACCELERATOR
        DS_BUILD_CPU_ADAM=1 DS_BUILD_FUSED_ADAM=1 DS_BUILD_AIO=$([[ -f /usr/include/libaio.h ]] && echo 1 || echo 0) \
            TORCH_CUDA_ARCH_LIST='8.0;9.0' MAX_JOBS=8 \
            pip_install --no-deps --no-build-isolation --require-hashes --requirement "$lacking.deepspeed"
    fi
    nothing_replaced "$before"
    # Packages of the image may have had problems before.
    problems=$(python3 -m pip check | grep -iFf <(sed 's/==.*//' "$lacking") || true)
    [[ -z $problems ]] || die "the image's packages do not suit DeepSpeed's: ${problems//$'\n'/; }"
    rm -f -- "$before" "$lacking" "$lacking".*
    if [[ -n ${1-} ]]; then
        rm -rf -- "$target"
        mkdir -p -- "$prefix"
        cp -R -- "$1" "$target"
        # megatron.data.helpers builds the sample index. At run time, each job would compile it.
        make --silent -C "$target/megatron/data" || die "cannot build Megatron-DeepSpeed's helper library (above)"
        chmod -R u+rwX,go+rX,go-w -- "$target"
    fi
}

# ==== checks ====

check() {
    local file
    for file in "$here/topology"/*; do
        [[ ! -f $file ]] || export NCCL_TOPO_FILE=$topologies/${file##*/}
    done
    python3 "$prefix/health_check.py" --need "$1" ${2:+--save "$2"}
}

case ${1-} in
packages) install_packages "${@:2}" ;;
code) install_code "${@:2}" ;;
deepspeed) install_deepspeed "${@:2}" ;;
check) check "${@:2}" ;;
-h | --help)
    sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    ;;
*)
    printf 'install-inside: unknown command %s (--help lists them)\n' "${1:-(none)}" >&2
    exit 2
    ;;
esac
