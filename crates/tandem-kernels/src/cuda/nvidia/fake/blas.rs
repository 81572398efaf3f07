//! cuBLASLt: layouts are taken literally, column by column, and products are plain loops.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};

use half::bf16;

use super::on_gpu;
use crate::cuda::driver::Algorithm;
use crate::cuda::nvidia::blas::raw::{BlasFunctions, Heuristic};
use crate::cuda::nvidia::raw::Opaque;
use crate::numerics::e4m3;

const INVALID_VALUE: c_int = 7;
const NOT_SUPPORTED: c_int = 15;
const HANDLE: Opaque = 77;
/// `CUDA_R_32F`, `CUDA_R_16BF` and `CUDA_R_8F_E4M3`.
const F32: c_int = 0;
const BF16: c_int = 14;
const E4M3: c_int = 28;

/// Bits of an algorithm's last word below its number.
const NUMBER: u32 = 48;

thread_local! {
    static TIMES: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    static COMPUTED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    static CHOSEN: Cell<usize> = const { Cell::new(0) };
    static DESCRIBED: Cell<isize> = const { Cell::new(0) };
    static REFUSES: Cell<bool> = const { Cell::new(false) };
    static REPORTED: Cell<usize> = const { Cell::new(VERSION) };
}

/// Version that the library reports unless a test says another.
pub(in crate::cuda::nvidia) const VERSION: usize = 120_904;

/// Has this thread's library report a version.
pub(in crate::cuda::nvidia) fn set_version(version: usize) {
    REPORTED.set(version);
}

/// Has this thread's library take no algorithm for another shape than that it was chosen for.
pub(in crate::cuda::nvidia) fn refuse_algorithms(refuses: bool) {
    REFUSES.set(refuses);
}

/// Has this thread's library offer an algorithm for each of these times of a product, in the events'
/// units.
pub(in crate::cuda::nvidia) fn offer_algorithms(times: &[u64]) {
    TIMES.set(times.to_vec());
}

/// Returns the numbers of the algorithms of this thread's products since the last call.
pub(in crate::cuda::nvidia) fn computed() -> Vec<usize> {
    COMPUTED.take()
}

/// Returns the number of times that this thread asked for an algorithm.
pub(in crate::cuda::nvidia) fn num_chosen() -> usize {
    CHOSEN.get()
}

/// Descriptions that this thread has and has not given back.
pub(in crate::cuda::nvidia) fn num_described() -> isize {
    DESCRIBED.get()
}

/// Any of the descriptions.
#[derive(Default)]
struct Description {
    kind: c_int,
    scale: c_int,
    rows: usize,
    cols: usize,
    stride: usize,
    attributes: HashMap<c_int, Vec<u8>>,
}

impl Description {
    fn number(&self, attribute: c_int) -> Option<u64> {
        let mut bytes = [0; 8];
        let value = self.attributes.get(&attribute)?;
        bytes[..value.len()].copy_from_slice(value);
        Some(u64::from_le_bytes(bytes))
    }
}

pub(super) fn functions() -> BlasFunctions {
    BlasFunctions {
        version,
        create,
        destroy,
        create_desc,
        destroy_desc: end,
        set_desc: set,
        create_layout,
        destroy_layout: end,
        create_preference,
        destroy_preference: end,
        set_preference: set,
        heuristic,
        check,
        matmul,
    }
}

unsafe extern "C" fn version() -> usize {
    REPORTED.get()
}

unsafe extern "C" fn create(place: *mut Opaque) -> c_int {
    on_gpu(|_| {
        // SAFETY: as in cuBLASLt.
        unsafe { *place = HANDLE };
        0
    })
}

unsafe extern "C" fn destroy(handle: Opaque) -> c_int {
    on_gpu(|gpu| {
        gpu.log("destroy cublaslt".to_owned());
        if handle == HANDLE { 0 } else { INVALID_VALUE }
    })
}

fn give(place: *mut Opaque, description: Description) -> c_int {
    DESCRIBED.set(DESCRIBED.get() + 1);
    // SAFETY: as in cuBLASLt.
    unsafe { *place = Box::into_raw(Box::new(description)).expose_provenance() as Opaque };
    0
}

/// # Safety
/// It is one of the stand-in's, and nobody else uses it.
unsafe fn of<'a>(handle: Opaque) -> &'a mut Description {
    // SAFETY: the caller's promise.
    unsafe { &mut *std::ptr::with_exposed_provenance_mut::<Description>(handle as usize) }
}

/// Returns the descriptions of a product and of its matrices.
///
/// # Safety
/// As [`of`].
unsafe fn described<'a>(desc: Opaque, layouts: [Opaque; 4]) -> (&'a Description, [&'a Description; 4]) {
    // SAFETY: the caller's promise.
    unsafe { (&*of(desc), layouts.map(|one| &*of(one))) }
}

