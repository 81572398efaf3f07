# Hosts on one machine: network namespaces at one switch, each with a name, an address and a /tmp of its own. Sourced by `check`.
# Every process of a case runs on a host, so that removing the hosts ends them all.

hosts=()

# Creates node0 to node3 at 10.83.7.1 to .4, and fd77::1 to ::4.
create_hosts() {
    local number
    mkdir -p "$CLUSTER/bin"
    cp "$here/on-host" "$here/ssh-stand-in" "$CLUSTER/bin/"
    printf '%s\n' "$CLUSTER" >"$CLUSTER/bin/cluster"
    namespace switch
    link switch link add name switch type bridge
    link switch link set switch up
    printf '127.0.0.1 localhost\n' >"$CLUSTER/etc-hosts"
    for number in 0 1 2 3; do
        namespace "node$number"
        mkdir -p "$CLUSTER/node$number/tmp"
        link switch link add "port$number" type veth peer name eth0 netns "$prefix-node$number"
        link switch link set "port$number" master switch up
        link "node$number" link set lo up
        link "node$number" link set eth0 up
        link "node$number" address add "10.83.7.$((number + 1))/24" dev eth0
        link "node$number" address add "fd77::$((number + 1))/64" dev eth0 nodad 2>/dev/null || true
        printf '10.83.7.%d node%d\n' $((number + 1)) "$number" >>"$CLUSTER/etc-hosts"
    done
}

namespace() {
    ip netns add "$prefix-$1"
    hosts+=("$prefix-$1")
}

# link HOST ARGUMENTS...: `ip` on a host.
link() { ip -n "$prefix-$1" "${@:2}"; }

# on HOST COMMAND...: runs a command on a host.
on() { "$here/on-host" "$@"; }

# Processes of a host that are ranks: not their launcher.
ranks_on() {
    local process
    for process in $(ip netns pids "$prefix-$1"); do
        if tr '\0' ' ' <"/proc/$process/cmdline" 2>/dev/null | grep -q '^[^ ]*tandem train '; then echo "$process"; fi
    done
}

# Pulls a host's cable out, or puts it in again: cable HOST down|up.
cable() { link switch link set "port${1#node}" "$2"; }

# Lays a second cable between node0 (10.83.8.1) and node1 (10.83.8.2): lay_wire MILLISECONDS LOST-PER-THOUSAND. Sets `wire`, its
# process, with which it goes.
lay_wire() {
    local number
    [ -c /dev/net/tun ] || skip "no /dev/net/tun"
    ip netns exec "$prefix-switch" python3 "$here/wire.py" "$1" "$2" >"$CLUSTER/wire-ready" &
    wire=$!
    for _ in $(seq 50); do grep -q ready "$CLUSTER/wire-ready" && break || sleep 0.1; done
    for number in 0 1; do
        link switch link set "wire$number" netns "$prefix-node$number"
        link node$number link set "wire$number" up
        link node$number address add "10.83.8.$((number + 1))/24" dev "wire$number"
    done
}

# Ends every process of every host.
end_processes() {
    local host left
    for host in "${hosts[@]}"; do
        for _ in 1 2 3; do
            left=$(ip netns pids "$host" 2>/dev/null) || break
            [ -n "$left" ] || break
            kill -KILL $left 2>/dev/null || true
            sleep 0.1
        done
    done
}

remove_hosts() {
    local host
    end_processes
    for host in "${hosts[@]}"; do ip netns delete "$host" 2>/dev/null || true; done
    hosts=()
}
