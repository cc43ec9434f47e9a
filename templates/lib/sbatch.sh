# Jobs that this job submits.

# COMMAND...: prints the script that is to be submitted. Removes what Slurm, submitit and this job added to the environment of
# the submitting shell: sbatch reads it as options. The shell's defaults (SBATCH_ACCOUNT) stay, except for options that the
# script sets.
restore_environment() {
    local name option
    for name in $(compgen -e); do
        option=${name#SBATCH_}
        case $name in
            SLURM_CONF | SLURM_CONF_SERVER | SLURM_JWT | SLURM_SACK_*) ;;
            SLURM_* | SLURMD_* | SUBMITIT_* | TRAINER_*) unset -v "$name" ;;
            SBATCH_*) ! "$@" | grep "^#SBATCH --${option,,}=" >/dev/null || unset -v "$name" ;;
        esac
    done
}
