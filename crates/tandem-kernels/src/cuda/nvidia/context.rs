//! The context of an opened GPU, and error handling of its driver.
//!
//! CUDA keeps the current GPU per thread. Threads come and go, and other libraries set it too, so
//! every call sets it again: that costs less than a hundredth of a launch.

use std::ffi::{c_char, c_int};
use std::sync::Arc;

use tandem_dlopen::text;

use super::raw::result::{
    CUDA_ERROR_NO_DEVICE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_STUB_LIBRARY, CUDA_SUCCESS,
};
use super::raw::{DeviceHandle, DriverFunctions, GraphFunctions, LoadFunctions, OLDEST, Opaque, attribute};
use crate::cuda::driver::Properties;
use crate::cuda::failed;
use crate::{KernelError, Result};

/// The initialised CUDA driver, and functions that older ones lack.
#[derive(Clone)]
pub(super) struct Cuda {
    pub(super) functions: Arc<DriverFunctions>,
    pub(super) load: Option<Arc<LoadFunctions>>,
    pub(super) graphs: Option<Arc<GraphFunctions>>,
}

/// Message if there is no GPU.
pub(super) const NO_GPU: &str = "NVIDIA's driver finds no GPU: there is none in this machine, CUDA_VISIBLE_DEVICES hides it, or \
                                 the container was not given it";

impl Cuda {
    /// Initialises the driver, which may be too old or see no GPU.
    pub(super) fn start(
        functions: DriverFunctions,
        load: Option<LoadFunctions>,
        graphs: Option<GraphFunctions>,
    ) -> Result<Self> {
        let this =
            Self { functions: Arc::new(functions), load: load.map(Arc::new), graphs: graphs.map(Arc::new) };
        let version = this.version()?;
        if version < OLDEST {
            return Err(failed(
                "CUDA",
                format!(
                    "NVIDIA's driver is made for CUDA {}, and {} is the oldest that is used: install a later driver",
                    version_text(version),
                    version_text(OLDEST)
                ),
            ));
        }
        // SAFETY: takes nothing but its flags, which are 0.
        match unsafe { (this.functions.init)(0) } {
            CUDA_ERROR_NO_DEVICE => return Err(failed("CUDA", NO_GPU)),
            CUDA_ERROR_STUB_LIBRARY => {
                return Err(failed(
                    "CUDA",
                    "the libcuda.so.1 that the loader finds is the toolkit's stub, not the one of NVIDIA's driver: its \
                     folder stands in LD_LIBRARY_PATH, or the driver is not installed",
                ));
            }
            outcome => this.check("initialising CUDA", outcome)?,
        }
        Ok(this)
    }

    /// Returns the latest CUDA version that the driver supports, as 12080 for 12.8.
    pub(super) fn version(&self) -> Result<c_int> {
        let mut version = 0;
        // SAFETY: the version is written to where it is.
        self.check("asking for the driver's version", unsafe {
            (self.functions.driver_version)(&raw mut version)
        })?;
        Ok(version)
    }

