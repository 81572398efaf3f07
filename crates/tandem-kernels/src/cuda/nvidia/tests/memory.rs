//! Regions of both kinds, and copies between them.

use crate::cuda::memory::Tables;
use crate::cuda::nvidia::fake::{Fake, GRANULARITY, Kind};
use crate::cuda::{Options, nvidia::cache::Cache};
use crate::{DType, Device, MemoryKind, ops};

const MIB: usize = 1 << 20;

#[test]
fn a_region_grows_in_pages_and_gives_everything_back_when_nothing_runs() {
    let fake = Fake::new(Kind::default());
    let driver = fake.open();
    let region = driver.reserve(20 * MIB).unwrap();
    assert_eq!((region.mapped(), driver.free_memory().unwrap()), (0, 1 << 30), "address space is no memory");
    fake.calls();
    let base = region.base();
    for (bytes, mapped, calls) in [
        (1, 2 * MIB, vec!["create 2097152"]),
        (2 * MIB, 2 * MIB, vec![]),
        (2 * MIB + 1, 4 * MIB, vec!["create 2097152"]),
        (11 * MIB, 12 * MIB, vec!["create 8388608"]),
        (5, 12 * MIB, vec![]),
        (20 * MIB, 20 * MIB, vec!["create 8388608"]),
    ] {
        region.grow(bytes).unwrap();
        assert_eq!(
            (region.mapped(), region.base(), fake.calls()),
            (mapped, base, calls.into_iter().map(str::to_owned).collect())
        );
    }
    assert_eq!(driver.free_memory().unwrap(), (1 << 30) - 20 * MIB);
    drop(region);
    let calls = fake.calls();
    assert_eq!(calls[0], "synchronize all");
    let unmapped: Vec<&str> = calls[1..].iter().map(String::as_str).collect();
    let pieces = [2, 2, 8, 8].map(|n| [format!("unmap {}", n * MIB), "release".to_owned()]).concat();
    assert_eq!(unmapped[..8], pieces);
    assert_eq!(unmapped[8..], [format!("free addresses {}", 20 * MIB)]);
    assert_eq!(driver.free_memory().unwrap(), 1 << 30);
}

/// NCCL may have ranks of one process write into each other's buffers.
#[test]
fn memory_is_open_to_gpus_that_reach_it_and_to_no_others() {
    let own = Fake::new(Kind { board: 71, ..Kind::default() });
    let near = [(); 2].map(|()| Fake::new(Kind { board: 71, ..Kind::default() }));
    let _far = Fake::new(Kind { board: 72, ..Kind::default() });
    let region = own.open().reserve(4 * MIB).unwrap();
    region.grow(1).unwrap();
    let expected = [&own, &near[0], &near[1]].map(|gpu| gpu.ordinal);
    assert_eq!(own.opened_to(), expected);
    region.grow(4 * MIB).unwrap();
    assert_eq!(own.opened_to(), expected);
}

#[test]
fn the_context_stays_until_the_last_region_is_gone() {
    let (fake, driver, stream) = Fake::opened();
    let (region, pinned) = (driver.reserve(1).unwrap(), driver.pinned(1).unwrap());
    region.grow(1).unwrap();
    pinned.grow(1).unwrap();
    driver.end_stream(stream);
    drop(driver);
    assert_eq!(fake.held(), [1, 1, 1, 1, 1, 0, 0, 0]);
    drop((region, pinned));
    assert_eq!(fake.held(), [0; 8]);
}

#[test]
fn memory_that_is_not_there_is_told_with_what_is() {
    let fake = Fake::new(Kind { memory: 10 * MIB, ..Kind::default() });
    let driver = fake.open();
    let region = driver.reserve(100 * MIB).unwrap();
    region.grow(4 * MIB).unwrap();
    let error = region.grow(11 * MIB).unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "memory of a GPU: out of memory: 8388608 bytes wanted, 6291456 of the 10485760 bytes of GPU {} (Stand-in) are free",
            fake.ordinal
        )
    );
    assert_eq!(region.mapped(), 4 * MIB, "what was there stays");
    region.grow(10 * MIB).unwrap();
}

#[test]
fn host_memory_that_cannot_be_pinned_is_told() {
    let fake = Fake::new(Kind { host: 4 * MIB, ..Kind::default() });
    let driver = fake.open();
    let region = driver.pinned(100 * MIB).unwrap();
    region.grow(3 * MIB).unwrap();
    let error = region.grow(9 * MIB).unwrap_err().to_string();
    assert!(
        error.starts_with("pinned memory: the host gives no 6291456 bytes more beside the 4194304"),
        "{error}"
    );
    let foreign = Fake::new(Kind { host_pointers: false, ..Kind::default() });
    let error = foreign.open().pinned(1).err().unwrap().to_string();
    assert!(error.contains("knows host memory by other addresses"), "{error}");
}

