# Stages that read the datasets of trainer.json.

# Checks each file of the datasets from this node only. make_node_scratch checks their directories on every node.
check_datasets() {
    local line file
    while IFS= read -r line; do
        [[ $line =~ \"prefix\":\ \"([^\"\\]+)\" ]] || continue
        for file in "${BASH_REMATCH[1]}".idx "${BASH_REMATCH[1]}".bin; do
            [[ -r $file ]] || die "$file is missing or not readable on ${SLURMD_NODENAME:-$HOSTNAME}"
        done
    done <"$job_dir/trainer.json"
}
