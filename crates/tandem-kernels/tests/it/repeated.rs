//! Work that repeats: a CUDA graph has the bits of its work one by one, whatever changes between repetitions.

use tandem_kernels::{DType, Device, KernelError, MemoryKind, Tensor, ops};

use crate::support::{devices, numbers};

/// Matrices of a repetition.
struct Matrices {
    src: Tensor,
    picked: Tensor,
    sums: Tensor,
}

const ROWS: usize = 6;
const COLS: usize = 40;

impl Matrices {
    fn new(device: &Device) -> Self {
        let alloc = |rows| device.zeros(MemoryKind::Scratch, rows, COLS, DType::F32).unwrap();
        let mut src = alloc(ROWS);
        ops::write_f32(device, &numbers(1, ROWS * COLS), src.view_mut()).unwrap();
        Self { src, picked: alloc(3), sums: alloc(3) }
    }

    /// Picks rows, twice, scales them, and adds them to the sums: tables, a scratch matrix, kernels and a clear.
    fn step(&mut self, device: &Device, key: usize, rows: &[u32], factor: f32) -> Result<(), KernelError> {
        let Self { src, picked, sums } = self;
        let len = rows.len();
        device.repeated((7, key), || {
            let mut scratch = device.zeros(MemoryKind::Scratch, len, COLS, DType::F32)?;
            ops::gather_rows(device, src.view(), rows, scratch.view_mut())?;
            ops::scale(device, scratch.view_mut(), factor)?;
            ops::cast(device, scratch.view(), picked.view_mut().row_range(0..len))?;
            ops::add(device, picked.view().row_range(0..len), sums.view_mut().row_range(0..len))?;
            ops::gather_rows(device, src.view(), rows, scratch.view_mut())?;
            ops::add(device, scratch.view(), sums.view_mut().row_range(0..len))
        })
    }

    fn sums(&self, device: &Device) -> Vec<f32> {
        ops::read_f32(device, self.sums.view()).unwrap()
    }
}

/// Sums in f32 after steps, computed here.
fn expected(steps: &[(&[u32], f32)]) -> Vec<f32> {
    let src = numbers(1, ROWS * COLS);
    let mut sums = vec![0.0; 3 * COLS];
    for (rows, factor) in steps {
        for (place, &row) in rows.iter().enumerate() {
            for col in 0..COLS {
                let x = src[row as usize * COLS + col];
                sums[place * COLS + col] += x * factor;
                sums[place * COLS + col] += x;
            }
        }
    }
    sums
}

#[test]
fn tables_of_each_repetition_are_its_own() {
    for (place, device) in devices(2) {
        let mut matrices = Matrices::new(&device);
        let steps: [(&[u32], f32); 6] = [
            (&[0, 1, 2], 0.5),
            (&[5, 1, 4], 0.5),
            (&[3, 3, 3], 0.5),
            (&[0, 1, 2], 0.5),
            (&[2, 1, 0], 0.5),
            (&[4, 0, 5], 0.5),
        ];
        let mut graphs = Vec::new();
        for (rows, factor) in steps {
            matrices.step(&device, 3, rows, factor).unwrap();
            graphs.push(device.num_graph_launches());
        }
        assert_eq!(matrices.sums(&device), expected(&steps), "{}", place.name());
        // The first is not captured.
        let expected =
            if device.backend() == tandem_kernels::Backend::Cuda { [0, 1, 2, 3, 4, 5] } else { [0; 6] };
        assert_eq!(graphs, expected, "{}", place.name());
    }
}

#[test]
fn whatever_differs_is_captured_anew() {
    for (place, device) in devices(2) {
        let mut matrices = Matrices::new(&device);
        let steps: [(&[u32], f32); 9] = [
            (&[0, 1, 2], 0.5),
            (&[5, 1, 4], 0.5),
            // Another argument, then fewer rows: another grid, and tables of another length.
            (&[5, 1, 4], 2.0),
            (&[1, 3, 4], 2.0),
            (&[2, 4], 2.0),
            (&[3, 1], 2.0),
            (&[5, 1, 4], 0.5),
            (&[4], 0.5),
            (&[0], 0.5),
        ];
        let mut others = Vec::new();
        for (index, (rows, factor)) in steps.into_iter().enumerate() {
            // Memory of the step lies elsewhere.
            if index == 6 {
                others.push(device.alloc(MemoryKind::Scratch, 100, COLS, DType::F32).unwrap());
            }
            matrices.step(&device, 3, rows, factor).unwrap();
        }
        assert_eq!(matrices.sums(&device), expected(&steps), "{}", place.name());
    }
}

