//! Ranks that are killed, stopped, asked to end, or start with too little.

use std::process::{Command, Stdio};

use super::configure;
use super::job::{await_beats, await_checkpoint, end_of, newest_step, ranks_of, signal, start};
use crate::interruption::{PROGRAMS, hear_hangups, resume_online_and_compare, run_with_program, wait_for};
use crate::workshop::Workshop;

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

/// While rank 0 waits for the program of a conversation, or for the judge of held-out answers.
#[test]
fn a_rank_that_is_killed_while_a_program_works_is_named_and_the_run_goes_on() {
    for program in PROGRAMS {
        for (victim, sharding) in [(0, "compute.sharding=zero3"), (1, "compute.sharding=ddp")] {
            let shop = Workshop::new();
            let train = run_with_program(&shop, program);
            let launch = [&["launch", "-n", "2"], &train[..], &["--set", sharding]].concat();
            let mut launcher = start(&shop, &launch);
            wait_for(&shop.path("busy"), &mut launcher);
            signal(&ranks_of(&launcher)[victim], "-KILL");
            end_of(&shop, launcher).expect(75, &[&format!("peer lost: rank {victim} on ")]);
            shop.write("gate", "");
            resume_online_and_compare(&shop, &train);
        }
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
fn sighup_to_the_launcher_saves_and_exits_with_129_though_it_comes_twice() {
    hear_hangups();
    let shop = Workshop::new();
    let config = configure(&shop, "run", 100_000);
    let mut launcher = start(&shop, &["launch", "-n", "3", "train", &config]);
    await_checkpoint(&shop, &mut launcher, 0);
    signal(&launcher.id().to_string(), "-HUP");
    signal(&launcher.id().to_string(), "-HUP");
    end_of(&shop, launcher).expect(129, &[]);
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
