//! Levels of vector instructions.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{DType, KernelError, Result};

/// Whether [`Isa::emulate_tiles`] was called.
static EMULATES_TILES: AtomicBool = AtomicBool::new(false);

/// Level of vector instructions; each includes the levels before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Baseline of the target: SSE2 on x86-64, NEON on aarch64.
    Portable,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with bf16 dot products of pairs.
    Avx512Bf16,
    /// AVX-512 with AMX tiles of bf16, which the operating system must have granted.
    Amx,
}

impl Isa {
    /// Every level, lowest first.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// Returns the name in `TANDEM_ISA`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
        }
    }

    /// Returns whether this type goes into tile registers unchanged.
    pub(crate) fn has_tiles_of(self, dtype: DType) -> bool {
        self == Self::Amx && dtype == DType::Bf16
    }

    /// Returns whether this process can run the level: the CPU has it, or tiles are emulated.
    pub fn is_available(self) -> bool {
        let is_emulated = self == Self::Amx && EMULATES_TILES.load(Ordering::Relaxed);
        self.is_native() || is_emulated && Self::Avx512Bf16.is_native()
    }

    /// Declares that this process emulates AMX's instructions, so that a device may be asked for [`Isa::Amx`]. No
    /// device takes it unasked.
    #[doc(hidden)]
    pub fn emulate_tiles() {
        EMULATES_TILES.store(true, Ordering::Relaxed);
    }

    fn is_native(self) -> bool {
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

    /// Returns the best level of this CPU, or the level named by the environment variable
    /// `TANDEM_ISA`.
    ///
    /// # Errors
    /// If the variable names no level, or one that this CPU lacks.
    pub fn detect() -> Result<Self> {
        match std::env::var("TANDEM_ISA") {
            Ok(name) => Self::from_name(&name),
            Err(_) => Ok(Self::best()),
        }
    }

    /// Returns the highest level of this CPU.
    pub fn highest() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_native()).unwrap_or(Self::Portable)
    }

    /// Returns the fastest level of this CPU. Outside of AMX, Intel cores run bf16 dot products at
    /// half their f32 rate (Emerald Rapids: 88 against 179 GFLOP/s per core), AMD cores at twice
    /// (Zen 5: 450 against 225). On Intel without AMX it therefore pays to widen bf16 while
    /// packing.
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

    /// Returns the level if this CPU has it.
    pub(crate) fn require(self) -> Result<Self> {
        if self.is_available() {
            return Ok(self);
        }
        let (name, highest) = (self.name(), Self::highest().name());
        let reason = format!("this CPU lacks `{name}`; its highest level is `{highest}`");
        Err(KernelError::invalid("TANDEM_ISA", reason))
    }
}

/// Returns whether the CPU has AMX and the operating system allows it: tiles are 8 KiB of state per
/// thread, which Linux grants on request.
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
    // SAFETY: every x86-64 CPU has the instruction and this leaf.
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
