//! Fake of NCCL.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use super::communicator::{OfRank, Posted, Shared, What};
use super::cuda::{offset, stream_at};
use super::{CURRENT, Trouble, lock, own};
use crate::engines::nccl::raw::{Config, NcclFunctions, RawCommunicator, RawStream, UniqueId};

/// Number of polls before a communicator is ready.
const ASKED: u32 = 2;

// ncclResult_t.
const OK: c_int = 0;
const SYSTEM_ERROR: c_int = 2;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;

thread_local! {
    /// Operations since the group's start, if one is open.
    static GROUP: RefCell<Option<Vec<(RawCommunicator, Posted)>>> = const { RefCell::new(None) };
}

pub(super) fn functions() -> NcclFunctions {
    NcclFunctions {
        get_version,
        get_unique_id,
        init_rank,
        split,
        async_error,
        all_reduce,
        reduce_scatter,
        all_gather,
        reduce,
        broadcast,
        send,
        recv,
        group_start,
        group_end,
        finalize,
        destroy,
        abort,
        error_string,
        last_error,
    }
}

fn communicators() -> MutexGuard<'static, HashMap<u64, Arc<Shared>>> {
    static ALL: LazyLock<Mutex<HashMap<u64, Arc<Shared>>>> = LazyLock::new(Mutex::default);
    lock(&ALL)
}

unsafe extern "C" fn get_version(version: *mut c_int) -> c_int {
    // SAFETY: as in NCCL.
    unsafe { *version = 23203 };
    OK
}

unsafe extern "C" fn get_unique_id(id: *mut UniqueId) -> c_int {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut bytes = [0x5a; 128];
    // At the end, because all 128 bytes must travel.
    bytes[120..].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    // SAFETY: as in NCCL.
    unsafe { *id = UniqueId(bytes) };
    OK
}

unsafe extern "C" fn init_rank(
    place: *mut RawCommunicator,
    size: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut Config,
) -> c_int {
    let (size, rank) = (size as usize, rank as usize);
    own().write_down(format!("init {rank} of {size}"));
    // SAFETY: NCCL reads these bytes.
    if !unsafe { is_non_blocking(config) } {
        return INVALID_ARGUMENT;
    }
    if CURRENT.get() == 0 || id.0[..120] != [0x5a; 120] {
        return INVALID_USAGE;
    }
    if own().trouble() == Trouble::NoCommunicator {
        return SYSTEM_ERROR;
    }
    let id = u64::from_le_bytes(id.0[120..].try_into().unwrap());
    let shared = communicators().entry(id).or_insert_with(|| Shared::new(size)).clone();
    {
        let mut state = lock(&shared.state);
        if state.devices.values().any(|&device| device == CURRENT.get()) {
            state.error = INVALID_USAGE;
        }
        state.devices.insert(rank, CURRENT.get());
    }
    // SAFETY: as in NCCL.
    unsafe { *place = Box::into_raw(Box::new(OfRank::new(own(), shared, rank, ASKED))).cast() };
    IN_PROGRESS
}

/// # Safety
/// A configuration is at least as long as that of 2.18.
unsafe fn is_non_blocking(config: *mut Config) -> bool {
    // SAFETY: the caller guarantees it.
    let config = unsafe { std::slice::from_raw_parts(config.cast::<u32>(), 12) };
    let fields = (config[0], config[1], config[2], config[4] as i32);
    fields == (48, 0, 0xcafe_beef, 0) && config[3] == 21800 && config[5..8] == [1 << 31; 3]
}

unsafe extern "C" fn split(
    raw: RawCommunicator,
    color: c_int,
    key: c_int,
    place: *mut RawCommunicator,
    config: *mut Config,
) -> c_int {
    // SAFETY: as in NCCL.
    let (this, is_non_blocking) = unsafe { (rank(raw), is_non_blocking(config)) };
    this.own.write_down(format!("split {color}"));
    // With operations in streams NCCL may hang.
    if !is_non_blocking || this.is_busy() || this.is_in_flight() || CURRENT.get() == 0 {
        return INVALID_ARGUMENT;
    }
    if this.own.trouble() == Trouble::NoCommunicator {
        return SYSTEM_ERROR;
    }
    // SAFETY: as in NCCL.
    unsafe { *place = std::ptr::null_mut() };
    (this.dividing, this.busy) = (Some(place as usize), ASKED);
    lock(&this.shared.state).colors.insert(this.rank, (color, key));
    IN_PROGRESS
}

