use tandem_kernels::ops::{self, CausalConv, CausalConvBackward};
use tandem_kernels::{After, DType, Device, Run, Runs};

use super::matrix::{F32, Matrix, Random, cases, poison, same_at_every_thread_count};
use super::norm::central_difference;
use crate::places::Place;

/// Runs of these lengths, with what they continue and where they are kept.
pub fn runs(of: &[(u32, After, Option<u32>)]) -> Runs {
    let mut start = 0;
    let run = |&(length, after, keep): &(u32, After, Option<u32>)| {
        start += length;
        Run { rows: start - length..start, after, keep }
    };
    Runs::new(of.iter().map(run).collect()).expect("valid runs")
}

/// Two trees with branches, short runs, and a text of one run.
pub fn forest() -> Runs {
    let (none, after) = (After::Nothing, |run| After::Run(run));
    let of = [
        (9, none),
        (1, after(0)),
        (2, after(1)),
        (1, none),
        (5, after(0)),
        (1, after(4)),
        (3, after(3)),
        (1, after(4)),
        (11, none),
        (2, after(0)),
    ];
    runs(&of.map(|(length, after)| (length, after, None)))
}

/// Rows of each token's own text from its first on, itself last, by following what runs continue.
pub fn texts(runs: &Runs) -> Vec<Vec<usize>> {
    let mut texts: Vec<Vec<usize>> = Vec::new();
    for run in runs.as_slice() {
        let mut text = match run.after {
            After::Run(before) => texts[runs.as_slice()[before as usize].rows.end as usize - 1].clone(),
            _ => Vec::new(),
        };
        for row in run.rows.clone() {
            text.push(row as usize);
            texts.push(text.clone());
        }
    }
    texts
}

/// Texts with nothing before them.
fn reference(x: &Matrix, w: &Matrix, texts: &[Vec<usize>]) -> Matrix {
    let mut y = Matrix::zeros(x.rows, x.cols);
    for (t, text) in texts.iter().enumerate() {
        for (&row, j) in text.iter().rev().zip((0..w.cols).rev()) {
            for c in 0..x.cols {
                *y.at(t, c) += w.row(c)[j] * x.row(row)[c];
            }
        }
    }
    y
}

/// Analytic; held to central differences below.
fn reference_backward(x: &Matrix, w: &Matrix, dy: &Matrix, texts: &[Vec<usize>]) -> [Matrix; 2] {
    let (mut dx, mut dw) = (Matrix::zeros(x.rows, x.cols), Matrix::zeros(w.rows, w.cols));
    for (t, text) in texts.iter().enumerate() {
        for (&row, j) in text.iter().rev().zip((0..w.cols).rev()) {
            for c in 0..x.cols {
                *dx.at(row, c) += w.row(c)[j] * dy.row(t)[c];
                *dw.at(c, j) += dy.row(t)[c] * x.row(row)[c];
            }
        }
    }
    [dx, dw]
}

/// Convolves without slots, behind `pad` columns of others: `y`, `dx`, and the gradient added to
/// `dw`.
fn run(device: &Device, [x, w, dy, dw]: [&Matrix; 4], runs: &Runs, pad: usize, dtype: DType) -> [Matrix; 3] {
    let cols = pad..pad + x.cols;
    let [xt, dyt] = [x, dy].map(|m| m.behind(pad).tensor(device, dtype));
    let [xv, dyv] = [&xt, &dyt].map(|t| t.view().col_range(cols.clone()));
    let wt = w.tensor(device, DType::F32);
    let mut dwt = dw.behind(pad).tensor(device, DType::F32);
    let [mut y, mut dx] = [(); 2].map(|()| poison(device, x.rows, pad + x.cols, dtype));
    let to = y.view_mut().col_range(cols.clone());
    ops::causal_conv(device, CausalConv { x: xv, w: wt.view(), runs, history: None, y: to }).unwrap();
    let own_dw = pad..pad + w.cols;
    let (to, dw) = (dx.view_mut().col_range(cols.clone()), dwt.view_mut().col_range(own_dw.clone()));
    let call = CausalConvBackward { x: xv, w: wt.view(), runs, dy: dyv, dx: to, dw: Some(dw) };
    ops::causal_conv_backward(device, call).unwrap();
    for found in [&y, &dx] {
        let before = Matrix::read(device, found.view().col_range(0..pad));
        assert!(before.data.iter().all(|x| x.is_nan()), "columns before the result");
    }
    let views = [y.view().col_range(cols.clone()), dx.view().col_range(cols), dwt.view().col_range(own_dw)];
    views.map(|view| Matrix::read(device, view))
}

