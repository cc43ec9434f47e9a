#!/usr/bin/env bash
# enroot runs this hook before a container starts. On an Azure NDv5 node, it refuses a container with all GPUs if there
# is no InfiniBand device or no NCCL topology file. A one-line error here prevents slow or hanging collectives later.
# Containers with fewer GPUs and other nodes are not checked. NDV5_HOOK=off in the job's environment skips the hook.
set -euo pipefail

# shellcheck source=/dev/null
source "${ENROOT_LIBRARY_PATH}/common.sh"

# The host's directories, which tests replace.
readonly gpus=${NDV5_HOOK_ROOT-}/proc/driver/nvidia/gpus
readonly infiniband=${NDV5_HOOK_ROOT-}/sys/class/infiniband

# NAME: prints the variable's value for the container. The job's value comes first, as in enroot's own hooks 98-nvidia
# and 99-mellanox.
setting() {
    local name=$1
    if [[ -v $name ]]; then
        printf '%s' "${!name}"
    else
        sed -n "s/^$name=//p" "$ENROOT_ENVIRON" | tail -n 1
    fi
}

# On Azure, the eight GPUs of this virtual machine size have these PCI domains.
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

# A container with all GPUs may be part of a job on several nodes, which needs InfiniBand.
adapters=$(setting MELLANOX_VISIBLE_DEVICES)
shopt -s nullglob
found=("$infiniband"/*)
if ((${#found[@]} == 0)); then
    common::err "$HOSTNAME shows no InfiniBand device (/sys/class/infiniband is empty): drain the node; NDV5_HOOK=off starts the container anyway"
elif [[ ${adapters:-void} == void || $adapters == none ]]; then
    common::log WARN "MELLANOX_VISIBLE_DEVICES is ${adapters:-unset}: this container sees no InfiniBand; export MELLANOX_VISIBLE_DEVICES=all for jobs on several nodes"
fi

# The file is in the image, mounted by mounts.d, or on the host, where the job itself can mount it later.
topology=$(setting NCCL_TOPO_FILE)
topology=${topology:-/opt/microsoft/ndv5-topo.xml}
if [[ ! -s $ENROOT_ROOTFS$topology && ! -s ${NDV5_HOOK_ROOT-}$topology ]]; then
    common::err "the NCCL topology file $topology is neither in the image nor on $HOSTNAME: NCCL would pair GPUs with the wrong NICs; NDV5_HOOK=off starts the container anyway"
fi
