# Jobs with ranks: the nodes of the job, and where the ranks meet.

# job_nodes: all nodes of the job. step_nodes: those that the step runs on.
job_nodes=() step_nodes=()
list_nodes() {
    mapfile -t job_nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    step_nodes=("${job_nodes[@]}")
}

num_rendezvous=0
rendezvous() {
    local first_node num_hosts
    ((${#step_nodes[@]})) || list_nodes
    first_node=${step_nodes[0]}
    # The address that Slurm knows: names need not resolve on compute nodes.
    MASTER_ADDR=$(scontrol show node -o "$first_node" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    [[ -n $MASTER_ADDR ]] || die "scontrol knows no address of $first_node"
    num_hosts=$(scontrol show node -o "$SLURM_JOB_NODELIST" | sed -n 's/.* NodeHostName=\([^ ]*\).*/\1/p' | sort -u | wc -l)
    case $MASTER_ADDR in
    localhost | 127.* | ::1)
        ((num_hosts < 2)) || die "the address of $first_node is $MASTER_ADDR, which $num_hosts hosts cannot share; correct NodeAddr in slurm.conf"
        ;;
    esac
    # Derived from the job ID, its restarts and its steps, below the ephemeral range: jobs on one node rarely collide.
    MASTER_PORT=$((10000 + (SLURM_JOB_ID * 8 + restart + num_rendezvous) % 20000))
    num_rendezvous=$((num_rendezvous + 1))
    WORLD_SIZE=$((${#step_nodes[@]} * ntasks_per_node))
    # If the port is taken, the ranks try later ports. They recognize each other by this ID.
    read -r TRAINER_RENDEZVOUS_ID </proc/sys/kernel/random/uuid || die "cannot read /proc/sys/kernel/random/uuid"
    export MASTER_ADDR MASTER_PORT WORLD_SIZE TRAINER_RENDEZVOUS_ID
    say "rendezvous at $MASTER_ADDR:$MASTER_PORT, $WORLD_SIZE ranks"
}
