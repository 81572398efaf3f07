//! Host time of generation's steps.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use tandem_kernels::cuda::{Gpus, Options};
use tandem_kernels::{Backend, DType, Device, MemoryKind};
use tandem_model::decode::Flow;
use tandem_model::{
    Decoder, FlatWeights, Generator, GeneratorOptions, ModelFolder, Request, ResidentWeights, Sampling,
};
use tandem_train::Result;

use super::idle::{Counts, Machine};

const PROMPT: usize = 200;
const STEPS: usize = 400;

/// Prints the time between the ends of steps, and what a step asks of the GPU.
pub fn measure(folder: &Path, completions: usize, gpu: &str) -> Result<()> {
    let spec = ModelFolder::open(folder)?.spec().clone();
    let decoder = Decoder::new(spec, PROMPT + STEPS + 1)?.alone_on(Backend::Cuda);
    let counts = Arc::new(Counts::default());
    let machine = Machine { counts: counts.clone(), name: gpu.to_owned() };
    let device = Device::cuda(machine.open(0)?, 1 << 40, Options::default())?;
    let weights = FlatWeights::zeros(&decoder, &device, MemoryKind::Weights)?;
    let compute = weights.compute_copy(&decoder, &device, MemoryKind::Weights, DType::Bf16)?;
    let options = GeneratorOptions {
        max_batch: completions,
        cache_tokens: completions * (PROMPT + STEPS + 1),
        prefill_tokens: 8192,
        log_probs: false,
        planned_prefill: None,
    };
    let mut generator = Generator::new(&decoder, &device, DType::Bf16, options)?;
    let request = |number| Request {
        prompt: vec![7; PROMPT],
        number,
        num_answers: 1,
        sampling: Sampling::default(),
        max_new_tokens: STEPS,
        stop: Vec::new(),
    };
    for number in 0..completions {
        generator.submit(request(number as u64))?;
    }
    let mut ends = Vec::new();
    let mut source = ResidentWeights::new(&decoder, &weights, Some(&compute));
    while !generator.is_idle() {
        generator.step(&mut source, &mut |_| Flow::Continue)?;
        ends.push((Instant::now(), counts.now()));
    }
    // Those that fill the batch and the caches are no steps like others.
    let steps = &ends[STEPS / 10..STEPS - 1];
    let mut micros: Vec<f64> =
        steps.windows(2).map(|pair| 1e6 * (pair[1].0 - pair[0].0).as_secs_f64()).collect();
    micros.sort_by(f64::total_cmp);
    let (first, last) = (steps[0].1, steps[steps.len() - 1].1);
    let [launches, products, copies, waits, idle, graphs] =
        [0, 1, 2, 3, 4, 5].map(|n| (last[n] - first[n]) as f64 / micros.len() as f64);
    println!(
        "{completions} completions: a step of the host {:.0} us, median of {} (fastest {:.0}); {launches:.1} launches, \
         {products:.1} products, {copies:.1} copies, {graphs:.2} graphs; after {waits:.1} waits the GPU has nothing to do for \
         {:.0} us together",
        micros[micros.len() / 2],
        micros.len(),
        micros[0],
        1e-3 * idle
    );
    Ok(())
}
