//! A started program as the leader of a process group of its own.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// A started program, and the group of all that it starts. Drop kills the group.
#[derive(Debug)]
pub struct GroupLeader {
    child: Child,
    /// Exit status, once reaped. From then on another process may have its id, which is the group's
    /// too.
    end: Option<io::Result<ExitStatus>>,
}

impl GroupLeader {
    /// Starts a program. The terminal's Ctrl-C does not reach its group.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        Ok(Self { child: command.process_group(0).spawn()?, end: None })
    }

    /// Returns the process, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Returns whether it has ended, without reaping it.
    pub fn has_ended(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        self.end.is_some() || !matches!(waitid(WaitId::Pid(Pid::from_child(&self.child)), options), Ok(None))
    }

    /// Kills the rest of the group, reaps the leader, and returns how it ended.
    ///
    /// # Errors
    /// The system does not tell.
    pub fn kill(&mut self) -> &io::Result<ExitStatus> {
        let Self { child, end } = self;
        end.get_or_insert_with(|| {
            // An error means that all of them have ended.
            let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
            child.wait()
        })
    }
}

impl Drop for GroupLeader {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}
