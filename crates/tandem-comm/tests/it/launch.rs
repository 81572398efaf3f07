//! Every launcher's environment, as a table.

use std::collections::BTreeSet;

use tandem_comm::{Environment, Launch, LaunchError, Launcher, LocalRanks, RendezvousEndpoint};

fn environment(text: &str) -> Environment {
    text.split_whitespace()
        .filter_map(|pair| pair.split_once('='))
        .map(|(k, v)| (k.into(), v.into()))
        .collect()
}

fn detect(text: &str) -> Result<Launch, LaunchError> {
    Launch::from_environment(&environment(text))
}

fn at(host: &str, port: u16) -> Option<RendezvousEndpoint> {
    Some(RendezvousEndpoint { host: host.into(), port, served: false })
}

/// (variables, launcher, process, of how many, local, meeting point)
type Row = (&'static str, Launcher, usize, usize, Option<usize>, Option<RendezvousEndpoint>);

fn check(rows: &[Row]) {
    for (variables, launcher, process, num_processes, local, meeting_point) in rows {
        let found = detect(variables).unwrap_or_else(|error| panic!("{variables}: {error}"));
        assert_eq!(found.launcher, *launcher, "{variables}");
        assert_eq!((found.process, found.num_processes), (*process, *num_processes), "{variables}");
        assert_eq!(found.local_process, *local, "{variables}");
        assert_eq!(found.meeting_point, *meeting_point, "{variables}");
        assert_eq!(found.is_distributed(), *num_processes > 1, "{variables}");
    }
}

#[test]
fn plain_commands_are_alone() {
    check(&[
        ("HOME=/root PATH=/bin", Launcher::None, 0, 1, None, None),
        // Set by a script that only names a port.
        ("MASTER_PORT=29500", Launcher::None, 0, 1, None, None),
        // A batch script of one task, or an interactive allocation, without srun.
        ("SLURM_JOB_ID=7 SLURM_NTASKS=1 SLURM_PROCID=0", Launcher::None, 0, 1, None, None),
        ("SLURM_JOB_ID=7", Launcher::None, 0, 1, None, None),
        ("RANK= WORLD_SIZE=", Launcher::None, 0, 1, None, None),
    ]);
}

#[test]
fn rank_variables_of_torchrun_and_its_relatives() {
    check(&[
        (
            "RANK=3 WORLD_SIZE=8 LOCAL_RANK=3 MASTER_ADDR=10.0.0.1 MASTER_PORT=29400",
            Launcher::RankVariables,
            3,
            8,
            Some(3),
            at("10.0.0.1", 29400),
        ),
        // PyTorchJob v1: no LOCAL_RANK.
        (
            "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456",
            Launcher::RankVariables,
            1,
            2,
            None,
            at("job-master-0", 23456),
        ),
        ("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0", Launcher::RankVariables, 0, 1, Some(0), None),
        // A wrapper that translated Open MPI's variables agrees with them.
        (
            "RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            Launcher::RankVariables,
            1,
            2,
            None,
            at("h", 1),
        ),
    ]);
}

#[test]
fn torchrun_under_srun_is_torchruns_world_and_its_agent_serves_the_store() {
    let found = detect(
        "SLURM_JOB_ID=9 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NODELIST=n[1-2] \
         TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 \
         MASTER_ADDR=n1 MASTER_PORT=29500",
    )
    .unwrap();
    assert_eq!((found.launcher, found.process, found.num_processes), (Launcher::Torchrun, 5, 8));
    assert_eq!(
        found.meeting_point,
        Some(RendezvousEndpoint { host: "n1".into(), port: 29500, served: true })
    );
}

#[test]
fn a_launcher_under_srun_has_a_world_of_its_own() {
    let step = "SLURM_JOB_ID=9 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NODELIST=n[1-2]";
    let ranks = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=29500";
    let found = detect(&format!("{step} {ranks} TANDEM_LAUNCHER_PROCESS=77")).unwrap();
    assert_eq!((found.launcher, found.process, found.num_processes), (Launcher::RankVariables, 5, 8));
    assert!(detect(&format!("{step} {ranks}")).is_err(), "variables that nobody vouches for");
}

#[test]
fn slurm_steps() {
    let step = "SLURM_JOB_ID=4097 SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_NTASKS=4 SLURM_LOCALID=0";
    for (nodes, first) in [
        ("gpu[001-015],x", "gpu001"),
        ("gpu[7,9-11]", "gpu7"),
        ("alpha,beta", "alpha"),
        ("one", "one"),
        ("rack[1-2]-a,other", "rack1-a"),
    ] {
        let found = detect(&format!("{step} SLURM_STEP_NODELIST={nodes}")).unwrap();
        assert_eq!((found.launcher, found.process, found.num_processes), (Launcher::Slurm, 2, 4));
        assert_eq!(found.meeting_point, at(first, 65535 - 4095 + 1), "{nodes}");
    }
    // Steps of one job at once, and the jobs of an array, meet at ports of their own.
    let port = |job: u32, step: u32| {
        let variables = format!(
            "SLURM_JOB_ID={job} SLURM_STEP_ID={step} SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=one"
        );
        detect(&variables).unwrap().meeting_point.unwrap().port
    };
    let ports: BTreeSet<u16> =
        (4090..4100).flat_map(|job| (0..20).map(move |step| port(job, step))).collect();
    assert_eq!(ports.len(), 200);
    assert!(*ports.first().unwrap() >= 65535 - 4095);
    check(&[
        ("SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1", Launcher::Slurm, 0, 1, None, None),
        (
            "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 MASTER_ADDR=a MASTER_PORT=9 PMI_RANK=1 PMI_SIZE=2",
            Launcher::Slurm,
            1,
            2,
            None,
            at("a", 9),
        ),
    ]);
}

#[test]
fn mpi_launchers() {
    check(&[
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            Launcher::OpenMpi,
            1,
            2,
            Some(1),
            at("127.0.0.1", 29500),
        ),
        (
            "PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 MASTER_ADDR=a MASTER_PORT=8",
            Launcher::Pmi,
            0,
            2,
            Some(0),
            at("a", 8),
        ),
        ("PMI_RANK=0 PMI_SIZE=1", Launcher::Pmi, 0, 1, None, None),
        // On several machines: MPI alone tells the address.
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1 PMIX_RANK=1",
            Launcher::OpenMpi,
            1,
            2,
            None,
            None,
        ),
    ]);
}

