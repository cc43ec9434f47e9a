# tensorboard: a port on the node, and how to reach it.

announce_port() {
    # Below the ephemeral range, and derived from the job, so that two jobs on a node differ; the next port that is free.
    local port=$((10000 + SLURM_JOB_ID % 20000))
    while (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
    say "TensorBoard on $SLURMD_NODENAME. On your own machine, run:"
    say "    ssh -N -J $login_host -L 6006:127.0.0.1:$port $SLURMD_NODENAME"
    say "and open http://localhost:6006"
    # To the node itself only: TensorBoard knows no passwords, and others are on the network.
    add_options --host=127.0.0.1 --port="$port"
}

conclude() {
    ((!terminated)) || exit 143
    ((rc == 0)) || die "TensorBoard ended with status $rc (above)"
    exit 0
}
