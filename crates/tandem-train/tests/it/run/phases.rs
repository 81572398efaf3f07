//! Stops in every phase of an online run with an environment, or with held-out prompts: the run goes on as if it had not been stopped.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Map, Value};
use tandem_train::events::Silent;
use tandem_train::metrics::Split;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::spawn;
use tandem_train::{Config, Event, Observer, Outcome};

use super::ranks::log;
use crate::small::Small;

/// Moment at which a run is stopped.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// The program has the first item after this step, or after a start with so many steps done.
    Asked(u64),
    /// A step has a training record: the next phase begins.
    Trained(u64),
    /// Held-out prompts have a record after this step: a checkpoint follows.
    Evaluated(u64),
}

/// Files that tell the program when to wait, and the test that it waits.
struct Signals {
    hold: PathBuf,
    busy: PathBuf,
    gate: PathBuf,
}

impl Signals {
    fn new(folder: &Path) -> Self {
        let [hold, busy, gate] = ["hold", "busy", "gate"].map(|name| folder.join(name));
        Self { hold, busy, gate }
    }

    fn clear(&self) {
        for path in [&self.hold, &self.busy, &self.gate] {
            let _ = fs::remove_file(path);
        }
    }

    /// Shell text that waits as long as there is `hold` and no `gate`.
    fn wait(&self) -> String {
        let [hold, busy, gate] = [&self.hold, &self.busy, &self.gate].map(|path| path.display());
        format!(
            "if [ -e {hold} ] && [ ! -e {gate} ]; then echo > {busy}; while [ ! -e {gate} ]; do sleep 0.05; done; fi"
        )
    }
}

/// Sets `stop` at a moment.
struct Watcher<'a> {
    at: Moment,
    signals: &'a Signals,
    stop: &'a AtomicBool,
}

impl Observer for Watcher<'_> {
    fn event(&mut self, event: &Event<'_>) {
        let is_now = match (event, self.at) {
            (Event::Started { step, .. }, Moment::Asked(at)) => *step == at,
            (Event::Record(record), Moment::Asked(at) | Moment::Trained(at)) => {
                record.split() == Split::Train && record.step() == at
            }
            (Event::Record(record), Moment::Evaluated(at)) => {
                record.split() == Split::Eval && record.step() == at
            }
            _ => false,
        };
        match self.at {
            _ if !is_now => {}
            Moment::Asked(_) => fs::write(&self.signals.hold, "").unwrap(),
            Moment::Trained(_) | Moment::Evaluated(_) => self.stop.store(true, Ordering::Relaxed),
        }
    }
}

/// Trains until this moment; the run must not be over before.
fn stop_at(config: &Config, start: RunDirPolicy, at: Moment, signals: &Signals) {
    signals.clear();
    let (stop, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !signals.busy.exists() && !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(2));
            }
            stop.store(true, Ordering::Relaxed);
        });
        let outcome = spawn::train(config, start, &mut Watcher { at, signals, stop: &stop }, &stop);
        is_over.store(true, Ordering::Relaxed);
        outcome
    });
    fs::write(&signals.gate, "").unwrap();
    assert!(matches!(outcome, Ok(Outcome::Stopped(Some(_)))), "{at:?}: {outcome:?}");
    assert_eq!(signals.busy.exists(), matches!(at, Moment::Asked(_)), "{at:?}");
}

/// Log, samples and final weights.
type Run = (Vec<Map<String, Value>>, String, Vec<u8>);

fn left(small: &Small, name: &str) -> Run {
    let samples = fs::read_to_string(small.path(name).join("samples.jsonl")).unwrap();
    (log(small, name), samples, small.weights(name))
}

fn finish(config: &Config, start: RunDirPolicy) {
    let outcome = spawn::train(config, start, &mut Silent, &AtomicBool::new(false));
    let outcome = outcome.unwrap_or_else(|e| panic!("{}", tandem_train::chain(&e)));
    assert!(matches!(outcome, Outcome::Finished(_)), "{outcome:?}");
}

const COMMON: [&str; 7] = [
    "compute.threads=1",
    "online.samples_every=1",
    "train.learning_rate=3e-3",
    "train.batch_size=5",
    "train.steps=4",
    "data.max_length=200",
    "train.save_every=2",
];

const PLACES: [&[&str]; 4] = [
    &[],
    &["compute.devices=cpu:2"],
    &["compute.devices=cpu:2", "compute.sharding=zero3"],
    &["compute.devices=cpu:2", "compute.pipeline=2"],
];

