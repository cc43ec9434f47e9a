# The profile's rule for the address at which the ranks meet: the name of the first node with a suffix, or an interface.

# NODE: prints the address.
node_address() {
    local value=${rendezvous_rule[1]} found
    if [[ ${rendezvous_rule[0]} == suffix ]]; then
        found=$(retry getent ahosts "$1$value") || die "$1$value does not resolve (rendezvous.suffix = $value in the profile)"
        found=${found%% *}
    else
        found=$(srun --overlap --nodelist="$1" --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none --export=ALL ip -o address show dev "$value")
        found=$(sed -n '/ inet6 fe80/d; s/.* inet6\{0,1\} \([^ /]*\).*/\1/p; T; q' <<<"$found") # without addresses of the link alone
        [[ $found ]] || die "interface $value of $1 has no address (rendezvous.interface = $value in the profile)"
    fi
    printf '%s' "$found"
}
