# Environment modules of the cluster profile: environment-modules 4 or newer, or Lmod.

# Loads each module in this shell. Functions of the module systems read variables that are not set.
load_modules() {
    local name
    set +u
    define_module || die "this node has no command module (environment-modules or Lmod), and the cluster profile names modules: ${modules[*]}"
    for name in "${modules[@]}"; do
        module load "$name" || die "module load $name failed (above): correct modules of the cluster profile"
    done
    set -u
}
# Defines the function module as a login shell does. bash -p ignores the one that the submitting shell exports.
define_module() {
    local file
    for file in "$LMOD_PKG/init/bash" "$MODULESHOME/init/bash" /etc/profile.d/{z00_lmod,lmod,modules}.sh /usr/share/{lmod/lmod,modules,Modules}/init/bash; do
        # shellcheck source=/dev/null
        [[ ! -r $file ]] || source "$file"
        ! declare -F module >/dev/null || return 0
    done
    return 1
}
