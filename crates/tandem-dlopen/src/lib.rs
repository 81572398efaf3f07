//! Shared libraries opened at run time: a program that does not need them starts without them.
//!
//! [`Library`] is an open library, [`functions!`] declares a table of its functions, [`Folders`] is
//! the search path of NVIDIA's libraries.

mod folders;

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;
use std::ptr::NonNull;

pub use folders::{FOLDERS, Folders};

/// A library of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Version in the vendor's format.
    pub version: String,
    /// File, or the name that the loader found it by.
    pub file: PathBuf,
}

/// An open library. It is never closed: NVIDIA's libraries and MPI have threads that run their code.
#[derive(Debug)]
pub struct Library {
    handle: NonNull<c_void>,
    name: String,
}

// SAFETY: the loader takes its handles from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Opens a library by path, or by a name for the loader.
    pub fn open(name: &str) -> Result<Self, String> {
        Self::open_with(name, libc::RTLD_LOCAL)
    }

    /// Opens a library whose symbols the libraries that it opens itself may use, as the plug-ins of
    /// an MPI do.
    pub fn open_global(name: &str) -> Result<Self, String> {
        Self::open_with(name, libc::RTLD_GLOBAL)
    }

    fn open_with(name: &str, scope: libc::c_int) -> Result<Self, String> {
        let text = CString::new(name).map_err(|_| format!("{name:?} has a zero byte"))?;
        // SAFETY: the text is null-terminated. Initialisers of the library run; it is NVIDIA's, an
        // MPI, or the user's replacement.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | scope) };
        match NonNull::new(handle) {
            Some(handle) => Ok(Self { handle, name: name.to_owned() }),
            None => Err(last_error()),
        }
    }

    /// Returns the name it was opened by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Looks up a function.
    pub fn symbol(&self, name: &CStr) -> Result<NonNull<c_void>, String> {
        // SAFETY: the handle is open, the name ends in zero.
        let symbol = unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) };
        NonNull::new(symbol).ok_or_else(|| format!("{} has no {}", self.name, name.to_string_lossy()))
    }

    /// Returns the file of a function, if it exists and the loader tells.
    pub fn file_of(&self, name: &CStr) -> Option<PathBuf> {
        let symbol = self.symbol(name).ok()?;
        let null: *mut c_void = std::ptr::null_mut();
        let mut found = libc::Dl_info {
            dli_fname: null.cast(),
            dli_fbase: null,
            dli_sname: null.cast(),
            dli_saddr: null,
        };
        // SAFETY: what is known of the address is written to where it is.
        let is_known = unsafe { libc::dladdr(symbol.as_ptr(), &raw mut found) } != 0;
        // SAFETY: the name ends in zero, and stays as long as the library is open.
        let file = if is_known { unsafe { text(found.dli_fname) } } else { String::new() };
        (!file.is_empty()).then(|| PathBuf::from(file))
    }

    /// Describes the library by a version and the file of one of its functions.
    pub fn found(&self, version: String, function: &CStr) -> Found {
        Found { version, file: self.file_of(function).unwrap_or_else(|| PathBuf::from(&self.name)) }
    }
}

/// Copies a library's text; empty for null.
///
/// # Safety
/// The pointer is null, or the text null-terminated.
pub unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Returns the loader's message for the last failure of this thread.
fn last_error() -> String {
    // SAFETY: the text, if there is one, ends in zero and stays until the thread's next call of the
    // loader.
    let words = unsafe { text(libc::dlerror()) };
    if words.is_empty() { "the loader does not say why".to_owned() } else { words }
}

/// Declares a table of a library's functions: field name, symbol, signature.
#[macro_export]
macro_rules! functions {
    (
        $(#[$doc:meta])*
        $visible:vis struct $table:ident { $($name:ident = $symbol:literal ($($argument:ty),*) -> $result:ty;)* }
    ) => {
        $(#[$doc])*
        $visible struct $table {
            $($visible $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $table {
            /// Looks up all functions; the error names a missing one.
            $visible fn load(library: &$crate::Library) -> ::std::result::Result<Self, ::std::string::String> {
                $(
                    let $name = library.symbol($symbol)?.as_ptr();
                    // SAFETY: the symbol is a function of this signature, as the library's header
                    // says.
                    let $name = unsafe {
                        ::std::mem::transmute::<*mut ::std::ffi::c_void, unsafe extern "C" fn($($argument),*) -> $result>($name)
                    };
                )*
                Ok(Self { $($name),* })
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every program has this one open.
    const OF_C: &str = "libc.so.6";

    functions! {
        /// One that is there.
        struct Present { length = c"strlen" (*const c_char) -> usize; }
    }
    functions! {
        /// One that is there and one that is not.
        #[allow(dead_code, reason = "nobody gets that far")]
        struct Absent {
            length = c"strlen" (*const c_char) -> usize;
            reduce = c"ncclReduce" () -> ();
        }
    }

    #[test]
    fn functions_of_a_library_are_called() {
        let present = Present::load(&Library::open(OF_C).unwrap()).unwrap();
        // SAFETY: the text ends in zero.
        assert_eq!(unsafe { (present.length)(c"four".as_ptr()) }, 4);
    }

    #[test]
    fn what_is_missing_is_named() {
        let absent = Absent::load(&Library::open(OF_C).unwrap()).err().unwrap();
        assert_eq!(absent, "libc.so.6 has no ncclReduce");
        let missing = Library::open("libtandem-has-none.so.7").err().unwrap();
        assert!(missing.contains("libtandem-has-none.so.7"), "{missing}");
        assert!(Library::open("lib\0.so").err().unwrap().contains("zero byte"));
    }

    #[test]
    fn a_librarys_file_is_known() {
        let library = Library::open(OF_C).unwrap();
        let file = library.file_of(c"atof").unwrap();
        assert!(file.is_absolute() && file.to_string_lossy().contains("libc"), "{}", file.display());
        assert_eq!(library.file_of(c"ncclReduce"), None);
    }
}
