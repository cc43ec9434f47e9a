# Training: starts it from the newest checkpoint, and decides whether the job is requeued.
tracker=$checkpoints/latest_checkpointed_iteration.txt before=0
claim_run_directory() {
    ! is_done || { say "done already: $run_dir/DONE says $done_at"; exit 0; }
    claim # the trainer's own lock decides between jobs that start together
    read_progress before
    say "from iteration $before of $train_iters"
    stop_file=$held/stop-$restart; ((!warned)) || ask_to_stop
    export TRAINER_STOP_FILE=$job_dir/stop-$restart TRAINER_CONFIG=$job_dir/trainer.json
    add_options --config "$TRAINER_CONFIG" --stop-file "$TRAINER_STOP_FILE"
}
# NAME: sets the variable NAME to the newest checkpoint's iteration, or to 0. The one in the tracker may have been moved away.
read_progress() {
    local found; read_number found "$tracker"; printf -v found %s/iter_%07d "$checkpoints" "$found"
    [[ -d $found ]] || found=$(printf '%s\n' "$checkpoints"/iter_*/COMPLETE | grep -E '/iter_[0-9]{7,15}/COMPLETE$' | sort -V | tail -n 1)
    [[ $found =~ /iter_([0-9]{7,15})(/COMPLETE)?$ ]]; printf -v "$1" %d "$((10#${BASH_REMATCH[1]-0}))"
}
# Succeeds if DONE says that training is complete or stopped early. Like the trainer, ignores DONE of another configuration.
is_done() {
    local iterations lines=(); read_number iterations "$run_dir/DONE"
    [[ ! -f $run_dir/DONE || ! -r $run_dir/DONE ]] || mapfile -t lines <"$run_dir/DONE"
    done_at="$iterations iterations"; [[ ${lines[2]-} != "stopped early"* ]] || done_at+=" (stopped early)"
    [[ ${lines[1]-} == "$fingerprint" ]] && { ((iterations >= train_iters)) || [[ $done_at == *early* ]]; }
}
# After a failure without progress, checks that the trainer can be imported. A check before each launch would make pyxis
# unpack the image once more. "started" distinguishes a missing trainer from a step that did not start.
import_check=("${task[@]}" --versions)
check_trainer() {
    local status after; read_progress after
    if ((rc == 0 || num_rendezvous == 0 || terminated || warned || after > before)) || [[ -e $run_dir/FAILED ]]; then return; fi
    run_aside import_trainer && return
    status=$?
    if ((terminated)); then return; fi
    if ((status != 124 && status != 137)) && grep -qx started "$held/versions" && ! grep -q '^trainer ' "$held/versions"; then
        write_file "$run_dir/FAILED" <<<"${import_check[0]} cannot run the trainer (above): install it there${container[0]:+, in the image}, or set the cluster's code_dir (hpcgen install-code)"
    else
        say "WARNING: not every node could import the trainer (above)" >&2
    fi
}
import_trainer() {
    timeout --kill-after=30 1800 srun "${on_nodes[@]}" --kill-on-bad-exit=0 "${container[@]}" env "${task_environment[@]}" \
        sh -c "echo started; exec \"\$@\"" sh "${import_check[@]}" >"$held/versions"
}
conclude() {
    local after invalid="not requeued, since it would fail again"; read_progress after
    ((after <= before)) || rm -f -- "$held/stalled" # progress resets the count of failures
    if is_done; then say "done: $done_at"; exit 0; fi
    end_if_canceled "; the newest checkpoint is of iteration $after"
    # srun's status cannot tell: after the first rank exits, srun ends the others and reports their status.
    if [[ -f $run_dir/FAILED && -r $run_dir/FAILED ]]; then die "$invalid: $(print_own "$run_dir/FAILED"); $after iterations are saved"; fi
    if ((rc == 0)) && [[ -e $run_dir/STOPPED ]]; then planned=yes; requeue "stopped at iteration $after of $train_iters"; fi
    if [[ $cause == 'out of time' ]]; then planned=yes; requeue "out of time at iteration $after of $train_iters"; fi
    if ((rc == 0)); then die "the trainer ended without writing DONE or STOPPED at iteration $after of $train_iters; this is a bug in the trainer"; fi
    # Status 2 without FAILED: the trainer could not write FAILED, since its view of the run directory is read-only.
    if ((rc == 2)); then die "$invalid (status 2, reason $details); $after iterations are saved"; fi
    retry_or_give_up " at iteration $after (began at $before)" "beyond iteration $after"
}
