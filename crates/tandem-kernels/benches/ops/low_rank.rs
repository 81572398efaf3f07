//! The products of a low-rank term beside a linear layer: each reads or writes one matrix of tokens, and should take little
//! longer than a copy of it.

use tandem_kernels::{DType, Tensor, ops};

use crate::harness::{Bench, Turns, Work};

const TOKENS: usize = 1024;
const RANK: usize = 16;

/// Inputs and outputs of the layer.
const WIDTHS: [usize; 3] = [512, 2048, 4096];

/// Prints a line per product, width and type.
pub fn run(bench: &Bench) {
    for dtype in [DType::F32, DType::Bf16] {
        for width in WIDTHS {
            let name = format!("low_rank {dtype} {TOKENS}x{width}x{width}, r = {RANK}");
            if bench.wants(&name) {
                let layer = Layer::new(bench, dtype, width);
                layer.run_whole(&name);
                layer.run(&name);
                layer.run_magnitudes(&name);
            }
        }
    }
}

struct Layer<'a> {
    bench: &'a Bench,
    dtype: DType,
    width: usize,
    /// Seconds of the layer's own product.
    full: f64,
    /// `[r, width]`, `[width, r]` and `[T, r]`.
    factors: [Tensor; 3],
}

impl<'a> Layer<'a> {
    fn new(bench: &'a Bench, dtype: DType, width: usize) -> Self {
        let w = bench.matrix(width, width, dtype);
        let mut turns = Self::turns(bench, width, [dtype; 2]);
        let [full] = bench.median_seconds([|| {
            let [x, y] = turns.next();
            ops::linear(&bench.device, x.view(), w.view(), None, None, y.view_mut()).expect("fits");
        }]);
        let factors = [(RANK, width), (width, RANK), (TOKENS, RANK)];
        Self {
            bench,
            dtype,
            width,
            full,
            factors: factors.map(|(rows, cols)| bench.matrix(rows, cols, dtype)),
        }
    }

    fn turns(bench: &Bench, width: usize, types: [DType; 2]) -> Turns {
        let bytes = types.iter().map(|t| TOKENS * width * t.size()).sum();
        Turns::new(false, bytes, || types.map(|t| bench.matrix(TOKENS, width, t)))
    }

    fn run(&self, name: &str) {
        let Self { bench, dtype, width, factors: [a, b, h], .. } = self;
        let device = &bench.device;
        for out in [DType::F32, *dtype] {
            self.line(&format!("{name}: y += h bT, {out}"), out, 2, |[_, y]| {
                ops::linear_add(device, h.view(), b.view(), y.view_mut()).expect("fits");
            });
            self.line(&format!("{name}: dx += dh a, {out}"), out, 2, |[_, dx]| {
                ops::linear_backward_input(device, h.view(), a.view(), dx.view_mut(), true).expect("fits");
            });
            if *dtype == DType::F32 {
                break;
            }
        }
        let mut small = bench.matrix(TOKENS, RANK, *dtype);
        self.line(&format!("{name}: h = x aT"), *dtype, 1, |[x, _]| {
            ops::linear(device, x.view(), a.view(), None, None, small.view_mut()).expect("fits");
        });
        self.line(&format!("{name}: dh = dy b"), *dtype, 1, |[dy, _]| {
            ops::linear_backward_input(device, dy.view(), b.view(), small.view_mut(), false).expect("fits");
        });
        let mut da = bench.matrix(RANK, *width, DType::F32);
        self.line(&format!("{name}: da += dhT x"), *dtype, 1, |[x, _]| {
            ops::linear_backward_weight(device, h.view(), x.view(), da.view_mut(), true).expect("fits");
        });
        let mut db = bench.matrix(*width, RANK, DType::F32);
        self.line(&format!("{name}: db += dyT h"), *dtype, 1, |[dy, _]| {
            ops::linear_backward_weight(device, dy.view(), h.view(), db.view_mut(), true).expect("fits");
        });
    }

