# Attempts: one job at a time in a run directory, which requeues itself as long as the run makes progress (after > before).
warned=0 stop_file='' # warned: this attempt was asked to stop, by Slurm before the time limit or by a user (USR2)
# A program without program.stop goes on as if there had been no signal, so that its failures count.
request_stop() {
    local answer='program.stop is not set, so the program goes on'
    record stop asks "$asks_to_stop"
    [[ ! $asks_to_stop ]] || { answer='requesting a checkpoint' warned=1; ask_to_stop; }
    say "USR2: the time limit is near, or a user asks to stop; $answer"
}
# In a subshell, so that an error does not end the job.
ask_to_stop() { [[ ! $stop_file ]] || (write_file "$stop_file" </dev/null); }
# Writes RUNNING, unless another job is running in this directory, or hpcgen stop has asked this one to stop.
claim() {
    local other; read_number other "$run_dir/RUNNING"
    end_if_held "not started again"
    ((other == 0 || other == SLURM_JOB_ID)) || ! is_running "$other" ||
        die "job $other is running in $run_dir: two jobs would overwrite each other's checkpoints"
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
        run_step sleep 30 || { end_if_canceled ''; exit 143; } # SIGTERM ends squeue, too
    done
    die "squeue cannot tell whether job $1 is still running in $run_dir (above). Once it answers, submit this script again"
}
slurm_restarts='' # Slurm's count when this attempt began, which also counts starts that failed before this script
# Records when the job came into the queue, and when it could have started if nodes had been free (seconds since 1970).
record_queue() {
    local name text times=()
    text=$(scontrol show job -o "$SLURM_JOB_ID" 2>/dev/null) || return 0
    for name in SubmitTime EligibleTime; do
        [[ ! $text =~ \ $name=([^ ]+) ]] || times+=("$name" "$(date -d "${BASH_REMATCH[1]}" +%s 2>/dev/null)")
    done
    record queue "${times[@]}"
    [[ ! $text =~ \ Restarts=([0-9]+) ]] || ((terminated)) || slurm_restarts=${BASH_REMATCH[1]}
    [[ ${chain-} || $text != *' Requeue=0 '* ]] ||
        say "WARNING: Slurm does not let this job requeue itself (Requeue=0): set slurm.$stage.chain, or submit the script again when it ends" >&2
}
# Sets cause to why Slurm ends this job, or to nothing if it does not. SIGTERM may come later: first the steps of a canceled job
# end, and during the grace time of a preemption only the tasks have the signal. Slurm counts a requeue before it sends SIGTERM.
find_cause() {
    local text show=(scontrol show job -o "$SLURM_JOB_ID")
    if ((terminated)); then text=$(retry "${show[@]}"); else text=$("${show[@]}" 2>/dev/null); fi
    cause=''
    case " $text " in
        *' Reason=TimeLimit '*) cause='out of time' ;;
        *' PreemptTime='[0-9]*) cause=preempted ;;
        *' Reason=NodeDown '*) cause='a node failed' ;;
        *" Restarts=${slurm_restarts:-$restart} "*) if ((terminated)) || [[ $text =~ JobState=(CANCELLED|COMPLETING) ]]; then cause=canceled; fi ;;
        *' Restarts='*) cause='preempted, requeued, or a node failed' ;;
        *) ((!terminated)) || cause='canceled, preempted, or a node failed' ;;
    esac
}
# WHERE: ends the job if Slurm does. At the time limit, and after other failures, the job requeues itself: a job that is being
# canceled must not, since that would revive it.
end_if_canceled() {
    find_cause
    [[ $cause != 'out of time' ]] || return 0
    ((terminated)) || [[ $cause == canceled ]] || return 0
    say "ended by Slurm ($cause)$1; requeueing is Slurm's decision"
    exit 143
}
# WHY: ends the job if hpcgen stop asked for it. Its state CANCELLED keeps jobs from starting that wait for its success.
end_if_held() {
    [[ -e $held/hold ]] || return 0
    say "$1, because hpcgen stop asked; hpcgen resume continues"
    before_requeue 143 stopped
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
    ((after > before || warned)) || [[ $cause == preempted* ]] || stalled=$((stalled + 1))
    write_file "$held/stalled" <<<"$stalled"
    ((stalled < 3)) || die "$failed: three attempts without progress $2; not requeued"
    requeue "$failed$1"
}
# REASON: requeues the job unless max_restarts is reached. end_if_canceled precedes it.
requeue() {
    local restarts
    [[ $cause != preempted* ]] || set -- "$1, because it was preempted"
    end_if_held "$1"
    [[ ! ${chain-} ]] || leave_to_next_job "$1"
    count_restarts
    ((restarts < max_restarts)) || die "$1, and this was restart $restarts of at most $max_restarts: giving up"
    say "$1: back into the queue (restart $((restarts + 1)) of at most $max_restarts)"
    before_requeue
    requeue_job || { planned=''; die "scontrol requeue failed; submit the script again to continue"; }
    exit 0
}
# A requeue ends the job, perhaps before scontrol gets the controller's answer. scontrol therefore ignores TERM.
requeue_job() { requeued=1; record_end 0 requeued; (trap '' TERM; retry scontrol requeue "$SLURM_JOB_ID"); }
# Sets restarts to how often the job has started again, from the queue or in the same nodes, without those that excluded bad nodes.
count_restarts() {
    local exclusions here; read_number exclusions "$held/exclusions"; read_number here "$held/restarts_in_job"
    restarts=$((restart - exclusions + here))
}
# COMMAND...: runs it, and again if it crashes beyond what it had reached, since training here waits for no queue. After a
# second crash at the same place, a requeue may find better nodes. With preflight, the next run is on good nodes only.
run_until_good() {
    local reached=$before lost
    while true; do
        rc=0 lost=''
        "$@" || rc=$?
        if ((rc == 0 || terminated || warned)) || [[ -e $run_dir/FAILED ]]; then return "$rc"; fi
        keep_good_nodes || return "$rc"
        [[ $lost ]] || may_start_again || return "$rc"
        rendezvous || return
    done
}
keep_good_nodes() { :; } # preflight.sh
# Succeeds, and counts a restart, if the step made progress. A trainer that refuses to start ends with status 2.
may_start_again() {
    local restarts here now; read_progress now; count_restarts
    ((rc != 2 && now > reached && restarts < max_restarts)) || return
    find_cause
    [[ ! $cause ]] || return
    reached=$now
    read_number here "$held/restarts_in_job"
    write_file "$held/restarts_in_job" <<<"$((here + 1))"
    record restart_in_job status "$rc" progress "$now"
    say "the step ended with status $rc after progress to $now: starting it again in this job (restart $((restarts + 1)) of at most $max_restarts)"
}
