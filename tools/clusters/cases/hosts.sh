# `tandem launch --hosts`, over a stand-in for ssh that runs the command on the host that is named. Sourced by `check`.

case_hosts() {
    local version="stand-in for ssh"
    check "tandem launch" "$version" "\`-n 2 --hosts node0,node1\`" hosts_list
    check "tandem launch" "$version" "\`--hostfile\`, started on a third host" hosts_file
    check "tandem launch" "$version" "\`--max-restarts 2 --min-ranks 2\`: a killed rank" hosts_killed_rank
    check "tandem launch" "$version" "\`--max-restarts 2 --min-ranks 2\`: a lost host" hosts_lost_host
    check "tandem launch" "$version" "SIGTERM to the launcher, then \`--resume\`" hosts_terminated
}

hosts_list() {
    configure hosts-list $short
    on node0 timeout 60 tandem launch -n 2 --hosts node0,node1 --ssh "$CLUSTER/bin/ssh-stand-in" train hosts-list.toml 2>&1 | tee hosts-list.txt
    says hosts-list.txt "[rank 0] 4 processes, started by" "engine: tcp"
    same hosts-list $short
}

hosts_file() {
    configure hostfile $short
    printf 'node0 slots=1\nnode1 slots=3\n' >machines
    on node2 timeout 60 tandem launch --hostfile machines --ssh "$CLUSTER/bin/ssh-stand-in" --log-dir logs train hostfile.toml
    ls logs
    same hostfile $short
}

# restarted RUN RANKS PROCESSES: a job of 4 ranks on two hosts loses the processes that the command PROCESSES prints, and goes on
# with so many RANKS.
restarted() {
    configure "$1" $long
    on node0 timeout 90 tandem launch -n 2 --hosts node0,node1 --ssh "$CLUSTER/bin/ssh-stand-in" --max-restarts 2 --min-ranks 2 \
        train "$1.toml" >"$1.txt" 2>&1 &
    local job=$!
    await_step "$1" $((long / 5))
    kill -KILL $($3)
    ended 0 $job || { tail -n 60 "$1.txt"; return 1; }
    says "$1.txt" "starting again with --resume, on $2 of 4 ranks"
    same "$1" $long
    found "started again on $2 of 4 ranks, same bits as one rank"
}

last_rank_of_node1() { ranks_on node1 | tail -n 1; }
all_of_node1() { ip netns pids "$prefix-node1"; }

hosts_killed_rank() { restarted hosts-killed 4 last_rank_of_node1; }

hosts_lost_host() { restarted hosts-lost 2 all_of_node1; }

hosts_terminated() {
    configure hosts-terminated $long
    on node0 timeout 90 tandem launch -n 2 --hosts node0,node1 --ssh "$CLUSTER/bin/ssh-stand-in" train hosts-terminated.toml \
        >hosts-terminated.txt 2>&1 &
    local job=$! process
    await_step hosts-terminated $((long / 5))
    for process in $(ip netns pids "$prefix-node0"); do
        if tr '\0' ' ' <"/proc/$process/cmdline" | grep -q '^tandem launch '; then kill -TERM "$process"; fi
    done
    ended 143 $job || { tail -n 40 hosts-terminated.txt; return 1; }
    on node0 timeout 60 tandem launch -n 3 train --resume hosts-terminated.toml
    same hosts-terminated $long
    found "code 143, then on 3 ranks: same bits as one rank"
}
