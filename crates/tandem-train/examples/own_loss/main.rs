//! A loss of your own: a squared hinge on the margin, by the name that run.toml gives it.
//!
//!     cargo run --release -p tandem-train --example own_loss
//!     cargo run --release -p tandem-train --example own_loss -- --resume

use std::path::Path;
use std::sync::atomic::AtomicBool;

use tandem_train::events::{Event, Observer};
use tandem_train::objective::{self, ObjectiveConfig, Pair, PairLoss, Value};
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Config, Outcome, Result, run};

/// `max(0, 1 − β m)²` of the margin m between the two log-ratios, and its derivatives by them.
fn squared_hinge(pair: &Pair, _: &ObjectiveConfig) -> Value {
    let slack = (1.0 - pair.beta * (pair.chosen_ratio - pair.rejected_ratio)).max(0.0);
    let slope = -2.0 * slack * pair.beta;
    Value { loss: slack * slack, d_chosen: slope, d_rejected: -slope }
}

static LOSS: PairLoss = PairLoss::new("squared_hinge", squared_hinge);

/// Trains as `config` says. A run that resumes needs the loss too, so it is registered first.
pub fn train(config: &Path, overrides: &[&str], start: RunDirPolicy) -> Result<Outcome> {
    objective::register(&LOSS);
    let config = Config::load(config, overrides).map_err(Box::new)?;
    run::spawn::train(&config, start, &mut Lines, &AtomicBool::new(false))
}

/// Prints the loss of each step.
struct Lines;

impl Observer for Lines {
    fn event(&mut self, event: &Event<'_>) {
        if let Event::Record(record) = event {
            println!("step {}: loss {:.4}", record.step(), record.get("loss").unwrap_or(f64::NAN));
        }
    }
}

#[allow(dead_code, reason = "a test calls `train`")]
fn main() -> Result<()> {
    let start = match std::env::args().any(|word| word == "--resume") {
        true => RunDirPolicy::Resume,
        false => RunDirPolicy::Overwrite,
    };
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/own_loss/run.toml");
    println!("{:?}", train(&config, &[], start)?);
    Ok(())
}
