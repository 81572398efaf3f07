//! NVRTC, which compiles kernels at run time for the present GPU. It needs no GPU itself.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use tandem_dlopen::{Library, functions, text};

use super::libraries;
use crate::Result;
use crate::cuda::driver::Source;
use crate::cuda::{HEADERS, failed};

/// `nvrtcProgram`.
type Program = *mut c_void;

/// `NVRTC_SUCCESS`.
const SUCCESS: c_int = 0;
/// `NVRTC_ERROR_COMPILATION`.
const COMPILATION: c_int = 6;
/// `NVRTC_ERROR_BUILTIN_OPERATION_FAILURE`.
const BUILTIN_OPERATION_FAILURE: c_int = 7;

/// Oldest supported version: the first that produces GPU code and names its file by major version.
const OLDEST: (u32, u32) = (11, 2);

functions! {
    /// Functions of NVRTC, as in `nvrtc.h` since CUDA 11.2.
    pub(super) struct NvrtcFunctions {
        version = c"nvrtcVersion" (*mut c_int, *mut c_int) -> c_int;
        error_string = c"nvrtcGetErrorString" (c_int) -> *const c_char;
        num_architectures = c"nvrtcGetNumSupportedArchs" (*mut c_int) -> c_int;
        architectures = c"nvrtcGetSupportedArchs" (*mut c_int) -> c_int;
        create = c"nvrtcCreateProgram"
            (*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int;
        destroy = c"nvrtcDestroyProgram" (*mut Program) -> c_int;
        compile = c"nvrtcCompileProgram" (Program, c_int, *const *const c_char) -> c_int;
        log_size = c"nvrtcGetProgramLogSize" (Program, *mut usize) -> c_int;
        log = c"nvrtcGetProgramLog" (Program, *mut c_char) -> c_int;
        cubin_size = c"nvrtcGetCUBINSize" (Program, *mut usize) -> c_int;
        cubin = c"nvrtcGetCUBIN" (Program, *mut c_char) -> c_int;
        ptx_size = c"nvrtcGetPTXSize" (Program, *mut usize) -> c_int;
        ptx = c"nvrtcGetPTX" (Program, *mut c_char) -> c_int;
    }
}

/// An open NVRTC.
pub struct Compiler {
    nvrtc: NvrtcFunctions,
    version: (u32, u32),
    /// Supported compute capabilities, as 80 for 8.0.
    architectures: Vec<u32>,
}

/// Result of compiling a file of kernels.
pub struct Compiled {
    /// GPU code, or PTX.
    pub image: Vec<u8>,
    /// The compiler's log.
    pub log: String,
}

impl Compiler {
    /// Opens NVRTC: the file at `path`, or the latest found.
    ///
    /// # Errors
    /// If there is none, or only versions before 11.2.
    pub fn open(path: Option<&Path>) -> Result<Self> {
        match path {
            None => Self::new(libraries::nvrtc(c_int::MAX)?),
            Some(path) => {
                let library = Library::open(&path.to_string_lossy()).map_err(|why| failed("NVRTC", why))?;
                Self::new(libraries::load_nvrtc(&library)?)
            }
        }
    }

    pub(super) fn new(nvrtc: NvrtcFunctions) -> Result<Self> {
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: the numbers and the list have room for the results.
        let architectures = unsafe {
            check(&nvrtc, "asking NVRTC for its version", (nvrtc.version)(&raw mut major, &raw mut minor))?;
            let what = "asking NVRTC for GPUs";
            check(&nvrtc, what, (nvrtc.num_architectures)(&raw mut count))?;
            let mut architectures = vec![0; usize::try_from(count).unwrap_or(0)];
            check(&nvrtc, what, (nvrtc.architectures)(architectures.as_mut_ptr()))?;
            architectures
        };
        let version = (major as u32, minor as u32);
        if version < OLDEST {
            let (major, minor) = OLDEST;
            let reason =
                format!("{}.{}, and {major}.{minor} is the oldest that is used", version.0, version.1);
            return Err(failed("NVRTC", reason));
        }
        let architectures = architectures.into_iter().map(|number: c_int| number as u32).collect();
        Ok(Self { nvrtc, version, architectures })
    }

    /// Returns major and minor version.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Selects the target for a compute capability: its own code with all features, else code of an
    /// earlier GPU of its generation, else PTX, which its driver compiles.
    ///
    /// # Errors
    /// If NVRTC supports later GPUs only.
    pub fn target(&self, (major, minor): (u32, u32)) -> Result<String> {
        let own = 10 * major + minor;
        if (major, minor) == (9, 0) && self.version >= (12, 0) && self.architectures.contains(&own) {
            // Features of Hopper alone.
            return Ok("sm_90a".to_owned());
        }
        let known = || self.architectures.iter().copied();
        if let Some(best) = known().filter(|&one| one / 10 == major && one <= own).max() {
            return Ok(format!("sm_{best}"));
        }
        let before = known().filter(|&one| one < own).max();
        before.map(|best| format!("compute_{best}")).ok_or_else(|| {
            let reason = format!("version {}.{} has no target for sm_{own}", self.version.0, self.version.1);
            failed("NVRTC", reason)
        })
    }

    /// Returns the compiler options of a file.
    pub fn options(source: &Source, target: &str) -> Vec<String> {
        let fused = if source.fused { "true" } else { "false" };
        vec![
            format!("--gpu-architecture={target}"),
            "--std=c++17".to_owned(),
            format!("--fmad={fused}"),
            "--device-as-default-execution-space".to_owned(),
        ]
    }

    /// Compiles a file, which may include [`HEADERS`], for `sm_XY` or `compute_XY`.
    pub fn compile(&self, source: &Source, target: &str, more_options: &[&str]) -> Result<Compiled> {
        let options: Vec<String> = Self::options(source, target)
            .into_iter()
            .chain(more_options.iter().map(|&o| o.to_owned()))
            .collect();
        let program = Unit::new(&self.nvrtc, source)?;
        let options: Vec<CString> = options.iter().map(|option| c_text(option)).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program exists, with as many null-terminated options.
        let outcome =
            unsafe { (self.nvrtc.compile)(program.program, pointers.len() as c_int, pointers.as_ptr()) };
        let log = program.log();
        if outcome != SUCCESS {
            let (major, minor) = self.version;
            let hint = match outcome {
                COMPILATION => String::new(),
                BUILTIN_OPERATION_FAILURE => {
                    format!("; libnvrtc-builtins.so.{major}.{minor} must lie beside NVRTC")
                }
                _ => format!(
                    " ({})",
                    options.iter().map(|o| o.to_string_lossy()).collect::<Vec<_>>().join(" ")
                ),
            };
            let words = error_words(&self.nvrtc, outcome);
            return Err(failed(
                format!("{} for {target}", source.name),
                format!("NVRTC {major}.{minor}: {words}{hint}\n{}", log.trim()),
            ));
        }
        let image = if target.starts_with("sm_") {
            program.output(self.nvrtc.cubin_size, self.nvrtc.cubin)?
        } else {
            program.output(self.nvrtc.ptx_size, self.nvrtc.ptx)?
        };
        Ok(Compiled { image, log })
    }
}

/// A file being compiled.
struct Unit<'a> {
    nvrtc: &'a NvrtcFunctions,
    name: &'static str,
    program: Program,
}