    /// The layer's own products with their terms, in turns with the same without.
    fn run_whole(&self, name: &str) {
        let Self { bench, dtype, width, factors: [a, b, h], .. } = self;
        let device = &bench.device;
        let w = bench.matrix(*width, *width, *dtype);
        let mut turns = [(); 4].map(|()| Self::turns(bench, *width, [*dtype, DType::F32]));
        let [with, without, back_with, back_without] = &mut turns;
        let alternatives: [&mut dyn FnMut(); 4] = [
            &mut || {
                let [x, y] = with.next();
                let low_rank = ops::LowRank { h: h.view(), b: b.view() };
                ops::linear_low_rank(device, x.view(), w.view(), low_rank, None, None, y.view_mut())
                    .expect("fits");
            },
            &mut || {
                let [x, y] = without.next();
                ops::linear(device, x.view(), w.view(), None, None, y.view_mut()).expect("fits");
            },
            &mut || {
                let [dy, dx] = back_with.next();
                let term = (h.view(), a.view());
                ops::linear_low_rank_backward_input(device, dy.view(), w.view(), term, dx.view_mut(), false)
                    .expect("fits");
            },
            &mut || {
                let [dy, dx] = back_without.next();
                ops::linear_backward_input(device, dy.view(), w.view(), dx.view_mut(), false).expect("fits");
            },
        ];
        let [with, without, back_with, back_without] = bench.median_seconds(alternatives);
        let work = |rank: usize| Work::Flops(2.0 * (TOKENS * width * (width + rank)) as f64, *dtype);
        for (what, with, without) in
            [("y = x wT + h bT", with, without), ("dx = dy w + dh a", back_with, back_without)]
        {
            let note = format!(", {:.3} x the same without the term", with / without);
            bench.print(&format!("{name}: {what}"), work(RANK), with, &note);
        }
    }

    /// Times DoRA's additions: norms of the rows of the weight with its low-rank term, a factor for each column of the output, and the
    /// gradient of the factors. And dropout.
    fn run_magnitudes(&self, name: &str) {
        let Self { bench, dtype, width, factors: [a, b, _], .. } = self;
        let device = &bench.device;
        let [factors, mut dots, mut norms] = [(); 3].map(|()| bench.matrix(1, *width, DType::F32));
        self.line(&format!("{name}: y *= factors"), *dtype, 2, |[_, y]| {
            ops::scale_columns(device, y.view_mut(), factors.view(), None).expect("fits");
        });
        self.line(&format!("{name}: column dots"), *dtype, 2, |[x, y]| {
            ops::column_dots(device, x.view(), y.view(), dots.view_mut(), true).expect("fits");
        });
        self.line(&format!("{name}: dropout"), *dtype, 2, |[x, y]| {
            ops::dropout(device, x.view(), y.view_mut(), 1, 0.1).expect("fits");
        });
        let w = bench.matrix(*width, *width, *dtype);
        let mut copy = bench.matrix(*width, *width, *dtype);
        let alternatives: [&mut dyn FnMut(); 2] = [
            &mut || {
                let out = norms.view_mut();
                ops::low_rank_row_norms(device, w.view(), a.view(), b.view(), 2.0, out).expect("fits");
            },
            &mut || ops::cast(device, w.view(), copy.view_mut()).expect("same shape"),
        ];
        let [seconds, copy] = bench.median_seconds(alternatives);
        let work = Work::Flops(2.0 * (width * width * (RANK + 1)) as f64, DType::F32);
        let note = format!(", {:.2} x copy, {:.3} x full rank", seconds / copy, seconds / self.full);
        bench.print(&format!("{name}: row norms"), work, seconds, &note);
    }

    /// Times `product` in turns with a copy of the matrix that it reads, or reads and writes (`passes`).
    fn line(&self, name: &str, dtype: DType, passes: usize, mut product: impl FnMut(&mut [Tensor; 2])) {
        let bench = self.bench;
        let mut turns = [(); 2].map(|()| Self::turns(bench, self.width, [dtype; 2]));
        let [own, other] = &mut turns;
        let alternatives: [&mut dyn FnMut(); 2] = [&mut || product(own.next()), &mut || {
            let [x, y] = other.next();
            ops::cast(&bench.device, x.view(), y.view_mut()).expect("same shape");
        }];
        let [seconds, copy] = bench.median_seconds(alternatives);
        let bytes = (passes * TOKENS * self.width * dtype.size()) as f64;
        let note = format!(", {:.2} x copy, {:.3} x full rank", seconds / copy, seconds / self.full);
        bench.print(name, Work::Bytes(bytes), seconds, &note);
    }
}
