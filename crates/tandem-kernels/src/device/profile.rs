//! Recorder of when each operation of a run began and ended.
//!
//! A profiled device ([`crate::Device::profiled`]) records every operation that it launches. Other
//! work (messages between ranks, waiting, files) is recorded by its caller. The training thread
//! announces the step ([`Profile::step`]), the phase ([`Profile::begin_phase`]) and the place
//! ([`Profile::set_place`]); each lasts until the next of its kind, so places nest in phases, phases in
//! steps, and operations in places.
//!
//! Nothing is recorded between [`Profile::end`] and [`Profile::begin`], and never more than
//! [`MOST_EVENTS`] events.

use std::fmt::{Arguments, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Instant;

use crate::device::On;
use crate::{OpCost, Result};

/// Maximum number of events kept, about 80 bytes each; later events are only counted.
pub const MOST_EVENTS: usize = 1 << 20;

/// Kind of event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EventKind {
    /// A step, counted from 1.
    Step(u64),
    /// A phase of a step.
    Phase(&'static str),
    /// A place in a phase, by its index in [`Recording::places`].
    Place(u32),
    /// An operation.
    Operation(OpCost),
    /// Host work.
    Other {
        /// Name of the work: a message between ranks, waiting for another thread, a file.
        name: &'static str,
        /// Bytes moved; 0 where there are none.
        bytes: u64,
    },
}

/// A timed event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Event {
    /// Kind of event.
    pub what: EventKind,
    /// Index of the thread in [`Recording::threads`]; 0 is the training thread.
    pub thread: u32,
    /// Start in nanoseconds from [`Profile::begin`].
    pub start: u64,
    /// End in nanoseconds from [`Profile::begin`].
    pub end: u64,
    /// Kernels, matmuls, copies and clears that an operation put into a GPU's stream.
    pub launches: u32,
}

/// Events between [`Profile::begin`] and [`Profile::end`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    /// Events in the order in which they ended.
    pub events: Vec<Event>,
    /// Names of places.
    pub places: Vec<String>,
    /// Names of threads.
    pub threads: Vec<String>,
    /// Number of events beyond [`MOST_EVENTS`].
    pub lost: u64,
}

/// Recorder, shared by devices and threads.
#[derive(Debug)]
pub struct Profile {
    is_on: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    origin: Instant,
    recording: Recording,
    ids: Vec<ThreadId>,
    /// Buffer for the name of the place.
    text: String,
    step: Option<(u64, Instant)>,
    phase: Option<(&'static str, Instant)>,
    place: Option<(u32, Instant)>,
}

impl Default for Profile {
    fn default() -> Self {
        let state = State {
            origin: Instant::now(),
            recording: Recording::default(),
            ids: Vec::new(),
            text: String::new(),
            step: None,
            phase: None,
            place: None,
        };
        Self { is_on: AtomicBool::new(false), state: Mutex::new(state) }
    }
}

impl Profile {
    /// Restarts the recording with memory for `room` events. The calling thread becomes the
    /// training thread.
    pub fn begin(&self, room: usize) {
        let mut state = self.lock();
        let now = Instant::now();
        state.open_step(None, now);
        let State { origin, recording, ids, .. } = &mut *state;
        *origin = now;
        recording.events.clear();
        recording.events.reserve(room.min(MOST_EVENTS));
        recording.lost = 0;
        (recording.threads, *ids) = (Vec::new(), Vec::new());
        state.thread();
        self.is_on.store(true, Ordering::Relaxed);
    }

    /// Returns the number of events so far.
    pub fn num_events(&self) -> usize {
        self.lock().recording.events.len()
    }

    /// Stops recording and returns the recording.
    pub fn end(&self) -> Recording {
        self.is_on.store(false, Ordering::Relaxed);
        let mut state = self.lock();
        state.open_step(None, Instant::now());
        std::mem::take(&mut state.recording)
    }

    /// Begins a step and ends the one before.
    pub fn step(&self, step: u64) {
        if self.is_on() {
            self.lock().open_step(Some(step), Instant::now());
        }
    }

    /// Begins a phase and ends the one before.
    pub fn begin_phase(&self, phase: &'static str) {
        if self.is_on() {
            self.lock().open_phase(Some(phase), Instant::now());
        }
    }

    /// Begins a place and ends the one before.
    pub fn set_place(&self, place: Arguments<'_>) {
        if self.is_on() {
            let mut state = self.lock();
            let index = state.place_of(place);
            state.open_place(Some(index), Instant::now());
        }
    }

    /// Records host work of this thread from `began` until now.
    pub fn other(&self, name: &'static str, bytes: u64, began: Instant) {
        if self.is_on() {
            self.record(EventKind::Other { name, bytes }, began, 0);
        }
    }

    /// Returns whether operations are recorded.
    pub(crate) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    fn record(&self, what: EventKind, began: Instant, launches: u32) {
        let now = Instant::now();
        let mut state = self.lock();
        let thread = state.thread();
        state.push(what, (thread, launches), began, now);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Operation that is being timed. On a GPU, whatever came before it has ended.
pub(crate) struct Timed<'a> {
    profile: &'a Profile,
    work: OpCost,
    on: On<'a>,
    launches: u64,
    began: Instant,
}

impl<'a> Timed<'a> {
    /// Waits for what the device has to do, then starts the time.
    pub(crate) fn begin(profile: &'a Profile, work: OpCost, on: On<'a>) -> Result<Self> {
        let launches = Self::launches(on)?;
        Ok(Self { profile, work, on, launches, began: Instant::now() })
    }

