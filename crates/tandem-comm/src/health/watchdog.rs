//! Failure detector: each rank monitors its neighbour's heartbeat, and all ranks report the same
//! root cause.
//!
//! A thread of each rank writes a heartbeat into the store every second and reads the next rank's.
//! Each rank has one monitor, and the store serves a few requests per rank and second.
//!
//! *Stopped or cut off.* A rank fails if its beat does not change during its monitor's limit: the
//! deadline of the job's collectives, but at most a minute, because a beat never waits for work.
//! The monitor counts its own beats instead of time, so a machine that was suspended with all its
//! ranks accuses none.
//!
//! *Slow or hanging.* A rank that beats but misses a collective fails at the deadline. Its beat
//! then says where it stands, and for how long.
//!
//! *Report.* The first verdict is filed in the store. Every rank finds it at its next beat or when
//! its connections break, stops waiting, and adds the last heartbeat of the failed rank.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::error::CommError;
use crate::health::heartbeat::{self, Heartbeat};
use crate::health::progress::Progress;
use crate::health::{abort_flag::AbortFlag, failure};
use crate::store::{Store, StoreError};

/// Interval of heartbeats.
const PAUSE: Duration = Duration::from_secs(1);
/// Maximum limit of silence.
const LIMIT: Duration = Duration::from_secs(60);
/// Time for a failed rank's message to follow the closing of its connections.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Time that the store's rank waits at its end for other ranks to read the store.
const FAREWELL: Duration = Duration::from_secs(2);
/// Timeout of requests that need no waiting.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum number of ranks in a report.
const MAX_TOLD: usize = 8;

/// Watchdog of one rank, from joining the group to the end.
pub struct Watchdog {
    store: Store,
    shared: Arc<Shared>,
    /// Whether the store ends with this process.
    serves: bool,
    /// Number of ranks that will not write a last beat.
    num_lost: usize,
}

/// State of the heartbeat's and the working thread.
struct Shared {
    rank: usize,
    size: usize,
    host: String,
    progress: Progress,
    abort_flag: AbortFlag,
    pause: Duration,
    limit: Duration,
    /// Last seen progress, and its time.
    seen: Mutex<(u64, Instant)>,
    is_over: Mutex<bool>,
    ended: Condvar,
}

impl Watchdog {
    /// Starts heartbeat and monitoring as rank `rank` of `size`; all ranks must do so. `store` has
    /// the prefix of the job's group and a connection of its own. Ranks that are silent for
    /// `deadline`, at most a minute, fail.
    ///
    /// # Panics
    /// If the system refuses a thread.
    pub fn begin(
        store: Store,
        (rank, size): (usize, usize),
        deadline: Duration,
        progress: Progress,
        abort_flag: AbortFlag,
        serves: bool,
    ) -> Result<Self, StoreError> {
        let limit = deadline.min(LIMIT);
        let shared = Arc::new(Shared {
            rank,
            size,
            host: heartbeat::host(),
            seen: Mutex::new((progress.reports(), Instant::now())),
            progress,
            abort_flag,
            pause: PAUSE.min(limit / 4),
            limit,
            is_over: Mutex::new(false),
            ended: Condvar::new(),
        });
        // A rank that dies at once has said where it is.
        store.set(&beat_key(rank), &shared.beat(false).encode())?;
        let beating = HeartbeatThread {
            store: store.reconnect()?,
            shared: shared.clone(),
            next: (rank + 1) % size,
            last_seen: Vec::new(),
            silent_beats: 0,
            lost_since: None,
        };
        std::thread::Builder::new()
            .name("heartbeat".to_owned())
            .spawn(move || beating.run())
            .expect("a thread for the heartbeat");
        Ok(Self { store, shared, serves, num_lost: 0 })
    }

    /// Returns this rank and its place in its work.
    pub fn own_place(&self) -> String {
        format!("rank {} {}", self.shared.rank, self.shared.beat(false).own())
    }

    /// Files this rank's own failure, unless another is filed.
    pub fn last_words(&self, words: &str) {
        let Shared { rank, abort_flag, .. } = &*self.shared;
        if abort_flag.store_is_lost() {
            return;
        }
        // Ranks that cannot be told see closed connections.
        let _ = self.store.set(&words_key(*rank), words.as_bytes());
        failure::report(&self.store, *rank, CommError::Aborted { rank: *rank, reason: words.to_owned() });
    }

