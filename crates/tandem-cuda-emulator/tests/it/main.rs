//! The emulation itself: memory, streams, and a kernel with barriers.

use tandem_kernels::{DType, MemoryKind, ops};

#[test]
fn numbers_travel_there_and_back() {
    let device = tandem_cuda_emulator::device(1 << 24).unwrap();
    for dtype in [DType::F32, DType::Bf16] {
        let mut x = device.alloc(MemoryKind::Scratch, 3, 7, dtype).unwrap();
        let part = x.view_mut().col_range(2..5);
        ops::write_f32(&device, &[1.0, -2.0, 0.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], part).unwrap();
        let part = ops::read_f32(&device, x.view().col_range(3..5).row_range(1..3)).unwrap();
        assert_eq!(part, [5.0, 6.0, 8.0, 9.0]);
    }
}

#[test]
fn a_kernel_with_barriers_gives_the_sums_of_rows() {
    let device = tandem_cuda_emulator::device(1 << 24).unwrap();
    let (rows, width) = (37, 1000);
    let alloc = |rows, cols| device.alloc(MemoryKind::Scratch, rows, cols, DType::F32).unwrap();
    let (mut x, mut w, mut y, mut inverse) =
        (alloc(rows, width), alloc(1, width), alloc(rows, width), alloc(1, rows));
    let values: Vec<f32> = (0..rows * width).map(|i| ((i * 7919) % 1013) as f32 / 500.0 - 1.0).collect();
    ops::write_f32(&device, &values, x.view_mut()).unwrap();
    ops::write_f32(&device, &vec![2.0; width], w.view_mut()).unwrap();
    let call = ops::RmsNorm {
        x: x.view(),
        w: w.view(),
        offset: 0.0,
        eps: 1e-5,
        y: y.view_mut(),
        inverse_rms: inverse.view_mut(),
    };
    ops::rms_norm(&device, call).unwrap();
    let found = ops::read_f32(&device, y.view()).unwrap();
    for (row, values) in values.chunks(width).enumerate() {
        let mean = values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
        for (i, &x) in values.iter().enumerate() {
            let expected = 2.0 * f64::from(x) / (mean + 1e-5).sqrt();
            let found = f64::from(found[row * width + i]);
            assert!((found - expected).abs() < 1e-5, "row {row}, column {i}: {found}, expected {expected}");
        }
    }
}

#[test]
fn memory_runs_out_with_a_sentence() {
    let error = tandem_cuda_emulator::device(1 << 21)
        .unwrap()
        .alloc(MemoryKind::Weights, 1, 1 << 20, DType::F32)
        .err();
    assert!(error.unwrap().to_string().starts_with("out of device memory: 4194304 bytes"));
}