unsafe extern "C" fn create_desc(place: *mut Opaque, kind: c_int, scale: c_int) -> c_int {
    give(place, Description { kind, scale, ..Description::default() })
}

unsafe extern "C" fn create_layout(
    place: *mut Opaque,
    kind: c_int,
    rows: u64,
    cols: u64,
    stride: i64,
) -> c_int {
    let (rows, cols, stride) = (rows as usize, cols as usize, stride as usize);
    give(place, Description { kind, rows, cols, stride, ..Description::default() })
}

unsafe extern "C" fn create_preference(place: *mut Opaque) -> c_int {
    give(place, Description::default())
}

unsafe extern "C" fn end(handle: Opaque) -> c_int {
    DESCRIBED.set(DESCRIBED.get() - 1);
    // SAFETY: as in cuBLASLt; it was made by a box.
    drop(unsafe { Box::from_raw(of(handle)) });
    0
}

unsafe extern "C" fn set(handle: Opaque, attribute: c_int, value: *const c_void, size: usize) -> c_int {
    // SAFETY: as in cuBLASLt.
    unsafe {
        let value = std::slice::from_raw_parts(value.cast::<u8>(), size).to_vec();
        of(handle).attributes.insert(attribute, value);
    }
    0
}

/// Returns rows, columns and depth in cuBLASLt's order, if all layouts fit.
fn sizes(desc: &Description, [a, b, c, d]: [&Description; 4]) -> Option<[usize; 3]> {
    let taken = |of: &Description, attribute| match desc.number(attribute) {
        Some(1) => (of.cols, of.rows),
        _ => (of.rows, of.cols),
    };
    let ((m, k), (depth, n)) = (taken(a, 3), taken(b, 4));
    let fits = |of: &&Description| of.stride >= of.rows && of.rows > 0 && of.cols > 0;
    let is_result = |of: &Description| (of.rows, of.cols) == (m, n);
    (depth == k && is_result(c) && is_result(d) && [a, b, c, d].iter().all(fits)).then_some([m, n, k])
}

/// Returns whether FP8 factors are as the library wants them: along the depth, and all in steps of 16
/// bytes.
fn fits_fp8(desc: &Description, layouts: [&Description; 4], preference: &Description) -> bool {
    let is_along_depth = desc.number(3) == Some(1) && matches!(desc.number(4), None | Some(0));
    let [a, b, ..] = layouts;
    let is_aligned = [5, 6, 7, 8].iter().all(|&attribute| preference.number(attribute) == Some(16));
    is_along_depth && is_aligned && [a.rows, a.cols, a.stride, b.stride].iter().all(|n| n % 16 == 0)
}

unsafe extern "C" fn heuristic(
    handle: Opaque,
    desc: Opaque,
    a: Opaque,
    b: Opaque,
    c: Opaque,
    d: Opaque,
    preference: Opaque,
    asked: c_int,
    found: *mut Heuristic,
    count: *mut c_int,
) -> c_int {
    CHOSEN.set(CHOSEN.get() + 1);
    // SAFETY: as in cuBLASLt.
    let ((desc, layouts), preference) = unsafe { (described(desc, [a, b, c, d]), &*of(preference)) };
    let Some([m, n, k]) = sizes(desc, layouts) else { return INVALID_VALUE };
    let types = layouts.map(|layout| layout.kind);
    let is_known = matches!(types, [BF16, BF16, BF16, BF16] | [BF16, BF16, F32, F32] | [F32, F32, F32, F32])
        || (types == [E4M3, E4M3, F32, F32] && fits_fp8(desc, layouts, preference));
    let is_computed = desc.kind == 68 || (desc.kind == 77 && types[0] == F32);
    if handle != HANDLE || asked < 1 || desc.scale != F32 || !is_known || !is_computed {
        return NOT_SUPPORTED;
    }
    assert_eq!(preference.number(3), Some(2), "sums in the order in which they come are not allowed");
    let alignments = [5, 6, 7, 8].map(|attribute| preference.number(attribute).unwrap());
    let [of_a, of_b, of_c, of_d] = alignments;
    let workspace = if k > 8 { preference.number(1).unwrap() as usize } else { 0 };
    let offered = TIMES.with_borrow(Vec::len).max(1).min(asked as usize);
    for number in 0..offered {
        let last = workspace as u64 | (number as u64) << NUMBER;
        let algorithm = Algorithm([of_a, of_b, of_c, of_d, m as u64, n as u64, k as u64, last]);
        // SAFETY: as in cuBLASLt; there is room for as many as were asked for.
        unsafe { ((*found.add(number)).algorithm, (*found.add(number)).workspace) = (algorithm, workspace) };
    }
    // SAFETY: as in cuBLASLt.
    unsafe { *count = offered as c_int };
    0
}

