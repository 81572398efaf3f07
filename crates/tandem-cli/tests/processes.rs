//! Ranks that are processes: the same bits as one, whoever starts them, and whoever is killed.

mod workshop;

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use workshop::{Workshop, entries};

/// A run of `steps` steps of two micro-batches each.
fn configure(shop: &Workshop, output: &str, steps: u64) -> String {
    let name = format!("{output}.toml");
    let toml = shop.dpo_toml(output).replace("steps = 6", &format!("steps = {steps}\nmicro_batch_size = 2"));
    shop.write(&name, &toml);
    name
}

fn same_runs(shop: &Workshop, first: &str, second: &str) {
    assert_eq!(shop.metrics(first), shop.metrics(second));
    let weights = |run| shop.bytes(&format!("{run}/final/model.safetensors"));
    assert!(weights(first) == weights(second), "{first} and {second} end with other weights");
}

#[test]
fn processes_give_the_same_as_one() {
    let shop = Workshop::new();
    let whole = configure(&shop, "whole", 6);
    shop.run(&["train", &whole]).expect(0);
    for (ranks, sharding) in [("2", "ddp"), ("3", "zero1"), ("2", "zero2"), ("3", "zero3")] {
        let run = format!("run{ranks}{sharding}");
        let config = configure(&shop, &run, 6);
        let sharding = format!("compute.sharding={sharding}");
        let settings = ["--set", &sharding, "--set", "compute.threads=1"];
        shop.run(&[&["launch", "-n", ranks, "train", &config][..], &settings].concat()).expect(0);
        same_runs(&shop, &run, "whole");
        // Ranks that are threads need as much memory, and send as much.
        let config = configure(&shop, &format!("{run}threads"), 6);
        let devices = format!("compute.devices=cpu:{ranks}");
        shop.run(&[&["train", &config, "--set", &devices][..], &settings].concat()).expect(0);
        let plan = |run: &str| String::from_utf8(shop.bytes(&format!("{run}/plan.json"))).unwrap();
        assert_eq!(plan(&run), plan(&format!("{run}threads")));
    }
}

/// The processes that a launcher started.
fn ranks_of(launcher: &Child) -> Vec<String> {
    let id = launcher.id();
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    children.split_whitespace().map(str::to_owned).collect()
}

fn newest_step(shop: &Workshop, run: &str) -> u64 {
    let names = entries(&shop.path(run).join("checkpoints"));
    let steps = names.iter().filter_map(|name| name.strip_prefix("step-")?.parse().ok());
    steps.max().unwrap_or(0)
}

#[test]
fn ranks_that_are_killed_end_the_job_and_it_goes_on_with_another_number_of_them() {
    const STEPS: u64 = 400;
    let shop = Workshop::new();
    let config = configure(&shop, "run", STEPS);
    let (mut random, mut attempts) = (7u64, 0);
    let mut draw = |limit: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % limit
    };
    while attempts < 10 && newest_step(&shop, "run") < STEPS - 100 {
        let ranks = 2 + draw(3);
        let sharding = ["ddp", "zero1", "zero2", "zero3"][draw(4) as usize];
        let (ranks, sharding) = (ranks.to_string(), format!("compute.sharding={sharding}"));
        let mut arguments = vec!["launch", "-n", &ranks, "train", &config, "--set", &sharding];
        if attempts > 0 {
            arguments.push("--resume");
        }
        let before = newest_step(&shop, "run");
        let mut launcher = shop.start(&arguments);
        let began = Instant::now();
        while newest_step(&shop, "run") == before {
            assert!(launcher.try_wait().unwrap().is_none(), "attempt {attempts} ended by itself");
            assert!(began.elapsed() < Duration::from_secs(120), "no checkpoint in two minutes");
            std::thread::sleep(Duration::from_millis(2));
        }
        // At any moment: in a step, while a checkpoint is written, between two.
        std::thread::sleep(Duration::from_millis(draw(60)));
        let victims = ranks_of(&launcher);
        let victim = &victims[draw(victims.len() as u64) as usize];
        assert!(Command::new("kill").args(["-9", victim]).status().unwrap().success());
        let status = launcher.wait().unwrap();
        assert_eq!(status.code(), Some(75), "attempt {attempts} on {ranks} ranks with {sharding}");
        attempts += 1;
    }
    assert!(attempts > 2, "the run was over after {attempts} attempts");
    shop.run(&["train", &config, "--resume"]).expect(0);
    let whole = configure(&shop, "whole", STEPS);
    shop.run(&["train", &whole]).expect(0);
    same_runs(&shop, "run", "whole");
}

/// A process that is stopped keeps its connections: only the deadline tells.
#[test]
fn a_rank_that_hangs_is_given_up_at_the_deadline() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", 100_000);
    let deadline = ["--set", "compute.deadline=2"];
    let mut launcher = shop.start(&[&["launch", "-n", "3", "train", &config][..], &deadline].concat());
    let began = Instant::now();
    while newest_step(&shop, "run") == 0 {
        assert!(began.elapsed() < Duration::from_secs(120), "no checkpoint in two minutes");
        std::thread::sleep(Duration::from_millis(2));
    }
    let victim = &ranks_of(&launcher)[1];
    assert!(Command::new("kill").args(["-STOP", victim]).status().unwrap().success());
    // The launcher kills what does not end by itself.
    assert_eq!(launcher.wait().unwrap().code(), Some(75));
}

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
    // A user's mistake in the run is one for the job.
    shop.run(&["launch", "-n", "2", "train", "nothing.toml"]).expect(2).says(&["nothing.toml"]);
}

/// Two launchers on one machine, as on two.
#[test]
fn two_nodes_started_by_hand_are_one_job() {
    let shop = Workshop::new();
    let whole = configure(&shop, "whole", 6);
    shop.run(&["train", &whole]).expect(0);
    let config = configure(&shop, "run", 6);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}");
    let node =
        |node| ["launch", "-n", "1", "--nodes", "2", "--node", node, "--address", &address, "train", &config];
    let mut second = shop.start(&node("1"));
    shop.run(&node("0")).expect(0);
    assert_eq!(second.wait().unwrap().code(), Some(0));
    same_runs(&shop, "run", "whole");
}

#[test]
fn mpirun_starts_ranks_too() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        println!("skipped: there is no mpirun");
        return;
    }
    let shop = Workshop::new();
    let whole = configure(&shop, "whole", 6);
    shop.run(&["train", &whole]).expect(0);
    let config = configure(&shop, "run", 6);
    let tandem = shop.command(&[]).get_program().to_owned();
    let mut command = Command::new("mpirun");
    // Containers run as root, with fewer cores than ranks.
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", "3"]).arg(tandem);
    let status = command.args(["train", &config]).current_dir(shop.path("")).status().unwrap();
    assert!(status.success(), "{status}");
    same_runs(&shop, "run", "whole");
}

#[test]
fn torchrun_starts_ranks_too() {
    let Some(python) = std::env::var_os("TANDEM_TEST_PYTHON") else {
        println!("skipped: TANDEM_TEST_PYTHON names no Python with torch");
        return;
    };
    let shop = Workshop::new();
    let whole = configure(&shop, "whole", 6);
    shop.run(&["train", &whole]).expect(0);
    let config = configure(&shop, "run", 6);
    let mut command = shop.command(&[]);
    let train = ["train", &config];
    let tandem = command.get_program().to_owned();
    command = Command::new(python);
    command.args(["-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]);
    let status = command.arg(tandem).args(train).current_dir(shop.path("")).status().unwrap();
    assert!(status.success(), "{status}");
    same_runs(&shop, "run", "whole");
}
