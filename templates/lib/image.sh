# image: builds a container image with the recipe that the script carries.

# Not HOME: enroot finds the registry's credentials there.
task_environment=("TMPDIR=$scratch/tmp")
# The recipe is on the scratch directory, where only this user can change it: the job runs it.
use_recipe() {
    task=(bash "$scratch/build-image.sh" "${task[@]}")
    [[ -z $topology ]] || add_options --topology="$scratch/$topology"
    add_options --work="$scratch"
}

conclude() {
    ((!terminated)) || exit 143
    ((rc == 0)) || die "no image was built: status $rc (above)"
    say "the image is built: name it as container.image in the run file or the cluster profile"
    exit 0
}
