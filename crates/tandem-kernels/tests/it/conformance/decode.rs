use tandem_kernels::ops::{self, AttentionShape, Visible};
use tandem_kernels::{DType, Device, Forest};

use super::attention::{forest, reference};
use super::matrix::{Matrix, Random, cases, poison, same_at_every_thread_count};
use crate::places::Place;

/// Decodes random numbers over a cache of so many rows, and compares.
#[track_caller]
fn check(shape: &AttentionShape, visible: &Visible, cache: usize) {
    let (queries, width, kv_width) =
        (visible.offsets.len() - 1, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    for (place, dtype, tolerance) in cases() {
        let mut random = Random(23);
        let q = random.matrix(queries, width, dtype);
        let [k, v] = [(); 2].map(|()| random.matrix(cache, kv_width, dtype));
        let found =
            same_at_every_thread_count(place, |device| decode(device, [&q, &k, &v], visible, shape, dtype));
        let seen: Vec<Vec<usize>> = (0..queries)
            .map(|i| {
                let ranges = &visible.ranges[visible.offsets[i] as usize..visible.offsets[i + 1] as usize];
                let rows: Vec<usize> = ranges.iter().cloned().flatten().map(|r| r as usize).collect();
                rows[rows.len().saturating_sub(shape.window.unwrap_or(u32::MAX) as usize)..].to_vec()
            })
            .collect();
        let expected = reference(shape, &q, &k, &v, &q, |t, u| seen[t].contains(&u));
        found.assert_close(&expected.out, 2.0 * tolerance, &format!("{shape:?} {dtype} {place:?}"));
    }
}

fn decode(
    device: &Device,
    operands: [&Matrix; 3],
    visible: &Visible,
    shape: &AttentionShape,
    dtype: DType,
) -> Matrix {
    let [q, k, v] = operands.map(|m| m.tensor(device, dtype));
    let mut out = poison(device, q.rows(), q.cols(), dtype);
    let call =
        ops::AttentionDecode { q: q.view(), k: k.view(), v: v.view(), visible, shape, out: out.view_mut() };
    ops::attention_decode(device, call).unwrap();
    Matrix::read(device, out.view())
}

#[test]
fn single_tokens_over_a_cache() {
    let visible = Visible {
        offsets: vec![0, 1, 3, 4, 7],
        ranges: vec![0..1, 0..90, 150..233, 5..6, 10..20, 20..20, 40..169],
    };
    for head_dim in [16, 20, 64, 80, 128] {
        for (heads, kv_heads) in [(1, 1), (4, 2), (8, 1)] {
            for window in [None, Some(1), Some(70)] {
                let softcap = (head_dim == 20).then_some(4.0);
                let shape = AttentionShape { heads, kv_heads, head_dim, scale: 0.3, window, softcap };
                check(&shape, &visible, 233);
            }
        }
    }
}

/// On a GPU keys are cut into parts of 128, and up to eight heads of a group go together.
#[test]
fn long_caches_and_large_groups() {
    let (ranges, offsets) = ([0..128, 0..127, 3..132, 200..700, 0..1, 0..300], (0..=6).collect());
    let visible = Visible { offsets, ranges: ranges.to_vec() };
    for (heads, kv_heads, head_dim) in [(2, 1, 64), (3, 1, 256), (14, 2, 72), (16, 1, 33), (12, 1, 128)] {
        for window in [None, Some(257)] {
            let shape = AttentionShape { heads, kv_heads, head_dim, scale: 0.3, window, softcap: None };
            check(&shape, &visible, 700);
        }
    }
}

/// Other queries of a batch do not change a query's result.
#[test]
fn the_bits_of_a_query_do_not_depend_on_others() {
    let shape =
        AttentionShape { heads: 8, kv_heads: 2, head_dim: 64, scale: 0.1, window: None, softcap: None };
    for (place, dtype, _) in cases() {
        let mut random = Random(29);
        let q = random.matrix(3, 512, dtype);
        let [k, v] = [(); 2].map(|()| random.matrix(400, 128, dtype));
        let device = place.device(2, 1 << 28);
        let visible = Visible { offsets: vec![0, 1, 3, 4], ranges: vec![7..18, 0..100, 20..51, 1..400] };
        let among = decode(&device, [&q, &k, &v], &visible, &shape, dtype);
        for (query, own) in [(0, 0..1), (1, 1..3)] {
            let ranges = visible.ranges[own].to_vec();
            let visible = Visible { offsets: vec![0, ranges.len() as u32], ranges };
            let alone = decode(&device, [&q.rows(query, 1), &k, &v], &visible, &shape, dtype);
            assert!(alone == among.rows(query, 1), "query {query}, {dtype} {place:?}");
        }
    }
}

/// A text's next token is what training makes of it, in every type and on every level.
#[test]
fn the_bits_are_those_of_the_forest() {
    // A prompt of several strips, answers to it that end among blocks of queries, and another prompt with its answer.
    let forest = forest(&[(290, None), (1, Some(0)), (230, Some(0)), (60, None), (40, Some(3))]);
    for isa in Place::processors() {
        let device = isa.device(2, 1 << 28);
        for (heads, kv_heads, head_dim) in [(4, 4, 64), (4, 2, 20), (3, 1, 80), (18, 2, 16), (33, 1, 8)] {
            for window in [None, Some(1), Some(70), Some(300)] {
                let softcap = (head_dim == 20).then_some(4.0);
                let shape = AttentionShape { heads, kv_heads, head_dim, scale: 0.3, window, softcap };
                for dtype in [DType::F32, DType::Bf16] {
                    check_bits(&device, &forest, &shape, dtype, isa.name());
                }
            }
        }
    }
}

/// Decodes every token of a forest, and compares with the forward pass over it.
fn check_bits(device: &Device, forest: &Forest, shape: &AttentionShape, dtype: DType, level: &str) {
    let (tokens, heads) = (forest.num_tokens(), shape.heads);
    let mut random = Random(31);
    let q = random.matrix(tokens, heads * shape.head_dim, dtype);
    let [k, v] = [(); 2].map(|()| random.matrix(tokens, shape.kv_heads * shape.head_dim, dtype));
    let mut visible = Visible { offsets: vec![0], ranges: Vec::new() };
    for segment in &forest.segments {
        for token in segment.range.clone() {
            visible.ranges.extend(segment.parent.map(|p| forest.segments[p as usize].range.clone()));
            visible.ranges.push(segment.range.start..token + 1);
            visible.offsets.push(visible.ranges.len() as u32);
        }
    }
    let found = decode(device, [&q, &k, &v], &visible, shape, dtype);
    let [q, k, v] = [&q, &k, &v].map(|m| m.tensor(device, dtype));
    let mut out = poison(device, tokens, q.cols(), dtype);
    let mut lse = poison(device, tokens, heads, DType::F32);
    let (to, log_sum_exp) = (out.view_mut(), lse.view_mut());
    let (q, k, v) = (q.view(), k.view(), v.view());
    let call = ops::Attention { q, k, v, forest, first_query: 0, shape, out: to, log_sum_exp };
    ops::attention(device, call).unwrap();
    let expected = Matrix::read(device, out.view());
    for token in 0..tokens {
        let [found, expected] = [&found, &expected].map(|all| all.rows(token, 1));
        assert!(found == expected, "token {token}, {shape:?}, {dtype}, {level}");
    }
}

#[test]
fn a_query_that_sees_nothing_is_refused() {
    let device = super::matrix::device(1);
    let q = Matrix::zeros(1, 4).tensor(&device, DType::F32);
    let mut out = poison(&device, 1, 4, DType::F32);
    let shape =
        AttentionShape { heads: 1, kv_heads: 1, head_dim: 4, scale: 1.0, window: None, softcap: None };
    for (range, message) in [
        (0..0, "attention_decode: query 0 has no visible cache rows"),
        (0..2, "attention_decode: cache rows 0..2 of query 0 exceed the cache of 1 rows"),
    ] {
        let visible = Visible { offsets: vec![0, 1], ranges: [range].to_vec() };
        let view = out.view_mut();
        let call = ops::AttentionDecode {
            q: q.view(),
            k: q.view(),
            v: q.view(),
            visible: &visible,
            shape: &shape,
            out: view,
        };
        let error = ops::attention_decode(&device, call).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}
