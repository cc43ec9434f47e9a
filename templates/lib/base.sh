# Every job: messages, traps, the run's directories, the nodes' scratch directories and the site's functions.

say() { printf '%(%Y-%m-%dT%H:%M:%S%z)T hpcgen: %s\n' -1 "$*"; }
die() {
    say "ERROR: $*" >&2
    exit 1
}
stop_or_die() {
    ((!terminated)) || exit 143
    die "$*"
}

# Runs a command in the background, so that traps run at once. Sets rc to its exit status.
rc=0
run_step() {
    local pid
    "$@" &
    pid=$!
    interrupted=1
    while ((interrupted)); do
        interrupted=0
        wait "$pid"
        rc=$?
    done
    return "$rc"
}

# TERM: Slurm ends the job; logged unless the script itself has requeued it. USR2: Slurm warns the batch shell of a
# training job before the time limit.
interrupted=0 terminated=0 requeued=0 warned=0
stop_file=/dev/null
set_traps() {
    trap 'interrupted=1 terminated=1; ((requeued)) || say "SIGTERM: canceled, preempted, or out of time"' TERM
    trap 'interrupted=1 warned=1; : >"$stop_file"; say "warned: the time limit is near; asking for a checkpoint"' USR2
}

# Replaces a file atomically with standard input. Others may write to the directory: set -C refuses an existing file or
# link, and the umask keeps others from changing the new file.
write_file() {
    local part=$1.$SLURM_JOB_ID.$RANDOM$RANDOM
    { (umask g-w && set -C && cat >"$part") && sync -- "$part" && mv -fT -- "$part" "$1"; } || die "cannot write $1"
}

# NAME FILE: sets the variable NAME to the whole number in FILE, or to 0.
read_number() {
    local text=''
    [[ ! -r $2 ]] || read -r text <"$2"
    [[ $text =~ ^[0-9]{1,15}$ ]] || text=0
    printf -v "$1" %d "$((10#$text))"
}

# Adds options that are known only at run time to the task's command. Under `hpcgen submit`, submitit's command has them.
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
    local file_mode=600 directory_mode=700
    umask 077
    if [[ $share == group ]]; then
        umask 007
        file_mode=660 directory_mode=2770 # setgid keeps the group of the run directory
    fi
    job_dir=$run_dir/jobs/$job
    restart=${SLURM_RESTART_COUNT:-0}
    [[ ! $run_dir -ef ~ ]] || die "paths.run_dir is your home directory: give the run a directory of its own"
    mkdir -p -- "$run_dir/jobs" "${directories[@]}" || die "cannot make the directories that the job writes to (above)"
    # Slurm created the log with the umask of the submitting shell.
    chmod "$file_mode" -- "$run_dir/$stage-$job.log" || say "cannot change the mode of the log"
    chmod "$directory_mode" -- "$run_dir" "$run_dir/jobs" || say "cannot change the mode of $run_dir"
    # The job's own directory: readable by the group, writable only by the job's user.
    (umask g-w && mkdir -p -- "$job_dir") || die "cannot make $job_dir"
    [[ -O $job_dir && ! -L $job_dir ]] || die "$job_dir was not made by this job: it is a link or belongs to someone else; remove it and submit again"
    make_striped "${striped_directories[@]}"
}

# On Lustre, spreads large files over all storage targets; a directory that exists keeps its layout.
make_striped() {
    local directory
    for directory; do
        [[ ! -d $directory ]] || continue
        mkdir -p -- "$directory" || die "cannot make $directory"
        ! command -v lfs >/dev/null || lfs setstripe -E -1 -c -1 -S 1M "$directory" 2>/dev/null || say "$directory is not striped"
    done
}

set_environment() {
    unset_leaked_variables
    environment
    require_secrets
}
# Unsets variables of the submitting shell that would change the job. Logs names only, since values may be secret.
unset_leaked_variables() {
    local name leaked=()
    while IFS= read -r name; do
        [[ " ${secrets[*]} " != *" $name "* ]] || continue
        case $name in
        NCCL_* | UCX_* | SHARP_* | NVTE_* | TORCH_* | TORCHINDUCTOR_* | PYTORCH_* | GLOO_* | OMPI_MCA_* | MELLANOX_* | NVIDIA_* | \
            PYXIS_CONTAINER_* | CUDA_DEVICE_* | OMP_* | TORCHELASTIC_* | PYTHONPATH | PYTHONHOME | RANK | LOCAL_RANK | WORLD_SIZE | MASTER_ADDR | MASTER_PORT)
            leaked+=("$name")
            unset -v "$name"
            ;;
        esac
    done < <(compgen -e)
    [[ -z ${leaked[*]-} ]] || say "unset what the submitting shell leaked: ${leaked[*]}"
}

# Secrets are inherited from the submitting shell; their values are never written to a file.
require_secrets() {
    local name
    for name in "${secrets[@]}"; do
        printenv "$name" >/dev/null || die "$name is not set: export it where you submit"
    done
}

# Runs site_prologue in this shell, so that its variables stay. If it ends the job, the job concludes as after any failed
# attempt.
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
    in_prologue=0
    set +e -uo pipefail
    say "ERROR: site_prologue ended the job with status $status (above)" >&2
    rc=1
    conclude
}

