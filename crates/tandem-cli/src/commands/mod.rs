//! The subcommands, one file each.

pub(crate) mod chat;
pub(crate) mod checkpoint;
pub(crate) mod config;
pub(crate) mod data;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod export;
pub(crate) mod generate;
pub(crate) mod init;
pub(crate) mod init_weights;
pub(crate) mod launch;
pub(crate) mod manual;
pub(crate) mod merge;
pub(crate) mod plan;
#[cfg(test)]
mod reference;
pub(crate) mod report;
pub(crate) mod runs;
pub(crate) mod serve;
pub(crate) mod train;
pub(crate) mod verify;
pub(crate) mod watch;

use tandem_comm::Launch;

use crate::exit::mistake;

/// Refuses to run as one of several processes of a launcher.
pub(crate) fn refuse_several_ranks() -> anyhow::Result<()> {
    // Contradictory variables, as in a batch script, are for `train` to explain.
    if let Ok(Launch { launcher, process, num_processes, .. }) = Launch::detect()
        && num_processes > 1
    {
        return Err(mistake(format!(
            "this command runs in one process; {launcher} started this one as {process} of {num_processes}"
        )));
    }
    Ok(())
}
