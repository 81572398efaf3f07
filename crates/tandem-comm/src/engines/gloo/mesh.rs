//! Connections of one rank to each of its peers, and transfers on them: the safe interface of
//! `shim.cc`.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::health::abort_flag::AbortFlag;

/// Interval at which a wait checks whether the job is over.
const LOOK: Duration = Duration::from_millis(250);
/// Time for a peer with a published address to connect. The wait cannot be aborted.
const CONNECT: Duration = Duration::from_secs(60);
/// The shim's WHY_SIZE.
const WHY_SIZE: usize = 512;
/// Maximum bytes of an address; Gloo's are little more than a `sockaddr_storage`.
const ADDRESS_SIZE: usize = 512;

#[repr(C)]
struct RawMesh {
    _opaque: [u8; 0],
}

#[repr(C)]
struct RawTransfer {
    _opaque: [u8; 0],
}

// SAFETY: the signatures are those of shim.cc.
unsafe extern "C" {
    fn tandem_mesh_new(
        rank: c_int,
        size: c_int,
        host: *const c_char,
        interface: *const c_char,
        connect_ms: u64,
        why: *mut c_char,
    ) -> *mut RawMesh;
    fn tandem_mesh_free(mesh: *mut RawMesh);
    fn tandem_mesh_address(
        mesh: *mut RawMesh,
        peer: c_int,
        out: *mut u8,
        capacity: usize,
        why: *mut c_char,
    ) -> usize;
    fn tandem_mesh_connect(
        mesh: *mut RawMesh,
        peer: c_int,
        address: *const u8,
        len: usize,
        why: *mut c_char,
    ) -> c_int;
    fn tandem_mesh_close(mesh: *mut RawMesh);
    fn tandem_transfer_new(
        mesh: *mut RawMesh,
        receiving: c_int,
        peer: c_int,
        slot: u64,
        data: *mut c_void,
        len: usize,
        why: *mut c_char,
    ) -> *mut RawTransfer;
    fn tandem_transfer_wait(
        mesh: *mut RawMesh,
        transfer: *mut RawTransfer,
        limit_ms: u64,
        why: *mut c_char,
    ) -> c_int;
    fn tandem_transfer_free(transfer: *mut RawTransfer);
}

/// Stream of transfers between two ranks. Order holds within a stream; streams are independent.
#[derive(Clone, Copy)]
pub(super) enum Slot {
    /// Fingerprints of calls.
    Call = 1,
    /// Data of collectives.
    Data = 2,
    /// Lengths of messages.
    MessageLen = 3,
    /// Messages.
    Message = 4,
}

#[derive(Debug)]
pub(super) struct Fault {
    pub(super) peer: usize,
    /// Whether time ran out; otherwise the connection broke.
    pub(super) late: bool,
}

/// Connections of this rank.
pub(super) struct FullMesh {
    raw: NonNull<RawMesh>,
    abort_flag: AbortFlag,
}

// SAFETY: Gloo's transport locks all state shared with its thread, and the shim lets one thread
// wait at a time.
unsafe impl Send for FullMesh {}
// SAFETY: as above.
unsafe impl Sync for FullMesh {}

impl FullMesh {
    /// Listens at the address `host`, or if that is empty at the network interface `interface`. The
    /// error is the reason.
    pub(super) fn listen(
        rank: usize,
        size: usize,
        host: &str,
        interface: &str,
        deadline: Duration,
        abort_flag: AbortFlag,
    ) -> Result<Self, String> {
        let text = |s: &str| CString::new(s).map_err(|_| format!("{s:?} has a zero byte"));
        let (host, interface) = (text(host)?, text(interface)?);
        let mut why = ErrorBuffer::new();
        // SAFETY: the texts are zero-terminated and live during the call; `why` has the shim's
        // size.
        let mesh = unsafe {
            tandem_mesh_new(
                rank as c_int,
                size as c_int,
                host.as_ptr(),
                interface.as_ptr(),
                milliseconds(deadline.min(CONNECT)),
                why.room(),
            )
        };
        NonNull::new(mesh).map(|raw| Self { raw, abort_flag }).ok_or_else(|| why.text())
    }

