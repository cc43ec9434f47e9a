# Each node's scratch directory. Caches and temporary files stay on the node.
scratch=$scratch_root/hpcgen-${SLURM_CLUSTER_NAME:-slurm}-$SLURM_JOB_ID
# Set only for the tasks: pyxis itself needs the real HOME.
task_environment=("HOME=$scratch" "TMPDIR=$scratch/tmp" "XDG_CACHE_HOME=$scratch/cache" "HF_HOME=$scratch/huggingface")
task_environment+=("TRITON_CACHE_DIR=$scratch/triton" "TORCHINDUCTOR_CACHE_DIR=$scratch/inductor")
# srun's options for one task on each node
on_nodes=(--nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none --export=ALL)
# SECONDS COMMAND...: runs the command once on every node.
each_node() {
    run_step timeout --kill-after=30 "$1" srun "${on_nodes[@]}" "${@:2}"
    ((rc != 124 && rc != 137)) || say "ERROR: a node took longer than $1 s" >&2
    return "$rc"
}
# The functions of this script as text: `bash -p -c "$functions" NAME ARGUMENT...` runs one of them on another node.
functions=''
# shellcheck disable=SC2016 # the other shell expands it
read_functions() { functions="share=$share; $(unset -f main environment write_job_files queued_script; declare -f)"$'\n''"$0" "$@"'; }
# MESSAGE: prints the message with the node's name and ends the shell. For functions that run on a node.
node_fails() { echo "${SLURMD_NODENAME:-$HOSTNAME}: $*"; exit 1; }
job_states=RUNNING,SUSPENDED,STOPPED,CONFIGURING,COMPLETING,RESIZING,SIGNALING,STAGE_OUT
my_jobs() { squeue --noheader --user="$UID" --format=%A --states="$job_states" 2>/dev/null; }
make_scratch() {
    read_functions
    srun "${on_nodes[@]}" --overlap --no-kill bash -p -c "$functions" guard_scratch "$scratch" >/dev/null 2>&1 &
    each_node 300 bash -p -c "$functions" make_node_scratch "$scratch" "$(my_jobs)" "$check_memlock" "${required[@]}"
}
# On a node, SCRATCH JOBS CHECK_MEMLOCK PATH...: makes SCRATCH, removes those of killed jobs, and checks that it can read PATHs.
make_node_scratch() {
    local scratch=$1 jobs=" ${2//[[:space:]]/ } " node=${SLURMD_NODENAME:-$HOSTNAME} old path
    [[ -d ${scratch%/*} ]] || { (umask 022; mkdir -p -- "${scratch%/*}") && chmod 1777 -- "${scratch%/*}"; } # for all users
    umask 077
    { mkdir -p -- "$scratch" && [[ -O $scratch && ! -L $scratch ]] && mkdir -p -- "$scratch/tmp"; } || node_fails "cannot make $scratch"
    # JOBS is used only if it contains this job, because squeue may have failed.
    find "${scratch%/*}" -maxdepth 1 -type d -user "$UID" -mmin +10 | while [[ $jobs == *" ${scratch##*-} "* ]] && read -r old; do
        [[ ! $old =~ ^"${scratch%-*}"-[0-9]+$ || $jobs == *" ${old##*-} "* ]] || rm -rf -- "$old"
    done
    for path in "${@:4}"; do [[ -r $path ]] || node_fails "$path is missing or not readable"; done
    ((!$3)) || [[ $(ulimit -l) == unlimited ]] || echo "$node: warning: memlock is $(ulimit -l) kB; InfiniBand needs unlimited"
    prepare_node || node_fails "the site's prepare_node failed with status $?"
}
# On a node, SCRATCH: removes the directory when Slurm ends the job. Slurm starts no steps by then, so this one starts
# early. It waits until no task is left. If Slurm kills it first (KillWait, 30 s by default), a later job removes SCRATCH.
guard_scratch() {
    local ended=''
    trap 'ended=1' TERM; trap : INT USR1 USR2
    until [[ $ended ]]; do sleep infinity & wait; done
    trap '' TERM
    kill $!
    while grep -qsz "^HOME=$1\$" /proc/[0-9]*/environ; do sleep 0.2; done
    [[ ! -O $1 || -L $1 ]] || rm -rf -- "$1"
}
remove_scratch() {
    ((terminated)) || run_aside timeout --kill-after=30 120 srun "${on_nodes[@]}" rm -rf -- "$scratch" ||
        say "cannot remove $scratch on at least one node"
}
