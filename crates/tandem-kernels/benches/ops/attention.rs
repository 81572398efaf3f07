//! Attention, forward, backward and decoding, at the shapes of a packed micro-batch.

use tandem_kernels::ops::{self, AttentionShape, Visible};
use tandem_kernels::{DType, Forest, Segment};

use crate::harness::{Bench, Place, Work};

/// `count` trees: a prompt with two answers each.
fn pairs(count: u32, prompt: u32, answer: u32) -> Forest {
    let mut segments = Vec::new();
    for tree in 0..count {
        let start = tree * (prompt + 2 * answer);
        segments.push(Segment { range: start..start + prompt, parent: None, first_position: 0 });
        for child in 0..2 {
            let first = start + prompt + child * answer;
            let parent = Some(3 * tree);
            segments.push(Segment { range: first..first + answer, parent, first_position: prompt });
        }
    }
    let tokens = vec![0; (count * (prompt + 2 * answer)) as usize];
    Forest::new(tokens, segments, vec![], 0).expect("a valid forest")
}

/// `count` sequences, which see all that is before them.
fn sequences(count: u32, length: u32) -> Forest {
    let ranges = (0..count).map(|sequence| sequence * length..(sequence + 1) * length);
    let segments = ranges.map(|range| Segment { range, parent: None, first_position: 0 }).collect();
    Forest::new(vec![0; (count * length) as usize], segments, vec![], 0).expect("a valid forest")
}

/// Tokens of a micro-batch on a GPU: as one sequence, or as several shorter ones.
const ON_A_GPU: u32 = 16384;

/// Prints a line per shape, pass and type.
pub fn run(bench: &Bench) {
    match bench.place {
        Place::Cpu => on_a_processor(bench),
        Place::Cuda => {
            for length in [1024, 2048, 4096, 8192, ON_A_GPU] {
                let count = ON_A_GPU / length;
                let name = format!("attention {count} of {length}, 32/8 of 128 bf16");
                if bench.wants(&name) {
                    one(bench, &name, &sequences(count, length), 32, 8, 128, DType::Bf16);
                }
            }
            let name = "attention 16 pairs 256+2x384, 32/8 of 128 bf16";
            if bench.wants(name) {
                one(bench, name, &pairs(16, 256, 384), 32, 8, 128, DType::Bf16);
            }
        }
        Place::Emulated => {
            let name = "attention 2 of 48, 4/2 of 128 bf16";
            if bench.wants(name) {
                one(bench, name, &sequences(2, 48), 4, 2, 128, DType::Bf16);
            }
        }
    }
}

fn on_a_processor(bench: &Bench) {
    let cases = [
        ("8 pairs 200+2x100", pairs(8, 200, 100), 8, 4, 64),
        // Short enough to run between two interruptions on a busy machine.
        ("1 pair 200+2x100", pairs(1, 200, 100), 4, 4, 64),
        ("1 pair 200+2x100", pairs(1, 200, 100), 4, 2, 64),
        ("1 pair 200+2x100", pairs(1, 200, 100), 2, 1, 128),
        ("16 pairs 20+2x12", pairs(16, 20, 12), 4, 2, 64),
        ("one of 2048", pairs(1, 2046, 1), 8, 2, 64),
    ];
    for (what, forest, heads, kv_heads, head_dim) in cases {
        for dtype in [DType::F32, DType::Bf16] {
            let name = format!("attention {what}, {heads}/{kv_heads} of {head_dim} {dtype}");
            if bench.wants(&name) {
                one(bench, &name, &forest, heads, kv_heads, head_dim, dtype);
            }
        }
    }
    for dtype in [DType::F32, DType::Bf16] {
        for (shape, heads, kv_heads, head_dim) in [("16/4 of 128", 16, 4, 128), ("9/3 of 64", 9, 3, 64)] {
            let name = format!("attention_decode 16 rows over 1024, {shape} {dtype}");
            if bench.wants(&name) {
                decode(bench, &name, [heads, kv_heads, head_dim], dtype, 0);
            }
            let name = format!("attention_decode 2 x 8 rows over 512 + 512, {shape} {dtype}");
            if bench.wants(&name) {
                decode(bench, &name, [heads, kv_heads, head_dim], dtype, 512);
            }
        }
    }
}

