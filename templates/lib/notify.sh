# Notifications: hands events of this job to notify_command, as JSON on its standard input. It runs on the first node, outside of
# the container. Whatever it does, the job goes on.
notifier='' notify_poll_s=5 notify_failed=''
at_start() {
    set -m
    follow_run &
    notifier=$!
    set +m
}
# The event that ends the job has been recorded: lets the notifier deliver it, and then ends it.
at_exit() {
    [[ $BASHPID == "$$" && $notifier ]] || return 0
    kill -"$( ((terminated)) && echo HUP || echo USR1)" "$notifier" 2>/dev/null
    wait_at_most "$notifier" "$((notify_timeout_s + 5))" 10 || say "WARNING: notify.command took too long and was ended" >&2
}
# In the background. Slurm signals every process of the job with TERM: the last event comes after it.
follow_run() {
    local deadline=0 last=0 beat='' changed_s=$SECONDS is_stalled=0 spike_at is_low=0 df_at_s=0 progress_at_s=0
    printf -v spike_at '%(%s)T' -1
    set +m
    trap '' TERM USR2
    trap 'deadline=$((SECONDS + notify_timeout_s + 1))' USR1 # the job ends
    trap 'terminated=1 deadline=$((SECONDS + 8))' HUP # and Slurm will kill it after KillWait
    while kill -0 $$ 2>/dev/null; do
        last=$deadline
        ((last)) || { look_for_stall; look_for_spike; look_at_disk; }
        deliver_events
        ((!last)) || return 0
        ((deadline)) || nap "$notify_poll_s"
    done
}
# SECONDS: a signal ends it.
nap() { sleep "$1" & wait $!; kill $! 2>/dev/null; }
# NAME FILE: sets NAME to the first line of a regular file.
read_line() { local text=''; [[ ! -f $2 || ! -r $2 ]] || read -r text <"$2"; printf -v "$1" %s "$text"; }
# The heartbeat changes at least every 10 s while training goes on. A program has only its progress.
look_for_stall() {
    local now='' found
    if [[ ! ${progress_kind+set} ]]; then
        read_line now "$run_dir/heartbeat"
    else
        [[ ${progress_kind-} ]] && ((SECONDS >= progress_at_s)) || return 0
        progress_at_s=$((SECONDS + 60))
        read_progress now
    fi
    if [[ $now != "$beat" ]]; then
        beat=$now changed_s=$SECONDS is_stalled=0
    elif ((!is_stalled && SECONDS - changed_s >= notify_stall_s)); then
        is_stalled=1
        record stall reason "no progress for $((SECONDS - changed_s)) s"
    fi
}
# The newest spike, if it is new. After one, others within ten minutes belong to it.
look_for_spike() {
    local line at
    [[ -f $run_dir/metrics.jsonl && -r $run_dir/metrics.jsonl ]] || return 0
    line=$(tail -c 262144 -- "$run_dir/metrics.jsonl" | grep -a '^{"event": "spike", ' | tail -n 1)
    [[ $line =~ \"iteration\":\ ([0-9]+),\ \"time\":\ ([0-9]+)[^,]*,\ \"loss\":\ ([0-9.e+-]+|null),\ \"height\":\ ([0-9.e+-]+|null), ]] || return 0
    at=${BASH_REMATCH[2]}
    ((at > spike_at)) || return 0
    spike_at=$((at + 600))
    record spike reason "iteration ${BASH_REMATCH[1]}: loss ${BASH_REMATCH[3]} is ${BASH_REMATCH[4]} times the median of previous steps"
}
look_at_disk() {
    local left directory=${checkpoints-$run_dir}
    ((notify_disk_low_gb && SECONDS >= df_at_s)) || return 0
    df_at_s=$((SECONDS + 60))
    [[ -d $directory ]] || directory=$run_dir
    left=$(timeout 10 df --output=avail -B1 -- "$directory" 2>/dev/null | tail -n 1)
    [[ $left =~ ^[0-9]+$ ]] || return 0
    left=$((left / 1000000000))
    if ((left >= notify_disk_low_gb)); then is_low=0; return 0; fi
    ((!is_low)) || return 0
    is_low=1
    record disk_low reason "$left GB are left in $directory, less than $notify_disk_low_gb GB"
}
# Delivers the events after those that this job's attempts have delivered. An event is lost only if the command fails.
deliver_events() {
    local line sent
    read_number sent "$held/notified"
    while IFS= read -r line; do
        sent=$((sent + 1))
        notify "$line"
        (write_file "$held/notified" <<<"$sent")
    done < <(tail -n "+$((sent + 1))" -- "$held/events.jsonl" 2>/dev/null)
}
# NAME KEY LINE: sets NAME to the text of a key in a line of events.jsonl, as JSON writes it.
read_field() {
    local pattern='[{,] ?"'$2'": "(([^"\\]|\\.)*)"'
    [[ $3 =~ $pattern ]] && printf -v "$1" %s "${BASH_REMATCH[1]}" || printf -v "$1" ''
}
# LINE: hands an event of events.jsonl to the command if its name is one of notify_events.
notify() {
    local event verdict status reason nodes lost iteration='' name text directory
    for name in event verdict status reason nodes lost; do read_field "$name" "$name" "$1"; done
    name=$event text=$reason
    case $event:$verdict in
        start:) text="started on $nodes" ;;
        restart_in_job:) name=restart text="ranks failed with status $status, and start again in this job" ;;
        spare:) text="lost $lost, goes on with spare nodes: $nodes" ;;
        exclude:) text="goes on without bad nodes: $nodes" ;;
        stall: | spike: | disk_low:) ;;
        end:done) name='done' ;;
        end:requeued) name=requeue ;;
        end:terminated | end:stopped) name=stopped ;;
        end:failed)
            name=failed
            [[ $reason != *'not finite'* || " ${notify_events[*]} " != *' non_finite '* ]] || name=non_finite
            ;;
        *) return 0 ;;
    esac
    [[ " ${notify_events[*]} " == *" $name "* ]] || return 0
    read_line iteration "$run_dir/heartbeat"
    [[ $iteration =~ \"iteration\":\ ([0-9]{1,15})[,}] ]] && iteration=", \"iteration\": ${BASH_REMATCH[1]}" || iteration=''
    escape directory "$run_dir"
    [[ $event == start ]] || iteration+=", \"cluster\": \"${SLURM_CLUSTER_NAME-}\", \"host\": \"$HOSTNAME\""
    text="$run_name: ${name//_/ } (job $job, $stage): $text"
    hand_over "$name" "{\"event\": \"$name\", \"text\": \"$text\", \"run\": \"$run_name\", \"run_dir\": \"$directory\"$iteration, ${1#*, }"
}
# NAME JSON: runs the command at most three times, until it succeeds.
hand_over() {
    local try status=124
    for try in 1 2 3; do
        ((!deadline || SECONDS < deadline)) || break
        ((try == 1 || deadline)) || nap "$((5 * try - 5))"
        run_notify_command "$2"
        status=$?
        ((status)) || { notify_failed=''; return 0; }
    done
    [[ $notify_failed ]] || say "WARNING: notify.command failed with status $status for $1; its output is in $job_dir/notify.log" >&2
    notify_failed=1
}
# JSON: runs the command once. What it prints is in notify.log, at most 10 MiB. Processes that it leaves are killed.
run_notify_command() {
    local pid status log=$held/notify.log limit=$notify_timeout_s
    ((!deadline)) || limit=$((deadline > SECONDS ? deadline - SECONDS : 1)) # at_exit does not know its process group
    [[ ! -e $log || $(stat -c %s -- "$log") -lt 1000000 ]] || rm -f -- "$log"
    set -m
    (
        set +m
        ulimit -c 0 -f 10240
        exec nice -n 10 -- "${notify_command[@]}" <<<"$1" >>"$log" 2>&1
    ) &
    pid=$!
    set +m
    wait_at_most "$pid" "$limit" 5
    wait "$pid" 2>/dev/null
    status=$?
    kill -KILL -- "-$pid" 2>/dev/null
    return "$status"
}
