//! `tandem launch` itself: what it passes on, starts again, and never leaves behind.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::job::{await_checkpoint, end_of, newest_step, ranks_of, signal, start};
use super::{configure, same_runs, shop_with_whole_run};
use crate::workshop::{Workshop, free_port, skip};

/// More steps than a test waits for.
const ENDLESS: u64 = 100_000;

fn is_running(process: &str) -> bool {
    // A killed child of this process would stay as a zombie, but ranks are children of launchers.
    Path::new("/proc").join(process).exists()
}

/// Fails unless all processes end within ten seconds.
fn await_ends(processes: &[String]) {
    let began = Instant::now();
    while let Some(process) = processes.iter().find(|process| is_running(process)) {
        assert!(began.elapsed() < Duration::from_secs(10), "process {process} is left behind");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn saved_the_last_step(shop: &Workshop) {
    let last = shop.metrics("run").last().unwrap()["step"].as_u64();
    assert_eq!(Some(newest_step(shop, "run")), last, "the last step that ran is the one that was saved");
}

#[test]
fn lines_have_their_rank_and_the_first_error_comes_last() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", 2);
    let run = ["launch", "-n", "2", "--log-dir", "logs", "train", &config];
    let output = shop.command(&run).output().unwrap();
    assert!(output.status.success());
    let printed = [&output.stdout[..], &output.stderr].concat();
    let printed = String::from_utf8(printed).unwrap();
    assert!(printed.lines().all(|line| line.starts_with("[rank 0] ") || line.starts_with("[rank 1] ")));
    let logged = shop.read("logs/rank-0.log");
    assert!(logged.contains("step 2/2") && shop.path("logs/rank-1.log").exists(), "{logged}");

    let refused = ["launch", "-n", "2", "train", &config, "--overwrite", "--set", "model=nowhere"];
    let output = shop.command(&refused).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    let last = error.lines().last().unwrap();
    assert!(last.contains(" failed first: error: ") && last.contains("nowhere"), "{error}");
}

#[test]
fn a_mistake_in_command_or_configuration_is_told_once_before_ranks_start() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", 2);
    let refused = |command: &[&str], text: &str| {
        let outcome = shop.run(&[&["launch", "-n", "2"], command].concat()).expect(2);
        assert_eq!(outcome.stderr.matches(text).count(), 1, "{}", outcome.stderr);
        assert!(!outcome.stderr.contains("[rank "), "{}", outcome.stderr);
    };
    refused(&["train", &config, "--set", "train.steps=x"], "`train.steps`: expected");
    refused(&["train", &config, "--memory", "much"], "`compute.memory`: expected");
    refused(&["train", &config, "--resum"], "unexpected argument '--resum'");
    refused(&["trian", &config], "unrecognized subcommand 'trian'");
    refused(&["plan", &config], "launch is for `train`");
    refused(&["generate", "model", "hi"], "launch is for `train`");
}

#[test]
fn other_commands_are_refused_under_a_launcher() {
    let shop = Workshop::new();
    for command in [&["plan", "dpo.toml"][..], &["generate", "model", "hi"], &["eval", "dpo.toml"]] {
        let mut command = shop.command(command);
        for (name, value) in
            [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")]
        {
            command.env(name, value);
        }
        let output = command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", "29500").output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains("this command runs in one process"), "{stderr}");
    }
}

/// Typed at a terminal, whose foreground group the ranks are not in: the launcher passes it on once.
#[test]
fn ctrl_c_at_a_terminal_saves_and_exits_with_130() {
    if Command::new("script").arg("--version").output().is_err() {
        skip("there is no script(1) to make a terminal");
        return;
    }
    let shop = Workshop::new();
    let config = configure(&shop, "run", ENDLESS);
    let program = shop.command(&[]).get_program().to_string_lossy().into_owned();
    let mut terminal = Command::new("script")
        .args(["-qec", &format!("exec {program} launch -n 3 train {config}"), "/dev/null"])
        .current_dir(shop.path(""))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let began = Instant::now();
    while newest_step(&shop, "run") < 2 {
        assert!(began.elapsed() < Duration::from_secs(600), "no step 2");
        std::thread::sleep(Duration::from_millis(2));
    }
    terminal.stdin.as_mut().unwrap().write_all(b"\x03").unwrap();
    assert_eq!(terminal.wait().unwrap().code(), Some(130));
    saved_the_last_step(&shop);
}

#[test]
fn a_second_signal_ends_all_ranks_at_once() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", ENDLESS);
    let mut launcher = start(&shop, &["launch", "-n", "2", "train", &config]);
    await_checkpoint(&shop, &mut launcher, 0);
    let ranks = ranks_of(&launcher);
    // Ranks that cannot answer the first one.
    ranks.iter().for_each(|rank| signal(rank, "-STOP"));
    let id = launcher.id().to_string();
    signal(&id, "-TERM");
    std::thread::sleep(Duration::from_millis(300));
    assert!(ranks.iter().all(|rank| is_running(rank)));
    signal(&id, "-TERM");
    let code = launcher.wait().unwrap().code();
    assert_eq!(code, Some(75), "killed ranks: {}", shop.read("stderr.txt"));
    await_ends(&ranks);
}

#[test]
#[cfg(target_os = "linux")]
fn a_killed_launcher_leaves_no_rank_behind() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", ENDLESS);
    let mut launcher = start(&shop, &["launch", "-n", "3", "train", &config]);
    await_checkpoint(&shop, &mut launcher, 0);
    let ranks = ranks_of(&launcher);
    assert_eq!(ranks.len(), 3);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    await_ends(&ranks);
}

