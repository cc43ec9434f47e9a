# The stages that make the corpus: one task of a job array, which can be killed at any time and rerun safely.

# `hpcgen submit` queues only the tasks that have something left to make, and sets task_ids to them.
task_ids=()
job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
claim_task() {
    task_id=${task_ids[SLURM_ARRAY_TASK_ID]-$SLURM_ARRAY_TASK_ID}
    ((task_id < num_tasks)) || die "the array has tasks 0 to $((num_tasks - 1)), and this is $task_id"
    say "task $task_id of $num_tasks of the stage"
    # The task makes every num_tasks-th output, from its own number on.
    export CORPUS_JOB=$job_dir/corpus.json
    add_options --config "$CORPUS_JOB" --task-id "$task_id"
}

conclude() {
    if ((terminated)); then
        say "task $task_id of $num_tasks was ended by Slurm (canceled, preempted or out of time): it goes on where it was when it runs again"
        exit 143
    fi
    ((rc == 0)) || die "task $task_id of $num_tasks failed with status $rc (above); run it again, and it makes only what is missing"
    say "task $task_id of $num_tasks is done"
    exit 0
}