impl OfRank {
    fn is_busy(&self) -> bool {
        self.busy > 0 || !self.launching.is_empty() || self.dividing.is_some() || self.is_finalized
    }

    /// Gives this rank its part of a division, if all ranks divide the communicator.
    fn divide(&mut self) {
        let mut state = lock(&self.shared.state);
        if state.colors.len() < self.shared.size {
            return;
        }
        let Some(place) = self.dividing.take() else { return };
        let (color, key) = state.colors[&self.rank];
        let mut members: Vec<_> = state.colors.iter().filter(|(_, own)| own.0 == color).collect();
        members.sort_by_key(|(rank, own)| (own.1, **rank));
        let rank = members.iter().position(|(rank, _)| **rank == self.rank).expect("it is one of them");
        let size = members.len();
        let shared = state.parts.entry(color).or_insert_with(|| Shared::new(size)).clone();
        lock(&shared.state).devices.extend((0..size).map(|rank| (rank, rank)));
        assert_eq!(key as usize, self.rank, "the order of ranks stays");
        state.num_taken += 1;
        if state.num_taken == self.shared.size {
            state.num_taken = 0;
            state.colors.clear();
            state.parts.clear();
        }
        let part = OfRank::new(self.own.clone(), shared, rank, 0);
        // SAFETY: as in NCCL: the place stays until the communicator is ready.
        unsafe { *(place as *mut RawCommunicator) = Box::into_raw(Box::new(part)).cast() };
    }
}

/// # Safety
/// The communicator lives and is not used elsewhere.
unsafe fn rank<'a>(communicator: RawCommunicator) -> &'a mut OfRank {
    // SAFETY: the caller guarantees it.
    unsafe { &mut *communicator.cast::<OfRank>() }
}

unsafe extern "C" fn async_error(communicator: RawCommunicator, answer: *mut c_int) -> c_int {
    // SAFETY: as in NCCL.
    let (this, answer) = unsafe { (rank(communicator), &mut *answer) };
    this.divide();
    let trouble = this.own.trouble();
    let sees_error = trouble == Trouble::RemoteError && (!this.launching.is_empty() || this.is_in_flight());
    let state = lock(&this.shared.state);
    let is_met = state.devices.len() == this.shared.size;
    let is_ended = !this.is_finalized || state.num_finalized == this.shared.size;
    *answer = if state.error != OK {
        state.error
    } else if sees_error {
        REMOTE_ERROR
    } else if this.busy > 0 || !is_met || !is_ended || this.dividing.is_some() {
        this.busy = this.busy.saturating_sub(1);
        IN_PROGRESS
    } else {
        drop(state);
        this.post(trouble == Trouble::Hangs);
        OK
    };
    OK
}

fn post(what: What, (from, to): (usize, usize), raw: RawCommunicator, stream: RawStream) -> c_int {
    let What { name, reduction, root, data_type, count } = what;
    let (Some(from_offset), Some(to_offset)) = (offset(from as u64), offset(to as u64)) else {
        return INVALID_ARGUMENT;
    };
    let Some(stream) = stream_at(stream) else { return INVALID_ARGUMENT };
    let reduction = reduction.map(|reduction| format!(" op {reduction}")).unwrap_or_default();
    // SAFETY: as in NCCL.
    unsafe { rank(raw) }.own.write_down(format!(
        "{name} of {count} type {data_type}{reduction} root {root} from {from_offset} to {to_offset}"
    ));
    let posted = Posted { what, from, to, stream };
    let in_group = GROUP
        .with_borrow_mut(|group| group.as_mut().map(|group| group.push((raw, posted.clone()))).is_some());
    if in_group { OK } else { launch(raw, vec![posted]) }
}