    /// Returns the address at which `peer` can reach this rank.
    pub(super) fn address(&self, peer: usize) -> Result<Vec<u8>, String> {
        let (mut bytes, mut why) = (vec![0; ADDRESS_SIZE], ErrorBuffer::new());
        // SAFETY: the buffer has the given length, the peer has a pair, and the mesh lives.
        let len = unsafe {
            tandem_mesh_address(self.raw.as_ptr(), peer as c_int, bytes.as_mut_ptr(), bytes.len(), why.room())
        };
        if len == 0 || len > ADDRESS_SIZE {
            return Err(why.text());
        }
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Connects to `peer`, which must do the same. The error is the reason.
    pub(super) fn connect(&self, peer: usize, address: &[u8]) -> Result<(), String> {
        let mut why = ErrorBuffer::new();
        // SAFETY: the address has the given length, and the mesh lives.
        let outcome = unsafe {
            tandem_mesh_connect(self.raw.as_ptr(), peer as c_int, address.as_ptr(), address.len(), why.room())
        };
        if outcome == 0 { Ok(()) } else { Err(why.text()) }
    }

    /// Closes all connections, so that waiting peers learn that this rank is gone.
    pub(super) fn close(&self) {
        // SAFETY: the mesh lives.
        unsafe { tandem_mesh_close(self.raw.as_ptr()) }
    }

    /// Starts sending.
    ///
    /// # Safety
    /// The bytes stay valid and unchanged until the transfer is dropped.
    pub(super) unsafe fn send(
        self: &Arc<Self>,
        to: usize,
        slot: Slot,
        data: *const u8,
        len: usize,
    ) -> Result<Transfer, Fault> {
        // SAFETY: the caller's guarantee; Gloo only reads the data that it sends.
        unsafe { self.begin(false, to, slot, data.cast_mut(), len) }
    }

    /// Starts receiving.
    ///
    /// # Safety
    /// The buffer stays valid and unused until the transfer is dropped.
    pub(super) unsafe fn recv(
        self: &Arc<Self>,
        from: usize,
        slot: Slot,
        data: *mut u8,
        len: usize,
    ) -> Result<Transfer, Fault> {
        // SAFETY: the caller guarantees it.
        unsafe { self.begin(true, from, slot, data, len) }
    }

    /// # Safety
    /// As [`FullMesh::send`] or [`FullMesh::recv`].
    unsafe fn begin(
        self: &Arc<Self>,
        receiving: bool,
        peer: usize,
        slot: Slot,
        data: *mut u8,
        len: usize,
    ) -> Result<Transfer, Fault> {
        let mut why = ErrorBuffer::new();
        // SAFETY: the mesh lives, `why` has the shim's size, and the caller keeps the bytes.
        let raw = unsafe {
            tandem_transfer_new(
                self.raw.as_ptr(),
                c_int::from(receiving),
                peer as c_int,
                slot as u64,
                data.cast(),
                len,
                why.room(),
            )
        };
        let raw = NonNull::new(raw).ok_or(Fault { peer, late: false })?;
        Ok(Transfer { mesh: self.clone(), raw, peer, is_done: Cell::new(false) })
    }
}

impl Drop for FullMesh {
    fn drop(&mut self) {
        // SAFETY: the shim made it, and no transfer is left: transfers keep the mesh alive.
        unsafe { tandem_mesh_free(self.raw.as_ptr()) }
    }
}

/// A transfer in flight. Dropping it aborts it; Gloo then no longer accesses its bytes.
pub(super) struct Transfer {
    mesh: Arc<FullMesh>,
    raw: NonNull<RawTransfer>,
    peer: usize,
    /// Gloo reports completion once.
    is_done: Cell<bool>,
}

// SAFETY: as for the mesh; the transfer's creator guarantees the bytes.
unsafe impl Send for Transfer {}

impl Transfer {
    /// Waits for completion, at most `limit`. A timeout closes nothing, and the wait can be
    /// repeated. If the job ends meanwhile, the connection counts as broken.
    pub(super) fn wait(&self, limit: Duration) -> Result<(), Fault> {
        let began = Instant::now();
        loop {
            let left = limit.saturating_sub(began.elapsed());
            match self.wait_once(left.min(LOOK)) {
                Err(Fault { late: true, peer }) if self.mesh.abort_flag.is_cut() => {
                    return Err(Fault { late: false, peer });
                }
                Err(Fault { late: true, .. }) if left > LOOK => {}
                other => return other,
            }
        }
    }

    fn wait_once(&self, limit: Duration) -> Result<(), Fault> {
        if self.is_done.get() {
            return Ok(());
        }
        let mut why = ErrorBuffer::new();
        // SAFETY: both live.
        let outcome = unsafe {
            tandem_transfer_wait(self.mesh.raw.as_ptr(), self.raw.as_ptr(), milliseconds(limit), why.room())
        };
        match outcome {
            0 => {
                self.is_done.set(true);
                Ok(())
            }
            outcome => Err(Fault { peer: self.peer, late: outcome == 1 }),
        }
    }

    pub(super) fn peer(&self) -> usize {
        self.peer
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // SAFETY: the shim made it, and it is freed once.
        unsafe { tandem_transfer_free(self.raw.as_ptr()) }
    }
}

/// Buffer for the shim's error messages.
struct ErrorBuffer([c_char; WHY_SIZE]);

impl ErrorBuffer {
    fn new() -> Self {
        Self([0; WHY_SIZE])
    }

    fn room(&mut self) -> *mut c_char {
        self.0.as_mut_ptr()
    }

    fn text(&self) -> String {
        // SAFETY: the shim terminates its text with a zero within the array, which is initialised
        // with zeros.
        unsafe { CStr::from_ptr(self.0.as_ptr()) }.to_string_lossy().into_owned()
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).clamp(1, 1000 * 86_400 * 365)
}
