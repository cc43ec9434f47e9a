#!/usr/bin/env bash
# Makes a container image for training: NVIDIA's PyTorch image, Megatron-Core, hpcgen and its trainer, a few
# tools for InfiniBand, and the NCCL topology file of Azure's NDv5. It needs enroot (3.4 or newer) and the files
# beside it, neither root nor docker nor hpcgen. `build-image.sh --help` says how.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
readonly here
readonly default_base='nvcr.io#nvidia/pytorch:25.03-py3'
readonly default_megatron_core=0.16.1
# What NVIDIA's image lacks: its own UCX, SHARP, NCCL plugin and libibverbs stay as they are.
readonly default_packages=(zstd ibverbs-utils infiniband-diags perftest)
# What health_check.py, which runs in the image, can look for.
readonly checks=(driver gpu torch te apex megatron-core trainer nccl ucx sharp infiniband zstd topology memlock)
readonly locked_by_another=75

usage() {
    cat <<END
usage: build-image.sh --output FILE.sqsh [option]...

Makes a container image for training and writes FILE.sqsh.record (hash, size, time, what is in it) beside it.
The image appears whole or not at all; what a killed build left behind is removed by the next one.

  --output FILE.sqsh      the image to make, on storage that every node sees
  --base IMAGE            [REGISTRY#]NAME:TAG, NAME:TAG@sha256:HEX, or an imported .sqsh
                          (default $default_base)
  --code PATH             hpcgen and its trainer: a directory made by "hpcgen install-code", a wheel, or a
                          checkout. Without it the image holds Megatron-Core only
  --megatron-core VERSION from the package index (default $default_megatron_core); a directory of install-code
                          brings its own
  --package NAME          a Debian package of the image; repeat it (default: ${default_packages[*]};
                          none adds none)
  --doca VERSION          NVIDIA DOCA's user-space network packages, such as 2.9.1, over those of the image
  --topology FILE         NCCL topology file, which keeps its name and comes to /opt/microsoft (default: NDv5's,
                          from the folder topology beside this script; none adds none)
  --need NAMES            what health_check.py must find in the image (default torch,te,apex,megatron-core,nccl,ucx;
                          zstd, topology and trainer where the image gets them), separated by commas, of:
                          ${checks[*]:0:7}
                          ${checks[*]:7}
  --work DIR              node-local directory with about 80 GB of room (default \$TMPDIR, else /tmp)
  --force                 make the image anew, also when it is there
  -h, --help              this text

Credentials for a registry are enroot's: ~/.config/enroot/.credentials, never an argument.
Exit status: 0 made or already there, 1 failed, 2 wrong usage.
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

# ==== what is asked for ====

read_options() {
    output='' base=$default_base code='' megatron_core='' packages=() doca='' need='' force=0
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
        --output | --base | --code | --megatron-core | --package | --doca | --topology | --need | --work)
            [[ -n ${2-} ]] || refuse "$1 needs a value (--help says which)"
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
    local name zstd=
    [[ -n $output ]] || refuse "--output is missing: name the .sqsh to make"
    [[ $output == *.sqsh ]] || refuse "--output '$output' must end in .sqsh"
    [[ -d $(dirname -- "$output") ]] || refuse "--output '$output': its directory does not exist"
    output=$(readlink -f -- "$(dirname -- "$output")")/$(basename -- "$output")
    [[ -d $work && -w $work ]] || refuse "--work '$work' is not a directory that you may write to"
    work=$(readlink -f -- "$work")
    check_base
    check_code
    [[ $topology != none ]] || topology=
    [[ -z $topology || -f $topology ]] || refuse "--topology '$topology': no such file"
    [[ ${topology##*/} =~ ^[A-Za-z0-9._-]*$ ]] || refuse "--topology '$topology': its name holds other than A-Z a-z 0-9 . _ -"
    [[ $megatron_core =~ ^([0-9][0-9a-z.]*)?$ ]] || refuse "--megatron-core '$megatron_core' is not a version"
    [[ $doca =~ ^([0-9]+(\.[0-9]+)+)?$ ]] || refuse "--doca '$doca' is not a version such as 2.9.1"
    ((${#packages[@]} > 0)) || packages=("${default_packages[@]}")
    [[ ${packages[*]} != none ]] || packages=()
    for name in "${packages[@]}"; do
        [[ $name =~ ^[a-z0-9][a-z0-9.+-]+$ ]] || refuse "--package '$name' is not the name of a Debian package"
        [[ $name != zstd ]] || zstd=,zstd
    done
    [[ $need =~ ^[a-z,-]*$ ]] || refuse "--need '$need' is no list of names with commas between them"
    [[ -n $need ]] || need=torch,te,apex,megatron-core,nccl,ucx$zstd${topology:+,topology}${code:+,trainer}
    for name in ${need//,/ }; do
        [[ " ${checks[*]} " == *" $name "* ]] || refuse "--need '$name' is none of: ${checks[*]}"
    done
    # A mount is SOURCE:TARGET, and enroot's configuration knows no quoting.
    [[ $work$code != *[[:space:]:]* ]] || refuse "--work and --code may hold neither blanks nor colons"
    command -v enroot >/dev/null || fail "enroot is not installed on $HOSTNAME (or not on PATH)"
}

# The reference as enroot's import takes it, in `source`; empty for a base that is a file.
check_base() {
    local reference=$base registry=
    if [[ $base == *.sqsh ]]; then
        [[ -f $base ]] || refuse "--base '$base': no such file"
        base=$(readlink -f -- "$base")
        source=
        return
    fi
    # REGISTRY/NAME means Docker Hub before enroot 4.0, and '#' is right in every version.
    if [[ $reference =~ ^[^/#]*[.:][^/#]*/ ]]; then
        reference=${reference%%/*}#${reference#*/}
    fi
    if [[ $reference == *#* ]]; then
        registry=${reference%%#*}#
        reference=${reference#*#}
    fi
    [[ $registry =~ ^([A-Za-z0-9.-]+(:[0-9]+)?#)?$ &&
        $reference =~ ^[a-z0-9][a-z0-9._/-]*(:[A-Za-z0-9._-]+)?(@sha256:[0-9a-f]{64})?$ ]] ||
        refuse "--base '$base' is not [REGISTRY#]NAME:TAG in lower case, nor the path of a .sqsh"
    case $reference in
    # enroot before 4.0 refuses NAME@sha256:HEX, and every version takes the digest in the place of the tag.
    *@*) source=docker://$registry${reference%%[:@]*}:${reference#*@} ;;
    *:latest) refuse "--base '$base': latest is another image tomorrow; give a tag or, better, a digest" ;;
    *:*) source=docker://$registry$reference ;;
    *) refuse "--base '$base' has no tag: give one or, better, a digest" ;;
    esac
}

# The kind of --code in `code_kind`, and what identifies its content in `code_hash`.
check_code() {
    code_kind=none code_hash=none
    [[ -n $code ]] || return 0
    [[ -e $code ]] || refuse "--code '$code': no such file or directory"
    code=$(readlink -f -- "$code")
    if [[ -f $code/manifest.json ]]; then
        code_kind=directory
        code_hash=$(hash_of "$code/manifest.json")
        [[ -z $megatron_core ]] ||
            refuse "--megatron-core: the directory $code brings its own; leave the option out"
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

hash_of() { sha256sum -- "$1" | cut -c 1-64; }

# What the image is made from, a line each: two builds with the same lines need not both happen.
describe_inputs() {
    local file
    printf 'base %s\n' "$base"
    [[ -n $source ]] || printf 'base-size-mtime %s\n' "$(stat -c '%s %Y' -- "$base")"
    printf 'megatron-core %s\n' "$(megatron_core_version)"
    printf 'code %s %s\n' "$code_kind" "$code_hash"
    printf 'packages %s\n' "${packages[*]-}"
    printf 'doca %s\n' "${doca:-none}"
    [[ -z $topology ]] || printf 'topology %s %s\n' "${topology##*/}" "$(hash_of "$topology")"
    for file in install-inside.sh health_check.py; do
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

# ==== what is there already ====

# Names that can be foreseen may be taken by others, with a link to something of ours.
is_ours() { [[ -O $1 && ! -L $1 ]]; }

# One build of an output at a time, held until this process and everything that it started have ended. A file
# system without locks is said so: then it is up to the people who build.
take_lock() {
    local directory=$1 status
    while true; do
        mkdir -m 700 -- "$directory" 2>/dev/null || [[ -d $directory ]] || fail "cannot make $directory"
        is_ours "$directory" || fail "$directory belongs to someone else"
        exec {lock}>"$directory/lock"
        status=0
        flock -n -E "$locked_by_another" "$lock" || status=$?
        ((status != locked_by_another)) ||
            fail "another build of $output runs, or a program that a killed build started; wait for it to end"
        ((status == 0)) || say "no file locks in $directory: see to it that no one else builds $output now"
        # A build that ended in between has removed the directory with the lock that we got.
        [[ /proc/self/fd/$lock -ef $directory/lock ]] && return
        exec {lock}>&-
    done
}

# The record follows the image that it names. Killed between the two renames, a build leaves a whole image beside a
# record that waits: the next build ends what it began.
record_waits() {
    [[ -f $building/record && -f $output ]] && grep -qx "inode $(stat -c %i -- "$output")" "$building/record"
}

publish_record() {
    sed '/^inode /d' "$building/record" >"$building/published" || return
    publish "$building/published" "$output.record" || return
    rm -f -- "$building/record"
}

# Ends the script when the image is there and made from the same.
look_for_image() {
    local record=$output.record hash lacking
    ((force)) && return
    [[ -e $output ]] || return 0
    [[ -f $record ]] ||
        refuse "$output is there without a record, so nobody knows what is in it; --force replaces it"
    hash=$(value_of sha256 "$record")
    if [[ $(stat -c '%s %Y' -- "$output") != "$(value_of size "$record") $(value_of mtime "$record")" ]]; then
        say "size or time of $output is not that of its record: hashing it"
        [[ $(hash_of "$output") == "$hash" ]] ||
            fail "$output was changed or damaged since it was made; --force makes it anew"
        sed "s/^mtime .*/mtime $(stat -c %Y -- "$output")/" "$record" >"$building/record"
        publish "$building/record" "$record"
    fi
    [[ $(value_of inputs "$record") == "$inputs" ]] || refuse "$output is there, but made from other inputs;" \
        "--force replaces it, another --output keeps both ($record says what it was made from)"
    lacking=$(not_checked "$record")
    [[ -z $lacking ]] || fail "$output is there, but it was never checked for ${lacking% };" \
        "--force makes it anew and looks"
    say "already there: $output (sha256 $hash)"
    exit 0
}

# The names of --need that the build of this record neither needed nor found.
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
    # enroot hands every variable on, and the shell's Python, libraries and directories are not the image's.
    for name in $(compgen -e); do
        case $name in
        PYTHON* | LD_* | VIRTUAL_ENV | CONDA_* | BASH_ENV | ENV | TMPDIR | NCCL_* | UCX_* | OMPI_* | PIP_TARGET | PIP_PREFIX)
            unset -v "$name"
            ;;
        esac
    done
    export PYTHONNOUSERSITE=1 LC_ALL=C.UTF-8
    # No GPU and no InfiniBand are needed: enroot's hooks 98-nvidia and 99-mellanox pass.
    export NVIDIA_VISIBLE_DEVICES=void MELLANOX_VISIBLE_DEVICES=void
    # Some sites mount the home directory into every container, where ~/.local would hide the image's packages.
    export ENROOT_MOUNT_HOME=no ENROOT_ROOTFS_WRITABLE=no ENROOT_REMAP_ROOT=no ENROOT_FORCE_OVERRIDE=no
    export ENROOT_DATA_PATH=$scratch/data ENROOT_RUNTIME_PATH=$scratch/run ENROOT_TEMP_PATH=$scratch/tmp
    export ENROOT_CACHE_PATH=${ENROOT_CACHE_PATH:-$scratch/cache}
}

remove_tree() {
    [[ -e $1 || -L $1 ]] || return 0
    is_ours "$1" || return
    # Directories of a container need not be writable for their owner.
    rm -rf --one-file-system -- "$1" 2>/dev/null ||
        { chmod -R u+rwX -- "$1" 2>/dev/null || true; rm -rf --one-file-system -- "$1"; }
}

clean_up() {
    local status=$?
    trap - EXIT
    if is_ours "$scratch"; then
        remove_tree "$scratch" || say "cannot remove $scratch: it holds the container of this build"
    fi
    if record_waits; then
        say "$output is there, and its record is not: the next build writes it from $building"
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
        "for a refusal see the credentials in ~/.config/enroot/.credentials"
    [[ -s $image ]] || fail "enroot imported $source, but wrote nothing"
    # enroot 4.0 and newer can say which image a tag stands for today.
    digest=$(enroot digest "$source" 2>/dev/null) || digest=''
}

# inside reader|writer|root WORD...: install-inside.sh in the container, as this user, who may change it or not, or
# as its root.
inside() {
    local options=() mounts=(--mount "$scratch/recipe:/mnt")
    case $1 in
    writer) options=(--rw) ;;
    # apt insists on user 0. --root maps you to it in a user namespace: outside you remain yourself, so no file
    # that you may not write can be touched.
    root) options=(--root --rw) ;;
    esac
    [[ -z $code ]] || mounts+=(--mount "$code:/mnt/code/${code##*/}:none:bind,ro")
    shift
    enroot start "${options[@]}" "${mounts[@]}" container bash /mnt/install-inside.sh "$@"
}

fill_container() {
    local recipe=$scratch/recipe
    cp -- "$here/install-inside.sh" "$here/health_check.py" "$recipe/"
    mkdir -- "$recipe/topology"
    [[ -z $topology ]] || cp -- "$topology" "$recipe/topology/"
    printf '%s\n' "$description" >"$recipe/image.txt"
    mkdir -- "$recipe/code"
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
    # each with its own way out: set -e is off in what stands in a condition
    sync -- "$1" || return
    mv -fT -- "$1" "$2" || return
    sync -- "$(dirname -- "$2")"
}

export_image() {
    local new=$building/image.sqsh
    # Many readers start at once: over all of Lustre's servers, a 23 GiB image started 64 nodes in 74 s, not 200 s.
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
    record_waits || fail "$output was replaced by someone else while it was made"
    publish_record || fail "cannot write $output.record (above)"
    say "made $output (sha256 $(value_of sha256 "$output.record"))"
}

main() {
    read_options "$@"
    check_options
    description=$(describe_inputs)
    inputs=$(sha256sum <<<"$description" | cut -c 1-64)
    building=${output%/*}/.${output##*/}.building
    scratch=$work/hpcgen-image-$UID-$(printf '%s' "$output" | sha256sum | cut -c 1-12)
    take_lock "$building"
    trap clean_up EXIT
    trap 'exit 143' TERM
    trap 'exit 130' INT
    if record_waits; then
        publish_record || fail "cannot write $output.record (above)"
        say "published the record of a build that was killed"
    fi
    # What a killed build left behind.
    find "$building" -mindepth 1 ! -name lock -delete
    look_for_image
    remove_tree "$scratch" || fail "cannot remove $scratch: it is someone else's, or a link; --work takes another place"
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
