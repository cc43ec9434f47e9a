# memory-test: a rank of each pipeline stage trains a few steps alone, with random tokens. Nothing of the run is changed.

read_configuration() {
    export MEMORY_TEST_CONFIG=$job_dir/memory-test.config.json
    add_options --config "$MEMORY_TEST_CONFIG"
}

conclude() {
    ((!terminated)) || exit 143
    local result=$job_dir/memory-test.json
    ((rc == 0)) || die "the memory test failed with status $rc ($details)$([[ ! -r $result ]] || echo "; figures: $result")"
    say "passed; figures: $result"
    exit 0
}
