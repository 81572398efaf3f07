//! Rates of a GPU's operations at training shapes, as rows of the table of devices.

use tandem_kernels::exact::FixedPointSum;
use tandem_kernels::ops::{
    self, Activation, HeadGradients, HeadScores, HeadShape, HeadWeights, RopeTable, Targets,
};
use tandem_kernels::{
    AdamMoment, DType, Device, Forest, MemoryKind, OpCost, Segment, StateForm, States, StochasticRounding,
};

use super::attention::AttentionCase;
use super::{GpuSizes, Sizes, gbs, least_seconds, numbers, tflops};
use crate::Result;
use crate::plan::estimate::rates::{ATTENTION_WGMMA, OperationRate};

/// Calls of an operation on operands of its own.
pub(super) type Calls = Box<dyn FnMut() -> Result<()>>;

/// Makes operands on a device; [`Calls`] then computes with them.
type Case<'s> = Box<dyn Fn(&Device) -> Result<Calls> + 's>;

/// Matmul of a linear layer.
#[derive(Clone, Copy)]
enum Matmul {
    Forward,
    /// With a term of rank 16.
    ForwardLowRank,
    BackwardInput,
    BackwardWeight,
}

/// Fraction of the rate of a call that is repeated alone that calls of a step reach: 0.78 to 0.82 in four steps on an H200
/// (docs/results/gpu/h200.md).
const IN_A_STEP: f64 = 0.81;

/// Rank of low-rank terms.
const RANK: usize = 16;

/// Measures every operation that takes a considerable share of a step.
pub(super) fn rates(device: &Device, sizes: &GpuSizes) -> Result<Vec<OperationRate>> {
    let mut cases: Vec<Case> = Vec::new();
    for &shape in sizes.layers {
        for matmul in [Matmul::Forward, Matmul::ForwardLowRank, Matmul::BackwardInput, Matmul::BackwardWeight]
        {
            cases.push(Box::new(move |device| linear(device, shape, sizes.common.dtype, matmul)));
        }
    }
    for &sequences in sizes.attention {
        for is_backward in [false, true] {
            cases.push(Box::new(move |device| attention(device, &sizes.common, sequences, is_backward)));
        }
    }
    for is_backward in [false, true] {
        cases.push(Box::new(move |device| head(device, sizes, is_backward)));
        cases.push(Box::new(move |device| rms_norm(device, sizes, is_backward)));
        cases.push(Box::new(move |device| gated(device, sizes, is_backward)));
    }
    cases.push(Box::new(|device| rope(device, sizes)));
    cases.push(Box::new(|device| exact_sum(device, sizes)));
    cases.push(Box::new(|device| adamw(device, sizes)));
    cases.into_iter().map(|case| rate(device, &sizes.common, &case)).collect()
}

/// Measures attention on a device that multiplies it by warpgroups.
pub(super) fn rates_of_wgmma(device: &Device, sizes: &GpuSizes) -> Result<Vec<OperationRate>> {
    let mut rates = Vec::new();
    for (&sequences, (name, own)) in
        sizes.attention.iter().flat_map(|s| ATTENTION_WGMMA.map(|names| (s, names)))
    {
        let case: Case =
            Box::new(move |device| attention(device, &sizes.common, sequences, name.ends_with("_backward")));
        rates.push(OperationRate { operation: own.to_owned(), ..rate(device, &sizes.common, &case)? });
    }
    Ok(rates)
}

/// Rate of a case's only operation in a step: of its arithmetic for matmuls, whose depth is told, and attention, else of
/// its bytes.
fn rate(device: &Device, sizes: &Sizes, case: &Case) -> Result<OperationRate> {
    let dry = Device::meta_of(device.backend());
    let mut calls = case(&dry)?;
    let Device::Meta(ledger) = &dry else { unreachable!("made by Device::meta_of") };
    ledger.begin();
    calls()?;
    let recorded = ledger.calls();
    let [(OpCost { op, flops, bytes, dtype, shape }, 1)] = recorded[..] else {
        unreachable!("a case is one call: {recorded:?}")
    };
    let mut calls = case(device)?;
    let seconds = least_seconds(device, sizes.patience / 4, &mut calls)? / IN_A_STEP;
    let is_arithmetic = shape[2] > 0 || op.starts_with("attention");
    Ok(OperationRate {
        operation: op.to_owned(),
        dtype: Some(dtype.name().to_owned()),
        shape: Some(shape),
        tflops: is_arithmetic.then(|| tflops(flops / seconds)),
        gbs: (!is_arithmetic).then(|| gbs(bytes / seconds)),
    })
}

