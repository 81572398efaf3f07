//! The library's first choice of an algorithm beside the fastest of its list, for the matmuls of linear layers at training shapes.

use tandem_kernels::cuda::autotune::{Autotuner, TimedAlgorithm};
use tandem_kernels::cuda::driver::{Drivers, Matmul};
use tandem_kernels::cuda::{MatmulList, Options};
use tandem_kernels::{DType, Device, MemoryKind, Tensor, ops};

use crate::harness::Products;

/// Prints a line for each layer and direction.
pub fn run(driver: &Drivers, Products { dtype, shapes }: &Products, is_json: bool) {
    let (device, list) = Device::meta_listing_matmuls(Options::default()).expect("a dry run takes no memory");
    let matmuls: Vec<(String, Matmul)> =
        shapes.iter().flat_map(|&shape| of_layer(&device, &list, shape, *dtype)).collect();
    let all: Vec<Matmul> = matmuls.iter().map(|(_, product)| *product).collect();
    let autotuner = Autotuner::new(driver.clone(), &all).unwrap_or_else(|error| panic!("{error}"));
    for (name, product) in &matmuls {
        let timed = autotuner.time(product).unwrap_or_else(|error| panic!("{name}: {error}"));
        let Some(first) = timed.first() else { panic!("{name}: this device offers no algorithms") };
        let (number, best) = timed
            .iter()
            .enumerate()
            .min_by(|(_, a), (_, b)| a.milliseconds.total_cmp(&b.milliseconds))
            .expect("there is one");
        let rate = |timed: &TimedAlgorithm| product.flops() / f64::from(timed.milliseconds) / 1e9;
        let (first, best, count) = (rate(first), rate(best), timed.len());
        if is_json {
            println!(
                r#"{{"name": "{name}", "first_tflops": {first:.1}, "best_tflops": {best:.1}, "best": {number}, "algorithms": {count}}}"#
            );
        } else {
            println!(
                "{name:<52} first {first:>7.1} TFLOP/s, best {best:>7.1} (number {number} of {count}), {:.3} x",
                best / first
            );
        }
    }
}

/// Lists the matmuls of a layer of `(tokens, inputs, outputs)`, with a name for each.
fn of_layer(
    device: &Device,
    list: &MatmulList,
    (t, k, n): (usize, usize, usize),
    dtype: DType,
) -> Vec<(String, Matmul)> {
    let alloc = |rows, cols, dtype| -> Tensor {
        device.alloc(MemoryKind::Scratch, rows, cols, dtype).expect("a dry run takes no memory")
    };
    let (x, w, mut y) = (alloc(t, k, dtype), alloc(n, k, dtype), alloc(t, n, dtype));
    let (mut dx, mut dw) = (alloc(t, k, dtype), alloc(n, k, DType::F32));
    let mut found = Vec::new();
    let mut take = |op: &str, done: tandem_kernels::Result<()>| {
        done.expect("shapes fit");
        found.extend(list.take().into_iter().map(|product| (format!("{op} {dtype} {t}x{k}x{n}"), product)));
    };
    take("linear", ops::linear(device, x.view(), w.view(), None, None, y.view_mut()));
    take("input", ops::linear_backward_input(device, y.view(), w.view(), dx.view_mut(), false));
    take("weight", ops::linear_backward_weight(device, y.view(), x.view(), dw.view_mut(), true));
    found
}
