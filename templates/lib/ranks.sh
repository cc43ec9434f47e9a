# Jobs with ranks: the nodes of the job (job_nodes), those that the step runs on (step_nodes), and the ranks' rendezvous.
job_nodes=() step_nodes=() num_rendezvous=0
# NAME LIST: sets the array NAME to the nodes in one of Slurm's lists. Fails if scontrol does.
host_names() { local printed; printed=$(retry scontrol show hostnames "$2") && [[ $printed ]] && mapfile -t "$1" <<<"$printed"; }
list_nodes() {
    host_names job_nodes "$SLURM_JOB_NODELIST" || { say "ERROR: scontrol cannot list the nodes of this job (above)" >&2; rc=1; return 1; }
    step_nodes=("${job_nodes[@]}")
}
# NODE: prints the address that Slurm knows, because names need not resolve on compute nodes.
node_address() { local node; node=$(retry scontrol show node -o "$1"); sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p' <<<"$node"; }
rendezvous() {
    ((${#step_nodes[@]})) || list_nodes || return
    MASTER_ADDR=$(node_address "${step_nodes[0]}") || exit
    [[ $MASTER_ADDR ]] || say "scontrol does not show node ${step_nodes[0]} (above; PrivateData=nodes?): the ranks look up its name"
    MASTER_ADDR=${MASTER_ADDR:-${step_nodes[0]}}
    [[ ! $MASTER_ADDR =~ ^(localhost|127\..*|::1)$ ]] || (($(num_hosts) == 1)) ||
        die "the address of ${step_nodes[0]} is $MASTER_ADDR, which several hosts cannot share; correct NodeAddr in slurm.conf"
    # Below the ephemeral range, and rarely the same for two jobs or steps on a node. If the port is taken, the ranks try
    # later ones, and recognize each other by TRAINER_RENDEZVOUS_ID.
    MASTER_PORT=$((10000 + (SLURM_JOB_ID * 8 + restart + num_rendezvous++) % 20000))
    WORLD_SIZE=$((${#step_nodes[@]} * ntasks_per_node))
    TRAINER_RENDEZVOUS_ID=$(</proc/sys/kernel/random/uuid)
    export MASTER_ADDR MASTER_PORT WORLD_SIZE TRAINER_RENDEZVOUS_ID
    record launch nodes "${step_nodes[*]}" ranks "$WORLD_SIZE"
    say "rendezvous at $MASTER_ADDR:$MASTER_PORT, world size $WORLD_SIZE"
}
num_hosts() { retry scontrol show node -o "$SLURM_JOB_NODELIST" | grep -o ' NodeHostName=[^ ]*' | sort -u | wc -l; }
