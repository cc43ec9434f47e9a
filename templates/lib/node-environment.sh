# The environment script of the nodes (environment_script in the node type): what it sets becomes the tasks' environment.

# SCRIPT NAMES: runs it in a shell of its own, so that it cannot end the job or change its options, and takes over the
# variables that it sets, changes and removes, except NAMES, which are those of layers above the node type. Writes them to the
# job's directory.
run_environment_script() {
    local script=$1 kept=" $2 " found=$held/node-environment entry name names=() changed=() left=()
    local -A after=()
    [[ -r $script ]] || die "$script is missing or not readable on ${SLURMD_NODENAME:-$HOSTNAME} (environment_script of the node type)"
    # shellcheck disable=SC2016 # the other shell expands it
    bash -p -c 'source "$0" >&2 || exit; compgen -e | while read -r name; do printf "%s=%s\0" "$name" "${!name}"; done' "$script" \
        </dev/null >"$found" || die "$script failed with status $? (above)"
    [[ -s $found ]] || die "$script ends its shell, so its variables are lost: it must not call exit"
    while IFS= read -rd '' entry; do after[${entry%%=*}]=${entry#*=}; done <"$found"
    mapfile -t names < <({ printf "%s\n" "${!after[@]}"; compgen -e; } | sort -u)
    for name in "${names[@]}"; do
        if [[ $name == @(_|SHLVL|PWD|OLDPWD) || (-v after[$name] && -v $name && ${after[$name]} == "${!name}") ]]; then continue; fi
        # The script of the job needs these, and LD_LIBRARY_PATH would replace the image's (library_path adds to it).
        if [[ $name == @(PATH|LD_*|HOME|TMPDIR|PYTHON*|BASH*|ENV|IFS|SLURM*|SBATCH_*|SRUN_*) || $name != "${name^^}" || $kept == *" $name "* ]]; then
            left+=("$name")
        elif [[ -v after[$name] ]]; then
            export "$name=${after[$name]}"
            task_environment+=("$name=${after[$name]}")
            changed+=("$name")
        else
            unset -v "$name"
            changed+=("$name (removed)")
        fi
    done
    for name in "${changed[@]}"; do [[ $name == *' (removed)' ]] || echo "$name=${!name}"; done | write_file "$found"
    say "$script set ${changed[*]:-nothing} (values: $job_dir/node-environment)"
    [[ -z ${left[*]-} ]] || say "not taken from $script: ${left[*]}"
}
