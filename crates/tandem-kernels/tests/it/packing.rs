//! Frozen weights: int8 and nf4 are equal to what bitsandbytes makes of them, bit for bit, fp8 to a computation in f64; on
//! every level and number of threads.

use crate::support::{Matrix, Place, devices, numbers};
use safetensors::{Dtype, SafeTensors};
use tandem_kernels::format::{NF4_BLOCK, NF4_BLOCKS, NF4_UNIT, NF4_UNIT_LEN};
use tandem_kernels::ops::{self, StoredFp8, StoredInt8, StoredNf4};
use tandem_kernels::{Backend, Bytes, DType, Device, Format, MemoryKind, bf16};

/// Made by `packing.py` beside it.
const GOLDEN: &[u8] = include_bytes!("../data/packing.safetensors");

const CASES: [&str; 6] = ["tiny", "odd", "zero_blocks", "zeros", "wide", "units"];

struct Golden<'a>(SafeTensors<'a>);

impl<'a> Golden<'a> {
    fn open() -> Self {
        Self(SafeTensors::deserialize(GOLDEN).unwrap())
    }

    fn f32(&self, name: &str) -> Vec<f32> {
        let tensor = self.0.tensor(name).unwrap();
        let data = tensor.data();
        match tensor.dtype() {
            Dtype::F32 => data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::BF16 => {
                data.as_chunks().0.iter().map(|b| bf16::from_bits(u16::from_le_bytes(*b)).to_f32()).collect()
            }
            other => panic!("{name} is {other:?}"),
        }
    }

