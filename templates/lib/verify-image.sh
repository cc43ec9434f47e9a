# An image that is a file: its content, checked against the record next to it.

# The record holds the image's hash, and the size and time of the file that was hashed: while these are the same, the
# image is not read again.
verify_image() {
    local record=$image.record key value sha256='' size='' mtime='' now
    [[ -r $image ]] || die "$image is missing or not readable"
    if [[ ! -r $record ]]; then
        say "the content of $image is not checked: there is no $record"
        return
    fi
    while read -r key value; do
        case $key in
        sha256) sha256=$value ;;
        size) size=$value ;;
        mtime) mtime=$value ;;
        esac
    done <"$record"
    [[ $sha256 =~ ^[0-9a-f]{64}$ ]] || die "$record holds no line \"sha256 ...\": build the image again"
    now=$(stat --format='%s %Y' -- "$image")
    [[ $now != "$size $mtime" ]] || return 0
    say "the size or time of $image differs from its record: hashing it"
    run_step hash_image
    ((!terminated)) || exit 143
    [[ $(<"$job_dir/image.sha256") == "$sha256 "* ]] || die "$image is not the image that $record names (sha256 $sha256): build it again"
    # So that the next job need not read it again.
    [[ ! -w $record ]] || sed -i "s/^size .*/size ${now% *}/; s/^mtime .*/mtime ${now#* }/" -- "$record"
}
hash_image() { sha256sum <"$image" >"$job_dir/image.sha256"; }
