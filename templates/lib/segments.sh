# Segments: keeps the nodes that NVLink connects together when a spare node takes the place of a bad one.

# Sets step_nodes to good nodes of which each block has nodes_per_segment or a multiple of it, so that ranks that communicate
# over NVLink are in one block. Fails if bad nodes leave too few.
choose_whole_segments() {
    local node block count need=$nodes chosen=()
    local -A block_of=() good_of=() left=()
    for node in "${good[@]}"; do
        block=''
        IFS= read -r block <"$reports/$node.ok"
        block=block:$block
        block_of[$node]=$block
        good_of[$block]=$((${good_of[$block]-0} + 1))
    done
    for node in "${good[@]}"; do
        block=${block_of[$node]}
        if [[ ! ${left[$block]-} ]]; then
            count=${good_of[$block]}
            count=$((count - count % nodes_per_segment))
            left[$block]=$((count < need ? count : need))
            need=$((need - ${left[$block]}))
        fi
        ((${left[$block]} > 0)) || continue
        left[$block]=$((${left[$block]} - 1))
        chosen+=("$node")
    done
    if ((need == 0)); then
        step_nodes=("${chosen[@]}")
    elif [[ ${bad[*]-} ]]; then
        say "the good nodes contain ${#chosen[@]} of $nodes nodes in whole segments of $nodes_per_segment"
        return 1
    else
        say "WARNING: Slurm did not place the nodes in segments of $nodes_per_segment: some groups of ranks have no NVLink"
    fi
}