    fn bytes(&self, name: &str) -> &'a [u8] {
        self.0.tensor(name).unwrap().data()
    }

    fn shape(&self, case: &str) -> (usize, usize) {
        let tensor = self.0.tensor(&format!("{case}.weight")).unwrap();
        (tensor.shape()[0], tensor.shape()[1])
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Fills a piece with a pattern, so that bytes that are not overwritten show.
fn spoil(device: &Device, packed: &mut Bytes) {
    device.write_bytes(&vec![0xa5; packed.len()], packed.view_mut()).unwrap();
}

fn packed(device: &Device, values: &Matrix, (rows, cols): (usize, usize), format: Format) -> Bytes {
    let mut packed = Bytes::new(device, MemoryKind::Weights, format.packed_len(rows, cols)).unwrap();
    spoil(device, &mut packed);
    ops::pack(device, values.view(), format, packed.view_mut()).unwrap();
    packed
}

fn unpacked(
    device: &Device,
    packed: &Bytes,
    (rows, cols): (usize, usize),
    format: Format,
    to: DType,
) -> Vec<f32> {
    let mut values = Matrix::new(device, 9, (rows, cols), to, 0);
    ops::unpack(device, packed.view(), format, values.view_mut()).unwrap();
    values.read(device)
}

/// The parts of a piece of nf4, as bitsandbytes keeps them; what is unused is zero.
fn parts(packed: &[u8], len: usize) -> (Vec<u8>, Vec<u8>, Vec<f32>, Vec<f32>) {
    let (mut codes, mut absmax, mut nested, mut offsets) = (vec![], vec![], vec![], vec![]);
    for unit in packed.chunks_exact(NF4_UNIT_LEN) {
        let number = |at: usize| f32::from_le_bytes(unit[at..at + 4].try_into().unwrap());
        codes.extend_from_slice(&unit[..NF4_UNIT / 2]);
        absmax.extend_from_slice(&unit[NF4_UNIT / 2..][..NF4_BLOCKS]);
        nested.push(number(NF4_UNIT / 2 + NF4_BLOCKS));
        offsets.push(number(NF4_UNIT / 2 + NF4_BLOCKS + 4));
        assert!(unit[NF4_UNIT / 2 + NF4_BLOCKS + 8..].iter().all(|b| *b == 0));
    }
    for (bytes, used) in [(&mut codes, len.div_ceil(2)), (&mut absmax, len.div_ceil(NF4_BLOCK))] {
        assert!(bytes[used..].iter().all(|b| *b == 0), "the rest of the last unit is zero");
        bytes.truncate(used);
    }
    (codes, absmax, nested, offsets)
}

#[test]
fn nf4_equals_bitsandbytes() {
    let golden = Golden::open();
    for threads in [1, 3] {
        for (isa, device) in devices(threads) {
            for case in CASES {
                let what = format!("{case} on {} with {threads} threads", isa.name());
                let (shape, weight) = (golden.shape(case), golden.f32(&format!("{case}.weight")));
                let get = |part: &str| golden.f32(&format!("{case}.{part}"));
                for dtype in [DType::F32, DType::Bf16] {
                    let values = Matrix::from_values(&device, &weight, shape, dtype, 0);
                    if values.values.iter().zip(&weight).any(|(a, b)| *a != f64::from(*b)) {
                        continue;
                    }
                    let packed = packed(&device, &values, shape, Format::Nf4);
                    let (codes, absmax, nested, offsets) =
                        parts(&packed.read(&device).unwrap(), weight.len());
                    assert!(codes == golden.bytes(&format!("{case}.codes")), "{what}: codes");
                    assert_eq!(bits(&nested), bits(&get("nested_absmax")), "{what}: nested absmax");
                    let offset = get("nested_offset")[0];
                    assert!(
                        offsets.iter().all(|o| o.to_bits() == offset.to_bits()),
                        "{what}: {offsets:?} {offset}"
                    );
                    assert!(absmax == golden.bytes(&format!("{case}.absmax")), "{what}: absmax");
                    for (to, part) in [(DType::F32, "out"), (DType::Bf16, "out_bf16")] {
                        let (found, expected) =
                            (unpacked(&device, &packed, shape, Format::Nf4, to), get(part));
                        let last = &found[found.len() - expected.len()..];
                        assert!(bits(last) == bits(&expected), "{what}: weights as {to}");
                    }
                }
            }
        }
    }
}

#[test]
fn int8_equals_bitsandbytes() {
    let golden = Golden::open();
    for threads in [1, 3] {
        for (isa, device) in devices(threads) {
            for case in CASES {
                let what = format!("{case} on {} with {threads} threads", isa.name());
                let ((rows, cols), weight) = (golden.shape(case), golden.f32(&format!("{case}.weight")));
                let values = Matrix::from_values(&device, &weight, (rows, cols), DType::F32, 0);
                let packed = packed(&device, &values, (rows, cols), Format::Int8);
                let (codes, scales) =
                    (golden.bytes(&format!("{case}.int8")), golden.f32(&format!("{case}.scb")));
                let units = packed.read(&device).unwrap();
                for (row, unit) in units.chunks_exact(Format::Int8.unit_len(cols)).enumerate() {
                    let (found, rest) = unit.split_at(cols);
                    assert_eq!(found, &codes[row * cols..][..cols], "{what}: codes of row {row}");
                    assert_eq!(rest[..4], scales[row].to_le_bytes(), "{what}: scale of row {row}");
                    assert!(rest[4..].iter().all(|b| *b == 0), "{what}: rest of row {row}");
                }
                let expected = golden.f32(&format!("{case}.int8_out"));
                for to in [DType::F32, DType::Bf16] {
                    let found = unpacked(&device, &packed, (rows, cols), Format::Int8, to);
                    let round = |x: &f32| if to == DType::F32 { *x } else { bf16::from_f32(*x).to_f32() };
                    let expected: Vec<f32> = expected.iter().map(round).collect();
                    assert_eq!(&found[found.len() - expected.len()..], expected, "{what}: weights as {to}");
                }
            }
        }
    }
}

/// Number of a code of E4M3 by its definition.
fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-9),
        _ => (8.0 + mantissa) * 2f64.powi(exponent - 10),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Scale, codes and unpacked weights of fp8 beside f64, with all codes, ties between them and numbers that are too small.
