use tandem_kernels::cuda::Options;
use tandem_kernels::ops::{self, AttentionShape};
use tandem_kernels::{DType, Device, Forest, Segment};

use super::matrix::{Matrix, Random, TYPES, poison, same_at_every_thread_count};
use crate::places::Place;

/// A forest from `(length, parent)` per segment.
pub fn forest(segments: &[(u32, Option<u32>)]) -> Forest {
    let mut built: Vec<Segment> = Vec::new();
    let mut start = 0;
    for &(length, parent) in segments {
        let first_position = parent.map_or(0, |p| {
            let parent: &Segment = &built[p as usize];
            parent.first_position + parent.range.len() as u32
        });
        built.push(Segment { range: start..start + length, parent, first_position });
        start += length;
    }
    Forest::new(vec![0; start as usize], built, vec![], 0).expect("a valid forest")
}

/// Returns whether token `t` sees token `u`, by the definition alone: same segment and not later, or an
/// ancestor's.
fn sees(forest: &Forest, t: usize, u: usize, window: Option<u32>) -> bool {
    let owner =
        |token: usize| forest.segments.iter().position(|s| s.range.contains(&(token as u32))).unwrap();
    let (mine, theirs) = (owner(t), owner(u));
    let mut next = forest.segments[mine].parent;
    let mut visible = mine == theirs && u <= t;
    while let Some(ancestor) = next {
        visible |= ancestor as usize == theirs;
        next = forest.segments[ancestor as usize].parent;
    }
    visible && window.is_none_or(|window| forest.positions[u] + window > forest.positions[t])
}

pub struct Reference {
    pub out: Matrix,
    pub log_sum_exp: Matrix,
    dq: Matrix,
    dk: Matrix,
    dv: Matrix,
}

