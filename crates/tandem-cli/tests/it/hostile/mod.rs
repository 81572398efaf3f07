//! Models, data and settings of somebody who means harm: each is refused in bounded time and memory, with exit
//! code 2 and a message that names the place and moves no cursor.

mod files;
mod numbers;
mod pickles;
mod templates;
mod tensors;
mod tokenizers;

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::workshop::{Outcome, Workshop};

/// Most memory of a command, in KiB.
const MOST_MEMORY: u64 = 1 << 20;

/// After this time a command hangs. Machines that run all tests at once are slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// Continues a prompt with the model.
const GENERATE: [&str; 5] = ["generate", "model", "the quick", "--max-new-tokens", "2"];

impl Workshop {
    /// Runs a command that may take 1 GiB.
    fn run_bounded(&self, case: &str, arguments: &[&str]) -> Outcome {
        let mut child = self
            .command(arguments)
            .stdin(Stdio::null())
            .stdout(fs::File::create(self.path("stdout")).unwrap())
            .stderr(fs::File::create(self.path("stderr")).unwrap())
            .spawn()
            .expect("the built command runs");
        let status = format!("/proc/{}/status", child.id());
        let (began, mut most) = (Instant::now(), 0);
        let code = loop {
            if let Some(ended) = child.try_wait().unwrap() {
                break ended.code();
            }
            most = most.max(high_water(&status).unwrap_or(0));
            if most > MOST_MEMORY || began.elapsed() > PATIENCE {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("{case}: {most} KiB after {:?}: {arguments:?}", began.elapsed());
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let [stdout, stderr] =
            ["stdout", "stderr"].map(|name| String::from_utf8_lossy(&self.bytes(name)).into_owned());
        Outcome { code, stdout, stderr }
    }

    /// Runs a command that must be refused with these words.
    #[track_caller]
    fn refuses(&self, case: &str, arguments: &[&str], words: &[&str]) {
        let Outcome { code, stderr, .. } = self.run_bounded(case, arguments);
        assert_eq!(code, Some(2), "{case}: {arguments:?}:\n{stderr}");
        for word in words {
            assert!(stderr.contains(word), "{case}: no {word:?} in:\n{stderr}");
        }
        let is_told = stderr.lines().any(|line| line.starts_with("error: "));
        assert!(is_told && !stderr.contains("panicked"), "{case}: {stderr}");
        assert!(stderr.len() < 20_000, "{case}: a message of {} bytes", stderr.len());
        let obeyed = |c: char| c.is_control() && c != '\n' && c != '\t';
        assert!(!stderr.contains(obeyed), "{case}: {stderr:?}");
    }

    /// The same with another content of a file, which is then as it was.
    #[track_caller]
    fn refuses_with(&self, case: &str, file: &str, content: &[u8], arguments: &[&str], words: &[&str]) {
        let path = self.path(file);
        let before = fs::read(&path).ok();
        fs::write(&path, content).unwrap();
        self.refuses(case, arguments, words);
        put_back(&path, before);
    }

    /// The same with a change of a JSON file.
    #[track_caller]
    fn refuses_json(
        &self,
        case: &str,
        file: &str,
        change: impl FnOnce(&mut Value),
        arguments: &[&str],
        words: &[&str],
    ) {
        let mut value: Value = serde_json::from_str(&self.read(file)).unwrap();
        change(&mut value);
        self.refuses_with(case, file, value.to_string().as_bytes(), arguments, words);
    }
}

fn put_back(path: &Path, before: Option<Vec<u8>>) {
    match before {
        Some(bytes) => fs::write(path, bytes).unwrap(),
        None => fs::remove_file(path).unwrap(),
    }
}

/// Most memory that a process has had, in KiB.
fn high_water(status: &str) -> Option<u64> {
    let text = fs::read_to_string(status).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}
