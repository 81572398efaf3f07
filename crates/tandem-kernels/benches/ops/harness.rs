//! Timing and printing.

use std::sync::{Arc, OnceLock};

use tandem_cuda_emulator::Emulated;
use tandem_kernels::cuda::driver::Drivers;
use tandem_kernels::cuda::{self, Options};
use tandem_kernels::{Backend, DType, Device, MemoryKind, Tensor, ops};

use crate::product::ON_A_GPU;

/// Amount of work of an operation, by the limit that it is compared with.
#[derive(Clone, Copy)]
pub enum Work {
    /// Floating-point operations on operands of this type.
    Flops(f64, DType),
    /// Bytes moved between memory and processor.
    Bytes(f64),
}

/// Kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// This machine's processor.
    Cpu,
    /// Its first GPU.
    Cuda,
    /// A GPU that the processor stands in for: to try a bench, not to time it.
    Emulated,
}

impl Place {
    const NAMES: [(&str, Self); 3] = [("cpu", Self::Cpu), ("cuda", Self::Cuda), ("emulated", Self::Emulated)];

    /// A device there, with much of its memory.
    fn device(self, threads: usize, options: Options) -> tandem_kernels::Result<Device> {
        match self {
            Self::Cpu => Device::cpu(threads, 4 << 30),
            Self::Cuda => {
                let driver = cuda::open(0)?;
                let capacity = driver.free_memory()?.saturating_sub(cuda::BESIDE);
                Device::cuda(driver, capacity, options)
            }
            Self::Emulated => Device::cuda(Arc::new(emulated_hopper()), 1 << 30, options),
        }
    }

    /// The driver of a GPU.
    pub fn driver(self) -> Drivers {
        match self {
            Self::Cpu => panic!("a CPU has no algorithms to choose from: --device cuda"),
            Self::Cuda => cuda::open(0).unwrap_or_else(|error| panic!("{error}")),
            Self::Emulated => Arc::new(emulated_hopper()),
        }
    }
}

/// An emulated GPU that has all kernels.
fn emulated_hopper() -> Emulated {
    Emulated::new(1 << 30).with_capability((9, 0))
}

/// The machine's peaks in this run.
#[derive(Clone, Copy, Default)]
pub struct Peak {
    /// f32 multiply-adds, operations per second.
    pub f32: f64,
    /// bf16 multiply-adds, operations per second.
    pub bf16: f64,
    /// Bytes per second from and to memory, read and written ones counted.
    pub memory: f64,
}

/// Products to time: their type, and tokens, inputs and outputs of each layer.
pub struct Products {
    pub dtype: DType,
    pub shapes: Vec<(usize, usize, usize)>,
}

/// The device and the settings of a run.
pub struct Bench {
    /// Device of the operations.
    pub device: Device,
    /// Kind of the device.
    pub place: Place,
    /// Its threads.
    pub threads: usize,
    /// Filled in by the first family.
    pub peak: Peak,
    /// The products that alone are asked for.
    pub products: Option<Products>,
    /// The layers whose algorithms alone are timed.
    pub algorithms: Option<Products>,
    /// True if lines are JSON.
    pub is_json: bool,
    filter: Option<String>,
}

impl Bench {
    /// Settings from the command line and the environment.
    pub fn from_arguments() -> Self {
        // Cargo passes `--bench`.
        let mut words = std::env::args().skip(1).filter(|a| !a.starts_with("--bench"));
        let (mut place, mut is_json, mut asked, mut filter) = (Place::Cpu, false, None, None);
        let (mut algorithms, mut options) = (None, Options::default());
        while let Some(word) = words.next() {
            match &*word {
                "--device" => {
                    let name = words.next().unwrap_or_default();
                    let known = Place::NAMES.into_iter().find(|(known, _)| *known == name);
                    place = known.unwrap_or_else(|| panic!("--device cpu|cuda|emulated, not {name:?}")).1;
                }
                "--attention" => {
                    options.wgmma = match words.next().as_deref() {
                        Some("mma") => false,
                        Some("wgmma") => true,
                        other => panic!("--attention mma|wgmma, not {other:?}"),
                    }
                }
                "--json" => is_json = true,
                "--products" => asked = Some(products(&words.by_ref().collect::<Vec<_>>())),
                "--algorithms" => {
                    let layers: Vec<String> = words.by_ref().collect();
                    let standard = || Products { dtype: DType::Bf16, shapes: ON_A_GPU.to_vec() };
                    algorithms = Some(if layers.is_empty() { standard() } else { products(&layers) });
                }
                // The first other word is the filter.
                _ if !word.starts_with("--") => filter = filter.or(Some(word)),
                _ => {}
            }
        }
        let threads = std::env::var("TANDEM_BENCH_THREADS").ok().and_then(|t| t.parse().ok());
        let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        let device = place
            .device(threads, options)
            .unwrap_or_else(|error| panic!("the device does not start: {error}"));
        let is_json = is_json || asked.is_some();
        Self { device, place, threads, peak: Peak::default(), products: asked, algorithms, filter, is_json }
    }

    /// Returns whether a GPU computes, real or emulated.
    pub fn is_gpu(&self) -> bool {
        self.device.backend() == Backend::Cuda
    }

