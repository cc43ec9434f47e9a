# image: builds a container image with the recipe that the script carries.

# HOME is unchanged, because enroot reads the registry's credentials there.
task_environment=("TMPDIR=$scratch/tmp")
# The job runs the recipe from its scratch directory, where only this user can change it.
use_recipe() {
    task=(bash "$scratch/build-image.sh" "${task[@]}")
    [[ -z $topology ]] || add_options --topology="$scratch/$topology"
    add_options --work="$scratch"
}

conclude() {
    ((!terminated)) || exit 143
    ((rc == 0)) || die "no image was built: status $rc (above)"
    say "the image is built: set container.image to its path in the run file or the cluster profile"
    exit 0
}