    /// Returns the error that all ranks agree on, given this rank's `error`, and the report: this
    /// rank's place and the last heartbeats of the ranks in question. Without a store both are this
    /// rank's own.
    pub fn story(&mut self, error: &CommError) -> (CommError, String) {
        let mut verdict = self.shared.abort_flag.verdict().unwrap_or_else(|| error.clone());
        let asks = !self.shared.abort_flag.store_is_lost();
        if asks {
            verdict = failure::report(&self.store, self.shared.rank, verdict);
            verdict = self.in_its_own_words(verdict);
        }
        let who = ranks_of(&verdict);
        self.num_lost = who.iter().filter(|&&rank| rank != self.shared.rank).count();
        let known = |rank: &usize| match asks.then(|| self.beat_of(*rank)).flatten() {
            Some(beat) => format!("rank {rank} {}", beat.known(SystemTime::now())),
            None => format!("rank {rank}"),
        };
        let mut told: Vec<_> = who.iter().take(MAX_TOLD).map(known).collect();
        if who.len() > MAX_TOLD {
            told.push(format!("{} others", who.len() - MAX_TOLD));
        }
        let own = self.own_place();
        let story = match told.len() {
            0 => format!("{own}, has lost its peers"),
            _ if who == [self.shared.rank] => format!("{own}, was reported lost by the others"),
            _ => format!("peer lost: {}. This is {own}", told.join("; ")),
        };
        (verdict, story)
    }

    /// Waits for the message of a rank whose connections closed.
    fn in_its_own_words(&self, verdict: CommError) -> CommError {
        let CommError::PeerLost { rank } = verdict else { return verdict };
        match self.store.get(&words_key(rank), LAST_WORDS) {
            Ok(words) => CommError::Aborted { rank, reason: String::from_utf8_lossy(&words).into_owned() },
            Err(_) => verdict,
        }
    }

    fn beat_of(&self, rank: usize) -> Option<Heartbeat> {
        read_beat(&self.store, rank).ok().flatten().and_then(|record| Heartbeat::decode(&record))
    }
}