    /// Returns whether the filter selects the line.
    pub fn wants(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|f| name.contains(f.as_str()))
    }

    /// Times `f`, prints its rate and its share of the peak, and returns the seconds of the median run.
    pub fn line(&self, name: &str, work: Work, f: impl FnMut()) -> f64 {
        let [seconds] = self.median_seconds([f]);
        self.print(name, work, seconds, "");
        seconds
    }

    /// Prints a line for something already timed.
    pub fn print(&self, name: &str, work: Work, seconds: f64, note: &str) {
        if self.is_json {
            println!(r#"{{"name": "{name}", "seconds": {seconds:e}}}"#);
            return;
        }
        let (rate, peak, unit) = match work {
            Work::Flops(flops, DType::F32) => (flops / seconds, self.peak.f32, "GFLOP/s"),
            Work::Flops(flops, DType::Bf16) => (flops / seconds, self.peak.bf16, "GFLOP/s"),
            Work::Bytes(bytes) => (bytes / seconds, self.peak.memory, "GB/s"),
        };
        println!(
            "{name:<58} {:>9.3} ms {:>8.1} {unit:<7} {:>4.0} % of peak{note}",
            seconds * 1e3,
            rate / 1e9,
            100.0 * rate / peak
        );
    }

    /// The median time of each alternative, run in turns so that a slow moment of the machine meets all of them. A GPU's queue is
    /// waited for once a sample, which is then long enough to hide it.
    pub fn median_seconds<F: FnMut(), const N: usize>(&self, mut alternatives: [F; N]) -> [f64; N] {
        let time = |f: &mut F, calls: usize| {
            let start = seconds_now();
            (0..calls).for_each(|_| f());
            self.device.synchronize().expect("it computes");
            (seconds_now() - start) / calls as f64
        };
        let (least, most) = if self.is_gpu() { (20e-3, 21) } else { (1e-3, 101) };
        // Warm-up, which also tells how many calls make a sample.
        let calls = alternatives.each_mut().map(|f| {
            time(f, 1);
            (least / time(f, 1).max(1e-9)).ceil() as usize
        });
        let mut samples: [Vec<f64>; N] = std::array::from_fn(|_| Vec::new());
        let start = seconds_now();
        while samples[0].len() < 5 || (seconds_now() - start < 0.25 && samples[0].len() < most) {
            for (i, f) in alternatives.iter_mut().enumerate() {
                samples[i].push(time(f, calls[i]));
            }
        }
        samples.map(|mut s| {
            s.sort_by(f64::total_cmp);
            s[s.len() / 2]
        })
    }

    /// A matrix of numbers that look like activations.
    pub fn matrix(&self, rows: usize, cols: usize, dtype: DType) -> Tensor {
        let mut tensor = self.device.alloc(MemoryKind::Scratch, rows, cols, dtype).expect("memory");
        let values: Vec<f32> = (0..rows * cols).map(|i| ((i * 7919) % 1009) as f32 / 1009.0 - 0.5).collect();
        ops::write_f32(&self.device, &values, tensor.view_mut()).expect("same size");
        tensor
    }
}

/// `f32 2048x256x688 …`: a type and shapes.
fn products(arguments: &[String]) -> Products {
    const FORM: &str = "--products or --algorithms f32|bf16 TOKENSxINPUTSxOUTPUTS ...";
    let (dtype, shapes) = arguments.split_first().expect(FORM);
    let shape = |text: &String| {
        let mut numbers = text.split('x').map(|n| n.parse().expect(FORM));
        let mut next = || numbers.next().expect(FORM);
        (next(), next(), next())
    };
    let dtype = [DType::F32, DType::Bf16].into_iter().find(|d| d.name() == dtype).expect(FORM);
    Products { dtype, shapes: shapes.iter().map(shape).collect() }
}

/// Activations that take turns: in a step they come from memory, not from the cache that the last call left.
pub struct Turns {
    sets: Vec<[Tensor; 2]>,
    next: usize,
}

impl Turns {
    /// Bytes of all sets together.
    const BYTES: usize = 512 << 20;

    /// One set, or as many as are needed so that none is in the cache when its turn comes.
    pub fn new(is_one: bool, bytes: usize, set: impl Fn() -> [Tensor; 2]) -> Self {
        let count = if is_one { 1 } else { (Self::BYTES / bytes).clamp(2, 200) };
        Self { sets: (0..count).map(|_| set()).collect(), next: 0 }
    }

    /// The next set.
    pub fn next(&mut self) -> &mut [Tensor; 2] {
        self.next = (self.next + 1) % self.sets.len();
        &mut self.sets[self.next]
    }
}

/// Seconds of wall time; or of this thread's processor time, which other processes do not disturb, if
/// `TANDEM_BENCH_CLOCK` is `cpu` (meaningful with one thread).
pub fn seconds_now() -> f64 {
    static CLOCK: OnceLock<libc::clockid_t> = OnceLock::new();
    let clock = *CLOCK.get_or_init(|| match std::env::var("TANDEM_BENCH_CLOCK").as_deref() {
        Ok("cpu") => libc::CLOCK_THREAD_CPUTIME_ID,
        _ => libc::CLOCK_MONOTONIC,
    });
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    let status = unsafe { libc::clock_gettime(clock, &raw mut now) };
    assert_eq!(status, 0, "both clocks exist");
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}
