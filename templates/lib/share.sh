# A run that a group shares. Each member can rename what is in the run directory and put a link or a file in its place.

job_umask=007 run_dir_mode=2770 job_dir_mode=750 file_mode=640 log_mode=660 # setgid: files in it get the directory's group
# OPEN PATH ROOT: succeeds if OPEN, an open file in /proc, is at PATH. With a link below ROOT, it is elsewhere.
is_at() { [[ $(readlink -- "$1") == "$(cd -P -- "$3" && pwd -P)${2#"$3"}" ]]; }
# OPEN PATH: succeeds if OPEN is a file of this user, and PATH in the run directory is its only name.
is_own_file() { [[ $(stat -Lc %u:%h -- "$1") == "$UID:1" ]] && is_at "$1" "$2" "$run_dir"; }
# DIRECTORY: holds it open as $held, which names it whatever happens to its path. Fails if its path has a link in the run
# directory, or if others made it or can write to it.
hold() {
    local descriptor
    exec {descriptor}<"$1/." || return
    held=/proc/$$/fd/$descriptor
    [[ $(stat -Lc %u:%A -- "$held") == "$UID":d????-??-? ]] && is_at "$held" "$1" "${1%/jobs/*}"
}
make_job_directory() {
    local descriptor
    exec {descriptor}<"$run_dir/jobs/." || die "cannot open $run_dir/jobs"
    held=/proc/$$/fd/$descriptor
    is_at "$held" "$run_dir/jobs" "$run_dir" || die "$job_dir was not made by this job: $run_dir/jobs is a link; remove it and submit again"
    [[ -d $held/$job ]] || mkdir -m "$job_dir_mode" -- "$held/$job" || die "cannot make $job_dir"
    [[ -O $held/$job && ! -L $held/$job ]] || die "$job_dir was not made by this job: it is a link or belongs to someone else; remove it and submit again"
    held=$job_dir
    hold "$job_dir" || die "$job_dir was not made by this job: it or $run_dir/jobs is a link, or others can write to it; remove it and submit again"
    [[ ! $log_problem ]] || { exec >>"$held/log" 2>&1; die "$log_problem"; }
    export HPCGEN_JOB_DIR=$job_dir # tasks read a configuration in it only if it is this user's own
    [[ ! $job_log ]] || chgrp --reference="$run_dir" -- "$job_log" || say "cannot change the group of the log"
}
# Slurm opens the log before the job begins, and follows a link there. No line may get into the link's target. From here on,
# job_log is the open file, because others can replace its name. It is empty with sbatch --output.
log_problem=''
guard_log() {
    local path=$job_log output
    job_log=/proc/$$/fd/1
    ! is_own_file "$job_log" "$path" || return 0
    job_log=''
    [[ -f /proc/$$/fd/1 ]] || return 0
    ! output=$(retry scontrol show job "$SLURM_JOB_ID" 2>/dev/null) || [[ $output == *"StdOut=$run_dir/$stage-"* ]] || return 0
    log_problem="$path is a link, so the job would write into another file; remove the link and submit again"
    exec >/dev/null 2>&1 # until the job's directory exists
}
# JOB: prints a warning if the run's last job is another user's, and Slurm shows each user only the own jobs: is_running cannot
# tell whether the job has ended.
warn_of_hidden_job() {
    if (($1 == 0 || $1 == SLURM_JOB_ID)) || [[ -O $run_dir/RUNNING ]]; then return; fi
    scontrol show config 2>/dev/null | grep -E '^PrivateData *=.*(all|jobs)' >/dev/null || return
    say "WARNING: Slurm hides the jobs of other users (PrivateData in slurm.conf). If job $1 of $(stat -c %U -- "$run_dir/RUNNING") is still running in $run_dir, only the lock of hpcgen's trainer keeps the two jobs apart" >&2
}
# FILE: prints it if this user made it. The group reads the log, and a link could lead to a private file.
print_own() {
    local self=$BASHPID descriptor
    exec {descriptor}<"$1" || return
    is_own_file "/proc/$self/fd/$descriptor" "$1" || { echo "$1 is a link, or others made it"; return; }
    cat <&"$descriptor"
}
