#!/usr/bin/env bash
# Builds a container image for training: NVIDIA's PyTorch image, Megatron-Core, hpcgen and its trainer, a few
# tools for InfiniBand, and the NCCL topology file of Azure's NDv5; with --deepspeed also DeepSpeed. Requires
# enroot (3.4 or newer) and the files next to this script, but no root, docker or hpcgen.
# `build-image.sh --help` lists the options.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
readonly here
readonly default_base='nvcr.io#nvidia/pytorch:25.03-py3'
readonly default_megatron_core=0.16.1
# Packages that NVIDIA's image lacks. Its UCX, SHARP, NCCL plugin and libibverbs are kept.
readonly default_packages=(zstd ibverbs-utils infiniband-diags perftest)
# The headers of libaio, which DeepSpeed's async_io needs for offload to NVMe.
readonly deepspeed_packages=(libaio-dev)
# Checks of health_check.py, which runs in the image.
readonly checks=(driver gpu torch te apex megatron-core trainer nccl ucx sharp infiniband zstd topology memlock deepspeed)
readonly locked_by_another=75

usage() {
    cat <<END
usage: build-image.sh --output FILE.sqsh [option]...

Builds a container image for training, and writes FILE.sqsh.record (its hash, size, time and contents) next to it.
The image appears complete or not at all. The next build removes the files of a build that was killed.

  --output FILE.sqsh      the image to build, on storage that every node sees
  --base IMAGE            [REGISTRY#]NAME:TAG, NAME:TAG@sha256:HEX, or an imported .sqsh
                          (default $default_base)
  --code PATH             hpcgen and its trainer: a directory made by "hpcgen install-code", a wheel, or a
                          checkout. Without it, the image only has Megatron-Core
  --megatron-core VERSION from the package index (default $default_megatron_core); a directory of install-code
                          contains its own
  --deepspeed             also install DeepSpeed, transformers, TRL, PEFT, accelerate and datasets, in the versions
                          of deepspeed.txt, and compile DeepSpeed's kernels for this node's CPU and for A100 to H200
  --megatron-deepspeed CHECKOUT
                          also copy a checkout of Megatron-DeepSpeed to /opt/hpcgen and build its helper library;
                          requires --deepspeed
  --package NAME          Debian package to install; can be repeated
                          (default: ${default_packages[*]},
                          with --deepspeed also ${deepspeed_packages[*]}; "none" adds none)
  --doca VERSION          replaces the image's user-space network packages with those of NVIDIA DOCA VERSION
                          (such as 2.9.1)
  --topology FILE         NCCL topology file, copied to /opt/microsoft under its name (default: NDv5's, from the
                          folder topology next to this script; "none" adds none)
  --need NAMES            what health_check.py must find in the image, separated by commas (default
                          torch,te,apex,megatron-core,nccl,ucx, and zstd, topology, trainer and deepspeed if they
                          are installed). Possible names:
                          ${checks[*]:0:7}
                          ${checks[*]:7}
  --work DIR              node-local directory with about 80 GB of free space (default \$TMPDIR, else /tmp)
  --force                 rebuild the image if it exists
  -h, --help              this text

enroot reads credentials for a registry from ~/.config/enroot/.credentials. No option takes them.
Exit status: 0 built or already there, 1 failed, 2 usage error.
END
}

say() { printf '%(%H:%M:%S)T build-image: %s\n' -1 "$*" >&2; }
fail() {
    printf 'build-image: %s\n' "$*" >&2
    exit 1
}
refuse() {
    printf 'build-image: %s\n' "$*" >&2
    exit 2
}

# ==== options ====

read_options() {
    output='' base=$default_base code='' megatron_core='' packages=() doca='' need='' force=0 deepspeed=0 megatron_deepspeed=''
    topology=$here/topology/ndv5-topo.xml work=${TMPDIR:-/tmp}
    while (($# > 0)); do
        case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --force)
            force=1
            shift
            continue
            ;;
        --deepspeed)
            deepspeed=1
            shift
            continue
            ;;
        --output | --base | --code | --megatron-core | --megatron-deepspeed | --package | --doca | --topology | --need | --work)
            [[ -n ${2-} ]] || refuse "$1 needs a value (see --help)"
            ;;
        --*=*)
            # --option=value is --option value
            set -- "${1%%=*}" "${1#*=}" "${@:2}"
            continue
            ;;
        *) refuse "unknown argument '$1' (--help lists the options)" ;;
        esac
        case $1 in
        --output) output=$2 ;;
        --base) base=$2 ;;
        --code) code=$2 ;;
        --megatron-core) megatron_core=$2 ;;
        --megatron-deepspeed) megatron_deepspeed=$2 ;;
        --package) packages+=("$2") ;;
        --doca) doca=$2 ;;
        --topology) topology=$2 ;;
        --need) need=$2 ;;
        --work) work=$2 ;;
        esac
        shift 2
    done
}

