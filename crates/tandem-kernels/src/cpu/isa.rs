//! Which vector instructions kernels use.

use crate::{DType, KernelError, Result};

/// A level of vector instructions; each includes the ones before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// What the target always has: SSE2 on x86-64, NEON on aarch64.
    Portable,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with products of bf16 pairs.
    Avx512Bf16,
    /// AVX-512 with products of tiles of bf16 (AMX), which the operating system must have granted.
    Amx,
}

impl Isa {
    /// Every level, lowest first.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// The name that `TANDEM_ISA` takes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
        }
    }

    /// Whether numbers of this type go into tile registers as they are.
    pub(crate) fn has_tiles_of(self, dtype: DType) -> bool {
        self == Self::Amx && dtype == DType::Bf16
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            let pairs = avx512 && is_x86_feature_detected!("avx512bf16");
            match self {
                Self::Portable => true,
                Self::Avx2 => avx2,
                Self::Avx512 => avx512,
                Self::Avx512Bf16 => pairs,
                Self::Amx => pairs && has_tiles(),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable
        }
    }

    /// The best level of this processor, or the one that the environment variable `TANDEM_ISA` names.
    ///
    /// # Errors
    /// If the variable names no level, or one that this processor lacks.
    pub fn detect() -> Result<Self> {
        match std::env::var("TANDEM_ISA") {
            Ok(name) => Self::from_name(&name),
            Err(_) => Ok(Self::best()),
        }
    }

    /// The highest level of this processor.
    pub fn highest() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }

    /// The fastest level of this processor. Intel's cores multiply pairs of bf16 outside of AMX at half their f32 rate
    /// (measured on Emerald Rapids: 88 against 179 GFLOP/s a core), AMD's at twice (Zen 5: 450 against 225): on Intel
    /// without AMX it pays to widen bf16 while packing.
    pub fn best() -> Self {
        match Self::highest() {
            Self::Avx512Bf16 if is_intel() => Self::Avx512,
            highest => highest,
        }
    }

    fn from_name(name: &str) -> Result<Self> {
        let Some(isa) = Self::ALL.into_iter().find(|isa| isa.name() == name) else {
            let known = Self::ALL.map(Self::name).join(", ");
            return Err(KernelError::invalid("TANDEM_ISA", format!("`{name}` is none of {known}")));
        };
        isa.require()
    }

    /// The level itself, if this processor has it.
    pub(crate) fn require(self) -> Result<Self> {
        if self.is_available() {
            return Ok(self);
        }
        let (name, highest) = (self.name(), Self::highest().name());
        let reason = format!("this processor lacks `{name}`; the highest level it has is `{highest}`");
        Err(KernelError::invalid("TANDEM_ISA", reason))
    }
}

/// Whether the processor multiplies tiles of bf16 and the operating system lets this process: tiles are 8 KiB of state
/// a thread, which Linux grants on request.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn has_tiles() -> bool {
    use std::sync::LazyLock;
    static GRANTED: LazyLock<bool> = LazyLock::new(|| {
        /// Features 22 (bf16) and 24 (tiles) of leaf 7.
        const TILES: u32 = 1 << 22 | 1 << 24;
        const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_ulong = 18;
        #[allow(unused_unsafe, reason = "safe from Rust 1.92 on")]
        // SAFETY: asked only where AVX-512 was found, which needs leaf 7.
        let leaf = unsafe { std::arch::x86_64::__cpuid_count(7, 0) };
        // SAFETY: grants this process a larger register state, or fails with a number.
        leaf.edx & TILES == TILES
            && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
    });
    *GRANTED
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn has_tiles() -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
fn is_intel() -> bool {
    #[allow(unused_unsafe, reason = "safe from Rust 1.92 on")]
    // SAFETY: every x86-64 processor has the instruction and this leaf.
    let leaf = unsafe { std::arch::x86_64::__cpuid(0) };
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_intel() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_against_the_processor() {
        assert_eq!(Isa::from_name("portable").unwrap(), Isa::Portable);
        let unknown = Isa::from_name("sse9").unwrap_err().to_string();
        assert!(unknown.contains("`sse9`") && unknown.contains("avx512bf16"), "{unknown}");
        for isa in Isa::ALL {
            match isa.require() {
                Ok(found) => assert!(found == isa && isa <= Isa::highest()),
                Err(e) => {
                    assert!(isa > Isa::highest() && e.to_string().contains(isa.name()), "{e}");
                }
            }
        }
        assert!(Isa::best().is_available());
    }
}
