# Jobs with ranks: the nodes of the job (job_nodes), those that the step runs on (step_nodes), and the ranks' rendezvous.
job_nodes=() step_nodes=() num_rendezvous=0
list_nodes() {
    mapfile -t job_nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    step_nodes=("${job_nodes[@]}")
}
rendezvous() {
    ((${#step_nodes[@]})) || list_nodes
    # The address that Slurm knows: names need not resolve on compute nodes.
    MASTER_ADDR=$(scontrol show node -o "${step_nodes[0]-}" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    [[ $MASTER_ADDR ]] || { say "ERROR: scontrol has no address for ${step_nodes[0]-}" >&2; rc=1; return 1; }
    [[ ! $MASTER_ADDR =~ ^(localhost|127\..*|::1)$ ]] || (($(num_hosts) < 2)) ||
        die "the address of ${step_nodes[0]} is $MASTER_ADDR, which several hosts cannot share; correct NodeAddr in slurm.conf"
    # Below the ephemeral range, and rarely the same for two jobs or steps on a node. If the port is taken, the ranks try
    # later ones, and recognize each other by TRAINER_RENDEZVOUS_ID.
    MASTER_PORT=$((10000 + (SLURM_JOB_ID * 8 + restart + num_rendezvous++) % 20000))
    WORLD_SIZE=$((${#step_nodes[@]} * ntasks_per_node))
    TRAINER_RENDEZVOUS_ID=$(</proc/sys/kernel/random/uuid)
    export MASTER_ADDR MASTER_PORT WORLD_SIZE TRAINER_RENDEZVOUS_ID
    say "rendezvous at $MASTER_ADDR:$MASTER_PORT, world size $WORLD_SIZE"
}
num_hosts() { scontrol show node -o "$SLURM_JOB_NODELIST" | grep -o ' NodeHostName=[^ ]*' | sort -u | wc -l; }
