# A program of the user: its progress, and the decision whether the job is requeued.
# For sh in the image: runs FILE if this user made it and nobody else can write to it. Others can rename its directory.
# shellcheck disable=SC2016 # the task expands it
run_own_file='[ -f "$0" ] && exec 9<"$0" && case $(stat -Lc %u:%A /dev/fd/9) in "$(id -u)":-????-??-?) program=$(cat <&9) && exec 9<&- && eval "$program"; exit ;; esac; echo "$0: not run, since it is missing, or others made it or can write to it" >&2; exit 1'
log=$run_dir/$stage-$job.log log_start=0 before=0 found=0
asks_to_stop=${stop_path:+yes}${stop_signal:+yes}
claim_run_directory() {
    ! is_done || { say "done already: $done_file exists"; exit 0; }
    claim
    [[ ! -r $log ]] || log_start=$(stat -c %s -- "$log")
    read_progress before
    [[ -z $progress_kind ]] || { say "from progress $before"; record progress kind "$progress_kind" pattern "$progress_pattern" value "$before"; }
    [[ -z $stop_path ]] || { rm -f -- "$stop_path"; stop_file=$stop_path; ((!warned)) || ask_to_stop; }
    [[ $share != group ]] || add_options -c "$run_own_file"
    add_options "$job_dir/program.sh"
}
# scancel signals every step, and not this shell.
ask_to_stop() {
    [[ ! $stop_file ]] || (write_file "$stop_file" </dev/null)
    [[ ! $stop_signal ]] || scancel --signal="$stop_signal" "$SLURM_JOB_ID"
}
is_done() { [[ $done_file && -e $done_file ]]; }
# NAME: sets variable NAME to the largest of progress_numbers. Without numbers, sets it and found to 0.
read_progress() {
    local number largest=0
    found=0
    while read -r number; do
        [[ $number =~ ^[0-9]{1,15}$ ]] || continue
        found=1 number=$((10#$number))
        ((number <= largest)) || largest=$number
    done < <(progress_numbers)
    printf -v "$1" %d "$largest"
}
progress_numbers() {
    local line from size most=$((64 << 20)) # the end of a long log is enough
    case $progress_kind in
        file) [[ ! -r $progress_pattern ]] || { head -n 1 -- "$progress_pattern"; echo; } ;;
        checkpoints)
            compgen -G "$progress_pattern" | while IFS= read -r line; do
                line=${line#"${progress_pattern%%[*?[]*}"} # from the first wildcard on
                [[ ! $line =~ ([0-9]+)[^0-9]*$ ]] || echo "${BASH_REMATCH[1]}"
            done
            ;;
        log) # what earlier attempts reached, and the last matching line of this one
            [[ ! -r $job_dir/progress ]] || cat -- "$held/progress"
            [[ -r $log ]] || return # sbatch --output
            size=$(stat -c %s -- "$log")
            from=$((size - log_start > most ? size - most : log_start))
            line=$(tail -c "+$((from + 1))" -- "$log" | grep -aE -e "$progress_pattern" | tail -n 1)
            [[ ! $line =~ $progress_pattern ]] || echo "${BASH_REMATCH[1]}"
            ;;
    esac
}
warn_without_progress() {
    local what
    if [[ -z $progress_kind ]] || ((found)); then return; fi
    case $progress_kind in
        file) what="$progress_pattern has no number in its first line" ;;
        checkpoints) what="no file or directory has the name $progress_pattern with a number" ;;
        log) what="no line that this attempt wrote to $log matches $progress_pattern with a number in its first group" ;;
    esac
    say "WARNING: program.progress.$progress_kind finds no progress: $what. Without progress, three failed attempts in a row end the job" >&2
}
# Ends the job if every node lacks the command. If only some do, node checks exclude these from the next attempt.
end_if_unfit() {
    local unfit=("$held"/unfit-*)
    if [[ ! -e ${unfit[0]} ]] || ((${#unfit[@]} < nodes)); then return; fi
    write_file "$run_dir/FAILED" <"${unfit[0]}"
    die "not requeued, since it would fail again: $(<"${unfit[0]}")"
}
conclude() {
    local after at=''
    read_progress after
    [[ -z $progress_kind ]] || { at=" at progress $after"; record progress kind "$progress_kind" pattern "$progress_pattern" value "$after"; }
    [[ $progress_kind != log ]] || ((!found)) || write_file "$held/progress" <<<"$after"
    ((after <= before)) || rm -f -- "$held/stalled" # progress resets the count of failures
    # A program that was asked to stop may exit with status 0 before it is done.
    if is_done || { [[ ! $done_file ]] && ((rc == 0 && !warned && !terminated)); }; then say "done$at"; exit 0; fi
    end_if_canceled "$at"
    end_if_unfit
    warn_without_progress
    if [[ $cause == 'out of time' ]]; then planned=yes; requeue "out of time$at"; fi
    if ((warned)); then planned=yes; requeue "stopped with status $rc before the time limit$at"; fi
    if ((rc == 0)); then say "the program ended with status 0, but $done_file does not exist"; fi
    if [[ $progress_kind ]]; then retry_or_give_up "$at (began at $before)" "beyond $after"; fi
    retry_or_give_up "" "(program.progress is not set, so every failure counts)"
}
