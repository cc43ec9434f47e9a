# Stages that read the datasets of trainer.json.

# The files of the datasets: each once, from this node. Every node is asked for their directories.
check_datasets() {
    local line file
    while IFS= read -r line; do
        [[ $line =~ \"prefix\":\ \"([^\"\\]+)\" ]] || continue
        for file in "${BASH_REMATCH[1]}".idx "${BASH_REMATCH[1]}".bin; do
            [[ -r $file ]] || die "$file is missing or not readable on ${SLURMD_NODENAME:-$HOSTNAME}"
        done
    done <"$job_dir/trainer.json"
}
