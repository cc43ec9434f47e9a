# Training: allows one job at a time in a run directory, and decides whether the job is requeued.
tracker=$checkpoints/latest_checkpointed_iteration.txt before=0
claim_run_directory() {
    local other
    ! is_done || { say "done already: $run_dir/DONE says $train_iters iterations"; exit 0; }
    read_number other "$run_dir/RUNNING"
    ((other == 0 || other == SLURM_JOB_ID)) || ! is_running "$other" ||
        die "job $other is training in $run_dir: two jobs would overwrite each other's checkpoints"
    write_file "$run_dir/RUNNING" <<<"$SLURM_JOB_ID" # the trainer's own lock decides between jobs that start together
    rm -f -- "$run_dir/STOPPED" "$run_dir/FAILED" "$job_dir/stop-$restart"
    read_number before "$tracker"
    say "from iteration $before of $train_iters"
    stop_file=$job_dir/stop-$restart; ((!warned)) || : >"$stop_file"
    export TRAINER_STOP_FILE=$stop_file TRAINER_CONFIG=$job_dir/trainer.json
    add_options --config "$TRAINER_CONFIG" --stop-file "$TRAINER_STOP_FILE"
}
# Succeeds if DONE says that training is complete. Like the trainer, ignores a DONE file of another configuration.
is_done() {
    local iterations lines=()
    read_number iterations "$run_dir/DONE"
    [[ ! -r $run_dir/DONE ]] || mapfile -t lines <"$run_dir/DONE"
    ((iterations >= train_iters)) && [[ ${lines[1]-} == "$fingerprint" ]]
}
# JOB: succeeds if the job is running. squeue fails both for a job that Slurm has forgotten and for a controller that does not
# answer, so an answer counts only if it also lists this job.
is_running() {
    local answer
    for _ in {1..10}; do
        answer=$(squeue --noheader --format=%A --jobs="$1,$SLURM_JOB_ID" --states="$job_states" 2>&1)
        ! grep -qx "$SLURM_JOB_ID" <<<"$answer" || { grep -qx "$1" <<<"$answer"; return; }
        say "squeue cannot tell whether job $1 is still training in $run_dir; asking again in 30 s. Its answer: $answer"
        run_step sleep 30 || exit 143
    done
    die "squeue cannot tell whether job $1 is still training in $run_dir (above). Once it answers, submit this script again"
}
# After a failure without progress, checks that the trainer can be imported. A check before each launch would make pyxis
# unpack the image once more. "started" distinguishes a missing trainer from a step that did not start.
import_check=("${task[@]}" --versions)
check_trainer() {
    local status=$rc after
    read_number after "$tracker"
    if ((rc == 0 || num_rendezvous == 0 || terminated || warned || after > before)) || [[ -e $run_dir/FAILED ]]; then return; fi
    if run_step import_trainer || ((terminated)); then :
    elif ((rc != 124 && rc != 137)) && grep -qx started "$job_dir/versions" && ! grep -q '^trainer ' "$job_dir/versions"; then
        write_file "$run_dir/FAILED" <<<"${import_check[0]} cannot run the trainer (above): install it there${container[0]:+, in the image}, or set the cluster's code_dir (hpcgen install-code)"
    else
        say "WARNING: not every node could import the trainer (above)" >&2
    fi
    rc=$status
}
import_trainer() {
    timeout --kill-after=30 1800 srun "${on_nodes[@]}" --kill-on-bad-exit=0 "${container[@]}" env "${task_environment[@]}" \
        sh -c "echo started; exec \"\$@\"" sh "${import_check[@]}" >"$job_dir/versions"
}
conclude() {
    local after stalled timed_out=0 invalid="not requeued, since it would fail again"
    read_number after "$tracker"
    ((after <= before)) || rm -f -- "$job_dir/stalled" # progress ends a row of failures
    # A canceled job and one that is out of time both get SIGTERM; only the second one is requeued.
    if ((terminated)) && retry scontrol show job -o "$SLURM_JOB_ID" | grep ' Reason=TimeLimit ' >/dev/null; then timed_out=1; fi
    if is_done; then say "done: $train_iters iterations"; exit 0; fi
    if ((terminated && !timed_out)); then say "ended by Slurm (canceled, preempted, or a node failed); the newest checkpoint is of iteration $after; requeueing is Slurm's decision"; exit 143; fi
    # srun's status cannot tell: after the first rank exits, srun ends the others and reports their status.
    if [[ -r $run_dir/FAILED ]]; then die "$invalid: $(<"$run_dir/FAILED"); checkpoints up to iteration $after are valid"; fi
    if ((rc == 0)) && [[ -e $run_dir/STOPPED ]]; then requeue "stopped at iteration $after of $train_iters"; fi
    if ((timed_out)); then requeue "out of time at iteration $after of $train_iters"; fi
    if ((rc == 0)); then die "the trainer ended without writing DONE or STOPPED at iteration $after of $train_iters; this is a bug in the trainer"; fi
    # Status 2 without FAILED: the trainer could not write FAILED, since its view of the run directory is read-only.
    if ((rc == 2)); then die "$invalid (status 2, reason above); checkpoints up to iteration $after are valid"; fi
    # Gives up after three failures in a row without progress. Attempts that the warning ended do not count.
    read_number stalled "$job_dir/stalled"
    ((after > before || warned)) || stalled=$((stalled + 1))
    write_file "$job_dir/stalled" <<<"$stalled"
    ((stalled < 3)) || die "failed with status $rc: three attempts without progress beyond iteration $after; not requeued"
    requeue "failed with status $rc at iteration $after (began at $before)"
}
# REASON: requeues the job unless max_restarts is reached. Restarts that exclude bad nodes are counted separately.
requeue() {
    local exclusions restarts
    read_number exclusions "$job_dir/exclusions"
    restarts=$((restart - exclusions))
    ((restarts < max_restarts)) || die "$1, and this was restart $restarts of at most $max_restarts: giving up"
    say "$1: back into the queue (restart $((restarts + 1)) of at most $max_restarts)"
    requeue_job || die "scontrol requeue failed; submit the script again to continue from iteration $after"
    exit 0
}
# A requeue ends the job, perhaps before scontrol gets the controller's answer. scontrol therefore ignores TERM.
requeue_job() {
    requeued=1
    (trap '' TERM; retry scontrol requeue "$SLURM_JOB_ID")
}
# COMMAND...: runs it until it succeeds, at most ten times.
retry() { for _ in {1..10}; do "$@" && return; sleep 2; done; return 1; }