#[test]
fn fp8_rounds_to_the_nearest_code_of_a_row() {
    let codes = || (0..=0x7eu8).flat_map(|code| [code, code | 0x80]);
    let ties = (0..0x7eu8).map(|code| f64::midpoint(e4m3(code), e4m3(code + 1)));
    // Rows of a scale that is a power of two hold codes and ties as they are.
    let exact: Vec<f32> = codes().map(e4m3).chain(ties).map(|x| x as f32).collect();
    let cols = exact.len();
    let power = |e: i32| exact.iter().map(|x| x * 2f32.powi(e)).collect::<Vec<_>>();
    let mut rows = vec![power(0), power(-7), power(20), vec![0.0; cols], vec![1e-38; cols]];
    rows.extend(weights(5, (20, cols)).chunks(cols).map(<[f32]>::to_vec));
    let (shape, values) = ((rows.len(), cols), rows.concat());
    for (isa, device) in devices(2) {
        for dtype in [DType::F32, DType::Bf16] {
            let values = Matrix::from_values(&device, &values, shape, dtype, 0);
            let values_f32 = values.read(&device);
            let packed = packed(&device, &values, shape, Format::Fp8);
            let units = packed.read(&device).unwrap();
            let [wide, narrow] =
                [DType::F32, DType::Bf16].map(|to| unpacked(&device, &packed, shape, Format::Fp8, to));
            for (row, unit) in units.chunks_exact(Format::Fp8.unit_len(cols)).enumerate() {
                let (codes, rest) = unit.split_at(cols);
                let what = format!("row {row} of {dtype} on {}", isa.name());
                let values = &values_f32[row * cols..][..cols];
                let largest = values.iter().fold(0.0f64, |m, x| m.max(f64::from(x.abs())));
                let scale = (largest / 448.0) as f32;
                let scale = if scale.is_normal() { scale } else { 0.0 };
                assert_eq!(rest[..4], scale.to_le_bytes(), "{what}: scale");
                assert!(rest[4..].iter().all(|b| *b == 0), "{what}: rest");
                for (col, (&value, &code)) in values.iter().zip(codes).enumerate() {
                    let weight = (e4m3(code) * f64::from(scale)) as f32;
                    assert_eq!(wide[row * cols + col].to_bits(), weight.to_bits(), "{what}, column {col}");
                    let rounded = bf16::from_f32(weight).to_f32();
                    assert_eq!(narrow[row * cols + col].to_bits(), rounded.to_bits(), "{what}, column {col}");
                    if scale == 0.0 {
                        assert_eq!(code, 0, "{what}, column {col}");
                        continue;
                    }
                    // The quotient in f32, as the format says.
                    let value = f64::from((f64::from(value) / f64::from(scale)) as f32);
                    let distance = |code: u8| (e4m3(code) - value).abs();
                    let magnitude = code & 0x7f;
                    assert!(magnitude < 0x7f && (code >> 7 == 1) == value.is_sign_negative(), "{what}");
                    for other in [magnitude.saturating_sub(1), (magnitude + 1).min(0x7e)] {
                        let other = other | code & 0x80;
                        let nearer = distance(code) < distance(other);
                        let even = distance(code) == distance(other) && code & 1 == 0;
                        assert!(other == code || nearer || even, "{what}: {value} became {code:#x}");
                    }
                }
            }
        }
    }
}

