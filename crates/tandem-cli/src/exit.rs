//! Exit codes of the process; no other file decides them.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | a fault of Tandem's own, or of the machine (a full disk, no memory); of `verify`: other bits |
//! | 2 | a mistake in the command, the configuration, the model or the data; of `verify`: any failure |
//! | 75 | a peer was lost (`EX_TEMPFAIL`: starting again with `--resume` is the remedy) |
//! | 129 | stopped by SIGHUP after saving (128 + SIGHUP: the terminal is gone) |
//! | 130 | stopped by Ctrl-C after saving (128 + SIGINT) |
//! | 143 | stopped by SIGTERM after saving (128 + SIGTERM, what schedulers expect of a preempted job) |

use std::process::ExitCode;
use std::{fmt, io};

use tandem_comm::LaunchError;
use tandem_data::DataError;
use tandem_hub::HubError;
use tandem_model::ModelError;
use tandem_train::config::ConfigError;
use tandem_train::{Fault, TrainError};

use crate::{agent, signals};

/// Code of a process that lost another rank.
pub(crate) const PEER_LOST: u8 = 75;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Done.
    Done,
    /// Done, with the finding that bits differ.
    Different,
    /// Failed by a fault that is not in the user's files.
    OwnFault,
    /// Failed by a mistake that the user can mend.
    UserMistake,
    /// Another rank was lost.
    PeerLost,
    /// Stopped by a signal, after saving.
    Interrupted,
}

impl Exit {
    /// Returns the outcome for `error`, decided by the first cause in its chain that is known.
    pub(crate) fn from_error(error: &anyhow::Error) -> Self {
        error.chain().find_map(Self::from_cause).unwrap_or(Self::OwnFault)
    }

    fn from_cause(cause: &(dyn std::error::Error + 'static)) -> Option<Self> {
        if cause.is::<Mistake>() || cause.is::<LaunchError>() {
            Some(Self::UserMistake)
        } else if let Some(error) = cause.downcast_ref::<TrainError>() {
            Some(error.fault().into())
        } else if let Some(error) = cause.downcast_ref::<ConfigError>() {
            Some(if error.is_mistake() { Self::UserMistake } else { Self::OwnFault })
        } else if let Some(error) = cause.downcast_ref::<HubError>() {
            Some(if error.is_mistake() { Self::UserMistake } else { Self::OwnFault })
        } else if let Some(error) = cause.downcast_ref::<ModelError>() {
            Some(Fault::of_model(error).into())
        } else if let Some(error) = cause.downcast_ref::<DataError>() {
            Some(Fault::of_data(error).into())
        } else {
            cause.downcast_ref::<io::Error>().map(|error| Fault::of_io(error).into())
        }
    }
}

impl Exit {
    /// Returns the outcome of a rank's process. A rank killed by a signal counts as a lost peer.
    pub(crate) fn from_code(code: Option<i32>) -> Self {
        let Some(code) = code else { return Self::PeerLost };
        match code {
            0 => Self::Done,
            2 => Self::UserMistake,
            129 | 130 | 143 => Self::Interrupted,
            code if code == i32::from(PEER_LOST) => Self::PeerLost,
            _ => Self::OwnFault,
        }
    }

    fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Different | Self::OwnFault => 1,
            Self::UserMistake => 2,
            Self::PeerLost => PEER_LOST,
            Self::Interrupted => signals::exit_code(),
        }
    }
}

impl From<Fault> for Exit {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Own => Self::OwnFault,
            Fault::User => Self::UserMistake,
            Fault::PeerLost => Self::PeerLost,
            Fault::Preempted => Self::Interrupted,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// Prints an error and reports it to the launcher's agent, unless that was done.
pub(crate) fn tell(error: anyhow::Error) -> anyhow::Error {
    if error.downcast_ref::<Told>().is_some() {
        return error;
    }
    tracing::error!("{}", tandem_train::chain(&*error));
    agent::report(&error);
    error.context(Told)
}

/// Context of an error that was printed.
#[derive(Debug)]
struct Told;

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("printed above")
    }
}

/// An error that a command finds in its arguments.
#[derive(Debug)]
pub(crate) struct Mistake(String);

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Mistake {}

/// Creates a [`Mistake`] error.
pub(crate) fn mistake(message: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(Mistake(message.into()))
}