#[test]
fn texts_of_a_forest_forward_and_backward() {
    let long: Runs =
        runs(&[(300, After::Nothing, None), (223, After::Run(0), None), (1, After::Run(0), None)]);
    for (place, dtype, tolerance) in cases() {
        for (runs, channels, width, pad) in [
            (forest(), 1, 1, 0),
            (forest(), 7, 4, 3),
            (forest(), 128, 4, 8),
            (forest(), 260, 2, 0),
            (forest(), 33, 16, 5),
            (long.clone(), 20, 4, 4),
        ] {
            let (rows, texts) = (runs.num_rows(), texts(&runs));
            let mut random = Random(51);
            let [x, dy] = [(); 2].map(|()| random.matrix(rows, channels, dtype));
            let [w, dw] = [(); 2].map(|()| random.matrix(channels, width, DType::F32));
            let [y, dx, found_dw] = same_at_every_thread_count(place, |device| {
                run(device, [&x, &w, &dy, &dw], &runs, pad, dtype)
            });
            let what = format!("{rows}x{channels} width {width} {dtype} {place:?}");
            y.assert_close(&reference(&x, &w, &texts), tolerance, &format!("y {what}"));
            let [expected, mut expected_dw] = reference_backward(&x, &w, &dy, &texts);
            dx.assert_close(&expected, tolerance, &format!("dx {what}"));
            expected_dw.data.iter_mut().zip(&dw.data).for_each(|(sum, before)| *sum += before);
            found_dw.assert_close(&expected_dw, F32, &format!("dw {what}"));
        }
    }
}

/// The references are what is differentiated.
#[test]
fn the_reference_has_its_gradients() {
    let texts = texts(&forest());
    let mut random = Random(52);
    let [x, dy] = [(); 2].map(|()| random.matrix(texts.len(), 2, DType::F32));
    let w = random.matrix(2, 4, DType::F32);
    let [dx, dw] = reference_backward(&x, &w, &dy, &texts);
    dx.assert_close(&central_difference(&x, &dy, |x| reference(x, &w, &texts)), 1e-8, "dx");
    dw.assert_close(&central_difference(&w, &dy, |w| reference(&x, w, &texts)), 1e-8, "dw");
}

