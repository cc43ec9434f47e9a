# Attempts: one job at a time in a run directory, which requeues itself as long as the run makes progress (after > before).
# Writes RUNNING, unless another job is running in this directory, or hpcgen stop has asked this one to stop.
claim() {
    local other; read_number other "$run_dir/RUNNING"
    end_if_held "not started again"
    ((other == 0 || other == SLURM_JOB_ID)) || ! is_running "$other" || die "job $other is running in $run_dir: two jobs would overwrite each other's checkpoints"
    [[ $share != group ]] || warn_of_hidden_job "$other"
    write_file "$run_dir/RUNNING" <<<"$SLURM_JOB_ID"
    rm -f -- "$run_dir/STOPPED" "$run_dir/FAILED" "$held/stop-$restart"
    record_queue
    [[ ! ${chain-} ]] || join_chain
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
# [retry]: sets cause to why Slurm ends this job, or to nothing if it does not. Slurm counts a requeue before it sends SIGTERM.
why_terminated=(find_cause retry)
find_cause() {
    local text; text=" $("$@" scontrol show job -o "$SLURM_JOB_ID") "
    cause=''
    case $text in
        *' Reason=TimeLimit '*) cause='out of time' ;;
        *' PreemptTime='[0-9]*) cause=preempted ;;
        *' Reason=NodeDown '*) cause='a node failed' ;;
        *" Restarts=${slurm_restarts:-$restart} "*) ((!terminated)) && [[ ! $text =~ ' JobState='(CANCELLED|COMPLETING)' ' ]] || cause=canceled ;;
        *' Restarts='*) cause='preempted, requeued, or a node failed' ;;
        *) ((!terminated)) || cause='canceled, preempted, or a node failed' ;;
    esac
}
# A canceled job and one that is out of time both get SIGTERM; only the second one is requeued.
is_out_of_time() { ((terminated)) && find_cause retry && [[ $cause == 'out of time' ]]; }
# Until the grace time of a preemption is over, only the tasks have SIGTERM.
is_preempted() { ((!terminated)) && find_cause 2>/dev/null && [[ $cause == preempted* ]]; }
# WHERE: ends the job if Slurm ended it before its time limit. At the time limit, sets timed_out.
end_if_canceled() {
    ((terminated)) || [[ ${cause-} == canceled ]] || return 0
    is_out_of_time || { say "ended by Slurm ($cause)$1; requeueing is Slurm's decision"; exit 143; }
    timed_out=1
}
# WHY: ends the job if hpcgen stop asked for it. Its state CANCELLED keeps jobs from starting that wait for its success.
end_if_held() {
    [[ -e $held/hold ]] || return 0
    say "$1, because hpcgen stop asked; hpcgen resume continues"
    "${before_requeue[@]}" 143 stopped
    requeued=1
    record_end 143 stopped
    rm -f -- "$held/hold" # another cluster may have a job with this number
    (trap '' TERM; retry scancel "$SLURM_JOB_ID")
    exit 143
}
# AT BEYOND: requeues after a failure. Gives up after three in a row without progress; attempts after a warning do not count.
retry_or_give_up() {
    local stalled failed="failed with status $rc"; read_number stalled "$held/stalled"
    [[ $details == above ]] || failed+=" (see ${details#in })"
    ((after > before || warned)) || is_preempted || stalled=$((stalled + 1))
    write_file "$held/stalled" <<<"$stalled"
    ((stalled < 3)) || die "$failed: three attempts without progress $2; not requeued"
    requeue "$failed$1"
}
# Sets restarts to how often the job has started again, from the queue or in the same nodes, without those that excluded bad nodes.
count_restarts() {
    local exclusions here; read_number exclusions "$held/exclusions"; read_number here "$held/restarts_in_job"
    restarts=$((restart - exclusions + here))
}
# REASON: requeues the job unless max_restarts is reached.
requeue() {
    local restarts
    ! is_preempted || set -- "$1, because it was preempted"
    end_if_held "$1"
    end_if_canceled "; $1" # its steps may fail before SIGTERM arrives, and a requeue would revive the job
    [[ ! ${chain-} ]] || leave_to_next_job "$1"
    count_restarts
    ((restarts < max_restarts)) || die "$1, and this was restart $restarts of at most $max_restarts: giving up"
    say "$1: back into the queue (restart $((restarts + 1)) of at most $max_restarts)"
    "${before_requeue[@]}"
    requeue_job || die "scontrol requeue failed; submit the script again to continue"
    exit 0
}
# A requeue ends the job, perhaps before scontrol gets the controller's answer. scontrol therefore ignores TERM.
requeue_job() { requeued=1; record_end 0 requeued; (trap '' TERM; retry scontrol requeue "$SLURM_JOB_ID"); }
# COMMAND...: runs it, and again if it crashes beyond what it had reached, since training here waits for no queue. After a
# second crash at the same place, a requeue may find better nodes. With preflight, the next run is on good nodes only.
run_until_good() {
    local status lost reached=$before
    while true; do
        rc=0
        "$@" || rc=$?
        status=$rc lost=''
        if ((rc == 0 || terminated || warned)) || [[ -e $run_dir/FAILED ]]; then return "$rc"; fi
        if { [[ ${max_exclusions-} ]] && ! keep_good_nodes; } || { [[ ! $lost ]] && ! may_start_again; }; then rc=$status; return "$rc"; fi
        rendezvous || return
    done
}
# Succeeds, and counts a restart, if the step made progress. A trainer that refuses to start ends with status 2.
may_start_again() {
    local restarts here now; read_progress now; count_restarts
    ((status != 2 && now > reached && restarts < max_restarts && !terminated)) && ! is_preempted || return
    reached=$now
    read_number here "$held/restarts_in_job"
    write_file "$held/restarts_in_job" <<<"$((here + 1))"
    record restart_in_job status "$status" progress "$now"
    say "the step ended with status $status after progress to $now: starting it again in this job (restart $((restarts + 1)) of at most $max_restarts)"
}
