//! NVRTC: what it makes of a file is its text.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};

use crate::cuda::nvidia::compiler::{Compiler, NvrtcFunctions};

type Program = *mut c_void;

thread_local! {
    static COMPILED: Cell<usize> = const { Cell::new(0) };
}

/// A file that is compiled.
struct File {
    text: String,
    output: String,
    log: String,
}

/// Files that this thread had compiled.
pub(in crate::cuda::nvidia) fn num_compiled() -> usize {
    COMPILED.get()
}

/// The compiler.
pub(in crate::cuda::nvidia) fn compiler() -> Compiler {
    Compiler::new(functions()).unwrap()
}

pub(super) fn functions() -> NvrtcFunctions {
    NvrtcFunctions {
        version,
        error_string,
        num_architectures,
        architectures,
        create,
        destroy,
        compile,
        log_size,
        log,
        cubin_size: output_size,
        cubin: output,
        ptx_size: output_size,
        ptx: output,
    }
}

const ARCHITECTURES: [c_int; 5] = [75, 80, 86, 89, 90];

unsafe extern "C" fn version(major: *mut c_int, minor: *mut c_int) -> c_int {
    // SAFETY: as in NVRTC.
    unsafe { (*major, *minor) = (12, 9) };
    0
}

unsafe extern "C" fn error_string(_: c_int) -> *const c_char {
    c"NVRTC_ERROR_COMPILATION".as_ptr()
}

unsafe extern "C" fn num_architectures(place: *mut c_int) -> c_int {
    // SAFETY: as in NVRTC.
    unsafe { *place = ARCHITECTURES.len() as c_int };
    0
}

unsafe extern "C" fn architectures(place: *mut c_int) -> c_int {
    // SAFETY: as in NVRTC.
    unsafe { place.copy_from_nonoverlapping(ARCHITECTURES.as_ptr(), ARCHITECTURES.len()) };
    0
}

unsafe extern "C" fn create(
    place: *mut Program,
    text: *const c_char,
    name: *const c_char,
    count: c_int,
    headers: *const *const c_char,
    names: *const *const c_char,
) -> c_int {
    // SAFETY: as in NVRTC.
    unsafe {
        let words = |text| CStr::from_ptr(text).to_str().unwrap().to_owned();
        assert!(words(name).ends_with(".cu"));
        for index in 0..count as usize {
            assert!(words(*names.add(index)).ends_with("cuh") && words(*headers.add(index)).len() > 100);
        }
        let file = File { text: words(text), output: String::new(), log: String::new() };
        *place = Box::into_raw(Box::new(file)).cast();
    }
    0
}

unsafe extern "C" fn destroy(place: *mut Program) -> c_int {
    // SAFETY: as in NVRTC; it was made by a box.
    drop(unsafe { Box::from_raw((*place).cast::<File>()) });
    0
}

unsafe extern "C" fn compile(program: Program, count: c_int, options: *const *const c_char) -> c_int {
    // SAFETY: as in NVRTC.
    let (file, options) = unsafe {
        let option = |index| CStr::from_ptr(*options.add(index)).to_str().unwrap();
        (&mut *program.cast::<File>(), (0..count as usize).map(option).collect::<Vec<_>>())
    };
    COMPILED.set(COMPILED.get() + 1);
    if file.text.contains("#error") {
        "norm.cu(1): error: #error directive".clone_into(&mut file.log);
        return 6;
    }
    let target = options.iter().find_map(|option| option.strip_prefix("--gpu-architecture="));
    file.output = match target.unwrap() {
        target if target.starts_with("sm_") => format!("CODE {target}\n{}", file.text),
        _ => format!("PTX\n{}", file.text),
    };
    0
}

/// # Safety
/// The program is there.
unsafe fn size(program: Program, of: impl Fn(&File) -> &String, place: *mut usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { *place = of(&*program.cast::<File>()).len() + 1 };
    0
}

/// # Safety
/// The program is there, and room for its text and a zero.
unsafe fn give(program: Program, of: impl Fn(&File) -> &String, place: *mut c_char) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let text = of(&*program.cast::<File>());
        place.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
        place.add(text.len()).write(0);
    }
    0
}

unsafe extern "C" fn log_size(program: Program, place: *mut usize) -> c_int {
    // SAFETY: as in NVRTC.
    unsafe { size(program, |file| &file.log, place) }
}

unsafe extern "C" fn log(program: Program, place: *mut c_char) -> c_int {
    // SAFETY: as in NVRTC.
    unsafe { give(program, |file| &file.log, place) }
}

unsafe extern "C" fn output_size(program: Program, place: *mut usize) -> c_int {
    // SAFETY: as in NVRTC.
    unsafe { size(program, |file| &file.output, place) }
}

unsafe extern "C" fn output(program: Program, place: *mut c_char) -> c_int {
    // SAFETY: as in NVRTC.
    unsafe { give(program, |file| &file.output, place) }
}