/// The whole T×T matrix in f64, by the textbook.
pub fn reference(
    shape: &AttentionShape,
    q: &Matrix,
    k: &Matrix,
    v: &Matrix,
    d_out: &Matrix,
    sees: impl Fn(usize, usize) -> bool,
) -> Reference {
    let (width, group) = (shape.head_dim, shape.heads / shape.kv_heads);
    let (queries, keys) = (q.rows, k.rows);
    let mut r = Reference {
        out: Matrix::zeros(queries, q.cols),
        log_sum_exp: Matrix::zeros(queries, shape.heads),
        dq: Matrix::zeros(queries, q.cols),
        dk: Matrix::zeros(keys, k.cols),
        dv: Matrix::zeros(keys, k.cols),
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for head in 0..shape.heads {
        let own = head * width..(head + 1) * width;
        let shared = head / group * width..(head / group + 1) * width;
        for t in 0..queries {
            let visible: Vec<usize> = (0..keys).filter(|&u| sees(t, u)).collect();
            let raw: Vec<f64> = visible
                .iter()
                .map(|&u| dot(&q.row(t)[own.clone()], &k.row(u)[shared.clone()]) * f64::from(shape.scale))
                .collect();
            let cap = shape.softcap.map(f64::from);
            let scores: Vec<f64> = raw.iter().map(|&s| cap.map_or(s, |cap| cap * (s / cap).tanh())).collect();
            let sum: f64 = scores.iter().map(|s| s.exp()).sum();
            *r.log_sum_exp.at(t, head) = sum.ln();
            let p: Vec<f64> = scores.iter().map(|s| s.exp() / sum).collect();
            let d = &d_out.row(t)[own.clone()];
            let dp: Vec<f64> = visible.iter().map(|&u| dot(d, &v.row(u)[shared.clone()])).collect();
            let mean = dot(&p, &dp);
            for (i, &u) in visible.iter().enumerate() {
                let capped = cap.map_or(1.0, |cap| 1.0 - (raw[i] / cap).tanh().powi(2));
                let ds = p[i] * (dp[i] - mean) * capped * f64::from(shape.scale);
                for c in 0..width {
                    let (mine, theirs) = (own.start + c, shared.start + c);
                    *r.out.at(t, mine) += p[i] * v.row(u)[theirs];
                    *r.dq.at(t, mine) += ds * k.row(u)[theirs];
                    *r.dk.at(u, theirs) += ds * q.row(t)[mine];
                    *r.dv.at(u, theirs) += p[i] * d[c];
                }
            }
        }
    }
    r
}

/// Forward and backward with q, k, v as column ranges of one matrix, as a fused projection leaves
/// them.
fn run(
    device: &Device,
    qkv: &Matrix,
    d_out: &Matrix,
    forest: &Forest,
    shape: &AttentionShape,
    dtype: DType,
) -> [Matrix; 5] {
    run_behind(0, device, qkv, d_out, forest, shape, dtype)
}

/// [`run`] where every matrix lies behind so many columns of others.
fn run_behind(
    pad: usize,
    device: &Device,
    qkv: &Matrix,
    d_out: &Matrix,
    forest: &Forest,
    shape: &AttentionShape,
    dtype: DType,
) -> [Matrix; 5] {
    let (tokens, q_width, kv_width) =
        (forest.num_tokens(), shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let qkv = qkv.behind(pad).tensor(device, dtype);
    let columns = |from: usize, width: usize| qkv.view().col_range(pad + from..pad + from + width);
    let (q, k, v) = (columns(0, q_width), columns(q_width, kv_width), columns(q_width + kv_width, kv_width));
    let mut out = poison(device, tokens, pad + q_width, dtype);
    let mut lse = poison(device, tokens, shape.heads, DType::F32);
    let [_, to] = out.view_mut().split_cols([pad, q_width]);
    ops::attention(
        device,
        ops::Attention { q, k, v, forest, first_query: 0, shape, out: to, log_sum_exp: lse.view_mut() },
    )
    .unwrap();
    let d_out = d_out.behind(pad).tensor(device, dtype);
    let mut d_qkv = poison(device, tokens, pad + q_width + 2 * kv_width, dtype);
    let [_, dq, dk, dv] = d_qkv.view_mut().split_cols([pad, q_width, kv_width, kv_width]);
    let [of, d_of] = [&out, &d_out].map(|x| x.view().col_range(pad..pad + q_width));
    let call = ops::AttentionBackward {
        q,
        k,
        v,
        out: of,
        log_sum_exp: lse.view(),
        d_out: d_of,
        forest,
        shape,
        model_kv_heads: shape.kv_heads,
        dq,
        dk,
        dv,
    };
    ops::attention_backward(device, call).unwrap();
    let d = Matrix::read(device, d_qkv.view());
    for (what, found) in [("out", &Matrix::read(device, out.view())), ("gradient", &d)] {
        assert!(found.columns(0, pad).data.iter().all(|x| x.is_nan()), "columns before the {what}");
    }
    [
        Matrix::read(device, of),
        Matrix::read(device, lse.view()),
        d.columns(pad, q_width),
        d.columns(pad + q_width, kv_width),
        d.columns(pad + q_width + kv_width, kv_width),
    ]
}

/// Every place with the types that its kernels of attention are of.
fn cases() -> Vec<(Place, DType)> {
    let of_type = |(dtype, _)| Place::of_attention_in(dtype).into_iter().map(move |place| (place, dtype));
    TYPES.into_iter().flat_map(of_type).collect()
}

#[track_caller]
fn check(what: &str, forest: &Forest, shape: &AttentionShape, spread: f64) {
    check_behind(0, what, forest, shape, spread);
}

#[track_caller]
fn check_behind(pad: usize, what: &str, forest: &Forest, shape: &AttentionShape, spread: f64) {
    let (tokens, q_width, kv_width) =
        (forest.num_tokens(), shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let mask: Vec<bool> =
        (0..tokens * tokens).map(|i| sees(forest, i / tokens, i % tokens, shape.window)).collect();
    for (dtype, tolerance) in TYPES {
        let mut random = Random(17);
        let qkv = random
            .matrix(tokens, q_width + 2 * kv_width, dtype)
            .map(|x| super::matrix::round(spread * x, dtype));
        let d_out = random.matrix(tokens, q_width, dtype);
        let expected = reference(
            shape,
            &qkv.columns(0, q_width),
            &qkv.columns(q_width, kv_width),
            &qkv.columns(q_width + kv_width, kv_width),
            &d_out,
            |t, u| mask[t * tokens + u],
        );
        // Scores of magnitude s carry an error of s units in the last place into their exponential.
        let tolerance = tolerance * spread.max(1.0) * if dtype == DType::F32 { 3.0 } else { 1.0 };
        for place in Place::of_attention_in(dtype) {
            let found = same_at_every_thread_count(place, |device| {
                run_behind(pad, device, &qkv, &d_out, forest, shape, dtype)
            });
            let what = format!("{what} {dtype} {}", place.name());
            found[0].assert_close(&expected.out, tolerance, &format!("out {what}"));
            found[1].assert_close(&expected.log_sum_exp, 1e-5, &format!("lse {what}"));
            // A token that sees itself alone has no gradient here: what remains is the rounding of terms of about 1.
            found[2].assert_close_beside(0.5, &expected.dq, 2.0 * tolerance, &format!("dq {what}"));
            found[3].assert_close_beside(0.5, &expected.dk, 2.0 * tolerance, &format!("dk {what}"));
            found[4].assert_close(&expected.dv, 2.0 * tolerance, &format!("dv {what}"));
        }
    }
}

fn plain(heads: usize, kv_heads: usize, head_dim: usize) -> AttentionShape {
    let scale = 1.0 / (head_dim as f32).sqrt();
    AttentionShape { heads, kv_heads, head_dim, scale, window: None, softcap: None }
}

/// A prompt of 41 with two answers; a lone token; a tree three levels deep with one-token segments.
fn mixed() -> Forest {
    forest(&[
        (41, None),
        (29, Some(0)),
        (1, Some(0)),
        (1, None),
        (7, None),
        (1, Some(4)),
        (70, Some(5)),
        (3, Some(6)),
        (5, Some(6)),
        (2, Some(4)),
    ])
}

#[test]
fn head_dims_and_groups() {
    let forest = mixed();
    for head_dim in [16, 20, 32, 64, 80, 128] {
        for (heads, kv_heads) in [(2, 2), (4, 2), (4, 1)] {
            check(
                &format!("{heads}/{kv_heads} of {head_dim}"),
                &forest,
                &plain(heads, kv_heads, head_dim),
                1.0,
            );
        }
    }
    check("heads of 3", &forest, &plain(3, 1, 3), 1.0);
    check("heads of 256", &forest, &plain(2, 1, 256), 1.0);
}

/// A GPU's tiles have 64 or 128 rows, and heads are padded to one of a few widths.
#[test]
fn lengths_around_every_tile_of_every_width() {
    for head_dim in [40, 64, 80, 96, 128, 256] {
        for length in [63, 64, 65, 129] {
            let what = format!("length {length}, heads of {head_dim}");
            check(&what, &forest(&[(length, None)]), &plain(2, 1, head_dim), 1.0);
        }
    }
}

/// Heads of a group share a tile on a GPU: all of them, some of them, or none where their number
/// has no divisor.
#[test]
fn groups_of_many_heads() {
    for (heads, kv_heads) in [(8, 1), (16, 2), (7, 1), (12, 1), (34, 1), (17, 1), (48, 2)] {
        check(&format!("{heads}/{kv_heads}"), &mixed(), &plain(heads, kv_heads, 16), 1.0);
    }
    let shape = AttentionShape { window: Some(11), ..plain(20, 1, 24) };
    check("20/1 with a window", &mixed(), &shape, 1.0);
}

/// A segment's descendants need not follow one another.
#[test]
fn interleaved_trees() {
    let forest = forest(&[
        (70, None),
        (20, None),
        (9, Some(0)),
        (66, Some(1)),
        (5, Some(2)),
        (40, Some(0)),
        (3, Some(3)),
    ]);
    for window in [None, Some(8), Some(71)] {
        let shape = AttentionShape { window, ..plain(8, 1, 64) };
        check(&format!("interleaved, window {window:?}"), &forest, &shape, 1.0);
    }
}

/// Rows of fused projections begin anywhere; on a GPU those that 16 bytes cannot be read from at
/// once take another way.
#[test]
fn matrices_that_begin_anywhere() {
    for (pad, head_dim) in [(1, 64), (8, 64), (3, 16), (4, 128), (8, 20), (1, 256)] {
        let shape = plain(4, 2, head_dim);
        check_behind(pad, &format!("behind {pad} columns, heads of {head_dim}"), &mixed(), &shape, 1.0);
    }
}

#[test]
fn one_token() {
    check("one token", &forest(&[(1, None)]), &plain(4, 2, 16), 1.0);
}

#[test]
fn lengths_around_every_block_boundary() {
    for length in [2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 193, 257] {
        check(&format!("length {length}"), &forest(&[(length, None)]), &plain(2, 1, 16), 1.0);
    }
}

#[test]
fn many_short_trees() {
    let segments: Vec<(u32, Option<u32>)> =
        (0..40).flat_map(|i| [(3, None), (2, Some(3 * i)), (5, Some(3 * i))]).collect();
    check("forty pairs", &forest(&segments), &plain(4, 2, 20), 1.0);
}

#[test]
fn a_deep_chain_of_short_segments() {
    let segments: Vec<(u32, Option<u32>)> = (0..60).map(|i: u32| (1 + i % 4, i.checked_sub(1))).collect();
    check("chain", &forest(&segments), &plain(2, 1, 32), 1.0);
    check("chain, 8/1 of 64", &forest(&segments), &plain(8, 1, 64), 1.0);
    let shape = AttentionShape { window: Some(7), ..plain(2, 1, 32) };
    check("chain with a window", &forest(&segments), &shape, 1.0);
}

#[test]
fn many_siblings_share_their_prompt() {
    let segments: Vec<(u32, Option<u32>)> =
        std::iter::once((130, None)).chain((0..9).map(|i| (17 + i, Some(0)))).collect();
    check("siblings", &forest(&segments), &plain(4, 2, 16), 1.0);
}

#[test]
fn windows_cross_segment_borders() {
    for window in [1, 2, 5, 33, 64, 100, 1000] {
        let shape = AttentionShape { window: Some(window), ..plain(4, 2, 16) };
        check(&format!("window {window}"), &mixed(), &shape, 1.0);
    }
    let shape = AttentionShape { window: Some(64), ..plain(2, 1, 16) };
    check("window in a long sequence", &forest(&[(400, None)]), &shape, 1.0);
    for head_dim in [64, 256] {
        let shape = AttentionShape { window: Some(5), ..plain(8, 1, head_dim) };
        check(&format!("window of 5, heads of {head_dim}"), &mixed(), &shape, 1.0);
    }
}

/// Micro-batches put trees together in any order, and rank by rank differently.
#[test]
fn the_bits_of_a_tree_do_not_depend_on_its_neighbours() {
    let alone = forest(&[(150, None), (70, Some(0)), (33, Some(0))]);
    let among = forest(&[(40, None), (7, Some(0)), (150, None), (70, Some(2)), (33, Some(2)), (100, None)]);
    let (own, all, skip) = (alone.num_tokens(), among.num_tokens(), 47);
    for (place, dtype) in cases() {
        for shape in [plain(4, 2, 64), plain(2, 1, 20)] {
            let (q, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
            let mut random = Random(5);
            let (qkv, d_out) = (random.matrix(all, q + 2 * kv, dtype), random.matrix(all, q, dtype));
            let rows = |m: &Matrix| m.rows(skip, own);
            let device = place.device(2, 1 << 28);
            let whole = run(&device, &qkv, &d_out, &among, &shape, dtype);
            let part = run(&device, &rows(&qkv), &rows(&d_out), &alone, &shape, dtype);
            // The gradients of keys and values of a few trees are summed in parts.
            for (what, (whole, part)) in ["out", "lse", "dq"].iter().zip(whole.iter().zip(&part)) {
                assert!(rows(whole) == *part, "{what} of {shape:?} {dtype} {place:?}");
            }
        }
    }
}

/// Queries from any token on have the results of all of them, and on a CPU the bits where blocks begin.
#[test]
fn queries_from_a_token_on() {
    let windowed = AttentionShape { window: Some(50), ..plain(14, 2, 32) };
    for (shape, segments) in [
        (plain(4, 2, 64), &[(400, None)][..]),
        (windowed, &[(300, None)]),
        (plain(2, 2, 40), &[(70, None), (230, Some(0)), (30, Some(0)), (90, None)]),
    ] {
        let (forest, shape) = (forest(segments), &shape);
        let (tokens, q_width, kv_width) =
            (forest.num_tokens(), shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        for (place, dtype) in cases() {
            let mut random = Random(23);
            let [q, k, v] = [q_width, kv_width, kv_width].map(|width| random.matrix(tokens, width, dtype));
            let from = |first_query: usize| {
                same_at_every_thread_count(place, |device| {
                    let q = q.rows(first_query, tokens - first_query);
                    let [q, k, v] = [&q, &k, &v].map(|matrix| matrix.tensor(device, dtype));
                    let mut out = poison(device, tokens - first_query, q_width, dtype);
                    let mut lse = poison(device, tokens - first_query, shape.heads, DType::F32);
                    let (q, k, v, to) = (q.view(), k.view(), v.view(), out.view_mut());
                    let log_sum_exp = lse.view_mut();
                    let call =
                        ops::Attention { q, k, v, forest: &forest, first_query, shape, out: to, log_sum_exp };
                    ops::attention(device, call).unwrap();
                    [Matrix::read(device, out.view()), Matrix::read(device, lse.view())]
                })
            };
            let all = from(0);
            let block = shape.query_block();
            for first in [1, block, 100, 2 * block, 299] {
                let what = format!("{shape:?} from {first}, {dtype} {}", place.name());
                let found = from(first);
                let expected = all.each_ref().map(|all| all.rows(first, tokens - first));
                if matches!(place, Place::Cpu(_)) && segments.len() == 1 && first % block == 0 {
                    assert!(found == expected, "{what}");
                }
                let tolerance = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
                found[0].assert_close(&expected[0], tolerance, &what);
                found[1].assert_close(&expected[1], 1e-5, &what);
            }
        }
    }
}

#[test]
fn softcap() {
    let shape = AttentionShape { softcap: Some(5.0), ..plain(4, 2, 16) };
    check("softcap", &mixed(), &shape, 3.0);
    for head_dim in [64, 100, 256] {
        let shape = AttentionShape { softcap: Some(5.0), window: Some(20), ..plain(4, 2, head_dim) };
        check(&format!("softcap and window, heads of {head_dim}"), &mixed(), &shape, 3.0);
    }
}

/// Scores up to ±200: without the running maximum the exponentials would overflow.
#[test]
fn large_scores() {
    let shape = AttentionShape { scale: 1.0, ..plain(2, 1, 16) };
    check("large scores", &forest(&[(150, None)]), &shape, 6.0);
    let shape = AttentionShape { scale: 0.5, ..plain(2, 1, 64) };
    check("large scores, heads of 64", &forest(&[(150, None)]), &shape, 6.0);
}

/// A step with a number that is none must be found out: neither pass may turn it into something
/// finite.
#[test]
fn not_a_number_stays_one() {
    let all = cases().into_iter().flat_map(|(place, dtype)| [16, 64].map(|width| (place, dtype, width)));
    for (place, dtype, width) in all {
        let (forest, shape) = (forest(&[(20, None), (5, Some(0)), (5, Some(0))]), plain(2, 1, width));
        let mut random = Random(31);
        let mut qkv = random.matrix(30, 4 * width, dtype);
        let d_out = random.matrix(30, 2 * width, dtype);
        // A key of the first answer.
        *qkv.at(21, 2 * width + 8) = f64::NAN;
        let device = place.device(2, 1 << 28);
        let [out, _, dq, dk, _] = run(&device, &qkv, &d_out, &forest, &shape, dtype);
        for t in 0..30 {
            let sees = (21..25).contains(&t);
            assert_eq!(out.row(t).iter().all(|x| x.is_nan()), sees, "out {t} {dtype} {place:?}");
            assert_eq!(dq.row(t).iter().all(|x| x.is_nan()), sees, "dq {t} {dtype} {place:?}");
        }
        assert!(dk.row(0).iter().all(|x| x.is_nan()), "{dtype} {place:?}");
        assert!(dk.row(26).iter().all(|x| x.is_finite()), "{dtype} {place:?}");
    }
}

#[test]
fn a_gpu_without_warpgroups_is_refused() {
    let options = Options { wgmma: true, ..Options::default() };
    let error = Device::cuda(tandem_cuda_emulator::driver(1 << 24), 1 << 24, options).err().unwrap();
    assert_eq!(
        error.to_string(),
        "attention: emulated has compute capability 8.0, and only GPUs of 9.0 multiply by warpgroups; set compute.attention to \
         \"mma\""
    );
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let device = Device::meta();
    let alloc =
        |rows, cols| device.alloc(tandem_kernels::MemoryKind::Scratch, rows, cols, DType::F32).unwrap();
    let (q, k, mut out, mut lse) = (alloc(5, 64), alloc(5, 16), alloc(5, 64), alloc(5, 4));
    let forest = forest(&[(5, None)]);
    let shape = plain(4, 2, 16);
    let mut refused = |shape: &AttentionShape| {
        let call = ops::Attention {
            q: q.view(),
            k: k.view(),
            v: k.view(),
            forest: &forest,
            first_query: 0,
            shape,
            out: out.view_mut(),
            log_sum_exp: lse.view_mut(),
        };
        ops::attention(&device, call).unwrap_err().to_string()
    };
    assert_eq!(refused(&shape), "attention: k is 5x16, expected 5x32");
    let shape = AttentionShape { kv_heads: 3, ..shape };
    assert_eq!(refused(&shape), "attention: 4 heads of 16 do not divide among 3 key/value heads");
}
