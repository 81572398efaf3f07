//! Memory that the system refuses: a message and exit code 1, where Rust's own handler ends in a core dump.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{self, Write};
use std::process;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// The system's allocator, which does not return without memory.
///
/// Large pieces (the arena, maps of files) do not come from here; their absence is an error as any other.
struct Allocator;

impl Allocator {
    /// Ends the process if there is no memory at `place`.
    #[inline]
    fn checked(place: *mut u8, bytes: usize) -> *mut u8 {
        if place.is_null() {
            end(bytes);
        }
        place
    }
}

#[expect(unsafe_code, reason = "an allocator is unsafe by its interface")]
// SAFETY: it hands on every call as it is, and what the system returned unless that is nothing.
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        Self::checked(unsafe { System.alloc(layout) }, layout.size())
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        Self::checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    #[inline]
    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        Self::checked(unsafe { System.realloc(place, layout, size) }, size)
    }

    #[inline]
    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(place, layout) }
    }
}

/// Says so without any memory, and ends the process. Files that are being written have no name yet.
#[cold]
#[inline(never)]
fn end(bytes: usize) -> ! {
    // stderr has no buffer, and a number needs none. Where nobody reads it any longer, nothing is lost.
    let _ = writeln!(
        io::stderr(),
        "error: memory ran out: the system refused {bytes} bytes. Give the process more, or plan a smaller run (tandem \
         plan). Complete checkpoints are intact"
    );
    process::exit(1)
}