/// Quantised weights of a checkpoint become the bytes that packing the weights yields.
#[test]
fn stored_weights_become_the_same_bytes() {
    let golden = Golden::open();
    let (quant_map, nested_quant_map) = (golden.f32("quant_map"), golden.f32("nested_quant_map"));
    for (isa, device) in devices(2) {
        for case in CASES {
            let (rows, cols) = golden.shape(case);
            let weight = golden.f32(&format!("{case}.weight"));
            let values = Matrix::from_values(&device, &weight, (rows, cols), DType::F32, 0);
            let nested_absmax = golden.f32(&format!("{case}.nested_absmax"));
            let stored = StoredNf4 {
                weight: golden.bytes(&format!("{case}.codes")),
                absmax: golden.bytes(&format!("{case}.absmax")),
                quant_map: &quant_map,
                nested_absmax: &nested_absmax,
                nested_quant_map: &nested_quant_map,
                nested_offset: golden.f32(&format!("{case}.nested_offset"))[0],
                blocksize: 64,
                nested_blocksize: 256,
            };
            let expected = packed(&device, &values, (rows, cols), Format::Nf4);
            let mut found = Bytes::new(&device, MemoryKind::Weights, expected.len()).unwrap();
            spoil(&device, &mut found);
            ops::pack_stored_nf4(&device, &stored, rows, cols, found.view_mut()).unwrap();
            let [found, bytes] = [&found, &expected].map(|bytes| bytes.read(&device).unwrap());
            assert!(found == bytes, "{case} on {}", isa.name());
            let unpack = |packed: &Bytes, format| unpacked(&device, packed, (rows, cols), format, DType::F32);
            let nf4 = unpack(&expected, Format::Nf4);
            for (first, len) in parts_of(rows * cols) {
                let mut values = vec![f32::NAN; len];
                stored.read(first, &mut values);
                assert_eq!(bits(&values), bits(&nf4[first..first + len]), "{case}: {len} from {first}");
            }

            let expected = packed(&device, &values, (rows, cols), Format::Int8);
            let mut found = Bytes::new(&device, MemoryKind::Weights, expected.len()).unwrap();
            spoil(&device, &mut found);
            let scb = golden.f32(&format!("{case}.scb"));
            let stored = StoredInt8 { weight: golden.bytes(&format!("{case}.int8")), scb: &scb };
            ops::pack_stored_int8(&device, &stored, rows, cols, found.view_mut()).unwrap();
            let [found, bytes] = [&found, &expected].map(|bytes| bytes.read(&device).unwrap());
            assert!(found == bytes, "{case} on {}", isa.name());
            let int8 = unpack(&expected, Format::Int8);
            for (first, len) in parts_of(rows * cols) {
                let mut values = vec![f32::NAN; len];
                stored.read(first, &mut values);
                assert_eq!(bits(&values), bits(&int8[first..first + len]), "{case}: {len} from {first}");
            }
        }
    }
}

/// FP8 weights of a checkpoint are their codes' numbers times the scale of the matrix, the row or the block.
#[test]
fn stored_fp8_weights_have_the_scales_of_their_blocks() {
    let (rows, cols) = (300usize, 201usize);
    let codes: Vec<u8> =
        (0..rows * cols).map(|i| ((i * 7 % 254) as u8 % 0x7f) | (((i & 1) as u8) << 7)).collect();
    for block in [[rows, cols], [1, cols], [128, 128], [128, 300]] {
        let wide = cols.div_ceil(block[1]);
        let scales: Vec<f32> = numbers(8, rows.div_ceil(block[0]) * wide).iter().map(|x| x + 1.5).collect();
        let stored = StoredFp8 { weight: &codes, scales: &scales, block };
        stored.check(rows, cols).unwrap();
        let weight = |i: usize| {
            let (row, col) = (i / cols, i % cols);
            let scale = scales[row / block[0] * wide + col / block[1]];
            ((e4m3(codes[i]) * f64::from(scale)) as f32).to_bits()
        };
        for (first, len) in parts_of(rows * cols) {
            let mut values = vec![f32::NAN; len];
            stored.read(cols, first, &mut values);
            let expected: Vec<u32> = (first..first + len).map(weight).collect();
            assert_eq!(bits(&values), expected, "{block:?}: {len} from {first}");
        }
        for (isa, device) in devices(2) {
            let len = Format::Fp8.packed_len(rows, cols);
            let mut packed = Bytes::new(&device, MemoryKind::Weights, len).unwrap();
            spoil(&device, &mut packed);
            let packing = ops::pack_stored_fp8(&device, &stored, rows, cols, packed.view_mut());
            if block[1] < cols {
                let expected =
                    "pack_stored_fp8: a scale per 128 columns, but a row of 201 can have one scale alone";
                assert_eq!(packing.unwrap_err().to_string(), expected);
                continue;
            }
            packing.unwrap();
            let found = unpacked(&device, &packed, (rows, cols), Format::Fp8, DType::F32);
            let expected: Vec<u32> = (0..rows * cols).map(weight).collect();
            assert!(bits(&found) == expected, "{block:?} on {}", isa.name());
        }
    }
    let stored = StoredFp8 { weight: &codes, scales: &[1.0; 5], block: [128, 128] };
    let error = stored.check(rows, cols).unwrap_err();
    assert_eq!(error, "scales has 5 elements, expected 6 for a 300x201 matrix");
    assert!(!stored.has_nan());
    for nan in [0x7f, 0xff] {
        let mut codes = codes.clone();
        codes[rows * cols - 1] = nan;
        assert!(StoredFp8 { weight: &codes, ..stored }.has_nan());
    }
}

