# Checks each file of trainer.json's datasets from this node. make_node_scratch checks their directories on every node.
check_datasets() {
    local file
    while IFS= read -r file; do
        [[ -r $file ]] || die "$file is missing or not readable on ${SLURMD_NODENAME:-$HOSTNAME}"
    done < <(sed -n 's/.*"prefix": "\([^"\\]*\)".*/\1.idx\n\1.bin/p' "$held/trainer.json")
}