    /// Returns the number of GPUs that this process may use.
    pub(super) fn count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: the number is written to where it is.
        self.check("counting GPUs", unsafe { (self.functions.device_count)(&raw mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Returns a GPU's handle.
    pub(super) fn handle(&self, ordinal: usize) -> Result<DeviceHandle> {
        let mut handle = 0;
        // SAFETY: the handle is written to where it is.
        let outcome = unsafe { (self.functions.device)(&raw mut handle, ordinal as c_int) };
        self.check(&format!("finding GPU {ordinal}"), outcome)?;
        Ok(handle)
    }

    /// Returns an attribute of a GPU.
    pub(super) fn attribute(&self, device: DeviceHandle, attribute: c_int) -> Result<usize> {
        let mut value = 0;
        // SAFETY: the number is written to where it is.
        let outcome = unsafe { (self.functions.device_attribute)(&raw mut value, attribute, device) };
        self.check(&format!("asking a GPU for its attribute {attribute}"), outcome)?;
        Ok(usize::try_from(value).unwrap_or(0))
    }

    /// Returns a GPU's properties.
    pub(super) fn properties(&self, ordinal: usize) -> Result<Properties> {
        let device = self.handle(ordinal)?;
        let mut name: [c_char; 256] = [0; 256];
        let mut total_memory = 0;
        // SAFETY: a text is written that is no longer than its place and ends in zero, and a number
        // to where it is.
        let name = unsafe {
            self.check(
                "asking for a GPU's name",
                (self.functions.device_name)(name.as_mut_ptr(), name.len() as c_int, device),
            )?;
            self.check(
                "asking for a GPU's memory",
                (self.functions.device_memory)(&raw mut total_memory, device),
            )?;
            text(name.as_ptr())
        };
        let number = |attribute| self.attribute(device, attribute);
        let capability = (
            number(attribute::COMPUTE_CAPABILITY_MAJOR)? as u32,
            number(attribute::COMPUTE_CAPABILITY_MINOR)? as u32,
        );
        Ok(Properties {
            name,
            ordinal,
            capability,
            multiprocessors: number(attribute::MULTIPROCESSOR_COUNT)? as u32,
            shared_memory: number(attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            total_memory,
            l2_cache: number(attribute::L2_CACHE_SIZE)?,
        })
    }

    /// Converts a result code to an error.
    pub(super) fn check(&self, what: &str, outcome: c_int) -> Result<()> {
        if outcome == CUDA_SUCCESS { Ok(()) } else { Err(failed(what, self.words(outcome))) }
    }

    /// Returns the driver's name and text of a result code.
    fn words(&self, outcome: c_int) -> String {
        let (mut name, mut meaning) = (std::ptr::null(), std::ptr::null());
        // SAFETY: the places of texts that are there for ever are written, or nulls.
        let (name, meaning) = unsafe {
            (self.functions.error_name)(outcome, &raw mut name);
            (self.functions.error_string)(outcome, &raw mut meaning);
            (text(name), text(meaning))
        };
        if name.is_empty() {
            format!("CUDA error {outcome}")
        } else {
            format!("{name} ({outcome}), {meaning}")
        }
    }
}

/// Formats 12080 as 12.8.
pub(super) fn version_text(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// An opened GPU; it lives until the last of its memory is freed.
pub(super) struct Context {
    pub(super) cuda: Cuda,
    pub(super) device: DeviceHandle,
    pub(super) properties: Properties,
    context: Opaque,
}

impl Context {
    /// Opens the GPU's primary context, which all libraries of the process share.
    pub(super) fn open(cuda: &Cuda, ordinal: usize) -> Result<Arc<Self>> {
        let (device, properties) = (cuda.handle(ordinal)?, cuda.properties(ordinal)?);
        let mut context = 0;
        // SAFETY: the context is written to where it is; it is given back when this is dropped.
        let outcome = unsafe { (cuda.functions.retain_context)(&raw mut context, device) };
        cuda.check(&format!("opening GPU {ordinal}"), outcome)?;
        Ok(Arc::new(Self { cuda: cuda.clone(), device, properties, context }))
    }

    /// Makes the GPU current on this thread.
    pub(super) fn enter(&self) -> Result<()> {
        // SAFETY: the context is open.
        let outcome = unsafe { (self.cuda.functions.set_context)(self.context) };
        self.cuda.check("choosing a GPU", outcome)
    }

    /// Calls the driver with this GPU current.
    pub(super) fn call(&self, what: &str, call: impl FnOnce(&DriverFunctions) -> c_int) -> Result<()> {
        self.call_for(None, what, call)
    }

    /// [`Self::call`] for an allocation; out of memory reports the wanted size.
    pub(super) fn allocate(
        &self,
        bytes: usize,
        what: &str,
        call: impl FnOnce(&DriverFunctions) -> c_int,
    ) -> Result<()> {
        self.call_for(Some(bytes), what, call)
    }

    fn call_for(
        &self,
        wanted: Option<usize>,
        what: &str,
        call: impl FnOnce(&DriverFunctions) -> c_int,
    ) -> Result<()> {
        self.enter()?;
        match call(&self.cuda.functions) {
            CUDA_ERROR_OUT_OF_MEMORY => Err(self.full(wanted, what)),
            outcome => self.cuda.check(what, outcome),
        }
    }

    /// Creates the out-of-memory error; kernel code, streams and launches can exhaust memory too.
    pub(super) fn full(&self, wanted: Option<usize>, what: &str) -> KernelError {
        let Properties { ordinal, name, .. } = &self.properties;
        match self.memory() {
            Ok((free, total)) => {
                let (what, gpu) = (what.to_owned(), format!("GPU {ordinal} ({name})"));
                KernelError::GpuFull { what, gpu, wanted, free, total }
            }
            Err(error) => error,
        }
    }

    /// Returns free and total bytes.
    pub(super) fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        self.enter()?;
        // SAFETY: both numbers are written to where they are.
        let outcome = unsafe { (self.cuda.functions.memory_info)(&raw mut free, &raw mut total) };
        self.cuda.check("asking for free memory", outcome)?;
        Ok((free, total))
    }

    /// Waits for all work of the GPU. Errors go to the callers that wait for their work; here it
    /// only matters that nothing runs.
    pub(super) fn settle(&self) {
        // SAFETY: takes nothing.
        let _ = self.call("waiting for a GPU", |cuda| unsafe { (cuda.synchronize_context)() });
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was opened once, and this is its last use.
        unsafe {
            (self.cuda.functions.release_context)(self.device);
        }
    }
}
