use tandem_kernels::DType;
use tandem_kernels::ops::{self, RopePairs, RopeTable};

use super::matrix::{F32, Matrix, Random, cases, same_at_every_thread_count};
use crate::places::Place;

/// Rotates by the table's own angles, in f64.
fn rotate(
    x: &Matrix,
    heads: usize,
    head_dim: usize,
    positions: &[u32],
    table: &RopeTable,
    sign: f64,
) -> Matrix {
    let half = table.rotary() / 2;
    let mut y = x.clone();
    for (t, &position) in positions.iter().enumerate() {
        for head in 0..heads {
            for i in 0..half {
                let at = position as usize * half + i;
                let (cos, sin) = (f64::from(table.cos()[at]), sign * f64::from(table.sin()[at]));
                let (low, high) = match table.pairs() {
                    RopePairs::Halves => (i, i + half),
                    RopePairs::Interleaved => (2 * i, 2 * i + 1),
                };
                let (low, high) = (head * head_dim + low, head * head_dim + high);
                let (a, b) = (x.row(t)[low], x.row(t)[high]);
                *y.at(t, low) = a * cos - b * sin;
                *y.at(t, high) = b * cos + a * sin;
            }
        }
    }
    y
}

fn table(rotary: usize, positions: usize) -> RopeTable {
    let frequencies: Vec<f32> =
        (0..rotary / 2).map(|i| 10000f32.powf(-2.0 * i as f32 / rotary as f32)).collect();
    RopeTable::new(&frequencies, positions)
}

#[test]
fn rotates_a_column_range_in_place_and_back() {
    for (place, dtype, tolerance) in cases() {
        for (head_dim, rotary) in [(2, 2), (16, 16), (20, 20), (64, 64), (80, 32), (128, 128), (16, 4)] {
            for (tokens, heads) in [(1, 1), (13, 3), (71, 4)] {
                let mut random = Random(11);
                let extra = 5;
                let x = random.matrix(tokens, heads * head_dim + extra, dtype);
                let positions: Vec<u32> = (0..tokens).map(|_| random.below(50) as u32).collect();
                let pairs = if tokens == 13 { RopePairs::Interleaved } else { RopePairs::Halves };
                let table = table(rotary, 50).with_pairs(pairs);
                let [there, back] = same_at_every_thread_count(place, |device| {
                    [false, true].map(|inverse| {
                        let mut x = x.tensor(device, dtype);
                        let part = x.view_mut().col_range(0..heads * head_dim);
                        ops::rope(device, part, head_dim, &positions, &table, inverse).unwrap();
                        Matrix::read(device, x.view())
                    })
                });
                let what = format!("{dtype} head {head_dim} rotary {rotary} tokens {tokens}");
                there.assert_close(&rotate(&x, heads, head_dim, &positions, &table, 1.0), tolerance, &what);
                back.assert_close(&rotate(&x, heads, head_dim, &positions, &table, -1.0), tolerance, &what);
                // Columns that do not belong to the view stay as they were.
                assert_eq!(there.columns(heads * head_dim, extra), x.columns(heads * head_dim, extra));
            }
        }
    }
}

/// A device that keeps tables takes the right one, whatever came before: another model's, a shorter context, a copy.
#[test]
fn tables_are_told_apart() {
    for place in Place::all() {
        let device = place.device(1, 1 << 28);
        let x = Random(12).matrix(3, 16, DType::F32);
        let first = table(16, 50);
        let tables = [first.clone(), table(8, 50), first, table(4, 9)];
        for (table, position) in tables.iter().flat_map(|table| [(table, 2), (table, 8), (table, 3)]) {
            let positions = [position, 0, 1];
            let mut found = x.tensor(&device, DType::F32);
            ops::rope(&device, found.view_mut(), 16, &positions, table, false).unwrap();
            let what = format!("{place:?}, {} rotate, position {position}", table.rotary());
            let expected = rotate(&x, 1, 16, &positions, table, 1.0);
            Matrix::read(&device, found.view()).assert_close(&expected, F32, &what);
        }
    }
}

#[test]
fn a_scaled_table_rotates_and_scales_by_position() {
    for place in Place::all() {
        let device = place.device(1, 1 << 28);
        let x = Random(13).matrix(3, 16, DType::F32);
        let plain = table(8, 50);
        // The plain table is used first: a device that keeps tables must not take it for the other.
        for table in [plain.clone(), plain.clone().scaled(|position| 1.0 + position as f32)] {
            let mut found = x.tensor(&device, DType::F32);
            ops::rope(&device, found.view_mut(), 8, &[0, 1, 40], &table, false).unwrap();
            let expected = rotate(&x, 2, 8, &[0, 1, 40], &table, 1.0);
            Matrix::read(&device, found.view()).assert_close(&expected, F32, &format!("{place:?}"));
        }
        assert_eq!(plain.clone().scaled(|_| 3.0).cos()[4], 3.0 * plain.cos()[4]);
    }
}

/// Texts that rotate by their length have rows of their own frequencies.
#[test]
fn a_row_rotates_by_its_own_frequencies() {
    let sets = [1.0, 0.3].map(|factor| [1.0, 0.1, 0.01, 0.001].map(|frequency: f32| factor * frequency));
    let places = [(7, 0), (0, 1), (40, 1), (40, 0), (3, 1)];
    let rows = places.map(|(position, set)| (position, &sets[set][..]));
    let (together, alone) = (RopeTable::from_rows(8, rows), sets.map(|set| RopeTable::new(&set, 50)));
    for place in Place::all() {
        let device = place.device(1, 1 << 28);
        let x = Random(14).matrix(5, 16, DType::F32);
        let mut found = x.tensor(&device, DType::F32);
        ops::rope(&device, found.view_mut(), 8, &[0, 1, 2, 3, 4], &together, false).unwrap();
        let mut expected = x.tensor(&device, DType::F32);
        for (row, (position, set)) in places.into_iter().enumerate() {
            let part = expected.view_mut().row_range(row..row + 1);
            ops::rope(&device, part, 8, &[position], &alone[set], false).unwrap();
        }
        let [found, expected] = [found, expected].map(|y| Matrix::read(&device, y.view()));
        assert_eq!(found, expected, "{place:?}");
    }
}

#[test]
fn a_row_beyond_the_table_is_refused() {
    let device = super::matrix::device(1);
    let mut x = Matrix::zeros(2, 8).tensor(&device, DType::F32);
    let error = ops::rope(&device, x.view_mut(), 8, &[3, 10], &table(8, 10), false).unwrap_err();
    assert_eq!(error.to_string(), "rope: row 10 is beyond the table's 10 rows");
}
