//! Fake of NCCL.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use super::communicator::{Posted, Rank, Shared, State, What};
use super::cuda::offset;
use super::{CURRENT, TROUBLE, Trouble, lock, write_down};
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
        async_error,
        all_reduce,
        reduce_scatter,
        all_gather,
        reduce,
        broadcast,
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
    write_down(format!("init {rank} of {size}"));
    // SAFETY: NCCL reads these bytes: a configuration is at least as long as that of 2.18.
    let config = unsafe { std::slice::from_raw_parts(config.cast::<u32>(), 12) };
    let fields = (config[0], config[1], config[2], config[4] as i32);
    if fields != (48, 0, 0xcafe_beef, 0) || config[3] != 21800 || config[5..8] != [1 << 31; 3] {
        return INVALID_ARGUMENT;
    }
    if CURRENT.get() == 0 || id.0[..120] != [0x5a; 120] {
        return INVALID_USAGE;
    }
    if TROUBLE.get() == Trouble::NoCommunicator {
        return SYSTEM_ERROR;
    }
    let id = u64::from_le_bytes(id.0[120..].try_into().unwrap());
    let new = || {
        let posted = vec![Vec::new(); size];
        Arc::new(Shared { size, state: Mutex::new(State { posted, ..State::default() }) })
    };
    let shared = communicators().entry(id).or_insert_with(new).clone();
    {
        let mut state = lock(&shared.state);
        if state.devices.values().any(|&device| device == CURRENT.get()) {
            state.error = INVALID_USAGE;
        }
        state.devices.insert(rank, CURRENT.get());
    }
    let rank = Rank { shared, rank, launching: Vec::new(), busy: ASKED, is_finalized: false };
    // SAFETY: as in NCCL.
    unsafe { *place = Box::into_raw(Box::new(rank)).cast() };
    IN_PROGRESS
}

/// # Safety
/// The communicator lives and is not used elsewhere.
unsafe fn rank<'a>(communicator: RawCommunicator) -> &'a mut Rank {
    // SAFETY: the caller guarantees it.
    unsafe { &mut *communicator.cast::<Rank>() }
}

unsafe extern "C" fn async_error(communicator: RawCommunicator, answer: *mut c_int) -> c_int {
    // SAFETY: as in NCCL.
    let (this, answer) = unsafe { (rank(communicator), &mut *answer) };
    let mut state = lock(&this.shared.state);
    let is_met = state.devices.len() == this.shared.size;
    let is_ended = !this.is_finalized || state.num_finalized == this.shared.size;
    *answer = if state.error != OK {
        state.error
    } else if TROUBLE.get() == Trouble::RemoteError && !this.launching.is_empty() {
        REMOTE_ERROR
    } else if this.busy > 0 || !is_met || !is_ended {
        this.busy = this.busy.saturating_sub(1);
        IN_PROGRESS
    } else {
        for posted in std::mem::take(&mut this.launching) {
            let number = state.posted[this.rank].len();
            if TROUBLE.get() != Trouble::Hangs {
                state.posted[this.rank].push(posted);
            }
            // SAFETY: the stream is this rank's and lives as long as it has operations.
            unsafe { (*posted.stream).waits_for.push((this.shared.clone(), number)) };
        }
        state.carry_out();
        OK
    };
    OK
}

fn post(
    what: What,
    (from, to): (*const c_void, *mut c_void),
    raw: RawCommunicator,
    stream: RawStream,
) -> c_int {
    let What { name, reduction, root, data_type, count } = what;
    let (Some(from_offset), Some(to_offset)) = (offset(from as u64), offset(to as u64)) else {
        return INVALID_ARGUMENT;
    };
    let reduction = reduction.map(|reduction| format!(" op {reduction}")).unwrap_or_default();
    write_down(format!(
        "{name} of {count} type {data_type}{reduction} root {root} from {from_offset} to {to_offset}"
    ));
    let posted = Posted { what, from: from.cast(), to: to.cast(), stream: stream.cast() };
    let in_group =
        GROUP.with_borrow_mut(|group| group.as_mut().map(|group| group.push((raw, posted))).is_some());
    if in_group { OK } else { launch(raw, vec![posted]) }
}

fn launch(raw: RawCommunicator, posted: Vec<Posted>) -> c_int {
    // SAFETY: as in NCCL.
    let this = unsafe { rank(raw) };
    if this.busy > 0 || !this.launching.is_empty() || this.is_finalized || CURRENT.get() == 0 {
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
            post(What { name, reduction, root, data_type, count }, (from, to), raw, stream)
        }
    };
}

collective!(all_reduce(reduction), Some(reduction), 0);
collective!(reduce_scatter(reduction), Some(reduction), 0);
collective!(all_gather(), None, 0);
collective!(reduce(reduction, root), Some(reduction), root);
collective!(broadcast(root), None, root);

unsafe extern "C" fn group_start() -> c_int {
    write_down("group".to_owned());
    GROUP.with_borrow_mut(|group| if group.replace(Vec::new()).is_some() { INVALID_USAGE } else { OK })
}

unsafe extern "C" fn group_end() -> c_int {
    write_down("end".to_owned());
    let Some(group) = GROUP.take() else { return INVALID_USAGE };
    let Some(raw) = group.first().map(|first| first.0) else { return OK };
    launch(raw, group.into_iter().map(|(_, posted)| posted).collect())
}

unsafe extern "C" fn finalize(raw: RawCommunicator) -> c_int {
    write_down("finalize".to_owned());
    // SAFETY: as in NCCL.
    let this = unsafe { rank(raw) };
    if this.is_finalized || !this.launching.is_empty() {
        return INVALID_ARGUMENT;
    }
    this.is_finalized = true;
    lock(&this.shared.state).num_finalized += 1;
    IN_PROGRESS
}

unsafe extern "C" fn destroy(raw: RawCommunicator) -> c_int {
    write_down("destroy".to_owned());
    // SAFETY: as in NCCL; it came from a box.
    let this = unsafe { Box::from_raw(raw.cast::<Rank>()) };
    if this.is_finalized { OK } else { INVALID_USAGE }
}

unsafe extern "C" fn abort(raw: RawCommunicator) -> c_int {
    write_down("abort".to_owned());
    // SAFETY: as in NCCL; it came from a box.
    drop(unsafe { Box::from_raw(raw.cast::<Rank>()) });
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
