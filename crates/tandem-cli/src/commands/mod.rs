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
fn refuse_several_ranks() -> anyhow::Result<()> {
    let launch = Launch::detect()?;
    if launch.is_distributed() {
        let Launch { launcher, process, num_processes, .. } = launch;
        return Err(mistake(format!(
            "this command runs in one process; {launcher} started this one as {process} of {num_processes}"
        )));
    }
    Ok(())
}
