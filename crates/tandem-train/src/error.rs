//! Errors of training and their fault class.

use std::io;
use std::path::{Path, PathBuf};

use tandem_comm::store::StoreError;
use tandem_comm::{CommError, Place};
use tandem_data::DataError;
use tandem_judge::JudgeError;
use tandem_kernels::KernelError;
use tandem_model::ModelError;

use crate::config::ConfigError;

/// The result of an operation of this crate.
pub type Result<T, E = TrainError> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The config file or an override is wrong.
    #[error(transparent)]
    Config(#[from] Box<ConfigError>),
    /// The run folder already holds a run.
    #[error(
        "{} already holds a run ({}): continue it with --resume, replace it with --overwrite, or choose another \
         `output`",
        path.display(),
        found.join(", ")
    )]
    UsedRunDir {
        /// The run folder.
        path: PathBuf,
        /// Leftover of an earlier run.
        found: Vec<&'static str>,
    },
    /// A group of parameters does not fit the model.
    #[error("train.groups: parameters = {parameters:?}: {reason}")]
    Group {
        /// Pattern of the group.
        parameters: String,
        /// Mistake and remedy.
        reason: String,
    },
    /// Another process is running in the folder.
    #[error("{} is in use by another run ({holder}): wait for it, stop it, or choose another `output`", path.display())]
    LockedRunDir {
        /// The run folder.
        path: PathBuf,
        /// Identity of the other process.
        holder: String,
    },
    /// The run folder holds a file of ours by name that someone else wrote.
    #[error("no run wrote {}, and this run would replace it: move it away or choose another `output`", path.display())]
    ForeignFile {
        /// The file.
        path: PathBuf,
    },
    /// A checkpoint differs from its manifest.
    #[error("checkpoint {} cannot be used: {reason}", path.display())]
    BrokenCheckpoint {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The mismatch, with names and numbers.
        reason: String,
    },
    /// A file of one rank in the run folder is invisible to another.
    #[error(
        "{}: rank {writer} wrote it, but rank {reader} cannot see it: ranks on several machines need a shared run \
         folder (`output`) at the same path",
        path.display()
    )]
    NotShared {
        /// The file or folder.
        path: PathBuf,
        /// The rank that wrote it.
        writer: usize,
        /// The rank that looked for it.
        reader: usize,
    },
    /// A rank cannot write into the run's folder.
    #[error(
        "rank {rank} cannot write into the run's folder: {reason}; each rank writes its part of a checkpoint there, so \
         mount or share the folder with that right on its machine, too"
    )]
    NotWritable {
        /// The first rank that cannot.
        rank: usize,
        /// The error of its attempt.
        reason: String,
    },
    /// Ranks were started with different programs, configs, models or data.
    #[error(
        "ranks disagree: {name} is {first} on rank 0, but {other} on rank {rank}: all ranks must have the same program, config, \
         model and data"
    )]
    Disagreement {
        /// The config key, or the model's or data's file.
        name: String,
        /// Value of rank 0.
        first: String,
        /// The first rank with another value.
        rank: usize,
        /// Its value.
        other: String,
    },
    /// A file operation failed.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// Attempted operation, as a verb: "read", "write", "rename".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The disk of `compute.offload_dir` has too little room.
    #[error(
        "offloaded tensors take {needed} bytes in {}, but only {free} bytes are free: make room, or set \
         compute.offload_dir to another folder",
        folder.display()
    )]
    NoRoom {
        /// The folder.
        folder: PathBuf,
        /// Bytes needed.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// Model folders, tokenizers or references that do not belong together.
    #[error("{reason}")]
    Mismatch {
        /// The difference, its place and the remedy.
        reason: String,
    },
    /// The plan needs more than `compute.memory` allows.
    #[error("{story}")]
    TooLarge {
        /// Need per rank, and changes that would fit.
        story: String,
    },
    /// A device ran out of memory although the plan fitted.
    #[error("{}{story}", chain(error))]
    OutOfMemory {
        /// The failed allocation.
        error: Box<TrainError>,
        /// The plan's picture and changes that would fit.
        story: String,
    },
    /// Policy and reference are the same weights, but the first loss says otherwise.
    #[error(
        "the first loss is {found:.6}, but policy and reference start from the same weights, where it is exactly \
         {expected:.6} (log-ratio {per_token:+.3e} per answer token): the reference is not the policy's starting point \
         (other weights, another tokenizer or dtype, or a stale file in data.cache)"
    )]
    WrongStart {
        /// The loss's value where policy and reference agree.
        expected: f64,
        /// The loss found.
        found: f64,
        /// Mean of log π − log π_ref over answer tokens, nats.
        per_token: f64,
    },
    /// Loss or gradient was not finite too often.
    #[error(
        "step {step} left out, {in_a_row} steps in a row (train.max_skipped): {reason}; rows: {rows}; lower \
         learning_rate, or look at these rows"
    )]
    NotFinite {
        /// 1-based step.
        step: u64,
        /// Why the last one was left out.
        reason: &'static str,
        /// Steps in a row by now.
        in_a_row: u64,
        /// The rows of the last one, as file and line.
        rows: String,
    },
    /// The run ended without a step that changed the model.
    #[error(
        "nothing was learned in {steps} steps: {reason}. The model is as it was, and no `final` folder was written"
    )]
    NothingLearned {
        /// Why no step changed it, and what to look at.
        reason: &'static str,
        /// Steps done.
        steps: u64,
    },
    /// The model could not be read, written or run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The data is wrong.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The ranks could not go on together.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A judge cannot be built, or cannot go on.
    #[error(transparent)]
    Judge(#[from] JudgeError),
    /// The server that answers cannot be used.
    #[error("the server at {address} (online.server): {reason}")]
    Server {
        /// The address.
        address: String,
        /// The action and the remedy.
        reason: String,
    },
    /// A tracker cannot be started.
    #[error("{reason}")]
    Tracker {
        /// The key, what is wrong, and the remedy.
        reason: String,
    },
    /// A kernel refused its operands or memory ran out.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Failure of a rank that is a thread.
    #[error("rank {rank}, {place}: {}", chain(error))]
    OnRank {
        /// The rank.
        rank: usize,
        /// Step and phase of the failure.
        place: Place,
        /// The cause.
        error: Box<TrainError>,
    },
}

