# torchrun on one host and on two. Sourced by `check`.

case_torchrun() {
    torch_python=${TANDEM_TEST_PYTHON:-$venvs/torch/bin/python}
    local version
    version=$("$torch_python" -c 'import torch; print(torch.__version__)' 2>/dev/null) || version=missing
    version="torch $version"
    check torchrun "$version" "\`--standalone --nproc-per-node 4\`" torchrun_standalone
    check torchrun "$version" "static, \`--nnodes 2\`, two agents" torchrun_static
    check torchrun "$version" "\`torchrun.sh\` (c10d), \`NODES=2\`, 4 ranks" torchrun_script
    check torchrun "$version" "\`torchrun.sh\`, \`NODES=1:2\`: a killed rank, then a lost host" torchrun_elastic
}

# A command `torchrun` in the path of the hosts, of the Python that has torch.
torchrun_command() {
    "$torch_python" -c 'import torch.distributed.run' 2>/dev/null || skip "no Python with torch: TANDEM_TEST_PYTHON names one"
    printf '#!/bin/sh\nexec "%s" -m torch.distributed.run "$@"\n' "$torch_python" >"$CLUSTER/bin/torchrun"
    chmod +x "$CLUSTER/bin/torchrun"
    # Without it torch looks for a GPU and warns.
    export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1
}

torchrun_standalone() {
    torchrun_command
    configure standalone $short
    on node0 timeout 90 torchrun --standalone --no-python --nproc-per-node 4 tandem train standalone.toml 2>&1 | tee standalone.txt
    says standalone.txt "4 processes, started by torchrun; engine: tcp"
    same standalone $short
}

torchrun_static() {
    torchrun_command
    configure static $short
    local node agents=()
    for node in 1 0; do
        on node$node timeout 90 torchrun --no-python --nnodes 2 --node-rank $node --nproc-per-node 2 \
            --master-addr node0 --master-port 29500 tandem train static.toml &
        agents+=($!)
    done
    ended 0 "${agents[0]}"
    ended 0 "${agents[1]}"
    same static $short
}

# agent NODES RANKS NAME NODE: examples/launch/torchrun.sh on a host.
agent() {
    NODES=$1 RANKS=$2 ENDPOINT=node0:29400 on "node$4" timeout 120 bash "$root/examples/launch/torchrun.sh" "$3.toml"
}

torchrun_script() {
    torchrun_command
    configure c10d $short
    agent 2 2 c10d 0 &
    local first=$!
    agent 2 2 c10d 1 &
    ended 0 $!
    ended 0 $first
    same c10d $short
}

torchrun_elastic() {
    torchrun_command
    configure elastic $long
    # torchrun takes its options from such variables too. It waits 30 s for further hosts unless it is told otherwise.
    export PET_RDZV_CONF=last_call_timeout=3,keep_alive_interval=1
    agent 1:2 1 elastic 0 >elastic0.txt 2>&1 &
    local first=$! reached
    agent 1:2 1 elastic 1 >elastic1.txt 2>&1 &
    disown $!
    await_elastic $((long / 5))
    kill -KILL "$(ranks_on node1 | head -n 1)"
    reached=$(newest_step elastic)
    await_elastic $((reached + long / 5))
    # The host is lost: its agent and its rank at once.
    kill -KILL $(ip netns pids "$prefix-node1")
    ended 0 $first || { tail -n 40 elastic0.txt elastic1.txt; return 1; }
    says elastic0.txt "2 processes, started by torchrun" "peer lost: rank "
    same elastic $long
    found "went on with two ranks, then with one: same bits as one rank"
}

await_elastic() {
    await_step elastic "$1" || { tail -n 40 elastic0.txt elastic1.txt; return 1; }
}
