//! Unpacking frozen weights, beside a cast of plain bf16, which moves more bytes; and products that read packed weights as they
//! are, beside those of unpacked ones.

use tandem_kernels::format::Format;
use tandem_kernels::ops::{PackedRows, PackedWeight, Weight};
use tandem_kernels::{Bytes, DType, MemoryKind, ops};

use crate::harness::{Bench, Work};

/// A matrix of a layer of 7 B parameters: far larger than the caches.
const ROWS: usize = 4096;
const COLS: usize = 11_008;

/// Packed formats.
const PACKED: [Format; 3] = [Format::Nf4, Format::Int8, Format::Fp8];

/// Prints a line per format and type, with weights per second.
pub fn run(bench: &Bench) {
    for format in [Format::Nf4, Format::Int8, Format::Fp8, Format::Bf16] {
        for dtype in [DType::Bf16, DType::F32] {
            let name = format!("unpack {format} -> {dtype}");
            if bench.wants(&name) {
                one(bench, &name, format, dtype, ROWS, COLS);
            }
            // Stays in the second-level cache: what the kernel itself can do.
            let name = format!("unpack {format} -> {dtype}, 256 x 512");
            if bench.wants(&name) {
                one(bench, &name, format, dtype, 256, 512);
            }
        }
    }
    if !bench.is_gpu() {
        for dtype in [DType::Bf16, DType::F32] {
            for rows in [1, 4, 16, 32] {
                products(bench, rows, dtype);
            }
        }
    }
    for format in PACKED {
        let name = format!("pack {format}");
        if bench.wants(&name) {
            pack(bench, &name, format);
        }
    }
}

fn one(bench: &Bench, name: &str, format: Format, dtype: DType, rows: usize, cols: usize) {
    let values = bench.matrix(rows, cols, DType::F32);
    let mut packed =
        Bytes::new(&bench.device, MemoryKind::Scratch, format.packed_len(rows, cols)).expect("memory");
    ops::pack(&bench.device, values.view(), format, packed.view_mut()).expect("fits");
    drop(values);
    let mut out = bench.matrix(rows, cols, dtype);
    let [seconds] = bench.median_seconds([|| {
        ops::unpack(&bench.device, packed.view(), format, out.view_mut()).expect("fits");
    }]);
    let bytes = packed.len() + out.view().num_bytes();
    print(bench, name, bytes, rows * cols, seconds);
}

/// Times products of a few rows with a plain weight and with packed ones, in turns with unpacking and the plain product.
fn products(bench: &Bench, rows: usize, dtype: DType) {
    let (n, k) = (ROWS, COLS);
    let name = |of: &str| format!("linear {dtype} {rows}x{k}x{n}, {of}");
    if !PACKED.iter().any(|format| bench.wants(&name(format.name()))) {
        return;
    }
    let (x, mut y) = (bench.matrix(rows, k, dtype), [(); 3].map(|()| bench.matrix(rows, n, dtype)));
    let mut plain = bench.matrix(n, k, dtype);
    for format in PACKED {
        let mut bytes =
            Bytes::new(&bench.device, MemoryKind::Scratch, format.packed_len(n, k)).expect("memory");
        ops::pack(&bench.device, plain.view(), format, bytes.view_mut()).expect("fits");
        let pieces = [PackedRows { rows: n, bytes: 0..bytes.len() }];
        let weight = PackedWeight::new(bytes.view(), &pieces, format, k, dtype).expect("fits");
        let mut unpacked = bench.matrix(n, k, dtype);
        let [first, second, third] = &mut y;
        let linear = |w: Weight, y: &mut tandem_kernels::Tensor| {
            ops::linear(&bench.device, x.view(), w, None, None, y.view_mut()).expect("fits");
        };
        let alternatives: [&mut dyn FnMut(); 3] = [
            &mut || linear(Weight::Packed(weight), first),
            &mut || {
                ops::unpack(&bench.device, bytes.view(), format, unpacked.view_mut()).expect("fits");
                linear(unpacked.view().into(), second);
            },
            &mut || linear(plain.view().into(), third),
        ];
        let [packed, before, alone] = bench.median_seconds(alternatives);
        let note = format!(
            ", {:.2} G weights/s, {:.2} x unpack + linear, {:.2} x plain",
            (n * k) as f64 / packed / 1e9,
            before / packed,
            alone / packed
        );
        bench.print(&name(format.name()), Work::Bytes(bytes.len() as f64), packed, &note);
        if format == Format::Nf4 {
            let bytes = (n * k * dtype.size()) as f64;
            bench.print(&name("plain"), Work::Bytes(bytes), alone, "");
        }
        plain = unpacked;
    }
}

fn pack(bench: &Bench, name: &str, format: Format) {
    let values = bench.matrix(ROWS, COLS, DType::F32);
    let mut packed =
        Bytes::new(&bench.device, MemoryKind::Scratch, format.packed_len(ROWS, COLS)).expect("memory");
    let [seconds] = bench.median_seconds([|| {
        ops::pack(&bench.device, values.view(), format, packed.view_mut()).expect("fits");
    }]);
    print(bench, name, packed.len() + values.view().num_bytes(), ROWS * COLS, seconds);
}

fn print(bench: &Bench, name: &str, bytes: usize, weights: usize, seconds: f64) {
    let note = format!(", {:.2} G weights/s", weights as f64 / seconds / 1e9);
    bench.print(name, Work::Bytes(bytes as f64), seconds, &note);
}