/// Bytes of a region, as the host sees them.
fn bytes<'a>(address: u64, len: usize) -> &'a mut [u8] {
    // SAFETY: the tests' regions are mapped, and nothing else uses them.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address as usize), len) }
}

#[test]
fn copies_stop_where_pieces_of_pinned_memory_meet() {
    let (fake, driver, stream) = Fake::opened();
    let (host, other, device) =
        (driver.pinned(8 * MIB).unwrap(), driver.pinned(8 * MIB).unwrap(), driver.reserve(8 * MIB).unwrap());
    for piece in 1..=4 {
        host.grow(2 * piece * MIB).unwrap();
    }
    other.grow(3 * MIB).unwrap();
    other.grow(8 * MIB).unwrap();
    device.grow(2 * MIB).unwrap();
    device.grow(8 * MIB).unwrap();
    for (i, byte) in bytes(host.base(), 8 * MIB).iter_mut().enumerate() {
        *byte = (i * 7 / 5) as u8;
    }
    fake.calls();
    let copied = |from: u64, to: u64, len: usize| {
        // SAFETY: both are mapped.
        unsafe { driver.copy(stream, from, to, len).unwrap() };
        fake.calls()
            .iter()
            .map(|call| call.strip_prefix("copy ").unwrap().parse().unwrap())
            .collect::<Vec<usize>>()
    };
    assert_eq!(copied(host.base() + 5, device.base() + 5, MIB), [MIB]);
    let all = copied(host.base(), device.base(), 8 * MIB);
    assert_eq!(all, [2 * MIB; 4], "pieces of the host's memory count, those of the GPU's do not");
    // On the other side they meet elsewhere.
    assert_eq!(copied(device.base() + 9, other.base() + 10, 8 * MIB - 10), [4 * MIB - 10, 4 * MIB]);
    assert_eq!(bytes(other.base() + 10, 8 * MIB - 10), &bytes(host.base(), 8 * MIB)[9..8 * MIB - 1]);
    assert_eq!(copied(host.base() + 1, other.base() + 1, 4 * MIB), [2 * MIB - 1, 2 * MIB, 1]);
    assert!(copied(host.base(), device.base(), 0).is_empty());
    // SAFETY: the range is mapped.
    unsafe { driver.clear(stream, host.base() + 1, 8 * MIB - 2).unwrap() };
    let cleared = bytes(host.base(), 8 * MIB);
    assert!(cleared[1..8 * MIB - 1].iter().all(|&byte| byte == 0));
    assert_eq!((cleared[0], cleared[8 * MIB - 1]), (0, ((8 * MIB - 1) * 7 / 5) as u8));
}

/// A run sends tables without end, and each look-up goes through those that are kept.
#[test]
fn tables_are_few_and_those_in_use_stay() {
    let (fake, driver, stream) = Fake::opened();
    let before = driver.free_memory().unwrap();
    let tables = Tables::new(&driver, stream).unwrap();
    let name = (7, 3);
    let named = tables.send_named(name, &[1; 1000]).unwrap();
    let often = tables.send(&[2; 500]).unwrap();
    for step in 0..10_000u32 {
        tables.send(&[step.to_le_bytes(); 16].concat()).unwrap();
        assert_eq!((tables.find(name), tables.send(&[2; 500]).unwrap()), (Some(named), often), "step {step}");
    }
    assert_eq!(bytes(often, 500), [2; 500]);
    assert!(before - driver.free_memory().unwrap() <= 2 * MIB, "they take the place of those before");
    let copies = fake.calls().iter().filter(|call| call.starts_with("copy ")).count();
    assert_eq!(copies, 10_002, "what is there is not sent again");
    tables.send(&[0; 64]).unwrap();
    assert_eq!(
        fake.calls().iter().filter(|call| call.starts_with("copy ")).count(),
        1,
        "step 0 was forgotten"
    );
    drop(tables);
    driver.end_stream(stream);
}

