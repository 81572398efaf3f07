//! Connections of one rank to each of its peers, and transfers on them: the safe face of the shim in `shim.cc`.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::health::abort_flag::Lifeline;

/// How long a wait goes on before it looks whether the job is over.
const LOOK: Duration = Duration::from_millis(250);
/// How long a peer that has said where it listens may take to connect. Nothing can end that wait but its time.
const CONNECT: Duration = Duration::from_secs(60);
/// The shim's WHY_SIZE.
const WHY_SIZE: usize = 512;
/// Room for the bytes of an address; Gloo's are a `sockaddr_storage` and little more.
const ADDRESS_SIZE: usize = 512;

#[repr(C)]
struct RawMesh {
    _opaque: [u8; 0],
}

#[repr(C)]
struct RawTransfer {
    _opaque: [u8; 0],
}

// SAFETY: the signatures are those of the definitions in shim.cc.
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

/// Which stream of transfers between two ranks: within one they keep their order, and streams do not mix.
#[derive(Clone, Copy)]
pub(super) enum Slot {
    /// Fingerprints of calls.
    Call = 1,
    /// The bytes of collectives.
    Data = 2,
    /// Lengths of messages.
    MessageLen = 3,
    /// Messages.
    Message = 4,
}

/// A transfer failed.
#[derive(Debug)]
pub(super) struct Fault {
    /// With whom.
    pub(super) peer: usize,
    /// Whether time ran out; otherwise the connection broke.
    pub(super) late: bool,
}

/// This rank's connections.
pub(super) struct Mesh {
    raw: NonNull<RawMesh>,
    lifeline: Lifeline,
}

// SAFETY: Gloo's transport locks what it shares with its own thread, and the shim lets one thread wait at a time.
unsafe impl Send for Mesh {}
// SAFETY: as above.
unsafe impl Sync for Mesh {}

impl Mesh {
    /// A mesh that listens, at the address `host` or, if that is empty, at the network interface `interface`. Why not, if
    /// there is no such thing.
    pub(super) fn listen(
        rank: usize,
        size: usize,
        host: &str,
        interface: &str,
        deadline: Duration,
        lifeline: Lifeline,
    ) -> Result<Self, String> {
        let text = |s: &str| CString::new(s).map_err(|_| format!("{s:?} has a zero byte"));
        let (host, interface) = (text(host)?, text(interface)?);
        let mut why = Why::new();
        // SAFETY: the texts end in zero and live until the call is over; `why` has the shim's size.
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
        NonNull::new(mesh).map(|raw| Self { raw, lifeline }).ok_or_else(|| why.text())
    }

    /// Where `peer` can reach this rank.
    pub(super) fn address(&self, peer: usize) -> Result<Vec<u8>, String> {
        let (mut bytes, mut why) = (vec![0; ADDRESS_SIZE], Why::new());
        // SAFETY: the buffer is as long as is said, the peer has a pair, and the mesh lives.
        let len = unsafe {
            tandem_mesh_address(self.raw.as_ptr(), peer as c_int, bytes.as_mut_ptr(), bytes.len(), why.room())
        };
        if len == 0 || len > ADDRESS_SIZE {
            return Err(why.text());
        }
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Connects to `peer`, which must do the same. Why not, if that fails.
    pub(super) fn connect(&self, peer: usize, address: &[u8]) -> Result<(), String> {
        let mut why = Why::new();
        // SAFETY: the address is as long as is said, and the mesh lives.
        let outcome = unsafe {
            tandem_mesh_connect(self.raw.as_ptr(), peer as c_int, address.as_ptr(), address.len(), why.room())
        };
        if outcome == 0 { Ok(()) } else { Err(why.text()) }
    }

    /// Closes all connections, so that peers that wait for this rank learn that it will not come.
    pub(super) fn close(&self) {
        // SAFETY: the mesh lives.
        unsafe { tandem_mesh_close(self.raw.as_ptr()) }
    }

    /// Begins to send.
    ///
    /// # Safety
    /// The bytes are there, and nobody writes to them, until the transfer is dropped.
    pub(super) unsafe fn send(
        self: &Arc<Self>,
        to: usize,
        slot: Slot,
        data: *const u8,
        len: usize,
    ) -> Result<Transfer, Fault> {
        // SAFETY: the caller's promise; Gloo only reads what it sends.
        unsafe { self.begin(false, to, slot, data.cast_mut(), len) }
    }

    /// Begins to receive.
    ///
    /// # Safety
    /// The room is there, and nobody else reads or writes it, until the transfer is dropped.
    pub(super) unsafe fn recv(
        self: &Arc<Self>,
        from: usize,
        slot: Slot,
        data: *mut u8,
        len: usize,
    ) -> Result<Transfer, Fault> {
        // SAFETY: the caller's promise.
        unsafe { self.begin(true, from, slot, data, len) }
    }

    /// # Safety
    /// As [`Mesh::send`] or [`Mesh::recv`].
    unsafe fn begin(
        self: &Arc<Self>,
        receiving: bool,
        peer: usize,
        slot: Slot,
        data: *mut u8,
        len: usize,
    ) -> Result<Transfer, Fault> {
        let mut why = Why::new();
        // SAFETY: the mesh lives, `why` has the shim's size, and the caller promises that the bytes stay.
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

impl Drop for Mesh {
    fn drop(&mut self) {
        // SAFETY: it was made by the shim, and no transfer is left: they keep the mesh alive.
        unsafe { tandem_mesh_free(self.raw.as_ptr()) }
    }
}

/// A transfer under way. Dropping it ends it, done or not; then Gloo no longer touches its bytes.
pub(super) struct Transfer {
    mesh: Arc<Mesh>,
    raw: NonNull<RawTransfer>,
    peer: usize,
    /// Gloo tells it once.
    is_done: Cell<bool>,
}

// SAFETY: as for the mesh; the bytes are the business of whoever began the transfer.
unsafe impl Send for Transfer {}

impl Transfer {
    /// Waits until it is done, at most `limit`. If it is not, nothing is closed, and it can be waited for again. When the job
    /// is over meanwhile, that is as if the connection had broken.
    pub(super) fn wait(&self, limit: Duration) -> Result<(), Fault> {
        let began = Instant::now();
        loop {
            let left = limit.saturating_sub(began.elapsed());
            match self.wait_once(left.min(LOOK)) {
                Err(Fault { late: true, peer }) if self.mesh.lifeline.is_cut() => {
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
        let mut why = Why::new();
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
        // SAFETY: it was made by the shim and is freed once.
        unsafe { tandem_transfer_free(self.raw.as_ptr()) }
    }
}

/// Room for the shim's explanations.
struct Why([c_char; WHY_SIZE]);

impl Why {
    fn new() -> Self {
        Self([0; WHY_SIZE])
    }

    fn room(&mut self) -> *mut c_char {
        self.0.as_mut_ptr()
    }

    fn text(&self) -> String {
        // SAFETY: the shim ends what it writes in zero within the array, which began as zeros.
        unsafe { CStr::from_ptr(self.0.as_ptr()) }.to_string_lossy().into_owned()
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).clamp(1, 1000 * 86_400 * 365)
}