/// Two jobs of one machine, to which mpirun tells no address, would meet in one store.
#[test]
fn jobs_of_mpirun_on_one_machine_meet_at_ports_of_their_own() {
    let launch = |variables: &str| {
        detect(&format!(
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 {variables}"
        ))
        .unwrap()
    };
    let ports: BTreeSet<u16> = (1..=50)
        .map(|job| launch(&format!("PMIX_NAMESPACE={}", (job << 16) + 1)).meeting_point.unwrap().port)
        .collect();
    assert!(ports.len() >= 48, "{ports:?}");
    assert_eq!(launch("PMIX_NAMESPACE=prterun-host-77@1").job.as_deref(), Some("prterun-host-77@1"));
    assert_eq!(launch("").job, None);
    let intel = "PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2 I_MPI_HYDRA_UUID=cf2c-1";
    assert_eq!(detect(intel).unwrap().job.as_deref(), Some("cf2c-1"));
}

#[test]
fn launchers_of_other_clusters() {
    check(&[
        (
            "FLUX_TASK_RANK=1 FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=1",
            Launcher::Flux,
            1,
            4,
            Some(1),
            at("127.0.0.1", 29500),
        ),
        (
            "FLUX_TASK_RANK=3 FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=2 MASTER_ADDR=a MASTER_PORT=7",
            Launcher::Flux,
            3,
            4,
            Some(1),
            at("a", 7),
        ),
        // Flux with its PMI, which MPI uses.
        (
            "FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2 PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=a MASTER_PORT=7",
            Launcher::Pmi,
            1,
            2,
            None,
            at("a", 7),
        ),
        (
            "JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=2 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2",
            Launcher::Jsm,
            1,
            2,
            Some(1),
            at("127.0.0.1", 29500),
        ),
        (
            "PALS_RANKID=1 PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=a MASTER_PORT=7",
            Launcher::Pmi,
            1,
            2,
            None,
            at("a", 7),
        ),
    ]);
    for (alone, missing) in [
        ("PALS_RANKID=1", "PMI_SIZE"),
        ("PMIX_RANK=0", "PMI_SIZE"),
        ("FLUX_TASK_RANK=1", "FLUX_JOB_SIZE"),
        ("JSM_NAMESPACE_RANK=0", "JSM_NAMESPACE_SIZE"),
    ] {
        let error = detect(alone).unwrap_err().to_string();
        assert!(error.contains(alone) && error.contains(missing), "{alone}: {error}");
    }
}