/// All of a matrix, and a part that begins and ends inside a pair, a block and a row.
fn parts_of(len: usize) -> [(usize, usize); 2] {
    [(0, len), ((len / 3) | 1, len / 2)]
}

#[test]
fn stored_weights_that_do_not_fit_are_refused() {
    let golden = Golden::open();
    let device = Device::cpu(1, 1 << 30).unwrap();
    let (mut quant_map, mut nested_quant_map) = (golden.f32("quant_map"), golden.f32("nested_quant_map"));
    let nested_absmax = golden.f32("tiny.nested_absmax");
    let stored = StoredNf4 {
        weight: golden.bytes("tiny.codes"),
        absmax: golden.bytes("tiny.absmax"),
        quant_map: &quant_map.clone(),
        nested_absmax: &nested_absmax,
        nested_quant_map: &nested_quant_map.clone(),
        nested_offset: 0.1,
        blocksize: 64,
        nested_blocksize: 256,
    };
    let refused = |stored: &StoredNf4, (rows, cols): (usize, usize)| {
        let mut packed = Bytes::new(&device, MemoryKind::Weights, NF4_UNIT_LEN).unwrap();
        packed.as_mut_slice().fill(0xa5);
        let error = ops::pack_stored_nf4(&device, stored, rows, cols, packed.view_mut()).unwrap_err();
        assert!(packed.as_slice().iter().all(|b| *b == 0xa5), "nothing is written");
        error.to_string()
    };
    assert_eq!(
        refused(&stored, (64, 66)),
        "pack_stored_nf4: weight has 2048 elements, expected 2112 for a 64x66 matrix"
    );
    let short = StoredNf4 { absmax: &stored.absmax[1..], ..stored };
    assert_eq!(
        refused(&short, (64, 64)),
        "pack_stored_nf4: absmax has 63 elements, expected 64 for a 64x64 matrix"
    );
    let blocks = StoredNf4 { blocksize: 128, ..stored };
    assert_eq!(
        refused(&blocks, (64, 64)),
        "pack_stored_nf4: blocksize is 128; only 64 can be read: quantise the weights again"
    );
    quant_map[1] = -0.7;
    let other = StoredNf4 { quant_map: &quant_map, ..stored };
    assert_eq!(
        refused(&other, (64, 64)),
        "pack_stored_nf4: quant_map[1] is -0.7, expected -0.6961928: another quantisation than nf4's"
    );
    nested_quant_map[255] = f32::NAN;
    let other = StoredNf4 { nested_quant_map: &nested_quant_map, ..stored };
    assert_eq!(
        refused(&other, (64, 64)),
        "pack_stored_nf4: nested_quant_map[255] is NaN, expected 1: another quantisation than nf4's"
    );
    let mut packed = Bytes::new(&device, MemoryKind::Weights, Format::Int8.packed_len(2, 3)).unwrap();
    let error = {
        let stored = StoredInt8 { weight: &[1; 6], scb: &[1.0; 3] };
        ops::pack_stored_int8(&device, &stored, 2, 3, packed.view_mut()).unwrap_err()
    };
    assert_eq!(error.to_string(), "pack_stored_int8: SCB has 3 elements, expected 2 for a 2x3 matrix");
}

/// More scales than one register row, and shapes around a unit.
const SHAPES: [(usize, usize); 7] =
    [(1, 1), (3, 64), (128, 128), (7, 2341), (129, 128), (1, 40_000), (300, 301)];

/// Something like normal numbers, whose sizes differ from row to row.
fn weights(seed: u64, (rows, cols): (usize, usize)) -> Vec<f32> {
    let terms: Vec<Vec<f32>> = (0..4).map(|i| numbers(4 * seed + i, rows * cols)).collect();
    let size = |i: usize| 0.02 * 1.5f32.powi((i / cols % 7) as i32);
    (0..rows * cols).map(|i| terms.iter().map(|t| t[i]).sum::<f32>() * size(i)).collect()
}