# srun's options for one task on each node.
on_nodes=(--nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1)
# SECONDS COMMAND...: runs the command once on every node.
each_node() {
    local limit=$1
    shift
    run_step timeout "$limit" srun "${on_nodes[@]}" --export=ALL "$@"
}
# The functions of this script as text: `bash -c "$functions" NAME ARGUMENT...` runs one of them on another node.
functions=''
# shellcheck disable=SC2016 # the other shell expands it
read_functions() { functions="$(unset -f main environment write_job_files; declare -f)"$'\n''"$0" "$@"'; }

# Caches and temporary files stay on the node. Set for the tasks alone: pyxis itself needs the real HOME.
scratch=$scratch_root/hpcgen-${SLURM_CLUSTER_NAME:-slurm}-$SLURM_JOB_ID
task_environment=(
    "HOME=$scratch"
    "TMPDIR=$scratch/tmp"
    "XDG_CACHE_HOME=$scratch/cache"
    "HF_HOME=$scratch/huggingface"
    "TRITON_CACHE_DIR=$scratch/triton"
    "TORCHINDUCTOR_CACHE_DIR=$scratch/inductor"
)
make_scratch() {
    local running
    running=$(squeue --noheader --user="$UID" --format=%A --states=RUNNING,SUSPENDED,STOPPED,CONFIGURING,COMPLETING,RESIZING,SIGNALING,STAGE_OUT 2>/dev/null) || running=unknown
    read_functions
    srun "${on_nodes[@]}" --overlap --no-kill bash -c "$functions" guard_scratch "$scratch" >/dev/null 2>&1 &
    each_node 300 bash -c "$functions" make_node_scratch "$scratch" "$running" "$check_memlock" "${required[@]}"
}
# On a node, SCRATCH RUNNING CHECK_MEMLOCK PATH...: makes the scratch directory, removes those of jobs that were killed,
# and looks for each PATH.
make_node_scratch() {
    local scratch=$1 running=$2 check_memlock=$3 node=${SLURMD_NODENAME:-$(hostname)} old path
    umask 077
    if ! mkdir -p -- "$scratch" || [[ ! -O $scratch || -L $scratch ]] || ! mkdir -p -- "$scratch/tmp"; then
        echo "$node: cannot make $scratch"
        exit 1
    fi
    for old in "${scratch%-*}"-[0-9]*; do
        [[ $running != unknown && $old != "$scratch" && ${old##*-} =~ ^[0-9]+$ && -d $old && -O $old && ! -L $old ]] || continue
        [[ $running =~ (^|[[:space:]])${old##*-}($|[[:space:]]) ]] || rm -rf -- "$old"
    done
    shift 3
    for path; do
        [[ -r $path ]] || { echo "$node: $path is missing or not readable"; exit 1; }
    done
    ((!check_memlock)) || [[ $(ulimit -l) == unlimited ]] || echo "$node: warning: memlock is $(ulimit -l) kB; InfiniBand needs unlimited"
    prepare_node || { echo "$node: the site's prepare_node failed with status $?"; exit 1; }
}
# On a node, SCRATCH: removes it when Slurm ends the job. Slurm then refuses new steps, so this one starts early; it lets
# the tasks save, and is done before Slurm kills what is left (KillWait, 30 s by default).
guard_scratch() {
    local ended=''
    trap 'ended=1' TERM
    trap : INT USR1 USR2
    until [[ $ended ]]; do
        sleep infinity &
        wait
    done
    trap '' TERM
    kill $!
    while grep -qsz "^HOME=$1\$" /proc/[0-9]*/environ; do sleep 0.2; done
    [[ ! -O $1 || -L $1 ]] || rm -rf -- "$1"
}
remove_scratch() {
    local status=$rc
    ((terminated)) || run_step timeout 120 srun "${on_nodes[@]}" rm -rf -- "$scratch" || say "scratch is left on a node: $scratch"
    rc=$status
}

# Runs site_epilogue in a subshell: whatever ends it, the conclusion follows. After SIGTERM it has 5 s, since Slurm
# kills the job soon (KillWait) and the job must requeue itself before.
run_epilogue() {
    local pid status deadline=$((SECONDS + 600))
    set -m # a process group of its own, so that all of it can be ended
    (
        set +m -E
        trap '' TERM # Slurm signals every process of the job; the limit below ends this one
        trap 'say "WARNING: site_epilogue: status $? of: $BASH_COMMAND" >&2' ERR
        site_epilogue
        exit 0
    ) &
    pid=$!
    set +m
    while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do
        sleep 0.2
        if ((terminated && deadline > SECONDS + 5)); then deadline=$((SECONDS + 5)); fi
    done
    if ((SECONDS >= deadline)) && kill -KILL -- "-$pid" 2>/dev/null; then
        say "WARNING: site_epilogue took too long and was ended; the conclusion follows" >&2
    fi
    wait "$pid" 2>/dev/null
    status=$?
    ((status == 0 || status == 137 || terminated)) || say "WARNING: site_epilogue ended early with status $status (above); the conclusion follows" >&2
}
