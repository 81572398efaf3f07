//! `tandem doctor`: devices and libraries of this machine, and missing ones.

mod links;

use std::path::Path;

use serde_json::json;
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
    let mut findings = vec![processor()];
    findings.extend(found);
    findings.extend(libraries);
    findings.push(processes());
    if gpus.len() > 1 {
        match nvidia::links() {
            Ok(links) => {
                let links = links::lines(&links).into_iter();
                findings.extend(links.map(|(what, found)| Finding::new(&what, found, true)));
            }
            Err(error) => findings.push(Finding::new("links", chain(&error), false)),
        }
    }
    if arguments.json {
        let findings = findings
            .iter()
            .map(|Finding { what, found, works }| json!({ "what": what, "found": found, "works": works }));
        let machine = json!({ "usable_gpus": gpus, "findings": findings.collect::<Vec<_>>() });
        print_lines(&[machine.to_string()])?;
    } else {
        print_lines(&findings.iter().map(Finding::line).collect::<Vec<_>>())?;
    }
    if let Some(file) = &arguments.measure {
        measured(file, &gpus)?;
    }
    Ok(Exit::Done)
}

/// A part of the machine, or a library.
struct Finding {
    what: String,
    /// Description, or the reason why it is missing.
    found: String,
    works: bool,
}

impl Finding {
    fn new(what: &str, found: String, works: bool) -> Self {
        Self { what: what.to_owned(), found, works }
    }

    fn line(&self) -> String {
        format!("{:<10} {}", self.what, self.found)
    }
}

fn processor() -> Finding {
    let detected = Isa::detect();
    let works = detected.is_ok();
    let isa = detected.map_or_else(|error| chain(&error), |isa| isa.name().to_owned());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let memory = host_memory().map_or(String::new(), |bytes| format!(", {:.1} GiB", bytes as f64 / GIB));
    Finding::new("CPU", format!("{cores} cores{memory}, {isa}"), works)
}

/// Returns the GPUs, and the ordinals of the usable ones.
fn gpus(missing: &[&str]) -> (Vec<Finding>, Vec<usize>) {
    let found = match cuda::list() {
        Ok(found) => found,
        Err(error) => {
            let why = match missing {
                [] => format!(": {}", chain(&error)),
                missing => format!(" without {}: see below", missing.join(", ")),
            };
            return (vec![Finding::new("GPUs", format!("none can be used{why}"), false)], Vec::new());
        }
    };
    let (mut lines, mut gpus) = (Vec::new(), Vec::new());
    for properties in found {
        let (major, minor) = properties.capability;
        let (state, usable) = state(properties.ordinal);
        lines.push(Finding::new(
            &format!("GPU {}", properties.ordinal),
            format!(
                "{}, {:.1} GiB, compute capability {major}.{minor}, {} multiprocessors; {state}",
                properties.name,
                properties.total_memory as f64 / GIB,
                properties.multiprocessors
            ),
            usable,
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

/// Returns the libraries, and the missing ones that a GPU needs.
fn libraries() -> (Vec<Finding>, Vec<&'static str>) {
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
        let works = found.is_ok();
        let found = match found {
            Ok(found) => format!("{of}{}, {}", found.version, found.file.display()),
            Err(why) => {
                missing.extend(is_needed.then_some(library));
                format!("missing: {why}")
            }
        };
        lines.push(Finding::new(library, found, works));
    }
    (lines, missing)
}

fn processes() -> Finding {
    let found = "TCP and shared memory, built in; MPI where an MPI launcher starts the ranks";
    Finding::new("Processes", found.to_owned(), true)
}

/// Measures the CPU and GPUs and writes a device table.
fn measured(file: &Path, gpus: &[usize]) -> anyhow::Result<()> {
    let DeviceTable { mut device } = measure::processor()?;
    device.extend(measure::gpus(gpus, &measure::OF_A_GPU)?);
    let table = DeviceTable { device };
    let text = table.to_toml();
    tandem_train::replace_file(file, text.as_bytes())?;
    let mut lines = vec![String::new(), text.trim_end().to_owned()];
    for kind in &table.device {
        if let Some(speedup) = kind.wgmma_speedup() {
            let choice = if speedup > 1.0 { "wgmma" } else { "mma" };
            lines.push(format!(
                "\n{}: attention by warpgroups is {speedup:.2} times as fast as by warps: take compute.attention = \
                 \"{choice}\" for bf16",
                kind.name
            ));
        }
    }
    print_lines(&lines)
}