/// Fault class of an error; decides the exit code, in one table for the whole program.
///
/// | code | meaning |
/// |---|---|
/// | 0 | done |
/// | 1 | Tandem or the machine failed |
/// | 2 | the user's mistake: config, data, model folder, flags |
/// | 75 | a peer was lost; the launcher should restart |
/// | 143 | preempted, after saving |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Tandem or the machine failed.
    Own,
    /// The input is wrong and the message says how to mend it.
    User,
    /// Another rank went away.
    PeerLost,
    /// A signal asked to stop; the state was saved.
    Preempted,
}

impl Fault {
    /// Returns whose fault an I/O error is: a path that is not there, not ours or unfit is an input mistake; a
    /// full or failing disk is not.
    pub fn of_io(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound
            | io::ErrorKind::AlreadyExists
            | io::ErrorKind::PermissionDenied
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::IsADirectory
            | io::ErrorKind::InvalidFilename
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::InvalidData => Self::User,
            _ => Self::Own,
        }
    }

    /// Returns whose fault an error of a model's files is.
    pub fn of_model(error: &ModelError) -> Self {
        match error {
            ModelError::Io { source, .. } => Self::of_io(source),
            ModelError::Kernel(_) | ModelError::Store(_) => Self::Own,
            _ => Self::User,
        }
    }

    /// Returns whose fault an error of rows or a tokenizer is.
    pub fn of_data(error: &DataError) -> Self {
        match error {
            DataError::Io { source, .. } => Self::of_io(source),
            DataError::Forest(_) => Self::Own,
            _ => Self::User,
        }
    }

    /// The process exit code.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Own => 1,
            Self::User => 2,
            Self::PeerLost => 75,
            Self::Preempted => 143,
        }
    }
}

impl TrainError {
    /// Makes an error of a thread that the system has refused.
    pub(crate) fn thread(source: io::Error) -> Self {
        KernelError::System { what: "starting a thread", source }.into()
    }

