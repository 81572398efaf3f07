//! Ranks that are processes: the same bits as one, whoever starts them, and whoever is killed.

mod workshop;

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::json;
use workshop::{Workshop, entries, python_with_torchrun, skip};

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
    let whole = configure(&shop, "whole", 20);
    shop.run(&["train", &whole]).expect(0);
    for (ranks, sharding, replicate) in [
        ("2", "ddp", 1),
        ("3", "zero1", 1),
        ("2", "zero2", 1),
        ("3", "zero3", 1),
        ("4", "zero2", 2),
        ("4", "zero3", 2),
        ("8", "zero3", 1),
    ] {
        let run = format!("run{ranks}{sharding}");
        let config = configure(&shop, &run, 20);
        let [sharding, replicas] =
            [format!("compute.sharding={sharding}"), format!("compute.replicate={replicate}")];
        let settings = ["--set", &sharding, "--set", &replicas, "--set", "compute.threads=1"];
        shop.run(&[&["launch", "-n", ranks, "train", &config][..], &settings].concat()).expect(0);
        same_runs(&shop, &run, "whole");
        // Ranks that are threads need as much memory, and send as much.
        let config = configure(&shop, &format!("{run}threads"), 20);
        let devices = format!("compute.devices=cpu:{ranks}");
        shop.run(&[&["train", &config, "--set", &devices][..], &settings].concat()).expect(0);
        let plan = |run: &str| String::from_utf8(shop.bytes(&format!("{run}/plan.json"))).unwrap();
        assert_eq!(plan(&run), plan(&format!("{run}threads")));
    }
}

#[test]
fn processes_give_the_same_as_one_in_every_recipe() {
    let shop = Workshop::new();
    let answer = |i: usize| json!({"prompt": format!("Count to {i}."), "completion": format!(" {i} is enough{}", ".".repeat(i % 7))});
    shop.write_rows("completions.jsonl", 24, answer);
    for (name, recipe) in [
        ("model", &["reference.kind=model"][..]),
        ("ipo", &["reference.kind=model", "objective.loss=ipo"]),
        ("none", &["reference.kind=none", "objective.reference_free=true"]),
        ("sft", &["method=sft", "data.train=completions.jsonl"]),
    ] {
        let settings: Vec<&str> = recipe.iter().flat_map(|setting| ["--set", *setting]).collect();
        let config = configure(&shop, name, 20);
        shop.run(&[&["train", &config][..], &settings].concat()).expect(0);
        for (ranks, sharding, replicate) in [("3", "zero3", 1), ("4", "zero2", 2), ("2", "ddp", 1)] {
            let run = format!("{name}{ranks}");
            let config = configure(&shop, &run, 20);
            let [sharding, replicas] =
                [format!("compute.sharding={sharding}"), format!("compute.replicate={replicate}")];
            let mesh = ["--set", &sharding, "--set", &replicas];
            shop.run(&[&["launch", "-n", ranks, "train", &config][..], &settings, &mesh].concat()).expect(0);
            same_runs(&shop, &run, name);
        }
    }
}

/// A sum of two has one order, so two processes that hold a model in slices give the bits of two threads that do.
#[test]
fn processes_hold_a_model_in_slices_as_threads_do() {
    let shop = Workshop::new();
    let mut model = shop.write_config("model");
    model["num_key_value_heads"] = 2.into();
    shop.write("model/config.json", &model.to_string());
    for (ranks, sharding) in [("2", "ddp"), ("4", "zero3")] {
        let sharding = format!("compute.sharding={sharding}");
        let settings = ["--set", &sharding, "--set", "compute.tensor=2", "--set", "weights=random"];
        let threads = configure(&shop, &format!("threads{ranks}"), 4);
        let devices = format!("compute.devices=cpu:{ranks}");
        shop.run(&[&["train", &threads, "--set", &devices][..], &settings].concat()).expect(0);
        let processes = configure(&shop, &format!("processes{ranks}"), 4);
        shop.run(&[&["launch", "-n", ranks, "train", &processes][..], &settings].concat()).expect(0);
        same_runs(&shop, &format!("processes{ranks}"), &format!("threads{ranks}"));
        let plan = |run: &str| String::from_utf8(shop.bytes(&format!("{run}{ranks}/plan.json"))).unwrap();
        assert_eq!(plan("processes"), plan("threads"));
    }
    let config = configure(&shop, "refused", 4);
    let refused = shop.run(&["launch", "-n", "3", "train", &config, "--set", "compute.tensor=2"]);
    refused.expect(2).says(&["compute.tensor = 2, but there are 3 ranks"]);
}

