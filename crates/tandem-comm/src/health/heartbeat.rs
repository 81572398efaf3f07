//! Heartbeat: a rank's state, written to the store every second.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Separator of fields; no host name contains it.
const SEPARATOR: char = '\u{1f}';
/// Time in one phase below which a report leaves it out.
const STANDING: Duration = Duration::from_secs(2);
/// Age above which a report names it. Beats are a second apart and clocks differ slightly.
const OLD: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Heartbeat {
    pub(crate) host: String,
    /// The rank's process id.
    pub(crate) process: u32,
    /// The rank's place in its work, in words.
    pub(crate) place: String,
    /// Time since the place last changed.
    pub(crate) stands: Duration,
    /// Time of the beat by the rank's clock.
    pub(crate) at: SystemTime,
    /// Whether the rank has ended.
    pub(crate) is_last: bool,
}

impl Heartbeat {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let at = self.at.duration_since(UNIX_EPOCH).unwrap_or_default();
        let fields = [
            self.host.clone(),
            self.process.to_string(),
            self.place.clone(),
            self.stands.as_millis().to_string(),
            at.as_millis().to_string(),
            u8::from(self.is_last).to_string(),
        ];
        fields.join(&SEPARATOR.to_string()).into_bytes()
    }

    /// Decodes a beat; `None` for another version's.
    pub(crate) fn decode(record: &[u8]) -> Option<Self> {
        let fields: Vec<&str> = std::str::from_utf8(record).ok()?.split(SEPARATOR).collect();
        let [host, process, place, stands, at, is_last] = fields[..] else { return None };
        Some(Self {
            host: host.to_owned(),
            process: process.parse().ok()?,
            place: place.to_owned(),
            stands: Duration::from_millis(stands.parse().ok()?),
            at: UNIX_EPOCH.checked_add(Duration::from_millis(at.parse().ok()?))?,
            is_last: is_last == "1",
        })
    }

    /// Returns the report of this rank's own beat.
    pub(crate) fn own(&self) -> HeartbeatReport<'_> {
        HeartbeatReport { beat: self, is_own: true, age: None }
    }

    /// Returns the report of another rank's beat at the time `now`.
    pub(crate) fn known(&self, now: SystemTime) -> HeartbeatReport<'_> {
        let age = now.duration_since(self.at).unwrap_or_default();
        HeartbeatReport {
            beat: self,
            is_own: false,
            age: Some(age).filter(|age| !self.is_last && *age >= OLD),
        }
    }
}

/// Report of a heartbeat in words, with its age if it is old.
pub(crate) struct HeartbeatReport<'a> {
    beat: &'a Heartbeat,
    is_own: bool,
    age: Option<Duration>,
}

impl fmt::Display for HeartbeatReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Heartbeat { host, process, place, stands, .. } = self.beat;
        write!(f, "on {host} (process {process}), {}{place}", if self.is_own { "" } else { "last seen " })?;
        if *stands >= STANDING {
            write!(f, " for {} s", stands.as_secs())?;
        }
        match self.age {
            Some(age) => write!(f, ", {} s ago", age.as_secs()),
            None => Ok(()),
        }
    }
}

/// Returns this machine's host name.
pub(crate) fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().replace(SEPARATOR, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beat() -> Heartbeat {
        Heartbeat {
            host: "node7".into(),
            process: 812,
            place: "at step 12, in forward".into(),
            stands: Duration::from_millis(300),
            at: UNIX_EPOCH + Duration::from_millis(1_800_000_000_123),
            is_last: false,
        }
    }

    #[test]
    fn a_beat_is_read_as_it_was_written_and_not_when_it_was_cut() {
        for beat in [beat(), Heartbeat { is_last: true, stands: Duration::from_secs(9), ..beat() }] {
            let record = beat.encode();
            assert_eq!(Heartbeat::decode(&record), Some(beat));
            assert_eq!(Heartbeat::decode(&record[..record.len() - 3]), None);
        }
    }

    #[test]
    fn a_person_reads_where_the_rank_is_and_since_when() {
        let (fresh, now) = (beat(), beat().at + Duration::from_secs(1));
        assert_eq!(fresh.known(now).to_string(), "on node7 (process 812), last seen at step 12, in forward");
        assert_eq!(fresh.own().to_string(), "on node7 (process 812), at step 12, in forward");
        let standing = Heartbeat { stands: Duration::from_millis(35_900), ..beat() };
        assert!(standing.known(now).to_string().ends_with("in forward for 35 s"));
        let late = now + Duration::from_secs(60);
        assert!(standing.known(late).to_string().ends_with("in forward for 35 s, 61 s ago"));
        let ended = Heartbeat { is_last: true, ..beat() };
        assert_eq!(ended.known(late).to_string(), fresh.known(now).to_string());
        // A clock behind the other rank's.
        assert_eq!(fresh.known(UNIX_EPOCH).to_string(), fresh.known(now).to_string());
    }
}