#[test]
fn the_bits_depend_neither_on_threads_nor_on_the_level() {
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        let weights = weights(seed as u64, shape);
        for format in Format::ALL {
            let mut first = None;
            for threads in [1, 3] {
                for (isa, device) in devices(threads) {
                    let values = Matrix::from_values(&device, &weights, shape, DType::F32, 0);
                    let packed = packed(&device, &values, shape, format);
                    let found = (
                        packed.read(&device).unwrap(),
                        [DType::F32, DType::Bf16]
                            .map(|to| bits(&unpacked(&device, &packed, shape, format, to))),
                    );
                    let expected = first.get_or_insert_with(|| found.clone());
                    assert!(
                        *expected == found,
                        "{format} {shape:?} on {} with {threads} threads",
                        isa.name()
                    );
                }
            }
        }
    }
}

/// Weights stay what they are when they are packed again: exactly where the format is plain; in the others the codes
/// do, while scales, which are quantised or rounded again, move by what that costs.
#[test]
fn packing_again_keeps_the_codes() {
    for (isa, device) in devices(2) {
        for (seed, shape) in SHAPES.into_iter().enumerate() {
            let weights = weights(seed as u64, shape);
            let values = Matrix::from_values(&device, &weights, shape, DType::F32, 0);
            for format in Format::ALL {
                let what = format!("{format} {shape:?} on {}", isa.name());
                let once = packed(&device, &values, shape, format);
                let read = unpacked(&device, &once, shape, format, DType::F32);
                let again = Matrix::from_values(&device, &read, shape, DType::F32, 0);
                let twice = packed(&device, &again, shape, format);
                let [first, second] = [&once, &twice].map(|bytes| bytes.read(&device).unwrap());
                match format {
                    Format::F32 | Format::Bf16 => assert!(first == second, "{what}"),
                    Format::Int8 | Format::Fp8 => {
                        let unit_len = format.unit_len(shape.1);
                        for (a, b) in first.chunks_exact(unit_len).zip(second.chunks_exact(unit_len)) {
                            assert!(a[..shape.1] == b[..shape.1], "{what}: codes");
                            let scale = |u: &[u8]| f32::from_le_bytes(u[shape.1..][..4].try_into().unwrap());
                            // Two roundings between them.
                            assert!(
                                (scale(a) - scale(b)).abs() <= scale(a) * 2.0f32.powi(-23),
                                "{what}: scale"
                            );
                        }
                    }
                    Format::Nf4 => {
                        let len = weights.len();
                        let (a, b) = (parts(&first, len), parts(&second, len));
                        assert!(a.0 == b.0, "{what}: codes");
                        let largest = read.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                        let read_again = unpacked(&device, &twice, shape, format, DType::F32);
                        for (x, y) in read.iter().zip(&read_again) {
                            // Half of the widest gap in the table of scales, 0.0141.
                            assert!((x - y).abs() <= 0.0071 * largest, "{what}: {x} became {y}");
                        }
                    }
                }
            }
        }
    }
}

