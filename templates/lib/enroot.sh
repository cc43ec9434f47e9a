# Containers that enroot starts without pyxis: one is created on each node and started for each task.

# Overrides enroot.conf: the job's containers and caches are in its scratch directory, and HOME is not mounted.
create_containers() {
    export ENROOT_DATA_PATH=$scratch/enroot/data ENROOT_CACHE_PATH=$scratch/enroot/cache ENROOT_RUNTIME_PATH=$scratch/enroot/run
    export ENROOT_TEMP_PATH=$scratch/tmp ENROOT_MOUNT_HOME=no ENROOT_ROOTFS_WRITABLE=no
    each_node 1800 enroot create --force --name "$container_name" "$image"
}
