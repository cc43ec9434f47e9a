# Functions of every job: messages, signals, files, the run's directories and the environment.
rc=0 terminated=0 requeued=0 # status of the job's work; whether Slurm ends the job (SIGTERM); whether it starts again
last_said=''
say() { last_said=$*; printf '%(%Y-%m-%dT%H:%M:%S%z)T hpcgen: %s\n' -1 "$*"; }
die() { say "ERROR: $*" >&2; exit 1; }
# Libraries below replace these functions: share.sh, notify.sh, hooks.sh and attempts.sh.
guard_log() { :; }; print_own() { cat -- "$1"; }; at_start() { :; }; at_exit() { :; }; before_requeue() { :; }; find_cause() { :; }
request_stop() { say "USR2: this stage goes on, since it saves nothing before its end"; }
set_traps() {
    trap 'interrupted=1 terminated=1; ((requeued)) || say "SIGTERM: canceled, preempted, out of time, or a node failed"' TERM
    trap 'interrupted=1; request_stop' USR2
}
# COMMAND...: runs it in the background, so that traps run at once, and sets rc to its status. Does nothing after TERM.
run_step() {
    local interrupted=0 pid
    ((!terminated)) || { rc=143; return 143; }
    "$@" &
    pid=$!
    while interrupted=0; wait "$pid"; rc=$?; ((interrupted)); do :; done # a trap ends wait: wait again
    find_task_logs
    return "$rc"
}
# COMMAND...: likewise for a step that is not the job's work, whose status rc stays.
run_aside() { local rc; run_step "$@"; }
# COMMAND...: runs it until it succeeds, at most ten times.
retry() { for _ in {1..10}; do "$@" && return; sleep 2; done; return 1; }
# The tasks' own logs exist only if submitit starts the tasks. Their names are those of earlier attempts, too.
submitted=0 task_logs='' details=above
find_task_logs() { local log; for log in $task_logs; do [[ ! -e $log || $held/begun -nt $log ]] || details="in $task_logs"; done; }
# OPTION...: adds options that are known only at run time to the tasks' command, unless submitit supplies it.
add_options() { ((submitted)) || task+=("$@"); }
# FILE: replaces it atomically with standard input. install makes a new file, with this mode even if the directory has a
# default ACL, which takes the place of the umask. SIGTERM, which Slurm sends to every process of the job, does not end it.
write_file() {
    local part=$1.$job.$RANDOM$RANDOM
    (trap '' TERM; install -T -m "$file_mode" -- /dev/stdin "$part" && sync -- "$part" && mv -fT -- "$part" "$1") || die "cannot write $1"
}
# NAME FILE: sets the variable NAME to the integer in FILE, or to 0.
read_number() {
    local text=''
    [[ ! -f $2 || ! -r $2 ]] || read -r text <"$2"
    [[ $text =~ ^[0-9]{1,15}$ ]] || text=0
    printf -v "$1" %d "$((10#$text))"
}
# $held is the job's directory for this shell. A requeued job keeps its job ID, so files that belong to one attempt carry the
# restart count in their names.
held='' job=$SLURM_JOB_ID job_log='' job_umask=077 run_dir_mode=700 job_dir_mode=700 file_mode=600 log_mode=600
begin() {
    local directory
    set_traps
    job_log=$run_dir/$stage-$job.log
    guard_log
    drop_leaks
    umask "$job_umask"
    job_dir=$run_dir/jobs/$job
    [[ -d $job_dir ]] || unset -v SLURM_RESTART_COUNT # Slurm sets it only for restarts: it is that of an outer job
    restart=${SLURM_RESTART_COUNT:-0}
    [[ ! $run_dir -ef ~ ]] || die "paths.run_dir is your home directory: give the run a directory of its own"
    mkdir -p -- "$run_dir" || die "cannot make the run directory (above)"
    [[ ! -O $run_dir ]] || chmod "$run_dir_mode" -- "$run_dir" || say "cannot change the mode of $run_dir"
    mkdir -p -- "$run_dir/jobs" "${directories[@]}" || die "cannot make the directories that the job writes to (above)"
    make_job_directory
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
make_job_directory() {
    [[ -d $job_dir ]] || mkdir -m "$job_dir_mode" -- "$job_dir" || die "cannot make $job_dir"
    [[ -O $job_dir && ! -L $job_dir ]] || die "$job_dir was not made by this job: it is a link or belongs to someone else; remove it and submit again"
    held=$job_dir
}
# Unsets the variables that match a pattern in leaks, unless Slurm or the plan set them. Prints only names, because values may be secret.
drop_leaks() {
    local name leak="@(${leaks// /|})" kept=" $kept_variables ${secrets[*]} " leaked=() overriding=()
    # Slurm sets them for the tasks of each step. In this shell, those of an outer job can have replaced the job's own.
    unset -v SLURM_MEM_PER_NODE SLURM_STEPID SLURM_STEP_ID SLURM_TASKS_PER_NODE CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK
    for name in $(compgen -e); do
        # shellcheck disable=SC2053 # a pattern
        [[ $name == $leak && $kept != *" $name "* ]] || continue
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
