# Training with evaluation.every: queues an evaluation job for each checkpoint that is due. Its errors never end training.

# This file has the checkpoints that have a job, with the job's ID. Each job evaluates all checkpoints that are due, so the
# next one also does the work of one that failed.
evaluation_queue=$run_dir/evaluation/queued evaluation_poll_s=60
queue_pid='' queued='' queue_problem=''
start_evaluation_queue() {
    follow_checkpoints &
    queue_pid=$!
}
# In the background, until it gets TERM or the job's shell has ended: looks for checkpoints. TERM does not interrupt sbatch.
follow_checkpoints() {
    local stopped=0 sleeper=''
    trap '' USR2
    trap '[[ ! $sleeper ]] || kill "$sleeper" 2>/dev/null' EXIT
    restore_environment queued_script
    while kill -0 $$ 2>/dev/null; do
        trap 'stopped=1' TERM
        queue_evaluations
        trap 'exit 0' TERM
        ((!stopped)) || exit 0
        sleep "$evaluation_poll_s" &
        sleeper=$!
        wait "$sleeper"
    done
}
# Looks once more, for the last checkpoint. Before a time limit, this is left to the job's next attempt.
stop_evaluation_queue() {
    kill "$queue_pid" 2>/dev/null
    ((terminated)) || wait "$queue_pid"
    ((terminated || warned)) || run_aside queue_last_evaluations
}
queue_last_evaluations() { restore_environment queued_script; queue_evaluations; }
queue_evaluations() {
    local name
    for name in $(list_due_checkpoints); do
        if [[ " $queued " == *" $name "* ]] || grep -qs "^$name " -- "$evaluation_queue"; then continue; fi
        queue_evaluation "$name" || return 0
    done
}
# NAME: queues a job for the checkpoint. As a singleton, it starts after the run's other evaluation jobs have ended.
queue_evaluation() {
    local answer='' problem errors=$held/sbatch.log
    if find_evaluation "$1" 2>"$errors" && { [[ $answer ]] || answer=$(submit_evaluation "$1" 2>"$errors"); }; then
        queued+=" $1"
        mkdir -p -- "${evaluation_queue%/*}" && { list_queued; echo "$1 ${answer%%;*}"; } | write_file "$evaluation_queue"
        say "queued job ${answer%%;*} to evaluate $1"
        return 0
    fi
    problem=$(tail -n 1 -- "$errors")
    [[ $problem == "$queue_problem" ]] ||
        say "WARNING: no job queued to evaluate $1: ${problem:-Slurm does not answer}; trying again every $evaluation_poll_s s while training (by hand: hpcgen submit evaluate)" >&2
    queue_problem=$problem
    return 1
}
# NAME: submits the job and prints its ID.
submit_evaluation() {
    queued_script | timeout --kill-after=5 30 sbatch --parsable --dependency=singleton \
        --comment="$(queued_comment) $run_dir/$1" /dev/stdin "$run_dir/$1"
}
# The comment in the script's directives, without the quotes of a comment with spaces.
queued_comment() { queued_script | sed -n 's/^#SBATCH --comment="\?\([^"]*\)"\?$/\1/p'; }
# The lines of evaluation_queue. What else it has is of a link that another user of the run placed.
list_queued() { [[ ! -f $evaluation_queue ]] || grep -E '^iter_[0-9]{7,15} [0-9]+$' -- "$evaluation_queue"; }
# NAME: sets answer to the checkpoint's job, or to nothing. sbatch can fail although Slurm accepted the job (a timeout). The
# job's comment ends with RUN_DIR/NAME. Fails if squeue does, or shows nothing: no answer without this job counts.
find_evaluation() {
    local jobs id comment seen=''
    jobs=$(timeout --kill-after=5 30 squeue --noheader --user="$UID" --states=all --format='%A %k') || return
    while read -r id comment; do
        [[ $id != "$job" ]] || seen=1
        [[ $comment != *" $run_dir/$1" ]] || answer=$id
    done <<<"$jobs"
    [[ $seen ]] || { echo "squeue does not show this job"; return 1; } >&2
}
