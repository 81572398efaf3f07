use tandem_kernels::DType;
use tandem_kernels::ops::{self, AttentionShape, Visible};

use crate::attention::reference;
use crate::matrix::{Matrix, Random, cases, poison, same_at_every_thread_count};

#[test]
fn single_tokens_over_a_cache() {
    for (place, dtype, tolerance) in cases() {
        for head_dim in [16, 20, 64, 80, 128] {
            for (heads, kv_heads) in [(1, 1), (4, 2), (8, 1)] {
                for window in [None, Some(1), Some(70)] {
                    let shape = AttentionShape {
                        heads,
                        kv_heads,
                        head_dim,
                        scale: 0.3,
                        window,
                        softcap: (head_dim == 20).then_some(4.0),
                    };
                    let visible = Visible {
                        offsets: vec![0, 1, 3, 4, 7],
                        ranges: vec![0..1, 0..90, 150..233, 5..6, 10..20, 20..20, 40..169],
                    };
                    let mut random = Random(23);
                    let q = random.matrix(4, heads * head_dim, dtype);
                    let [k, v] = [(); 2].map(|()| random.matrix(233, kv_heads * head_dim, dtype));
                    let found = same_at_every_thread_count(place, |device| {
                        let [q, k, v] = [&q, &k, &v].map(|m| m.tensor(device, dtype));
                        let mut out = poison(device, 4, heads * head_dim, dtype);
                        let view = out.view_mut();
                        ops::attention_decode(device, q.view(), k.view(), v.view(), &visible, &shape, view)
                            .unwrap();
                        Matrix::read(device, out.view())
                    });
                    let seen: Vec<Vec<usize>> = (0..4)
                        .map(|i| {
                            let ranges =
                                &visible.ranges[visible.offsets[i] as usize..visible.offsets[i + 1] as usize];
                            let rows: Vec<usize> =
                                ranges.iter().cloned().flatten().map(|r| r as usize).collect();
                            rows[rows.len().saturating_sub(window.unwrap_or(u32::MAX) as usize)..].to_vec()
                        })
                        .collect();
                    let expected = reference(&shape, &q, &k, &v, &q, |t, u| seen[t].contains(&u));
                    let what = format!("{heads}/{kv_heads} of {head_dim} {dtype} window {window:?}");
                    found.assert_close(&expected.out, 2.0 * tolerance, &what);
                }
            }
        }
    }
}

#[test]
fn a_query_that_sees_nothing_is_refused() {
    let device = crate::matrix::device(1);
    let q = Matrix::zeros(1, 4).tensor(&device, DType::F32);
    let mut out = poison(&device, 1, 4, DType::F32);
    let shape =
        AttentionShape { heads: 1, kv_heads: 1, head_dim: 4, scale: 1.0, window: None, softcap: None };
    for (range, message) in [
        (0..0, "attention_decode: query 0 sees nothing"),
        (0..2, "attention_decode: query 0 sees cache rows 0..2 of 1"),
    ] {
        let visible = Visible { offsets: vec![0, 1], ranges: [range].to_vec() };
        let view = out.view_mut();
        let error =
            ops::attention_decode(&device, q.view(), q.view(), q.view(), &visible, &shape, view).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}
