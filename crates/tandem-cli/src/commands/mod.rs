//! The subcommands, one file each.

pub mod chat;
pub mod data;
pub mod doctor;
pub mod eval;
pub mod generate;
pub mod init;
pub mod launch;
pub mod merge;
pub mod plan;
pub mod serve;
pub mod train;

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
