# export: the directory appears when it is complete, so an interrupted job can be rerun safely.

conclude() {
    ((!terminated)) || exit 143
    ((rc == 0)) || die "the export failed with status $rc ($details)"
    say "exported to $destination"
    exit 0
}