impl Drop for Watchdog {
    /// Writes the last beat, after which the monitor turns to the next rank.
    fn drop(&mut self) {
        let Shared { rank, size, abort_flag, .. } = &*self.shared;
        if std::thread::panicking() {
            self.last_words("it panicked; its own output says where");
        }
        *self.shared.lock_is_over() = true;
        self.shared.ended.notify_all();
        if abort_flag.store_is_lost() {
            return;
        }
        // A store that does not answer no longer matters.
        let _ = self.store.set(&beat_key(*rank), &self.shared.beat(true).encode());
        let _ = self.store.add("ended", 1);
        let until = Instant::now() + FAREWELL;
        while self.serves
            && Instant::now() < until
            && self.store.add("ended", 0).is_ok_and(|ended| (ended as usize) < size - self.num_lost)
        {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Shared {
    fn beat(&self, is_last: bool) -> Heartbeat {
        let stands = {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            if seen.0 != self.progress.reports() {
                *seen = (self.progress.reports(), Instant::now());
            }
            seen.1.elapsed()
        };
        Heartbeat {
            host: self.host.clone(),
            process: std::process::id(),
            place: self.progress.place().to_string(),
            stands,
            at: SystemTime::now(),
            is_last,
        }
    }

    fn lock_is_over(&self) -> MutexGuard<'_, bool> {
        self.is_over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next beat; returns whether there is one.
    fn rest(&self) -> bool {
        let is_over = self.lock_is_over();
        let waited = self.ended.wait_timeout_while(is_over, self.pause, |is_over| !*is_over);
        !*waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

struct HeartbeatThread {
    store: Store,
    shared: Arc<Shared>,
    /// The monitored rank.
    next: usize,
    /// Its last beat, and the number of own beats since it changed.
    last_seen: Vec<u8>,
    silent_beats: u32,
    /// Time since when the store does not answer.
    lost_since: Option<Instant>,
}

impl HeartbeatThread {
    fn run(mut self) {
        loop {
            match self.once() {
                Ok(()) => self.lost_since = None,
                Err(error) => {
                    // Until it is found again, the working thread need not wait for its replies too.
                    self.shared.abort_flag.set_store_is_lost(true);
                    self.without_store(error);
                }
            }
            self.shared.abort_flag.set_store_is_lost(self.lost_since.is_some());
            if !self.shared.rest() {
                return;
            }
        }
    }

    fn once(&mut self) -> Result<(), StoreError> {
        let Shared { rank, abort_flag, .. } = &*self.shared;
        {
            // The working thread writes the last beat.
            let is_over = self.shared.lock_is_over();
            if *is_over {
                return Ok(());
            }
            self.store.set(&beat_key(*rank), &self.shared.beat(false).encode())?;
        }
        if let Some(verdict) = failure::filed(&self.store)? {
            abort_flag.cut(verdict);
        } else if self.next != *rank {
            self.watch()?;
        }
        Ok(())
    }

    /// Reads the monitored rank's beat.
    fn watch(&mut self) -> Result<(), StoreError> {
        let Some(record) = read_beat(&self.store, self.next)? else { return Ok(()) };
        if Heartbeat::decode(&record).is_some_and(|beat| beat.is_last) {
            self.next = (self.next + 1) % self.shared.size;
            (self.last_seen, self.silent_beats) = (Vec::new(), 0);
            return Ok(());
        }
        if record != self.last_seen {
            (self.last_seen, self.silent_beats) = (record, 0);
            return Ok(());
        }
        self.silent_beats += 1;
        if self.shared.pause * self.silent_beats >= self.shared.limit {
            let Shared { rank, limit, abort_flag, .. } = &*self.shared;
            let error = CommError::Silent { silent: self.silent()?, limit: *limit };
            abort_flag.cut(failure::report(&self.store, *rank, error));
        }
        Ok(())
    }

    /// Returns all silent ranks: with a machine, all of its ranks fall silent.
    fn silent(&self) -> Result<Vec<usize>, StoreError> {
        let beats = || -> Result<Vec<_>, StoreError> {
            (0..self.shared.size).map(|rank| read_beat(&self.store, rank)).collect()
        };
        let before = beats()?;
        self.shared.rest();
        self.shared.rest();
        // This rank's own beat did not change meanwhile either.
        let is_silent = |rank: usize, record: &Option<Vec<u8>>, now: &Option<Vec<u8>>| {
            let is_last = now.as_deref().and_then(Heartbeat::decode).is_some_and(|beat| beat.is_last);
            rank == self.next || rank != self.shared.rank && record == now && !is_last
        };
        let now = beats()?;
        Ok((0..self.shared.size).filter(|&rank| is_silent(rank, &before[rank], &now[rank])).collect())
    }

    /// Handles a lost store: this rank is cut off, or the store's process is gone. A job that moves
    /// needs no store; one that stands still ends after the limit.
    fn without_store(&mut self, error: StoreError) {
        let since = *self.lost_since.get_or_insert_with(Instant::now);
        match self.store.reconnect() {
            Ok(store) => (self.store, self.lost_since) = (store, None),
            Err(_) if since.elapsed().min(self.shared.beat(false).stands) >= self.shared.limit => {
                self.shared.abort_flag.cut(CommError::Store(error));
            }
            Err(_) => {}
        }
    }
}

fn read_beat(store: &Store, rank: usize) -> Result<Option<Vec<u8>>, StoreError> {
    let key = beat_key(rank);
    if store.check(&[&key])? { store.get(&key, PATIENCE).map(Some) } else { Ok(None) }
}

fn beat_key(rank: usize) -> String {
    format!("beat/{rank}")
}

fn words_key(rank: usize) -> String {
    format!("words/{rank}")
}

/// Returns the ranks that an error names.
fn ranks_of(error: &CommError) -> Vec<usize> {
    match error {
        CommError::PeerLost { rank } | CommError::Aborted { rank, .. } => vec![*rank],
        CommError::Deadline { missing: ranks, .. } | CommError::Silent { silent: ranks, .. } => ranks.clone(),
        _ => Vec::new(),
    }
}