    /// Waits for the operation and records it.
    pub(crate) fn end(self) -> Result<()> {
        let launches = Self::launches(self.on)? - self.launches;
        self.profile.record(EventKind::Operation(self.work), self.began, launches as u32);
        Ok(())
    }

    /// Waits for a GPU; returns how many launches it has had so far.
    fn launches(on: On<'_>) -> Result<u64> {
        match on {
            On::Cpu(_) => Ok(0),
            On::Cuda(cuda) => {
                cuda.synchronize()?;
                Ok(cuda.num_launches())
            }
        }
    }
}

impl State {
    /// Returns the index of the calling thread.
    fn thread(&mut self) -> u32 {
        let current = std::thread::current();
        let known = self.ids.iter().position(|id| *id == current.id());
        let index = known.unwrap_or_else(|| {
            self.ids.push(current.id());
            self.recording.threads.push(current.name().unwrap_or("unnamed").to_owned());
            self.ids.len() - 1
        });
        index as u32
    }

    /// Returns the index of a place's name. A known name allocates nothing.
    fn place_of(&mut self, place: Arguments<'_>) -> u32 {
        let Self { text, recording: Recording { places, .. }, .. } = self;
        text.clear();
        // Writing to a string cannot fail.
        let _ = text.write_fmt(place);
        let known = places.iter().position(|known| known == text);
        let index = known.unwrap_or_else(|| {
            places.push(text.clone());
            places.len() - 1
        });
        index as u32
    }

    fn open_step(&mut self, step: Option<u64>, now: Instant) {
        self.open_phase(None, now);
        if let Some((step, began)) = std::mem::replace(&mut self.step, step.map(|step| (step, now))) {
            self.push(EventKind::Step(step), (0, 0), began, now);
        }
    }

    fn open_phase(&mut self, phase: Option<&'static str>, now: Instant) {
        self.open_place(None, now);
        if let Some((phase, began)) = std::mem::replace(&mut self.phase, phase.map(|phase| (phase, now))) {
            self.push(EventKind::Phase(phase), (0, 0), began, now);
        }
    }

    fn open_place(&mut self, place: Option<u32>, now: Instant) {
        if let Some((place, began)) = std::mem::replace(&mut self.place, place.map(|place| (place, now))) {
            self.push(EventKind::Place(place), (0, 0), began, now);
        }
    }

    fn push(&mut self, what: EventKind, (thread, launches): (u32, u32), began: Instant, ended: Instant) {
        let Self { origin, recording: Recording { events, lost, .. }, .. } = self;
        if events.len() == MOST_EVENTS {
            *lost += 1;
            return;
        }
        // An event that began before the recording is cut at its start.
        let since = |at: Instant| at.saturating_duration_since(*origin).as_nanos() as u64;
        events.push(Event { what, thread, start: since(began), end: since(ended), launches });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device, MemoryKind, ops};
    use std::sync::Arc;

    fn names(recording: &Recording) -> Vec<String> {
        let name = |event: &Event| match event.what {
            EventKind::Step(step) => format!("step {step}"),
            EventKind::Phase(name) | EventKind::Other { name, .. } => name.to_owned(),
            EventKind::Place(index) => recording.places[index as usize].clone(),
            EventKind::Operation(work) => work.op.to_owned(),
        };
        recording.events.iter().map(name).collect()
    }

    #[test]
    fn operations_lie_in_places_and_these_in_phases_of_steps() {
        let profile = Arc::new(Profile::default());
        let device = Device::cpu(1, 1 << 21).unwrap().profiled(&profile);
        let mut x = device.alloc(MemoryKind::Scratch, 3, 5, DType::F32).unwrap();
        ops::fill_zero(&device, x.view_mut()).unwrap();
        profile.begin(0);
        for step in 7..9 {
            profile.step(step);
            profile.begin_phase("forward");
            device.set_place(format_args!("block {}", 2));
            ops::scale(&device, x.view_mut(), 2.0).unwrap();
            profile.other("barrier", 3, Instant::now());
            profile.begin_phase("update");
        }
        let recording = profile.end();
        ops::scale(&device, x.view_mut(), 2.0).unwrap();
        let step = ["scale", "barrier", "block 2", "forward", "update"];
        let expected = [&step[..], &["step 7"], &step, &["step 8"]].concat();
        assert_eq!(names(&recording), expected);
        assert!(recording.threads.len() == 1 && recording.lost == 0, "{recording:?}");
        let EventKind::Operation(work) = recording.events[0].what else { panic!("{recording:?}") };
        assert_eq!((work.flops, work.bytes, work.shape), (15.0, 120.0, [3, 5, 0]));
        // An event that ends with another began no earlier.
        for pair in recording.events.windows(2) {
            assert!(pair[0].end <= pair[1].end && pair[0].start <= pair[0].end, "{pair:?}");
        }
        assert!(profile.end().events.is_empty(), "nothing was recorded after the end");
    }

    #[test]
    fn threads_are_told_apart_and_events_beyond_the_bound_are_counted() {
        let profile = Profile::default();
        profile.begin(4);
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("beside".to_owned());
            thread.spawn_scoped(scope, || profile.other("y", 1, Instant::now())).unwrap();
        });
        for _ in 0..MOST_EVENTS + 9 {
            profile.other("x", 0, Instant::now());
        }
        let recording = profile.end();
        assert_eq!(recording.events.len(), MOST_EVENTS);
        assert_eq!(recording.lost, 10);
        assert_eq!(recording.threads[1], "beside");
        assert_eq!((recording.events[0].thread, recording.events[1].thread), (1, 0));
    }
}
