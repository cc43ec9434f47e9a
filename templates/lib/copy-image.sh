# A copy of the image on each node's disk: thousands of tasks that read one file take minutes to start.

# Copies are kept for later jobs, and removed after a month without use. The name depends on the path, size and time of
# the image, so a changed image is copied again.
shared_image=$image
copy_images() {
    local image_id word
    image_id=$(stat --format='%n %s %Y' -- "$shared_image" | sha256sum)
    image=$scratch_root/hpcgen-images-$UID/${image_id:0:16}-${shared_image##*/}
    for word in "${!container[@]}"; do
        case ${container[word]} in
            "$shared_image" | "--container-image=$shared_image") container[word]=${container[word]%"$shared_image"}$image ;;
        esac
    done
    each_node 1800 bash -p -c "$functions" copy_node_image "$shared_image" "$image"
}
# On a node, IMAGE COPY: copies IMAGE to COPY, unless COPY exists.
copy_node_image() {
    local image=$1 copy=$2 node=${SLURMD_NODENAME:-$(hostname)} used part
    umask 077
    if ! mkdir -p -- "${copy%/*}" || [[ ! -O ${copy%/*} || -L ${copy%/*} ]]; then
        echo "$node: cannot make ${copy%/*}"
        exit 1
    fi
    : >"$copy.used"
    find "${copy%/*}" -maxdepth 1 -name '*.used' -mtime +30 | while read -r used; do rm -f -- "$used" "${used%.used}"; done
    find "${copy%/*}" -maxdepth 1 -name '*.part' -mmin +60 -delete
    [[ ! -e $copy ]] || exit 0
    part=$copy.$SLURM_JOB_ID.$node.part
    if ! cp --preserve=timestamps -- "$image" "$part" || ! sync -- "$part" || ! mv -f -- "$part" "$copy"; then
        echo "$node: cannot copy $image to $copy"
        exit 1
    fi
    echo "$node: copied $image"
}
