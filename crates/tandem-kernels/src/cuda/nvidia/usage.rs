//! Resource usage of kernels, from the assembler's log (`--ptxas-options=-v`).

/// Resource usage of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Its name.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Static shared memory of a block, in bytes.
    pub shared: u32,
    /// Local memory of a thread, in bytes: arrays that do not fit into registers.
    pub stack: u32,
    /// Spilled bytes per thread.
    pub spilled: u32,
}

impl Usage {
    /// Parses the usage of every kernel in a compiler log, by name.
    pub fn from_log(log: &str) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for line in log.lines() {
            if let Some((_, rest)) = line.split_once("Compiling entry function '") {
                let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
                all.push(Self { kernel, ..Self::default() });
                continue;
            }
            // Functions that a kernel calls follow it, and count as part of it.
            let Some(usage) = all.last_mut() else { continue };
            if let Some(registers) = before(line, " registers") {
                usage.registers = usage.registers.max(registers);
                usage.shared = usage.shared.max(before(line, " bytes smem").unwrap_or(0));
            }
            usage.stack = usage.stack.max(before(line, " bytes stack frame").unwrap_or(0));
            let spilled =
                [" bytes spill stores", " bytes spill loads"].map(|what| before(line, what).unwrap_or(0));
            usage.spilled += spilled[0].max(spilled[1]);
        }
        all.sort_by(|a, b| a.kernel.cmp(&b.kernel));
        all
    }
}

/// Returns the number before some words.
fn before(line: &str, words: &str) -> Option<u32> {
    let (start, _) = line.split_once(words)?;
    start.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assemblers_words_are_read() {
        let log = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'rms_norm_f32' for 'sm_80'
ptxas info    : Function properties for rms_norm_f32
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 64 bytes smem, 412 bytes cmem[0]
ptxas info    : Compiling entry function 'head' for 'sm_80'
ptxas info    : Function properties for head
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, 412 bytes cmem[0]
";
        let usage = |kernel: &str, [registers, shared, stack, spilled]: [u32; 4]| {
            let kernel = kernel.to_owned();
            Usage { kernel, registers, shared, stack, spilled }
        };
        let expected = [usage("head", [255, 0, 0, 0]), usage("rms_norm_f32", [32, 64, 16, 12])];
        assert_eq!(Usage::from_log(log), expected);
    }
}
