# tune: each trial is a step of its own, so that one that fails, does not fit or hangs ends alone. A trial that has a result
# is not repeated, also in a job that was requeued or submitted again.
results=$run_dir/tune num_measured=0

# Measures what predictions need. Trials run also if it fails.
calibrate() {
    local log=$held/calibration.log
    [[ $calibration && ! -e $calibration ]] || return 0
    say "calibration: measuring what predictions need"
    rendezvous || return
    launch_for "$calibration_minutes" "${task[0]}" -m trainer.calibration --config "$job_dir/calibration.config.json" --result "$calibration" >"$log" 2>&1
    ((!terminated)) || return 143
    tail -n 5 -- "$log"
    ((rc == 0)) || say "WARNING: the calibration failed with status $rc; its log: $job_dir/calibration.log" >&2
    rc=0
}
# MINUTES COMMAND...: runs it as every task of the job. It ends itself earlier, unless it cannot start or end.
launch_for() { local step=("${step[@]}" --time="$1"); launch "${@:2}"; }

run_trials() {
    local index num=${#trials[@]}
    for index in "${!trials[@]}"; do
        ((!terminated)) || return 143
        say "trial $((index + 1)) of $num: ${trial_names[index]}"
        if [[ -e $results/${trials[index]}.json ]]; then say "measured before"; else run_trial "${trials[index]}" || return; fi
        show_result "${trials[index]}"
    done
    rc=0 # of the job: the results say how the trials ended
}
# KEY: fails only if the job ends.
run_trial() {
    local log=$held/$1.log before=$SECONDS
    rendezvous || return
    launch_for "$trial_step_minutes" "${task[@]}" --trial "$1" >"$log" 2>&1
    ((!terminated)) || return 143
    ls -- "$results" >/dev/null # NFS looks for new files
    [[ -e $results/$1.json ]] || write_lost "$1" "$((SECONDS - before))"
    ((rc == 0)) || tail -n 20 -- "$log"
    return 0
}
# KEY SECONDS: writes the result of a trial whose ranks say nothing, such as those of a node that failed.
write_lost() {
    local status=lost reason="the ranks ended with status $rc after $2 s, and none says why" list
    if (($2 >= trial_step_minutes * 60)); then status=hung reason="the step took more than $trial_step_minutes minutes"; fi
    printf -v list '"%s", ' "${step_nodes[@]}"
    write_file "$results/$1.json" <<<"{
 \"status\": \"$status\",
 \"job\": \"$job\",
 \"nodes\": [${list%, }],
 \"reason\": \"$reason\"
}"
}
# KEY: prints the end of a trial.
show_result() {
    local status
    status=$(result_field "$1" status)
    if [[ $status == measured ]]; then
        num_measured=$((num_measured + 1))
        say "measured: $(result_field "$1" step_s) s per step"
    else
        say "$status: $(result_field "$1" reason)"
    fi
}
# KEY NAME: a field of a result, without quotes.
result_field() { sed -n "s/^ \"$2\": \"\{0,1\}\(.*[^\",]\)\"\{0,1\},\{0,1\}$/\1/p" -- "$results/$1.json"; }

conclude() {
    ((!terminated)) || { say "ended by Slurm; submit the job again for the trials without a result"; exit 143; }
    ((rc == 0)) || die "the trials did not run (status $rc, $details)"
    ((num_measured)) || die "no trial was measured (above); results: $results"
    say "measured $num_measured of ${#trials[@]} trials; results: $results"
    exit 0
}