#[test]
fn rows_are_copied_at_once_where_that_can_be() {
    let (fake, driver, stream) = Fake::opened();
    let (host, device) = (driver.pinned(4 * MIB).unwrap(), driver.reserve(4 * MIB).unwrap());
    host.grow(2 * MIB).unwrap();
    host.grow(4 * MIB).unwrap();
    device.grow(4 * MIB).unwrap();
    bytes(host.base(), 4 * MIB).iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 11 / 3) as u8);
    let check = |from: (usize, usize), to: (usize, usize), rows: usize, len: usize, expected: &[&str]| {
        bytes(device.base(), 4 * MIB).fill(0);
        fake.calls();
        let place = |base: u64, (offset, pitch): (usize, usize)| (base + offset as u64, pitch);
        // SAFETY: both are mapped.
        unsafe {
            driver.copy_rows(stream, place(host.base(), from), place(device.base(), to), rows, len).unwrap();
        }
        assert_eq!(fake.calls(), expected);
        for row in 0..rows {
            let at = |(offset, pitch): (usize, usize)| offset + row * pitch;
            let (from, to) =
                (&bytes(host.base(), 4 * MIB)[at(from)..], &bytes(device.base(), 4 * MIB)[at(to)..]);
            assert_eq!(from[..len], to[..len], "row {row}");
        }
        let all = bytes(device.base(), 4 * MIB).iter().filter(|&&byte| byte != 0).count();
        assert!(all <= rows * len);
    };
    check((3, 100), (8, 64), 7, 40, &["copy 7 rows of 40"]);
    check((0, 40), (0, 40), 7, 40, &["copy 280"]);
    check((0, 9), (0, 5), 1, 40, &["copy 40"]);
    check((0, 9), (0, 5), 0, 40, &[]);
    // The second row lies in two pieces of the host's memory.
    check((2 * MIB - 110, 100), (0, 64), 3, 40, &["copy 40", "copy 10", "copy 30", "copy 40"]);
}

#[test]
fn every_thread_has_the_context() {
    let (fake, driver, stream) = Fake::opened();
    let region = driver.reserve(MIB).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            region.grow(MIB).unwrap();
            // SAFETY: the range is mapped.
            unsafe { driver.clear(stream, region.base(), MIB).unwrap() };
            driver.synchronize(stream).unwrap();
        });
    });
    // And it is this GPU's, whatever else the thread did.
    let other = Fake::new(Kind::default());
    let _open = other.open();
    // SAFETY: as above.
    unsafe { driver.clear(stream, region.base(), MIB).unwrap() };
    std::thread::spawn(move || drop(region)).join().unwrap();
    driver.end_stream(stream);
    drop(driver);
    assert_eq!(fake.held(), [0; 8]);
}

#[test]
fn events_tell_time() {
    let fake = Fake::new(Kind::default());
    let driver = fake.open();
    let (stream, other) = (driver.new_stream().unwrap(), driver.new_stream().unwrap());
    let [from, to] = [0; 2].map(|_| driver.new_event().unwrap());
    assert!(driver.elapsed(from, to).is_err());
    driver.finish(from).unwrap();
    driver.record(from, stream).unwrap();
    driver.wait(other, from).unwrap();
    driver.record(to, other).unwrap();
    assert!(driver.elapsed(from, to).unwrap() > 0.0);
    [from, to].into_iter().for_each(|event| driver.end_event(event));
    let _ = fake.calls();
    driver.end_stream(stream);
    assert_eq!(fake.calls()[..], ["synchronize stream", "destroy stream"]);
}

#[test]
fn a_device_over_it_moves_numbers_and_gives_everything_back() {
    let fake = Fake::new(Kind { memory: 64 * MIB, ..Kind::default() });
    let device = Device::cuda(fake.open_with(Cache::none()).unwrap(), 48 * MIB, Options::default()).unwrap();
    let values: Vec<f32> = (0..12).map(|i| i as f32 / 4.0).collect();
    for dtype in [DType::F32, DType::Bf16] {
        let mut x = device.alloc(MemoryKind::Scratch, 3, 9, dtype).unwrap();
        ops::write_f32(&device, &values, x.view_mut().col_range(2..6)).unwrap();
        assert_eq!(ops::read_f32(&device, x.view().col_range(2..6)).unwrap(), values);
    }
    assert_eq!(fake.held()[2], 2, "a page for tensors, one for the flag of exact sums");
    device.reserve(5 * MIB).unwrap();
    let error = device.alloc(MemoryKind::Weights, 1, 13 * MIB, DType::F32).err().unwrap().to_string();
    assert!(error.contains("out of device memory"), "{error}");
    let host = device.with_memory(16 * MIB).unwrap();
    drop(device);
    drop(host.alloc(MemoryKind::Master, 1, MIB, DType::F32).unwrap());
    drop(host);
    assert_eq!(fake.held(), [0; 8]);
    assert_eq!(GRANULARITY, 2 * MIB);
}
