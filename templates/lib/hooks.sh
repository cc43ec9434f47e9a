# The site's prologue and epilogue: runs them so that a mistake in them cannot change what becomes of the job.
# For site_epilogue: done, requeued, stopped, failed or terminated (by Slurm), the exit status of the job, and its log.
verdict='' exit_status=0 log=''
# Runs site_prologue in this shell, so that its variables stay. If it exits, the job concludes as after a failed attempt.
in_prologue=0
run_prologue() {
    inherit_functions
    in_prologue=1
    run_epilogue_at_exit
    site_prologue
    in_prologue=0
    set +e -uo pipefail
    set_traps
    run_epilogue_at_exit
}
# Defines the functions that the submitting shell exports (module), which bash -p ignores. One that has the name of a command
# or of a function of this script is left out.
inherit_functions() {
    local text name
    while IFS= read -r -d '' text; do
        [[ $text == BASH_FUNC_*'%%=() {'* ]] || continue
        name=${text#BASH_FUNC_} name=${name%%'%%='*}
        [[ ! $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || command -v "$name" >/dev/null || eval "$name ${text#*=}"
    done <"/proc/$$/environ"
}
run_epilogue_at_exit() { trap 'job_ended $?' EXIT; }
job_ended() {
    ((!in_prologue)) || prologue_ended "$1"
    record_end "$1"
    run_epilogue "$1"
    at_exit
    exit "$1"
}
prologue_ended() {
    in_prologue=0 rc=1
    set +e -uo pipefail
    say "ERROR: site_prologue ended the job with status $1 (above)" >&2
    # bash runs no trap for an exit within the trap for EXIT. eval: `exit` is another command everywhere else.
    eval 'exit() { record_end "$1"; run_epilogue "$1"; at_exit; builtin exit "$1"; }'
    conclude
}
# STATUS [VERDICT]: runs site_epilogue once, in a subshell, so that the job ends as decided even if it fails or exits. It may
# take 10 minutes, or 5 s after TERM, because a job must requeue itself before Slurm kills it (KillWait).
run_epilogue() {
    local pid status verdict_now is_in_time=1
    # In the function main of a site's template for 0.2.0, a call without arguments precedes the verdict.
    (($#)) && [[ ! $verdict && $BASHPID == "$$" ]] || return 0
    exit_status=$1 log=$job_log
    set_verdict "$@"
    verdict=$verdict_now
    allow_requeues 0
    set -m # a process group of its own, so that all its processes can be killed
    (
        set +m -E
        trap '' TERM # Slurm signals every process of the job
        trap 'say "WARNING: site_epilogue: status $? of: $BASH_COMMAND" >&2' ERR
        site_epilogue
        exit 0
    ) &
    pid=$!
    set +m
    wait_at_most "$pid" 600 5 || { is_in_time=0; say "WARNING: site_epilogue took too long and was ended" >&2; }
    wait "$pid" 2>/dev/null
    status=$?
    ((status == 0 || !is_in_time)) || say "WARNING: site_epilogue ended early with status $status (above)" >&2
    allow_requeues 1
}
# [STATUS VERDICT]: for a job that is to be requeued or stopped. One that is canceled while its epilogue runs is not requeued.
before_requeue() {
    local was_terminated=$terminated
    run_epilogue "${1-0}" "${2-requeued}"
    ((was_terminated || !terminated)) || end_if_canceled " before the requeue"
}
# 0 or 1: with 0, Slurm refuses scontrol requeue, which would start a finished job once more. With 1 again, a user may. A job
# of a chain never allows it.
allow_requeues() {
    [[ ! ${chain-} && ($verdict == 'done' || $verdict == failed) ]] || return 0
    ((terminated)) || scontrol update JobId="$SLURM_JOB_ID" Requeue="$1" || say "WARNING: cannot set Requeue=$1 of this job (above)" >&2
}