    /// Returns the fault class.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Config(error) if !error.is_mistake() => Fault::Own,
            Self::Config(_)
            | Self::UsedRunDir { .. }
            | Self::Group { .. }
            | Self::LockedRunDir { .. }
            | Self::ForeignFile { .. }
            | Self::BrokenCheckpoint { .. }
            | Self::NotShared { .. }
            | Self::NotWritable { .. }
            | Self::Disagreement { .. }
            | Self::Mismatch { .. }
            | Self::Server { .. }
            | Self::Tracker { .. }
            | Self::TooLarge { .. }
            | Self::WrongStart { .. }
            | Self::NotFinite { .. } => Fault::User,
            Self::Io { source, .. } => Fault::of_io(source),
            Self::Comm(error) => Self::comm_fault(error),
            Self::OnRank { error, .. } | Self::OutOfMemory { error, .. } => error.fault(),
            Self::Model(ModelError::Store(error)) if error.is::<CommError>() => {
                error.downcast_ref().map_or(Fault::Own, Self::comm_fault)
            }
            Self::NoRoom { .. } | Self::NothingLearned { .. } | Self::Kernel(_) => Fault::Own,
            Self::Judge(error) => Self::judge_fault(error),
            Self::Model(error) => Fault::of_model(error),
            Self::Data(error) => Fault::of_data(error),
        }
    }

    /// Returns the communication error, if it is one.
    pub fn comm(&self) -> Option<&CommError> {
        match self {
            Self::Comm(error) => Some(error),
            Self::OnRank { error, .. } => error.comm(),
            Self::Model(ModelError::Store(error)) => error.downcast_ref(),
            _ => None,
        }
    }

    /// Returns the out-of-memory error of a device, if it is one.
    pub fn out_of_memory(&self) -> Option<&KernelError> {
        match self {
            Self::Kernel(error) | Self::Model(ModelError::Kernel(error)) => {
                Some(error).filter(|error| error.is_out_of_memory())
            }
            _ => None,
        }
    }

    /// Ranks that do not do the same are our mistake; an address that is another program's, or a
    /// network that others cannot reach, is the user's; one that is gone is a peer lost.
    fn comm_fault(error: &CommError) -> Fault {
        match error {
            CommError::Mismatch { .. } | CommError::Invalid { .. } => Fault::Own,
            CommError::Store(StoreError::NotAStore { .. } | StoreError::Bind { .. })
            | CommError::Engine { .. } => Fault::User,
            CommError::Stopped { .. } => Fault::Preempted,
            _ => Fault::PeerLost,
        }
    }

    /// A judge's config, program, endpoint and budget are the user's; its cache is a file like
    /// others.
    fn judge_fault(error: &JudgeError) -> Fault {
        match error {
            JudgeError::Stopped => Fault::Preempted,
            JudgeError::Cache { source, .. } => Fault::of_io(source),
            JudgeError::Model { source, .. } => source.downcast_ref().map_or(Fault::Own, Self::fault),
            _ => Fault::User,
        }
    }

    /// The process exit code, see [`Fault`].
    pub fn exit_code(&self) -> u8 {
        self.fault().exit_code()
    }

    /// Turns an I/O error into [`TrainError::Io`]: `.map_err(TrainError::io("write", path))`.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { action, path, source }
    }
}

/// Formats an error and its causes, joined by colons, each cause once.
///
/// The errors of this workspace do not print their source. An error of another crate may; its cause
/// is then left out.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let message = inner.to_string();
        if !text.ends_with(&message) {
            text = format!("{text}: {message}");
        }
        cause = inner.source();
    }
    text
}

impl From<ConfigError> for TrainError {
    fn from(error: ConfigError) -> Self {
        Self::Config(Box::new(error))
    }
}

/// Error of a store to the executor when a rank is lost; [`TrainError::comm`] finds it again.
pub(crate) fn lost(error: CommError) -> ModelError {
    ModelError::Store(Box::new(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_follow_the_table() {
        let missing = TrainError::io("read", Path::new("x"))(io::Error::from(io::ErrorKind::NotFound));
        assert_eq!(missing.exit_code(), 2);
        let full = TrainError::io("write", Path::new("x"))(io::Error::from(io::ErrorKind::StorageFull));
        assert_eq!(full.exit_code(), 1);
        assert_eq!(TrainError::Kernel(KernelError::invalid("gemm", "x")).exit_code(), 1);
        assert_eq!((Fault::PeerLost.exit_code(), Fault::Preempted.exit_code()), (75, 143));
    }

    #[test]
    fn a_missing_file_is_told_once() {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let path = || PathBuf::from("somewhere");
        let model = || TrainError::from(ModelError::io(&path(), gone()));
        let judge = "j".to_owned();
        let errors = [
            TrainError::io("read", &path())(gone()),
            model(),
            DataError::Io { what: "reading", path: path(), source: gone() }.into(),
            KernelError::System { what: "mapping somewhere", source: gone() }.into(),
            JudgeError::Start { owner: judge.clone(), command: "somewhere".into(), source: gone() }.into(),
            JudgeError::Cache { judge: judge.clone(), what: "opening", path: path(), source: gone() }.into(),
            JudgeError::Model { judge, source: Box::new(model()) }.into(),
            TrainError::OnRank { rank: 1, place: Place::default(), error: Box::new(model()) },
            TrainError::OutOfMemory { error: Box::new(model()), story: String::new() },
        ];
        for error in errors {
            let text = chain(&error);
            let count = |part: &str| text.matches(part).count();
            assert_eq!((count("somewhere"), count(&gone().to_string())), (1, 1), "{text}");
        }
        let foreign = io::Error::other(TrainError::io("read", &path())(gone()));
        assert_eq!(chain(&foreign), format!("cannot read somewhere: {}", gone()));
    }

    #[test]
    fn used_folder_names_both_flags() {
        let text =
            TrainError::UsedRunDir { path: "runs/first".into(), found: vec!["metrics.jsonl"] }.to_string();
        assert!(
            text.contains("--resume") && text.contains("--overwrite") && text.contains("metrics.jsonl"),
            "{text}"
        );
    }
}
