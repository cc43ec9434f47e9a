# tensorboard: a port on the node, and how to reach it.

announce_port() {
    # A port below the ephemeral range, derived from the job ID so that jobs on one node differ, or the next free one.
    local port=$((10000 + SLURM_JOB_ID % 20000))
    while (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
    say "TensorBoard on $SLURMD_NODENAME. On your own machine, run:"
    say "    ssh -N -J $login_host -L 6006:127.0.0.1:$port $SLURMD_NODENAME"
    say "and open http://localhost:6006"
    # Loopback only: TensorBoard has no passwords, and other users are on the network.
    add_options --host=127.0.0.1 --port="$port"
}

conclude() {
    ((!terminated)) || exit 143
    ((rc == 0)) || die "TensorBoard ended with status $rc (above)"
    exit 0
}
