//! NVML, `libnvidia-ml.so.1`, which comes with the driver: the driver's version, and NVLink
//! connections. Signatures and constants are those of `nvml.h`, unchanged since CUDA 8.

use std::ffi::{CStr, c_char, c_int, c_uint};

use tandem_dlopen::{Found, Library, functions, text};

use super::libraries::OF_DRIVER;
use super::raw::Opaque;
use crate::Result;
use crate::cuda::failed;

const NVML: &str = "libnvidia-ml.so.1";
/// `NVML_SUCCESS`.
const SUCCESS: c_int = 0;
/// `NVML_P2P_CAPS_INDEX_NVLINK`.
const NVLINK: c_int = 2;
/// `NVML_P2P_STATUS_OK`.
const STATUS_OK: c_int = 0;

functions! {
    /// NVML.
    pub(super) struct NvmlFunctions {
        init = c"nvmlInit_v2" () -> c_int;
        shutdown = c"nvmlShutdown" () -> c_int;
        error_string = c"nvmlErrorString" (c_int) -> *const c_char;
        driver_version = c"nvmlSystemGetDriverVersion" (*mut c_char, c_uint) -> c_int;
        device = c"nvmlDeviceGetHandleByPciBusId_v2" (*const c_char, *mut Opaque) -> c_int;
        p2p_status = c"nvmlDeviceGetP2PStatus" (Opaque, Opaque, c_int, *mut c_int) -> c_int;
    }
}

/// NVML, initialised.
pub(super) struct Nvml(NvmlFunctions);

impl Nvml {
    /// Opens it.
    pub(super) fn open() -> Result<(Library, Self)> {
        let library = Library::open(NVML)
            .map_err(|why| failed("NVML", format!("there is no {NVML}, which {OF_DRIVER} ({why})")))?;
        let functions = NvmlFunctions::load(&library).map_err(|why| failed("NVML", why))?;
        Ok((library, Self::start(functions)?))
    }

    /// Initialises it.
    pub(super) fn start(functions: NvmlFunctions) -> Result<Self> {
        // SAFETY: takes nothing.
        let outcome = unsafe { (functions.init)() };
        if outcome == SUCCESS {
            return Ok(Self(functions));
        }
        // SAFETY: the texts of result codes are there for ever.
        let words = unsafe { text((functions.error_string)(outcome)) };
        Err(failed("initialising NVML", words))
    }

    /// Returns its version, which is the driver's, and its file.
    pub(super) fn found(&self, library: &Library) -> Result<Found> {
        let mut version: [c_char; 96] = [0; 96];
        // SAFETY: a text is written that is no longer than its place and ends in zero.
        let version = unsafe {
            let outcome = (self.0.driver_version)(version.as_mut_ptr(), version.len() as c_uint);
            self.check("asking for the driver's version", outcome)?;
            text(version.as_ptr())
        };
        Ok(library.found(version, c"nvmlInit_v2"))
    }

    /// Returns whether NVLink joins two GPUs, by PCI address as CUDA formats it.
    pub(super) fn is_nvlink(&self, pair: [&CStr; 2]) -> Result<bool> {
        let mut devices = [0; 2];
        for (at, device) in pair.iter().zip(&mut devices) {
            // SAFETY: the text ends in zero; the handle is written to where it is.
            let outcome = unsafe { (self.0.device)(at.as_ptr(), device) };
            self.check(&format!("finding GPU {}", at.to_string_lossy()), outcome)?;
        }
        let mut status = STATUS_OK;
        // SAFETY: both handles were answered; the status is written to where it is.
        let outcome = unsafe { (self.0.p2p_status)(devices[0], devices[1], NVLINK, &raw mut status) };
        self.check("asking for NVLink", outcome)?;
        Ok(status == STATUS_OK)
    }

    fn check(&self, what: &str, outcome: c_int) -> Result<()> {
        if outcome == SUCCESS {
            return Ok(());
        }
        // SAFETY: the texts of result codes are there for ever.
        Err(failed(format!("NVML: {what}"), unsafe { text((self.0.error_string)(outcome)) }))
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: it was initialised once. A failure to shut down concerns no caller.
        unsafe { (self.0.shutdown)() };
    }
}
