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
    collect_facts
    ((!terminated)) || exit 143
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

# Writes the versions of each node's software and its time to $reports/NODE-facts, and the time before and after to clock. hpcgen
# doctor compares them: nodes with other drivers or plugins than the rest can hang with them.
collect_facts() {
    local list time
    list=$(join_by , "${job_nodes[@]}")
    read_time time; echo "$time" >"$held/nodes-$restart/clock"
    run_aside timeout --kill-after=10 180 srun --overlap --nodelist="$list" --nodes="${#job_nodes[@]}" --ntasks="${#job_nodes[@]}" \
        --ntasks-per-node=1 --cpu-bind=none --export=ALL --kill-on-bad-exit=0 bash -p -c "$functions" node_facts "$reports"
    read_time time; echo "$time" >>"$held/nodes-$restart/clock"
}
# On a node, REPORTS: writes NODE-facts there, a NAME VALUE on each line.
node_facts() {
    local node=${SLURMD_NODENAME:-$HOSTNAME} reports=$1 held='' time
    [[ ${share-} != group ]] || hold "$reports" || exit 1
    reports=${held:-$reports}
    {
        read_time time; fact clock "$time"
        fact kernel "$(uname -r)"
        fact system "$(sed -n 's/^PRETTY_NAME=//p' /etc/os-release 2>/dev/null)"
        fact slurm "$(answer_of srun --version)"
        fact driver "$(answer_of nvidia-smi --query-gpu=driver_version --format=csv,noheader)"
        fact cuda "$(answer_of nvidia-smi | sed -n 's/.*CUDA Version: \([0-9.]*\).*/\1/p')"
        fact nccl "$(library libnccl.so.2)"
        fact nccl-plugin "$(library libnccl-net.so)"
        fact libfabric "$(answer_of fi_info --version | sed -n 's/^libfabric: //p')"
        fact ofed "$(answer_of ofed_info -s)"
        fact enroot "$(answer_of enroot version)"
        fact memlock "$(ulimit -l)"
    } >"$reports/.$node-facts" && mv -f -- "$reports/.$node-facts" "$reports/$node-facts"
}
# NAME VALUE: prints a fact in one line, unless the value is empty.
fact() { [[ ! $2 ]] || printf '%s %s\n' "$1" "${2//[^ -~]/ }"; }
# COMMAND...: prints its answer, with equal lines once; nothing without an answer in 30 s.
answer_of() { timeout --kill-after=5 30 "$@" 2>/dev/null </dev/null | uniq; }
# NAME: prints the file of a library that the loader finds, and the beginning of its SHA-256.
library() {
    local file
    file=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null | sed -n "s|^[[:space:]]*$1 .*=> ||p" | head -n 1)
    [[ ! $file ]] || { file=$(readlink -f -- "$file"); printf '%s %.12s' "$file" "$(sha256sum -- "$file")"; }
}
# One task in the container, with a time limit: some versions of Slurm, pyxis and PMIx hang without a message.
try_container() {
    local began=$SECONDS option mpi=()
    for option in "${step[@]}"; do [[ $option != --mpi=* ]] || mpi=("$option"); done
    run_step timeout --kill-after=30 600 srun --overlap --nodelist="${step_nodes[0]}" --nodes=1 --ntasks=1 --ntasks-per-node=1 \
        --cpu-bind=none --export=ALL "${mpi[@]}" "${container[@]}" true
    printf '%d %d\n' "$rc" "$((SECONDS - began))" >"$held/nodes-$restart/container-step"
    ((rc != 124 && rc != 137)) || say "a single task in the container did not end within 600 s on ${step_nodes[0]}"
    return "$rc"
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
