//! NVML, which finds GPUs by where the driver says that they are.

use std::ffi::{CStr, c_char, c_int, c_uint};

use super::driver::of_device;
use super::{INVALID_VALUE, OK};
use crate::Result;
use crate::cuda::nvidia::nvml::{Nvml, NvmlFunctions};
use crate::cuda::nvidia::raw::Opaque;

/// `NVML_P2P_CAPS_INDEX_NVLINK`.
const NVLINK: c_int = 2;
/// `NVML_P2P_STATUS_NOT_SUPPORTED`.
const NOT_JOINED: c_int = 5;
/// `NVML_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: c_int = 3;
/// A bridge that cannot be queried.
pub(in crate::cuda::nvidia) const UNKNOWN: u32 = 99;

/// NVML, initialised.
pub(in crate::cuda::nvidia) fn nvml() -> Result<Nvml> {
    Nvml::start(NvmlFunctions { init, shutdown: init, error_string, driver_version, device, p2p_status })
}

unsafe extern "C" fn init() -> c_int {
    OK
}

unsafe extern "C" fn error_string(code: c_int) -> *const c_char {
    if code == NOT_SUPPORTED { c"Not Supported".as_ptr() } else { c"Invalid Argument".as_ptr() }
}

unsafe extern "C" fn driver_version(place: *mut c_char, len: c_uint) -> c_int {
    let text = c"570.86.15".to_bytes_with_nul();
    assert!(text.len() <= len as usize);
    // SAFETY: as in NVML; there is room.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), place, text.len()) };
    OK
}

unsafe extern "C" fn device(at: *const c_char, place: *mut Opaque) -> c_int {
    // SAFETY: as in NVML.
    let at = unsafe { CStr::from_ptr(at) }.to_str().unwrap();
    let number = |range| u64::from_str_radix(&at[range], 16).unwrap();
    assert_eq!(&at[7..], ":00.0");
    // SAFETY: as in NVML.
    unsafe { *place = (number(0..4) << 8) + number(5..7) };
    OK
}

unsafe extern "C" fn p2p_status(one: Opaque, other: Opaque, index: c_int, place: *mut c_int) -> c_int {
    assert_eq!(index, NVLINK);
    let bridges = [one, other].map(|device| of_device(device as c_int, |gpu| gpu.kind.bridge));
    let [Some(one), Some(other)] = bridges else { return INVALID_VALUE };
    if one == UNKNOWN {
        return NOT_SUPPORTED;
    }
    // SAFETY: as in NVML.
    unsafe { *place = if one > 0 && one == other { OK } else { NOT_JOINED } };
    OK
}
