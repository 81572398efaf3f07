//! A training loop of your own: it evaluates after every fourth step, halves the learning rate where the
//! held-out loss does not fall, and ends when it has fallen by a third.
//!
//!     cargo run --release -p tandem-train --example own_loop

use std::path::Path;
use std::sync::atomic::AtomicBool;

use tandem_train::events::Silent;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Config, Outcome, Result, Trainer};

/// Trains as `config` says, but for the loop, and returns the held-out losses.
pub fn train(config: &Path, overrides: &[&str]) -> Result<(Vec<f64>, Outcome)> {
    let (observer, stop) = (&mut Silent, &AtomicBool::new(false));
    let config = Config::load(config, overrides).map_err(Box::new)?;
    let mut trainer = Trainer::new(config, RunDirPolicy::Overwrite, observer)?;
    let mut losses = vec![held_out(&mut trainer)?];
    while trainer.step(observer, stop)? {
        if !trainer.steps_done().is_multiple_of(4) {
            continue;
        }
        let (loss, best) = (held_out(&mut trainer)?, losses.iter().copied().fold(f64::INFINITY, f64::min));
        losses.push(loss);
        if loss < 2.0 / 3.0 * losses[0] {
            break;
        }
        if loss >= best {
            trainer.scale_learning_rate(0.5);
        }
    }
    let outcome = trainer.finish(observer, stop)?;
    Ok((losses, outcome))
}

fn held_out(trainer: &mut Trainer) -> Result<f64> {
    let record = trainer.evaluate(&mut Silent)?;
    Ok(record.and_then(|record| record.get("loss")).unwrap_or(f64::NAN))
}

#[allow(dead_code, reason = "a test calls `train`")]
fn main() -> Result<()> {
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/own_loop/run.toml");
    let (losses, outcome) = train(&config, &[])?;
    println!("held-out losses {losses:.4?}\n{outcome:?}");
    Ok(())
}
