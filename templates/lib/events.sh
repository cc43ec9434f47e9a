# Events: what happens to this job, one JSON object per line of events.jsonl in its directory. hpcgen status, logs and ledger read
# them. Each attempt has one `start`, and an `end` unless it was killed.
# NAME TEXT: sets NAME to TEXT without the values of secret variables, and without what redactions.sh removes.
redactions=()
redact() {
    local variable secret text=$2
    for variable in "${secrets[@]}" HF_TOKEN SLURM_JWT; do
        secret=${!variable-}
        ((${#secret} < 6)) || text=${text//"$secret"/[redacted]}
    done
    [[ -z ${redactions[*]-} ]] || text=$(sed -E "${redactions[@]/#/-e}" <<<"$text") || text='[not shown, because sed failed]'
    printf -v "$1" %s "$text"
}
# NAME TEXT: sets NAME to TEXT as JSON writes it between quotes.
escape() { local escaped=${2//\\/\\\\}; escaped=${escaped//\"/\\\"}; printf -v "$1" %s "${escaped//[[:cntrl:]]/ }"; }
# NAME: sets the variable NAME to the time in seconds since 1970. bash 4.4 has no fractions of a second.
read_time() { local now=${EPOCHREALTIME-}; [[ $now ]] || printf -v now '%(%s)T' -1; printf -v "$1" %s "${now/,/.}"; }
# EVENT [NAME VALUE]...: adds an event, if the attempt has started. All these values are strings.
has_started=0 asks_to_stop=yes cause='' planned='' # cause: why Slurm ends the job; planned: yes if the work was asked to stop, or is out of time
record() {
    local value line time
    ((has_started)) || return 0
    read_time time
    printf -v line '{"event": "%s", "time": %s, "job": "%s", "restart": %d, "stage": "%s"' "$1" "$time" "$job" "$restart" "$stage"
    shift
    while (($#)); do
        redact value "$2"
        escape value "$value"
        line+=", \"$1\": \"$value\""
        shift 2
    done
    { printf '%s}\n' "$line" >>"$held/events.jsonl"; } 2>/dev/null || say "cannot write $job_dir/events.jsonl"
}
record_start() {
    has_started=1
    [[ -e $held/events.jsonl ]] || write_file "$held/events.jsonl" </dev/null # the group of a shared run may only read it
    record start nodes "$SLURM_JOB_NODELIST" cluster "${SLURM_CLUSTER_NAME-}" host "$HOSTNAME" asks "$asks_to_stop"
    at_start
    [[ $(trap -p EXIT) ]] || trap 'record_end "$?"; at_exit' EXIT # the site's epilogue has a trap of its own
}
# STATUS [VERDICT]: sets verdict_now: done, requeued, stopped (hpcgen stop), terminated (by Slurm) or failed. Without VERDICT,
# the status of the script decides.
set_verdict() {
    case ${2-$1} in 0) verdict_now='done' ;; 143) verdict_now=terminated ;; requeued | stopped) verdict_now=$2 ;; *) verdict_now=failed ;; esac
}
# STATUS [VERDICT]: adds the end of this attempt, with the status of the work or, if that did not fail, of the script. The last
# message is the reason. After a requeue, only its failure is another end: the last `end` of an attempt counts.
record_end() {
    local reason=${last_said#ERROR: } verdict_now
    [[ $BASHPID == "$$" ]] || return 0 # a subshell
    ((!requeued)) || [[ $1 != 0 && $1 != 143 || ${2-} ]] || return 0
    set_verdict "$@"
    [[ $verdict_now != terminated || $cause ]] || find_cause
    record end verdict "$verdict_now" status "$((rc ? rc : $1))" reason "$reason" ${cause:+cause "$cause"} ${planned:+planned "$planned"}
    [[ ! ${chain-} ]] || cancel_next_job
}
