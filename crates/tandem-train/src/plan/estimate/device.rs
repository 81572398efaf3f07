//! Device table: rates and memory of device kinds, built in or the user's.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tandem_kernels::{DType, OpCost, ops};

use super::rates::{self, ATTENTION_WGMMA, Bound, OperationRate, Rate};
use crate::{Result, TrainError, size};

/// A kind of device; fields as in `devices.toml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceKind {
    /// Name.
    pub name: String,
    /// Usable memory of a rank in GiB; absent: this machine's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_gib: Option<f64>,
    /// GPUs only: memory of a box's host in GiB, for what its devices offload; absent: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_memory_gib: Option<f64>,
    /// CPU only: cores behind the rates below; its ranks share them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<usize>,
    /// Products of bf16, accumulated in f32, 10¹² operations a second.
    pub bf16_tflops: f64,
    /// Products of f32.
    pub f32_tflops: f64,
    /// Products of E4M3, accumulated in f32; absent: they are taken for those of the compute type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp8_tflops: Option<f64>,
    /// To and from its memory, 10⁹ bytes a second.
    pub bandwidth_gbs: f64,
    /// To another device of the same box, one way.
    pub link_gbs: f64,
    /// To the memory of the host.
    pub host_link_gbs: f64,
    /// To a device of another box.
    pub network_gbs: f64,
    /// Devices of a box.
    pub devices_per_box: usize,
    /// Fraction of the matmul rates that a program reaches.
    pub achievable_product: f64,
    /// Fraction of the bandwidth.
    pub achievable_bandwidth: f64,
    /// Fraction of the link rates.
    pub achievable_link: f64,
    /// Least microseconds of a call: what a small kernel takes with its launch; absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call_us: Option<f64>,
    /// Rates of operations that differ from the ones above, as they are reached: no share applies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rate: Vec<OperationRate>,
}

/// A table of devices.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceTable {
    /// Rows.
    pub device: Vec<DeviceKind>,
}

/// A number of devices of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Devices {
    /// Number of devices and ranks.
    pub count: usize,
    /// Kind.
    pub kind: DeviceKind,
}

/// Ranks of a plan: beyond any cluster.
const MAX_DEVICES: usize = 1 << 20;

impl DeviceTable {
    /// The table that comes with Tandem.
    ///
    /// # Panics
    /// Never: a test reads it.
    pub fn built_in() -> Self {
        toml::from_str(include_str!("../devices.toml")).expect("the table is part of the program")
    }

