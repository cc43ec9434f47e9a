# Attempts: one job at a time in a run directory, which requeues itself as long as the run makes progress (after > before).
# Writes RUNNING, unless another job is running in this directory.
claim() {
    local other; read_number other "$run_dir/RUNNING"
    ((other == 0 || other == SLURM_JOB_ID)) || ! is_running "$other" || die "job $other is running in $run_dir: two jobs would overwrite each other's checkpoints"
    [[ $share != group ]] || warn_of_hidden_job "$other"
    write_file "$run_dir/RUNNING" <<<"$SLURM_JOB_ID"
    rm -f -- "$run_dir/STOPPED" "$run_dir/FAILED" "$held/stop-$restart"
    record_queue
}
# JOB: succeeds if the job is running. squeue also fails if the controller does not answer: only an answer with this job counts.
is_running() {
    local answer
    for _ in {1..10}; do
        answer=$(squeue --noheader --format=%A --jobs="$1,$SLURM_JOB_ID" --states="$job_states" 2>&1)
        ! grep -qx "$SLURM_JOB_ID" <<<"$answer" || { grep -qx "$1" <<<"$answer"; return; }
        say "squeue cannot tell whether job $1 is still running in $run_dir; asking again in 30 s. Its answer: $answer"
        run_step sleep 30 || exit 143
    done
    die "squeue cannot tell whether job $1 is still running in $run_dir (above). Once it answers, submit this script again"
}
# A canceled job and one that is out of time both get SIGTERM; only the second one is requeued.
is_out_of_time() { ((terminated)) && retry scontrol show job -o "$SLURM_JOB_ID" | grep ' Reason=TimeLimit ' >/dev/null; }
# WHERE: ends the job if Slurm ended it before its time limit. At the time limit, sets timed_out.
end_if_canceled() {
    ((terminated)) || return 0
    is_out_of_time || { say "ended by Slurm (canceled, preempted, or a node failed)$1; requeueing is Slurm's decision"; exit 143; }
    timed_out=1
}
# AT BEYOND: requeues after a failure. Gives up after three in a row without progress; attempts after a warning do not count.
retry_or_give_up() {
    local stalled failed="failed with status $rc"; read_number stalled "$held/stalled"
    [[ $details == above ]] || failed+=" (see ${details#in })"
    ((after > before || warned)) || stalled=$((stalled + 1))
    write_file "$held/stalled" <<<"$stalled"
    ((stalled < 3)) || die "$failed: three attempts without progress $2; not requeued"
    requeue "$failed$1"
}
# REASON: requeues the job unless max_restarts is reached. Restarts that exclude bad nodes are counted separately.
requeue() {
    local exclusions restarts; read_number exclusions "$held/exclusions"
    restarts=$((restart - exclusions))
    ((restarts < max_restarts)) || die "$1, and this was restart $restarts of at most $max_restarts: giving up"
    say "$1: back into the queue (restart $((restarts + 1)) of at most $max_restarts)"
    "${before_requeue[@]}"
    requeue_job || die "scontrol requeue failed; submit the script again to continue"
    exit 0
}
# A requeue ends the job, perhaps before scontrol gets the controller's answer. scontrol therefore ignores TERM.
requeue_job() { requeued=1; record_end 0 requeued; (trap '' TERM; retry scontrol requeue "$SLURM_JOB_ID"); }