/// Returns the workspace and the number of an algorithm.
fn last_word(algorithm: [u64; 8]) -> (usize, usize) {
    ((algorithm[7] & ((1 << NUMBER) - 1)) as usize, (algorithm[7] >> NUMBER) as usize)
}

/// An algorithm does for other sizes too; the stand-in's workspace is part of its description.
unsafe extern "C" fn check(
    handle: Opaque,
    desc: Opaque,
    a: Opaque,
    b: Opaque,
    c: Opaque,
    d: Opaque,
    algorithm: *const Algorithm,
    found: *mut Heuristic,
) -> c_int {
    // SAFETY: as in cuBLASLt.
    let ((desc, layouts), algorithm) = unsafe { (described(desc, [a, b, c, d]), (*algorithm).0) };
    let Some([m, n, k]) = sizes(desc, layouts) else { return INVALID_VALUE };
    if handle != HANDLE || REFUSES.get() {
        return NOT_SUPPORTED;
    }
    let is_near = [m, n, k].iter().zip(&algorithm[4..7]).all(|(&size, &of)| size as u64 <= of);
    // SAFETY: as in cuBLASLt.
    unsafe { ((*found).algorithm, (*found).workspace) = (Algorithm(algorithm), last_word(algorithm).0) };
    if is_near && last_word(algorithm).1 < TIMES.with_borrow(Vec::len).max(1) { 0 } else { NOT_SUPPORTED }
}

/// An element of a matrix.
///
/// # Safety
/// It is there.
unsafe fn read(address: u64, layout: &Description, row: usize, col: usize) -> f32 {
    let index = row + col * layout.stride;
    let at = std::ptr::with_exposed_provenance::<u8>(address as usize);
    // SAFETY: the caller's promise.
    unsafe {
        match layout.kind {
            F32 => at.cast::<f32>().add(index).read(),
            E4M3 => e4m3::to_f32(at.add(index).read()),
            _ => at.cast::<bf16>().add(index).read().to_f32(),
        }
    }
}

unsafe extern "C" fn matmul(
    handle: Opaque,
    desc: Opaque,
    alpha: *const c_void,
    a: u64,
    of_a: Opaque,
    b: u64,
    of_b: Opaque,
    beta: *const c_void,
    c: u64,
    of_c: Opaque,
    d: u64,
    of_d: Opaque,
    algorithm: *const Algorithm,
    workspace: u64,
    bytes: usize,
    _: Opaque,
) -> c_int {
    // SAFETY: as in cuBLASLt.
    let ((desc, layouts), scales, algorithm) = unsafe {
        let scales = [*alpha.cast::<f32>(), *beta.cast::<f32>()];
        (described(desc, [of_a, of_b, of_c, of_d]), scales, (*algorithm).0)
    };
    let Some([m, n, k]) = sizes(desc, layouts) else { return INVALID_VALUE };
    let is_chosen = [m, n, k].iter().zip(&algorithm[4..7]).all(|(&size, &of)| size as u64 <= of)
        && last_word(algorithm).0 == bytes
        && handle == HANDLE;
    let is_aligned = [a, b, c, d].iter().zip(algorithm).all(|(address, by)| address % by == 0);
    let has_room = bytes == 0 || on_gpu(|gpu| c_int::from(gpu.can_touch(workspace, bytes))) == 1;
    let [first, second, third, result] = layouts;
    let is_in_place = c == d && (third.stride, third.kind) != (result.stride, result.kind);
    if !is_chosen || !is_aligned || !has_room || is_in_place {
        return INVALID_VALUE;
    }
    let number = last_word(algorithm).1;
    COMPUTED.with_borrow_mut(|computed| computed.push(number));
    let time = TIMES.with_borrow(|times| times.get(number).copied().unwrap_or(1));
    on_gpu(|gpu| {
        gpu.next += time;
        0
    });
    for (row, col) in (0..m).flat_map(|row| (0..n).map(move |col| (row, col))) {
        let swapped = |attribute, row, col| {
            if desc.number(attribute) == Some(1) { (col, row) } else { (row, col) }
        };
        // SAFETY: as in cuBLASLt.
        unsafe {
            let mut sum = 0.0;
            for depth in 0..k {
                let ((i, j), (p, q)) = (swapped(3, row, depth), swapped(4, depth, col));
                sum += read(a, first, i, j) * read(b, second, p, q);
            }
            sum *= scales[0];
            if scales[1] != 0.0 {
                sum += scales[1] * read(c, third, row, col);
            }
            let at = std::ptr::with_exposed_provenance_mut::<u8>(d as usize);
            let index = row + col * result.stride;
            if result.kind == F32 {
                at.cast::<f32>().add(index).write(sum);
            } else {
                at.cast::<bf16>().add(index).write(bf16::from_f32(sum));
            }
        }
    }
    0
}
