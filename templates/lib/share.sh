# A run that a group shares. Each member can rename what is in the run directory and put a link or a file in its place.

# DIRECTORY: holds it open as $held, which names it whatever happens to its path. Fails if its path has a link in the run
# directory, or if others made it or can write to it.
hold() {
    local descriptor root=${1%/jobs/*}
    exec {descriptor}<"$1/." || return
    held=/proc/$$/fd/$descriptor
    [[ $(stat -Lc %u:%A -- "$held") == "$UID":d????-??-? && $(readlink -- "$held") == "$(cd -P -- "$root" && pwd -P)${1#"$root"}" ]]
}
guard_files() {
    local log=$run_dir/$stage-$job.log
    hold "$job_dir" || die "$job_dir was not made by this job: it or $run_dir/jobs is a link, or others can write to it; remove it and submit again"
    export HPCGEN_JOB_DIR=$job_dir # tasks read a configuration in it only if it is this user's own
    if [[ ! -e $log ]]; then return; fi # sbatch --output
    # Slurm opens the log before the job begins, and follows a link there. No more lines may get into the link's target.
    [[ $(stat -c %A:%u:%h -- "$log") == -*":$UID:1" ]] || { exec >>"$held/log" 2>&1; die "$log is a link, so the job would write into another file; remove the link and submit again"; }
    chgrp --reference="$run_dir" -- "$log" || say "cannot change the group of the log"
}
