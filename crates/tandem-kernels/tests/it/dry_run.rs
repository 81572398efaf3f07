//! Counts and lists of a dry run.

use std::sync::Arc;

use tandem_kernels::cuda::Options;
use tandem_kernels::cuda::driver::Matmul;
use tandem_kernels::profile::{Event, EventKind};
use tandem_kernels::{DType, Device, MemoryKind, Profile, ops};

#[test]
fn a_dry_run_lists_each_shape_of_a_linear_layer_once() {
    let (device, list) = Device::meta_listing_matmuls(Options { tf32: true, ..Options::default() }).unwrap();
    let alloc = |rows, cols, dtype| device.alloc(MemoryKind::Scratch, rows, cols, dtype).unwrap();
    let (x, w) = (alloc(100, 64, DType::Bf16), alloc(48, 64, DType::Bf16));
    let (mut y, mut dx) = (alloc(100, 48, DType::Bf16), alloc(100, 64, DType::Bf16));
    let mut dw = alloc(48, 64, DType::F32);
    for accumulate in [false, true, true] {
        ops::linear(&device, x.view(), w.view(), None, None, y.view_mut()).unwrap();
        ops::linear_backward_weight(&device, y.view(), x.view(), dw.view_mut(), accumulate).unwrap();
    }
    ops::linear_backward_input(&device, y.view(), w.view(), dx.view_mut(), true).unwrap();
    let mut found = list.take();
    found.sort_by_key(Matmul::key);
    let described = |product: &Matmul| {
        let along = [product.a.along_depth, product.b.along_depth];
        let strides = [product.a.stride, product.b.stride, product.d.1];
        (product.size, along, strides, product.c.is_some(), product.d_type, product.tf32)
    };
    // The sum of rounded products is added by a kernel of its own.
    let input = ([100, 64, 48], [true, false], [48, 64, 64], false, DType::F32, true);
    let forward = ([100, 48, 64], [true, true], [64, 64, 48], false, DType::Bf16, true);
    let weight = |adds| ([48, 64, 100], [false, false], [48, 64, 64], adds, DType::F32, true);
    let mut expected = [input, forward, weight(false), weight(true)];
    let mut described: Vec<_> = found.iter().map(described).collect();
    expected.sort_by_key(|(size, _, _, adds, ..)| (*size, *adds));
    described.sort_by_key(|(size, _, _, adds, ..)| (*size, *adds));
    assert_eq!(described, expected);
    assert_eq!(found[0].tokens(), Some(100));
    assert!(list.take().is_empty(), "the list begins anew");
    let Device::Meta(ledger) = &device else { unreachable!() };
    assert_eq!(ledger.costs()["linear"].calls, 3, "costs are recorded as without a list");
}

#[test]
fn a_dry_run_counts_what_a_profile_is_told() {
    let profile = Arc::new(Profile::default());
    let on = Device::cpu(2, 1 << 21).unwrap().profiled(&profile);
    let product = |device: &Device| {
        let alloc = |rows, cols| device.alloc(MemoryKind::Scratch, rows, cols, DType::Bf16).unwrap();
        let (x, w, mut y) = (alloc(8, 6), alloc(4, 6), alloc(8, 4));
        ops::linear(device, x.view(), w.view(), None, None, y.view_mut()).unwrap();
    };
    profile.begin(16);
    product(&on);
    let recording = profile.end();
    let dry = Device::meta();
    product(&dry);
    let Device::Meta(ledger) = &dry else { unreachable!() };
    let (planned, calls) = ledger.calls()[0];
    let [Event { what: EventKind::Operation(work), .. }] = recording.events[..] else {
        panic!("{recording:?}")
    };
    assert_eq!((work, 1), (planned, calls));
    assert_eq!((work.dtype, work.shape), (DType::Bf16, [8, 4, 6]));
}
