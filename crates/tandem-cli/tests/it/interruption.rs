//! Runs that are stopped, killed or run out of disk, and go on as if nothing had been.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::workshop::{Workshop, entries, skip};

/// More steps than run before a test notices the first checkpoint, which is saved after two.
const STEPS: &str = "train.steps=300";

/// Only a bug waits so long.
const PATIENCE: Duration = Duration::from_secs(600);

/// Waits until `path` exists; fails the test if the run ends without it, or hangs.
pub fn wait_for(path: &Path, child: &mut Child) {
    let start = Instant::now();
    while !path.exists() {
        let ended = child.try_wait().unwrap().is_some();
        assert!(!ended || path.exists(), "the run ended without {}", path.display());
        assert!(start.elapsed() < PATIENCE, "no {} after ten minutes", path.display());
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(status.success(), "kill {name}");
}

/// Makes programs that this process starts hear SIGHUP, though the tests run under `nohup`: a handler of one's own is not
/// inherited, where ignoring is.
pub fn hear_hangups() {
    signal_hook::flag::register(signal_hook::consts::SIGHUP, Arc::default()).unwrap();
}

fn newest_step(shop: &Workshop, run: &str) -> u64 {
    let names = entries(&shop.path(run).join("checkpoints"));
    let name = names.iter().rfind(|name| name.starts_with("step-")).expect("a checkpoint");
    name.trim_start_matches("step-").parse().unwrap_or_else(|_| panic!("{name}"))
}

/// Runs [`STEPS`] of `dpo.toml`, interrupted as [`interrupted`] says.
fn stopped_by(shop: &Workshop, name: &str) -> ExitStatus {
    interrupted(shop, name, &["train", "dpo.toml", "--set", STEPS])
}

/// Starts a run, sends it a signal when the first checkpoint is there, and waits for its end. A run that ends before the signal
/// arrives, for the machine let the test wait that long, is started anew.
fn interrupted(shop: &Workshop, name: &str, train: &[&str]) -> ExitStatus {
    for _ in 0..10 {
        let mut child = shop.start(train);
        wait_for(&shop.path("run/checkpoints/step-000002"), &mut child);
        signal(&child, name);
        let status = child.wait().unwrap();
        if !shop.path("run/final").exists() {
            return status;
        }
        fs::remove_dir_all(shop.path("run")).unwrap();
    }
    panic!("ten runs were over before they got {name}");
}

/// The run in pieces left the log and the weights of the one that was never stopped.
fn ended_as_the_whole_one(shop: &Workshop) {
    assert_eq!(shop.metrics("run"), shop.metrics("whole"));
    assert!(shop.bytes("run/final/model.safetensors") == shop.bytes("whole/final/model.safetensors"));
}

fn saved_the_last_step(shop: &Workshop) {
    let last = shop.metrics("run").last().unwrap()["step"].as_u64();
    assert_eq!(Some(newest_step(shop, "run")), last, "the last step that ran is the one that was saved");
}

/// Arguments of an online run that overlaps rounds with steps.
fn online_run(shop: &Workshop) -> Vec<&'static str> {
    shop.write_online("run");
    let settings = ["online.overlap=true", "online.steps_per_round=3", "online.samples_every=1", STEPS];
    let settings = settings.iter().flat_map(|setting| ["--set", setting]);
    ["train", "online.toml"].into_iter().chain(settings).collect()
}

/// As [`resume_and_compare`], for an online run.
pub fn resume_online_and_compare(shop: &Workshop, train: &[&str]) {
    shop.run(&[train, &["--resume"]].concat()).expect(0);
    shop.run(&[train, &["--set", "output=whole"]].concat()).expect(0);
    ended_as_the_whole_one(shop);
    assert_eq!(shop.read("run/samples.jsonl"), shop.read("whole/samples.jsonl"));
}

