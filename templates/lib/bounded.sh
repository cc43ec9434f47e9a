# Commands of the site and of the user that may hang: each is a process group of its own, so that all its processes can be killed.

# PID SECONDS SECONDS_AFTER_TERM: waits for the process. Kills its group and fails if this takes too long.
wait_at_most() {
    local end=$((SECONDS + $2)) is_late=0
    while kill -0 "$1" 2>/dev/null && ((!is_late)); do
        ((!terminated || end <= SECONDS + $3)) || end=$((SECONDS + $3))
        sleep 0.2
        is_late=$((SECONDS > end))
    done
    ((!is_late)) || ! kill -KILL -- "-$1" 2>/dev/null
}
