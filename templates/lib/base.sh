# Functions of every job: messages, signals, files, the run's directories and the environment.
last_said=''
say() { last_said=$*; printf '%(%Y-%m-%dT%H:%M:%S%z)T hpcgen: %s\n' -1 "$*"; }
die() { say "ERROR: $*" >&2; exit 1; }
read_time() { local now=${EPOCHREALTIME-}; [[ $now ]] || printf -v now '%(%s)T' -1; printf -v "$1" %s "${now/,/.}"; } # bash 4.4 has no fractions of a second
# Slurm ends the job with TERM, and warns the batch shell of a training job with USR2 before the time limit.
interrupted=0 terminated=0 requeued=0 warned=0 asks_to_stop=yes stop_file='' stop_command=(:) before_requeue=(:)
set_traps() {
    trap 'interrupted=1 terminated=1; ((requeued)) || say "SIGTERM: canceled, preempted, out of time, or a node failed"' TERM
    trap 'interrupted=1; request_stop' USR2
}
# A program without program.stop goes on as if there had been no signal, so that its failures count.
request_stop() {
    local answer='program.stop is not set, so the program goes on'
    record stop asks "$asks_to_stop"
    [[ ! $asks_to_stop ]] || { answer='requesting a checkpoint' warned=1; make_stop_file; "${stop_command[@]}"; }
    say "USR2: the time limit is near, or a user asks to stop; $answer"
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
    find_task_logs
    return "$rc"
}
# Sets details to submitit's logs if the tasks of this attempt wrote any. An earlier attempt's have the same names.
find_task_logs() { local log; for log in $task_logs; do [[ ! -e $log || $held/begun -nt $log ]] || details="in $task_logs"; done; }
# FILE: replaces it atomically with standard input. install makes a new file, with this mode even if the directory has a
# default ACL, which takes the place of the umask. SIGTERM, which Slurm sends to every process of the job, does not end it.
file_mode=600 job_directory_mode=700
write_file() {
    local part=$1.$job.$RANDOM$RANDOM
    (trap '' TERM; install -T -m "$file_mode" -- /dev/stdin "$part" && sync -- "$part" && mv -fT -- "$part" "$1") || die "cannot write $1"
}
# COMMAND...: runs it until it succeeds, at most ten times.
retry() { for _ in {1..10}; do "$@" && return; sleep 2; done; return 1; }
# NAME FILE: sets the variable NAME to the integer in FILE, or to 0.
read_number() {
    local text=''
    [[ ! -f $2 || ! -r $2 ]] || read -r text <"$2"
    [[ $text =~ ^[0-9]{1,15}$ ]] || text=0
    printf -v "$1" %d "$((10#$text))"
}
# OPTION...: adds options that are known only at run time to the tasks' command, unless submitit supplies it.
held='' submitted=0 task_logs='' details=above job=$SLURM_JOB_ID job_log=''
add_options() { ((submitted)) || task+=("$@"); }
# $held is the job's directory for this shell; with `share: group` it stays so if others rename the directory.
# A requeued job keeps its job ID, so files that belong to one attempt carry the restart count in their names.
begin() {
    local mode=700 log_mode=600 directory
    set_traps
    job_log=$run_dir/$stage-$job.log
    [[ $share != group ]] || guard_log
    drop_leaks
    umask 077
    [[ $share != group ]] || { umask 007; mode=2770 log_mode=660; } # setgid: what is made in it gets the directory's group
    job_dir=$run_dir/jobs/$job held=$run_dir/jobs
    [[ -d $job_dir ]] || unset -v SLURM_RESTART_COUNT # Slurm sets it only for restarts: it is that of an outer job
    restart=${SLURM_RESTART_COUNT:-0}
    [[ ! $run_dir -ef ~ ]] || die "paths.run_dir is your home directory: give the run a directory of its own"
    mkdir -p -- "$run_dir" || die "cannot make the run directory (above)"
    [[ ! -O $run_dir ]] || chmod "$mode" -- "$run_dir" || say "cannot change the mode of $run_dir"
    mkdir -p -- "$run_dir/jobs" "${directories[@]}" || die "cannot make the directories that the job writes to (above)"
    [[ $share != group ]] || hold_jobs
    [[ -d $held/$job ]] || mkdir -m "$job_directory_mode" -- "$held/$job" || die "cannot make $job_dir"
    [[ -O $held/$job && ! -L $held/$job ]] || die "$job_dir was not made by this job: it is a link or belongs to someone else; remove it and submit again"
    held=$job_dir
    [[ $share != group ]] || hold_job
    # Slurm created the log with the submitting shell's umask.
    [[ ! $job_log ]] || chmod "$log_mode" -- "$job_log" || say "cannot change the mode of the log"
    for directory in "${striped_directories[@]}"; do # Lustre spreads large files over several storage targets
        [[ ! -d $directory ]] || continue # keeps its layout
        mkdir -p -- "$directory" || die "cannot make $directory"
        [[ -z ${stripe[*]} ]] || lfs setstripe "${stripe[@]}" "$directory" 2>/dev/null || say "$directory is not striped: it is not on Lustre, or lfs is missing"
    done
    say "$run_name: $stage job $job, restart $restart, on $SLURM_JOB_NODELIST"
    record_start
    ((!submitted)) || { write_file "$held/begun" </dev/null; say "the tasks' own logs, once they run: $task_logs"; }
}
# FILE: prints it. In a shared run, only if this user made it: the group reads the log, and a link could lead to a private file.
print_own() {
    local self=$BASHPID descriptor
    exec {descriptor}<"$1" || return
    if [[ $share == group ]] && ! is_own_file "/proc/$self/fd/$descriptor" "$1"; then echo "$1 is a link, or others made it"; return; fi
    cat <&"$descriptor"
}
# Exceptions to leaks: what Slurm (20.11 to 26.05) or submitit sets for every job, how to reach Slurm and the Hugging Face Hub, and what changes no job.
own_variables='SLURM_CLUSTER_NAME SLURM_CPUS_ON_NODE SLURM_GTIDS SLURM_JOBID SLURM_JOB_ACCOUNT SLURM_JOB_CPUS_PER_NODE SLURM_JOB_DEPENDENCY SLURM_JOB_END_TIME SLURM_JOB_EXCLUSIVE SLURM_JOB_GID SLURM_JOB_GROUP SLURM_JOB_ID'
own_variables+=' SLURM_JOB_LICENSES SLURM_JOB_NAME SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_OVERSUBSCRIBE SLURM_JOB_PARTITION SLURM_JOB_QOS SLURM_JOB_RESERVATION SLURM_JOB_SEGMENT_SIZE'
own_variables+=' SLURM_JOB_SLUID SLURM_JOB_START_TIME SLURM_JOB_UID SLURM_JOB_USER SLURM_LOCALID SLURM_NNODES'
own_variables+=' SLURM_NODEID SLURM_NODELIST SLURM_NODE_ALIASES SLURM_NPROCS SLURM_NTASKS SLURM_OOM_KILL_STEP SLURM_PRIO_PROCESS SLURM_PROCID SLURM_RESTART_COUNT SLURM_SUBMIT_DIR SLURM_SUBMIT_HOST SLURM_TASK_PID'
own_variables+=' SLURM_TOPOLOGY_ADDR SLURM_TOPOLOGY_ADDR_PATTERN SLURM_WORKING_CLUSTER SLURMD_NODENAME SUBMITIT_EXECUTOR'
own_variables+=' HYDRA_BOOTSTRAP HYDRA_LAUNCHER_EXTRA_ARGS I_MPI_HYDRA_BOOTSTRAP I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS OMPI_MCA_plm_slurm_args PRTE_MCA_plm_slurm_args'
own_variables+=' SLURM_CONF SLURM_CONF_SERVER SLURM_JWT SLURM_SACK_JWKS SLURM_SACK_KEY SLURM_SACK_SOCKET HF_ENDPOINT HF_TOKEN PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED'
# Unsets the variables that match a pattern in leaks, unless Slurm or the plan set them. Prints only names, because values may be secret.
drop_leaks() {
    local name leak="@(${leaks// /|})" own=" $own_variables $option_variables ${secrets[*]} " leaked=() overriding=()
    # Slurm sets them for the tasks of each step. In this shell, those of an outer job can have replaced the job's own.
    unset -v SLURM_MEM_PER_NODE SLURM_STEPID SLURM_STEP_ID SLURM_TASKS_PER_NODE CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK
    for name in $(compgen -e); do
        # shellcheck disable=SC2053 # a pattern
        [[ $name == $leak && $own != *" $name "* ]] || continue
        unset -v "$name"
        if [[ $name == SBATCH_* ]]; then overriding+=("$name"); else leaked+=("$name"); fi
    done
    [[ -z ${leaked[*]-} ]] || say "unset these variables of the submitting shell: ${leaked[*]}"
    [[ -z ${overriding[*]-} ]] || say "sbatch read ${overriding[*]} in the submitting shell, which override what hpcgen planned: unset them before sbatch, or use hpcgen submit" >&2
    # With --no-requeue, the job could not put itself back into the queue.
    [[ ${chain-} || " ${overriding[*]-} " != *" SBATCH_NO_REQUEUE "* ]] || scontrol update JobId="$SLURM_JOB_ID" Requeue=1
}
set_environment() {
    local name
    environment
    for name in "${secrets[@]}"; do printenv "$name" >/dev/null || die "$name is not set: export it where you submit"; done
}
