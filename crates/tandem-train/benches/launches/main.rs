//! What a step costs the host of a GPU: `cargo bench -p tandem-train --bench launches -- RUN.toml [--gpu NAME] [--set KEY=VALUE]…`
//!
//! `--generate MODEL_FOLDER [--completions N]` measures steps of generation instead, with weights of zeros in bf16.
//!
//! `--record FOLDER` writes down instead which operations a step has and which kernels they launch: `trace.json`, a profile of some
//! steps whose times mean nothing, and `kernels.json`, launches a step. The run needs at least 9 steps for it.
//!
//! The run is trained for real on a GPU that does nothing and takes no time, so all the time that passes is the host's: it has to
//! stay well below what the GPU needs, or the GPU waits for work. Beside it stands how long a step takes by the plan for a GPU
//! of the table of devices. What the driver's own calls take is not in it: a launch costs it a few microseconds.

mod generation;
mod idle;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use idle::{Counts, Machine};
use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::plan::estimate::Estimate;
use tandem_train::plan::estimate::device::DeviceTable;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Config, Event, Observer, Options, Plan, Result, Trainer};

/// Steps before those that count, which fill caches.
const WARMUP: usize = 2;

/// Notes when each step ended, and what it had asked for.
struct Watch {
    counts: Arc<Counts>,
    gpu: String,
    output: PathBuf,
    planned: f64,
    steps: usize,
    record: Option<PathBuf>,
    /// Launches of each kernel before the first step that counts.
    kernels: BTreeMap<String, u64>,
    ends: Vec<(Instant, [u64; 6])>,
}

impl Observer for Watch {
    fn event(&mut self, event: &Event) {
        match event {
            Event::Started { steps, .. } => self.steps = *steps as usize,
            Event::Record(_) => {
                self.ends.push((Instant::now(), self.counts.now()));
                if self.ends.len() == WARMUP {
                    self.kernels = self.counts.kernels();
                }
                if self.ends.len() == self.steps {
                    match &self.record {
                        None => tell(self),
                        Some(folder) => write_down(self, folder)
                            .expect("a folder to write into, and a profile of enough steps"),
                    }
                    // The model that comes next is of no use.
                    let _ = std::fs::remove_dir_all(&self.output);
                    std::process::exit(0);
                }
            }
            _ => {}
        }
    }
}

fn main() {
    if let Err(error) = run(std::env::args().skip(1).filter(|argument| argument != "--bench")) {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

fn run(mut arguments: impl Iterator<Item = String>) -> Result<()> {
    let (mut config, mut gpu, mut changes) = (None, "NVIDIA H100 80GB HBM3".to_owned(), Vec::new());
    let (mut record, mut generate, mut completions) = (None, None, 1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--gpu" => gpu = arguments.next().unwrap_or_default(),
            "--record" => record = arguments.next().map(PathBuf::from),
            "--generate" => generate = arguments.next().map(PathBuf::from),
            "--completions" => completions = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(0),
            "--set" => changes.extend(arguments.next()),
            _ => config = Some(argument),
        }
    }
    if let Some(folder) = generate {
        return generation::measure(&folder, completions, &gpu);
    }
    let Some(config) = config else {
        println!("launches: give a run.toml after --");
        return Ok(());
    };
    let output = std::env::temp_dir().join(format!("tandem-launches-{}", std::process::id()));
    changes.extend(["compute.devices=cuda:0".to_owned(), format!("output={}", output.display())]);
    let mut config = Config::load(Path::new(&config), &changes)?;
    // Neither checkpoints nor evaluations.
    (config.train.save_every, config.train.eval_every) = (None, None);
    let counts = Arc::new(Counts::default());
    tandem_kernels::cuda::install_emulator(Machine { counts: counts.clone(), name: gpu.clone() });
    let plan = Plan::make(&config, &RunInputs::open(&config, &mut Silent)?, 0, 1)?;
    let planned = Estimate::new(&plan, &DeviceTable::built_in().gpu(&gpu)).step_seconds;
    println!(
        "{:.1} micro-batches a step, {} tokens in the largest",
        plan.load.rounds, plan.data.max_micro_batch_tokens
    );
    let profile = record.is_some();
    let mut watch =
        Watch { counts, gpu, output, planned, steps: 0, record, kernels: BTreeMap::new(), ends: Vec::new() };
    let options = Options { profile, ..Options::from(RunDirPolicy::Fresh) };
    let mut trainer = Trainer::new(config, options, &mut watch)?;
    trainer.run(&mut watch, &AtomicBool::new(false))?;
    Ok(())
}

/// Writes operations and launches of the steps after the warm-up.
fn write_down(watch: &Watch, folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    std::fs::copy(watch.output.join("profile/rank-0.trace.json"), folder.join("trace.json"))?;
    let steps = (watch.ends.len() - WARMUP) as u64;
    let since = |(name, count): (String, u64)| {
        let count = count - watch.kernels.get(&name).copied().unwrap_or(0);
        (count > 0).then(|| (name, serde_json::Value::from(count as f64 / steps as f64)))
    };
    let kernels: serde_json::Map<_, _> = watch.counts.kernels().into_iter().filter_map(since).collect();
    std::fs::write(folder.join("kernels.json"), format!("{:#}\n", serde_json::Value::from(kernels)))
}

fn tell(watch: &Watch) {
    let steps = &watch.ends[WARMUP.min(watch.ends.len().saturating_sub(2))..];
    let mut seconds: Vec<f64> = steps.windows(2).map(|pair| (pair[1].0 - pair[0].0).as_secs_f64()).collect();
    seconds.sort_by(f64::total_cmp);
    let Some(&median) = seconds.get(seconds.len() / 2) else {
        println!("too few steps: give more");
        return;
    };
    let (first, last) = (steps[0].1, steps[steps.len() - 1].1);
    let [launches, products, copies, waits, idle] =
        [0, 1, 2, 3, 4].map(|n| (last[n] - first[n]) as f64 / seconds.len() as f64);
    println!(
        "a step of the host: {:.2} ms, median of {} (fastest {:.2}); {launches:.0} launches, {products:.0} products, {copies:.0} \
         copies; {:.2} us for each; after {waits:.0} waits the GPU has nothing to do for {:.2} ms together",
        1e3 * median,
        seconds.len(),
        1e3 * seconds[0],
        1e6 * median / (launches + products + copies),
        1e-6 * idle
    );
    println!(
        "a step by the plan for {}: {:.1} ms; host / GPU {:.3}",
        watch.gpu,
        1e3 * watch.planned,
        median / watch.planned
    );
}
