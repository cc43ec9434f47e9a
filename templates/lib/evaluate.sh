# evaluate: a checkpoint with a result is not evaluated again, so an interrupted job can be rerun safely.

# With evaluation.every, each job evaluates all checkpoints that are due, so the next job may have none.
find_due_checkpoints() {
    ((evaluation_every)) || return 0
    [[ ! $(list_due_checkpoints) ]] || return 0
    say "every complete checkpoint of a multiple of $evaluation_every iterations has a result in $run_dir/evaluation"
    exit 0
}
read_configuration() {
    [[ ! $hf_home ]] || task_environment+=("HF_HOME=$hf_home") # not in the scratch directory
    export EVALUATION_CONFIG=$job_dir/evaluation.json
    add_options --config "$EVALUATION_CONFIG"
}

conclude() {
    ((!terminated)) || exit 143
    ((rc == 0)) || die "the evaluation failed with status $rc ($details)"
    say "results: $run_dir/evaluation"
    exit 0
}
