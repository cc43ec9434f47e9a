# nccl-test: runs NVIDIA's all_reduce_perf if the tasks have it, and otherwise measures with torch.distributed.

# If a rank dies, the stacks of all other ranks would bury the line that names it.
task_environment+=(TORCH_CPP_LOG_LEVEL=FATAL)

# If the program succeeds, the test evaluates its figures. A step looks for the program first: it may be in an image.
measure_with_all_reduce_perf() {
    local before=$SECONDS began
    [[ ! $nccl_tests ]] || ((terminated)) || run_all_reduce_perf
    printf -v began '%(%s)T' -2 # when this shell began
    task_environment+=(TRAINER_JOB_BEGAN="$((began + SECONDS - before))") # the program's time is not start-up
}
run_all_reduce_perf() {
    local perf=all_reduce_perf.log
    if ! run_step srun --nodelist="${step_nodes[0]}" --nodes=1 --ntasks=1 --ntasks-per-node=1 --export=ALL "${container[@]}" test -x "$nccl_tests"; then
        ((terminated)) || say "the tasks do not have $nccl_tests; measuring with torch.distributed instead"
        return 0
    fi
    if run_step all_reduce_perf "$held/$perf"; then
        add_options --all-reduce-perf-output="$job_dir/$perf"
    else
        ((terminated)) || say "all_reduce_perf failed (below); measuring with torch.distributed instead"
    fi
    cat -- "$held/$perf"
}
all_reduce_perf() {
    srun "${step[@]}" --mpi=pmix "${container[@]}" env "${task_environment[@]}" "$nccl_tests" \
        --minbytes="$smallest_bytes" --maxbytes="$largest_bytes" --stepfactor="$step_factor" --ngpus=1 >"$1" 2>&1
}

conclude() {
    local result=$job_dir/nccl-test.json
    ((!terminated)) || exit 143
    # The status says nothing more: when the first rank exits, srun ends the others and reports their status.
    if ((rc == 0)); then
        say "passed; figures: $result"
        exit 0
    fi
    [[ ! -r $result ]] || die "the fabric did not pass (above); figures: $result"
    die "the test came to no result (above)"
}
