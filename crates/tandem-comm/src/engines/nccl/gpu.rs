//! A rank's GPU as NCCL's engine uses it: its context, and events in streams.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::libraries::Functions;
use super::raw::{CUDA_EVENT_DISABLE_TIMING, CUDA_NOT_READY, RawContext, RawEvent, RawStream};
use crate::collective::call::Call;

/// A GPU of this process.
#[derive(Clone)]
pub(super) struct Gpu {
    pub(super) functions: Arc<Functions>,
    pub(super) ordinal: usize,
    context: RawContext,
}

// SAFETY: any thread may use a context; `enter` makes it the thread's own.
unsafe impl Send for Gpu {}

impl Gpu {
    /// Opens the GPU `ordinal` of this process and makes it the thread's current device.
    pub(super) fn open(functions: &Arc<Functions>, ordinal: usize) -> Result<Self, String> {
        let (cuda, gpu) = (&functions.cuda, format!("of GPU {ordinal}"));
        let (mut device, mut context): (c_int, RawContext) = (0, std::ptr::null_mut());
        // SAFETY: the driver writes its results to valid addresses, and the device is one of its
        // results. The context is the process's primary one, which NCCL shares and which stays
        // until the process ends.
        unsafe {
            functions.cuda(&format!("the choice {gpu}"), (cuda.device)(&raw mut device, ordinal as c_int))?;
            let outcome = (cuda.retain_context)(&raw mut context, device);
            functions.cuda(&format!("the context {gpu}"), outcome)?;
        }
        let this = Self { functions: functions.clone(), ordinal, context };
        this.enter()?;
        Ok(this)
    }

    /// Makes the GPU the thread's current device.
    pub(super) fn enter(&self) -> Result<(), String> {
        // SAFETY: the context stays until the process ends.
        let outcome = unsafe { (self.functions.cuda.set_context)(self.context) };
        self.functions.cuda("the use of a GPU", outcome)
    }
}

/// Operations that were put into streams and are not known to be done, the oldest first.
pub(super) struct InFlight {
    gpu: Gpu,
    operations: VecDeque<Operation>,
    /// Events for later operations.
    spare: Vec<RawEvent>,
}

/// An operation between two events of its stream.
struct Operation {
    call: Call,
    before: RawEvent,
    after: RawEvent,
    /// Since when the stream is known to have come to it.
    since: Option<Instant>,
}

// SAFETY: any thread may use events.
unsafe impl Send for InFlight {}

impl InFlight {
    pub(super) fn new(gpu: &Gpu) -> Self {
        Self { gpu: gpu.clone(), operations: VecDeque::new(), spare: Vec::new() }
    }

    /// Records an event behind the work that is in the stream.
    pub(super) fn mark(&mut self, stream: RawStream) -> Result<RawEvent, String> {
        let cuda = &self.gpu.functions.cuda;
        let event = match self.spare.pop() {
            Some(event) => event,
            None => {
                let mut event = std::ptr::null_mut();
                // SAFETY: the driver writes the event to a valid address.
                let outcome = unsafe { (cuda.new_event)(&raw mut event, CUDA_EVENT_DISABLE_TIMING) };
                self.gpu.functions.cuda("making an event", outcome)?;
                event
            }
        };
        // SAFETY: the event was made above; the caller's stream lives.
        let outcome = unsafe { (cuda.record_event)(event, stream) };
        self.gpu.functions.cuda("recording an event", outcome)?;
        Ok(event)
    }

    /// Adds an operation between two marks of its stream.
    pub(super) fn push(&mut self, call: Call, before: RawEvent, after: RawEvent) {
        self.operations.push_back(Operation { call, before, after, since: None });
    }

    /// Forgets what is done. Returns the oldest other operation, and for how long its stream is known to
    /// have been in it. Operations of a communicator end in their order.
    pub(super) fn oldest(&mut self) -> Result<Option<(Call, Duration)>, String> {
        while let Some(Operation { before, after, .. }) = self.operations.front() {
            let (before, after) = (*before, *after);
            if !self.is_past(after)? {
                break;
            }
            self.operations.pop_front();
            self.spare.extend([before, after]);
        }
        let Some(Operation { call, before, since, .. }) = self.operations.front() else { return Ok(None) };
        let (call, before, mut since) = (*call, *before, *since);
        if since.is_none() && self.is_past(before)? {
            since = Some(Instant::now());
            self.operations[0].since = since;
        }
        Ok(Some((call, since.map_or(Duration::ZERO, |since| since.elapsed()))))
    }

    /// Forgets everything: the operations were aborted.
    pub(super) fn clear(&mut self) {
        let all = std::mem::take(&mut self.operations);
        self.spare.extend(all.into_iter().flat_map(|operation| [operation.before, operation.after]));
    }

    fn is_past(&self, event: RawEvent) -> Result<bool, String> {
        // SAFETY: the event lives.
        match unsafe { (self.gpu.functions.cuda.query_event)(event) } {
            CUDA_NOT_READY => Ok(false),
            outcome => self.gpu.functions.cuda("work on a GPU", outcome).map(|()| true),
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.clear();
        for event in &self.spare {
            // SAFETY: the event is not used afterwards. The driver keeps it as long as a stream needs
            // it; an error could not be reported.
            unsafe { (self.gpu.functions.cuda.destroy_event)(*event) };
        }
    }
}
