//! Whoever starts ranks: by hand, torchrun, MPI, and what cannot be meant.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::job::{newest_step, ranks_of, signal};
use super::{configure, same_runs, shop_with_whole_run};
use crate::workshop::{Workshop, free_port, python_with_torchrun, skip};

#[test]
fn what_cannot_be_meant_is_refused() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", 6);
    let devices = ["launch", "-n", "2", "train", &config, "--set", "compute.devices=cpu:2"];
    shop.run(&devices).expect(2).says(&["each of which is a rank", "set it to \"cpu\""]);
    shop.run(&["launch", "-n", "0", "train", &config]).expect(2).says(&["at least one rank"]);
    let node = ["launch", "-n", "1", "--nodes", "2", "--node", "2", "train", &config];
    shop.run(&node).expect(2).says(&["nodes count from 0"]);
    let nowhere = ["launch", "-n", "1", "--nodes", "2", "train", &config];
    shop.run(&nowhere).expect(2).says(&["--address HOST:PORT"]);
    let address = ["launch", "-n", "1", "--address", "here", "train", &config];
    shop.run(&address).expect(2).says(&["expected HOST:PORT"]);
    let threads = ["launch", "-n", "2", "train", &config, "--set", "compute.engine=threads"];
    shop.run(&threads).expect(2).says(&["2 processes, and compute.engine = \"threads\""]);
    // A user's mistake in the run is one for the job.
    shop.run(&["launch", "-n", "2", "train", "nothing.toml"]).expect(2).says(&["nothing.toml"]);
}

/// Before the ranks meet, and before anything is written.
#[test]
fn nccl_that_is_not_there_is_named_with_where_to_get_it() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", 6);
    let arguments = ["launch", "-n", "2", "train", &config, "--set", "compute.engine=nccl"];
    let output = shop.command(&arguments).env("TANDEM_NCCL", "/nowhere/libnccl.so.2").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    for text in [
        "compute.engine = \"nccl\": TANDEM_NCCL names /nowhere/libnccl.so.2",
        "libnccl2",
        "nvidia-nccl-cu12",
        "needs no GPU",
    ] {
        assert!(stderr.contains(text), "no {text:?} in:\n{stderr}");
    }
    assert!(!shop.path("run").exists());
}

/// Two launchers on one machine, as on two.
#[test]
fn two_nodes_started_by_hand_are_one_job() {
    let shop = shop_with_whole_run();
    let config = configure(&shop, "run", 6);
    let port = free_port();
    let address = format!("127.0.0.1:{port}");
    let node =
        |node| ["launch", "-n", "1", "--nodes", "2", "--node", node, "--address", &address, "train", &config];
    let mut second = shop.start(&node("1"));
    shop.run(&node("0")).expect(0);
    assert_eq!(second.wait().unwrap().code(), Some(0));
    same_runs(&shop, "run", "whole");
}

/// As Kubeflow's Trainer v2 does, on each of two machines.
#[test]
fn one_process_for_two_ranks_starts_them() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", 4);
    let port = free_port().to_string();
    let node = |node: &str| {
        let mut command = shop.command(&["train", &config]);
        command.env("PET_NNODES", "2").env("PET_NODE_RANK", node).env("PET_NPROC_PER_NODE", "2");
        command.env("PET_MASTER_ADDR", "127.0.0.1").env("PET_MASTER_PORT", &port);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    for mut node in [node("1"), node("0")] {
        assert_eq!(node.wait().unwrap().code(), Some(0));
    }
    let alone = configure(&shop, "alone", 4);
    shop.run(&["train", &alone]).expect(0);
    same_runs(&shop, "run", "alone");
    let plan = String::from_utf8(shop.bytes("run/plan.json")).unwrap();
    assert!(plan.contains("\"ranks\": 4"), "{plan}");
}

/// MPI launchers of this machine: Open MPI's, and those of PyPI's `mpich` and `impi-rt`, whose prefixes
/// `TANDEM_TEST_MPICH` and `TANDEM_TEST_INTEL_MPI` name.
fn mpi_launchers() -> Vec<Vec<String>> {
    let mut launchers = Vec::new();
    if Command::new("mpirun").arg("--version").output().is_ok() {
        // Containers run as root, with fewer cores than ranks.
        launchers.push(["mpirun", "--allow-run-as-root", "--oversubscribe"].map(str::to_owned).to_vec());
    }
    for variable in ["TANDEM_TEST_MPICH", "TANDEM_TEST_INTEL_MPI"] {
        match std::env::var(variable) {
            Ok(prefix) if !prefix.is_empty() => launchers.push(vec![format!("{prefix}/bin/mpiexec")]),
            _ => {}
        }
    }
    launchers
}