    /// The user's rows, then built-in rows of other names.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            tandem_files::read_text(path, tandem_files::MAX_CONFIG).map_err(TrainError::io("read", path))?;
        let wrong = |why: String| TrainError::Mismatch {
            reason: format!("{} is not a table of devices: {why}", path.display()),
        };
        let mut table: Self = toml::from_str(&text).map_err(|error| wrong(error.message().to_owned()))?;
        for row in &table.device {
            let rates = [row.bf16_tflops, row.f32_tflops, row.bandwidth_gbs, row.link_gbs, row.host_link_gbs];
            let shares = [row.achievable_product, row.achievable_bandwidth, row.achievable_link];
            let positive = |x: &f64| x.is_finite() && *x > 0.0;
            let optional = row.memory_gib.iter().chain(&row.host_memory_gib).chain(&row.call_us);
            let optional = optional.chain(&row.fp8_tflops);
            let all = rates.iter().chain(&shares).chain([&row.network_gbs]).chain(optional);
            if !all.copied().all(|x| positive(&x)) || row.devices_per_box == 0 || row.cores == Some(0) {
                return Err(wrong(format!("every number of {:?} must be more than 0", row.name)));
            }
            for rate in &row.rate {
                rate.check().map_err(|why| wrong(format!("{:?}: {why}", row.name)))?;
            }
        }
        let own: Vec<_> = table.device.iter().map(|row| plain(&row.name)).collect();
        let others = Self::built_in().device.into_iter().filter(|row| !own.contains(&plain(&row.name)));
        table.device.extend(others);
        Ok(table)
    }

    /// The row that a name means: its own, or one that it begins or ends, if there is one alone.
    pub fn find(&self, name: &str) -> Result<&DeviceKind> {
        let asked = plain(name);
        let names =
            |rows: &[&DeviceKind]| rows.iter().map(|row| row.name.as_str()).collect::<Vec<_>>().join(", ");
        if let Some(row) = self.device.iter().find(|row| plain(&row.name) == asked) {
            return Ok(row);
        }
        let is_part = |row: &&DeviceKind| {
            let name = plain(&row.name);
            !asked.is_empty() && (name.starts_with(&asked) || name.ends_with(&asked))
        };
        let reason = match &self.device.iter().filter(is_part).collect::<Vec<_>>()[..] {
            [only] => return Ok(only),
            [] => {
                let known = names(&self.device.iter().collect::<Vec<_>>());
                format!("no device is called {name:?}; the table has {known}")
            }
            several => format!("{name:?} may be {}: write which", names(several)),
        };
        Err(TrainError::Mismatch { reason })
    }

    /// Finds the row of a GPU by its driver's name, "NVIDIA H100 80GB HBM3": the row with most
    /// words in common, ignoring memory size ("NVIDIA H200" has none). An unknown GPU gets the
    /// rates of an old one, so its plans overestimate time.
    pub fn gpu(&self, name: &str) -> DeviceKind {
        let given = plain(name);
        let is_in = |word: &&str| given.contains(&plain(word));
        let fits = |row: &&DeviceKind| {
            let mut words = row.name.split(['-', ' ']).filter(|word| !word.ends_with("GB"));
            !row.is_processor() && words.all(|word| is_in(&word))
        };
        // "A10" is in "A100" too.
        let likeness = |row: &&DeviceKind| (row.name.split(['-', ' ']).filter(is_in).count(), row.name.len());
        let known = self.device.iter().filter(fits).max_by_key(likeness);
        let old = || self.device.iter().find(|row| !row.is_processor()).expect("the table has a GPU");
        known.unwrap_or_else(old).clone()
    }

    /// Reads "2xA10", "64xH100" or "A10".
    pub fn devices(&self, text: &str) -> Result<Devices> {
        let (count, name) = match text.split_once(['x', 'X']) {
            Some((count, name)) if !count.is_empty() && count.bytes().all(|b| b.is_ascii_digit()) => {
                let range = 1..=MAX_DEVICES;
                let count = count.parse().ok().filter(|count| range.contains(count)).ok_or_else(|| {
                    let reason = format!("{text:?}: {count} is no number of devices; 1 to {MAX_DEVICES} are");
                    TrainError::Mismatch { reason }
                })?;
                (count, name)
            }
            _ => (1, text),
        };
        Ok(Devices { count, kind: self.find(name)?.clone() })
    }
}