/// Stages change no bit, whoever carries what goes between them; the plan tells each.
#[test]
fn processes_hold_a_model_in_stages_and_give_the_same_as_one() {
    let shop = Workshop::new();
    let mut model = shop.write_config("model");
    model["num_hidden_layers"] = 3.into();
    model["tie_word_embeddings"] = true.into();
    shop.write("model/config.json", &model.to_string());
    let random = ["--set", "weights=random", "--set", "compute.threads=1"];
    let whole = configure(&shop, "whole", 4);
    shop.run(&[&["train", &whole][..], &random].concat()).expect(0);
    for (ranks, stages, sharding) in [("3", "3", "ddp"), ("4", "2", "zero3")] {
        let [stages, sharding] =
            [format!("compute.pipeline={stages}"), format!("compute.sharding={sharding}")];
        let settings = [&["--set", &stages, "--set", &sharding][..], &random].concat();
        let threads = configure(&shop, &format!("threads{ranks}"), 4);
        let devices = format!("compute.devices=cpu:{ranks}");
        let on_threads = [&["--set", &devices][..], &settings].concat();
        shop.run(&[&["train", &threads][..], &on_threads].concat()).expect(0);
        let processes = configure(&shop, &format!("processes{ranks}"), 4);
        shop.run(&[&["launch", "-n", ranks, "train", &processes][..], &settings].concat()).expect(0);
        same_runs(&shop, &format!("processes{ranks}"), "whole");
        same_runs(&shop, &format!("threads{ranks}"), "whole");
        let plan = |run: &str| String::from_utf8(shop.bytes(&format!("{run}{ranks}/plan.json"))).unwrap();
        assert_eq!(plan("processes"), plan("threads"));
        if ranks == "3" {
            let planned = shop.run(&[&["plan", &threads][..], &on_threads].concat()).expect(0);
            for stage in
                ["stage 1 of 3, with blocks 0 to 0", "stage 2 of 3", "stage 3 of 3, with blocks 2 to 2"]
            {
                assert!(planned.stdout.contains(stage), "{}", planned.stdout);
            }
        }
    }
    let config = configure(&shop, "refused", 4);
    let refused = shop.run(&["launch", "-n", "3", "train", &config, "--set", "compute.pipeline=2"]);
    refused.expect(2).says(&["compute.pipeline = 2, but there are 3 ranks"]);
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
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

/// What the first of several processes that fail at once wrote, and how its launcher ended.
struct Ended {
    code: Option<i32>,
    stderr: String,
}

/// Starts a launcher whose ranks' stderr goes into a file of the shop's.
fn start(shop: &Workshop, arguments: &[&str]) -> Child {
    let log = std::fs::File::create(shop.path("stderr.txt")).unwrap();
    shop.command(arguments).stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

fn end_of(shop: &Workshop, mut launcher: Child) -> Ended {
    let code = launcher.wait().unwrap().code();
    Ended { code, stderr: shop.read("stderr.txt") }
}

impl Ended {
    #[track_caller]
    fn expect(&self, code: i32, texts: &[&str]) {
        assert_eq!(self.code, Some(code), "{}", self.stderr);
        for text in texts {
            assert!(self.stderr.contains(text), "no {text:?} in:\n{}", self.stderr);
        }
    }
}

/// Waits until the ranks have told each other that they take steps: they do so once a second.
fn await_beats() {
    std::thread::sleep(Duration::from_millis(2500));
}

/// Waits until there is a newer checkpoint than that of `step`.
fn await_checkpoint(shop: &Workshop, launcher: &mut Child, step: u64) {
    let began = Instant::now();
    while newest_step(shop, "run") <= step {
        assert!(launcher.try_wait().unwrap().is_none(), "it ended by itself: {}", shop.read("stderr.txt"));
        assert!(began.elapsed() < Duration::from_secs(120), "no checkpoint in two minutes");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn signal(process: &str, signal: &str) {
    assert!(process.parse::<u32>().is_ok_and(|id| id > 1), "{process} is no process");
    assert!(Command::new("kill").args([signal, process]).status().unwrap().success());
}

/// Any rank, at any moment: in a step, while a checkpoint is written, between two. Then with other ranks and another division.
#[test]
fn twenty_kills_at_random_change_no_bit_and_no_row() {
    const KILLS: u64 = 20;
    const STEPS: u64 = 4000;
    let shop = Workshop::new();
    // The number of steps is changed at the end, which must not change a learning rate.
    let settings = ["--set", "train.record_rows=true", "--set", "train.schedule=constant"];
    let config = configure(&shop, "run", STEPS);
    let seed = std::env::var("TANDEM_TEST_SEED").map_or(7, |seed| seed.parse().unwrap());
    println!("TANDEM_TEST_SEED={seed}");
    let mut random: u64 = seed;
    let mut draw = |limit: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % limit
    };
    let mut ranks = 2;
    for kill in 0..KILLS {
        // From 2 to 4, and another number than before.
        ranks = 2 + (ranks - 2 + 1 + draw(2)) % 3;
        let sharding = ["ddp", "zero1", "zero2", "zero3"][draw(4) as usize];
        let axis = match (ranks, sharding, draw(3)) {
            (4, _, 0) => "compute.pipeline=2",
            (4, "zero1" | "zero2" | "zero3", 1) => "compute.replicate=2",
            _ => "compute.pipeline=1",
        };
        let (number, sharding) = (ranks.to_string(), format!("compute.sharding={sharding}"));
        let mut arguments =
            vec!["launch", "-n", &number, "train", &config, "--set", &sharding, "--set", axis];
        arguments.extend(settings);
        if kill > 0 {
            arguments.push("--resume");
        }
        let before = newest_step(&shop, "run");
        let mut launcher = start(&shop, &arguments);
        await_checkpoint(&shop, &mut launcher, before);
        std::thread::sleep(Duration::from_millis(draw(60)));
        let victim = draw(ranks);
        let processes = ranks_of(&launcher);
        signal(&processes[victim as usize], "-KILL");
        println!(
            "kill {kill}: rank {victim} of {ranks} with {sharding} {axis}, after step {}",
            newest_step(&shop, "run")
        );
        let story = format!("peer lost: rank {victim} on ");
        end_of(&shop, launcher).expect(75, &[&story, &format!("(process {})", processes[victim as usize])]);
    }
    // How far it came depends on the machine; the rest is run, and all of it once more without harm.
    let reached = newest_step(&shop, "run");
    let last = (reached + 10).to_string();
    let steps = ["--set", &format!("train.steps={last}")];
    assert!(reached > KILLS && reached + 10 < STEPS, "reached step {reached}");
    let run = |arguments: &[&str]| {
        shop.run(&[arguments, &steps, &settings].concat()).expect(0);
    };
    run(&["train", &config, "--resume"]);
    let whole = configure(&shop, "whole", STEPS);
    run(&["train", &whole]);
    same_runs(&shop, "run", "whole");
    let rows = |run: &str| shop.read(&format!("{run}/rows.jsonl"));
    assert_eq!(rows("run"), rows("whole"), "a row was lost or came twice");
    assert_eq!(rows("run").lines().count() as u64, reached + 10);
}

/// The launcher of torchrun shows the file in its summary.
#[test]
fn every_rank_tells_the_same_story_of_a_killed_one_and_so_does_the_error_file() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", 100_000);
    let log = std::fs::File::create(shop.path("stderr.txt")).unwrap();
    let mut command = shop.command(&["launch", "-n", "3", "train", &config]);
    command.env("TORCHELASTIC_ERROR_FILE", shop.path("error.json")).stdout(Stdio::null()).stderr(log);
    let mut launcher = command.spawn().unwrap();
    await_checkpoint(&shop, &mut launcher, 0);
    await_beats();
    let victim = &ranks_of(&launcher)[1];
    signal(victim, "-KILL");
    let ended = end_of(&shop, launcher);
    let story = format!("(process {victim}), last seen at step ");
    for rank in [0, 2] {
        ended.expect(75, &["error: peer lost: rank 1 on ", &story, &format!("This is rank {rank} on ")]);
    }
    let error: serde_json::Value = serde_json::from_str(&shop.read("error.json")).unwrap();
    let message = error["message"]["message"].as_str().unwrap();
    assert!(message.contains("peer lost: rank 1 on ") && message.contains(&story), "{message}");
}

/// A process that is stopped keeps its connections, but no longer beats. Under ZeRO-3 the others have gathers and reductions
/// under way, in threads that nobody waits for.
#[test]
fn a_rank_that_is_stopped_is_given_up_and_named() {
    for sharding in ["compute.sharding=ddp", "compute.sharding=zero3"] {
        let shop = Workshop::new();
        let config = configure(&shop, "run", 100_000);
        let settings = ["--set", "compute.deadline=4", "--set", sharding];
        let mut launcher = start(&shop, &[&["launch", "-n", "3", "train", &config][..], &settings].concat());
        await_checkpoint(&shop, &mut launcher, 0);
        await_beats();
        let victim = &ranks_of(&launcher)[1];
        signal(victim, "-STOP");
        // The launcher kills what does not end by itself.
        let story = format!("(process {victim}), last seen at step ");
        end_of(&shop, launcher).expect(75, &["peer lost: rank 1 on ", &story]);
    }
}

#[test]
fn sigterm_to_the_launcher_saves_and_exits_with_143_on_all_ranks() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", 100_000);
    let mut launcher = start(&shop, &["launch", "-n", "3", "train", &config]);
    await_checkpoint(&shop, &mut launcher, 0);
    signal(&launcher.id().to_string(), "-TERM");
    end_of(&shop, launcher).expect(143, &[]);
    let last = shop.metrics("run").last().unwrap()["step"].as_u64();
    assert_eq!(Some(newest_step(&shop, "run")), last, "the last step that ran is the one that was saved");
}

#[test]
fn too_few_open_files_are_raised_aloud_or_refused_with_the_number_needed() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", 2);
    let program = shop.command(&[]).get_program().to_string_lossy().into_owned();
    let run = |limit: &str| {
        let script = format!("ulimit {limit} && exec {program} launch -n 2 train {config}");
        let mut command = Command::new("bash");
        command.args(["-c", &script]).current_dir(shop.path("")).output().unwrap()
    };
    let refused = run("-n 100");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(text.contains("the hard limit is 100") && text.contains("`ulimit -n "), "{text}");
    let raised = run("-Sn 100");
    let text = String::from_utf8_lossy(&raised.stderr).into_owned();
    assert_eq!(raised.status.code(), Some(0), "{text}");
    assert!(text.contains("limit of open files from 100 to "), "{text}");
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
        "Gloo",
    ] {
        assert!(stderr.contains(text), "no {text:?} in:\n{stderr}");
    }
    assert!(!shop.path("run").exists());
}

