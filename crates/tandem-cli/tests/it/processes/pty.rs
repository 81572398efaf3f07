//! A pseudo-terminal, and a program that it controls.

use std::fs::File;
use std::io::{Read, Write};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use super::starts::Job;

/// The side of a pseudo-terminal on which a person types.
pub struct Terminal {
    master: File,
    shown: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    /// Starts a command as the foreground of a session whose terminal is new.
    pub fn start(command: &Command) -> (Self, Job) {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = File::from(rustix::fs::open(name, flags, Mode::empty()).unwrap());
        // It replaces itself by the program, so the job's process is the program's.
        let mut controlled = Command::new("setsid");
        controlled.arg("--ctty").arg(command.get_program()).args(command.get_args());
        controlled.current_dir(command.get_current_dir().unwrap());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => controlled.env(name, value),
                None => controlled.env_remove(name),
            };
        }
        controlled.stdin(slave.try_clone().unwrap()).stdout(slave.try_clone().unwrap()).stderr(slave);
        let job = Job::spawn(controlled);
        let terminal = Self { master: File::from(master), shown: Arc::default() };
        terminal.show();
        (terminal, job)
    }

    /// Reads what the program prints, which it waits for otherwise.
    fn show(&self) {
        let (mut master, shown) = (self.master.try_clone().unwrap(), Arc::clone(&self.shown));
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // An error is the end of the last process that has the terminal.
            while let Ok(count @ 1..) = master.read(&mut bytes) {
                shown.lock().unwrap().extend_from_slice(&bytes[..count]);
            }
        });
    }

    pub fn press_ctrl_c(&mut self) {
        // Nobody may be left to read it.
        let _ = self.master.write_all(b"\x03");
    }

    /// Types a text, or a key's code.
    pub fn enter(&mut self, text: &str) {
        self.master.write_all(text.as_bytes()).unwrap();
    }

    /// Waits until this was printed.
    pub fn wait_for(&self, text: &str) {
        let start = Instant::now();
        while !self.shown().contains(text) {
            assert!(start.elapsed() < Duration::from_secs(60), "{text}: {}", self.shown());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns what was printed so far.
    pub fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }
}
