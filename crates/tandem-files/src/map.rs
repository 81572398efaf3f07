//! Files in memory that may become shorter while they are read.
//!
//! A page behind the end of a mapped file raises SIGBUS, which ends the process. The handler here looks
//! whether the address is in a [`Map`]; if it is, zeroes take the page's place, the map remembers it, and
//! [`Map::check`] tells. The page in which a file ends is filled up with zeroes and raises nothing, so that
//! the length is looked at too. Any other SIGBUS goes to the handler that was there before.

use std::fs::File;
use std::io;
use std::ops::Deref;

use memmap2::Mmap;

/// File in memory, read only. Pages are read when they are needed.
#[derive(Debug)]
pub struct Map {
    map: Mmap,
    file: File,
    /// Its place among the maps that the handler knows; `None` if there are too many.
    slot: Option<usize>,
}

impl Map {
    /// Maps a file.
    ///
    /// # Errors
    /// As `mmap`; `InvalidInput` where a file has no length, as a device.
    #[expect(unsafe_code, reason = "mapping a file is a foreign-function corner")]
    pub fn new(file: File) -> io::Result<Self> {
        // SAFETY: the map is only read, as plain bytes of any value, and by one reader at a time: bytes that
        // another process changes meanwhile are as good as any others. One that cuts the file off makes
        // zeroes of them, see the module.
        let map = unsafe { Mmap::map(&file) }.map_err(super::explained)?;
        let slot = guard::add(map.as_ptr() as usize, map.len());
        Ok(Self { map, file, slot })
    }

    /// Returns an error if bytes that were read are not the file's, for it has become shorter.
    ///
    /// # Errors
    /// `InvalidData`.
    pub fn check(&self) -> io::Result<()> {
        if self.slot.is_some_and(guard::was_cut) || self.file.metadata()?.len() < self.map.len() as u64 {
            let reason = "became shorter while it was read; something else writes to it";
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        Ok(())
    }

    /// Drops the pages read so far from memory; they are read from the file again on demand.
    #[expect(unsafe_code, reason = "advice on a mapping is a foreign-function corner")]
    pub fn release(&self) {
        #[cfg(unix)]
        // SAFETY: the map is of a file and never written through, so reloaded pages are the same. It is
        // only advice.
        unsafe {
            let _ = self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed);
        }
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // Before the memory is given back, as another map may get its addresses.
        if let Some(slot) = self.slot.take() {
            guard::remove(slot);
        }
    }
}

#[cfg(not(unix))]
mod guard {
    pub(super) fn add(_: usize, _: usize) -> Option<usize> {
        None
    }

    pub(super) fn was_cut(_: usize) -> bool {
        false
    }

    pub(super) fn remove(_: usize) {}
}

#[cfg(unix)]
#[expect(unsafe_code, reason = "a signal handler is a foreign-function corner")]
mod guard {
    use std::ffi::{c_int, c_void};
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    /// Maps that are known at once: a model has at most hundreds of files.
    const SLOTS: usize = 4096;

    /// Addresses of a map. A start of 0 is free, one of 1 is being filled.
    struct Slot {
        start: AtomicUsize,
        len: AtomicUsize,
        was_cut: AtomicBool,
    }

    static MAPS: [Slot; SLOTS] = [const {
        Slot { start: AtomicUsize::new(0), len: AtomicUsize::new(0), was_cut: AtomicBool::new(false) }
    }; SLOTS];

    /// The handler that was there before, and the size of a page.
    static BEFORE: OnceLock<(libc::sigaction, usize)> = OnceLock::new();

    /// Makes a map known to the handler.
    pub(super) fn add(start: usize, len: usize) -> Option<usize> {
        BEFORE.get_or_init(install);
        MAPS.iter().position(|slot| {
            if slot.start.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
                return false;
            }
            slot.len.store(len, Ordering::Relaxed);
            slot.was_cut.store(false, Ordering::Relaxed);
            slot.start.store(start, Ordering::Release);
            true
        })
    }

    pub(super) fn was_cut(slot: usize) -> bool {
        MAPS[slot].was_cut.load(Ordering::Relaxed)
    }

    pub(super) fn remove(slot: usize) {
        MAPS[slot].start.store(0, Ordering::Release);
    }

    fn install() -> (libc::sigaction, usize) {
        // SAFETY: both structs are plain data, for which zeroes are valid; `handle` keeps to what a handler may do.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let mut before: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&raw mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &raw const action, &raw mut before);
            (before, libc::sysconf(libc::_SC_PAGESIZE) as usize)
        }
    }

    /// Puts zeroes in the place of a page that a map's file has no more.
    extern "C" fn handle(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
        // SAFETY: the kernel passes a valid siginfo of SIGBUS, which has an address.
        let address = unsafe { (*info).si_addr() } as usize;
        // Set before any map was made known.
        let Some((before, page)) = BEFORE.get() else { return };
        let within = |slot: &&Slot| {
            let start = slot.start.load(Ordering::Acquire);
            start > 1 && address >= start && address - start < slot.len.load(Ordering::Relaxed)
        };
        if let Some(slot) = MAPS.iter().find(within) {
            let start = (address & !(page - 1)) as *mut c_void;
            let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: the page is one of a map of this process that is only read, and stays so.
            let page = unsafe { libc::mmap(start, *page, libc::PROT_READ, flags, -1, 0) };
            if page != libc::MAP_FAILED {
                slot.was_cut.store(true, Ordering::Relaxed);
                return;
            }
        }
        // The access is repeated and finds the handler of before.
        // SAFETY: the action is one that `sigaction` returned.
        unsafe { libc::sigaction(libc::SIGBUS, before, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_becomes_shorter_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let maps: Vec<Map> = (0..2).map(|_| Map::new(File::open(&path).unwrap()).unwrap()).collect();
        assert!(maps[0].iter().all(|&byte| byte == 7));
        maps[0].check().unwrap();
        let cut = |len| File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
        let reason = "became shorter while it was read; something else writes to it";
        cut((1 << 20) - 1);
        assert_eq!(maps[0].check().unwrap_err().to_string(), reason);
        cut(100);
        // The page in which the file ends is whole.
        assert_eq!(maps[1][..100], [7; 100]);
        assert!(maps[1][4096..].iter().all(|&byte| byte == 0));
        // What was read stays wrong, whatever becomes of the file.
        cut(1 << 20);
        assert_eq!(maps[1].check().unwrap_err().to_string(), reason);
        maps[0].check().unwrap();
        // A map that takes the place is whole.
        drop(maps);
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let map = Map::new(File::open(&path).unwrap()).unwrap();
        assert!(map.iter().all(|&byte| byte == 7));
        map.check().unwrap();
    }
}