/// Two launchers on one machine, as on two.
#[test]
fn two_nodes_started_by_hand_are_one_job() {
    let shop = Workshop::new();
    let whole = configure(&shop, "whole", 6);
    shop.run(&["train", &whole]).expect(0);
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

#[test]
fn mpirun_starts_ranks_too() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        skip("there is no mpirun");
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
    let Some(python) = python_with_torchrun() else { return };
    let shop = Workshop::new();
    let whole = configure(&shop, "whole", 6);
    shop.run(&["train", &whole]).expect(0);
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
            assert!(began.elapsed() < Duration::from_secs(180), "no step {step}: {}", logs(&shop));
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

/// Two hosts: network namespaces with a cable between them. Deleted on drop.
struct Hosts(String);

impl Hosts {
    /// `None`, with the reason printed, where this process may not make them.
    fn new() -> Option<Self> {
        let name = format!("tandem{}", std::process::id());
        let (a, b) = (format!("{name}a"), format!("{name}b"));
        let hosts = Self(name.clone());
        // Names of interfaces are short.
        let ends = [format!("ta{}", std::process::id()), format!("tb{}", std::process::id())];
        let lines = [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("link add {} type veth peer name {}", ends[0], ends[1]),
            format!("link set {} netns {a} name cable", ends[0]),
            format!("link set {} netns {b} name cable", ends[1]),
            format!("-n {a} address add 10.83.7.1/24 dev cable"),
            format!("-n {b} address add 10.83.7.2/24 dev cable"),
            format!("-n {a} link set lo up"),
            format!("-n {b} link set lo up"),
            format!("-n {a} link set cable up"),
            format!("-n {b} link set cable up"),
        ];
        for line in lines {
            let output = Command::new("ip").args(line.split(' ')).output();
            let why = match output {
                Ok(output) if output.status.success() => continue,
                Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
                Err(error) => error.to_string(),
            };
            skip(&format!("no network namespaces: ip {line}: {why}"));
            return None;
        }
        Some(hosts)
    }

    /// A launcher with one rank on one of the hosts; its output goes into a file of the shop's.
    fn start(&self, shop: &Workshop, node: usize, arguments: &[&str]) -> Child {
        let host = format!("{}{}", self.0, ["a", "b"][node]);
        let log = std::fs::File::create(shop.path(&format!("node{node}.txt"))).unwrap();
        let node = node.to_string();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &host]).arg(shop.command(&[]).get_program());
        command.args(["launch", "-n", "1", "--nodes", "2", "--node", &node, "--address", "10.83.7.1:29511"]);
        command.args(arguments).current_dir(shop.path("")).stdout(Stdio::null()).stderr(log).spawn().unwrap()
    }

    /// Pulls the cable out.
    fn cut(&self) {
        let host = format!("{}b", self.0);
        let status = Command::new("ip").args(["-n", &host, "link", "set", "cable", "down"]).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in ["a", "b"] {
            // The cable goes with its ends.
            let _ = Command::new("ip").args(["netns", "delete", &format!("{}{host}", self.0)]).output();
        }
    }
}

