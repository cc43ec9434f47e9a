# Checks of a node on the host, without root and without a container, for node-health and for the preflight of a training
# job. The functions up to check_host run on the nodes.

# TEXT: prints a JSON string. Characters other than printable ASCII become question marks.
json_text() {
    local text=${1//[^ -~]/?}
    text=${text//\\/\\\\}
    printf '"%s"' "${text//\"/\\\"}"
}

# CHECK EXPECTED FOUND: adds a finding and prints it.
finding() {
    findings+=("{\"check\": $(json_text "$1"), \"expected\": $(json_text "$2"), \"found\": $(json_text "$3")}")
    echo "$node: BAD $1: expected $2, found $3"
}

# FILE: prints the first line of a file in /sys or /proc, or "nothing" if there is none.
first_line() {
    local line=nothing
    [[ ! -r $1 ]] || read -r line <"$1" || [[ $line ]] || line=nothing
    printf '%s' "$line"
}

# NAME QUERY: sets answer to the output of nvidia-smi, or adds a finding. nvidia-smi may hang for a GPU that has fallen off
# the bus.
ask_gpus() {
    local status
    answer=$(timeout --kill-after=5 60 nvidia-smi "$2" --format=csv,noheader,nounits 2>&1 </dev/null)
    status=$?
    # Older drivers do not know every field.
    [[ $answer != *"not a valid field"* ]] || return 1
    ((status == 0)) || finding "$1" "an answer from nvidia-smi" "status $status: ${answer%%"$newline"*}"
    return "$status"
}

check_gpus() {
    local answer='' count=0 name first='' used errors reason pid memory pending failure waited
    ask_gpus gpus --query-gpu=name || return
    # Slurm may still be ending the tasks of the previous step.
    for ((waited = 0; ; waited += 5)); do
        ask_gpus processes --query-compute-apps=pid,used_memory || break
        if [[ ! $answer =~ [0-9] ]] || ((waited >= patience)); then break; fi
        sleep 5
    done
    while IFS=, read -r pid memory; do
        [[ ! $pid =~ ^[0-9]+$ ]] || finding gpu_processes "no process" "process $pid uses${memory} MiB"
    done <<<"$answer"
    count=0
    ask_gpus gpus --query-gpu=name,memory.used,ecc.errors.uncorrected.volatile.total || return
    while IFS=, read -r name used errors; do
        [[ $name ]] || continue
        first=${first:-$name}
        [[ $name == "$first" ]] || finding "gpu_$count name" "$first, as GPU 0" "$name"
        used=${used// /}
        [[ ! $used =~ ^[0-9]+$ ]] || ((used <= 2048)) || finding "gpu_$count memory" "at most 2048 MiB in use" "$used MiB in use"
        errors=${errors// /}
        [[ ! $errors =~ ^[0-9]+$ ]] || ((errors == 0)) || finding "gpu_$count ecc" "no uncorrectable error" "$errors uncorrectable errors"
        count=$((count + 1))
    done <<<"$answer"
    ((count == gpus)) || finding gpus "$gpus GPUs" "$count GPUs"
    if ask_gpus remapped_rows --query-remapped-rows=remapped_rows.pending,remapped_rows.failure; then
        count=0
        while IFS=, read -r pending failure; do
            [[ ! ${pending// /} =~ ^([1-9]|[Yy]es) ]] || finding "gpu_$count remapped_rows" "none pending" "rows to remap: reset the GPU or reboot"
            [[ ! ${failure// /} =~ ^([1-9]|[Yy]es) ]] || finding "gpu_$count remapped_rows" "no failure" "remapping failed: replace the GPU"
            count=$((count + 1))
        done <<<"$answer"
    fi
    # The first name is used since driver 535, and the second before.
    for reason in clocks_event_reasons clocks_throttle_reasons; do
        if ask_gpus clocks "--query-gpu=$reason.hw_slowdown,$reason.hw_thermal_slowdown,$reason.hw_power_brake_slowdown"; then
            count=0
            while IFS= read -r reason; do
                [[ ", $reason" != *", Active"* ]] || finding "gpu_$count clocks" "no hardware slowdown" "slowed (hardware, heat, power brake): $reason"
                count=$((count + 1))
            done <<<"$answer"
            break
        fi
    done
    # GPUs behind NVSwitches cannot be used before the fabric manager has set them up.
    if ask_gpus fabric --query-gpu=fabric.state; then
        count=0
        while IFS= read -r reason; do
            [[ $reason != *"Progress"* && $reason != *"Not Started"* ]] || finding "gpu_$count fabric" Completed "$reason"
            count=$((count + 1))
        done <<<"$answer"
    fi
}

# NAME:RATE, in Gb/s.
check_nic() {
    local port=$root/sys/class/infiniband/${1%:*}/ports/1 state physical rate
    if [[ ! -d $port ]]; then
        finding "nic ${1%:*}" "a device" "nothing"
        return
    fi
    state=$(first_line "$port/state") physical=$(first_line "$port/phys_state") rate=$(first_line "$port/rate")
    [[ $state == *ACTIVE && $physical == *LinkUp ]] || finding "nic ${1%:*}" "ACTIVE, LinkUp" "${state#*: }, ${physical#*: }"
    [[ ! ${rate%% *} =~ ^[0-9]+$ ]] || ((${rate%% *} >= ${1#*:})) || finding "nic ${1%:*}" "${1#*:} Gb/s" "$rate"
}

# CLASS/NAME: prints why this network adapter in /sys/class cannot be used, or nothing.
device_fault() {
    local device=$root/sys/class/$1 state
    [[ -d $device ]] || { printf nothing; return; }
    for state in "$device"/ports/1/state "$device"/operstate "$device"/device/net/*/operstate; do
        [[ ! -e $state || $(first_line "$state") =~ (ACTIVE|^up|^unknown)$ ]] || { first_line "$state"; return; }
    done
}

# CLASS/NAME: an adapter that reports no line rate.
check_device() {
    local fault
    fault=$(device_fault "$1")
    [[ ! $fault ]] || finding "nic ${1#*/}" "a device that is up" "$fault"
}

# CLASS/DRIVER:COUNT: the adapters with this driver, or with any for *. A node may have more, for other traffic.
check_devices() {
    local class=${1%%/*} driver=${1#*/} device fault found=() bad=()
    driver=${driver%:*}
    for device in "$root/sys/class/$class"/*; do
        fault=$(readlink "$device/device/driver") || continue # a virtual device has none
        # shellcheck disable=SC2053 # a pattern
        [[ ${fault##*/} == $driver ]] || continue
        fault=$(device_fault "$class/${device##*/}")
        if [[ $fault ]]; then bad+=(", ${device##*/}: $fault"); else found+=("$device"); fi
    done
    ((${#found[@]} >= ${1##*:})) || finding nics "${1##*:} that are up in /sys/class/$class" "${#found[@]}${bad[*]-}"
}

# LEAST-MOST: MB of 1024 x 1024 bytes.
check_memory() {
    local key='' value=0 least=${1%-*} most=${1#*-}
    while read -r key value _; do
        [[ $key != MemTotal: ]] || break
    done <"$root/proc/meminfo"
    if [[ $key != MemTotal: ]] || ((value / 1024 < least || value / 1024 > most)); then
        finding memory "$least to $most MB" "$((value / 1024)) MB"
    fi
}

check_nvme() {
    local disks=("$root"/sys/class/nvme/nvme*)
    [[ -e ${disks[0]} ]] || disks=()
    ((${#disks[@]} >= $1)) || finding nvme "$1 disks" "${#disks[@]} disks"
}

# GIB:DIRECTORY
check_scratch() {
    local gib=${1%%:*} directory=${1#*:} free probe
    probe=$directory/.hpcgen-check-${SLURM_JOB_ID:-0}-$$
    if ! (umask 077 && set -C && : >"$probe") 2>/dev/null; then
        finding scratch "$directory to be writable" "it is not"
        return
    fi
    rm -f -- "$probe"
    free=$(df --output=avail -k -- "$directory" 2>/dev/null)
    free=${free##*"$newline"}
    [[ ! ${free// /} =~ ^[0-9]+$ ]] || ((${free// /} / 1048576 >= gib)) || finding scratch "$gib GiB free in $directory" "$((${free// /} / 1048576)) GiB"
}

# REPORTS NAME=VALUE... [-- COMMAND...]: writes NODE-host.json to REPORTS, and NODE.ok with the
# node's block if the node is good.
check_host() {
    local node=${SLURMD_NODENAME:-$(hostname)} reports=$1 held='' findings=() newline=$'\n' root='' gpus=0 patience=40 ok=true output status report address
    local -x LC_ALL=C
    [[ ${share-} != group ]] || hold "$reports" || { echo "$node: cannot write to $reports: its path has a link, or others made it or can write to it"; exit 1; }
    reports=${held:-$reports}
    rm -f -- "$reports/$node.ok"
    shift
    while (($#)) && [[ $1 != -- ]]; do
        case $1 in
        root=*) root=${1#*=} ;;
        patience=*) patience=${1#*=} ;;
        gpus=*)
            gpus=${1#*=}
            check_gpus
            ;;
        nic=*) check_nic "${1#*=}" ;;
        device=*) check_device "${1#*=}" ;;
        devices=*) check_devices "${1#*=}" ;;
        memory_mb=*) check_memory "${1#*=}" ;;
        nvme=*) check_nvme "${1#*=}" ;;
        memlock=*) [[ $(ulimit -l) == "${1#*=}" ]] || finding memlock "${1#*=}" "$(ulimit -l) kB" ;;
        scratch=*) check_scratch "${1#*=}" ;;
        file=*) [[ -r ${1#*=} ]] || finding file "${1#*=} to be readable" "it is missing or not readable" ;;
        esac
        shift
    done
    if (($# > 1)); then
        shift
        output=$(timeout --kill-after=10 240 "$@" 2>&1 </dev/null)
        status=$?
        printf '%s\n' "$output" >"$reports/$node-health-command.log"
        ((status == 0)) || finding health_command "status 0 of $1" "status $status: ${output##*"$newline"}"
    fi
    [[ -z ${findings[*]-} ]] || ok=false
    report="$(printf ',\n  %s' "${findings[@]}")"
    [[ $ok == false ]] || report=,
    printf '{\n "node": %s,\n "part": "host",\n "ok": %s,\n "findings": [%s\n ]\n}\n' "$(json_text "$node")" "$ok" "${report:1}" >"$reports/.$node-host.json" &&
        mv -f -- "$reports/.$node-host.json" "$reports/$node-host.json" || echo "$node: cannot write its report"
    [[ $ok == true ]] || exit 1
    # Slurm's address of the node ends with its name, after the block or the switches that it is in.
    address=${SLURM_TOPOLOGY_ADDR-}
    printf '%s\n' "${address%"$node"}" >"$reports/$node.ok"
}

# SEPARATOR WORD...: the words with the separator between them.
join_by() {
    local IFS=$1
    shift
    printf '%s\n' "$*"
}

# SECONDS NODE...: checks these nodes in one step.
check_on() {
    timeout "$1" srun --overlap --nodelist="$(join_by , "${@:2}")" --nodes="$(($# - 1))" --ntasks="$(($# - 1))" --ntasks-per-node=1 \
        --export=ALL --kill-on-bad-exit=0 bash -p -c "$functions" check_host "$reports" "${node_expectations[@]}" \
        "${required[@]/#/file=}" -- "${health_command[@]}"
}

# NODE...: checks each node in its own step, 64 at a time. A dead node ends a step before other nodes in it have answered.
check_each() {
    local node count=0
    for node; do
        check_on 60 "$node" &
        ((++count % 64)) || wait
    done
    wait
}

# NODE...: checks each node and collects the reports in $reports. A node that does not answer has no report.
reports=''
ask_nodes() {
    local node silent=()
    reports=$job_dir/nodes-$restart
    read_functions
    rm -rf -- "$held/nodes-$restart"
    mkdir -m "$job_dir_mode" -- "$held/nodes-$restart" || die "cannot write $reports"
    run_aside check_on 300 "$@"
    for node; do [[ -e $reports/$node-host.json ]] || silent+=("$node"); done
    [[ -z ${silent[*]-} ]] || ((terminated)) || run_aside check_each "${silent[@]}"
}

# NAME: fails if Slurm has no such node. Slurm refuses an entire list because of a name that it no longer knows.
is_node() { local answer; answer=$(scontrol show node "$1" 2>&1) || [[ $answer != *"not found"* ]]; }

# Records the nodes of good and bad in the run directory, and sets excluded to all nodes of this cluster that count as bad. A
# node counts as bad for excluded_s seconds, because a virtual machine that was replaced keeps its old name.
note_nodes() {
    local name until cluster now list='' known=$run_dir/excluded_nodes here=${SLURM_CLUSTER_NAME-}
    local -A noted=()
    now=$(date +%s)
    if [[ -r $known ]]; then
        while read -r name until cluster; do
            [[ $name =~ ^[A-Za-z0-9._-]+$ && $until =~ ^[0-9]{1,12}$ && $cluster =~ ^[A-Za-z0-9._-]*$ ]] || continue
            ((until > now)) || continue
            if [[ ${cluster:-$here} != "$here" ]]; then list+="$name $until $cluster"$'\n'; elif is_node "$name"; then noted[$name]=$until; fi
        done <"$known"
    fi
    for name in "${good[@]}"; do unset -v 'noted[$name]'; done
    for name in "${bad[@]}"; do noted[$name]=$((now + excluded_s)); done
    excluded=("${!noted[@]}")
    for name in "${excluded[@]}"; do list+="$name ${noted[$name]}${here:+ $here}"$'\n'; done
    printf '%s' "$list" | sort | write_file "$known"
}
