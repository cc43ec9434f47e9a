# Preflight: keeps bad nodes out of a training job. Spare nodes take over, or the job requeues itself without the bad ones.

choose_good_nodes() {
    list_nodes || conclude
    check_nodes
    ((!terminated)) || exit 143
    choose_nodes || exclude_and_requeue
    say "running on ${step_nodes[*]}"
}

# After a crash: sets lost to the bad nodes, and takes spare nodes in their place. Fails if the step cannot run in this job.
keep_good_nodes() {
    local rc=$rc # of the work, which the steps below do not change
    say "the step ended with status $rc: checking the nodes"
    check_nodes
    lost=${bad[*]}
    ((!terminated)) || return
    [[ $lost ]] || return 0
    if ! choose_nodes; then
        say "too few good nodes are left to continue in this job: ${#good[@]} of $nodes"
        return 1
    elif ! prepare_nodes; then
        say "a node is not fit for this job (above)"
        return 1
    fi
    record spare lost "$lost" nodes "${step_nodes[*]}"
    say "continuing in this job, on ${step_nodes[*]}"
}

# Checks the nodes of the job. Sets good=(...) and bad=(...). A task marks its node as bad with the file unfit-NODE.
check_nodes() {
    local node
    ask_nodes "${job_nodes[@]}"
    good=() bad=()
    for node in "${job_nodes[@]}"; do
        if [[ -e $reports/$node.ok && ! -e $held/unfit-$node ]]; then good+=("$node"); else bad+=("$node"); fi
    done
    [[ -z ${bad[*]-} ]] || say "bad nodes: ${bad[*]} (reports: $reports)"
}

