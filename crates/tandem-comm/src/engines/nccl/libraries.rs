//! NCCL and CUDA's driver: finding the libraries and reporting missing ones.

use std::ffi::c_int;
use std::sync::Arc;

use tandem_dlopen::{FOLDERS, Folders, Found, Library, text};

use super::raw::{
    ASKS_FOR_ACCESS, CUDA_NO_DEVICE, CUDA_SUCCESS, CudaFunctions, IN_PROGRESS, NcclFunctions, OLDEST,
    RawCommunicator, SUCCESS,
};
use crate::error::CommError;

/// Variable that names NCCL's file if the loader does not find it.
const PATH: &str = "TANDEM_NCCL";
/// NCCL's own variable: no direct writes between GPUs of a process.
const DIRECT_DISABLE: &str = "NCCL_P2P_DIRECT_DISABLE";
const NCCL: &str = "libnccl.so.2";
const CUDA: &str = "libcuda.so.1";
/// Sources of NCCL.
const NCCL_PACKAGES: &str = "NVIDIA's repository for Debian and Ubuntu has it as libnccl2, PyPI as nvidia-nccl-cu12 (CUDA 12) and \
                             nvidia-nccl-cu13 (CUDA 13)";

/// Both libraries, open, on a machine with a GPU. Clones share them.
#[derive(Clone)]
pub struct Libraries(pub(super) Arc<Functions>);

pub(super) struct Functions {
    pub(super) nccl: NcclFunctions,
    pub(super) cuda: CudaFunctions,
}

impl Libraries {
    /// Opens NCCL (2.18 or later; `TANDEM_NCCL` in the environment names its file) and CUDA's
    /// driver, and looks for a GPU.
    ///
    /// # Errors
    /// If one of the three is missing: which, where to get it, and the loader's message.
    pub fn open() -> crate::Result<Self> {
        Self::open_at(named().as_deref()).map_err(|reason| CommError::Engine { reason })
    }

    /// Returns NCCL's version and file, with or without a GPU.
    ///
    /// # Errors
    /// If NCCL is missing or too old: where to get it, and the loader's message.
    pub fn find() -> crate::Result<Found> {
        let found = open_nccl(named().as_deref());
        found.map(|(_, _, found)| found).map_err(|reason| CommError::Engine { reason })
    }

    /// Returns the libraries if several ranks of this process may use them.
    ///
    /// # Errors
    /// NCCL is older than 2.23 and may write into memory of another GPU that is not open to it:
    /// what to do.
    pub fn for_ranks_of_one_process(self) -> crate::Result<Self> {
        let disable = std::env::var(DIRECT_DISABLE).ok();
        match check_one_process(self.0.version(), disable.as_deref()) {
            Ok(()) => Ok(self),
            Err(reason) => Err(CommError::Engine { reason }),
        }
    }

    /// Returns NCCL's version.
    pub fn version(&self) -> String {
        version_text(self.0.version())
    }

    fn open_at(path: Option<&str>) -> Result<Self, String> {
        let (nccl, version, _) = open_nccl(path)?;
        let library = Library::open(CUDA).map_err(|why| {
            format!("{CUDA} was not found, which comes with NVIDIA's driver for its GPUs ({why})")
        })?;
        let cuda = CudaFunctions::load(&library)
            .map_err(|why| format!("NVIDIA's driver is too old for NCCL {}: {why}", version_text(version)))?;
        let this = Self(Arc::new(Functions { nccl, cuda }));
        match this.0.num_devices()? {
            0 => Err(no_device()),
            _ => Ok(this),
        }
    }
}

/// Returns the file that the environment names.
fn named() -> Option<String> {
    let path = std::env::var_os(PATH).filter(|path| !path.is_empty());
    path.map(|path| path.to_string_lossy().into_owned())
}

/// Opens NCCL at `path` or in NVIDIA's usual folders; returns its functions, version and file.
fn open_nccl(path: Option<&str>) -> Result<(NcclFunctions, c_int, Found), String> {
    let library = match path {
        Some(path) => Library::open(path).map_err(|why| {
            format!("{PATH} names {path}, which cannot be opened as NCCL ({why}); {NCCL_PACKAGES}")
        }),
        None => Folders::from_environment().open(&[NCCL]).map_err(|why| {
            format!(
                "{NCCL} was not found ({why}); {NCCL_PACKAGES}; {PATH}=/path/to/{NCCL} or {FOLDERS}=/its/folder names \
                 its place"
            )
        }),
    }?;
    let name = library.name();
    let nccl = NcclFunctions::load(&library)
        .map_err(|why| format!("{name} is not NCCL 2.18 or later: {why}; {NCCL_PACKAGES}"))?;
    let mut version = 0;
    // SAFETY: NCCL writes the version to a valid address.
    let outcome = unsafe { (nccl.get_version)(&raw mut version) };
    if outcome != SUCCESS || version < OLDEST {
        return Err(format!(
            "{name} is NCCL {}, but 2.18 is the oldest supported version; {NCCL_PACKAGES}",
            version_text(version)
        ));
    }
    let found = library.found(version_text(version), c"ncclGetVersion");
    Ok((nccl, version, found))
}

fn version_text(code: c_int) -> String {
    format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100)
}

fn no_device() -> String {
    "NVIDIA's driver finds no GPU: there is none in this machine, CUDA_VISIBLE_DEVICES hides it, or the container has no access to it"
        .to_owned()
}

