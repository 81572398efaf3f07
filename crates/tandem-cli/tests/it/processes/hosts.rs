//! Two machines, as two network namespaces of one.

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::job::{await_beats, newest_step};
use super::{configure, same_runs, shop_with_whole_run};
use crate::workshop::{Workshop, skip};

/// Two hosts: network namespaces with a cable between them. Deleted on drop.
struct Hosts(String);

impl Hosts {
    /// `None`, with the reason printed, where this process may not make them.
    fn new() -> Option<Self> {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let number = format!("{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let name = format!("tandem{number}");
        let (a, b) = (format!("{name}a"), format!("{name}b"));
        let hosts = Self(name.clone());
        // Names of interfaces are short.
        let ends = [format!("a{number}"), format!("b{number}")];
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

    /// Pulls the cable out, or puts it in again.
    fn cable(&self, state: &str) {
        let host = format!("{}b", self.0);
        let status = Command::new("ip").args(["-n", &host, "link", "set", "cable", state]).status().unwrap();
        assert!(status.success());
    }

    /// Narrows the cable, both ways. False, with the reason printed, where this machine cannot.
    fn narrow(&self, rate: &str) -> bool {
        let set = |host: &str| {
            let host = format!("{}{host}", self.0);
            let line =
                format!("-n {host} qdisc replace dev cable root tbf rate {rate} burst 16kb latency 1s");
            Command::new("tc").args(line.split(' ')).output().is_ok_and(|output| output.status.success())
        };
        let is_narrow = ["a", "b"].into_iter().all(set);
        if !is_narrow {
            skip("no slow links: tc has no tbf here");
        }
        is_narrow
    }
}

/// Waits until the ranks have ended, which must be well.
fn expect_success(shop: &Workshop, nodes: [Child; 2]) {
    for (node, mut child) in nodes.into_iter().enumerate() {
        let status = child.wait().unwrap();
        assert!(status.success(), "{status}: {}", shop.read(&format!("node{node}.txt")));
    }
}

/// Waits until the ranks have ended, which a lost rank must have caused. Each says who and where it is.
fn expect_lost(shop: &Workshop, nodes: [Child; 2]) {
    for (node, mut child) in nodes.into_iter().enumerate() {
        let (code, text) = (child.wait().unwrap().code(), shop.read(&format!("node{node}.txt")));
        assert_eq!(code, Some(75), "node {node}: {text}");
        assert!(
            text.contains(&format!("rank {node} on ")) && text.contains(", at step "),
            "node {node}: {text}"
        );
    }
}

/// Waits for a step of `run`, which both nodes are to take.
fn await_step(shop: &Workshop, nodes: &mut [Child; 2], step: u64) {
    let began = Instant::now();
    while newest_step(shop, "run") < step {
        let has_ended = nodes.iter_mut().any(|node| node.try_wait().unwrap().is_some());
        let may_come = !has_ended || newest_step(shop, "run") >= step;
        let is_late = began.elapsed() >= Duration::from_secs(600);
        assert!(may_come && !is_late, "no step {step}: {}", shop.read("node0.txt"));
        std::thread::sleep(Duration::from_millis(2));
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
    let shop = shop_with_whole_run();
    let config = configure(&shop, "run", 6);
    expect_success(&shop, [0, 1].map(|node| hosts.start(&shop, node, &["train", &config])));
    same_runs(&shop, "run", "whole");

    let more = ["train", &config, "--resume", "--set", "train.steps=100000", "--set", "compute.deadline=12"];
    let mut nodes = [0, 1].map(|node| hosts.start(&shop, node, &more));
    await_step(&shop, &mut nodes, 20);
    await_beats();
    hosts.cable("down");
    expect_lost(&shop, nodes);
    // The store is on the first host, and tells of the other.
    let text = shop.read("node0.txt");
    assert!(text.contains("peer lost: rank 1 on ") && text.contains("last seen at step "), "{text}");
}

/// A link that is slow, and one that is away for less than the deadline, cost time alone.
#[test]
fn a_slow_link_and_a_loose_cable_change_no_bits() {
    let Some(hosts) = Hosts::new() else { return };
    if !hosts.narrow("8mbit") {
        return;
    }
    let shop = shop_with_whole_run();
    let config = configure(&shop, "run", 6);
    for sharding in ["compute.sharding=ddp", "compute.sharding=zero3"] {
        let train = ["train", &config, "--overwrite", "--set", sharding];
        let mut nodes = [0, 1].map(|node| hosts.start(&shop, node, &train));
        await_step(&shop, &mut nodes, 2);
        hosts.cable("down");
        std::thread::sleep(Duration::from_millis(1500));
        hosts.cable("up");
        expect_success(&shop, nodes);
        same_runs(&shop, "run", "whole");
    }
}

/// A link on which a step takes longer than the deadline ends the run on both hosts; it goes on over a better one.
#[test]
fn a_link_too_slow_for_the_deadline_ends_the_run_and_it_resumes() {
    let Some(hosts) = Hosts::new() else { return };
    let shop = shop_with_whole_run();
    let config = configure(&shop, "run", 6);
    let train = ["train", &config, "--set", "compute.deadline=4"];
    // Slow from the start, so that the ranks cannot be through before it is.
    if !hosts.narrow("2mbit") {
        return;
    }
    let mut nodes = [0, 1].map(|node| hosts.start(&shop, node, &train));
    await_step(&shop, &mut nodes, 2);
    assert!(hosts.narrow("16kbit"));
    expect_lost(&shop, nodes);
    assert!(newest_step(&shop, "run") < 6);
    assert!(hosts.narrow("100mbit"));
    let resume = [&train[..], &["--resume"]].concat();
    expect_success(&shop, [0, 1].map(|node| hosts.start(&shop, node, &resume)));
    same_runs(&shop, "run", "whole");
}
