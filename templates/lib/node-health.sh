# node-health: checks each node of the job on the host, and then the GPUs of the good nodes.

# If a rank dies, the stacks of all other ranks would bury the line that names it.
task_environment+=(TORCH_CPP_LOG_LEVEL=FATAL)

check_hosts() {
    local node
    list_nodes || conclude
    ask_nodes "${job_nodes[@]}"
    ((!terminated)) || exit 143
    step_nodes=()
    for node in "${job_nodes[@]}"; do [[ ! -e $reports/$node.ok ]] || step_nodes+=("$node"); done
    ((${#step_nodes[@]})) || conclude
    use_nodes
}
# The step runs on the nodes that are good so far. A node that fails does not end the checks of the others.
use_nodes() {
    local list num=${#step_nodes[@]}
    list=$(join_by , "${step_nodes[@]}")
    on_nodes=(--nodelist="$list" --nodes="$num" --ntasks="$num" --ntasks-per-node=1 --cpu-bind=none --export=ALL)
    step+=(--nodelist="$list" --nodes="$num" --ntasks="$((num * ntasks_per_node))" --kill-on-bad-exit=0)
    add_options --config "$job_dir/node-health.config.json" --reports "$reports"
}

# PART NODE: succeeds if the node's report of this part says that the node is good.
part_is_good() { [[ -f $reports/$2-$1.json && $(<"$reports/$2-$1.json") == *'"ok": true'* ]]; }

# Succeeds if the checks of all nodes found the same, which is no fault of one node.
have_same_findings() {
    local node report first=''
    for node in "${job_nodes[@]}"; do
        report=$(grep -v '^ "node": ' -- "$reports/$node-host.json") || return
        [[ $report == "${first:=$report}" ]] || return
    done
}

# Prints a table of the nodes, writes the lists for the next job, and exits with the status.
conclude() {
    local node host in_container good=() bad=()
    ((!terminated)) || exit 143
    [[ $reports ]] || die "no node was checked (status $rc, above)"
    if ((${#step_nodes[@]})) && ! compgen -G "$reports/*-container.json" >/dev/null; then
        die "no node reports from its container (above): that is a mistake in the job rather than in its nodes"
    fi
    printf '%-32s %-10s %s\n' node host container
    for node in "${job_nodes[@]}"; do
        host='NO REPORT' in_container='not checked'
        [[ ! -e $reports/$node-host.json ]] || host=BAD
        ! part_is_good host "$node" || host=good
        if part_is_good container "$node"; then
            in_container=good
        elif [[ -e $reports/$node-container.json ]]; then
            in_container=BAD
        elif [[ $host == good ]]; then
            in_container='NO REPORT'
        fi
        printf '%-32s %-10s %s\n' "$node" "$host" "$in_container"
        if [[ $host == good && $in_container == good ]]; then good+=("$node"); else bad+=("$node"); fi
    done
    for node in "${good[@]}"; do echo "$node"; done | write_file "$run_dir/good_nodes"
    for node in "${bad[@]}"; do echo "$node"; done | write_file "$run_dir/bad_nodes"
    if [[ -z ${good[*]-} && ${bad[1]-} ]] && have_same_findings; then
        die "every node has the same findings (above): check the node type and the profile, and what the nodes share. No node is excluded"
    fi
    note_nodes
    say "${#good[@]} of ${#job_nodes[@]} nodes are good; reports: $reports"
    [[ -z ${excluded[*]-} ]] || say "for the next jobs: --exclude=$(join_by , "${excluded[@]}")"
    [[ -z ${bad[*]-} ]] || die "bad nodes: ${bad[*]}"
    exit 0
}