/// Refuses several ranks in this process over an NCCL that may write into GPU memory that is not open to it. The variable
/// turns that off.
fn check_one_process(version: c_int, direct_disable: Option<&str>) -> Result<(), String> {
    if version >= ASKS_FOR_ACCESS || direct_disable == Some("1") {
        return Ok(());
    }
    Err(format!(
        "NCCL {} may write from one GPU into memory of another that is not open to it, where both are in one process: take NCCL {} \
         or later, start a process for each GPU (tandem launch), or set {DIRECT_DISABLE}=1",
        version_text(version),
        version_text(ASKS_FOR_ACCESS)
    ))
}

impl Functions {
    /// Returns NCCL's version, in its own notation.
    fn version(&self) -> c_int {
        let mut version = 0;
        // SAFETY: NCCL writes the version to a valid address, and did so before.
        unsafe { (self.nccl.get_version)(&raw mut version) };
        version
    }

    /// Returns the number of GPUs that this process may use.
    pub(super) fn num_devices(&self) -> Result<usize, String> {
        // SAFETY: this is the first call of the driver.
        match unsafe { (self.cuda.init)(0) } {
            CUDA_NO_DEVICE => return Err(no_device()),
            outcome => self.cuda("initialising CUDA", outcome)?,
        }
        let mut count = 0;
        // SAFETY: the driver writes the number to a valid address.
        self.cuda("counting GPUs", unsafe { (self.cuda.device_count)(&raw mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Converts CUDA's result code.
    pub(super) fn cuda(&self, what: &str, outcome: c_int) -> Result<(), String> {
        if outcome == CUDA_SUCCESS {
            return Ok(());
        }
        let mut words = std::ptr::null();
        // SAFETY: the driver writes the address of a static text, or null.
        let words = unsafe {
            (self.cuda.error_string)(outcome, &raw mut words);
            text(words)
        };
        Err(format!("{what} failed: CUDA error {outcome}, {words}"))
    }

    /// Converts NCCL's result code; an unfinished communicator is no error.
    pub(super) fn nccl(&self, what: &str, outcome: c_int, on: RawCommunicator) -> Result<(), String> {
        if outcome == SUCCESS || outcome == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: both texts stay until this thread's next call of NCCL. The last error needs no
        // communicator.
        let (words, details) =
            unsafe { (text((self.nccl.error_string)(outcome)), text((self.nccl.last_error)(on))) };
        let details = if details.is_empty() { String::new() } else { format!(": {}", details.trim()) };
        Err(format!("{what} failed: NCCL error {outcome}, {words}{details}; NCCL_DEBUG=INFO shows more"))
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::io::Write;

    use super::*;
    use crate::engines::nccl::raw::UniqueId;

    #[test]
    fn what_is_missing_is_named_with_where_it_is_to_be_had() {
        let error = open_nccl(Some("/nowhere/libnccl.so.2")).err().unwrap();
        for text in ["TANDEM_NCCL names /nowhere/libnccl.so.2", "libnccl2", "nvidia-nccl-cu12"] {
            assert!(error.contains(text), "no {text:?} in: {error}");
        }
        let error = open_nccl(Some("libc.so.6")).err().unwrap();
        assert!(error.starts_with("libc.so.6 is not NCCL 2.18 or later: libc.so.6 has no ncclGetVersion"));
    }

    /// `TANDEM_TEST_NCCL=/path/to/libnccl.so.2`; PyPI's opens without a GPU too.
    #[test]
    fn a_real_nccl_has_all_functions_and_tells_its_version() {
        let Ok(path) = std::env::var("TANDEM_TEST_NCCL") else {
            // Bypasses the capture of test output.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: a_real_nccl_has_all_functions_and_tells_its_version: TANDEM_TEST_NCCL names none"
            );
            return;
        };
        let (nccl, version, found) = open_nccl(Some(&path)).unwrap();
        assert!((OLDEST..30_000).contains(&version), "{version}");
        let name = version_text(version);
        assert!(name.starts_with("2.") && found.version == name, "{name}, {found:?}");
        assert_eq!(found.file.canonicalize().unwrap(), std::path::Path::new(&path).canonicalize().unwrap());
        // SAFETY: texts of result codes have no preconditions.
        let text = unsafe { CStr::from_ptr((nccl.error_string)(IN_PROGRESS)) };
        assert!(text.to_string_lossy().contains("in progress"), "{text:?}");
        // Two ids need no GPU, and differ.
        let mut ids = [UniqueId([0; 128]); 2];
        for id in &mut ids {
            // SAFETY: NCCL writes the id to a valid address.
            assert_eq!(unsafe { (nccl.get_unique_id)(id) }, SUCCESS);
        }
        assert_ne!(ids[0].0, ids[1].0);
        // A missing driver or GPU is named.
        match Libraries::open_at(Some(&path)) {
            Ok(_) => println!("NCCL {name}, a driver and a GPU"),
            Err(error) => assert!(error.contains(CUDA) || error.contains("no GPU"), "{error}"),
        }
    }

    #[test]
    fn an_old_nccl_is_refused_several_ranks_of_a_process() {
        for version in [21805, 22200] {
            let error = check_one_process(version, None).unwrap_err();
            let own = version_text(version);
            assert!(
                error.starts_with(&format!("NCCL {own} may write")) && error.contains("2.23.0"),
                "{error}"
            );
            assert!(
                error.contains("tandem launch") && error.contains("NCCL_P2P_DIRECT_DISABLE=1"),
                "{error}"
            );
            assert!(check_one_process(version, Some("0")).is_err());
            check_one_process(version, Some("1")).unwrap();
        }
        check_one_process(22304, None).unwrap();
    }

    #[test]
    fn versions_are_written_as_nvidia_counts_them() {
        assert_eq!(version_text(21805), "2.18.5");
        assert_eq!(version_text(23203), "2.32.3");
    }
}
