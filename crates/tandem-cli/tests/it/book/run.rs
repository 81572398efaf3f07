//! Every command of the book runs, or its page says why not.
//!
//! A page's commands run in its order, in a folder as `tandem quickstart` leaves it, from steps so few that its
//! model has learnt nothing. The folder also has the repository's `examples`.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};

use tempfile::TempDir;

use super::blocks::{Block, Treatment, blocks, commands, pages, read, root};
use crate::workshop::program_in;

/// Pages with commands that run here, a test each.
macro_rules! pages_that_run {
    ($($name:ident: $page:literal,)*) => {
        const PAGES: &[&str] = &[$($page),*];
        $(
            #[test]
            fn $name() {
                run_page($page);
            }
        )*
    };
}

pages_that_run! {
    adapters: "docs/adapters.md",
    config: "docs/config.md",
    determinism: "docs/determinism.md",
    formats: "docs/formats.md",
    generation: "docs/generation.md",
    gpu: "docs/gpu.md",
    from_accelerate: "docs/guides/from-accelerate.md",
    from_mitchell: "docs/guides/from-mitchell.md",
    from_trl: "docs/guides/from-trl.md",
    loss_does_not_fall: "docs/guides/loss-does-not-fall.md",
    two_a10: "docs/guides/two-a10.md",
    judges: "docs/judges.md",
    plan: "docs/plan.md",
    profile: "docs/profile.md",
    ranks: "docs/ranks.md",
    first_run: "docs/tutorials/first-run.md",
    one_to_eight: "docs/tutorials/one-to-eight.md",
    online: "docs/tutorials/online.md",
    own_data: "docs/tutorials/own-data.md",
    verify: "docs/verify.md",
    watch: "docs/watch.md",
}

/// Folder as `tandem quickstart` leaves it, and the program's folder.
struct Quickstart {
    folder: TempDir,
}

impl Quickstart {
    /// The one that other pages use now, or a new one.
    fn shared() -> Arc<Self> {
        static SHARED: Mutex<Weak<Quickstart>> = Mutex::new(Weak::new());
        // A page that failed while it made one leaves none.
        let mut shared = SHARED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let made = Arc::new(Self::new());
            *shared = Arc::downgrade(&made);
            made
        })
    }

    fn new() -> Self {
        let quickstart = Self { folder: tempfile::tempdir().expect("a temporary folder") };
        let (bin, work) = (quickstart.folder.path().join("bin"), quickstart.folder.path().join("work"));
        fs::create_dir(&bin).unwrap();
        fs::create_dir(&work).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_tandem"), bin.join("tandem")).unwrap();
        // What a developer's own runs of the examples leave there is large.
        copy(&root().join("examples"), &work.join("examples"), &["runs", "smollm2.gguf"]);
        for command in [
            "tandem quickstart --prepare-only",
            "tandem train runs/quickstart/sft.toml --set train.steps=4 --set data.train_rows=512",
            "tandem train runs/quickstart/dpo.toml --set train.steps=4 --set data.train_rows=128",
        ] {
            quickstart.shell(&work, "the quickstart", command, 0);
        }
        quickstart
    }

    /// Runs a block in `folder`, and returns its output.
    fn shell(&self, folder: &Path, place: &str, text: &str, code: i32) -> String {
        let path = format!("{}:{}", self.folder.path().join("bin").display(), std::env::var("PATH").unwrap());
        // The workshop's environment: no launcher, no hub.
        let mut shell = program_in(folder, "bash");
        let output = shell.args(["-euo", "pipefail", "-c", text]).env("PATH", path).output().expect("bash");
        let [stdout, stderr] =
            [output.stdout, output.stderr].map(|out| String::from_utf8_lossy(&out).into_owned());
        assert_eq!(
            output.status.code(),
            Some(code),
            "{place}:\n{text}\nstdout:\n{stdout}\nstderr:\n{stderr}"
        );
        format!("{stdout}\n{stderr}")
    }
}

/// Copies a folder's content without the folders and files that `leave_out` names.
fn copy(from: &Path, to: &Path, leave_out: &[&str]) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (name, from) = (entry.file_name(), entry.path());
        if leave_out.iter().any(|left| name == *left) {
            continue;
        }
        if from.is_dir() {
            copy(&from, &to.join(name), leave_out);
        } else {
            fs::copy(&from, to.join(name)).unwrap();
        }
    }
}

/// Another judge of a run.
const LENGTH: &str =
    "\n[[judges]]\nname = \"characters\"\nkind = \"length\"\nunit = \"characters\"\nper_unit = 0.01\n";

fn run_page(page: &str) {
    let quickstart = Quickstart::shared();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    copy(&quickstart.folder.path().join("work"), folder, &[]);
    let mut printed = String::new();
    for Block { place, text, treatment } in blocks(page) {
        match treatment {
            Treatment::File(name) => {
                let path = folder.join(name);
                fs::create_dir_all(path.parent().expect("a file's folder")).unwrap();
                // A model of four steps writes nothing that a rule of the page rewards, and a run that learns
                // nothing ends with an error: its answers differ in length.
                let is_judged = text.contains("[[judges]]") && text.contains("method =");
                let judge = if is_judged { LENGTH } else { "" };
                fs::write(path, text + judge).unwrap();
            }
            Treatment::Run(code) => printed = quickstart.shell(folder, &place, &text, code),
            Treatment::Prints => {
                for line in text.lines() {
                    let found = printed.lines().any(|printed| matches(line.trim(), printed.trim()));
                    assert!(found, "{place}: no line {line:?} in\n{printed}");
                }
            }
            Treatment::NotRun(_) | Treatment::RunBy(_) | Treatment::Read => {}
        }
    }
}

/// Returns whether `line` is `pattern`, in which each `…` stands for any text.
fn matches(pattern: &str, line: &str) -> bool {
    let mut parts = pattern.split('…');
    let Some(mut rest) = line.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let mut open = false;
    for part in parts {
        open = true;
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.is_empty() || (open && pattern.ends_with('…'))
}

#[test]
fn a_printed_line_is_compared_whole_but_for_what_is_left_out() {
    assert!(matches("it fits: … a rank", "it fits: 1 GiB of 2 GiB a rank"));
    assert!(matches("…: 3 rows", "/tmp/x: 3 rows"));
    assert!(matches("step 1/2  …", "step 1/2  loss 1"));
    assert!(!matches("it fits: …", "it does not fit: 3"));
    assert!(!matches("3 rows", "3 rows more"));
}

#[test]
fn every_page_with_commands_that_run_has_a_test() {
    let runs = |page: &String| blocks(page).iter().any(|block| matches!(block.treatment, Treatment::Run(_)));
    let found: Vec<String> = pages().into_iter().filter(runs).collect();
    let mut listed = PAGES.to_vec();
    listed.sort_unstable();
    assert_eq!(found, listed);
}

#[test]
fn commands_that_do_not_run_here_have_a_reason_or_a_script() {
    for page in pages() {
        for block in blocks(&page) {
            match &block.treatment {
                Treatment::NotRun(reason) => {
                    assert!(reason.split_whitespace().count() > 2, "{}: {reason}", block.place);
                }
                Treatment::RunBy(script) => {
                    let script = read(script);
                    for call in block.lines().iter().filter_map(|line| commands(line)).flatten() {
                        let name = &call[1];
                        assert!(script.contains(name.as_str()), "{}: the script has no {name}", block.place);
                    }
                }
                _ => {}
            }
        }
    }
}