fn one(
    bench: &Bench,
    name: &str,
    forest: &Forest,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    dtype: DType,
) {
    let scale = 1.0 / (head_dim as f32).sqrt();
    let shape = AttentionShape { heads, kv_heads, head_dim, scale, window: None, softcap: None };
    let (tokens, q_width, kv_width) = (forest.num_tokens(), heads * head_dim, kv_heads * head_dim);
    let qkv = bench.matrix(tokens, q_width + 2 * kv_width, dtype);
    let columns = |from: usize, width: usize| qkv.view().col_range(from..from + width);
    let (q, k, v) = (columns(0, q_width), columns(q_width, kv_width), columns(q_width + kv_width, kv_width));
    let [mut out, d_out] = [(); 2].map(|()| bench.matrix(tokens, q_width, dtype));
    let mut lse = bench.matrix(tokens, heads, DType::F32);
    let mut d_qkv = bench.matrix(tokens, q_width + 2 * kv_width, dtype);
    // Products of queries and keys that are looked at, a multiply-add counting two.
    let seen: f64 = forest.positions.iter().map(|&p| f64::from(p + 1)).sum();
    let product = 2.0 * seen * q_width as f64;
    // Processors multiply bf16 numbers as f32 here.
    let multiplied = if bench.is_gpu() { dtype } else { DType::F32 };
    bench.line(&format!("{name} forward"), Work::Flops(2.0 * product, multiplied), || {
        let (out, lse) = (out.view_mut(), lse.view_mut());
        let call = ops::Attention { q, k, v, forest, first_query: 0, shape: &shape, out, log_sum_exp: lse };
        ops::attention(&bench.device, call).expect("shapes fit");
    });
    bench.line(&format!("{name} backward"), Work::Flops(5.0 * product, multiplied), || {
        let [dq, dk, dv] = d_qkv.view_mut().split_cols([q_width, kv_width, kv_width]);
        let (out, lse, d_out) = (out.view(), lse.view(), d_out.view());
        let call = ops::AttentionBackward {
            q,
            k,
            v,
            out,
            log_sum_exp: lse,
            d_out,
            forest,
            shape: &shape,
            model_kv_heads: shape.kv_heads,
            dq,
            dk,
            dv,
        };
        ops::attention_backward(&bench.device, call).expect("shapes fit");
    });
}

/// Times 16 queries over 1024 keys each, of which eight share the first. Rated by the bytes of all the keys that are seen.
fn decode(bench: &Bench, name: &str, [heads, kv_heads, head_dim]: [usize; 3], dtype: DType, shared: u32) {
    const ROWS: u32 = 16;
    const KEYS: u32 = 1024;
    let (rows, keys) = (ROWS as usize, KEYS as usize);
    let shape = AttentionShape { heads, kv_heads, head_dim, scale: 0.1, window: None, softcap: None };
    let [q, mut out] = [(); 2].map(|()| bench.matrix(rows, heads * head_dim, dtype));
    let [k, v] = [(); 2].map(|()| bench.matrix(rows * keys, kv_heads * head_dim, dtype));
    let ranges = |r: u32| [r / 8 * 8 * KEYS..r / 8 * 8 * KEYS + shared, r * KEYS + shared..(r + 1) * KEYS];
    let visible = Visible {
        offsets: (0..=ROWS).map(|r| 2 * r).collect(),
        ranges: (0..ROWS).flat_map(ranges).collect(),
    };
    let bytes = (2 * k.view().len() * dtype.size()) as f64;
    bench.line(name, Work::Bytes(bytes), || {
        let out = out.view_mut();
        let call = ops::AttentionDecode {
            q: q.view(),
            k: k.view(),
            v: v.view(),
            visible: &visible,
            shape: &shape,
            out,
        };
        ops::attention_decode(&bench.device, call).expect("shapes fit");
    });
}
