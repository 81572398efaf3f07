//! Instructions as a program has them.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

use std::arch::asm;

/// Rows of a tile, and words of its rows.
const SIDE: usize = 16;

type Tile = [[u32; SIDE]; SIDE];

#[repr(C, align(64))]
struct Configuration([u8; 64]);

/// bf16 of a small whole number, which it holds exactly.
fn half(x: i32) -> u32 {
    (x as f32).to_bits() >> 16
}

/// Pairs of whole numbers from −8 to 7.
fn pairs(seed: u32) -> Tile {
    let number = |i: u32| half((i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 28) as i32 - 8);
    let word = |row: usize, column: usize| {
        let at = 2 * (SIDE * row + column) as u32;
        number(at) | number(at + 1) << 16
    };
    std::array::from_fn(|row| std::array::from_fn(|column| word(row, column)))
}

fn numbers(word: u32) -> [f32; 2] {
    [word << 16, word & 0xffff_0000].map(f32::from_bits)
}

/// The first rows of `sums`, with the product of `first` and `second` added twice.
fn add_twice(rows: u8, first: &Tile, second: &Tile, sums: &mut [[f32; SIDE]; SIDE]) {
    let mut configuration = Configuration([0; 64]);
    configuration.0[0] = 1;
    for (tile, rows) in [(0, rows), (1, rows), (2, SIDE as u8)] {
        configuration.0[16 + 2 * tile] = 64;
        configuration.0[48 + tile] = rows;
    }
    // SAFETY: the instructions are emulated; all tiles lie in memory.
    unsafe {
        asm!(
            "ldtilecfg [{configuration}]",
            "tileloadd tmm0, [{sums} + {row}]",
            "tileloadd tmm1, [{first} + {row}]",
            "tileloaddt1 tmm2, [{second} + {row}]",
            "tdpbf16ps tmm0, tmm1, tmm2",
            "nop",
            "tdpbf16ps tmm0, tmm1, tmm2",
            "tilestored [{sums} + {row}], tmm0",
            "tilezero tmm1",
            "tilerelease",
            configuration = in(reg) &raw const configuration,
            sums = in(reg) sums.as_mut_ptr(),
            first = in(reg) first.as_ptr(),
            second = in(reg) second.as_ptr(),
            row = in(reg) size_of::<[u32; SIDE]>(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _,
            options(nostack),
        );
    }
}

#[test]
fn a_product_of_tiles_is_that_of_its_numbers() {
    if !(is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma")) {
        return;
    }
    tandem_amx_emulator::install();
    // Each thread has registers of its own.
    std::thread::scope(|scope| {
        for seed in 0..4 {
            scope.spawn(move || {
                let (first, second) = (pairs(seed), pairs(seed + 99));
                for rows in [1, 7, 16] {
                    let mut sums = [[0.5; SIDE]; SIDE];
                    add_twice(rows, &first, &second, &mut sums);
                    for (row, found) in sums.iter().enumerate() {
                        for (column, &found) in found.iter().enumerate() {
                            let product = |k: usize| {
                                let (a, b) = (numbers(first[row][k]), numbers(second[k][column]));
                                a[0] * b[0] + a[1] * b[1]
                            };
                            let sum: f32 = (0..SIDE).map(product).sum();
                            let expected = if row < usize::from(rows) { 0.5 + 2.0 * sum } else { 0.5 };
                            assert_eq!(found, expected, "row {row}, column {column} of {rows} rows");
                        }
                    }
                }
            });
        }
    });
}