/// A GPU's weights travel to the host and back in parts; where they lie on the GPU changes nothing.
#[test]
fn large_and_crooked_matrices_have_the_same_bits_on_a_gpu() {
    let golden = Golden::open();
    let (quant_map, nested_quant_map) = (golden.f32("quant_map"), golden.f32("nested_quant_map"));
    let (cpu, gpu) = (Device::cpu(2, 1 << 30).unwrap(), Place::cuda().device(1, 1 << 30));
    let shape = (280, 15_001);
    let mut weights = weights(3, shape);
    let [on_cpu, on_gpu] =
        [&cpu, &gpu].map(|device| Matrix::from_values(device, &weights, shape, DType::F32, 0));
    for format in [Format::Int8, Format::Fp8, Format::Nf4] {
        let expected = packed(&cpu, &on_cpu, shape, format).read(&cpu).unwrap();
        assert!(packed(&gpu, &on_gpu, shape, format).read(&gpu).unwrap() == expected, "{format}");
        let mut stored = Bytes::new(&gpu, MemoryKind::Weights, expected.len()).unwrap();
        spoil(&gpu, &mut stored);
        if format == Format::Nf4 {
            let (weight, absmax, nested_absmax, offsets) = parts(&expected, weights.len());
            let from = StoredNf4 {
                weight: &weight,
                absmax: &absmax,
                quant_map: &quant_map,
                nested_absmax: &nested_absmax,
                nested_quant_map: &nested_quant_map,
                nested_offset: offsets[0],
                blocksize: 64,
                nested_blocksize: 256,
            };
            ops::pack_stored_nf4(&gpu, &from, shape.0, shape.1, stored.view_mut()).unwrap();
        } else {
            let units = || expected.chunks_exact(format.unit_len(shape.1)).map(|unit| unit.split_at(shape.1));
            let codes: Vec<u8> = units().flat_map(|(codes, _)| codes).copied().collect();
            let scb: Vec<f32> =
                units().map(|(_, rest)| f32::from_le_bytes(rest[..4].try_into().unwrap())).collect();
            if format == Format::Fp8 {
                let from = StoredFp8 { weight: &codes, scales: &scb, block: [1, shape.1] };
                ops::pack_stored_fp8(&gpu, &from, shape.0, shape.1, stored.view_mut()).unwrap();
            } else {
                let from = StoredInt8 { weight: &codes, scb: &scb };
                ops::pack_stored_int8(&gpu, &from, shape.0, shape.1, stored.view_mut()).unwrap();
            }
        }
        assert!(stored.read(&gpu).unwrap() == expected, "{format}, stored");

        let small = (129, 77);
        let values = Matrix::from_values(&cpu, &weights[..129 * 77], small, DType::F32, 0);
        let expected = packed(&cpu, &values, small, format);
        let mut there = Bytes::new(&gpu, MemoryKind::Weights, expected.len()).unwrap();
        gpu.write_bytes(&expected.read(&cpu).unwrap(), there.view_mut()).unwrap();
        for to in [DType::F32, DType::Bf16] {
            let mut out = Matrix::new(&gpu, 9, (130, 77), to, 0);
            ops::unpack(&gpu, there.view(), format, out.view_mut().row_range(1..130)).unwrap();
            let expected = unpacked(&cpu, &expected, small, format, to);
            assert!(bits(&out.read(&gpu)[77..]) == bits(&expected), "{format} as {to}");
        }
    }
    weights[15_001 * 279 + 5] = f32::NAN;
    let bad = Matrix::from_values(&gpu, &weights, shape, DType::F32, 0);
    for format in [Format::Int8, Format::Fp8, Format::Nf4] {
        let mut packed = Bytes::new(&gpu, MemoryKind::Weights, format.packed_len(shape.0, shape.1)).unwrap();
        let error = ops::pack(&gpu, bad.view(), format, packed.view_mut()).unwrap_err().to_string();
        assert!(error.contains("..=279 is not finite"), "{error}");
    }
}

#[test]
fn a_dry_run_counts_the_same_memory() {
    let (cpu, meta) = (Device::cpu(1, 1 << 30).unwrap(), Device::meta());
    let gpu = (Place::cuda().device(1, 1 << 30), Device::meta_of(Backend::Cuda));
    for format in Format::ALL {
        let shape = (300, 301);
        for device in [&cpu, &meta, &gpu.0, &gpu.1] {
            let values = device.zeros(MemoryKind::Scratch, shape.0, shape.1, DType::F32).unwrap();
            let mut out = device.alloc(MemoryKind::Weights, shape.0, shape.1, DType::Bf16).unwrap();
            let mut packed =
                Bytes::new(device, MemoryKind::Weights, format.packed_len(shape.0, shape.1)).unwrap();
            assert_eq!(packed.is_meta(), device.is_meta());
            ops::pack(device, values.view(), format, packed.view_mut()).unwrap();
            drop(values);
            ops::unpack(device, packed.view(), format, out.view_mut()).unwrap();
        }
        for (device, meta) in [(&cpu, &meta), (&gpu.0, &gpu.1)] {
            assert_eq!(device.memory(), meta.memory(), "{format}");
            assert_eq!(device.high_water(), meta.high_water(), "{format}");
        }
    }
    let Device::Meta(ledger) = &meta else { unreachable!() };
    let costs = ledger.costs();
    let moved = |format: Format, size: usize| (300 * 301 * size + format.packed_len(300, 301)) as f64;
    let all = |size: usize| -> f64 {
        [Format::Int8, Format::Fp8, Format::Nf4].into_iter().map(|format| moved(format, size)).sum()
    };
    assert_eq!(costs["pack"].bytes, all(4));
    assert_eq!(costs["unpack"].bytes, all(2));
    assert_eq!((costs["pack"].flops, costs["unpack"].flops), (0.0, 0.0));
}

