# Containers of CSCS's container engine: a file describes the container, and srun --environment names the file.

# Repeats the job's variables with a prefix, since a variable of the image wins over the job's. The task sets them again.
create_containers() {
    local name
    write_environment_file
    container[0]=--environment=$job_dir/container.toml
    for name in "${job_variables[@]}"; do [[ ! -v $name ]] || export "HPCGEN_ENV_$name=${!name}"; done
}
