# Slurm: a controller and two nodes, which think that they have 32 cores each. Sourced by `check`.

case_slurm() {
    local version
    version="Slurm $(debian_version slurmd)"
    if ! start_slurm >"$CLUSTER/slurm.txt" 2>&1; then
        check srun "$version" "start" slurm_is_missing
        return 0
    fi
    check srun "$version" "\`srun -N2 -n4\`" slurm_step
    check srun "$version, PMIx" "\`srun --mpi=pmix -N2 -n4\`, Open MPI" slurm_pmix
    check srun "$version, PMI-2" "\`srun --mpi=pmi2 -N2 -n4\`, MPICH" slurm_pmi2
    check srun "$version" "two steps of a job at once, on one host" slurm_two_steps
    check sbatch "$version" "array of two jobs at once, on one host" slurm_array
    check sbatch "$version" "\`slurm.sbatch\`: end of its time, SIGTERM, requeue, on 8 ranks" slurm_time_limit
    check sbatch "$version" "\`slurm.sbatch\`: a killed rank, requeue" slurm_killed_rank
}

slurm_is_missing() {
    cat "$CLUSTER/slurm.txt"
    command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null || skip "no Slurm"
    return 1
}

start_slurm() {
    local folder=$CLUSTER/slurm node
    mkdir -p "$folder"/{state,node0,node1}
    chmod 755 "$CLUSTER" "$folder"
    head -c 128 /dev/urandom >"$folder/munge.key"
    chmod 600 "$folder/munge.key"
    slurm_configuration >"$folder/slurm.conf"
    export SLURM_CONF=$folder/slurm.conf
    on node0 munged --foreground --force --socket="$folder/munge" --key-file="$folder/munge.key" --pid-file="$folder/munge.pid" \
        --seed-file="$folder/munge.seed" --log-file="$folder/munge.log" &
    for _ in $(seq 50); do [ -S "$folder/munge" ] && break || sleep 0.1; done
    on node0 slurmctld -D &
    for node in node0 node1; do on $node slurmd -D & done
    # Their end is no news.
    disown -a
    for _ in $(seq 100); do
        [ "$(on node0 sinfo -h -t idle -o %D 2>/dev/null)" = 2 ] && return 0
        sleep 0.1
    done
    return 1
}

slurm_configuration() {
    cat <<CONF
ClusterName=tandem
SlurmctldHost=node0
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits so long before it starts again.
AuthInfo=socket=$folder/munge,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
PlugStackConfig=/dev/null
NodeName=node[0-1] CPUs=32 CoresPerSocket=32 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}

slurm_step() {
    configure srun $short
    on node0 timeout 60 srun -N2 -n4 tandem train srun.toml 2>&1 | tee srun.txt
    says srun.txt "4 processes, started by Slurm; engine: tcp"
    same srun $short
    found "tcp, same bits as one rank"
}

slurm_pmix() {
    on node0 srun --mpi=list | grep -q 'pmix_v' || skip "Slurm has no PMIx"
    configure pmix $short
    on node0 timeout 60 srun --mpi=pmix -N2 -n4 tandem train pmix.toml 2>&1 | tee pmix.txt
    says pmix.txt "4 processes, started by Slurm; engine: mpi" "Open MPI"
    same pmix $short
    found "mpi between two hosts, same bits as one rank"
}

slurm_pmi2() {
    local mpich
    mpich=$(mpi_prefix mpich)
    configure pmi2 $short
    VIRTUAL_ENV=$mpich on node0 timeout 60 srun --mpi=pmi2 -N2 -n4 tandem train pmi2.toml 2>&1 | tee pmi2.txt
    says pmi2.txt "4 processes, started by Slurm; engine: mpi" "MPICH"
    same pmi2 $short
    found "mpi between two hosts, same bits as one rank"
}

slurm_two_steps() {
    configure step0 $short
    configure step1 $short
    on node0 timeout 90 sbatch --wait -w node0 -n 4 -o steps.txt --wrap \
        "srun --exact -n2 tandem train step0.toml & srun --exact -n2 tandem train step1.toml & wait"
    cat steps.txt
    same step0 $short
    same step1 $short
}

slurm_array() {
    configure array0 $short
    configure array1 $short
    on node0 timeout 90 sbatch --wait -w node0 -n 2 --array=0-1 -o array-%a.txt --wrap \
        "srun tandem train array\$SLURM_ARRAY_TASK_ID.toml"
    cat array-*.txt
    same array0 $short
    same array1 $short
}

# await_job JOB: prints a job's state when it has ended for good.
await_job() {
    local state until=$((SECONDS + 120))
    while [ $SECONDS -lt $until ]; do
        state=$(on node0 scontrol show job "$1" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p')
        case $state in PENDING | RUNNING | COMPLETING | REQUEUED | CONFIGURING) sleep 0.3 ;; *) echo "$state"; return 0 ;; esac
    done
    echo "job $1 is still $state after 120 s" >&2
    return 1
}

# A job of a minute, which Slurm looks at every 30 s. The ranks meet over a slow wire, so that they are not done before.
slurm_time_limit() {
    local wire job until=$((SECONDS + 90))
    configure limit $short
    lay_wire 150 0
    job=$(MASTER_ADDR=10.83.8.1 MASTER_PORT=29700 on node0 sbatch --parsable --time=1 --signal=TERM@60 -o limit.txt \
        "$root/examples/launch/slurm.sbatch" limit.toml)
    until [ "$(restarts_of "$job")" -gt 0 ] || [ $SECONDS -gt $until ]; do sleep 0.3; done
    kill -USR1 $wire
    await_job "$job" | tee state
    kill $wire
    cat limit.txt
    grep -q COMPLETED state
    [ "$(restarts_of "$job")" -gt 0 ]
    says limit.txt "continuing after step"
    same limit $short
    found "saved, requeued $(restarts_of "$job") times and resumed, same bits as one rank"
}

restarts_of() { on node0 scontrol show job "$1" | sed -n 's/.*Restarts=\([0-9]*\).*/\1/p'; }

slurm_killed_rank() {
    local job victim
    configure killed $long
    job=$(on node0 sbatch --parsable -N2 --ntasks-per-node=1 -o killed.txt "$root/examples/launch/slurm.sbatch" killed.toml)
    await_step killed $((long / 5))
    victim=$(ranks_on node1 | head -n 1)
    kill -KILL "$victim"
    await_job "$job" | tee state
    cat killed.txt
    grep -q COMPLETED state
    says killed.txt "peer lost: rank 1 on node1"
    same killed $long
    found "rank 1 named, requeued, same bits as one rank"
}
