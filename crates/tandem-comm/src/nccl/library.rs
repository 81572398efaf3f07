//! Libraries that are opened when they are asked for: a program that does without them starts without them.

use std::ffi::{CStr, CString, c_void};
use std::ptr::NonNull;

/// An open library. It stays open until the process ends: NCCL has threads of its own, which run its code.
pub(super) struct Library {
    handle: NonNull<c_void>,
    name: String,
}

impl Library {
    /// Opens a library by its path, or by a name that the system's loader looks for. Why not, in the loader's words.
    pub(super) fn open(name: &str) -> Result<Self, String> {
        let text = CString::new(name).map_err(|_| format!("{name:?} has a zero byte"))?;
        // SAFETY: the text ends in zero. Initialisers of the library run; it is NVIDIA's, or what the user names in its place.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        match NonNull::new(handle) {
            Some(handle) => Ok(Self { handle, name: name.to_owned() }),
            None => Err(last_error()),
        }
    }

    /// Where a function is.
    pub(super) fn symbol(&self, name: &CStr) -> Result<NonNull<c_void>, String> {
        // SAFETY: the handle is open, the name ends in zero.
        let symbol = unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) };
        NonNull::new(symbol).ok_or_else(|| format!("{} has no {}", self.name, name.to_string_lossy()))
    }
}

/// What the loader says of the last failure of this thread.
fn last_error() -> String {
    // SAFETY: the text, if there is one, ends in zero and stays until the thread's next call of the loader.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader does not say why".to_owned();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// A table of a library's functions: the field's name, the symbol, the signature.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($name:ident = $symbol:literal ($($argument:ty),*) -> $result:ty;)* }) => {
        $(#[$doc])*
        pub(super) struct $table {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $table {
            /// Looks all functions up. Which one is not there, if one is not.
            pub(super) fn of(library: &$crate::nccl::library::Library) -> Result<Self, String> {
                $(
                    let $name = library.symbol($symbol)?.as_ptr();
                    // SAFETY: the symbol is a function of this signature, as the library's header says.
                    let $name = unsafe {
                        std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($argument),*) -> $result>($name)
                    };
                )*
                Ok(Self { $($name),* })
            }
        }
    };
}

pub(super) use functions;

#[cfg(test)]
mod tests {
    use super::*;

    /// Every program has this one open.
    const OF_C: &str = "libc.so.6";

    functions! {
        /// One that is there.
        Present { length = c"strlen" (*const std::ffi::c_char) -> usize; }
    }
    functions! {
        /// One that is there and one that is not.
        #[allow(dead_code, reason = "nobody gets that far")]
        Absent {
            length = c"strlen" (*const std::ffi::c_char) -> usize;
            reduce = c"ncclReduce" () -> ();
        }
    }

    #[test]
    fn functions_of_a_library_are_called() {
        let present = Present::of(&Library::open(OF_C).unwrap()).unwrap();
        // SAFETY: the text ends in zero.
        assert_eq!(unsafe { (present.length)(c"four".as_ptr()) }, 4);
    }

    #[test]
    fn what_is_missing_is_named() {
        let absent = Absent::of(&Library::open(OF_C).unwrap()).err().unwrap();
        assert_eq!(absent, "libc.so.6 has no ncclReduce");
        let missing = Library::open("libtandem-has-none.so.7").err().unwrap();
        assert!(missing.contains("libtandem-has-none.so.7"), "{missing}");
        assert!(Library::open("lib\0.so").err().unwrap().contains("zero byte"));
    }
}
