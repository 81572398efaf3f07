//! Transfer of host numbers: small tables that kernels read beside tensors, and results read back.
//!
//! Every layer needs a batch's tables (positions, ids, rows), with the same contents each time. A
//! sent table stays on the device with a copy in pinned memory, and is sent again only if it
//! differs. A step so sends each table once, without any notion of a batch.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use super::driver::{Drivers, Event, Region, Stream};
use crate::memory::free_list::{Cut, FreeList};
use crate::{KernelError, MemoryKind, Result};

/// Bytes of tables on the device.
pub(crate) const TABLES: usize = 256 << 20;

/// Most tables that are kept: several times those of a pass. Each look-up goes through them, latest first, and
/// those of a batch are never wanted again.
const MOST_TABLES: usize = 512;

/// Bytes read back at a time.
const WINDOW: usize = 4 << 20;

/// Tables kept on the device.
pub(crate) struct Tables {
    driver: Drivers,
    stream: Stream,
    state: Mutex<State>,
}

struct State {
    device: Box<dyn Region>,
    host: Box<dyn Region>,
    /// Allocated ranges; a table has the same offset in both memories.
    free: FreeList,
    /// Least recently used first.
    tables: VecDeque<Table>,
}

struct Table {
    cut: Cut,
    len: usize,
    key: Key,
    /// End of the copy to the device.
    sent: Event,
}

/// Key of a table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Key {
    /// Hash of the contents.
    Hash(u64),
    /// Name that stands for the contents.
    Name((u64, usize)),
}

/// FNV-1a over words; equal hashes are compared in full.
fn hash(bytes: &[u8]) -> u64 {
    let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
    let (words, rest) = bytes.as_chunks::<8>();
    let hash = words.iter().fold(0xcbf2_9ce4_8422_2325, |hash, word| mix(hash, u64::from_le_bytes(*word)));
    rest.iter().fold(hash, |hash, &byte| mix(hash, u64::from(byte)))
}

impl Tables {
    pub(crate) fn new(driver: &Drivers, stream: Stream) -> Result<Self> {
        let (device, host) = (driver.reserve(TABLES)?, driver.pinned(TABLES)?);
        let state = State { device, host, free: FreeList::new(TABLES), tables: VecDeque::new() };
        Ok(Self { driver: driver.clone(), stream, state: Mutex::new(state) })
    }

    /// Maps the memory of all tables.
    pub(crate) fn map_all(&self) -> Result<()> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.device.grow(TABLES)?;
        state.host.grow(TABLES)
    }

    /// Returns the device address of a table with these contents, valid for work put into the
    /// stream before the next call.
    pub(crate) fn send(&self, bytes: &[u8]) -> Result<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes.is_empty() {
            return Ok(state.device.base());
        }
        let key = Key::Hash(hash(bytes));
        let is_it = |state: &State, table: &Table| {
            table.key == key && table.len == bytes.len() && state.copy_of(table) == bytes
        };
        match state.find(is_it) {
            Some(address) => Ok(address),
            None => self.put(&mut state, key, bytes),
        }
    }

    /// Returns the device address of a named table, if it is still there.
    pub(crate) fn find(&self, name: (u64, usize)) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.find(|_, table| table.key == Key::Name(name))
    }

    /// Sends a table as [`Self::send`], under a name.
    pub(crate) fn send_named(&self, name: (u64, usize), bytes: &[u8]) -> Result<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.put(&mut state, Key::Name(name), bytes)
    }

    /// Returns room for tables whose addresses stay until it is released.
    pub(crate) fn block(&self, bytes: usize) -> Result<Block> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let cut = self.cut(&mut state, bytes)?;
        let at = |region: &dyn Region| region.base() + cut.offset() as u64;
        Ok(Block { device: at(&*state.device), host: at(&*state.host), cut, bytes })
    }

    /// Frees a block, whose host memory nothing reads any more.
    pub(crate) fn release(&self, block: Block) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).free.free(block.cut);
    }

    /// Allocates a mapped range in both memories.
    fn cut(&self, state: &mut State, bytes: usize) -> Result<Cut> {
        let cut = loop {
            match state.free.cut(MemoryKind::Scratch, bytes) {
                Some(cut) => break cut,
                None if self.forget_oldest(state)? => {}
                None => {
                    let reason = format!("{bytes} bytes do not fit among the {TABLES} of all tables");
                    return Err(KernelError::invalid("table", reason));
                }
            }
        };
        let end = cut.offset() + bytes;
        state.device.grow(end)?;
        state.host.grow(end)?;
        Ok(cut)
    }

    /// Frees the table that was not used for longest; returns whether there was one.
    fn forget_oldest(&self, state: &mut State) -> Result<bool> {
        let Some(oldest) = state.tables.pop_front() else { return Ok(false) };
        // Its pinned copy may still be read. Readers of the device copy precede later writes in the stream.
        self.driver.finish(oldest.sent)?;
        self.driver.end_event(oldest.sent);
        state.free.free(oldest.cut);
        Ok(true)
    }

    fn put(&self, state: &mut State, key: Key, bytes: &[u8]) -> Result<u64> {
        if state.tables.len() >= MOST_TABLES {
            self.forget_oldest(state)?;
        }
        let cut = self.cut(state, bytes.len())?;
        let (from, to) = (state.host.base() + cut.offset() as u64, state.device.base() + cut.offset() as u64);
        let sent = self.driver.new_event()?;
        // SAFETY: the range of pinned memory was just allocated, is mapped and unshared; the
        // device's range is as long. The pinned copy stays until the event is over.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), from as *mut u8, bytes.len());
            self.driver.copy(self.stream, from, to, bytes.len())?;
        }
        self.driver.record(sent, self.stream)?;
        state.tables.push_back(Table { cut, len: bytes.len(), key, sent });
        Ok(to)
    }
}

