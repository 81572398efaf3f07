//! Element types of tensors.

use half::bf16;

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    /// 32-bit float: master weights, the residual stream, gradients, optimiser states.
    F32,
    /// bfloat16: compute copies of the weights and activations inside a layer.
    Bf16,
}

impl DType {
    /// Returns the bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// Returns the name used in configs and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that a tensor can hold.
pub trait Element:
    crate::cuda::bytes::Plain + Copy + Send + Sync + PartialEq + std::fmt::Debug + 'static
{
    /// The tag of this type.
    const DTYPE: DType;
    /// Widens to f32 (exact for both types).
    fn to_f32(self) -> f32;
    /// Rounds to nearest even.
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        // Round to nearest even; NaN stays NaN. Branch-free so that loops vectorise.
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let nan = (bits >> 16) | 0x40;
        Self::from_bits(if x.is_nan() { nan as u16 } else { rounded as u16 })
    }
}

/// Runs `$body` with the type alias `$E` bound to the Rust type of a [`DType`].
#[macro_export]
macro_rules! with_element {
    ($dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $E = f32;
                $body
            }
            $crate::DType::Bf16 => {
                type $E = $crate::bf16;
                $body
            }
        }
    };
}
