//! CUDA graphs of kernels and copies.

use crate::cuda::driver::{Arg, Function, Grid, Source};
use crate::cuda::nvidia::fake::Fake;
use crate::cuda::{Options, nvidia::cache::Cache};
use crate::{Device, KernelError, MemoryKind, ops};

static SOURCE: Source = Source { name: "norm.cu", text: "KERNEL(first, …) { }", fused: true, only: None };

/// Reads two words of a region.
fn words(at: u64) -> [u64; 2] {
    // SAFETY: the region is mapped, and nothing runs.
    unsafe { *std::ptr::with_exposed_provenance(at as usize) }
}

#[test]
fn work_of_a_graph_runs_when_the_graph_is_launched() {
    let (fake, driver, stream) = Fake::opened();
    let region = driver.reserve(1 << 20).unwrap();
    region.grow(1 << 20).unwrap();
    let (base, copy) = (region.base(), region.base() + 16);
    let function = driver.function(&SOURCE, "first").unwrap();
    let launch = |function: Function, x: u32| {
        let args = [Arg::address(base), Arg::from(x), Arg::from(7_u64)];
        // SAFETY: the stand-in's kernels take these.
        unsafe { driver.launch(stream, function, Grid::new(1, 32), &args) }
    };
    launch(function, 3).unwrap();
    // SAFETY: the range is inside the region.
    unsafe { driver.clear(stream, copy, 16).unwrap() };
    let graph = driver.capture(stream, &mut || {
        launch(function, 5)?;
        // SAFETY: both ranges are inside the region.
        unsafe { driver.copy(stream, base, copy, 16) }
    });
    let graph = graph.unwrap().expect("the stand-in has graphs");
    assert_eq!((words(base), words(copy)), ([3, 7], [0, 0]), "nothing has run");
    fake.calls();
    for _ in 0..2 {
        launch(function, 4).unwrap();
        // SAFETY: the region is still mapped.
        unsafe { driver.launch_graph(stream, graph).unwrap() };
        assert_eq!((words(base), words(copy)), ([5, 7], [5, 7]));
    }
    let launched = fake.calls().iter().filter(|call| *call == "launch a graph of 2").count();
    assert_eq!(launched, 2);
    driver.end_graph(graph);
    assert_eq!(fake.num_graphs(), 0, "graphs are given back");
}

#[test]
fn work_that_no_graph_can_have_leaves_the_stream_usable() {
    let (fake, driver, stream) = Fake::opened();
    let region = driver.reserve(1 << 20).unwrap();
    region.grow(1 << 20).unwrap();
    // SAFETY: the range is inside the region.
    let mut clear = || unsafe { driver.clear(stream, region.base(), 16) };
    assert_eq!(driver.capture(stream, &mut clear).unwrap(), None, "the stand-in cannot clear in a graph");
    clear().unwrap();
    let mut fail = || Err(KernelError::invalid("test", "on purpose"));
    assert_eq!(driver.capture(stream, &mut fail).unwrap(), None);
    clear().unwrap();
    assert_eq!(fake.num_graphs(), 0);
}

#[test]
fn a_device_whose_work_no_graph_can_have_does_it_one_by_one() {
    let fake = Fake::new(crate::cuda::nvidia::fake::Kind::default());
    let driver = fake.open_with(Cache::none()).unwrap();
    let device = Device::cuda(driver, 1 << 20, Options::default()).unwrap();
    let mut x = device.alloc(MemoryKind::Scratch, 4, 4, crate::DType::F32).unwrap();
    for _ in 0..4 {
        ops::write_f32(&device, &[1.0; 16], x.view_mut()).unwrap();
        device.repeated::<_, KernelError>((1, 1), || ops::fill_zero(&device, x.view_mut())).unwrap();
        assert_eq!(ops::read_f32(&device, x.view()).unwrap(), [0.0; 16]);
    }
    assert_eq!(device.num_graph_launches(), 0);
    drop((x, device));
    assert_eq!(fake.num_graphs(), 0);
}