#[test]
fn two_hosts_are_one_job_and_a_cut_cable_ends_it_on_both() {
    let Some(hosts) = Hosts::new() else { return };
    let shop = Workshop::new();
    let whole = configure(&shop, "whole", 6);
    shop.run(&["train", &whole]).expect(0);
    let config = configure(&shop, "run", 6);
    let mut nodes = [0, 1].map(|node| hosts.start(&shop, node, &["train", &config]));
    for (node, child) in nodes.iter_mut().enumerate() {
        let status = child.wait().unwrap();
        assert!(status.success(), "{status}: {}", shop.read(&format!("node{node}.txt")));
    }
    same_runs(&shop, "run", "whole");

    let more = ["train", &config, "--resume", "--set", "train.steps=100000", "--set", "compute.deadline=6"];
    let mut nodes = [0, 1].map(|node| hosts.start(&shop, node, &more));
    let began = Instant::now();
    while newest_step(&shop, "run") < 20 {
        assert!(began.elapsed() < Duration::from_secs(120), "no step 20: {}", shop.read("node0.txt"));
        std::thread::sleep(Duration::from_millis(2));
    }
    await_beats();
    hosts.cut();
    for (node, child) in nodes.iter_mut().enumerate() {
        let (code, text) = (child.wait().unwrap().code(), shop.read(&format!("node{node}.txt")));
        assert_eq!(code, Some(75), "node {node}: {text}");
        assert!(
            text.contains(&format!("rank {node} on ")) && text.contains(", at step "),
            "node {node}: {text}"
        );
    }
    // The store is on the first host, and tells of the other.
    let text = shop.read("node0.txt");
    assert!(text.contains("peer lost: rank 1 on ") && text.contains("last seen at step "), "{text}");
}
