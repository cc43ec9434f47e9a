# Events: what happens to this job, one JSON object per line of events.jsonl in its directory. hpcgen status, logs and ledger read
# them. Each attempt has one `start`, and an `end` unless it was killed.

# What secrets look like: tokens, passwords and signatures in URLs, values after NAME= or NAME:, webhooks (hpcgen/redaction.py).
redactions=(
    's#://[^ \t\n/:@$]+:[^ \t\n/@$]+@#://[redacted]@#g'
    's#\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{20,}|sk-[A-Za-z0-9_-]{30,}|A[KS]IA[A-Z0-9]{16}|xox[abp]-[A-Za-z0-9_-]{10,}|nvapi-[A-Za-z0-9_-]{20,}|wandb_v1_[A-Za-z0-9_]{20,}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+)\b#[redacted]#g'
    's#(((TOKEN|SECRET|PASSWORD|PASSWD|APIKEY|API_KEY|CREDENTIALS?|PRIVATE_KEY|ACCESS_KEY)(_[A-Z0-9_]*)?|([Pp]assword|[Pp]asswd|[Ss]ecret|[Aa]pi[_-]?[Kk]ey|[Pp]rivate[_-][Kk]ey|[Aa]ccess[_-][Kk]ey|([Hh]f|[Hh]ub|[Aa]ccess|[Aa]uth|[Aa]pi)[_-][Tt]oken))\\?["'"'"']? *[=:] *\\?["'"'"']?)[^] \t\n"'"'"'$\\[][^ \t\n"'"'"']*#\1[redacted]#g'
    's#(https://(hooks\.slack\.com|discord(app)?\.com/api/webhooks|[A-Za-z0-9.-]+\.webhook\.office\.com)/|[?&](sig|[A-Za-z-]*[Ss]ignature|X-Amz-Credential|X-Amz-Security-Token|token|key|api_key|access_token)=)[^ \t\n"'"'"'<>&]+#\1[redacted]#g'
    's#\b(Bearer +|Authorization: *Basic +)[A-Za-z0-9+/=._~-]{16,}#\1[redacted]#g'
    's#(([Ww]andb|WANDB).{0,60})\b[0-9a-f]{40}\b#\1[redacted]#g'
)
# NAME TEXT: sets NAME to TEXT without what looks like a secret, and without the values of secret variables.
redact() {
    local variable secret text=$2
    for variable in "${secrets[@]}" HF_TOKEN SLURM_JWT; do
        secret=${!variable-}
        ((${#secret} < 6)) || text=${text//"$secret"/[redacted]}
    done
    text=$(sed -E "${redactions[@]/#/-e}" <<<"$text") || text='[not shown, because sed failed]'
    printf -v "$1" %s "$text"
}
# NAME TEXT: sets NAME to TEXT as JSON writes it between quotes.
escape() { local escaped=${2//\\/\\\\}; escaped=${escaped//\"/\\\"}; printf -v "$1" %s "${escaped//[[:cntrl:]]/ }"; }
# EVENT [NAME VALUE]...: adds an event. All these values are strings.
has_started=0 at_start=(:) at_exit=(:) slurm_restarts=''
record() {
    local value line time; ((has_started)) || return 0
    read_time time; printf -v line '{"event": "%s", "time": %s, "job": "%s", "restart": %d, "stage": "%s"' "$1" "$time" "$job" "$restart" "$stage"
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
    "${at_start[@]}"
    [[ $(trap -p EXIT) ]] || trap 'record_end "$?"; "${at_exit[@]}"' EXIT # the site's epilogue has a trap of its own
}
# When the job came into the queue, and when it could have started if nodes had been free (seconds since 1970).
record_queue() {
    local name text times=()
    text=$(scontrol show job -o "$SLURM_JOB_ID" 2>/dev/null) || return 0
    for name in SubmitTime EligibleTime; do
        [[ ! $text =~ \ $name=([^ ]+) ]] || times+=("$name" "$(date -d "${BASH_REMATCH[1]}" +%s 2>/dev/null)")
    done
    record queue "${times[@]}"
    [[ ! $text =~ \ Restarts=([0-9]+) ]] || ((terminated)) || slurm_restarts=${BASH_REMATCH[1]} # also counts starts that failed before this script
    [[ ${chain-} || $text != *' Requeue=0 '* ]] || say "WARNING: Slurm does not let this job requeue itself (Requeue=0): set slurm.$stage.chain, or submit the script again when it ends" >&2
}
# STATUS [VERDICT]: sets verdict_now: done, requeued, stopped (hpcgen stop), terminated (by Slurm) or failed. Without VERDICT,
# the status decides.
set_verdict() {
    case ${2-$1} in 0) verdict_now='done' ;; 143) verdict_now=terminated ;; requeued | stopped) verdict_now=$2 ;; *) verdict_now=failed ;; esac
}
# STATUS [VERDICT]: adds the end of this attempt, with the last message as the reason, and the cause if Slurm decided. The last
# `end` of an attempt counts.
cause='' why_terminated=(:)
record_end() {
    local reason=${last_said#ERROR: } verdict_now
    [[ $BASHPID == "$$" ]] || return 0 # a subshell
    ((!requeued)) || [[ $1 != 0 && $1 != 143 || ${2-} ]] || return 0
    set_verdict "$@"
    [[ $verdict_now != terminated || $cause ]] || "${why_terminated[@]}"
    record end verdict "$verdict_now" status "$1" reason "$reason" ${cause:+cause "$cause"}
    [[ ! ${chain-} ]] || cancel_next_job
}
