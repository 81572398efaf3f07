//! Stream of bytes through memory that two processes of a host share.
//!
//! The memory is a page of counters and a ring. The sender creates it as an anonymous file, which
//! takes no space under `/dev/shm` and ends with its processes, and passes the descriptor through a
//! Unix socket. That socket stays open: it wakes a process that sleeps, and its end shows that the
//! other process has died.
//!
//! A side announces its sleep in the page, looks once more, and sleeps. The other side sends a byte
//! only to a sleeper, so a stream in motion makes no system calls.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};

/// Bytes of the page of counters.
const PAGE: usize = 4096;
/// Alignment of frames, which that of every element divides.
const ALIGNMENT: u64 = 8;
/// Maximum bytes of a ring that another process may ask to map.
const MAX_CAPACITY: usize = 1 << 24;

/// Counters, each on a cache line of its own.
#[repr(C)]
struct Counters {
    /// Bytes written so far.
    written: Line<AtomicU64>,
    /// Bytes read so far.
    read: Line<AtomicU64>,
    reader_sleeps: Line<AtomicU32>,
    writer_sleeps: Line<AtomicU32>,
    /// Whether a side has left in order, after all of its calls.
    reader_left: Line<AtomicU32>,
    writer_left: Line<AtomicU32>,
}

#[repr(C, align(64))]
struct Line<T>(T);

/// Mapped memory of one connection.
pub(super) struct SharedMemory {
    map: MmapRaw,
    capacity: usize,
}

/// Side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Writer,
    Reader,
}

impl SharedMemory {
    /// Creates memory with a ring of `capacity` bytes, a power of two. Without it, as on a system
    /// that has no anonymous files, bytes go through the socket.
    pub(super) fn create(capacity: usize) -> Option<(Self, OwnedFd)> {
        let file = anonymous_file(PAGE + capacity)?;
        Some((Self::map(&file, capacity)?, file))
    }

    /// Maps memory that another process created.
    pub(super) fn open(file: &OwnedFd, capacity: usize) -> Option<Self> {
        if !capacity.is_power_of_two() || capacity > MAX_CAPACITY || !is_fixed(file, PAGE + capacity) {
            return None;
        }
        Self::map(file, capacity)
    }

    fn map(file: &impl AsFd, capacity: usize) -> Option<Self> {
        let file = std::os::fd::AsRawFd::as_raw_fd(&file.as_fd());
        let map = MmapOptions::new().len(PAGE + capacity).map_raw(file).ok()?;
        Some(Self { map, capacity })
    }

    fn counters(&self) -> &Counters {
        // SAFETY: the map begins with a page of zeros, aligned for the counters and larger than
        // them, that is only accessed as these atomics.
        unsafe { &*self.map.as_ptr().cast::<Counters>() }
    }

    /// Records that a side has left in order.
    pub(super) fn leave(&self, side: Side) {
        self.left(side).store(1, Ordering::Release);
    }

    /// Returns whether a side has left in order.
    pub(super) fn has_left(&self, side: Side) -> bool {
        self.left(side).load(Ordering::Acquire) == 1
    }

    fn left(&self, side: Side) -> &AtomicU32 {
        match side {
            Side::Writer => &self.counters().writer_left.0,
            Side::Reader => &self.counters().reader_left.0,
        }
    }

    fn sleeps(&self, side: Side) -> &AtomicU32 {
        match side {
            Side::Writer => &self.counters().writer_sleeps.0,
            Side::Reader => &self.counters().reader_sleeps.0,
        }
    }

    /// Announces that a side is about to sleep. It must look once more before it does.
    pub(super) fn announce_sleep(&self, side: Side) {
        self.sleeps(side).store(1, Ordering::Relaxed);
        // Either this side sees the other's progress, or the other sees the announcement.
        fence(Ordering::SeqCst);
    }

    /// Returns whether a side that has just moved must wake the other.
    fn must_wake(&self, other: Side) -> bool {
        fence(Ordering::SeqCst);
        let sleeps = self.sleeps(other);
        sleeps.load(Ordering::Relaxed) == 1 && sleeps.swap(0, Ordering::Relaxed) == 1
    }

    fn place(&self, position: u64) -> usize {
        PAGE + (position as usize & (self.capacity - 1))
    }

    /// Returns the bytes that can be written at once.
    pub(super) fn room(&self) -> usize {
        let counters = self.counters();
        let written = counters.written.0.load(Ordering::Relaxed);
        let used = distance(written, counters.read.0.load(Ordering::Acquire));
        // A broken peer must not make this side write outside of the ring.
        self.capacity.saturating_sub(used).min(self.capacity - (written as usize & (self.capacity - 1)))
    }