#[test]
fn mpi_launchers_start_ranks_too() {
    let launchers = mpi_launchers();
    if launchers.is_empty() {
        skip("there is no mpirun, and neither TANDEM_TEST_MPICH nor TANDEM_TEST_INTEL_MPI is set");
        return;
    }
    let shop = shop_with_whole_run();
    let tandem = shop.command(&[]).get_program().to_owned();
    for (number, launcher) in launchers.iter().enumerate() {
        for (engine, sharding) in [("mpi", "zero3"), ("auto", "ddp"), ("tcp", "zero2")] {
            let run = format!("run{number}{engine}");
            let config = configure(&shop, &run, 6);
            let mut command = Command::new(&launcher[0]);
            command.args(&launcher[1..]).args(["-n", "3"]).arg(&tandem).args(["train", &config]);
            command.args(["--set", &format!("compute.engine={engine}")]);
            command.args(["--set", &format!("compute.sharding={sharding}"), "--set", "compute.threads=1"]);
            let output = command.current_dir(shop.path("")).output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{launcher:?}, {engine}: {}\n{stderr}", output.status);
            same_runs(&shop, &run, "whole");
        }
    }
}

#[test]
fn torchrun_starts_ranks_too() {
    let Some(python) = python_with_torchrun() else { return };
    let shop = shop_with_whole_run();
    let config = configure(&shop, "run", 6);
    let tandem = shop.command(&[]).get_program().to_owned();
    let mut command = Command::new(python);
    command.args(["-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]);
    let status = command.arg(tandem).args(["train", &config]).current_dir(shop.path("")).status().unwrap();
    assert!(status.success(), "{status}");
    same_runs(&shop, "run", "whole");
}

/// An agent of torchrun and its rank, in a process group of their own; killed on drop.
struct Agent(Child);

impl Agent {
    fn kill(&mut self) {
        // By the system call: some versions of kill(1) read `-1234` as `-1`, which is every process of the machine. A group that
        // has ended needs no killing.
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        let _ = self.0.wait();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The agent of one of one or two nodes.
fn agent(shop: &Workshop, python: &OsStr, port: u16, is_host: bool, config: &str) -> Agent {
    let mut command = Command::new(python);
    command.args(["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--no-python"]);
    command.args(["--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-id", "job"]);
    command.args(["--rdzv-endpoint", &format!("127.0.0.1:{port}")]);
    let host = if is_host { "1" } else { "0" };
    command.args([
        "--rdzv-conf",
        &format!("is_host={host},last_call_timeout=10"),
        "--local-addr",
        "127.0.0.1",
    ]);
    command.arg(shop.command(&[]).get_program()).args(["train", config, "--resume"]);
    command.args(["--set", "train.schedule=constant"]);
    let name = format!("agent{host}.txt");
    let log = std::fs::File::create(shop.path(&name)).unwrap();
    command.stdout(Stdio::null()).stderr(log).current_dir(shop.path("")).process_group(0);
    Agent(command.spawn().unwrap())
}

#[test]
fn torchrun_goes_on_after_a_killed_rank_and_after_a_lost_node_with_one_less() {
    let Some(python) = python_with_torchrun() else { return };
    let shop = Workshop::new();
    let config = configure(&shop, "run", 100_000);
    let port = free_port();
    let mut first = agent(&shop, &python, port, true, &config);
    let mut second = agent(&shop, &python, port, false, &config);
    let logs = |shop: &Workshop| format!("{}\n{}", shop.read("agent1.txt"), shop.read("agent0.txt"));
    let mut await_step = |step: u64| {
        let began = Instant::now();
        while newest_step(&shop, "run") < step {
            assert!(began.elapsed() < Duration::from_secs(600), "no step {step}: {}", logs(&shop));
            assert!(first.0.try_wait().unwrap().is_none(), "it ended before step {step}: {}", logs(&shop));
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    await_step(10);
    // A rank: both agents start theirs again.
    signal(&ranks_of(&second.0)[0], "-KILL");
    let reached = newest_step(&shop, "run");
    await_step(reached + 20);
    // A node: its agent and its rank. The other goes on alone.
    second.kill();
    let reached = newest_step(&shop, "run");
    await_step(reached + 20);
    signal(&first.0.id().to_string(), "-TERM");
    first.0.wait().unwrap();
    let log = logs(&shop);
    assert!(log.contains("2 ranks, of which") && log.contains("peer lost: rank "), "{log}");
    // The rest is run alone, and all of it once more without harm.
    let steps = format!("train.steps={}", newest_step(&shop, "run") + 10);
    let settings = ["--set", &steps, "--set", "train.schedule=constant"];
    shop.run(&[&["train", &config, "--resume"][..], &settings].concat()).expect(0);
    let whole = configure(&shop, "whole", 100_000);
    shop.run(&[&["train", &whole][..], &settings].concat()).expect(0);
    same_runs(&shop, "run", "whole");
}