/// Room for tables in both memories.
pub(crate) struct Block {
    device: u64,
    host: u64,
    cut: Cut,
    bytes: usize,
}

impl Block {
    /// Returns the address on the device.
    pub(crate) fn device(&self) -> u64 {
        self.device
    }

    /// Returns the address on the host.
    pub(crate) fn host(&self) -> u64 {
        self.host
    }

    /// Returns bytes of the host memory.
    ///
    /// # Panics
    /// If they end outside.
    pub(crate) fn contents(&self, start: usize, len: usize) -> &[u8] {
        // SAFETY: they are inside the block, mapped, and written only by its owner.
        unsafe { std::slice::from_raw_parts(self.place(start, len), len) }
    }

    /// Writes bytes of the host memory, which no work under way reads.
    ///
    /// # Panics
    /// If they end outside.
    pub(crate) fn write(&mut self, start: usize, bytes: &[u8]) {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.place(start, bytes.len()), bytes.len()) };
    }

    /// Returns where bytes of the host memory begin.
    fn place(&self, start: usize, len: usize) -> *mut u8 {
        assert!(start + len <= self.bytes, "bytes {start} to {} of {}", start + len, self.bytes);
        (self.host + start as u64) as *mut u8
    }
}

impl State {
    /// Returns the address of the matching table and makes it the most recently used.
    fn find(&mut self, is_it: impl Fn(&Self, &Table) -> bool) -> Option<u64> {
        let index = self.tables.iter().rposition(|table| is_it(self, table))?;
        let table = self.tables.remove(index)?;
        let address = self.device.base() + table.cut.offset() as u64;
        self.tables.push_back(table);
        Some(address)
    }

    fn copy_of(&self, table: &Table) -> &[u8] {
        let at = self.host.base() + table.cut.offset() as u64;
        // SAFETY: the table's bytes were written there, and stay until it is removed.
        unsafe { std::slice::from_raw_parts(at as *const u8, table.len) }
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        // No pending work may read freed memory.
        let _ = self.driver.synchronize(self.stream);
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.tables.iter().for_each(|table| self.driver.end_event(table.sent));
    }
}

/// Pinned memory for copies from and to pageable host memory.
pub(crate) struct Window {
    driver: Drivers,
    host: Mutex<Box<dyn Region>>,
}

impl Window {
    pub(crate) fn new(driver: &Drivers) -> Result<Self> {
        let host = driver.pinned(WINDOW)?;
        Ok(Self { driver: driver.clone(), host: Mutex::new(host) })
    }

    /// Maps the whole window.
    pub(crate) fn map_all(&self) -> Result<()> {
        self.host.lock().unwrap_or_else(PoisonError::into_inner).grow(WINDOW)
    }

    /// Copies from the device when the stream's work so far is done, and waits.
    ///
    /// # Safety
    /// There are as many bytes at the address.
    pub(crate) unsafe fn read(&self, stream: Stream, from: u64, to: &mut [u8]) -> Result<()> {
        let host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
        host.grow(to.len().min(WINDOW))?;
        for (index, part) in to.chunks_mut(WINDOW).enumerate() {
            // SAFETY: the window is mapped, and held; the caller vouches for the source.
            unsafe {
                self.driver.copy(stream, from + (index * WINDOW) as u64, host.base(), part.len())?;
                self.driver.synchronize(stream)?;
                std::ptr::copy_nonoverlapping(host.base() as *const u8, part.as_mut_ptr(), part.len());
            }
        }
        Ok(())
    }

    /// Copies to the device after the stream's work so far, and waits.
    ///
    /// # Safety
    /// There is room for as many bytes at the address.
    pub(crate) unsafe fn write(&self, stream: Stream, from: &[u8], to: u64) -> Result<()> {
        let host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
        host.grow(from.len().min(WINDOW))?;
        for (index, part) in from.chunks(WINDOW).enumerate() {
            // SAFETY: as in `read`.
            unsafe {
                std::ptr::copy_nonoverlapping(part.as_ptr(), host.base() as *mut u8, part.len());
                self.driver.copy(stream, host.base(), to + (index * WINDOW) as u64, part.len())?;
            }
            self.driver.synchronize(stream)?;
        }
        Ok(())
    }
}
