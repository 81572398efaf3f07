# mpirun and mpiexec on one host and on two. Sourced by `check`.

case_mpi() {
    local version name
    version="Open MPI $(debian_version openmpi-bin)"
    check mpirun "$version" "\`-n 4\`" mpi_launch open-mpi 4
    check mpirun "$version" "\`-n 4\`, \`compute.engine = \"tcp\"\`" mpi_launch open-mpi 4 tcp
    check mpirun "$version" "two hosts" mpi_two_hosts open-mpi
    check mpirun "$version" "two jobs at once on one host, over tcp" mpi_two_jobs
    check mpirun "$version" "\`-n 4\`: a killed rank, then \`--resume\` on 2" mpi_killed_rank
    for name in mpich impi-rt; do
        # Where it cannot be had, each check says why.
        version="$name $(pypi_version "$(mpi_prefix $name 2>/dev/null)" $name)"
        check mpiexec "$version" "\`-n 4\`" mpi_launch $name 4
        check mpiexec "$version" "\`-n 4\`, \`compute.engine = \"tcp\"\`" mpi_launch $name 4 tcp
        check mpiexec "$version" "two hosts" mpi_two_hosts $name
    done
}

# Sets `launcher`, the command of an implementation with what a container needs.
mpi_launcher() {
    local prefix
    case $1 in
        open-mpi)
            command -v mpirun >/dev/null || skip "no mpirun"
            # Containers run as root, with fewer cores than ranks.
            launcher=(mpirun --allow-run-as-root --oversubscribe)
            ;;
        *)
            prefix=$(mpi_prefix "$1")
            launcher=("$prefix/bin/mpiexec")
            # Of the networks that Intel's libfabric knows, a namespace has TCP.
            export FI_PROVIDER=tcp
            ;;
    esac
}

# mpi_launch IMPLEMENTATION RANKS [ENGINE]
mpi_launch() {
    local name=mpi-$1-${3:-auto} launcher
    mpi_launcher "$1"
    configure "$name" $short "${3:-auto}"
    on node0 timeout 60 "${launcher[@]}" -n "$2" tandem train "$name.toml" 2>&1 | tee "$name.txt"
    says "$name.txt" "$2 processes, started by" "engine: ${3:-mpi}"
    same "$name" $short
    found "engine ${3:-mpi}, same bits as one rank"
}

# As on two machines, with a stand-in for ssh: no address is told to the ranks.
mpi_two_hosts() {
    local name=mpi-hosts-$1 launcher
    mpi_launcher "$1"
    configure "$name" $short
    case $1 in
        open-mpi) launcher+=(--host node0:2,node1:2 --mca plm_rsh_agent "$CLUSTER/bin/ssh-stand-in" -x PATH) ;;
        *) launcher+=(-bootstrap ssh -bootstrap-exec "$CLUSTER/bin/ssh-stand-in" -hosts node0,node1 -ppn 2) ;;
    esac
    on node0 timeout 60 "${launcher[@]}" -n 4 tandem train "$name.toml" 2>&1 | tee "$name.txt"
    says "$name.txt" "4 processes, started by" "engine: mpi"
    same "$name" $short
    found "engine mpi between two hosts, same bits as one rank"
}

# Over TCP, with one address for both as neither has one of its own.
mpi_two_jobs() {
    local name jobs=() launcher
    mpi_launcher open-mpi
    for name in job0 job1; do
        configure $name $long tcp
        on node0 timeout 90 "${launcher[@]}" -n 2 tandem train $name.toml >$name.txt 2>&1 &
        jobs+=($!)
    done
    ended 0 "${jobs[0]}" || { cat job0.txt; return 1; }
    ended 0 "${jobs[1]}" || { cat job1.txt; return 1; }
    same job0 $long
    same job1 $long
}

mpi_killed_rank() {
    local launcher job code=0
    mpi_launcher open-mpi
    configure mpi-killed $long
    on node0 timeout 90 "${launcher[@]}" -n 4 tandem train mpi-killed.toml &
    job=$!
    await_step mpi-killed $((long / 5))
    kill -KILL "$(ranks_on node0 | tail -n 1)"
    wait $job || code=$?
    [ $code -ne 0 ]
    on node0 timeout 60 "${launcher[@]}" -n 2 tandem train --resume mpi-killed.toml
    same mpi-killed $long
    found "mpirun ended all with code $code, same bits as one rank"
}
