use tandem_kernels::ops::{self, DeltaRule, DeltaRuleBackward, DeltaShape};
use tandem_kernels::{After, DType, Device, MemoryKind, Runs, Tensor};

use super::causal_conv::{forest, runs};
use super::matrix::{F32, Matrix, Random, cases, poison, round, same_at_every_thread_count};
use super::norm::central_difference;

/// Operands of the rule, and the gradient of its outputs.
#[derive(Clone)]
struct Operands {
    q: Matrix,
    k: Matrix,
    v: Matrix,
    a: Matrix,
    b: Matrix,
    decay_log: Matrix,
    decay_bias: Matrix,
    d_out: Matrix,
}

/// Gradients; those of the decay's parameters by rows.
struct Gradients {
    dq: Matrix,
    dk: Matrix,
    dv: Matrix,
    da: Matrix,
    db: Matrix,
    d_decay_log: Matrix,
}

fn shape(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> DeltaShape {
    DeltaShape { key_heads, value_heads, key_dim, value_dim, scale: 0.4 }
}

impl Operands {
    /// Random ones: heads of queries and keys have length 1, some decays are far from linear.
    fn new(random: &mut Random, rows: usize, shape: &DeltaShape, dtype: DType) -> Self {
        let heads = shape.value_heads;
        let mut normal = || {
            let mut x = random.matrix(rows, shape.key_width(), DType::F32);
            for head in x.data.chunks_mut(shape.key_dim) {
                let norm = head.iter().map(|x| x * x).sum::<f64>().sqrt();
                head.iter_mut().for_each(|x| *x = round(*x / norm, DType::F32));
            }
            x
        };
        let (q, k) = (normal(), normal());
        let mut a = random.matrix(rows, heads, dtype).map(|x| round(3.0 * x - 2.0, dtype));
        *a.at(rows / 2, heads - 1) = 24.0;
        Self {
            q,
            k,
            v: random.matrix(rows, shape.value_width(), dtype),
            a,
            b: random.matrix(rows, heads, dtype).map(|x| round(4.0 * x, dtype)),
            decay_log: random.matrix(1, heads, DType::F32),
            decay_bias: random.matrix(1, heads, DType::F32),
            d_out: random.matrix(rows, shape.value_width(), dtype),
        }
    }

    /// Returns `g` and β of a token.
    fn gates(&self, t: usize, head: usize) -> (f64, f64) {
        let x = self.a.row(t)[head] + self.decay_bias.data[head];
        let g = -self.decay_log.data[head].exp() * x.exp().ln_1p();
        (g, sigmoid(self.b.row(t)[head]))
    }

    /// Part of the rows.
    fn rows(&self, start: usize, rows: usize) -> Self {
        let [q, k, v, a, b, d_out] =
            [&self.q, &self.k, &self.v, &self.a, &self.b, &self.d_out].map(|m| m.rows(start, rows));
        Self { q, k, v, a, b, d_out, decay_log: self.decay_log.clone(), decay_bias: self.decay_bias.clone() }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The row before each in its text.
fn before(runs: &Runs) -> Vec<Option<usize>> {
    let mut before = Vec::new();
    for run in runs.as_slice() {
        let first = match run.after {
            After::Run(run) => Some(runs.as_slice()[run as usize].rows.end as usize - 1),
            _ => None,
        };
        before.push(first);
        before.extend(run.rows.clone().skip(1).map(|row| Some(row as usize - 1)));
    }
    before
}

/// States `[dk, dv]` of one head: decayed and new, of each row.
type States = Vec<[Matrix; 2]>;

/// The rule as it is written, token by token, in f64.
fn reference(x: &Operands, shape: &DeltaShape, runs: &Runs) -> (Matrix, Vec<States>) {
    let mut out = Matrix::zeros(x.v.rows, x.v.cols);
    let of_head = |head: usize| {
        let (key, value) =
            (head / (shape.value_heads / shape.key_heads) * shape.key_dim, head * shape.value_dim);
        let mut states: States = Vec::new();
        for (t, before) in before(runs).into_iter().enumerate() {
            let (g, beta) = x.gates(t, head);
            let empty = Matrix::zeros(shape.key_dim, shape.value_dim);
            let decayed = before.map_or(empty, |before| states[before][1].map(|s| g.exp() * s));
            let mut state = decayed.clone();
            for c in 0..shape.value_dim {
                let held: f64 = (0..shape.key_dim).map(|i| decayed.row(i)[c] * x.k.row(t)[key + i]).sum();
                let change = beta * (x.v.row(t)[value + c] - held);
                for i in 0..shape.key_dim {
                    *state.at(i, c) += x.k.row(t)[key + i] * change;
                    *out.at(t, value + c) += f64::from(shape.scale) * state.row(i)[c] * x.q.row(t)[key + i];
                }
            }
            states.push([decayed, state]);
        }
        states
    };
    let states = (0..shape.value_heads).map(of_head).collect();
    (out, states)
}

/// Analytic, from the last row to the first; held to central differences below.
fn reference_backward(x: &Operands, shape: &DeltaShape, runs: &Runs) -> Gradients {
    let (_, states) = reference(x, shape, runs);
    let zeros = |of: &Matrix| Matrix::zeros(of.rows, of.cols);
    let [dq, dk, dv, da, db, d_decay_log] = [&x.q, &x.k, &x.v, &x.a, &x.b, &x.a].map(zeros);
    let mut of = Gradients { dq, dk, dv, da, db, d_decay_log };
    let (dims, before) = (shape.key_dim, before(runs));
    for (head, states) in states.iter().enumerate() {
        let (key, value) = (head / (shape.value_heads / shape.key_heads) * dims, head * shape.value_dim);
        // The gradient of the state after each row.
        let mut d_states = vec![Matrix::zeros(dims, shape.value_dim); x.v.rows];
        for t in (0..x.v.rows).rev() {
            let ([decayed, state], mut d) = (&states[t], d_states[t].clone());
            let ((g, beta), mut d_beta, mut dg) = (x.gates(t, head), 0.0, 0.0);
            for c in 0..shape.value_dim {
                let d_out = f64::from(shape.scale) * x.d_out.row(t)[value + c];
                let k = |i: usize| x.k.row(t)[key + i];
                for i in 0..dims {
                    *of.dq.at(t, key + i) += state.row(i)[c] * d_out;
                    *d.at(i, c) += x.q.row(t)[key + i] * d_out;
                }
                let held: f64 = (0..dims).map(|i| decayed.row(i)[c] * k(i)).sum();
                let error = x.v.row(t)[value + c] - held;
                let d_change: f64 = (0..dims).map(|i| d.row(i)[c] * k(i)).sum();
                d_beta += d_change * error;
                *of.dv.at(t, value + c) = beta * d_change;
                for i in 0..dims {
                    *of.dk.at(t, key + i) += d.row(i)[c] * beta * error - decayed.row(i)[c] * beta * d_change;
                    *d.at(i, c) -= k(i) * beta * d_change;
                    dg += decayed.row(i)[c] * d.row(i)[c];
                }
            }
            let x = x.a.row(t)[head] + x.decay_bias.data[head];
            let rate = g / x.exp().ln_1p();
            *of.da.at(t, head) = dg * rate * sigmoid(x);
            *of.d_decay_log.at(t, head) = dg * g;
            *of.db.at(t, head) = d_beta * beta * (1.0 - beta);
            if let Some(before) = before[t] {
                d_states[before].data.iter_mut().zip(&d.data).for_each(|(sum, d)| *sum += g.exp() * d);
            }
        }
    }
    of
}

/// Operands on a device, the matrices with a row per token as column ranges of wider ones.
struct OnDevice<'a> {
    device: &'a Device,
    pad: usize,
    dtype: DType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    decay_log: Tensor,
    decay_bias: Tensor,
    d_out: Tensor,
}

impl<'a> OnDevice<'a> {
    fn new(device: &'a Device, x: &Operands, pad: usize, dtype: DType) -> Self {
        let put = |m: &Matrix, dtype| m.behind(pad).tensor(device, dtype);
        Self {
            device,
            pad,
            dtype,
            q: put(&x.q, DType::F32),
            k: put(&x.k, DType::F32),
            v: put(&x.v, dtype),
            a: put(&x.a, dtype),
            b: put(&x.b, dtype),
            decay_log: x.decay_log.tensor(device, DType::F32),
            decay_bias: x.decay_bias.tensor(device, DType::F32),
            d_out: put(&x.d_out, dtype),
        }
    }

    fn forward(&self, shape: &DeltaShape, runs: &Runs, states: Option<&mut Tensor>) -> Matrix {
        let [q, k, v, a, b] =
            [&self.q, &self.k, &self.v, &self.a, &self.b].map(|t| t.view().col_range(self.pad..t.cols()));
        let mut out = poison(self.device, v.rows(), self.v.cols(), self.dtype);
        let call = DeltaRule {
            q,
            k,
            v,
            a,
            b,
            decay_log: self.decay_log.view(),
            decay_bias: self.decay_bias.view(),
            shape,
            runs,
            states: states.map(Tensor::view_mut),
            out: out.view_mut().col_range(self.pad..self.v.cols()),
        };
        ops::delta_rule(self.device, call).unwrap();
        self.read(&out)
    }

    /// Reads a result, before which nothing is written.
    fn read(&self, found: &Tensor) -> Matrix {
        let before = Matrix::read(self.device, found.view().col_range(0..self.pad));
        assert!(before.data.iter().all(|x| x.is_nan()), "columns before the result");
        Matrix::read(self.device, found.view().col_range(self.pad..found.cols()))
    }

    /// Returns the gradients in the order of [`Gradients`].
    fn backward(&self, shape: &DeltaShape, runs: &Runs) -> [Matrix; 6] {
        let [q, k, v, a, b, d_out] = [&self.q, &self.k, &self.v, &self.a, &self.b, &self.d_out]
            .map(|t| t.view().col_range(self.pad..t.cols()));
        let result = |of: &Tensor, dtype| poison(self.device, of.rows(), of.cols(), dtype);
        let mut found = [
            result(&self.q, DType::F32),
            result(&self.k, DType::F32),
            result(&self.v, self.dtype),
            result(&self.a, self.dtype),
            result(&self.b, self.dtype),
            result(&self.a, DType::F32),
        ];
        let [dq, dk, dv, da, db, d_decay_log] = found.each_mut().map(|t| {
            let cols = self.pad..t.cols();
            t.view_mut().col_range(cols)
        });
        let call = DeltaRuleBackward {
            q,
            k,
            v,
            a,
            b,
            decay_log: self.decay_log.view(),
            decay_bias: self.decay_bias.view(),
            shape,
            runs,
            d_out,
            dq,
            dk,
            dv,
            da,
            db,
            d_decay_log,
        };
        ops::delta_rule_backward(self.device, call).unwrap();
        found.map(|t| self.read(&t))
    }
}

/// Compares both passes at every place with the reference.
#[track_caller]
fn check(shape: &DeltaShape, runs: &Runs, pad: usize) {
    let rows = runs.num_rows();
    for (place, dtype, tolerance) in cases() {
        let x = Operands::new(&mut Random(61), rows, shape, dtype);
        let (out, [dq, dk, dv, da, db, d_decay_log]) = same_at_every_thread_count(place, |device| {
            let on = OnDevice::new(device, &x, pad, dtype);
            (on.forward(shape, runs, None), on.backward(shape, runs))
        });
        let what = format!("{shape:?}, {rows} rows, {dtype} {place:?}");
        let expected = reference_backward(&x, shape, runs);
        out.assert_close(&reference(&x, shape, runs).0, tolerance, &format!("out {what}"));
        dq.assert_close(&expected.dq, F32, &format!("dq {what}"));
        dk.assert_close(&expected.dk, F32, &format!("dk {what}"));
        dv.assert_close(&expected.dv, tolerance, &format!("dv {what}"));
        // Sums over a whole state of terms that cancel.
        da.assert_close_beside(1e-3, &expected.da, tolerance, &format!("da {what}"));
        db.assert_close(&expected.db, tolerance, &format!("db {what}"));
        d_decay_log.assert_close_beside(1e-3, &expected.d_decay_log, F32, &format!("d_decay_log {what}"));
    }
}

#[test]
fn heads_of_every_size() {
    for (key_heads, value_heads, key_dim, value_dim, pad) in
        [(1, 1, 1, 1, 0), (1, 2, 7, 16, 3), (2, 6, 16, 7, 0), (1, 1, 33, 64, 4), (2, 4, 64, 33, 1)]
    {
        check(&shape(key_heads, value_heads, key_dim, value_dim), &forest(), pad);
    }
    let short = runs(&[(3, After::Nothing, None), (2, After::Run(0), None), (1, After::Run(0), None)]);
    for (key_dim, value_dim) in [(128, 128), (130, 20), (20, 256)] {
        check(&shape(1, 1, key_dim, value_dim), &short, 0);
    }
}

/// Longer than the parts that backward keeps states for, with branches inside and at the ends of those.
#[test]
fn long_texts() {
    let long = [
        (300, After::Nothing, None),
        (128, After::Run(0), None),
        (1, After::Run(0), None),
        (20, After::Run(1), None),
        (129, After::Nothing, None),
        (31, After::Run(1), None),
    ];
    check(&shape(1, 2, 16, 8), &runs(&long), 0);
}

/// The references are what is differentiated.
#[test]
fn the_reference_has_its_gradients() {
    let (shape, runs) = (shape(1, 2, 3, 2), forest());
    let mut x = Operands::new(&mut Random(62), runs.num_rows(), &shape, DType::F32);
    // Where the decay is complete, differences see nothing.
    x.a = x.a.map(|a| a.min(1.0));
    let of = reference_backward(&x, &shape, &runs);
    let difference = |operand: fn(&mut Operands) -> &mut Matrix| {
        let own = operand(&mut x.clone()).clone();
        central_difference(&own, &x.d_out, |moved| {
            let mut x = x.clone();
            *operand(&mut x) = moved.clone();
            reference(&x, &shape, &runs).0
        })
    };
    let sums = |m: &Matrix| Matrix {
        rows: 1,
        cols: m.cols,
        data: (0..m.cols).map(|c| (0..m.rows).map(|t| m.row(t)[c]).sum()).collect(),
    };
    of.dq.assert_close(&difference(|x| &mut x.q), 1e-7, "dq");
    of.dk.assert_close(&difference(|x| &mut x.k), 1e-7, "dk");
    of.dv.assert_close(&difference(|x| &mut x.v), 1e-7, "dv");
    of.da.assert_close(&difference(|x| &mut x.a), 1e-7, "da");
    of.db.assert_close(&difference(|x| &mut x.b), 1e-7, "db");
    sums(&of.da).assert_close(&difference(|x| &mut x.decay_bias), 1e-7, "decay_bias");
    sums(&of.d_decay_log).assert_close(&difference(|x| &mut x.decay_log), 1e-7, "decay_log");
}

/// A text whose state is kept has the bits of one pass, in whatever pieces it comes, and whatever other
/// texts come with it.
#[test]
fn a_kept_text_is_continued_with_the_same_bits() {
    const TOKENS: usize = 40;
    for (place, dtype, _) in cases() {
        let device = place.device(2, 1 << 28);
        for shape in [shape(1, 2, 7, 33), shape(1, 1, 64, 16), shape(2, 2, 130, 4)] {
            let x = Operands::new(&mut Random(63), 2 * TOKENS, &shape, dtype);
            // States of slots that nobody reads or keeps are not touched.
            let mut states = poison(&device, 4, shape.state_len(), DType::F32);
            let whole = runs(&[(TOKENS as u32, After::Nothing, None); 2]);
            let whole = OnDevice::new(&device, &x, 0, dtype).forward(&shape, &whole, None);
            let mut run = |first: usize, second: Option<usize>, of: &[(u32, After, Option<u32>)]| {
                let rows = |start, rows: u32| x.rows(start, rows as usize);
                let mut part = rows(first, of[0].0);
                if let Some(second) = second {
                    let more = rows(second, of[1].0);
                    let both = [
                        (&mut part.q, more.q),
                        (&mut part.k, more.k),
                        (&mut part.v, more.v),
                        (&mut part.a, more.a),
                        (&mut part.b, more.b),
                        (&mut part.d_out, more.d_out),
                    ];
                    for (part, more) in both {
                        part.data.extend(more.data);
                        part.rows += more.rows;
                    }
                }
                let found =
                    OnDevice::new(&device, &part, 0, dtype).forward(&shape, &runs(of), Some(&mut states));
                let own = of[0].0 as usize;
                let what = format!("rows {first} {second:?} {shape:?} {dtype} {place:?}");
                assert!(found.rows(0, own) == whole.rows(first, own), "{what}");
                if let Some(second) = second {
                    let own_second = found.rows - own;
                    assert!(
                        found.rows(own, own_second) == whole.rows(second, own_second),
                        "second of {what}"
                    );
                }
            };
            // One text begins in one piece, the other in two, kept in another slot each time.
            run(0, Some(TOKENS), &[(33, After::Nothing, Some(2)), (2, After::Nothing, Some(0))]);
            run(33, Some(TOKENS + 2), &[(1, After::Slot(2), Some(2)), (34, After::Slot(0), Some(1))]);
            // Then token by token.
            for t in 0..4 {
                let of = [(1, After::Slot(2), Some(2)), (1, After::Slot(1), Some(1))];
                run(34 + t, Some(TOKENS + 36 + t), &of);
            }
            // A run after another that keeps, and a slot that is read and not kept.
            run(38, Some(39), &[(1, After::Slot(2), Some(2)), (1, After::Run(0), None)]);
            run(39, None, &[(1, After::Slot(2), None)]);
            let untouched = Matrix::read(&device, states.view().row_range(3..4));
            assert!(untouched.data.iter().all(|x| x.is_nan()), "{shape:?} {dtype} {place:?}");
        }
    }
}

/// Several runs continue what is read from a slot and kept in it.
#[test]
fn branches_of_a_kept_text() {
    let shape = shape(1, 2, 16, 20);
    for (place, dtype, _) in cases() {
        let device = place.device(2, 1 << 28);
        let x = Operands::new(&mut Random(64), 9, &shape, dtype);
        let mut states = poison(&device, 3, shape.state_len(), DType::F32);
        let mut forward = |x: &Operands, of: &[(u32, After, Option<u32>)]| {
            OnDevice::new(&device, x, 0, dtype).forward(&shape, &runs(of), Some(&mut states))
        };
        let tree = [(4, After::Nothing, None), (2, After::Run(0), None), (2, After::Run(0), None)];
        let whole = forward(&x, &[&tree[..], &[(1, After::Run(2), None)]].concat());
        forward(&x.rows(0, 3), &[(3, After::Nothing, Some(1))]);
        let tree = [(1, After::Slot(1), Some(1)), (2, After::Run(0), None), (2, After::Run(0), Some(2))];
        let found = forward(&x.rows(3, 5), &tree);
        assert!(found == whole.rows(3, 5), "{dtype} {place:?}");
        let found = forward(&x.rows(8, 1), &[(1, After::Slot(2), None)]);
        assert!(found == whole.rows(8, 1), "last token, {dtype} {place:?}");
        // The kept text ends before its branches.
        let found = forward(&x.rows(4, 2), &[(2, After::Slot(1), None)]);
        assert!(found == whole.rows(4, 2), "a branch, {dtype} {place:?}");
    }
}

#[test]
fn the_bits_of_a_tree_do_not_depend_on_its_neighbours() {
    let alone = [(40, None), (7, Some(0)), (33, Some(0))];
    let among = [(5, None), (1, Some(0)), (40, None), (7, Some(2)), (33, Some(2)), (9, None)];
    let of = |of: &[(u32, Option<u32>)]| {
        let of = of.iter().map(|&(length, after)| (length, after.map_or(After::Nothing, After::Run), None));
        runs(&of.collect::<Vec<_>>())
    };
    let (alone, among, shape) = (of(&alone), of(&among), shape(1, 2, 20, 9));
    for (place, dtype, _) in cases() {
        let device = place.device(2, 1 << 28);
        let x = Operands::new(&mut Random(65), among.num_rows(), &shape, dtype);
        let own = |m: &Matrix| m.rows(6, alone.num_rows());
        let (all, part) = (OnDevice::new(&device, &x, 0, dtype), x.rows(6, alone.num_rows()));
        let part = OnDevice::new(&device, &part, 0, dtype);
        assert!(own(&all.forward(&shape, &among, None)) == part.forward(&shape, &alone, None), "{place:?}");
        let gradients = all.backward(&shape, &among).into_iter().zip(part.backward(&shape, &alone));
        for (index, (all, part)) in gradients.enumerate() {
            assert!(own(&all) == part, "gradient {index} {dtype} {place:?}");
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let device = Device::meta();
    let alloc = |rows, cols| device.alloc(MemoryKind::Scratch, rows, cols, DType::F32).unwrap();
    let (keys, values, gates, one) = (alloc(3, 8), alloc(3, 24), alloc(3, 4), alloc(1, 4));
    let (mut out, mut states) = (alloc(3, 24), alloc(2, 96));
    let mut refused = |shape: &DeltaShape, of: &[(u32, After, Option<u32>)]| {
        let call = DeltaRule {
            q: keys.view(),
            k: keys.view(),
            v: values.view(),
            a: gates.view(),
            b: gates.view(),
            decay_log: one.view(),
            decay_bias: one.view(),
            shape,
            runs: &runs(of),
            states: Some(states.view_mut()),
            out: out.view_mut(),
        };
        ops::delta_rule(&device, call).unwrap_err().to_string()
    };
    let text = [(3, After::Nothing, Some(1))];
    assert_eq!(refused(&shape(2, 3, 4, 8), &text), "delta_rule: 3 value heads of 8 with 2 key heads of 4");
    assert_eq!(refused(&shape(2, 4, 5, 6), &text), "delta_rule: q is 3x8, expected 3x10");
    let error = refused(&shape(2, 4, 4, 6), &[(3, After::Nothing, Some(2))]);
    assert_eq!(error, "delta_rule: runs name 3 slots of 2");
}
