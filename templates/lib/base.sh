# Functions of every job: messages, signals, files, the run's directories and the environment.
say() { printf '%(%Y-%m-%dT%H:%M:%S%z)T hpcgen: %s\n' -1 "$*"; }
die() { say "ERROR: $*" >&2; exit 1; }
# Slurm ends the job with TERM, and warns the batch shell of a training job with USR2 before the time limit.
interrupted=0 terminated=0 requeued=0 warned=0 stop_file='' stop_command=(:)
set_traps() {
    trap 'interrupted=1 terminated=1; ((requeued)) || say "SIGTERM: canceled, preempted, out of time, or a node failed"' TERM
    trap 'interrupted=1 warned=1; make_stop_file; "${stop_command[@]}"; say "USR2: the time limit is near, or a user asks to stop; requesting a checkpoint"' USR2
}
# In a subshell, so that an error does not end the job.
make_stop_file() { [[ ! $stop_file ]] || (write_file "$stop_file" </dev/null); }
rc=0
# COMMAND...: runs it in the background, so that traps run at once, and sets rc to its status. Does nothing after TERM.
run_step() {
    ((!terminated)) || { rc=143; return 143; }
    "$@" &
    local pid=$!
    while interrupted=0; wait "$pid"; rc=$?; ((interrupted)); do :; done # a trap ends wait: wait again
    return "$rc"
}
# FILE: replaces it atomically with standard input. set -C refuses a file or link that somebody else put there.
write_file() {
    local part=$1.$SLURM_JOB_ID.$RANDOM$RANDOM
    { (umask g-w && set -C && cat >"$part") && sync -- "$part" && mv -fT -- "$part" "$1"; } || die "cannot write $1"
}
# NAME FILE: sets the variable NAME to the integer in FILE, or to 0.
read_number() {
    local text=''
    [[ ! -r $2 ]] || read -r text <"$2"
    [[ $text =~ ^[0-9]{1,15}$ ]] || text=0
    printf -v "$1" %d "$((10#$text))"
}
# OPTION...: adds options that are known only at run time to the tasks' command, unless submitit supplies it.
held='' submitted=0 task_logs='' details=above job=$SLURM_JOB_ID
add_options() { ((submitted)) || task+=("$@"); }
# $held is the job's directory for this shell; with `share: group` it stays so if others rename the directory.
# A requeued job keeps its job ID, so files that belong to one attempt carry the restart count in their names.
begin() {
    local mode=700 log_mode=600 directory
    set_traps
    umask 077
    [[ $share != group ]] || { umask 007; mode=2770 log_mode=660; } # setgid: what is made in it gets the directory's group
    job_dir=$run_dir/jobs/$job restart=${SLURM_RESTART_COUNT:-0}
    [[ ! $run_dir -ef ~ ]] || die "paths.run_dir is your home directory: give the run a directory of its own"
    mkdir -p -- "$run_dir" || die "cannot make the run directory (above)"
    [[ ! -O $run_dir ]] || chmod "$mode" -- "$run_dir" || say "cannot change the mode of $run_dir"
    mkdir -p -- "$run_dir/jobs" "${directories[@]}" || die "cannot make the directories that the job writes to (above)"
    (umask go-w && mkdir -p -- "$job_dir") || die "cannot make $job_dir"
    [[ -O $job_dir && ! -L $job_dir ]] || die "$job_dir was not made by this job: it is a link or belongs to someone else; remove it and submit again"
    held=$job_dir
    [[ $share != group ]] || guard_files
    # Slurm created the log with the submitting shell's umask.
    chmod "$log_mode" -- "$run_dir/$stage-$job.log" || say "cannot change the mode of the log"
    for directory in "${striped_directories[@]}"; do # Lustre spreads large files over all storage targets
        [[ ! -d $directory ]] || continue # keeps its layout
        mkdir -p -- "$directory" || die "cannot make $directory"
        ! command -v lfs >/dev/null || lfs setstripe -E -1 -c -1 -S 1M "$directory" 2>/dev/null || say "$directory is not striped"
    done
    say "$run_name: $stage job $job, restart $restart, on $SLURM_JOB_NODELIST"
    ((!submitted)) || { details="in $task_logs" && say "the tasks' own logs: $task_logs"; }
}
# Variables of the submitting shell that could change the job. The log shows only names, because values may be secret.
leaks='^(NCCL|UCX|SHARP|NVTE|TORCH|TORCHELASTIC|TORCHINDUCTOR|PYTORCH|GLOO|OMPI_MCA|MELLANOX|NVIDIA|PYXIS_CONTAINER|CUDA_DEVICE|CUBLAS|OMP)_'
leaks+='|^(CUDA_LAUNCH_BLOCKING|LD_PRELOAD|PYTHONPATH|PYTHONHOME|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$'
set_environment() {
    local name leaked=()
    for name in $(compgen -e); do
        [[ ! $name =~ $leaks || " ${secrets[*]} " == *" $name "* ]] || { leaked+=("$name") && unset -v "$name"; }
    done
    [[ -z ${leaked[*]-} ]] || say "unset these variables of the submitting shell: ${leaked[*]}"
    environment
    for name in "${secrets[@]}"; do printenv "$name" >/dev/null || die "$name is not set: export it where you submit"; done
}
