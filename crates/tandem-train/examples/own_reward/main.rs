//! A reward of your own: online DPO towards answers with many vowels.
//!
//!     cargo run --release -p tandem-train --example own_reward

use std::path::Path;
use std::sync::atomic::AtomicBool;

use tandem_train::events::{Event, Observer};
use tandem_train::judges::register;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Config, Outcome, Result, run};

/// Trains as `config` says, whose `[[judges]]` table names the function.
pub fn train(config: &Path, overrides: &[&str], observer: &mut dyn Observer) -> Result<Outcome> {
    register("vowels", |_prompt, answer| {
        let letters = answer.text.chars().filter(|c| c.is_alphabetic()).count();
        let vowels = answer.text.chars().filter(|c| "aeiouAEIOU".contains(*c)).count();
        // An answer without a letter has no score, and trains nothing.
        (letters > 0).then(|| vowels as f64 / letters as f64)
    });
    let config = Config::load(config, overrides).map_err(Box::new)?;
    run::spawn::train(&config, RunDirPolicy::Overwrite, observer, &AtomicBool::new(false))
}

/// Prints the mean reward of each step.
struct Lines;

impl Observer for Lines {
    fn event(&mut self, event: &Event<'_>) {
        if let Event::Record(record) = event {
            let score = record.get("objective/scores").unwrap_or(f64::NAN);
            println!("step {}: mean reward {score:.3}", record.step());
        }
    }
}

#[allow(dead_code, reason = "a test calls `train`")]
fn main() -> Result<()> {
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/own_reward/run.toml");
    println!("{:?}", train(&config, &[], &mut Lines)?);
    Ok(())
}