#[test]
fn an_address_may_have_brackets_and_no_port() {
    let ranks = "RANK=1 WORLD_SIZE=2 MASTER_PORT=29601";
    for (address, host) in [
        ("[fd77::1]", "fd77::1"),
        ("fd77::1", "fd77::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("10.0.0.1", "10.0.0.1"),
    ] {
        let found = detect(&format!("{ranks} MASTER_ADDR={address}")).unwrap();
        assert_eq!(found.meeting_point, at(host, 29601), "{address}");
    }
    for address in ["[fd77::1]:29601", "node0:29601", "[fd77::1", "[]", "http://node0"] {
        let error = detect(&format!("{ranks} MASTER_ADDR={address}")).unwrap_err().to_string();
        assert!(error.contains(address) && error.contains("without a port"), "{address}: {error}");
    }
}

#[test]
fn kubernetes_pods() {
    let pet = "PET_NNODES=2 PET_NODE_RANK=1 PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29500";
    for (per_node, expected) in
        [("4", LocalRanks::Count(4)), ("auto", LocalRanks::PerDevice), ("gpu", LocalRanks::PerDevice)]
    {
        let found = detect(&format!("{pet} PET_NPROC_PER_NODE={per_node}")).unwrap();
        assert_eq!((found.launcher, found.process, found.num_processes), (Launcher::Pet, 1, 2));
        assert_eq!((found.ranks_here, found.meeting_point), (expected, at("job-node-0-0.job", 29500)));
    }
    // One node with two ranks is several ranks too.
    assert!(detect("PET_NNODES=1 PET_NODE_RANK=0 PET_NPROC_PER_NODE=2").unwrap().is_distributed());
    check(&[
        (
            "JOB_COMPLETION_INDEX=2 WORLD_SIZE=4 MASTER_ADDR=job-0.svc MASTER_PORT=3000",
            Launcher::IndexedJob,
            2,
            4,
            Some(0),
            at("job-0.svc", 3000),
        ),
        ("JOB_COMPLETION_INDEX=2 WORLD_SIZE=1", Launcher::IndexedJob, 0, 1, None, None),
        // A manifest that sets RANK from the index.
        (
            "JOB_COMPLETION_INDEX=2 RANK=2 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=3000",
            Launcher::RankVariables,
            2,
            4,
            None,
            at("a", 3000),
        ),
    ]);
}

#[test]
fn partial_environments_are_refused_by_name() {
    for (variables, expected) in [
        ("RANK=0", vec!["RANK=0", "WORLD_SIZE"]),
        ("WORLD_SIZE=2", vec!["WORLD_SIZE=2", "RANK is"]),
        ("LOCAL_RANK=1", vec!["LOCAL_RANK=1", "RANK, WORLD_SIZE"]),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a", vec!["MASTER_ADDR=a", "MASTER_PORT"]),
        ("TORCHELASTIC_RUN_ID=x", vec!["RANK, WORLD_SIZE"]),
        ("PET_NNODES=2", vec!["PET_NNODES=2", "PET_NODE_RANK"]),
        ("PET_NNODES=2 PET_NODE_RANK=0", vec!["PET_MASTER_ADDR, PET_MASTER_PORT"]),
        ("SLURM_JOB_ID=1 SLURM_NTASKS=8 SLURM_PROCID=0", vec!["SLURM_NTASKS=8", "srun"]),
        ("SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_NTASKS=8", vec!["SLURM_STEP_ID=0", "SLURM_PROCID"]),
        ("SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=8", vec!["SLURM_STEP_NODELIST"]),
        ("OMPI_COMM_WORLD_RANK=0", vec!["OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE"]),
        ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 MASTER_ADDR=a", vec!["MASTER_ADDR=a", "MASTER_PORT"]),
        ("PMIX_RANK=1 PMIX_NAMESPACE=x", vec!["PMIX_RANK=1", "PMI_SIZE", "srun --mpi=pmix"]),
        ("PMI_SIZE=2", vec!["PMI_SIZE=2", "PMI_RANK"]),
        ("JOB_COMPLETION_INDEX=0", vec!["JOB_COMPLETION_INDEX=0", "WORLD_SIZE"]),
        ("JOB_COMPLETION_INDEX=0 WORLD_SIZE=2", vec!["MASTER_ADDR, MASTER_PORT"]),
    ] {
        let error = detect(variables).expect_err(variables);
        assert!(matches!(error, LaunchError::Partial { .. }), "{variables}: {error:?}");
        for text in expected {
            assert!(error.to_string().contains(text), "{variables}: {error} should name {text}");
        }
    }
}

#[test]
fn contradictory_environments_are_refused_by_name() {
    for (variables, first, second) in [
        ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "RANK=2", "WORLD_SIZE=2"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=1", "LOCAL_RANK=1", "RANK=0"),
        // A profile exports RANK=0 WORLD_SIZE=1 while mpirun starts two: the silent world of one.
        (
            "RANK=0 WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            "WORLD_SIZE=1",
            "OMPI_COMM_WORLD_SIZE=2",
        ),
        (
            "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1 SLURM_JOB_ID=3 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2",
            "RANK=0",
            "SLURM_PROCID=1",
        ),
    ] {
        let error = detect(variables).expect_err(variables);
        assert!(matches!(error, LaunchError::Contradictory { .. }), "{variables}: {error:?}");
        let message = error.to_string();
        assert!(message.contains(first) && message.contains(second), "{message}");
    }
}

#[test]
fn malformed_values_are_refused_by_name() {
    for (variables, name) in [
        ("RANK=zero WORLD_SIZE=1", "RANK=zero"),
        ("RANK=-1 WORLD_SIZE=1", "RANK=-1"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=99999", "MASTER_PORT=99999"),
        ("PET_NNODES=1:2 PET_NODE_RANK=0", "PET_NNODES=1:2"),
        ("PET_NNODES=1 PET_NODE_RANK=0 PET_NPROC_PER_NODE=0", "PET_NPROC_PER_NODE=0"),
        (
            "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=a[1",
            "SLURM_STEP_NODELIST=a[1",
        ),
    ] {
        let error = detect(variables).expect_err(variables);
        assert!(matches!(error, LaunchError::Malformed { .. }), "{variables}: {error:?}");
        assert!(error.to_string().contains(name), "{error}");
    }
}
