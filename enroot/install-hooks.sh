#!/usr/bin/env bash
# Installs environ.d, mounts.d and hooks.d for enroot, and the NCCL topology file if a node has none.
# `install-hooks.sh --help` describes its arguments.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
readonly here
readonly files=(environ.d/50-ndv5.env mounts.d/50-ndv5.fstab hooks.d/50-ndv5.sh)
readonly topology=/opt/microsoft/ndv5-topo.xml

usage() {
    cat <<END
usage: install-hooks.sh system|user|DIRECTORY [--remove]

Installs ${files[*]}, or removes them.

  system      for every container of the node: \${ENROOT_SYSCONF_PATH:-/etc/enroot}, as root. Also installs
              $topology if the node has none
  user        for your own containers: \${ENROOT_CONFIG_PATH:-~/.config/enroot}
  DIRECTORY   another such directory, for example while a node image is built (\$root/etc/enroot)

Each file describes its purpose. Exit status: 0 done, 1 failed, 2 usage error.
END
}

refuse() {
    printf 'install-hooks: %s\n' "$*" >&2
    exit 2
}

# SOURCE TARGET MODE: installs a file atomically, because containers that start meanwhile read the directory.
place() {
    local source=$1 target=$2 mode=$3 private
    mkdir -p -- "${target%/*}"
    # enroot ignores this name, because it only reads *.env, *.fstab and *.sh.
    private=$(mktemp -- "${target%/*}/.install.XXXXXX")
    cp -- "$source" "$private"
    chmod -- "$mode" "$private"
    mv -fT -- "$private" "$target"
    printf 'installed %s\n' "$target"
}

main() {
    local directory='' remove=0 where='' argument file mode
    for argument in "$@"; do
        case $argument in
        -h | --help)
            usage
            exit 0
            ;;
        --remove) remove=1 ;;
        -*) refuse "unknown option '$argument' (--help lists them)" ;;
        *)
            [[ -z $where ]] || refuse "'$where' and '$argument' are both given; give only one"
            where=$argument
            ;;
        esac
    done
    case $where in
    '') refuse "give system, user or a directory (see --help)" ;;
    system) directory=${ENROOT_SYSCONF_PATH:-/etc/enroot} ;;
    user) directory=${ENROOT_CONFIG_PATH:-${XDG_CONFIG_HOME:-$HOME/.config}/enroot} ;;
    */*) directory=$where ;;
    *) refuse "'$where' is neither system nor user; write a directory with a /" ;;
    esac
    for file in "${files[@]}"; do
        if ((remove)); then
            rm -fv -- "$directory/$file"
            continue
        fi
        mode=644
        [[ $file != *.sh ]] || mode=755
        place "$here/$file" "$directory/$file" "$mode"
    done
    if [[ $where == system && ! -e $topology ]] && ((!remove)); then
        place "$here/topology/ndv5-topo.xml" "$topology" 644
    fi
}

main "$@"
