//! Unpacking frozen weights, beside a cast of plain bf16, which moves more bytes.

use tandem_kernels::format::Format;
use tandem_kernels::{Bytes, DType, MemoryKind, ops};

use crate::harness::{Bench, Work};

/// A matrix of a layer of 7 B parameters: far larger than the caches.
const ROWS: usize = 4096;
const COLS: usize = 11_008;

/// Prints a line per format and type, with weights per second.
pub fn run(bench: &Bench) {
    for format in [Format::Nf4, Format::Int8, Format::Bf16] {
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
    for format in [Format::Nf4, Format::Int8] {
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
