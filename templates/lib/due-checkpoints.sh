# Lists the checkpoints to be evaluated: complete ones of a multiple of evaluation_every iterations without a result.
list_due_checkpoints() {
    local path name
    for path in "$checkpoints"/iter_*/COMPLETE; do
        name=${path%/COMPLETE} name=${name##*/}
        [[ $name =~ ^iter_[0-9]{7,15}$ && -e $path && ! -e $run_dir/evaluation/$name.json ]] || continue
        ((10#${name#iter_} == 0 || 10#${name#iter_} % evaluation_every)) || echo "$name"
    done
}
