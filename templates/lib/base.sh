# Functions of every job: messages, signals, files, the run's directories, the environment and the site's hooks.

say() { printf '%(%Y-%m-%dT%H:%M:%S%z)T hpcgen: %s\n' -1 "$*"; }
die() { say "ERROR: $*" >&2; exit 1; }

# Slurm ends the job with TERM, and warns the batch shell of a training job with USR2 before the time limit.
interrupted=0 terminated=0 requeued=0 warned=0 stop_file=/dev/null
set_traps() {
    trap 'interrupted=1 terminated=1; ((requeued)) || say "SIGTERM: canceled, preempted, or out of time"' TERM
    trap 'interrupted=1 warned=1; : >"$stop_file"; say "warned: the time limit is near; requesting a checkpoint"' USR2
}

# Runs a command in the background, so that traps run at once. Sets rc to its exit status. After TERM it starts nothing.
rc=0
run_step() {
    local pid
    ((!terminated)) || { rc=143; return 143; }
    "$@" &
    pid=$!
    while interrupted=0; wait "$pid"; rc=$?; ((interrupted)); do :; done
    return "$rc"
}

# Replaces a file atomically with standard input. Others may write to the directory: set -C refuses an existing file or
# link, and the umask keeps others from changing the new file.
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

# Adds options that are known only at run time to the tasks' command, unless submitit supplies it (`hpcgen submit`).
submitted=0 task_logs=''
add_options() { ((submitted)) || task+=("$@"); }

job=$SLURM_JOB_ID
begin() {
    set_traps
    make_run_directories
    say "$run_name: $stage job $job, restart $restart, on $SLURM_JOB_NODELIST"
    ((!submitted)) || say "the tasks' own logs: $task_logs"
}
# A requeued job keeps its job ID, so files that belong to one attempt carry the restart count in their names.
make_run_directories() {
    local mode=700 log_mode=600 directory
    umask 077
    [[ $share != group ]] || { umask 007; mode=2770 log_mode=660; } # setgid keeps the group of the run directory
    job_dir=$run_dir/jobs/$job
    restart=${SLURM_RESTART_COUNT:-0}
    [[ ! $run_dir -ef ~ ]] || die "paths.run_dir is your home directory: give the run a directory of its own"
    mkdir -p -- "$run_dir/jobs" "${directories[@]}" || die "cannot make the directories that the job writes to (above)"
    # Slurm created the log with the umask of the submitting shell.
    chmod "$log_mode" -- "$run_dir/$stage-$job.log" || say "cannot change the mode of the log"
    chmod "$mode" -- "$run_dir" "$run_dir/jobs" || say "cannot change the mode of $run_dir"
    (umask g-w && mkdir -p -- "$job_dir") || die "cannot make $job_dir"
    [[ -O $job_dir && ! -L $job_dir ]] || die "$job_dir was not made by this job: it is a link or belongs to someone else; remove it and submit again"
    # On Lustre, large files are spread over all storage targets; a directory that exists keeps its layout.
    for directory in "${striped_directories[@]}"; do
        [[ ! -d $directory ]] || continue
        mkdir -p -- "$directory" || die "cannot make $directory"
        ! command -v lfs >/dev/null || lfs setstripe -E -1 -c -1 -S 1M "$directory" 2>/dev/null || say "$directory is not striped"
    done
}

# Variables of the submitting shell could change the job. The log shows only their names, because values may be secret.
set_environment() {
    local name leaked=()
    for name in $(compgen -e); do
        [[ " ${secrets[*]} " != *" $name "* ]] || continue
        case $name in
        NCCL_* | UCX_* | SHARP_* | NVTE_* | TORCH_* | TORCHINDUCTOR_* | PYTORCH_* | GLOO_* | OMPI_MCA_* | MELLANOX_* | NVIDIA_* | \
            PYXIS_CONTAINER_* | CUDA_DEVICE_* | CUDA_LAUNCH_BLOCKING | CUBLAS_* | LD_PRELOAD | OMP_* | TORCHELASTIC_* | \
            PYTHONPATH | PYTHONHOME | RANK | LOCAL_RANK | WORLD_SIZE | MASTER_ADDR | MASTER_PORT)
            leaked+=("$name") && unset -v "$name"
            ;;
        esac
    done
    [[ -z ${leaked[*]-} ]] || say "unset these variables of the submitting shell: ${leaked[*]}"
    environment
    for name in "${secrets[@]}"; do
        printenv "$name" >/dev/null || die "$name is not set: export it where you submit"
    done
}

# Runs site_prologue in this shell, so that its variables stay. If it exits, the job concludes as after a failed attempt.
in_prologue=0
run_prologue() {
    in_prologue=1
    trap prologue_ended EXIT
    site_prologue
    in_prologue=0
    set +e -uo pipefail
    set_traps
}
prologue_ended() {
    local status=$?
    ((in_prologue)) || return "$status"
    in_prologue=0 rc=1
    set +e -uo pipefail
    say "ERROR: site_prologue ended the job with status $status (above)" >&2
    conclude
}
# Runs site_epilogue in a subshell, so that the conclusion follows even if site_epilogue fails or exits. It may take 10
# minutes, or 5 s after TERM, because the job must requeue itself before Slurm kills it (KillWait).
run_epilogue() {
    local pid status left=3000 # times 0.2 s
    set -m # a process group of its own, so that all its processes can be killed
    (
        set +m -E
        trap '' TERM # Slurm signals every process of the job
        trap 'say "WARNING: site_epilogue: status $? of: $BASH_COMMAND" >&2' ERR
        site_epilogue
        exit 0
    ) &
    pid=$!
    set +m
    while kill -0 "$pid" 2>/dev/null && ((left)); do
        ((!terminated || left <= 25)) || left=25
        left=$((left - 1))
        sleep 0.2
    done
    if ((!left)) && kill -KILL -- "-$pid" 2>/dev/null; then
        say "WARNING: site_epilogue took too long and was ended; the conclusion follows" >&2
    fi
    wait "$pid" 2>/dev/null
    status=$?
    ((status == 0 || !left)) || say "WARNING: site_epilogue ended early with status $status (above); the conclusion follows" >&2
}
