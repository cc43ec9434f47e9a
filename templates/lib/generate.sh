# generate: the texts appear together, so an interrupted job leaves no file and can be rerun safely.

conclude() {
    ((!terminated)) || exit 143
    ((rc == 0)) || die "generating text failed with status $rc ($details)"
    say "texts: $output"
    exit 0
}