/// Least microseconds of a call: of a kernel with next to nothing to do, among others like it.
pub(super) fn call_us(device: &Device, sizes: &Sizes) -> Result<f64> {
    let case: Case = Box::new(|device| {
        let (device, mut x) = (device.clone(), numbers(device, 1, 64, DType::F32)?);
        Ok(Box::new(move || Ok(ops::scale(&device, x.view_mut(), 1.0)?)))
    });
    let seconds = least_seconds(device, sizes.patience / 4, &mut case(device)?)?;
    Ok((seconds * 1e7).round().max(1.0) / 10.0)
}

fn linear(
    device: &Device,
    (tokens, outputs, inputs): (usize, usize, usize),
    dtype: DType,
    matmul: Matmul,
) -> Result<Calls> {
    let device = device.clone();
    let x = numbers(&device, tokens, inputs, dtype)?;
    let w = numbers(&device, outputs, inputs, dtype)?;
    let dy = numbers(&device, tokens, outputs, dtype)?;
    let zeros = |rows, cols, dtype| device.zeros(MemoryKind::Scratch, rows, cols, dtype);
    Ok(match matmul {
        Matmul::Forward => {
            let mut y = zeros(tokens, outputs, dtype)?;
            Box::new(move || Ok(ops::linear(&device, x.view(), w.view(), None, None, y.view_mut())?))
        }
        Matmul::ForwardLowRank => {
            let (h, b) = (numbers(&device, tokens, RANK, dtype)?, numbers(&device, outputs, RANK, dtype)?);
            let mut y = zeros(tokens, outputs, dtype)?;
            Box::new(move || {
                let low_rank = ops::LowRank { h: h.view(), b: b.view() };
                Ok(ops::linear_low_rank(&device, x.view(), w.view(), low_rank, None, None, y.view_mut())?)
            })
        }
        Matmul::BackwardInput => {
            let mut dx = zeros(tokens, inputs, dtype)?;
            Box::new(move || {
                Ok(ops::linear_backward_input(&device, dy.view(), w.view(), dx.view_mut(), false)?)
            })
        }
        Matmul::BackwardWeight => {
            let mut dw = zeros(outputs, inputs, DType::F32)?;
            Box::new(move || {
                Ok(ops::linear_backward_weight(&device, dy.view(), x.view(), dw.view_mut(), false)?)
            })
        }
    })
}

/// Sequences that see all that is before them.
fn sequences(count: usize, length: usize) -> Result<Forest> {
    let starts = (0..count).map(|sequence| (sequence * length) as u32);
    let segment = |start| Segment { range: start..start + length as u32, parent: None, first_position: 0 };
    Ok(Forest::new(vec![0; count * length], starts.map(segment).collect(), Vec::new(), 0)?)
}

pub(super) fn attention(
    device: &Device,
    sizes: &Sizes,
    (count, length): (usize, usize),
    is_backward: bool,
) -> Result<Calls> {
    let mut case = AttentionCase::new(device, sizes.heads, sizes.dtype, sequences(count, length)?)?;
    if !is_backward {
        return Ok(Box::new(move || case.forward()));
    }
    // Backward reads what one forward pass has left.
    case.forward()?;
    Ok(Box::new(move || case.backward()))
}

fn head(device: &Device, sizes: &GpuSizes, is_backward: bool) -> Result<Calls> {
    let (device, rows, vocabulary) = (device.clone(), sizes.tokens, sizes.vocabulary);
    let hidden = numbers(&device, rows, sizes.hidden, sizes.common.dtype)?;
    let weight = numbers(&device, vocabulary, sizes.hidden, sizes.common.dtype)?;
    let mut d_hidden = device.zeros(MemoryKind::Scratch, rows, sizes.hidden, DType::F32)?;
    let positions: Vec<u32> = (0..rows as u32).collect();
    let ids: Vec<u32> = (0..rows).map(|row| (row * 7919 % vocabulary) as u32).collect();
    let (shape, mut scores, d_log_prob) = (HeadShape::default(), HeadScores::default(), vec![1e-2; rows]);
    let mut pass = move |is_backward: bool| {
        let targets = Targets { rows: &positions, targets: &ids };
        let call = ops::Head::new(hidden.view(), HeadWeights::new(weight.view(), None), targets, &shape);
        if !is_backward {
            return Ok(ops::head(&device, call, &mut scores)?);
        }
        let gradients = HeadGradients {
            hidden: d_hidden.view_mut(),
            weight: None,
            adds_to_weight: false,
            bias: None,
            h: None,
            b: None,
        };
        Ok(ops::head_backward(&device, call, &scores, &d_log_prob, None, gradients)?)
    };
    // Backward reads the scores of one forward pass.
    if is_backward {
        pass(false)?;
    }
    Ok(Box::new(move || pass(is_backward)))
}

