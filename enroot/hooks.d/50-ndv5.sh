#!/usr/bin/env bash
# enroot runs this before a container starts. On an Azure NDv5 node it ends a container with all GPUs that has no
# InfiniBand device or no NCCL topology file: with one line here, instead of slow or hanging collectives later.
# Other containers (some of the GPUs, or none) and other nodes pass. NDV5_HOOK=off in the job's environment skips it.
set -euo pipefail

# shellcheck source=/dev/null
source "${ENROOT_LIBRARY_PATH}/common.sh"

# The host's directories, which tests replace.
readonly gpus=${NDV5_HOOK_ROOT-}/proc/driver/nvidia/gpus
readonly infiniband=${NDV5_HOOK_ROOT-}/sys/class/infiniband

# The value that the container sees. The job's comes first, as in enroot's own hooks 98-nvidia and 99-mellanox.
setting() {
    local name=$1
    if [[ -v $name ]]; then
        printf '%s' "${!name}"
    else
        sed -n "s/^$name=//p" "$ENROOT_ENVIRON" | tail -n 1
    fi
}

# Azure gives the eight GPUs of this size these PCI domains.
is_ndv5() {
    local domain
    for domain in 0001 0002 0003 0008 0009 000a 000b 000c; do
        [[ -e $gpus/$domain:00:00.0 ]] || return 1
    done
}

devices=$(setting NVIDIA_VISIBLE_DEVICES)
if [[ ${NDV5_HOOK-} == off || $devices != all ]] || ! is_ndv5; then
    exit 0
fi

# With less than all GPUs NCCL needs no other node; with all of them a job may span nodes.
adapters=$(setting MELLANOX_VISIBLE_DEVICES)
shopt -s nullglob
found=("$infiniband"/*)
if ((${#found[@]} == 0)); then
    common::err "$HOSTNAME shows no InfiniBand device (/sys/class/infiniband is empty): drain the node; NDV5_HOOK=off starts anyway"
elif [[ ${adapters:-void} == void || $adapters == none ]]; then
    common::log WARN "MELLANOX_VISIBLE_DEVICES is ${adapters:-unset}: this container sees no InfiniBand; export MELLANOX_VISIBLE_DEVICES=all for jobs of several nodes"
fi

# In the image, mounted by mounts.d, or on the host, from where a mount of the job's own can bring it later.
topology=$(setting NCCL_TOPO_FILE)
topology=${topology:-/opt/microsoft/ndv5-topo.xml}
if [[ ! -s $ENROOT_ROOTFS$topology && ! -s ${NDV5_HOOK_ROOT-}$topology ]]; then
    common::err "the NCCL topology file $topology is neither in the image nor on $HOSTNAME: NCCL would pair GPUs with the wrong NICs; NDV5_HOOK=off starts anyway"
fi
