use tandem_kernels::ops::ELSEWHERE;
use tandem_kernels::{DType, Device, ops};

use super::matrix::{F32, Matrix, Random, cases, poison, same_at_every_thread_count};
use crate::places::Place;

#[test]
fn looks_up_and_scatters() {
    for (place, dtype, _) in cases() {
        for (tokens, vocabulary, width) in [(1, 1, 1), (7, 5, 20), (301, 11, 97), (40, 300, 256)] {
            for accumulate in [false, true] {
                let mut random = Random(5);
                let table = random.matrix(vocabulary, width, dtype);
                let [before, dx] = [(); 2].map(|()| random.matrix(tokens, width, DType::F32));
                let sums = random.matrix(vocabulary, width, DType::F32);
                let ids: Vec<u32> = (0..tokens).map(|_| random.below(vocabulary) as u32).collect();
                let scale = 1.5;
                let found = same_at_every_thread_count(place, |device| {
                    let table = table.tensor(device, dtype);
                    let mut x = if accumulate {
                        before.tensor(device, DType::F32)
                    } else {
                        poison(device, tokens, width, DType::F32)
                    };
                    ops::embedding(device, table.view(), &ids, scale, x.view_mut(), accumulate).unwrap();
                    let (dx, mut sums) = (dx.tensor(device, DType::F32), sums.tensor(device, DType::F32));
                    ops::embedding_backward(device, &ids, scale, dx.view(), sums.view_mut()).unwrap();
                    [x, sums].map(|t| Matrix::read(device, t.view()))
                });
                let (mut x, mut sums) = (before.clone(), sums);
                for (t, &id) in ids.iter().enumerate() {
                    for i in 0..width {
                        let kept = if accumulate { before.row(t)[i] } else { 0.0 };
                        *x.at(t, i) = kept + f64::from(scale) * table.row(id as usize)[i];
                        *sums.at(id as usize, i) += f64::from(scale) * dx.row(t)[i];
                    }
                }
                found[0].assert_close(&x, 1e-6, "x");
                found[1].assert_close(&sums, F32, "dtable");
            }
        }
    }
}

/// A table in two parts: each looks up and scatters its own tokens, and together they are the whole.
#[test]
fn tokens_that_are_elsewhere_are_left_out() {
    for place in Place::all() {
        left_out(&place.device(2, 1 << 28));
    }
}

fn left_out(device: &Device) {
    let mut random = Random(6);
    let (table, dx) = (random.matrix(5, 20, DType::F32), random.matrix(7, 20, DType::F32));
    let ids: Vec<u32> = (0..7).map(|_| random.below(5) as u32).collect();
    let look_up = |table: &Matrix, ids: &[u32]| {
        let table = table.tensor(device, DType::F32);
        let [mut first, mut both] = [(); 2].map(|()| poison(device, 7, 20, DType::F32));
        ops::embedding(device, table.view(), ids, 2.0, first.view_mut(), false).unwrap();
        ops::cast(device, first.view(), both.view_mut()).unwrap();
        ops::embedding(device, table.view(), ids, 2.0, both.view_mut(), true).unwrap();
        let mut sums = Matrix::zeros(table.rows(), 20).tensor(device, DType::F32);
        let dx = dx.tensor(device, DType::F32);
        ops::embedding_backward(device, ids, 2.0, dx.view(), sums.view_mut()).unwrap();
        [first, both, sums].map(|t| Matrix::read(device, t.view()))
    };
    let whole = look_up(&table, &ids);
    let part = |tokens: std::ops::Range<u32>| {
        let data = table.data[tokens.start as usize * 20..tokens.end as usize * 20].to_vec();
        let place = |&id: &u32| if tokens.contains(&id) { id - tokens.start } else { ELSEWHERE };
        let ids: Vec<u32> = ids.iter().map(place).collect();
        look_up(&Matrix { rows: tokens.len(), cols: 20, data }, &ids)
    };
    let (low, high) = (part(0..3), part(3..5));
    for i in 0..2 {
        let sum = low[i].data.iter().zip(&high[i].data).map(|(a, b)| a + b).collect::<Vec<_>>();
        assert!(sum == whole[i].data);
    }
    assert!([&low[2].data[..], &high[2].data[..]].concat() == whole[2].data);
    let nobody = look_up(&table, &[ELSEWHERE; 7]);
    assert!(nobody.iter().all(|m| m.data.iter().all(|x| *x == 0.0)));
}

#[test]
fn an_id_outside_the_table_is_refused() {
    let device = super::matrix::device(1);
    let table = Matrix::zeros(4, 3).tensor(&device, DType::F32);
    let mut x = poison(&device, 2, 3, DType::F32);
    let error = ops::embedding(&device, table.view(), &[1, 4], 1.0, x.view_mut(), false).unwrap_err();
    assert_eq!(error.to_string(), "embedding: token 1 has id 4, the table has 4 rows");
}
