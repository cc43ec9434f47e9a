# memory-test: a rank of each pipeline stage trains a few steps alone, with random tokens. Nothing of the run is changed.

read_configuration() {
    export MEMORY_TEST_CONFIG=$job_dir/memory-test.config.json
    add_options --config "$MEMORY_TEST_CONFIG"
}

conclude() {
    ((!terminated)) || exit 143
    ((rc == 0)) || die "the training does not fit, or the test came to no result (status $rc, $details)"
    say "passed; figures: $run_dir/memory-test.json"
    exit 0
}