/// Tables of an environment of two turns, and of a judge, and what their programs do with an item. Rewards depend on the texts.
pub const PROGRAMS: [(&str, &str); 2] = [
    (
        "[online.environment]",
        "case $line in *'\"is_last\":true'*|*'\"turn\":2'*) echo \"{\\\"id\\\":$id,\\\"reward\\\":$((n % 7))}\";; \
         *) echo \"{\\\"id\\\":$id,\\\"messages\\\":[{\\\"role\\\":\\\"user\\\",\\\"content\\\":\\\"$n?\\\"}]}\";; esac",
    ),
    ("[[judges]]\nname = \"own\"\nkind = \"command\"", "echo \"{\\\"id\\\":$id,\\\"score\\\":$((n % 7))}\""),
];

/// The program waits at this item while there is no file `gate`: of the conversations of the fourth step, or of the held-out answers
/// after it.
const WAIT: &str = "k=$((k+1)); if [ $k -eq 75 ] && [ ! -e gate ]; then echo > busy; while [ ! -e gate ]; do sleep 0.05; done; fi";

/// Arguments of a run of policy gradients with one of [`PROGRAMS`]; the one with a judge has held-out prompts.
pub fn run_with_program(shop: &Workshop, (table, each): (&str, &str)) -> Vec<&'static str> {
    shop.write_online("run");
    let toml = shop.read("online.toml").replace("\"online\"", "\"grpo\"");
    let toml = toml.split("[[judges]]").next().unwrap();
    let program = format!(
        "while read -r line; do {WAIT}; id=$(printf %s \"$line\" | sed 's/.*\"id\":\\([0-9]*\\).*/\\1/'); \
         n=$((${{#line}} - ${{#id}})); {each}; done"
    );
    let table = format!("{table}\ntimeout_s = 7200\ncommand = [\"sh\", \"-c\", '''{program}''']\n");
    shop.write("online.toml", &(toml.to_owned() + &table));
    let mut settings = vec!["online.answers=3", "online.samples_every=1", "train.steps=40"];
    if table.contains("judges") {
        settings.extend(["data.eval=prompts.jsonl", "train.eval_every=2", "train.keep_best=eval/reward"]);
    }
    ["train", "online.toml"]
        .into_iter()
        .chain(settings.into_iter().flat_map(|setting| ["--set", setting]))
        .collect()
}

/// Ranks on which these runs are killed.
const PLACES: [&[&str]; 4] = [
    &[],
    &["--set", "compute.devices=cpu:2"],
    &["--set", "compute.devices=cpu:2", "--set", "compute.sharding=zero3"],
    &["--set", "compute.devices=cpu:2", "--set", "compute.pipeline=2"],
];

/// Kills a run while a conversation waits for its program, or held-out answers for their judge.
fn killed_while_its_program_works(program: (&str, &str), place: &[&str]) -> (Workshop, Vec<&'static str>) {
    let shop = Workshop::new();
    let train = run_with_program(&shop, program);
    let mut child = shop.start(&[&train[..], place].concat());
    wait_for(&shop.path("busy"), &mut child);
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    // Also for the program of the killed run, which finds its pipe closed and ends.
    shop.write("gate", "");
    (shop, train)
}

#[test]
fn a_run_that_is_killed_while_its_program_works_ends_the_same() {
    for program in PROGRAMS {
        let (shop, train) = killed_while_its_program_works(program, PLACES[2]);
        resume_online_and_compare(&shop, &train);
    }
}

/// In every place: while the program works, and then again and again at moments that nobody chose.
#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_run_with_a_program_that_is_killed_again_and_again_ends_the_same() {
    for program in PROGRAMS {
        for place in PLACES {
            let (shop, train) = killed_while_its_program_works(program, place);
            for attempt in 0..6 {
                let mut child = shop.start(&[&train[..], place, &["--resume"]].concat());
                std::thread::sleep(Duration::from_millis(150 + 61 * attempt));
                // It may have come to its end by itself, and nothing below depends on how far it came.
                let _ = child.kill();
                child.wait().unwrap();
            }
            resume_online_and_compare(&shop, &train);
        }
    }
}