fn launch(raw: RawCommunicator, posted: Vec<Posted>) -> c_int {
    // SAFETY: as in NCCL.
    let this = unsafe { rank(raw) };
    if this.is_busy() || CURRENT.get() == 0 {
        return INVALID_ARGUMENT;
    }
    (this.launching, this.busy) = (posted, ASKED);
    IN_PROGRESS
}

/// Defines a collective of NCCL's with its own arguments between the data type and the communicator.
macro_rules! collective {
    ($name:ident($($argument:ident),*), $reduction:expr, $root:expr) => {
        unsafe extern "C" fn $name(
            from: *const c_void,
            to: *mut c_void,
            count: usize,
            data_type: c_int,
            $($argument: c_int,)*
            raw: RawCommunicator,
            stream: RawStream,
        ) -> c_int {
            let (name, reduction, root) = (stringify!($name), $reduction, $root);
            post(What { name, reduction, root, data_type, count }, (from as usize, to as usize), raw, stream)
        }
    };
}

collective!(all_reduce(reduction), Some(reduction), 0);
collective!(reduce_scatter(reduction), Some(reduction), 0);
collective!(all_gather(), None, 0);
collective!(reduce(reduction, root), Some(reduction), root);
collective!(broadcast(root), None, root);

/// Defines a message of NCCL's, which has one address.
macro_rules! message {
    ($name:ident, $address:ty) => {
        unsafe extern "C" fn $name(
            at: $address,
            count: usize,
            data_type: c_int,
            root: c_int,
            raw: RawCommunicator,
            stream: RawStream,
        ) -> c_int {
            let what = What { name: stringify!($name), reduction: None, root, data_type, count };
            post(what, (at as usize, at as usize), raw, stream)
        }
    };
}

message!(send, *const c_void);
message!(recv, *mut c_void);

unsafe extern "C" fn group_start() -> c_int {
    own().write_down("group".to_owned());
    GROUP.with_borrow_mut(|group| if group.replace(Vec::new()).is_some() { INVALID_USAGE } else { OK })
}

unsafe extern "C" fn group_end() -> c_int {
    own().write_down("end".to_owned());
    let Some(group) = GROUP.take() else { return INVALID_USAGE };
    let Some(raw) = group.first().map(|first| first.0) else { return OK };
    launch(raw, group.into_iter().map(|(_, posted)| posted).collect())
}

unsafe extern "C" fn finalize(raw: RawCommunicator) -> c_int {
    // SAFETY: as in NCCL.
    let this = unsafe { rank(raw) };
    this.own.write_down("finalize".to_owned());
    if this.is_busy() {
        return INVALID_ARGUMENT;
    }
    this.is_finalized = true;
    lock(&this.shared.state).num_finalized += 1;
    IN_PROGRESS
}

unsafe extern "C" fn destroy(raw: RawCommunicator) -> c_int {
    // SAFETY: as in NCCL; it came from a box.
    let this = unsafe { Box::from_raw(raw.cast::<OfRank>()) };
    this.own.write_down("destroy".to_owned());
    if this.is_finalized { OK } else { INVALID_USAGE }
}

unsafe extern "C" fn abort(raw: RawCommunicator) -> c_int {
    // SAFETY: as in NCCL; it came from a box.
    let this = unsafe { Box::from_raw(raw.cast::<OfRank>()) };
    this.own.write_down("abort".to_owned());
    // What runs on the device quits first.
    this.shared.abort(this.rank);
    if this.own.trouble() == Trouble::AbortHangs {
        loop {
            std::thread::park();
        }
    }
    OK
}

unsafe extern "C" fn error_string(code: c_int) -> *const c_char {
    match code {
        REMOTE_ERROR => c"remote process exited or there was a network error".as_ptr(),
        SYSTEM_ERROR => c"unhandled system error".as_ptr(),
        _ => c"an error".as_ptr(),
    }
}

unsafe extern "C" fn last_error(_: RawCommunicator) -> *const c_char {
    c"the stand-in's words".as_ptr()
}
