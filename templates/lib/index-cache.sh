# index-cache: an index that is complete is kept, so a job that was cut off goes on where it was when it runs again.

read_configuration() {
    export TRAINER_CONFIG=$job_dir/trainer.json
    add_options --config "$TRAINER_CONFIG"
}

conclude() {
    ((!terminated)) || exit 143
    ((rc == 0)) || die "building the index cache failed with status $rc (above)"
    say "the index cache is complete"
    exit 0
}