/// Resumes the stopped run, and compares it with one that was never stopped.
fn resume_and_compare(shop: &Workshop) {
    shop.run(&["train", "dpo.toml", "--set", STEPS, "--resume"]).expect(0);
    shop.run(&["train", "dpo.toml", "--set", STEPS, "--set", "output=whole"]).expect(0);
    ended_as_the_whole_one(shop);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn ctrl_c_saves_exits_with_130_and_resumes_bit_for_bit() {
    let shop = Workshop::new();
    let status = stopped_by(&shop, "-INT");
    assert_eq!(status.code(), Some(130), "{status}");
    saved_the_last_step(&shop);
    resume_and_compare(&shop);
}

/// The step under way is still judged and trained on.
#[test]
#[ignore = "long: runs in .ci/nightly"]
fn an_online_run_that_ctrl_c_stops_resumes_bit_for_bit() {
    let shop = Workshop::new();
    let train = online_run(&shop);
    assert_eq!(interrupted(&shop, "-INT", &train).code(), Some(130));
    saved_the_last_step(&shop);
    resume_online_and_compare(&shop, &train);
}

/// At moments that nobody chose: while it loads, answers, judges, trains or saves; each time on another number of ranks.
#[test]
#[ignore = "long: runs in .ci/nightly"]
fn an_online_run_that_is_killed_again_and_again_ends_the_same() {
    let shop = Workshop::new();
    let train = online_run(&shop);
    for attempt in 0..8 {
        let devices = format!("compute.devices=cpu:{}", 1 + attempt % 3);
        let mut child = shop.start(&[&train[..], &["--resume", "--set", &devices]].concat());
        std::thread::sleep(Duration::from_millis(150 + 61 * attempt));
        // It may have come to its end by itself, and nothing below depends on how far it came.
        let _ = child.kill();
        child.wait().unwrap();
    }
    resume_online_and_compare(&shop, &train);
}

#[test]
fn a_signal_before_the_first_step_ends_the_run_at_once() {
    let shop = Workshop::new();
    // Rows that take minutes to tokenise and to compute the reference of.
    let row = |i: usize| {
        format!("{{\"prompt\": \"{i}\", \"chosen\": \"{}\", \"rejected\": \"no\"}}\n", "yes ".repeat(40))
    };
    fs::write(shop.path("long.jsonl"), (0..100_000).map(row).collect::<String>()).unwrap();
    let run =
        ["train", "dpo.toml", "--set", STEPS, "--set", "data.train=long.jsonl", "--set", "data.cache=cache"];
    for (name, number) in [("-INT", 2), ("-TERM", 15)] {
        let mut child = shop.start(&run);
        // It tokenises.
        wait_for(&shop.path("cache"), &mut child);
        signal(&child, name);
        assert_eq!(child.wait().unwrap().signal(), Some(number), "{name}");
        assert!(!shop.path("run/checkpoints").exists() && !shop.path("run/final").exists());
        fs::remove_dir_all(shop.path("cache")).unwrap();
    }
}

#[test]
fn sigterm_saves_and_exits_with_143() {
    let shop = Workshop::new();
    let status = stopped_by(&shop, "-TERM");
    assert_eq!(status.code(), Some(143), "{status}");
    saved_the_last_step(&shop);
}

#[test]
fn a_closed_terminal_saves_and_exits_with_129() {
    hear_hangups();
    let shop = Workshop::new();
    let status = stopped_by(&shop, "-HUP");
    assert_eq!(status.code(), Some(129), "{status}");
    saved_the_last_step(&shop);
}

#[test]
fn a_run_under_nohup_does_not_hear_that_its_terminal_closes() {
    let shop = Workshop::new();
    let program = shop.command(&[]).get_program().to_os_string();
    let mut child = Command::new("nohup")
        .arg(program)
        .args(["train", "dpo.toml", "--set", STEPS, "--set", "train.save_every=100"])
        .current_dir(shop.path(""))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for(&shop.path("run/checkpoints/step-000100"), &mut child);
    signal(&child, "-HUP");
    assert!(child.wait().unwrap().success());
    assert_eq!(shop.metrics("run").last().unwrap()["step"], 300);
}

#[test]
fn a_run_whose_folder_is_gone_does_not_end_with_success() {
    let shop = Workshop::new();
    let mut child = shop.start(&["train", "dpo.toml", "--set", STEPS]);
    wait_for(&shop.path("run/checkpoints/step-000002"), &mut child);
    fs::rename(shop.path("run"), shop.path("moved")).unwrap();
    let status = child.wait().unwrap();
    assert!(matches!(status.code(), Some(1 | 2)), "{status}");
    assert!(!shop.path("run/final").exists());
}

#[test]
fn metrics_that_are_removed_are_begun_again() {
    let shop = Workshop::new();
    let mut child = shop.start(&["train", "dpo.toml", "--set", STEPS]);
    wait_for(&shop.path("run/checkpoints/step-000002"), &mut child);
    fs::remove_file(shop.path("run/metrics.jsonl")).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(shop.metrics("run").last().unwrap()["step"], 300);
    assert!(shop.read("run/log.txt").contains("metrics.jsonl was removed or replaced"));
}

#[test]
fn a_damaged_line_takes_no_later_line_along_when_a_run_resumes() {
    let shop = Workshop::new();
    shop.run(&["train", "dpo.toml"]).expect(0);
    let damaged = shop.read("run/metrics.jsonl").replacen("{\"step\":2,", "#\"step\":2,", 1);
    shop.write("run/metrics.jsonl", &damaged);
    let resumed = shop.run(&["train", "dpo.toml", "--resume", "--set", "train.steps=8"]).expect(0);
    resumed.says(&["run/metrics.jsonl:2. They stay as they are"]);
    assert_eq!(shop.read("run/metrics.jsonl").lines().count(), 8);
    assert!(shop.read("run/metrics.jsonl").starts_with(&damaged));
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn killed_while_its_state_lies_in_a_file_a_run_leaves_no_file_and_resumes_bit_for_bit() {
    let shop = Workshop::new();
    fs::create_dir(shop.path("scratch")).unwrap();
    let folder = format!("compute.offload_dir={}", shop.path("scratch").display());
    let offload = ["--set", "compute.offload=nvme", "--set", &folder];
    let train = [&["train", "dpo.toml", "--set", STEPS], &offload[..]].concat();
    let status = interrupted(&shop, "-KILL", &train);
    assert_eq!(status.signal(), Some(9), "{status}");
    assert_eq!(entries(&shop.path("scratch")), [""; 0]);
    shop.run(&[&train[..], &["--resume"]].concat()).expect(0);
    shop.run(&["train", "dpo.toml", "--set", STEPS, "--set", "output=whole"]).expect(0);
    ended_as_the_whole_one(&shop);
}

#[test]
fn killed_and_resumed_equals_never_stopped_bit_for_bit() {
    let shop = Workshop::new();
    let status = stopped_by(&shop, "-KILL");
    assert_eq!(status.signal(), Some(9), "{status}");
    resume_and_compare(&shop);
}

/// The step whose checkpoint is being written, if one is.
fn unfinished_step(shop: &Workshop) -> Option<u64> {
    let names = entries(&shop.path("run/checkpoints"));
    names.iter().find_map(|name| name.strip_prefix(".step-")?.strip_suffix(".tmp")?.parse().ok())
}

/// Kills a run again and again in the middle of writing a checkpoint, on one rank and on several; what was complete stays.
fn kill_while_checkpoints_are_written(shop: &Workshop, train: &[&str], num_kills: usize) {
    let (mut hits, mut attempts) = (0, 0);
    while hits < num_kills {
        // Each attempt hits unless a rename is under way when the process stops; 34 misses of 40 do not come by chance.
        assert!(attempts < 40, "{hits} of {attempts} kills came while a checkpoint was written");
        let devices = format!("compute.devices=cpu:{}", 1 + attempts % 3);
        let sharding = format!("compute.sharding={}", ["ddp", "zero3"][attempts % 2]);
        let mut arguments = [train, &["--set", &devices, "--set", &sharding]].concat();
        if attempts > 0 {
            arguments.push("--resume");
        }
        let before = if attempts > 0 { newest_step(shop, "run") } else { 0 };
        let mut child = shop.start(&arguments);
        let start = Instant::now();
        // The third that this process writes, so that there is one to lose and one to keep. While the process is stopped, a
        // test that has to wait for a core misses nothing.
        let is_third = || unfinished_step(shop).is_some_and(|step| step >= before + 6);
        loop {
            while !is_third() {
                assert!(child.try_wait().unwrap().is_none(), "attempt {attempts} ended by itself");
                assert!(start.elapsed() < PATIENCE, "no checkpoint in ten minutes");
            }
            signal(&child, "-STOP");
            if is_third() {
                break;
            }
            signal(&child, "-CONT");
        }
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        assert!(newest_step(shop, "run") >= before + 4, "a complete checkpoint is gone");
        hits += usize::from(unfinished_step(shop).is_some());
        attempts += 1;
    }
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn kills_while_a_checkpoint_is_written_leave_the_one_before() {
    let shop = Workshop::new();
    kill_while_checkpoints_are_written(&shop, &["train", "dpo.toml", "--set", STEPS], 6);
    resume_and_compare(&shop);
    let names = entries(&shop.path("run/checkpoints"));
    assert!(names.iter().all(|name| name.starts_with("step-")), "{names:?}");
}

/// Checkpoints after an evaluation of held-out prompts, and between conversations.
#[test]
#[ignore = "long: runs in .ci/nightly"]
fn kills_while_a_checkpoint_with_answers_is_written_leave_the_one_before() {
    for program in PROGRAMS {
        let shop = Workshop::new();
        let train = run_with_program(&shop, program);
        shop.write("gate", "");
        let train = [&train[..], &["--set", "train.steps=100"]].concat();
        kill_while_checkpoints_are_written(&shop, &train, 3);
        resume_online_and_compare(&shop, &train);
    }
}

/// A tmpfs, unmounted on drop.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// `None`, with the reason printed, where this process may not mount.
    fn mount(at: PathBuf, bytes: u64) -> Option<Self> {
        fs::create_dir_all(&at).unwrap();
        let output = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"])
            .arg(&at)
            .output();
        match output {
            Ok(output) if output.status.success() => Some(Self(at)),
            Ok(output) => {
                skip(&format!("cannot mount a tmpfs: {}", String::from_utf8_lossy(&output.stderr).trim()));
                None
            }
            Err(error) => {
                skip(&format!("cannot run mount: {error}"));
                None
            }
        }
    }

    fn resize(&self, bytes: u64) {
        let option = format!("remount,size={bytes}");
        assert!(Command::new("mount").args(["-o", &option]).arg(&self.0).status().unwrap().success());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

fn size_of(folder: &Path) -> u64 {
    let page = |bytes: u64| bytes.div_ceil(4096) * 4096;
    let sizes = fs::read_dir(folder).unwrap().flatten().map(|entry| match entry.metadata().unwrap() {
        meta if meta.is_dir() => size_of(&entry.path()),
        meta => page(meta.len()),
    });
    sizes.sum()
}

#[test]
fn a_full_disk_leaves_the_old_checkpoint_intact() {
    for devices in ["compute.devices=cpu", "compute.devices=cpu:3"] {
        let shop = Workshop::new();
        shop.run(&["train", "dpo.toml", "--set", "output=whole", "--set", devices]).expect(0);
        let checkpoint = size_of(&shop.path("whole/checkpoints/step-000006"));
        // Room for one checkpoint and half of another.
        let Some(disk) = SmallDisk::mount(shop.path("disk"), checkpoint * 3 / 2) else { return };
        let keep = ["--set", "output=disk/run", "--set", "train.keep=0", "--set", devices];
        let run = [&["train", "dpo.toml"][..], &keep].concat();
        // The log is written meanwhile, and may be what finds the disk full first.
        shop.run(&run).expect(1).says(&["disk/run/", "No space left"]);
        assert_eq!(newest_step(&shop, "disk/run"), 2);
        disk.resize(checkpoint * 16);
        shop.run(&[&run[..], &["--resume"]].concat()).expect(0);
        let [found, expected] =
            ["disk/run", "whole"].map(|run| shop.bytes(&format!("{run}/final/model.safetensors")));
        assert!(found == expected);
    }
}
