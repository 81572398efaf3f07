# Two hosts and the network between them. Sourced by `check`.

case_network() {
    local version="tcp" cuts=${TANDEM_TEST_ROUNDS:-3}
    check "tandem launch" "$version" "two hosts, 4 ranks" network_plain
    check "tandem launch" "$version" "two hosts, every mesh of \`meshes.txt\`, 5 steps" network_meshes
    check "tandem launch" "$version" "10 ms of delay each way, 1 % of the frames lost" network_wire
    check "tandem launch" "$version" "cable out for 5 s, deadline 20 s" network_short_cut
    check "tandem launch" "$version" "cable out for good, deadline 6 s, then \`--resume\` on 1 rank" network_cut
    check "tandem launch" "$version" "cable out at $cuts random moments, each time another mesh, then \`--resume\` on 1 rank" network_cuts
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

# meshes [CONDITION]: lines of ranks, sharding, replicas, tensor and pipeline, perhaps those alone for which awk finds this true.
meshes() { awk "!/^#/ && (${1:-1})" "$root/crates/tandem-train/tests/it/run/meshes.txt"; }

# settings_of SHARDING REPLICAS TENSOR PIPELINE: sets `settings`, the words for `train`.
settings_of() {
    settings=(--set "compute.sharding=$1" --set "compute.replicate=$2" --set "compute.tensor=$3" --set "compute.pipeline=$4")
}

# on_two_hosts NAME RANKS: starts NAME.toml with `settings` on node0 and, with as many ranks or one less, on node1.
on_two_hosts() {
    printf 'node0 slots=%d\nnode1 slots=%d\n' $((($2 + 1) / 2)) $(($2 / 2)) >"$1-hosts"
    on node0 timeout 120 tandem launch --hostfile "$1-hosts" --ssh "$CLUSTER/bin/ssh-stand-in" train "$1.toml" "${settings[@]}" \
        >"$1.txt" 2>&1
}

network_meshes() {
    local steps=5 count=0 ranks sharding replicas tensor pipeline settings
    configure "whole-$steps" $steps
    tandem train "whole-$steps.toml"
    while read -r ranks sharding replicas tensor pipeline; do
        count=$((count + 1))
        echo "$ranks ranks, $sharding, $replicas replicas, tensor $tensor, pipeline $pipeline"
        settings_of "$sharding" "$replicas" "$tensor" "$pipeline"
        configure "mesh-$count" $steps
        on_two_hosts "mesh-$count" "$ranks" </dev/null || { tail -n 40 "mesh-$count.txt"; return 1; }
        same "mesh-$count" $steps
    done < <(meshes)
    found "$count meshes, same bits as one rank"
}

# Of a run with more steps than all cuts leave time for, which ends on one rank.
network_cuts() {
    local cut small mesh settings last longest=0 took began
    RANDOM=${TANDEM_TEST_SEED:-26}
    configure cuts 100000
    sed -i 's/^save_every.*/save_every = 2\nschedule = "constant"/' cuts.toml
    for cut in $(seq "$cuts"); do
        mapfile -t small < <(meshes '$1 <= 4')
        read -ra mesh <<<"${small[RANDOM % ${#small[@]}]}"
        settings_of "${mesh[@]:1}"
        settings+=(--resume --set compute.deadline=5)
        last=$(newest_step cuts)
        on_two_hosts cuts "${mesh[0]}" </dev/null &
        nodes=($!)
        await_step cuts $((last + 1))
        sleep "0.$((RANDOM % 10))"
        cable node1 down
        began=$SECONDS
        ended 75 "${nodes[0]}" || { tail -n 40 cuts.txt; return 1; }
        took=$((SECONDS - began))
        cable node1 up
        [ $took -le $longest ] || longest=$took
        echo "cut $cut on ${mesh[*]}, at step $(newest_step cuts): ended after $took s"
        grep -E 'peer lost: rank|failed first' cuts.txt | tail -n 2
        grep -qE 'peer lost: rank' cuts.txt || { tail -n 40 cuts.txt; return 1; }
        end_processes
    done
    last=$(($(newest_step cuts) + 10))
    settings=(--set "train.steps=$last" --set train.schedule=constant)
    on node0 tandem train --resume cuts.toml "${settings[@]}"
    configure "whole-$last" "$last"
    tandem train "whole-$last.toml" "${settings[@]}"
    same cuts "$last"
    found "all ended with 75 after at most $longest s, same bits as one rank"
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
    link node0 -6 address show dev eth0 | grep fd77 >/dev/null || skip "no IPv6"
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
