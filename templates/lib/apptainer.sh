# Containers that apptainer starts, one for each task.

# Keeps apptainer's caches and unpacked images on the node. Its default is the home directory.
create_containers() {
    command -v apptainer >/dev/null || die "apptainer is not on PATH on ${SLURMD_NODENAME:-$HOSTNAME}: add its module to modules in the cluster profile"
    export APPTAINER_TMPDIR=$scratch/tmp APPTAINER_CACHEDIR=$scratch/apptainer
}
