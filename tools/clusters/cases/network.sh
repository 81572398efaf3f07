# Two hosts and the network between them. Sourced by `check`.

case_network() {
    local version="tcp"
    check "tandem launch" "$version" "two hosts, 4 ranks" network_plain
    check "tandem launch" "$version" "10 ms of delay each way, 1 % of the frames lost" network_wire
    check "tandem launch" "$version" "cable out for 5 s, deadline 20 s" network_short_cut
    check "tandem launch" "$version" "cable out for good, deadline 6 s, then \`--resume\` on 1 rank" network_cut
    check "tandem launch" "$version" "hosts with IPv6 alone, \`--address [fd77::1]:29601\`" network_ipv6
    check "variables" "$version" "hosts with IPv6 alone, \`MASTER_ADDR=fd77::1\`" network_ipv6_variables
}

# two_hosts NAME RANKS ADDRESS [OPTIONS...]: starts NAME.toml on both, half of the ranks each; sets `nodes`, their processes.
two_hosts() {
    local node
    nodes=()
    for node in 0 1; do
        on node$node timeout 120 tandem launch -n $(($2 / 2)) --nodes 2 --node $node --address "$3" train "$1.toml" "${@:4}" \
            >"$1-$node.txt" 2>&1 &
        nodes+=($!)
    done
}

# both_ended CODE NAME
both_ended() {
    ended "$1" "${nodes[0]}" || { tail -n 40 "$2"-?.txt; return 1; }
    ended "$1" "${nodes[1]}" || { tail -n 40 "$2"-?.txt; return 1; }
}

network_plain() {
    configure plain $short
    two_hosts plain 4 node0:29600
    both_ended 0 plain
    same plain $short
}

network_wire() {
    local wire began
    configure wire $short
    lay_wire 10 10
    began=$SECONDS
    two_hosts wire 2 10.83.8.1:29602
    both_ended 0 wire
    same wire $short
    kill $wire
    found "$short steps in $((SECONDS - began)) s, same bits as one rank"
}

network_short_cut() {
    configure short-cut $long
    two_hosts short-cut 2 node0:29600
    await_step short-cut $((long / 5))
    cable node1 down
    sleep 5
    cable node1 up
    both_ended 0 short-cut
    same short-cut $long
}

network_cut() {
    configure cut $long
    two_hosts cut 2 node0:29600 --set compute.deadline=6
    await_step cut $((long / 5))
    cable node1 down
    local began=$SECONDS took
    both_ended 75 cut
    took=$((SECONDS - began))
    cable node1 up
    [ $took -le 16 ] || { echo "$took s until both ended"; return 1; }
    says cut-0.txt "peer lost: rank 1 on node1" "last seen "
    says cut-1.txt "rank 1 on node1" "at step"
    tail -n 3 cut-?.txt
    on node0 tandem train --resume cut.toml
    same cut $long
    found "both ended with 75 after $took s, same bits as one rank"
}

# without_ipv4 COMMAND...: while it runs, the hosts have no address but IPv6's.
without_ipv4() {
    link node0 -6 address show dev eth0 | grep -q fd77 || skip "no IPv6"
    local number
    for number in 0 1; do link node$number -4 address flush dev eth0; done
    "$@"
    for number in 0 1; do link node$number address add "10.83.7.$((number + 1))/24" dev eth0; done
}

network_ipv6() {
    configure ipv6 $short
    without_ipv4 two_hosts_over_ipv6
    same ipv6 $short
}

two_hosts_over_ipv6() {
    two_hosts ipv6 4 '[fd77::1]:29601'
    both_ended 0 ipv6
}

network_ipv6_variables() {
    configure ipv6-variables $short
    without_ipv4 two_ranks_over_ipv6
    same ipv6-variables $short
}

two_ranks_over_ipv6() {
    nodes=()
    for rank in 0 1; do
        RANK=$rank WORLD_SIZE=2 MASTER_ADDR=fd77::1 MASTER_PORT=29603 on node$rank timeout 60 tandem train ipv6-variables.toml \
            >ipv6-variables-$rank.txt 2>&1 &
        nodes+=($!)
    done
    both_ended 0 ipv6-variables
}
