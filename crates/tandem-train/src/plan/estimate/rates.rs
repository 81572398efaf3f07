//! Rates that operations reach, by operation, type and shape.

use serde::{Deserialize, Serialize};
use tandem_kernels::{DType, OpCost};

/// Rate that calls of an operation reach at one shape; fields as in `devices.toml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperationRate {
    /// Name of the operation, or its beginning up to a `_`: "attention" is "attention_backward" too, unless
    /// that has rows of its own.
    pub operation: String,
    /// Type of the operands, "f32" or "bf16"; absent: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<String>,
    /// Rows, columns and depth, where the rate was measured; absent: any. The row of the nearest shape counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<[u32; 3]>,
    /// Floating-point operations, 10¹² a second; a call takes no less than its bytes at the device's rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tflops: Option<f64>,
    /// Bytes read and written at least once, 10⁹ a second; exactly one of both is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gbs: Option<f64>,
}

/// Resource that an operation waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bound {
    /// Arithmetic.
    Arithmetic,
    /// Memory traffic.
    Memory,
    /// The least time of a call.
    Call,
}

/// Names of attention's operations, and those of their kernels that multiply by warpgroups
/// (`compute.attention = "wgmma"`). Rows of the former count where there are none of the latter.
pub const ATTENTION_WGMMA: [(&str, &str); 2] =
    [("attention", "attention_wgmma"), ("attention_backward", "attention_backward_wgmma")];

/// Floating-point operations or bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rate {
    /// Floating-point operations.
    Flops(f64),
    /// Bytes.
    Bytes(f64),
}

impl Bound {
    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Arithmetic => "arithmetic",
            Self::Memory => "memory",
            Self::Call => "call",
        }
    }
}

impl OperationRate {
    /// Returns what is wrong with the row, if anything is.
    pub(super) fn check(&self) -> Result<(), String> {
        let Self { operation, dtype, shape, tflops, gbs } = self;
        let of = format!("the rate of {operation:?}");
        if operation.is_empty() {
            return Err("a rate needs the name of an operation".to_owned());
        }
        if let Some(dtype) = dtype.as_ref().filter(|dtype| !["f32", "bf16"].contains(&dtype.as_str())) {
            return Err(format!("{of} has the type {dtype:?}: \"f32\" and \"bf16\" are known"));
        }
        if shape.is_some_and(|[rows, cols, _]| rows == 0 || cols == 0) {
            return Err(format!("{of} has a shape without rows or columns"));
        }
        match (tflops, gbs) {
            (Some(rate), None) | (None, Some(rate)) if rate.is_finite() && *rate > 0.0 => Ok(()),
            (None, None) | (Some(_), Some(_)) => Err(format!("{of} needs one of tflops and gbs")),
            _ => Err(format!("{of} must be more than 0")),
        }
    }

    /// The rate, a second.
    pub(super) fn rate(&self) -> Rate {
        match (self.tflops, self.gbs) {
            (Some(tflops), _) => Rate::Flops(tflops * 1e12),
            (None, gbs) => Rate::Bytes(gbs.unwrap_or(f64::INFINITY) * 1e9),
        }
    }

    /// Length of the name if it means the operation.
    fn named_length(&self, op: &str) -> Option<usize> {
        let rest = op.strip_prefix(self.operation.as_str())?;
        (rest.is_empty() || rest.starts_with('_')).then_some(self.operation.len())
    }

    fn is_of(&self, dtype: DType) -> bool {
        self.dtype.as_ref().is_none_or(|name| *name == dtype.name())
    }

    /// Distance of two shapes: the sum of the binary logarithms of their sides' ratios.
    fn distance(&self, shape: [u32; 3]) -> f64 {
        let side = |n: u32| f64::from(n.max(1)).log2();
        let sides = self.shape.map(|own| own.into_iter().zip(shape));
        sides.map_or(0.0, |sides| sides.map(|(own, other)| (side(own) - side(other)).abs()).sum())
    }
}