#[test]
fn more_keys_than_graphs_take_turns() {
    for (place, device) in devices(2) {
        let mut matrices = Matrices::new(&device);
        let mut steps: Vec<(&[u32], f32)> = Vec::new();
        for key in (0..40).chain(0..40).chain((0..40).rev()) {
            let rows: &[u32] = if key % 2 == 0 { &[1, 5, 0] } else { &[2, 4] };
            steps.push((rows, key as f32));
            matrices.step(&device, key, rows, key as f32).unwrap();
        }
        assert_eq!(matrices.sums(&device), expected(&steps), "{}", place.name());
    }
}

/// Equal tables share their place until they differ.
#[test]
fn tables_that_were_equal_by_chance_may_differ_later() {
    for (place, device) in devices(2) {
        let src = Matrices::new(&device).src;
        let mut out = device.zeros(MemoryKind::Scratch, 4, COLS, DType::F32).unwrap();
        let values = numbers(1, ROWS * COLS);
        for [one, other] in
            [[[0, 1], [0, 1]], [[2, 3], [2, 3]], [[4, 5], [1, 0]], [[3, 2], [5, 5]], [[1, 1], [1, 1]]]
        {
            let mut step = || {
                let [a, b] = out.view_mut().split_rows(2);
                ops::gather_rows(&device, src.view(), &one, a)?;
                ops::gather_rows(&device, src.view(), &other, b)
            };
            device.repeated::<_, KernelError>((9, 2), &mut step).unwrap();
            let rows = one.iter().chain(&other);
            let expected: Vec<f32> =
                rows.flat_map(|&row| values[row as usize * COLS..][..COLS].to_vec()).collect();
            assert_eq!(ops::read_f32(&device, out.view()).unwrap(), expected, "{}", place.name());
        }
    }
}

/// A read inside needs what was enqueued before it.
#[test]
fn work_that_waits_is_done_one_by_one() {
    for (place, device) in devices(2) {
        let src = Matrices::new(&device).src;
        let mut out = device.zeros(MemoryKind::Scratch, 2, COLS, DType::F32).unwrap();
        let values = numbers(1, ROWS * COLS);
        for round in 0..8_u32 {
            let rows = [round % 6, (round + 1) % 6];
            let read = device.repeated((11, 2), || {
                ops::gather_rows(&device, src.view(), &rows, out.view_mut())?;
                let before = ops::read_f32(&device, out.view())?;
                ops::scale(&device, out.view_mut(), 2.0)?;
                Ok::<_, KernelError>(before)
            });
            let expected: Vec<f32> =
                rows.iter().flat_map(|&row| values[row as usize * COLS..][..COLS].to_vec()).collect();
            assert_eq!(read.unwrap(), expected, "{}, round {round}", place.name());
            let doubled: Vec<f32> = expected.iter().map(|x| x * 2.0).collect();
            assert_eq!(
                ops::read_f32(&device, out.view()).unwrap(),
                doubled,
                "{}, round {round}",
                place.name()
            );
        }
        assert_eq!(device.num_graph_launches(), 0, "{}", place.name());
    }
}

#[test]
fn after_an_error_or_a_panic_the_stream_goes_on() {
    for (place, device) in devices(2) {
        let mut matrices = Matrices::new(&device);
        let rows: &[u32] = &[0, 1, 2];
        for _ in 0..3 {
            matrices.step(&device, 3, rows, 0.5).unwrap();
        }
        let error = matrices.step(&device, 3, &[0, 1, 17], 0.5).unwrap_err();
        assert_eq!(error.to_string(), "gather_rows: rows[2] is 17, the matrix has 6 rows");
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            device.repeated::<(), KernelError>((7, 3), || {
                ops::fill_zero(&device, matrices.sums.view_mut())?;
                panic!("on purpose")
            })
        }));
        assert!(panic.is_err());
        let on_a_gpu = device.backend() == tandem_kernels::Backend::Cuda;
        if !on_a_gpu {
            // What was done before the panic is done.
            continue;
        }
        matrices.step(&device, 3, rows, 0.5).unwrap();
        assert_eq!(matrices.sums(&device), expected(&[(rows, 0.5); 4]), "{}", place.name());
    }
}
