# A chain of jobs, where a site forbids requeues: each job queues the next one when it starts, so that training continues even
# if this job is killed. What ends training, or must not be repeated, also cancels the next job.

# The job before gives its ID as the script's argument.
previous_job=${1-} next_job='' link=1
# Takes over the counts of the job before, so that failures without progress count in the whole chain, and queues the next.
join_chain() {
    local name before=$run_dir/jobs/$previous_job
    if [[ $previous_job =~ ^[0-9]+$ && -O $before && ! -L $before ]]; then
        read_number link "$before/link"
        link=$((link + 1))
        for name in stalled exclusions excluded_by_user; do
            [[ ! -f $before/$name || -e $held/$name ]] || write_file "$held/$name" <"$before/$name"
        done
    fi
    write_file "$held/link" <<<"$link"
    say "job $link of at most $chain (slurm.$stage.chain)"
    queue_next || say "WARNING: the next job of the chain is not queued yet (above); trying again when this one ends" >&2
}
# Queues the next job, on the nodes that this one may use. Its script is this one.
queue_next() {
    local answer excluded=()
    ((link < chain)) || return 0
    answer=$(scontrol show job -o "$SLURM_JOB_ID") || return
    [[ ! $answer =~ \ ExcNodeList=([^ ]+) || ${BASH_REMATCH[1]} == '(null)' ]] || excluded=(--exclude="${BASH_REMATCH[1]}")
    answer=$(restore_environment cat -- "$0" && sbatch --parsable --dependency=afterany:"$job" "${excluded[@]}" "$0" "$job") || return
    next_job=${answer%%;*}
    record next next_job "$next_job" link "$link" chain "$chain"
    say "job $next_job is queued to continue when this one ends"
}
# REASON: ends this job. The next one continues.
leave_to_next_job() {
    ((link < chain)) || die "$1, and this was job $link of $chain (slurm.$stage.chain): hpcgen resume continues"
    [[ $next_job ]] || queue_next || die "$1, and the next job of the chain cannot be queued (above): hpcgen resume continues"
    retry scontrol show job -o "$next_job" | grep ' JobState=PENDING ' >/dev/null ||
        die "$1, and job $next_job, which was to continue, is no longer in the queue: hpcgen resume continues"
    say "$1: job $next_job continues (job $((link + 1)) of at most $chain)"
    before_requeue
    requeued=1
    record_end 0 requeued
    exit 0
}
# LIST: excludes these nodes from the next job, which then continues.
exclude_from_next_job() {
    [[ ! $next_job ]] || retry scontrol update JobId="$next_job" ExcNodeList="$1" || die "Slurm does not accept the list of bad nodes $1 for job $next_job (above)"
    leave_to_next_job "bad nodes: ${bad[*]}"
}
# After the end of training, a failure, or a cancellation. If Slurm ended this job for another reason, the next one continues.
cancel_next_job() {
    [[ $next_job && $verdict_now != requeued && ($verdict_now != terminated || $cause == canceled) ]] || return 0
    scancel "$next_job" && say "canceled job $next_job, the next one of the chain"
}
