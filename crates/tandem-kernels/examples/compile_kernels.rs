//! Compiles every file of CUDA kernels as a run would, and tells what each kernel takes. Needs NVRTC and no GPU:
//!
//! ```sh
//! cargo run --release -p tandem-kernels --example compile_kernels -- [--nvrtc /path/to/libnvrtc.so.13] [--arch sm_80 sm_90a]
//! ```
//!
//! A cell is registers of a thread and bytes of shared memory of a block, with the stack and what is spilled where there is something.
//! Ends with 1 if a file does not compile, or a kernel spills that much time is spent in.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tandem_kernels::cuda::SOURCES;
use tandem_kernels::cuda::driver::Source;
use tandem_kernels::cuda::nvidia::{Compiler, Usage};

/// Kernels that much time is spent in: they begin with these.
const HOT: &[&str] = &[
    "activate",
    "adamw",
    "add",
    "attention",
    "block_squares",
    "cast",
    "causal",
    "column",
    "delta",
    "dropout",
    "embedding",
    "exact",
    "gated",
    "head",
    "layer_norm",
    "product",
    "quantise",
    "rms_norm",
    "rmsprop",
    "rope",
    "row_norms",
    "scale",
    "unpack",
];

/// Hot kernels that are known to spill on a GPU, by their beginnings, and the bytes that they may. The delta rule's
/// hold 64 numbers of a state in 255 registers.
const KNOWN: &[(&str, &str, u32)] = &[
    ("attention_backward_keys_128", "sm_100", 4),
    ("delta_rule_64", "sm_100", 408),
    ("delta_states_64", "sm_100", 352),
    ("delta_adjoints_32", "sm_120", 36),
    ("delta_rule_32", "sm_120", 4),
    ("delta_states_32", "sm_120", 24),
];

/// GPUs that are tried: of Ampere both kinds, Ada Lovelace, Hopper and of Blackwell both kinds, as a run on one compiles
/// for it.
const CAPABILITIES: [(u32, u32); 6] = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)];

/// Outcome of compiling a file for a kind of GPU.
type Outcome = Result<Vec<Usage>, String>;

fn main() -> ExitCode {
    match run(std::env::args().skip(1)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns whether everything compiles and no hot kernel spills that is not [`KNOWN`] to.
fn run(mut arguments: impl Iterator<Item = String>) -> Result<bool, String> {
    let (mut nvrtc, mut targets, mut is_target) = (None, Vec::new(), false);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--nvrtc" => nvrtc = Some(PathBuf::from(arguments.next().ok_or("--nvrtc needs a path")?)),
            "--arch" => is_target = true,
            _ if is_target && argument.starts_with("sm_") => targets.push(argument),
            _ => return Err(format!("{argument:?} is none of --nvrtc PATH and --arch sm_80 …")),
        }
    }
    let compiler = Compiler::open(nvrtc.as_deref()).map_err(|error| error.to_string())?;
    let (major, minor) = compiler.version();
    println!("NVRTC {major}.{minor}");
    if targets.is_empty() {
        targets = CAPABILITIES.iter().filter_map(|&capability| compiler.target(capability).ok()).collect();
        targets.dedup();
    }
    let jobs: Vec<(&Source, &str)> = SOURCES
        .iter()
        .flat_map(|source| targets.iter().map(move |target| (*source, target.as_str())))
        .collect();
    let outcomes = compile(&compiler, &jobs);
    let mut is_fine = true;
    for (source, outcomes) in SOURCES.iter().zip(outcomes.chunks(targets.len())) {
        is_fine &= tell(source.name, &targets, outcomes);
    }
    Ok(is_fine)
}

/// Compiles on all cores.
fn compile(compiler: &Compiler, jobs: &[(&Source, &str)]) -> Vec<Outcome> {
    let (next, outcomes) = (AtomicUsize::new(0), Mutex::new(vec![Ok(Vec::new()); jobs.len()]));
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(source, target)) = jobs.get(index) else { break };
            // Not all GPUs have its instructions.
            if source.only.is_some_and(|only| compiler.target(only).ok().as_deref() != Some(target)) {
                continue;
            }
            let compiled = compiler.compile(source, target, &["--ptxas-options=-v"]);
            let outcome = compiled.map(|compiled| Usage::from_log(&compiled.log)).map_err(|e| e.to_string());
            outcomes.lock().expect("no other thread has panicked")[index] = outcome;
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        (0..threads).for_each(|_| drop(scope.spawn(work)));
    });
    outcomes.into_inner().expect("no thread has panicked")
}

/// Prints what became of a file; whether that is fine.
fn tell(name: &str, targets: &[String], outcomes: &[Outcome]) -> bool {
    let mut is_fine = true;
    for error in outcomes.iter().filter_map(|outcome| outcome.as_ref().err()) {
        println!("\n{error}");
        is_fine = false;
    }
    let of = |index: usize| outcomes[index].as_deref().unwrap_or_default();
    let mut kernels: Vec<&str> =
        (0..outcomes.len()).flat_map(|i| of(i).iter().map(|usage| usage.kernel.as_str())).collect();
    kernels.sort_unstable();
    kernels.dedup();
    if kernels.is_empty() {
        return is_fine;
    }
    println!("\n{name:<40}{}", targets.iter().map(|target| format!("{target:<22}")).collect::<String>());
    for kernel in kernels {
        let mut line = format!("{kernel:<40}");
        for index in 0..outcomes.len() {
            let usage = of(index).iter().find(|usage| usage.kernel == kernel);
            line += &format!("{:<22}", usage.map_or("-".to_owned(), cell));
            let is_hot = HOT.iter().any(|hot| kernel.starts_with(hot));
            let known = KNOWN.iter().find(|known| kernel.starts_with(known.0) && targets[index] == known.1);
            let allowed = known.map_or(0, |known| known.2);
            is_fine &= !is_hot || usage.is_none_or(|usage| usage.spilled <= allowed);
        }
        println!("{}", line.trim_end());
    }
    is_fine
}

fn cell(usage: &Usage) -> String {
    let Usage { registers, shared, stack, spilled, .. } = *usage;
    let mut text = format!("{registers:>3} {shared:>6}");
    if stack > 0 {
        text += &format!(" stack {stack}");
    }
    if spilled > 0 {
        text += &format!(" SPILLS {spilled}");
    }
    text
}
