//! The three products of a linear layer at training shapes, and a few rows at a time as in generation.

use tandem_kernels::{DType, ops};

use crate::harness::{Bench, Place, Turns, Work};

/// Tokens, inputs, outputs.
const TRAINING: [(usize, usize, usize); 13] = [
    (500, 256, 256),
    (1000, 256, 512),
    (2048, 256, 688),
    (2048, 688, 256),
    (4096, 256, 1376),
    (1000, 512, 512),
    (2048, 512, 1536),
    (2048, 512, 2816),
    (2048, 1376, 512),
    (4096, 768, 768),
    (2048, 768, 3072),
    (1024, 512, 32000),
    (2048, 2048, 2048),
];

const DECODING: [(usize, usize, usize); 12] = [
    (1, 512, 1536),
    (1, 512, 32000),
    (2, 512, 32000),
    (4, 512, 32000),
    (16, 512, 32000),
    (16, 576, 3072),
    (16, 2048, 2048),
    // Blocks of k are 501 elements long in f32.
    (1, 11008, 4096),
    (16, 4096, 4096),
    (16, 11008, 4096),
    (8, 2048, 2048),
    (32, 2048, 2048),
];

/// Shapes of Llama with 1 and 8 billion parameters: queries, keys and values together, the attention's output, both halves of a block.
pub const ON_A_GPU: [(usize, usize, usize); 8] = [
    (8192, 2048, 3072),
    (8192, 2048, 2048),
    (8192, 2048, 16384),
    (8192, 8192, 2048),
    (8192, 4096, 6144),
    (8192, 4096, 4096),
    (8192, 4096, 28672),
    (8192, 14336, 4096),
];

/// Prints a line per shape, type and direction.
pub fn run(bench: &Bench) {
    for dtype in [DType::F32, DType::Bf16] {
        training(bench, if bench.place == Place::Cuda { &ON_A_GPU } else { &TRAINING }, dtype);
        for shape in DECODING {
            forward(bench, shape, dtype, true);
        }
    }
}

/// Prints a line per shape and direction.
pub fn training(bench: &Bench, shapes: &[(usize, usize, usize)], dtype: DType) {
    for &shape in shapes {
        forward(bench, shape, dtype, false);
        backward_input(bench, shape, dtype);
        backward_weight(bench, shape, dtype);
    }
}

fn flops((t, k, n): (usize, usize, usize), dtype: DType) -> Work {
    Work::Flops(2.0 * t as f64 * k as f64 * n as f64, dtype)
}

/// Times `linear`, rated by operations or by the bytes read.
fn forward(bench: &Bench, (t, k, n): (usize, usize, usize), dtype: DType, by_bytes: bool) {
    let name = format!("linear {dtype} {t}x{k}x{n}");
    if !bench.wants(&name) {
        return;
    }
    let w = bench.matrix(n, k, dtype);
    let bytes = (t * k + n * k + t * n) * dtype.size();
    let mut turns = Turns::new(by_bytes, bytes, || [bench.matrix(t, k, dtype), bench.matrix(t, n, dtype)]);
    let work = if by_bytes { Work::Bytes(bytes as f64) } else { flops((t, k, n), dtype) };
    let ours = || {
        let [x, y] = turns.next();
        ops::linear(&bench.device, x.view(), w.view(), None, None, y.view_mut()).expect("shapes fit");
    };
    compare(bench, &name, work, (t, n, k), dtype, [(k, 1), (1, k)], ours);
}

fn backward_input(bench: &Bench, (t, k, n): (usize, usize, usize), dtype: DType) {
    let name = format!("linear_backward_input {dtype} {t}x{k}x{n}");
    if !bench.wants(&name) {
        return;
    }
    let w = bench.matrix(n, k, dtype);
    let bytes = (t * k + t * n) * dtype.size();
    let mut turns = Turns::new(false, bytes, || [bench.matrix(t, n, dtype), bench.matrix(t, k, dtype)]);
    let ours = || {
        let [dy, dx] = turns.next();
        ops::linear_backward_input(&bench.device, dy.view(), w.view(), dx.view_mut(), false)
            .expect("shapes fit");
    };
    compare(bench, &name, flops((t, k, n), dtype), (t, k, n), dtype, [(n, 1), (k, 1)], ours);
}

fn backward_weight(bench: &Bench, (t, k, n): (usize, usize, usize), dtype: DType) {
    let name = format!("linear_backward_weight {dtype} {t}x{k}x{n}");
    if !bench.wants(&name) {
        return;
    }
    let mut dw = bench.matrix(n, k, DType::F32);
    let bytes = (t * k + t * n) * dtype.size();
    let mut turns = Turns::new(false, bytes, || [bench.matrix(t, n, dtype), bench.matrix(t, k, dtype)]);
    let ours = || {
        let [dy, x] = turns.next();
        ops::linear_backward_weight(&bench.device, dy.view(), x.view(), dw.view_mut(), false)
            .expect("shapes fit");
    };
    compare(bench, &name, flops((t, k, n), dtype), (n, k, t), dtype, [(1, n), (k, 1)], ours);
}

/// Our line, with the ratio to the peer where there is one: a product of `m × k` by `k × n` whose factors lie in
/// memory with these distances between rows and columns.
/// The peer's are the same in every call, which flatters it where they fit the cache.
#[cfg(feature = "peer")]
fn compare(
    bench: &Bench,
    name: &str,
    work: Work,
    (m, n, k): (usize, usize, usize),
    dtype: DType,
    [a_strides, b_strides]: [(usize, usize); 2],
    mut ours: impl FnMut(),
) {
    if dtype != DType::F32 {
        bench.line(name, work, ours);
        return;
    }
    let (a, b) = (vec![0.25f32; m * k], vec![0.5f32; k * n]);
    let mut c = vec![0.0f32; m * n];
    let parallelism = gemm::Parallelism::Rayon(bench.threads);
    let mut peer = || {
        let [(a_row, a_col), (b_row, b_col)] =
            [a_strides, b_strides].map(|(row, col)| (row as isize, col as isize));
        // SAFETY: the three buffers hold m·k, k·n and m·n numbers at these strides.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                c.as_mut_ptr(),
                1,
                n as isize,
                false,
                a.as_ptr(),
                a_col,
                a_row,
                b.as_ptr(),
                b_col,
                b_row,
                0.0f32,
                1.0f32,
                false,
                false,
                false,
                parallelism,
            );
        }
    };
    let alternatives: [&mut dyn FnMut(); 2] = [&mut ours, &mut peer];
    let [ours, peer] = bench.median_seconds(alternatives);
    bench.print(name, work, ours, &format!(", {:.2} x gemm", peer / ours));
}

/// Our line.
#[cfg(not(feature = "peer"))]
fn compare(
    bench: &Bench,
    name: &str,
    work: Work,
    _: (usize, usize, usize),
    _: DType,
    _: [(usize, usize); 2],
    ours: impl FnMut(),
) {
    bench.line(name, work, ours);
}