# Uses the first good nodes, or whole segments. A step that lost a node still holds its other nodes, so later steps share
# them (--overlap).
choose_nodes() {
    local list
    ((${#good[@]} >= nodes)) || return
    job_nodes=("${good[@]}")
    step_nodes=("${good[@]:0:nodes}")
    [[ ! ${nodes_per_segment-} ]] || choose_whole_segments || return
    list=$(join_by , "${step_nodes[@]}")
    on_nodes=(--overlap --nodelist="$list" --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none --export=ALL)
    step+=(--overlap --nodelist="$list")
}

# Sets job_text to Slurm's description of this job. A controller that fails over does not answer for some time.
show_job() {
    local try
    for ((try = 0; try < 20; try++)); do
        ! job_text=$(scontrol show job -o "$SLURM_JOB_ID") || return 0
        say "scontrol cannot show this job (above); asking again in 15 s"
        run_step sleep 15
        ((!terminated)) || exit 143
    done
    die "scontrol cannot show this job (above): the nodes to exclude are unknown"
}
# NAME: the value of a field of job_text, or nothing.
job_field() { sed -n "s/.* $1=\([^ ]*\).*/\1/p" <<<"$job_text" | sed 's/(null)//'; }

# Requeues the job with the bad nodes excluded.
exclude_and_requeue() {
    local count list changes excluded=()
    [[ ${good[*]-} || -z ${bad[1]-} ]] || die "no node is fit: that is a mistake in the run rather than in its nodes (reports: $reports)"
    if [[ -z ${good[*]-} ]] && grep -q '"check": "file"' "$reports"/*-host.json 2>/dev/null; then
        die "${bad[*]} lacks a file that the run needs (above)"
    fi
    end_if_canceled "; bad nodes: ${bad[*]}"
    end_if_held "bad nodes: ${bad[*]}"
    read_number count "$held/exclusions"
    ((count < max_exclusions)) || die "bad nodes: ${bad[*]}; the job excluded nodes $count times already: giving up"
    write_file "$held/exclusions" <<<"$((count + 1))"
    show_job
    find_excluded
    list=$(join_by , "${excluded[@]}")
    require_nodes_without "$list"
    changes=(ExcNodeList="$list")
    drop_excluded_requests
    ((!terminated)) || exit 143
    record exclude nodes "${bad[*]}"
    [[ ! ${chain-} ]] || exclude_from_next_job "$list"
    before_requeue
    # From here on Slurm may end this shell at any time. No command substitution below: bash 5.2 can lose its place in the
    # script if a trap runs during one.
    requeue_job || die "scontrol requeue failed; submit again with --exclude=$list"
    change_waiting_job "${changes[@]}"
    say "back into the queue without $list (exclusion $((count + 1)) of at most $max_exclusions)"
    exit 0
}
# Sets excluded to all nodes of this cluster that count as bad, and those that the user excluded at submission.
find_excluded() {
    local name by_user=() asked=$held/excluded_by_user
    [[ -e $asked ]] || write_file "$asked" < <(job_field ExcNodeList)
    note_nodes
    [[ ! -s $asked || ! $(<"$asked") ]] || host_names by_user "$(<"$asked")" ||
        die "scontrol cannot list the nodes that --exclude names: $(<"$asked") (above)"
    for name in "${by_user[@]}"; do ! is_node "$name" || [[ " ${excluded[*]} " == *" $name "* ]] || excluded+=("$name"); done
}
# LIST: ends the job if too few nodes are left without it.
require_nodes_without() {
    local pool left
    pool=$(job_field Reservation)
    left=$(nodes_left "$pool")
    pool=${pool:+reservation $pool} pool=${pool:-partition $SLURM_JOB_PARTITION}
    ((left >= num_job_nodes)) || die "without $1 $pool has $left nodes, and the job needs $num_job_nodes"
}
# FIELD=VALUE...: changes the requeued job. Slurm accepts that only after the job is pending again. It may end this shell before
# the last try, so each new answer is printed at once.
change_waiting_job() {
    local answer refusal=''
    for _ in {1..100}; do
        ! (trap '' TERM; exec scontrol update JobId="$SLURM_JOB_ID" "$@") >"$held/said" 2>&1 || return 0
        read -rd '' answer <"$held/said" # without its last newline
        [[ $answer == "$refusal" ]] || say "Slurm does not accept the list of bad nodes yet: $answer"
        refusal=$answer
        sleep 0.2
    done
    die "back in the queue, but Slurm did not accept the list of bad nodes ${1#*=}: $refusal"
}

# Slurm never starts a job that both requires a node (--nodelist) and excludes it, or that requires one which has left the
# cluster: drops these nodes from --nodelist.
drop_excluded_requests() {
    local node required names=() kept=() dropped=()
    required=$(job_field ReqNodeList)
    [[ $required ]] || return 0
    host_names names "$required" || die "scontrol cannot list the nodes that --nodelist names: $required (above)"
    for node in "${names[@]}"; do
        if [[ " ${excluded[*]} " == *" $node "* ]] || ! is_node "$node"; then dropped+=("$node"); else kept+=("$node"); fi
    done
    [[ ${dropped[*]-} ]] || return 0
    say "the job was submitted with --nodelist=$required: dropping the request for ${dropped[*]}, excluded or gone"
    changes+=(ReqNodeList="$(join_by , "${kept[@]}")")
}

# RESERVATION: prints the number of usable nodes that are not excluded, of the partition or of the reservation in it, if
# there is one. If Slurm shows no nodes (PrivateData), assumes enough. Nodes that the cloud has suspended count, because they
# come back: sinfo hides those that are off, and the state of those on their way, or rebooting, ends in one of ~ # ! % @ ^.
nodes_left() {
    local name state of unusable='down|drain|drng|fail|inval|futr' left=0 of_partition=() reserved=()
    local -A lost=()
    host_names_in of_partition partition "$SLURM_JOB_PARTITION"
    [[ ! $1 ]] || host_names_in reserved reservation "$1"
    [[ $1 ]] || unusable+='|maint' # in a reservation for maintenance, which could be this job's
    # --all shows hidden partitions too, and excludes --partition.
    sinfo --all --noheader --Node --format='%N %t %R' >"$held/partition"
    if [[ -z ${of_partition[*]-} ]] || ! grep -q " $SLURM_JOB_PARTITION\$" "$held/partition"; then echo "$num_job_nodes"; return; fi
    while read -r name state of; do
        [[ $of != "$SLURM_JOB_PARTITION" || ! $state =~ $unusable || $state == *[~#!%@^] ]] || lost[$name]=1
    done <"$held/partition"
    for name in "${of_partition[@]}"; do
        if [[ ${lost[$name]-} || " ${excluded[*]} " == *" $name "* ]]; then continue; fi
        if [[ $1 && " ${reserved[*]-$name} " != *" $name "* ]]; then continue; fi
        left=$((left + 1))
    done
    echo "$left"
}
# ARRAY KIND NAME: sets the array to the nodes of a partition or reservation, or to none.
host_names_in() {
    local list; list=$(scontrol show "$2" -o "$3" | sed -n 's/.* Nodes=\([^ ]*\).*/\1/p')
    [[ $list && $list != '(null)' ]] && host_names "$1" "$list"
}