/// Normalises a name: case, separators.
fn plain(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

impl DeviceKind {
    /// Returns the rate of attention by warpgroups as a multiple of that by warps: the mean of all shapes where
    /// both were measured. `None` if there is none.
    pub fn wgmma_speedup(&self) -> Option<f64> {
        let of = |name: &str| -> Vec<&OperationRate> {
            self.rate.iter().filter(|rate| rate.operation == name).collect()
        };
        let pairs = ATTENTION_WGMMA.iter().flat_map(|(name, own)| {
            let own = of(own);
            of(name).into_iter().filter_map(move |rate| {
                let other = own.iter().find(|own| own.shape == rate.shape && own.dtype == rate.dtype)?;
                other.tflops.zip(rate.tflops).map(|(own, rate)| own / rate)
            })
        });
        let ratios: Vec<f64> = pairs.collect();
        (!ratios.is_empty()).then(|| ratios.iter().sum::<f64>() / ratios.len() as f64)
    }

    /// Bytes that each of `ranks` ranks can use.
    pub fn memory(&self, ranks: usize) -> Option<u64> {
        let whole = self.memory_gib.map(bytes).or_else(|| self.cores.and_then(|_| host_memory()))?;
        Some(if self.cores.is_some() { whole / ranks.max(1) as u64 } else { whole })
    }

    /// Bytes of the memory of a box's host, if they are known.
    pub fn host_memory(&self) -> Option<u64> {
        self.host_memory_gib.map(bytes)
    }

    /// The same in a box whose host has so many bytes. A CPU's ranks have them themselves.
    #[must_use]
    pub fn with_host_memory(self, bytes: u64) -> Self {
        let gib = Some(bytes as f64 / (1u64 << 30) as f64);
        match self.is_processor() {
            true => Self { memory_gib: gib, ..self },
            false => Self { host_memory_gib: gib, ..self },
        }
    }

    /// Returns whether it is a CPU, which its ranks share.
    pub fn is_processor(&self) -> bool {
        self.cores.is_some()
    }

    /// The same with TF32 matmuls: half the bf16 rate on all cards that have them.
    #[must_use]
    pub fn with_tf32(self, rounds: bool) -> Self {
        Self { f32_tflops: if rounds { self.bf16_tflops / 2.0 } else { self.f32_tflops }, ..self }
    }

    /// Multiply-adds per second of one of `ranks` ranks with `threads` threads.
    pub fn product_rate(&self, dtype: DType, ranks: usize, threads: usize) -> f64 {
        self.peak_of(dtype) * self.achievable_product * self.share(ranks, threads)
    }

    fn peak_of(&self, dtype: DType) -> f64 {
        let peak = match dtype {
            DType::Bf16 => self.bf16_tflops,
            DType::F32 => self.f32_tflops,
        };
        peak * 1e12
    }

    /// Operations a second of an operation's matmuls at the peak.
    pub fn peak(&self, work: &OpCost) -> f64 {
        self.fp8_peak(work).unwrap_or_else(|| self.peak_of(work.dtype))
    }

    /// The same of FP8 products, if the operation is one.
    fn fp8_peak(&self, work: &OpCost) -> Option<f64> {
        self.fp8_tflops.filter(|_| ops::is_fp8_matmul(work.op)).map(|peak| peak * 1e12)
    }

    /// Seconds of a call of one of `ranks` ranks with `threads` threads, and what bounds them: the slower of its
    /// arithmetic and its bytes, each at the operation's own rate if there is one.
    pub fn seconds(&self, work: &OpCost, ranks: usize, threads: usize) -> (f64, Bound) {
        let share = self.share(ranks, threads);
        let arithmetic = work.flops / (self.peak(work) * self.achievable_product * share);
        let memory = work.bytes / self.memory_rate(ranks, threads);
        // "linear" is "linear_fp8" too, but for a device that says how fast it multiplies that.
        let nearest = rates::nearest(&self.rate, work)
            .filter(|rate| self.fp8_peak(work).is_none() || rate.operation == work.op);
        let (arithmetic, memory) = match nearest.map(OperationRate::rate) {
            // Rounding, transposition and scaling are kernels before and after the product's.
            None if self.fp8_peak(work).is_some() => (arithmetic + memory, memory),
            None => (arithmetic, memory),
            Some(Rate::Flops(rate)) => (work.flops / (rate * share), memory),
            // Bytes that caches give are told as such: they say all.
            Some(Rate::Bytes(rate)) => (0.0, work.bytes / (rate * share)),
        };
        let (seconds, bound) =
            if arithmetic > memory { (arithmetic, Bound::Arithmetic) } else { (memory, Bound::Memory) };
        let least = self.call_us.unwrap_or(0.0) * 1e-6;
        if seconds < least { (least, Bound::Call) } else { (seconds, bound) }
    }

    /// Bytes a second that a rank reaches to and from its memory.
    pub fn memory_rate(&self, ranks: usize, threads: usize) -> f64 {
        self.bandwidth_gbs * 1e9 * self.achievable_bandwidth * self.share(ranks, threads)
    }

    /// Bytes a second to the host.
    pub fn host_rate(&self) -> f64 {
        self.host_link_gbs * 1e9 * self.achievable_link
    }

    /// Bytes per second among the ranks from `first` to `last`.
    pub fn link_rate(&self, (first, last): (usize, usize)) -> f64 {
        let is_near = self.is_processor() || first / self.devices_per_box == last / self.devices_per_box;
        if is_near {
            self.link_gbs * 1e9 * self.achievable_link
        } else {
            self.network_gbs * 1e9 * self.achievable_link
        }
    }

    /// A rank's share of a processor.
    fn share(&self, ranks: usize, threads: usize) -> f64 {
        self.cores.map_or(1.0, |cores| (threads as f64 / cores as f64).min(1.0 / ranks.max(1) as f64))
    }
}

/// Bytes of so many GiB.
fn bytes(gib: f64) -> u64 {
    (gib * (1u64 << 30) as f64) as u64
}

/// This machine's memory in bytes, where the system tells.
pub fn host_memory() -> Option<u64> {
    of_meminfo("MemTotal")
}

/// The same with the room for what is swapped out.
pub fn host_memory_and_swap() -> Option<u64> {
    Some(host_memory()? + of_meminfo("SwapTotal").unwrap_or(0))
}

fn of_meminfo(name: &str) -> Option<u64> {
    size::of_proc_line(&std::fs::read_to_string("/proc/meminfo").ok()?, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_people_write_them() {
        let table = DeviceTable::built_in();
        for (text, count, name) in [
            ("2xA10", 2, "A10"),
            ("64xH100", 64, "H100-80GB"),
            ("8xH100-80GB", 8, "H100-80GB"),
            ("a100-40gb", 1, "A100-40GB"),
            ("2x4090", 2, "RTX-4090"),
            ("rtx 4090", 1, "RTX-4090"),
            ("4xcpu", 4, "cpu"),
        ] {
            let found = table.devices(text).unwrap();
            assert_eq!((found.count, &found.kind.name[..]), (count, name), "{text}");
        }
    }

    #[test]
    fn what_is_no_device_is_refused_with_those_that_are() {
        let refusal = |text: &str| DeviceTable::built_in().devices(text).unwrap_err().to_string();
        assert_eq!(refusal("8xA100"), "\"A100\" may be A100-40GB, A100-80GB: write which");
        let all = "A10, A100-40GB, A100-80GB, H100-80GB, H200-141GB, RTX-4090, L40S, cpu";
        assert_eq!(refusal("2xB300"), format!("no device is called \"B300\"; the table has {all}"));
        assert_eq!(refusal("2x"), format!("no device is called \"\"; the table has {all}"));
        assert_eq!(refusal("0xA10"), "\"0xA10\": 0 is no number of devices; 1 to 1048576 are");
        assert_eq!(refusal("two A10"), format!("no device is called \"two A10\"; the table has {all}"));
    }

    #[test]
    fn a_gpu_is_known_by_its_drivers_name() {
        let table = DeviceTable::built_in();
        for (given, name) in [
            ("NVIDIA H100 80GB HBM3", "H100-80GB"),
            ("NVIDIA H200", "H200-141GB"),
            ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
            ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
            ("NVIDIA GeForce RTX 4090", "RTX-4090"),
            ("NVIDIA L40S", "L40S"),
            ("NVIDIA A10", "A10"),
            ("emulated", "A10"),
        ] {
            assert_eq!(table.gpu(given).name, name, "{given}");
        }
    }

    #[test]
    fn ones_own_rows_come_before_those_of_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("devices.toml");
        let mut own = DeviceTable::built_in();
        own.device.retain(|row| row.name == "A10");
        own.device[0].memory_gib = Some(11.0);
        std::fs::write(&path, toml::to_string(&own).unwrap()).unwrap();
        let table = DeviceTable::read(&path).unwrap();
        assert_eq!(table.find("a10").unwrap().memory(2), Some(11 << 30));
        assert_eq!(table.device.len(), DeviceTable::built_in().device.len());
        std::fs::write(&path, toml::to_string(&own).unwrap().replace("600.0", "0.0")).unwrap();
        let error = DeviceTable::read(&path).unwrap_err().to_string();
        assert!(error.ends_with("every number of \"A10\" must be more than 0"), "{error}");
        std::fs::write(&path, "[[device]]\nname = \"x\"\n").unwrap();
        assert!(DeviceTable::read(&path).unwrap_err().to_string().contains("missing field"));
    }

    #[test]
    fn a_rate_of_its_own_replaces_shares_and_a_call_takes_its_least_time() {
        let h100 = DeviceTable::built_in().find("h100").unwrap().clone();
        let rate = OperationRate {
            operation: "head".to_owned(),
            dtype: None,
            shape: None,
            tflops: None,
            gbs: Some(1000.0),
        };
        let h100 = DeviceKind { call_us: Some(2.0), rate: vec![rate], ..h100 };
        let work = |op, flops, bytes| OpCost { op, flops, bytes, dtype: DType::Bf16, shape: [1, 1, 0] };
        assert_eq!(h100.seconds(&work("head_backward", 1e15, 5e12), 1, 1), (5.0, Bound::Memory));
        let (products, memory) = (h100.product_rate(DType::Bf16, 1, 1), h100.memory_rate(1, 1));
        assert_eq!(h100.seconds(&work("linear", 2.0 * products, 1.0), 1, 1), (2.0, Bound::Arithmetic));
        assert_eq!(h100.seconds(&work("rope", 1.0, 3.0 * memory), 1, 1), (3.0, Bound::Memory));
        assert_eq!(h100.seconds(&work("rope", 1.0, 1.0), 1, 1), (2e-6, Bound::Call));
    }

    #[test]
    fn fp8_products_have_their_own_rate_where_a_device_gives_one() {
        let h100 = DeviceTable::built_in().find("h100").unwrap().clone();
        let work = OpCost {
            op: ops::LINEAR_FP8,
            flops: 1979e12 * h100.achievable_product,
            bytes: 0.0,
            dtype: DType::Bf16,
            shape: [8192, 4096, 4096],
        };
        for op in [ops::LINEAR_FP8, ops::LINEAR_FP8_BACKWARD_INPUT] {
            assert_eq!(h100.seconds(&OpCost { op, ..work }, 1, 1), (1.0, Bound::Arithmetic));
            let bytes = h100.memory_rate(1, 1) / 4.0;
            assert_eq!(h100.seconds(&OpCost { op, bytes, ..work }, 1, 1), (1.25, Bound::Arithmetic));
        }
        let without = DeviceKind { fp8_tflops: None, ..h100.clone() };
        let linear = OpCost { op: "linear", ..work };
        assert_eq!(without.seconds(&work, 1, 1), without.seconds(&linear, 1, 1));
        let rate = OperationRate {
            operation: ops::LINEAR_FP8.to_owned(),
            dtype: None,
            shape: None,
            tflops: Some(work.flops / 2e12),
            gbs: None,
        };
        let measured = DeviceKind { rate: [h100.rate.clone(), vec![rate]].concat(), ..h100 };
        assert_eq!(measured.seconds(&work, 1, 1), (2.0, Bound::Arithmetic));
    }

    #[test]
    fn ranks_of_a_processor_share_it_and_boxes_are_told_apart() {
        let table = DeviceTable::built_in();
        let (cpu, h100) = (table.find("cpu").unwrap(), table.find("h100").unwrap());
        let rate = |ranks, threads| cpu.product_rate(DType::F32, ranks, threads);
        assert_eq!((rate(2, 1), rate(1, 1)), (rate(1, 2) / 2.0, rate(1, 2) / 2.0));
        assert_eq!(h100.product_rate(DType::Bf16, 64, 1), 989e12 * 0.6);
        assert_eq!((h100.link_rate((8, 15)), h100.link_rate((7, 8))), (450e9 * 0.7, 50e9 * 0.7));
    }
}