/// Returns the row that counts for an operation: of those with the longest name that means it, the one of
/// the nearest shape.
pub(super) fn nearest<'r>(rates: &'r [OperationRate], work: &OpCost) -> Option<&'r OperationRate> {
    let named = rates.iter().filter(|rate| rate.is_of(work.dtype));
    let named = named.filter_map(|rate| Some((rate.named_length(work.op)?, rate)));
    let order = |(length, rate): &(usize, &OperationRate), (other, than): &(usize, &OperationRate)| {
        other.cmp(length).then_with(|| rate.distance(work.shape).total_cmp(&than.distance(work.shape)))
    };
    named.min_by(order).map(|(_, rate)| rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(operation: &str, dtype: Option<&str>, shape: Option<[u32; 3]>, tflops: f64) -> OperationRate {
        OperationRate {
            operation: operation.to_owned(),
            dtype: dtype.map(str::to_owned),
            shape,
            tflops: Some(tflops),
            gbs: None,
        }
    }

    #[test]
    fn attention_by_warpgroups_has_the_rates_of_the_other_kernels_until_it_has_its_own() {
        let mut rates = vec![rate("attention", None, None, 1.0), rate("attention_backward", None, None, 2.0)];
        let found = |rates: &[OperationRate], op| {
            let work = OpCost { op, flops: 1.0, bytes: 1.0, dtype: DType::Bf16, shape: [8; 3] };
            nearest(rates, &work).map(|rate| rate.tflops.unwrap())
        };
        let all =
            |rates: &[OperationRate]| ATTENTION_WGMMA.map(|(op, own)| [found(rates, op), found(rates, own)]);
        assert_eq!(all(&rates), [[Some(1.0); 2], [Some(2.0); 2]]);
        rates.extend([
            rate("attention_wgmma", None, None, 3.0),
            rate("attention_backward_wgmma", None, None, 4.0),
        ]);
        assert_eq!(all(&rates), [[Some(1.0), Some(3.0)], [Some(2.0), Some(4.0)]]);
    }

    #[test]
    fn the_longest_name_counts_and_then_the_nearest_shape() {
        let rates = [
            rate("linear", None, None, 1.0),
            rate("linear_backward", Some("bf16"), Some([64, 64, 64]), 2.0),
            rate("linear_backward", Some("bf16"), Some([4096, 64, 64]), 3.0),
            rate("linear_backward_weight", Some("f32"), None, 4.0),
            rate("line", None, None, 5.0),
        ];
        let found = |op, dtype, shape| {
            let work = OpCost { op, flops: 12e12, bytes: 1.0, dtype, shape };
            nearest(&rates, &work).map(|found| match found.rate() {
                Rate::Flops(rate) => work.flops / rate,
                Rate::Bytes(rate) => work.bytes / rate,
            })
        };
        assert_eq!(found("linear", DType::Bf16, [8, 8, 8]), Some(12.0));
        assert_eq!(found("linear_backward_input", DType::Bf16, [100, 64, 64]), Some(6.0));
        assert_eq!(found("linear_backward_input", DType::Bf16, [1000, 64, 64]), Some(4.0));
        assert_eq!(found("linear_backward_input", DType::F32, [1000, 64, 64]), Some(12.0));
        assert_eq!(found("linear_backward_weight", DType::F32, [1, 1, 1]), Some(3.0));
        assert_eq!(found("liner", DType::F32, [1, 1, 1]), None);
    }

    #[test]
    fn a_wrong_row_is_refused_with_its_reason() {
        let good = rate("head", None, None, 1.0);
        assert_eq!(good.check(), Ok(()));
        for (wrong, reason) in [
            (rate("", None, None, 1.0), "a rate needs the name of an operation"),
            (
                rate("head", Some("f16"), None, 1.0),
                "the rate of \"head\" has the type \"f16\": \"f32\" and \"bf16\" are known",
            ),
            (
                rate("head", None, Some([0, 1, 1]), 1.0),
                "the rate of \"head\" has a shape without rows or columns",
            ),
            (rate("head", None, None, -1.0), "the rate of \"head\" must be more than 0"),
            (
                OperationRate { gbs: Some(1.0), ..good.clone() },
                "the rate of \"head\" needs one of tflops and gbs",
            ),
            (
                OperationRate { tflops: None, ..good.clone() },
                "the rate of \"head\" needs one of tflops and gbs",
            ),
        ] {
            assert_eq!(wrong.check(), Err(reason.to_owned()));
        }
    }
}
