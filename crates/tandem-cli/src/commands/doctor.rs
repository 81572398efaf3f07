//! `tandem doctor`: devices and libraries of this machine, and missing ones.

mod links;

use std::fs;
use std::path::Path;

use anyhow::Context;
use tandem_comm::nccl::Libraries;
use tandem_kernels::cpu::Isa;
use tandem_kernels::cuda;
use tandem_kernels::cuda::nvidia::{self, Inventory};
use tandem_train::chain;
use tandem_train::plan::estimate::device::{DeviceTable, host_memory};
use tandem_train::plan::estimate::measure;

use crate::args::DoctorArguments;
use crate::exit::Exit;
use crate::output::print_lines;

/// Bytes of a GiB.
const GIB: f64 = (1u64 << 30) as f64;

pub(crate) fn run(arguments: &DoctorArguments) -> anyhow::Result<Exit> {
    let (libraries, missing) = libraries();
    let (found, gpus) = gpus(&missing);
    let mut lines = [vec![processor()], found, libraries, vec![processes()]].concat();
    if gpus.len() > 1 {
        match nvidia::links() {
            Ok(links) => lines.extend(links::lines(&links).iter().map(|(what, found)| line(what, found))),
            Err(error) => lines.push(line("links", &chain(&error))),
        }
    }
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
    let isa = Isa::detect().map_or_else(|error| chain(&error), |isa| isa.name().to_owned());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let memory = host_memory().map_or(String::new(), |bytes| format!(", {:.1} GiB", bytes as f64 / GIB));
    line("CPU", &format!("{cores} cores{memory}, {isa}"))
}

/// Prints a line per GPU and returns the usable ordinals.
fn gpus(missing: &[&str]) -> (Vec<String>, Vec<usize>) {
    let found = match cuda::list() {
        Ok(found) => found,
        Err(error) => {
            let why = match missing {
                [] => format!(": {}", chain(&error)),
                missing => format!(" without {}: see below", missing.join(", ")),
            };
            return (vec![line("GPUs", &format!("none can be used{why}"))], Vec::new());
        }
    };
    let (mut lines, mut gpus) = (Vec::new(), Vec::new());
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
    (lines, gpus)
}

/// Readiness of a GPU.
fn state(ordinal: usize) -> (String, bool) {
    match cuda::open(ordinal).and_then(|driver| driver.free_memory()) {
        Ok(free) => (format!("{:.1} GiB free", free as f64 / GIB), true),
        Err(error) => (format!("cannot be used: {}", chain(&error)), false),
    }
}

/// Prints a line per library and returns the missing ones that a GPU needs.
fn libraries() -> (Vec<String>, Vec<&'static str>) {
    let Inventory { driver, nvml, nvrtc, cublaslt } = Inventory::take();
    let nccl = Libraries::find();
    let (mut lines, mut missing) = (Vec::new(), Vec::new());
    for (library, of, is_needed, found) in [
        ("driver", "for CUDA ", true, driver.map_err(|error| chain(&error))),
        ("NVML", "of driver ", false, nvml.map_err(|error| chain(&error))),
        ("NVRTC", "", true, nvrtc.map_err(|error| chain(&error))),
        ("cuBLASLt", "", true, cublaslt.map_err(|error| chain(&error))),
        ("NCCL", "", false, nccl.map_err(|error| chain(&error))),
    ] {
        let found = match found {
            Ok(found) => format!("{of}{}, {}", found.version, found.file.display()),
            Err(why) => {
                missing.extend(is_needed.then_some(library));
                format!("missing: {why}")
            }
        };
        lines.push(line(library, &found));
    }
    (lines, missing)
}

fn processes() -> String {
    line("Processes", "TCP and shared memory, built in; MPI where an MPI launcher starts the ranks")
}

/// Measures the CPU and GPUs and writes a device table.
fn measured(file: &Path, gpus: &[usize]) -> anyhow::Result<()> {
    let DeviceTable { mut device } = measure::processor()?;
    device.extend(measure::gpus(gpus, &measure::OF_A_GPU)?);
    let table = DeviceTable { device }.to_toml();
    fs::write(file, &table).with_context(|| format!("cannot write {}", file.display()))?;
    print_lines(&[String::new(), table.trim_end().to_owned()])
}