/// Kills a rank of a run with restarts, and then stops it; returns the log.
fn kill_and_stop(shop: &Workshop, launcher: Child) -> String {
    let mut launcher = launcher;
    await_checkpoint(shop, &mut launcher, 0);
    signal(&ranks_of(&launcher)[1], "-KILL");
    let reached = newest_step(shop, "run");
    await_checkpoint(shop, &mut launcher, reached + 20);
    signal(&launcher.id().to_string(), "-TERM");
    let ended = end_of(shop, launcher);
    ended.expect(143, &["rank 1 failed first: ", "starting again with --resume"]);
    ended.stderr
}

/// The rest is run alone, and all of it once more without harm.
fn ends_like_a_whole_run(shop: &Workshop, config: &str) {
    let steps = format!("train.steps={}", newest_step(shop, "run") + 10);
    let settings = ["--set", &steps, "--set", "train.schedule=constant"];
    shop.run(&[&["train", config, "--resume"][..], &settings].concat()).expect(0);
    let whole = configure(shop, "whole", ENDLESS);
    shop.run(&[&["train", &whole][..], &settings].concat()).expect(0);
    same_runs(shop, "run", "whole");
}

const CONSTANT: [&str; 2] = ["--set", "train.schedule=constant"];

#[test]
fn all_ranks_start_again_after_one_was_killed() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", ENDLESS);
    let run = ["launch", "-n", "3", "--max-restarts", "2", "train", &config];
    let log = kill_and_stop(&shop, start(&shop, &[&run[..], &CONSTANT].concat()));
    assert!(log.contains("on 3 of 3 ranks; 1 more times at most"), "{log}");
    ends_like_a_whole_run(&shop, &config);
}

#[test]
fn the_ranks_that_are_left_go_on() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", ENDLESS);
    let run = ["launch", "-n", "3", "--max-restarts", "2", "--min-ranks", "2", "train", &config];
    let log = kill_and_stop(&shop, start(&shop, &[&run[..], &CONSTANT].concat()));
    assert!(log.contains("on 2 of 3 ranks"), "{log}");
    ends_like_a_whole_run(&shop, &config);
}

#[test]
fn a_mistake_is_not_repeated() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", 2);
    let run = ["launch", "-n", "2", "--max-restarts", "3", "train", &config, "--set", "model=nowhere"];
    let output = shop.command(&run).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(!error.contains("starting again"), "{error}");
}

/// A program in place of ssh that runs the command here.
fn stand_in(shop: &Workshop) -> String {
    let path = shop.path("reach");
    std::fs::write(&path, "#!/bin/sh\necho \"$1\" >>reached\nexec sh -c \"$2\"\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

#[test]
fn hosts_are_one_job() {
    let shop = shop_with_whole_run();
    let config = configure(&shop, "run", 6);
    let (reach, address) = (stand_in(&shop), format!("127.0.0.1:{}", free_port()));
    shop.write("hosts", "me@one slots=2\ntwo slots=1 # the last\n");
    let run = ["launch", "--hostfile", "hosts", "--ssh", &reach, "--address", &address, "train", &config];
    shop.run(&run).expect(0);
    same_runs(&shop, "run", "whole");
    let mut reached: Vec<String> = shop.read("reached").lines().map(str::to_owned).collect();
    reached.sort();
    assert_eq!(reached, ["me@one", "two"]);
}

#[test]
#[cfg(target_os = "linux")]
fn signals_and_the_launchers_end_reach_hosts() {
    for (end, code) in [("-INT", Some(130)), ("-KILL", None)] {
        let shop = Workshop::new();
        let config = configure(&shop, "run", ENDLESS);
        let (reach, address) = (stand_in(&shop), format!("127.0.0.1:{}", free_port()));
        let hosts = ["launch", "-n", "1", "--hosts", "one,two", "--ssh", &reach, "--address", &address];
        let mut launcher = start(&shop, &[&hosts[..], &["train", &config]].concat());
        await_checkpoint(&shop, &mut launcher, 0);
        let processes = descendants(&launcher.id().to_string());
        assert!(processes.len() >= 4, "{processes:?}");
        signal(&launcher.id().to_string(), end);
        assert_eq!(launcher.wait().unwrap().code(), code, "{}", shop.read("stderr.txt"));
        await_ends(&processes);
        if code.is_some() {
            saved_the_last_step(&shop);
        }
    }
}

/// All processes below one.
fn descendants(process: &str) -> Vec<String> {
    let children = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children"));
    let children: Vec<String> = children.unwrap_or_default().split_whitespace().map(str::to_owned).collect();
    children.iter().flat_map(|child| [vec![child.clone()], descendants(child)].concat()).collect()
}

#[test]
fn hosts_that_cannot_be_meant_are_refused() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", 2);
    shop.write("empty", "# nobody\n");
    for (arguments, text) in [
        (&["-n", "1", "--hosts", "a,a"][..], "host a is given twice"),
        (&["-n", "1", "--hosts", "a,,b"], "expected a name as ssh takes it"),
        (&["-n", "0", "--hosts", "a"], "at least one rank"),
        (&["-n", "1", "--hosts", "a", "--ssh", " "], "--ssh is empty"),
        (&["--hostfile", "missing"], "cannot read missing"),
        (&["--hostfile", "empty"], "names no host"),
        (&["-n", "2", "--nodes", "2", "--max-restarts", "1", "--address", "a:1"], "give --hosts in place"),
        (&["-n", "2", "--max-restarts", "1", "--min-ranks", "3"], "--min-ranks 3: expected 1 to 2"),
    ] {
        shop.run(&[&["launch"], arguments, &["train", &config]].concat()).expect(2).says(&[text]);
    }
}