    /// Writes the bytes that fit, in multiples of `width`; returns their number and whether the
    /// reader must be woken.
    pub(super) fn write(&self, bytes: &[u8], width: usize) -> (usize, bool) {
        let len = self.room().min(bytes.len()) / width * width;
        if len == 0 {
            return (0, false);
        }
        let written = &self.counters().written.0;
        let position = written.load(Ordering::Relaxed);
        // SAFETY: `room` keeps the range within the ring, and the reader does not access it before
        // it is counted as written.
        unsafe {
            let to = self.map.as_mut_ptr().add(self.place(position));
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, len);
        }
        written.store(position + len as u64, Ordering::Release);
        (len, self.must_wake(Side::Reader))
    }

    /// Returns the unread bytes that lie together, at most `max` and in multiples of `width`.
    pub(super) fn unread(&self, max: usize, width: usize) -> &[u8] {
        let counters = self.counters();
        let position = counters.read.0.load(Ordering::Relaxed);
        let unread = distance(counters.written.0.load(Ordering::Acquire), position);
        let together = self.capacity - (position as usize & (self.capacity - 1));
        let len = unread.min(together).min(max) / width * width;
        // SAFETY: within the ring, and the writer changes nothing there until it is counted as
        // read. Positions within a frame are multiples of the element's size.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.place(position)), len) }
    }

    /// Counts bytes as read; returns whether the writer must be woken.
    pub(super) fn consume(&self, len: usize) -> bool {
        let read = &self.counters().read.0;
        read.store(read.load(Ordering::Relaxed) + len as u64, Ordering::Release);
        self.must_wake(Side::Writer)
    }

    /// Skips to the alignment of the next frame; returns whether the other side must be woken.
    pub(super) fn align(&self, side: Side) -> bool {
        let counters = self.counters();
        let (count, other) = match side {
            Side::Writer => (&counters.written.0, Side::Reader),
            Side::Reader => (&counters.read.0, Side::Writer),
        };
        let position = count.load(Ordering::Relaxed);
        if position.is_multiple_of(ALIGNMENT) {
            return false;
        }
        count.store(position.next_multiple_of(ALIGNMENT), Ordering::Release);
        self.must_wake(other)
    }
}

/// Returns the bytes that are written and not read: none where the reader has skipped to the next
/// frame and the writer has not yet.
fn distance(written: u64, read: u64) -> usize {
    written.saturating_sub(read) as usize
}

#[cfg(target_os = "linux")]
fn anonymous_file(len: usize) -> Option<OwnedFd> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    let file = memfd_create("tandem-ranks", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).ok()?;
    ftruncate(&file, len as u64).ok()?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).ok()?;
    Some(file)
}

/// Returns whether a file has this size for ever: an access beyond its end would be a signal.
#[cfg(target_os = "linux")]
fn is_fixed(file: &OwnedFd, len: usize) -> bool {
    use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

    fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
        && fstat(file).is_ok_and(|stat| stat.st_size == len as i64)
}

#[cfg(not(target_os = "linux"))]
fn anonymous_file(_: usize) -> Option<OwnedFd> {
    None
}

#[cfg(not(target_os = "linux"))]
fn is_fixed(_: &OwnedFd, _: usize) -> bool {
    false
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn bytes_arrive_in_order_around_the_end_of_the_ring() {
        let (writer, file) = SharedMemory::create(64).unwrap();
        let reader = SharedMemory::open(&file, 64).unwrap();
        let (mut sent, mut received) = (0u8..=255, Vec::new());
        let mut waiting: Vec<u8> = Vec::new();
        while received.len() < 256 {
            waiting.extend(sent.by_ref().take(40));
            let (written, _) = writer.write(&waiting, 8);
            waiting.drain(..written);
            let unread = reader.unread(24, 8);
            let len = unread.len();
            received.extend_from_slice(unread);
            reader.consume(len);
        }
        assert_eq!(received, (0..=255).collect::<Vec<u8>>());
        assert!(reader.unread(1, 1).is_empty());
    }

    #[test]
    fn a_reader_that_ends_a_frame_first_sees_no_bytes_that_are_not_there() {
        let (writer, file) = SharedMemory::create(64).unwrap();
        let reader = SharedMemory::open(&file, 64).unwrap();
        writer.write(&[1; 12], 4);
        reader.consume(12);
        reader.align(Side::Reader);
        assert!(reader.unread(64, 4).is_empty(), "the writer has not ended the frame");
        assert_eq!(writer.room(), 52, "up to the end of the ring");
        writer.align(Side::Writer);
        writer.write(&[2; 8], 8);
        assert_eq!(reader.unread(64, 8), [2; 8]);
    }

    #[test]
    fn a_sleeper_is_woken_once() {
        let (writer, file) = SharedMemory::create(64).unwrap();
        let reader = SharedMemory::open(&file, 64).unwrap();
        assert_eq!(writer.write(&[1; 8], 8), (8, false), "nobody sleeps");
        reader.announce_sleep(Side::Reader);
        assert_eq!(writer.write(&[1; 8], 8), (8, true));
        assert_eq!(writer.write(&[1; 64], 8), (48, false));
        writer.announce_sleep(Side::Writer);
        assert!(reader.consume(8));
        assert!(!reader.consume(8));
    }

    #[test]
    fn memory_that_may_shrink_or_has_another_size_is_refused() {
        use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

        let (_, file) = SharedMemory::create(64).unwrap();
        assert!(SharedMemory::open(&file, 128).is_none());
        assert!(SharedMemory::open(&file, 63).is_none());
        let file = memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, (PAGE + 64) as u64).unwrap();
        assert!(SharedMemory::open(&file, 64).is_none());
    }
}