check_options() {
    local name zstd='' with_deepspeed=''
    ((!deepspeed)) || with_deepspeed=,deepspeed
    [[ -n $output ]] || refuse "--output is missing: set it to the .sqsh file to build"
    [[ $output == *.sqsh ]] || refuse "--output '$output' must end in .sqsh"
    [[ -d $(dirname -- "$output") ]] || refuse "--output '$output': its directory does not exist"
    output=$(readlink -f -- "$(dirname -- "$output")")/$(basename -- "$output")
    [[ -d $work && -w $work ]] || refuse "--work '$work' is not a directory that you may write to"
    work=$(readlink -f -- "$work")
    check_base
    check_code
    check_megatron_deepspeed
    [[ $topology != none ]] || topology=
    [[ -z $topology || -f $topology ]] || refuse "--topology '$topology': no such file"
    [[ ${topology##*/} =~ ^[A-Za-z0-9._-]*$ ]] || refuse "--topology '$topology': its name has characters other than A-Z a-z 0-9 . _ -"
    [[ $megatron_core =~ ^([0-9][0-9a-z.]*)?$ ]] || refuse "--megatron-core '$megatron_core' is not a version"
    [[ $doca =~ ^([0-9]+(\.[0-9]+)+)?$ ]] || refuse "--doca '$doca' is not a version such as 2.9.1"
    if ((${#packages[@]} == 0)); then
        packages=("${default_packages[@]}")
        ((!deepspeed)) || packages+=("${deepspeed_packages[@]}")
    fi
    [[ ${packages[*]} != none ]] || packages=()
    for name in "${packages[@]}"; do
        [[ $name =~ ^[a-z0-9][a-z0-9.+-]+$ ]] || refuse "--package '$name' is not the name of a Debian package"
        [[ $name != zstd ]] || zstd=,zstd
    done
    [[ $need =~ ^[a-z,-]*$ ]] || refuse "--need '$need' is not a comma-separated list of names"
    [[ -n $need ]] || need=torch,te,apex,megatron-core,nccl,ucx$zstd${topology:+,topology}${code:+,trainer}$with_deepspeed
    for name in ${need//,/ }; do
        [[ " ${checks[*]} " == *" $name "* ]] || refuse "--need '$name' is none of: ${checks[*]}"
    done
    # A mount is SOURCE:TARGET, and enroot's configuration has no quoting.
    [[ $work$code$megatron_deepspeed != *[[:space:]:]* ]] ||
        refuse "--work, --code and --megatron-deepspeed must not contain blanks or colons"
    command -v enroot >/dev/null || fail "enroot is not installed on $HOSTNAME (or not on PATH)"
}

# Checks --base. Sets `source` to the reference for `enroot import`, or to nothing if the base is a file.
check_base() {
    local reference=$base registry=
    if [[ $base == *.sqsh ]]; then
        [[ -f $base ]] || refuse "--base '$base': no such file"
        base=$(readlink -f -- "$base")
        source=
        return
    fi
    # enroot before 4.0 looks for REGISTRY/NAME on Docker Hub. '#' works in every version.
    if [[ $reference =~ ^[^/#]*[.:][^/#]*/ ]]; then
        reference=${reference%%/*}#${reference#*/}
    fi
    if [[ $reference == *#* ]]; then
        registry=${reference%%#*}#
        reference=${reference#*#}
    fi
    [[ $registry =~ ^([A-Za-z0-9.-]+(:[0-9]+)?#)?$ &&
        $reference =~ ^[a-z0-9][a-z0-9._/-]*(:[A-Za-z0-9._-]+)?(@sha256:[0-9a-f]{64})?$ ]] ||
        refuse "--base '$base' is neither [REGISTRY#]NAME:TAG in lower case nor the path of a .sqsh"
    case $reference in
    # enroot before 4.0 refuses NAME@sha256:HEX. Every version accepts the digest in place of the tag.
    *@*) source=docker://$registry${reference%%[:@]*}:${reference#*@} ;;
    *:latest) refuse "--base '$base': the tag latest can change; use a version tag or, better, a digest" ;;
    *:*) source=docker://$registry$reference ;;
    *) refuse "--base '$base' has no tag: add one or, better, a digest" ;;
    esac
}

# Checks --code. Sets `code_kind` to its kind, and `code_hash` to a hash of its content.
check_code() {
    code_kind=none code_hash=none
    [[ -n $code ]] || return 0
    [[ -e $code ]] || refuse "--code '$code': no such file or directory"
    code=$(readlink -f -- "$code")
    if [[ -f $code/manifest.json ]]; then
        code_kind=directory
        code_hash=$(hash_of "$code/manifest.json")
        [[ -z $megatron_core ]] ||
            refuse "--megatron-core: the directory $code contains its own Megatron-Core; omit the option"
    elif [[ -f $code && $code == *.whl ]]; then
        code_kind=wheel
        code_hash=$(hash_of "$code")
    elif [[ -f $code/pyproject.toml && -d $code/trainer ]]; then
        code_kind=checkout
        code_hash=$(cd -- "$code" && find pyproject.toml hpcgen trainer templates topologies enroot -type f \
            ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-64)
    else
        refuse "--code '$code' is neither a directory of 'hpcgen install-code', nor a wheel, nor a checkout"
    fi
}

# Checks --megatron-deepspeed. Sets `megatron_deepspeed_hash` to a hash of its content.
check_megatron_deepspeed() {
    [[ -n $megatron_deepspeed ]] || return 0
    ((deepspeed)) || refuse "--megatron-deepspeed needs DeepSpeed: add --deepspeed"
    [[ -f $megatron_deepspeed/megatron/data/Makefile ]] ||
        refuse "--megatron-deepspeed '$megatron_deepspeed' is not a checkout: it has no megatron/data/Makefile"
    megatron_deepspeed=$(readlink -f -- "$megatron_deepspeed")
    megatron_deepspeed_hash=$(cd -- "$megatron_deepspeed" && find . -path ./.git -prune -o -type f ! -name '*.pyc' -print0 |
        LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-64)
}

hash_of() { sha256sum -- "$1" | cut -c 1-64; }

# Prints one line for each input of the image. A build with the same lines as an existing image is not repeated.
describe_inputs() {
    local file
    printf 'base %s\n' "$base"
    [[ -n $source ]] || printf 'base-size-mtime %s\n' "$(stat -c '%s %Y' -- "$base")"
    printf 'megatron-core %s\n' "$(megatron_core_version)"
    printf 'code %s %s\n' "$code_kind" "$code_hash"
    printf 'packages %s\n' "${packages[*]-}"
    printf 'doca %s\n' "${doca:-none}"
    [[ -z $topology ]] || printf 'topology %s %s\n' "${topology##*/}" "$(hash_of "$topology")"
    [[ -z $megatron_deepspeed ]] || printf 'megatron-deepspeed %s\n' "$megatron_deepspeed_hash"
    for file in "${recipe_files[@]}"; do
        printf 'recipe %s %s\n' "$file" "$(hash_of "$here/$file")"
    done
}

megatron_core_version() {
    if [[ $code_kind == directory ]]; then
        sed -n 's/.*"megatron-core": "\([^"]*\)".*/\1/p' "$code/manifest.json"
    else
        printf '%s\n' "${megatron_core:-$default_megatron_core}"
    fi
}

# ==== existing files ====

# Other users can predict these names, and create them as links to this user's files.
is_owned_by_user() { [[ -O $1 && ! -L $1 ]]; }

# Allows one build of an output at a time. The lock is held until this process and all processes that it started have
# ended. On a file system without locks, a message warns the user.
take_lock() {
    local directory=$1 status
    while true; do
        mkdir -m 700 -- "$directory" 2>/dev/null || [[ -d $directory ]] || fail "cannot make $directory"
        is_owned_by_user "$directory" || fail "$directory belongs to another user"
        exec {lock}>"$directory/lock"
        status=0
        flock -n -E "$locked_by_another" "$lock" || status=$?
        ((status != locked_by_another)) ||
            fail "another build of $output is running, or a program that a killed build started; wait for it to end"
        ((status == 0)) || say "no file locks in $directory: make sure that no other build of $output is running"
        # A build that has just ended may have removed the directory with this lock.
        [[ /proc/self/fd/$lock -ef $directory/lock ]] && return
        exec {lock}>&-
    done
}

# The image is published first, and then its record. If a build is killed in between, the image is complete, and the
# next build publishes the pending record.
record_is_pending() {
    [[ -f $building/record && -f $output ]] && grep -qx "inode $(stat -c %i -- "$output")" "$building/record"
}

publish_record() {
    sed '/^inode /d' "$building/record" >"$building/published" || return
    publish "$building/published" "$output.record" || return
    rm -f -- "$building/record"
}

# Ends the script if the image exists. Fails unless it was made from the same inputs.
look_for_image() {
    local record=$output.record hash lacking
    ((force)) && return
    [[ -e $output ]] || return 0
    [[ -f $record ]] ||
        refuse "$output exists without a record, so its contents are unknown; --force replaces it"
    hash=$(value_of sha256 "$record")
    if [[ $(stat -c '%s %Y' -- "$output") != "$(value_of size "$record") $(value_of mtime "$record")" ]]; then
        say "the size or time of $output differs from its record: hashing it"
        [[ $(hash_of "$output") == "$hash" ]] ||
            fail "$output was changed or damaged since it was made; --force rebuilds it"
        sed "s/^mtime .*/mtime $(stat -c %Y -- "$output")/" "$record" >"$building/record"
        publish "$building/record" "$record"
    fi
    [[ $(value_of inputs "$record") == "$inputs" ]] || refuse "$output exists, but was made from other inputs;" \
        "--force replaces it, another --output keeps both ($record lists its inputs)"
    lacking=$(not_checked "$record")
    [[ -z $lacking ]] || fail "$output exists, but it was never checked for ${lacking% };" \
        "--force rebuilds and checks it"
    say "already there: $output (sha256 $hash)"
    exit 0
}

# Prints the names in --need that the build of this record neither required nor found.
not_checked() {
    local known name
    known=,$(value_of need "$1"),$(sed -n 's/^found \([^ ]*\) .*/\1/p' "$1" | tr '\n' ,)
    for name in ${need//,/ }; do
        [[ $known == *",$name,"* ]] || printf '%s ' "$name"
    done
}

value_of() { sed -n "s/^$1 //p" "$2" | head -n 1; }

# ==== the build ====

clean_environment() {
    local name
    # enroot passes every variable to the container, which lacks the shell's Python, libraries and directories.
    for name in $(compgen -e); do
        case $name in
        PYTHON* | LD_* | VIRTUAL_ENV | CONDA_* | BASH_ENV | ENV | TMPDIR | NCCL_* | UCX_* | OMPI_* | PIP_TARGET | PIP_PREFIX)
            unset -v "$name"
            ;;
        esac
    done
    export PYTHONNOUSERSITE=1 LC_ALL=C.UTF-8
    # The build needs no GPU and no InfiniBand: enroot's hooks 98-nvidia and 99-mellanox do nothing.
    export NVIDIA_VISIBLE_DEVICES=void MELLANOX_VISIBLE_DEVICES=void
    # Some sites mount the home directory into every container, where ~/.local would hide the image's packages.
    export ENROOT_MOUNT_HOME=no ENROOT_ROOTFS_WRITABLE=no ENROOT_REMAP_ROOT=no ENROOT_FORCE_OVERRIDE=no
    export ENROOT_DATA_PATH=$scratch/data ENROOT_RUNTIME_PATH=$scratch/run ENROOT_TEMP_PATH=$scratch/tmp
    export ENROOT_CACHE_PATH=${ENROOT_CACHE_PATH:-$scratch/cache}
}

remove_tree() {
    [[ -e $1 || -L $1 ]] || return 0
    is_owned_by_user "$1" || return
    # A container can have directories that their owner may not write to.
    rm -rf --one-file-system -- "$1" 2>/dev/null ||
        { chmod -R u+rwX -- "$1" 2>/dev/null || true; rm -rf --one-file-system -- "$1"; }
}

clean_up() {
    local status=$?
    trap - EXIT
    if is_owned_by_user "$scratch"; then
        remove_tree "$scratch" || say "cannot remove $scratch, which contains the container of this build"
    fi
    if record_is_pending; then
        say "$output exists without its record: the next build writes the record from $building"
        exit "$status"
    fi
    remove_tree "$building" || say "cannot remove $building"
    exit "$status"
}

import_base() {
    image=$base
    [[ -n $source ]] || return 0
    image=$scratch/base.sqsh
    say "importing $base"
    enroot import --output "$image" "$source" || fail "enroot could not import $source (above);" \
        "if access was denied, check ~/.config/enroot/.credentials"
    [[ -s $image ]] || fail "enroot imported $source, but wrote nothing"
    # enroot 4.0 and newer can resolve a tag to a digest.
    digest=$(enroot digest "$source" 2>/dev/null) || digest=''
}

# inside reader|writer|root WORD...: runs install-inside.sh in the container, as this user without or with write access,
# or as the container's root.
inside() {
    local options=() mounts=(--mount "$scratch/recipe:/mnt")
    case $1 in
    writer) options=(--rw) ;;
    # apt requires user 0. --root maps this user to it in a user namespace, outside of which the user gets no
    # additional access to files.
    root) options=(--root --rw) ;;
    esac
    [[ -z $code ]] || mounts+=(--mount "$code:/mnt/code/${code##*/}:none:bind,ro")
    [[ -z $megatron_deepspeed ]] || mounts+=(--mount "$megatron_deepspeed:/mnt/megatron-deepspeed:none:bind,ro")
    shift
    enroot start "${options[@]}" "${mounts[@]}" container bash /mnt/install-inside.sh "$@"
}

fill_container() {
    local recipe=$scratch/recipe
    cp -- "${recipe_files[@]/#/$here/}" "$recipe/"
    mkdir -- "$recipe/topology"
    [[ -z $topology ]] || cp -- "$topology" "$recipe/topology/"
    printf '%s\n' "$description" >"$recipe/image.txt"
    mkdir -- "$recipe/code" "$recipe/megatron-deepspeed"
    # the mount point of --code
    if [[ $code_kind == wheel ]]; then
        : >"$recipe/code/${code##*/}"
    elif [[ -n $code ]]; then
        mkdir -- "$recipe/code/${code##*/}"
    fi
    if ((${#packages[@]} > 0)) || [[ -n $doca ]]; then
        say "installing packages: ${packages[*]-}${doca:+, DOCA $doca}"
        inside root packages "${doca:-none}" "${packages[@]}" || fail "installing packages failed (above)"
    fi
    say "installing Megatron-Core $(megatron_core_version); code: $code_kind $code"
    inside writer code "$code_kind" "/mnt/code/${code##*/}" "$(megatron_core_version)" ||
        fail "installing the code failed (above)"
    if ((deepspeed)); then
        say "installing DeepSpeed${megatron_deepspeed:+; Megatron-DeepSpeed: $megatron_deepspeed}"
        inside writer deepspeed ${megatron_deepspeed:+/mnt/megatron-deepspeed} || fail "installing DeepSpeed failed (above)"
    fi
    say "checking the image for $need"
    inside reader check "$need" /mnt/found || fail "the image lacks what --need names (above)"
}

write_record() {
    local file=$1
    {
        printf 'sha256 %s\n' "$(hash_of "$file")"
        stat -c $'size %s\nmtime %Y\ninode %i' -- "$file"
        printf 'inputs %s\n' "$inputs"
        printf '%s\n' "$description"
        printf 'need %s\n' "$need"
        [[ -z ${digest-} ]] || printf 'base-digest %s\n' "$digest"
        printf 'enroot %s\n' "$(enroot version)"
        printf 'made %(%Y-%m-%dT%H:%M:%S%z)T\n' -1
        if [[ -f $scratch/recipe/found ]]; then sed 's/^/found /' "$scratch/recipe/found"; fi
    } >"$building/record"
    sync -- "$building/record" "$building"
}

publish() {
    # each command is checked, because set -e has no effect in a condition
    sync -- "$1" || return
    mv -fT -- "$1" "$2" || return
    sync -- "$(dirname -- "$2")"
}

export_image() {
    local new=$building/image.sqsh
    # Many nodes read the image at once: striped over all of Lustre's servers, a 23 GiB image started 64 nodes in 74 s
    # instead of 200 s.
    if command -v lfs >/dev/null; then
        lfs setstripe -E -1 -c -1 -S 1M "$building" 2>/dev/null || say "not striped: $building is not on Lustre"
    fi
    say "exporting to ${output%/*}"
    enroot export --output "$new" container || fail "enroot could not export the image (above);" \
        "is there room in ${output%/*}?"
    [[ -s $new ]] || fail "enroot exported the container, but wrote nothing"
    say "hashing"
    write_record "$new"
    publish "$new" "$output"
    record_is_pending || fail "another process replaced $output while it was being made"
    publish_record || fail "cannot write $output.record (above)"
    say "made $output (sha256 $(value_of sha256 "$output.record"))"
}

main() {
    read_options "$@"
    check_options
    recipe_files=(install-inside.sh health_check.py)
    ((!deepspeed)) || recipe_files+=(deepspeed.txt)
    description=$(describe_inputs)
    inputs=$(sha256sum <<<"$description" | cut -c 1-64)
    building=${output%/*}/.${output##*/}.building
    scratch=$work/hpcgen-image-$UID-$(printf '%s' "$output" | sha256sum | cut -c 1-12)
    take_lock "$building"
    trap clean_up EXIT
    trap 'exit 143' TERM
    trap 'exit 130' INT
    if record_is_pending; then
        publish_record || fail "cannot write $output.record (above)"
        say "published the record of a build that was killed"
    fi
    # Files of a build that was killed.
    find "$building" -mindepth 1 ! -name lock -delete
    look_for_image
    remove_tree "$scratch" || fail "cannot remove $scratch: it belongs to another user or is a link; choose another --work"
    mkdir -m 700 -- "$scratch" || fail "cannot make $scratch"
    mkdir -- "$scratch"/{data,run,tmp,cache,recipe}
    clean_environment
    import_base
    say "unpacking ${image##*/}"
    enroot create --name container "$image" || fail "enroot could not unpack $image (above)"
    [[ -z $source ]] || rm -f -- "$image"
    fill_container
    export_image
}

main "$@"
