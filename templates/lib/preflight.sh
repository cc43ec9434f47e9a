# Preflight: a training job leaves out bad nodes: its spares take over, or it requeues itself without them.

choose_good_nodes() {
    list_nodes
    check_nodes
    ((!terminated)) || exit 143
    choose_nodes || exclude_and_requeue
    say "training on ${step_nodes[*]}"
}

# COMMAND...: runs it; when a node died, again on those that are left, while they are enough.
run_until_good() {
    local status
    while true; do
        rc=0
        "$@" || rc=$?
        status=$rc
        if ((rc == 0 || terminated || warned)) || [[ -e $run_dir/FAILED ]]; then return "$rc"; fi
        say "the step ended with status $status: checking the nodes"
        check_nodes
        rc=$status
        if ((terminated)) || [[ -z ${bad[*]-} ]]; then return "$rc"; fi
        if ! choose_nodes || ! prepare_nodes; then
            say "too few nodes are left to go on in this job: ${#good[@]}"
            rc=$status
            return "$rc"
        fi
        say "going on in this job, on ${step_nodes[*]}"
        rendezvous
    done
}

# Checks the nodes of the job; leaves good=(...) and bad=(...).
check_nodes() {
    local node
    ask_nodes "${job_nodes[@]}"
    good=() bad=()
    for node in "${job_nodes[@]}"; do
        if [[ -e $reports/$node.ok ]]; then good+=("$node"); else bad+=("$node"); fi
    done
    [[ -z ${bad[*]-} ]] || say "bad nodes: ${bad[*]} (reports: $reports)"
}

# The nodes of the step: the first of those that are good. A step that lost a node holds on to its others, which the
# next one therefore shares (--overlap).
choose_nodes() {
    local list
    ((${#good[@]} >= nodes)) || return
    job_nodes=("${good[@]}")
    step_nodes=("${good[@]:0:nodes}")
    list=$(join_by , "${step_nodes[@]}")
    on_nodes=(--overlap --nodelist="$list" --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1)
    step+=(--overlap --nodelist="$list")
}

# Back into the queue without the bad nodes.
exclude_and_requeue() {
    local count list left try changes asked=$job_dir/excluded_by_user
    [[ ${good[*]-} || -z ${bad[1]-} ]] || die "no node is fit: that is a mistake of the run rather than of its nodes (reports: $reports)"
    if [[ -z ${good[*]-} ]] && grep -q '"check": "file"' "$reports"/*-host.json 2>/dev/null; then
        die "${bad[*]} lacks a file that the run needs (above)"
    fi
    read_number count "$job_dir/exclusions"
    ((count < max_exclusions)) || die "bad nodes: ${bad[*]}; the job excluded nodes $count times already: giving up"
    write_file "$job_dir/exclusions" <<<"$((count + 1))"
    # What the user excluded stays so.
    [[ -e $asked ]] || scontrol show job -o "$SLURM_JOB_ID" | sed -n 's/.* ExcNodeList=\([^ ]*\).*/\1/p' | sed 's/(null)//' | write_file "$asked"
    note_nodes
    list=$(join_by , "${excluded[@]}" "$(<"$asked")")
    list=${list%,}
    left=$(nodes_left)
    ((left >= num_job_nodes)) || die "without $list partition $SLURM_JOB_PARTITION has $left nodes, and the job needs $num_job_nodes"
    changes=(ExcNodeList="$list")
    drop_excluded_requests
    ((!terminated)) || exit 143
    requeued=1
    # From here on Slurm may end this shell at any time. A trap that runs in the middle of a command substitution makes
    # bash 5.2 lose its place in the script: there is none below.
    despite_term scontrol requeue "$SLURM_JOB_ID" || die "scontrol requeue failed; submit again with --exclude=$list"
    # Slurm takes the list once the job is in the queue, and no sooner.
    for ((try = 0; try < 50; try++)); do
        if despite_term scontrol update JobId="$SLURM_JOB_ID" "${changes[@]}" >"$reports/said" 2>&1; then
            say "back into the queue without $list (exclusion $((count + 1)) of at most $max_exclusions)"
            exit 0
        fi
        sleep 0.1
    done
    cat "$reports/said" >&2
    die "back in the queue, but Slurm did not take the list of bad nodes $list (above)"
}

# Slurm never starts a job that both requires a node (--nodelist) and excludes it: requires the other nodes alone.
drop_excluded_requests() {
    local node required kept=() dropped=()
    required=$(scontrol show job -o "$SLURM_JOB_ID" | sed -n 's/.* ReqNodeList=\([^ ]*\).*/\1/p' | sed 's/(null)//')
    [[ $required ]] || return 0
    while read -r node; do
        if [[ " ${excluded[*]} " == *" $node "* ]]; then dropped+=("$node"); else kept+=("$node"); fi
    done < <(scontrol show hostnames "$required")
    [[ ${dropped[*]-} ]] || return 0
    say "the job was submitted with --nodelist=$required: dropping the request for ${dropped[*]}, which it now excludes"
    changes+=(ReqNodeList="$(join_by , "${kept[@]}")")
}

# How many nodes of the partition are neither down nor bad.
nodes_left() {
    local name state left=0
    while read -r name state; do
        [[ $state == *down* || $state == *drain* || $state == *drng* || $state == *fail* || " ${excluded[*]} " == *" $name "* ]] || left=$((left + 1))
    done < <(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --format='%N %t')
    echo "$left"
}

