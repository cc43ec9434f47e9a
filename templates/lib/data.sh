# The stages that make the corpus: one task of a job array, which can be killed at any time and rerun safely.

# `hpcgen submit` queues only the tasks with missing outputs, and sets task_ids to their numbers.
task_ids=()
job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
claim_task() {
    task_id=${task_ids[SLURM_ARRAY_TASK_ID]-$SLURM_ARRAY_TASK_ID}
    ((task_id < num_tasks)) || die "this is task $task_id, but the array only has tasks 0 to $((num_tasks - 1))"
    say "task $task_id of $num_tasks of the stage"
    # Task i makes outputs i, i + num_tasks, i + 2 * num_tasks and so on.
    export CORPUS_JOB=$job_dir/corpus.json
    add_options --config "$CORPUS_JOB" --task-id "$task_id"
}

conclude() {
    if ((terminated)); then
        say "task $task_id of $num_tasks was ended by Slurm (canceled, preempted or out of time); rerun it, and it continues where it stopped"
        exit 143
    fi
    ((rc == 0)) || die "task $task_id of $num_tasks failed with status $rc ($details); rerun it, and it makes only the missing outputs"
    say "task $task_id of $num_tasks is done"
    exit 0
}
