# index-cache: complete indexes are kept, so an interrupted job continues where it stopped when it is rerun.

read_configuration() {
    export TRAINER_CONFIG=$job_dir/trainer.json
    add_options --config "$TRAINER_CONFIG"
}

conclude() {
    ((!terminated)) || exit 143
    ((rc == 0)) || die "building the index cache failed with status $rc ($details)"
    say "the index cache is complete"
    exit 0
}