/// Stops a run at each of these moments in turn, on one place after another, and compares it with one that was never stopped.
fn goes_on(table: &str, own: &[&str], turns: &[(Moment, &[&str])]) {
    let small = Small::new("online");
    let signals = Signals::new(&small.path(""));
    let config = |name: &str, place: &[&str]| {
        let path = small.file(name);
        let text = fs::read_to_string(&path).unwrap();
        let without = text.split("[[judges]]").next().unwrap();
        fs::write(&path, format!("{without}{}", table.replace("WAIT", &signals.wait()))).unwrap();
        Config::load(&path, &[&COMMON, own, place].concat()).unwrap_or_else(|e| panic!("{e}"))
    };
    finish(&config("whole", &[]), RunDirPolicy::Fresh);
    let whole = left(&small, "whole");
    let mut start = RunDirPolicy::Fresh;
    for &(at, place) in turns {
        stop_at(&config("parts", place), start, at, &signals);
        start = RunDirPolicy::Resume;
    }
    finish(&config("parts", &[]), start);
    let found = left(&small, "parts");
    assert_eq!(found.0, whole.0, "{own:?} {turns:?}: the log");
    assert_eq!(found.1, whole.1, "{own:?} {turns:?}: samples");
    assert!(found.2 == whole.2, "{own:?} {turns:?}: the final weights");
}

/// An environment that goes on after the first two turns, with a reward that depends on the texts.
fn environment() -> String {
    let program = "while read -r line; do WAIT; id=$(printf %s \"$line\" | sed 's/.*\"id\":\\([0-9]*\\).*/\\1/'); \
                   n=$((${#line} - ${#id})); case $line in *'\"is_last\":true'*|*'\"turn\":3'*) \
                   echo \"{\\\"id\\\":$id,\\\"reward\\\":$((n % 7))}\";; *) \
                   echo \"{\\\"id\\\":$id,\\\"messages\\\":[{\\\"role\\\":\\\"user\\\",\\\"content\\\":\\\"$n?\\\"}]}\";; esac; done";
    format!("[online.environment]\ntimeout_s = 7200\ncommand = [\"sh\", \"-c\", '''{program}''']\n")
}

/// A judge that likes long answers.
fn judge() -> String {
    let program = "while read -r line; do WAIT; id=$(printf %s \"$line\" | sed 's/.*\"id\":\\([0-9]*\\).*/\\1/'); \
                   echo \"{\\\"id\\\":$id,\\\"score\\\":$((${#line} - ${#id}))}\"; done";
    format!(
        "[[judges]]\nname = \"own\"\nkind = \"command\"\ntimeout_s = 7200\ncommand = [\"sh\", \"-c\", '''{program}''']\n"
    )
}

const GRPO: [&str; 2] = ["method=grpo", "online.answers=3"];

fn held_out() -> [String; 3] {
    let prompts = format!("data.eval={}/../../goldens/online/prompts_conv.jsonl", env!("CARGO_MANIFEST_DIR"));
    [prompts, "train.eval_every=2".to_owned(), "train.keep_best=eval/reward".to_owned()]
}

fn with_held_out(own: &[&str], turns: &[(Moment, &[&str])]) {
    let held_out = held_out();
    let own: Vec<&str> = own.iter().copied().chain(held_out.iter().map(String::as_str)).collect();
    goes_on(&judge(), &own, turns);
}

/// While a conversation is generated, while its program works, and when a checkpoint is to be saved.
#[test]
fn a_conversation_goes_on_as_if_it_had_not_been_stopped() {
    let [one, two, zero3, stages] = PLACES;
    let turns = [
        (Moment::Asked(1), zero3),
        (Moment::Trained(2), stages),
        (Moment::Asked(2), two),
        (Moment::Asked(3), one),
    ];
    goes_on(&environment(), &GRPO, &turns);
}

/// While held-out answers are generated, while they are judged, and when the checkpoint after them is to be saved; also after the
/// last step.
#[test]
fn an_evaluation_goes_on_as_if_it_had_not_been_stopped() {
    let [one, two, zero3, stages] = PLACES;
    let turns = [
        (Moment::Trained(2), zero3),
        (Moment::Asked(2), two),
        (Moment::Evaluated(2), stages),
        (Moment::Trained(3), one),
        (Moment::Trained(4), two),
        (Moment::Asked(4), zero3),
    ];
    with_held_out(&GRPO, &turns);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn nothing_is_lost_at_any_moment_in_any_place() {
    let conversations: [&[&str]; 4] = [
        &GRPO,
        &["method=grpo", "online.answers=3", "online.steps_per_round=2"],
        &["method=grpo", "online.answers=3", "grpo.num_iterations=2"],
        &["method=grpo", "online.answers=3", "adapter.rank=4", "compute.format=nf4"],
    ];
    let answers = [
        &conversations[..],
        &[
            &["online.overlap=true", "online.steps_per_round=2"],
            &["method=grpo", "online.answers=3", "online.overlap=true", "train.ema_decay=0.5"],
        ],
    ]
    .concat();
    for place in PLACES {
        let turns = [Moment::Trained(1), Moment::Asked(2), Moment::Trained(3)].map(|at| (at, place));
        conversations.iter().for_each(|own| goes_on(&environment(), own, &turns));
        for (own, later) in answers.iter().flat_map(|own| {
            [Moment::Evaluated(2), Moment::Trained(4), Moment::Asked(4)].map(|later| (own, later))
        }) {
            with_held_out(own, &[Moment::Trained(2), Moment::Asked(2), later].map(|at| (at, place)));
        }
    }
}
