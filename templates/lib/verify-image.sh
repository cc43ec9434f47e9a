# Checks an image file against the record next to it: its SHA-256, and the size and time of the file that was hashed. While
# size and time match, the image is not read again.
verify_image() {
    local record=$image.record sha256 now
    [[ -r $image ]] || die "$image is missing or not readable"
    [[ -r $record ]] || { say "the content of $image is not checked: there is no $record"; return; }
    sha256=$(sed -n 's/^sha256 \([0-9a-f]\{64\}\)$/\1/p' -- "$record")
    [[ $sha256 ]] || die "$record has no line \"sha256 ...\": build the image again"
    now=$(stat --printf='mtime %Y\nsize %s' -- "$image")
    [[ $(grep -E '^(size|mtime) ' -- "$record" | sort) != "$now" ]] || return 0
    say "the size or time of $image differs from its record: hashing it"
    run_step hash_image || { ((!terminated)) || exit 143; die "cannot read $image (above)"; }
    [[ $(<"$held/image.sha256") == "$sha256 "* ]] || die "$image is not the image that $record names (sha256 $sha256): build it again"
    # Records the new time and size, so that the next job does not hash it:
    [[ ! -w ${record%/*} || ! -w $record ]] || sed -i "s/^mtime .*/${now%%$'\n'*}/; s/^size .*/${now##*$'\n'}/" -- "$record"
}
hash_image() { sha256sum <"$image" >"$held/image.sha256"; }
