//! Rows of f32, element by element: exact, so compared for equality.

use crate::support::{devices, vector};
use tandem_kernels::ops;

#[test]
fn quotients_replace_or_are_added() {
    for (place, device) in devices(1) {
        let (a, b) = (vector(&device, &[1.0, 6.0]), vector(&device, &[4.0, -3.0]));
        let mut y = vector(&device, &[0.5; 2]);
        ops::divide(&device, a.view(), b.view(), y.view_mut(), true).unwrap();
        assert_eq!(y.read(&device), [0.75, -1.5], "{place:?}");
        ops::divide(&device, a.view(), b.view(), y.view_mut(), false).unwrap();
        assert_eq!(y.read(&device), [0.25, -2.0], "{place:?}");
        ops::fill(&device, y.view_mut(), 3.0).unwrap();
        assert_eq!(y.read(&device), [3.0, 3.0], "{place:?}");
        let mut short = vector(&device, &[0.0]);
        assert!(ops::divide(&device, a.view(), b.view(), short.view_mut(), false).is_err());
    }
}

/// At lengths that whole vectors make, and at one that they do not.
#[test]
fn long_rows_are_divided_and_filled_to_their_ends() {
    for (place, device) in devices(2) {
        for len in [4096, 10_003, 12_296] {
            let numbers: Vec<f32> = (1..=len).map(|i| i as f32).collect();
            let (a, b) = (vector(&device, &numbers), vector(&device, &vec![-4.0; len]));
            let mut y = vector(&device, &vec![1.0; len]);
            ops::divide(&device, a.view(), b.view(), y.view_mut(), true).unwrap();
            let expected: Vec<f32> = numbers.iter().map(|x| 1.0 - x / 4.0).collect();
            assert!(y.read(&device) == expected, "{place:?}, {len}");
            ops::fill(&device, y.view_mut(), 2.5).unwrap();
            assert!(y.read(&device) == vec![2.5; len], "{place:?}, {len}");
        }
    }
}

#[test]
fn roots_replace_squares() {
    for (place, device) in devices(1) {
        for len in [1, 4096, 10_003] {
            let numbers: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let squares: Vec<f32> = numbers.iter().map(|x| x * x).collect();
            let exact = numbers.len().min(4096);
            let mut x = vector(&device, &squares);
            ops::square_root(&device, x.view_mut()).unwrap();
            let found = x.read(&device);
            assert_eq!(found[..exact], numbers[..exact], "{place:?}, {len}");
            let expected: Vec<f32> = squares.iter().map(|x| x.sqrt()).collect();
            assert!(found == expected, "{place:?}, {len}");
        }
    }
}

#[test]
fn a_mixture_lies_between() {
    for (place, device) in [1, 3].into_iter().flat_map(devices) {
        for len in [100_003, 4096] {
            let numbers: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let (x, mut y) = (vector(&device, &numbers), vector(&device, &vec![-1.0; len]));
            ops::mix(&device, x.view(), 0.25, y.view_mut()).unwrap();
            let mixed = y.read(&device);
            assert!(mixed.iter().zip(&numbers).all(|(&y, x)| y == 0.25 * x - 0.75), "{place:?}");
            ops::mix(&device, x.view(), 1.0, y.view_mut()).unwrap();
            assert_eq!(y.read(&device), numbers, "{place:?}");
        }
    }
}

#[test]
fn a_row_moves_towards_an_end_and_reaches_it() {
    for (place, device) in [1, 3].into_iter().flat_map(devices) {
        for len in [100_003, 4096] {
            let numbers: Vec<f32> = (0..len).map(|i| i as f32 / 7.0).collect();
            let end = vector(&device, &numbers);
            for weight in [0.0, 0.001, 0.25, 0.75, 1.0, 1.0 - 1.0 / 0.9] {
                let mut y = vector(&device, &vec![-1.5; len]);
                ops::lerp(&device, end.view(), weight, y.view_mut()).unwrap();
                for (y, &end) in y.read(&device).iter().zip(&numbers) {
                    assert_eq!(y.to_bits(), ops::lerp_of(-1.5, end, weight).to_bits(), "{place:?}");
                    let exact = -1.5 + f64::from(weight) * (f64::from(end) + 1.5);
                    // Three roundings of numbers no larger than the end.
                    assert!(
                        (f64::from(*y) - exact).abs() <= 3e-7 * f64::from(end).max(1.5),
                        "{place:?}: {y}, {exact}"
                    );
                }
            }
            // What stands still does not drift.
            let mut still = vector(&device, &numbers);
            ops::lerp(&device, end.view(), 0.001, still.view_mut()).unwrap();
            assert_eq!(still.read(&device), numbers, "{place:?}");
        }
    }
}

#[test]
fn rows_are_exchanged() {
    for (place, device) in [1, 3].into_iter().flat_map(devices) {
        for len in [1, 100_003, 4096] {
            let numbers: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let (mut a, mut b) = (vector(&device, &numbers), vector(&device, &vec![-1.0; len]));
            ops::swap(&device, a.view_mut(), b.view_mut()).unwrap();
            assert_eq!((a.read(&device), b.read(&device)), (vec![-1.0; len], numbers), "{place:?}");
        }
    }
}