impl<'a> Unit<'a> {
    fn new(nvrtc: &'a NvrtcFunctions, source: &Source) -> Result<Self> {
        let (text, name) = (c_text(source.text), c_text(source.name));
        let headers: Vec<[CString; 2]> =
            HEADERS.iter().map(|header| [header.text, header.name].map(c_text)).collect();
        let [texts, names] = [0, 1].map(|part| headers.iter().map(|h| h[part].as_ptr()).collect::<Vec<_>>());
        let mut program = std::ptr::null_mut();
        // SAFETY: all texts are null-terminated, with as many headers as names; NVRTC copies them.
        let outcome = unsafe {
            (nvrtc.create)(
                &raw mut program,
                text.as_ptr(),
                name.as_ptr(),
                headers.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        check(nvrtc, source.name, outcome)?;
        Ok(Self { nvrtc, name: source.name, program })
    }

    fn log(&self) -> String {
        let bytes = self.output(self.nvrtc.log_size, self.nvrtc.log).unwrap_or_default();
        CStr::from_bytes_until_nul(&bytes).unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Reads an output of NVRTC by its length and content functions.
    fn output(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        content: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the program exists; number and content have room for the results.
        unsafe {
            check(self.nvrtc, self.name, size(self.program, &raw mut len))?;
            let mut bytes = vec![0u8; len];
            check(self.nvrtc, self.name, content(self.program, bytes.as_mut_ptr().cast()))?;
            Ok(bytes)
        }
    }
}

impl Drop for Unit<'_> {
    fn drop(&mut self) {
        // SAFETY: the program was made in `new` and is not used afterwards.
        unsafe {
            (self.nvrtc.destroy)(&raw mut self.program);
        }
    }
}

/// Converts a text of this crate, which contains no zero.
fn c_text(text: &str) -> CString {
    CString::new(text).expect("a text without a zero byte")
}

fn check(nvrtc: &NvrtcFunctions, what: &str, outcome: c_int) -> Result<()> {
    if outcome == SUCCESS { Ok(()) } else { Err(failed(what, error_words(nvrtc, outcome))) }
}

fn error_words(nvrtc: &NvrtcFunctions, outcome: c_int) -> String {
    // SAFETY: the texts of result codes are static.
    unsafe { text((nvrtc.error_string)(outcome)) }
}
