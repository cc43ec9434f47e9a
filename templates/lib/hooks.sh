# The site's prologue and epilogue: runs them so that a mistake in them cannot keep the job from its conclusion.
# Runs site_prologue in this shell, so that its variables stay. If it exits, the job concludes as after a failed attempt.
in_prologue=0
run_prologue() {
    inherit_functions
    in_prologue=1
    trap 'prologue_ended $?' EXIT
    site_prologue
    in_prologue=0
    set +e -uo pipefail
    set_traps
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
prologue_ended() {
    ((in_prologue)) || return "$1"
    in_prologue=0 rc=1
    set +e -uo pipefail
    say "ERROR: site_prologue ended the job with status $1 (above)" >&2
    conclude
}
# Runs site_epilogue in a subshell, so that the conclusion follows even if it fails or exits. It may take 10 minutes, or 5 s
# after TERM, because the job must requeue itself before Slurm kills it (KillWait).
run_epilogue() {
    local pid status left=3000 # times 0.2 s
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
    while kill -0 "$pid" 2>/dev/null && ((left)); do
        left=$((terminated && left > 25 ? 25 : left - 1))
        sleep 0.2
    done
    ((left)) || ! kill -KILL -- "-$pid" 2>/dev/null || say "WARNING: site_epilogue took too long and was ended; the conclusion follows" >&2
    wait "$pid" 2>/dev/null
    status=$?
    ((status == 0 || !left)) || say "WARNING: site_epilogue ended early with status $status (above); the conclusion follows" >&2
}