#[test]
fn what_cannot_be_packed_is_refused() {
    let shape = (300, 301);
    for (isa, device) in devices(2) {
        for bad in [f32::NAN, f32::NEG_INFINITY] {
            let mut weights = weights(1, shape);
            weights[170 * 301] = bad;
            let values = Matrix::from_values(&device, &weights, shape, DType::F32, 0);
            // A block of nf4 goes over the end of a row.
            for (format, rows) in
                [(Format::Int8, 170..=170), (Format::Fp8, 170..=170), (Format::Nf4, 169..=170)]
            {
                let len = format.packed_len(shape.0, shape.1);
                let mut packed = Bytes::new(&device, MemoryKind::Weights, len).unwrap();
                let error = ops::pack(&device, values.view(), format, packed.view_mut()).unwrap_err();
                let expected =
                    format!("pack: a weight in rows {rows:?} is not finite, which {format} cannot hold");
                assert_eq!(error.to_string(), expected, "{}", isa.name());
            }
        }
    }
    let device = Device::cpu(2, 1 << 30).unwrap();
    let mut packed = Bytes::new(&device, MemoryKind::Weights, 64).unwrap();
    let mut values = Matrix::new(&device, 1, (4, 4), DType::F32, 3);
    let error = ops::pack(&device, values.view(), Format::F32, packed.view_mut()).unwrap_err();
    assert_eq!(error.to_string(), "pack: values must be contiguous");
    let error = ops::unpack(&device, packed.view(), Format::F32, values.view_mut()).unwrap_err();
    assert_eq!(error.to_string(), "unpack: values must be contiguous");
    let values = Matrix::new(&device, 1, (4, 4), DType::F32, 0);
    let error = ops::pack(&device, values.view(), Format::Nf4, packed.view_mut()).unwrap_err();
    assert_eq!(error.to_string(), "pack: 64 bytes for a 4x4 matrix as nf4, expected 8512");
}

/// Pieces of a buffer are matrices where they lie.
#[test]
fn plain_pieces_are_read_in_place() {
    let device = Device::cpu(1, 1 << 30).unwrap();
    let shape = (5, 7);
    let values = Matrix::new(&device, 1, shape, DType::F32, 0);
    let (wide, narrow) = (Format::F32.packed_len(5, 7), Format::Bf16.packed_len(5, 7));
    let mut buffer = Bytes::new(&device, MemoryKind::Weights, wide + narrow).unwrap();
    ops::pack(&device, values.view(), Format::F32, buffer.range_mut(0..wide)).unwrap();
    ops::pack(&device, values.view(), Format::Bf16, buffer.range_mut(wide..wide + narrow)).unwrap();
    let first = buffer.view().as_tensor(0..140, 5, 7, DType::F32);
    assert_eq!(first.as_slice::<f32>(), values.read(&device));
    let second = buffer.range(wide..wide + narrow).as_tensor(0..70, 5, 7, DType::Bf16);
    let rounded: Vec<bf16> = values.read(&device).iter().map(|x| bf16::from_f32(*x)).collect();
    assert_eq!(second.as_slice::<bf16>(), rounded);
    let crooked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| buffer.range(32..64).len()));
    assert!(crooked.is_err(), "ranges begin at multiples of 64 bytes");
}
