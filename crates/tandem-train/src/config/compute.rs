//! `[compute]`: where and in which arithmetic.

use tandem_kernels::DType;

use super::error::ConfigError;
use super::reader::{Entry, Section};

/// Devices and arithmetic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputeConfig {
    /// Which devices.
    pub devices: Devices,
    /// Compute type; masters are f32. `None` (written "auto") is bf16 where the device multiplies it natively, else f32.
    pub dtype: Option<DType>,
    /// Threads per rank; `None` (written 0) for every core. The number never changes a result.
    pub threads: Option<usize>,
}

/// Which devices to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Devices {
    /// The best there is.
    Auto,
    /// One CPU rank.
    Cpu,
}

impl Devices {
    /// The name in the config.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
        }
    }
}

pub(super) fn parse(mut section: Section) -> Result<ComputeConfig, ConfigError> {
    let config = ComputeConfig {
        devices: section.take("devices").map_or(Ok(Devices::Auto), |e| devices(&e))?,
        dtype: section.take("dtype").map_or(Ok(None), |e| {
            e.one_of(&[("auto", None), ("f32", Some(DType::F32)), ("bf16", Some(DType::Bf16))])
        })?,
        threads: section
            .take("threads")
            .map_or(Ok(0), |e| e.integer(0..=4096))
            .map(|n| (n != 0).then_some(n as usize))?,
    };
    section.finish()?;
    Ok(config)
}

fn devices(entry: &Entry) -> Result<Devices, ConfigError> {
    let text = entry.string()?;
    let (kind, rest) = text.split_once(':').map_or((text, None), |(kind, rest)| (kind, Some(rest)));
    let ranks = rest.map(|rest| rest.split(',').map(str::parse::<usize>).collect::<Result<Vec<_>, _>>());
    match (kind, ranks) {
        ("auto", None) => Ok(Devices::Auto),
        ("cpu", None) => Ok(Devices::Cpu),
        ("cpu", Some(Ok(n))) if n == [1] => Ok(Devices::Cpu),
        ("cpu", Some(Ok(n))) if n.len() == 1 && n[0] > 1 => {
            Err(entry
                .not_yet("several CPU ranks are not there yet; \"cpu\" uses every core through `threads`"))
        }
        ("cuda", None | Some(Ok(_))) => Err(entry.not_yet("GPUs are not there yet; \"cpu\" is")),
        _ => Err(entry.wrong("\"auto\", \"cpu\", \"cpu:4\", \"cuda\" or \"cuda:0,1\"")),
    }
}