fn rms_norm(device: &Device, sizes: &GpuSizes, is_backward: bool) -> Result<Calls> {
    let (device, rows, cols) = (device.clone(), sizes.tokens, sizes.hidden);
    let x = numbers(&device, rows, cols, DType::F32)?;
    let w = numbers(&device, 1, cols, DType::F32)?;
    let dy = numbers(&device, rows, cols, sizes.common.dtype)?;
    let zeros = |rows, cols, dtype| device.zeros(MemoryKind::Scratch, rows, cols, dtype);
    let (mut y, mut inverse) = (zeros(rows, cols, sizes.common.dtype)?, zeros(1, rows, DType::F32)?);
    let (mut dx, mut dw) = (zeros(rows, cols, DType::F32)?, zeros(1, cols, DType::F32)?);
    Ok(Box::new(move || {
        if is_backward {
            let (inverse_rms, dw) = (inverse.view(), Some(dw.view_mut()));
            let (x, w, dy, dx) = (x.view(), w.view(), dy.view(), dx.view_mut());
            let call = ops::RmsNormBackward { x, w, offset: 0.0, inverse_rms, dy, dx, dw };
            return Ok(ops::rms_norm_backward(&device, call)?);
        }
        let (y, inverse_rms) = (y.view_mut(), inverse.view_mut());
        let call = ops::RmsNorm { x: x.view(), w: w.view(), offset: 0.0, eps: 1e-5, y, inverse_rms };
        Ok(ops::rms_norm(&device, call)?)
    }))
}

fn gated(device: &Device, sizes: &GpuSizes, is_backward: bool) -> Result<Calls> {
    let (device, rows, cols) = (device.clone(), sizes.tokens, sizes.feed_forward);
    let gate_up = numbers(&device, rows, 2 * cols, sizes.common.dtype)?;
    let dh = numbers(&device, rows, cols, sizes.common.dtype)?;
    let mut out = device.zeros(
        MemoryKind::Scratch,
        rows,
        if is_backward { 2 * cols } else { cols },
        sizes.common.dtype,
    )?;
    Ok(Box::new(move || {
        let function = Activation::Silu;
        if is_backward {
            ops::gated_backward(&device, function, gate_up.view(), dh.view(), out.view_mut())?;
        } else {
            ops::gated(&device, function, gate_up.view(), out.view_mut())?;
        }
        Ok(())
    }))
}

fn rope(device: &Device, sizes: &GpuSizes) -> Result<Calls> {
    let (device, head_dim) = (device.clone(), sizes.common.heads.head_dim);
    let half = head_dim / 2;
    let frequencies: Vec<f32> = (0..half).map(|i| 10000f32.powf(-(i as f32) / half as f32)).collect();
    let table = RopeTable::new(&frequencies, sizes.tokens);
    let positions: Vec<u32> = (0..sizes.tokens as u32).collect();
    let mut x = numbers(&device, sizes.tokens, sizes.hidden, sizes.common.dtype)?;
    Ok(Box::new(move || Ok(ops::rope(&device, x.view_mut(), head_dim, &positions, &table, false)?)))
}

fn exact_sum(device: &Device, sizes: &GpuSizes) -> Result<Calls> {
    let device = device.clone();
    let terms = numbers(&device, 1, sizes.common.copied, DType::F32)?;
    let mut sums = FixedPointSum::new(&device, MemoryKind::Scratch, sizes.common.copied)?;
    let limit = tandem_kernels::exact::limit(1 << 20);
    Ok(Box::new(move || Ok(ops::exact_sum(&device, terms.view(), sums.view_mut(), true, limit)?)))
}

fn adamw(device: &Device, sizes: &GpuSizes) -> Result<Calls> {
    let (device, len) = (device.clone(), sizes.common.copied);
    let gradient = numbers(&device, 1, len, DType::F32)?;
    let mut master = numbers(&device, 1, len, DType::F32)?;
    let mut copy = device.zeros(MemoryKind::Scratch, 1, len, sizes.common.dtype)?;
    let zeros = |moment| States::zeros(&device, MemoryKind::Scratch, moment, StateForm::F32, len);
    let (mut m, mut v) = (zeros(AdamMoment::First)?, zeros(AdamMoment::Second)?);
    let mut config =
        ops::AdamW { learning_rate: 1e-6, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, step: 0 };
    Ok(Box::new(move || {
        config.step += 1;
        let [m, v] = [&mut m, &mut v]
            .map(|states| states.range_mut(0..len, StochasticRounding::new(&[config.step], 0)));
        let update = ops::Update::new(gradient.view(), 1.0, master.view_mut(), Some(copy.view_mut()));
        Ok(ops::adamw(&device, &config, update, m, v)?)
    }))
}