/// Texts in slots give the bits of one pass over them, in whatever pieces they come.
#[test]
fn a_kept_text_is_continued_with_the_same_bits() {
    const TOKENS: usize = 12;
    for (place, dtype, _) in cases() {
        let device = place.device(2, 1 << 28);
        for (channels, width) in [(5, 1), (7, 4), (64, 4), (300, 3), (9, 16)] {
            let mut random = Random(53);
            let x = random.matrix(3 * TOKENS, channels, dtype);
            let w = random.matrix(channels, width, DType::F32);
            let wt = w.tensor(&device, DType::F32);
            // Histories of slots that nobody reads or keeps stay as they are: not-a-number.
            let mut history = poison(&device, 5 * (width - 1), channels, dtype);
            let mut convolve = |x: &Matrix, runs: &Runs| {
                let (xt, mut y) = (x.tensor(&device, dtype), poison(&device, x.rows, channels, dtype));
                let call = CausalConv {
                    x: xt.view(),
                    w: wt.view(),
                    runs,
                    history: Some(history.view_mut()),
                    y: y.view_mut(),
                };
                ops::causal_conv(&device, call).unwrap();
                Matrix::read(&device, y.view())
            };
            let whole = [(TOKENS as u32, After::Nothing, None); 3];
            let whole = convolve(&x, &runs(&whole));
            // Each call has the next tokens of three texts, of which one ends in another slot than it
            // began in, and one is continued twice, once to be forgotten.
            let mut pieces: Vec<Matrix> = (0..3).map(|_| Matrix::zeros(0, channels)).collect();
            let mut done = [0; 3];
            for call in 0..6 {
                let lengths = if call == 0 { [2, 1, 6] } else { [1, 2, 1] };
                let after = |text: usize| match (call, text) {
                    (0, _) => After::Nothing,
                    (_, 1) => After::Slot(if call % 2 == 1 { 1 } else { 3 }),
                    (_, text) => After::Slot(text as u32),
                };
                let keep = |text: usize| match text {
                    1 => Some(if call % 2 == 0 { 1 } else { 3 }),
                    text => Some(text as u32),
                };
                let mut of: Vec<_> =
                    (0..3).map(|text| (lengths[text] as u32, after(text), keep(text))).collect();
                of.push((1, After::Run(0), None));
                let mut rows = Matrix::zeros(0, channels);
                let mut push = |m: &Matrix| {
                    rows.data.extend_from_slice(&m.data);
                    rows.rows += m.rows;
                };
                for text in 0..3 {
                    push(&x.rows(text * TOKENS + done[text], lengths[text]));
                }
                push(&x.rows(0, 1));
                let found = convolve(&rows, &runs(&of));
                let mut start = 0;
                for text in 0..3 {
                    pieces[text].data.extend_from_slice(&found.rows(start, lengths[text]).data);
                    pieces[text].rows += lengths[text];
                    done[text] += lengths[text];
                    start += lengths[text];
                }
            }
            for (text, piece) in pieces.iter().enumerate() {
                let expected = whole.rows(text * TOKENS, piece.rows);
                assert!(
                    *piece == expected,
                    "text {text}, {channels} channels, width {width} {dtype} {place:?}"
                );
            }
        }
    }
}

/// A run that continues one which overwrites the slot that both read.
#[test]
fn a_branch_of_a_kept_text_is_kept_too() {
    for place in Place::all() {
        let device = place.device(1, 1 << 28);
        let (x, w) = (Random(54).matrix(6, 3, DType::F32), Random(55).matrix(3, 4, DType::F32));
        let wt = w.tensor(&device, DType::F32);
        let mut history = poison(&device, 6, 3, DType::F32);
        let mut convolve = |x: &Matrix, of: &[(u32, After, Option<u32>)]| {
            let (xt, mut y) = (x.tensor(&device, DType::F32), poison(&device, x.rows, 3, DType::F32));
            let (history, runs) = (Some(history.view_mut()), runs(of));
            let call = CausalConv { x: xt.view(), w: wt.view(), runs: &runs, history, y: y.view_mut() };
            ops::causal_conv(&device, call).unwrap();
            Matrix::read(&device, y.view())
        };
        let whole = convolve(&x, &[(6, After::Nothing, None)]);
        convolve(&x.rows(0, 3), &[(3, After::Nothing, Some(0))]);
        convolve(&x.rows(3, 2), &[(1, After::Slot(0), Some(0)), (1, After::Run(0), Some(1))]);
        let last = convolve(&x.rows(5, 1), &[(1, After::Slot(1), None)]);
        assert!(last == whole.rows(5, 1), "{place:?}");
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let device = super::matrix::device(1);
    let [x, mut y] = [(); 2].map(|()| poison(&device, 3, 4, DType::F32));
    let mut history = poison(&device, 6, 4, DType::F32);
    let mut refused = |width, of: &[(u32, After, Option<u32>)]| {
        let (w, runs) = (poison(&device, 4, width, DType::F32), runs(of));
        let history = Some(history.view_mut());
        let call = CausalConv { x: x.view(), w: w.view(), runs: &runs, history, y: y.view_mut() };
        ops::causal_conv(&device, call).unwrap_err().to_string()
    };
    let error = refused(17, &[(3, After::Nothing, None)]);
    assert_eq!(error, "causal_conv: a width of 17, not 1 to 16");
    let error = refused(4, &[(2, After::Nothing, None)]);
    assert_eq!(error, "causal_conv: runs of 2 rows for 3");
    let error = refused(4, &[(3, After::Slot(2), None)]);
    assert_eq!(error, "causal_conv: runs name 3 slots of 2");
}
