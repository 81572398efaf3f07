//! `tandem doctor`: what this machine has to train with, what is missing, and who has it.

use std::fs;
use std::path::Path;

use anyhow::Context;
use tandem_comm::nccl::Libraries;
use tandem_kernels::cpu::Isa;
use tandem_kernels::cuda;
use tandem_train::plan::device::{DeviceTable, host_memory};
use tandem_train::plan::measure;

use crate::args::DoctorArguments;
use crate::exit::Exit;
use crate::output::print_lines;

/// Bytes of a GiB.
const GIB: f64 = (1u64 << 30) as f64;

pub fn run(arguments: &DoctorArguments) -> anyhow::Result<Exit> {
    let (mut lines, mut gpus) = (vec![processor()], Vec::new());
    match cuda::list() {
        Err(error) => lines.push(line("GPUs", &format!("none can be used: {error}"))),
        Ok(found) => {
            for properties in found {
                let (major, minor) = properties.capability;
                let (state, usable) = state(properties.ordinal);
                lines.push(line(
                    &format!("GPU {}", properties.ordinal),
                    &format!(
                        "{}, {:.1} GiB, compute capability {major}.{minor}, {} multiprocessors; {state}",
                        properties.name,
                        properties.total_memory as f64 / GIB,
                        properties.multiprocessors
                    ),
                ));
                gpus.extend(usable.then_some(properties.ordinal));
            }
        }
    }
    lines.push(line("NCCL", &nccl()));
    let gloo = match cfg!(feature = "gloo") {
        true => "built in: ranks may be processes",
        false => {
            "not in this build: ranks are threads of one process; install libgloo-dev and build with --features gloo"
        }
    };
    lines.push(line("Gloo", gloo));
    print_lines(&lines)?;
    if let Some(file) = &arguments.measure {
        measured(file, &gpus)?;
    }
    Ok(Exit::Done)
}

fn line(what: &str, found: &str) -> String {
    format!("{what:<10} {found}")
}

fn processor() -> String {
    let isa = Isa::detect().map_or_else(|error| error.to_string(), |isa| isa.name().to_owned());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let memory = host_memory().map_or(String::new(), |bytes| format!(", {:.1} GiB", bytes as f64 / GIB));
    line("processor", &format!("{cores} cores{memory}, {isa}"))
}

/// What a GPU is ready for, and whether it can be used.
fn state(ordinal: usize) -> (String, bool) {
    let opened = cuda::open(ordinal).and_then(|driver| Ok((driver.versions(), driver.free_memory()?)));
    match opened {
        Ok((versions, free)) => (format!("{:.1} GiB free; {versions}", free as f64 / GIB), true),
        Err(error) => (format!("cannot be used: {error}"), false),
    }
}

fn nccl() -> String {
    match Libraries::open() {
        Ok(libraries) => format!("{}: numbers go from GPU to GPU", libraries.version()),
        Err(error) => format!("not used: {error}"),
    }
}

/// Measures the processor and the GPUs, and writes a table of devices.
fn measured(file: &Path, gpus: &[usize]) -> anyhow::Result<()> {
    let DeviceTable { mut device } = measure::processor()?;
    for &ordinal in gpus {
        let kind = measure::gpu(ordinal)?;
        if device.iter().all(|known| known.name != kind.name) {
            device.push(kind);
        }
    }
    let table = DeviceTable { device }.to_toml();
    fs::write(file, &table).with_context(|| format!("cannot write {}", file.display()))?;
    print_lines(&[String::new(), table.trim_end().to_owned()])
}
