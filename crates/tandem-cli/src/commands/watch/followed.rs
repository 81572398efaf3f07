//! Runs that are followed on a thread, and the panels they give.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use serde_json::json;
use tokio::sync::watch;

use crate::page::{self, MOST_RUNS, Machine, Panel, RunHistory};
use crate::run_folder;

/// Interval of looking at files.
const LOOK: Duration = Duration::from_millis(250);
/// Shortest time between two versions of the page.
const PAGE: Duration = Duration::from_secs(1);
/// Interval of measuring the machine, and of ages on the page.
const MACHINE: Duration = Duration::from_secs(2);
/// Interval of looking for new runs.
const SEARCH: Duration = Duration::from_secs(5);
/// Times that a page waits for every time it took to make, so that training keeps its processor.
const PATIENCE: u32 = 20;

/// Most bytes of panels a second, so that a slow connection keeps up.
const TRAFFIC: f64 = 400e3;

/// A version of the page: all its panels, and its title.
#[derive(Clone, Debug, Default)]
pub(super) struct Version {
    pub panels: Arc<Vec<Panel>>,
    pub title: String,
}

impl Version {
    /// Returns the message that turns the page of version `known` into this one.
    pub(super) fn update_of(&self, known: &[Panel]) -> String {
        let changed: Vec<_> = self
            .panels
            .iter()
            .filter(|panel| !known.contains(panel))
            .map(|panel| json!({ "id": panel.id, "room": panel.room, "html": panel.html }))
            .collect();
        let order: Vec<&str> = self.panels.iter().map(|panel| panel.id.as_str()).collect();
        json!({ "changed": changed, "order": order, "title": self.title }).to_string()
    }
}

/// Folders that were given, and the runs found in them.
pub(super) struct Followed {
    given: Vec<PathBuf>,
    runs: Vec<RunHistory>,
    /// Runs that have no colour left.
    pub(super) num_left_out: usize,
}

impl Followed {
    /// Looks for runs.
    ///
    /// # Errors
    /// A folder is missing, or no run has begun in any of them.
    pub(super) fn find(given: &[PathBuf]) -> anyhow::Result<Self> {
        let mut followed = Self { given: given.to_vec(), runs: Vec::new(), num_left_out: 0 };
        followed.take(run_folder::find(given, run_folder::is_begun)?);
        if followed.runs.is_empty() {
            return Err(run_folder::none_found(given));
        }
        Ok(followed)
    }

    /// Adds runs that are new and removes those that are gone; returns whether there were any.
    fn search(&mut self) -> anyhow::Result<bool> {
        // What was deleted meanwhile does not hide the others.
        let there: Vec<_> = self.given.iter().filter(|folder| folder.is_dir()).cloned().collect();
        Ok(self.take(run_folder::find(&there, run_folder::is_begun)?))
    }

    /// Follows the runs of these folders and no others; returns whether they were others before.
    fn take(&mut self, mut folders: Vec<PathBuf>) -> bool {
        // The last ones that were written are kept.
        folders.sort_by_cached_key(|folder| {
            let metrics = folder.join("metrics.jsonl").metadata().or_else(|_| folder.metadata());
            std::cmp::Reverse(metrics.and_then(|facts| facts.modified()).unwrap_or(SystemTime::UNIX_EPOCH))
        });
        self.num_left_out = folders.len().saturating_sub(MOST_RUNS);
        folders.truncate(MOST_RUNS);
        folders.sort();
        if folders.iter().eq(self.runs.iter().map(RunHistory::folder)) {
            return false;
        }
        let mut known = std::mem::take(&mut self.runs);
        for folder in folders {
            let place = known.iter().position(|run| run.folder() == folder);
            self.runs.push(place.map_or_else(|| RunHistory::new(&folder), |place| known.swap_remove(place)));
        }
        true
    }

    /// Follows the runs until `stop`, and sends versions of the page while somebody looks at it.
    pub(super) fn follow(mut self, versions: &watch::Sender<Version>, stop: &AtomicBool) {
        let mut machine = Machine::new();
        let (mut measured, mut searched, mut rest): (Option<Instant>, _, _) =
            (None, Instant::now(), Instant::now());
        // What is on the page is old: all of it, or its ages and the memory of the machine.
        let (mut is_stale, mut is_aged) = (true, false);
        while !stop.load(Ordering::Relaxed) {
            if measured.is_none_or(|at| at.elapsed() >= MACHINE) {
                machine.measure();
                is_aged = true;
                measured = Some(Instant::now());
            }
            if versions.receiver_count() > 0 && Instant::now() >= rest {
                let mut began = Instant::now();
                if searched.elapsed() >= SEARCH {
                    searched = began;
                    // A folder that is gone for a while is no reason to end.
                    is_stale |= self.search().unwrap_or(false);
                }
                // Files are read in parts. What has piled up is read once, and is no reason to rest.
                for run in &mut self.runs {
                    let mut parts = 0;
                    while !stop.load(Ordering::Relaxed) && run.update_or_tell() {
                        parts += 1;
                    }
                    is_stale |= parts > 0;
                    if parts > 1 {
                        began = Instant::now();
                    }
                }
                if is_stale {
                    let panels = page::panels(&self.runs, Some(&machine));
                    versions.send_replace(Version { panels: Arc::new(panels), title: self.title() });
                } else if is_aged {
                    self.refresh(versions, &machine);
                }
                (is_stale, is_aged) = (false, false);
                let bytes: usize = versions.borrow().panels.iter().map(|panel| panel.html.len()).sum();
                let sending = Duration::from_secs_f64(bytes as f64 / TRAFFIC);
                rest = Instant::now() + PAGE.max(PATIENCE * began.elapsed()).max(sending);
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Renews the panels that change by themselves.
    fn refresh(&self, versions: &watch::Sender<Version>, machine: &Machine) {
        let mut version = versions.borrow().clone();
        let mut panels = (*version.panels).clone();
        for quick in page::quick_panels(&self.runs, Some(machine)) {
            match panels.iter_mut().find(|panel| panel.id == quick.id) {
                Some(panel) => *panel = quick,
                None => panels.push(quick),
            }
        }
        version.panels = Arc::new(panels);
        versions.send_replace(version);
    }

    /// Names of the runs for the browser's tab.
    fn title(&self) -> String {
        let name = |run: &RunHistory| {
            let folder = run.folder();
            folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned()
        };
        format!("{} – Tandem", self.runs.iter().map(name).collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(id: &str, html: &str) -> Panel {
        Panel { id: id.to_owned(), room: "learning", html: html.to_owned() }
    }

    #[test]
    fn an_update_has_what_has_changed_and_the_order_of_all() {
        let panels = Arc::new(vec![panel("a", "1"), panel("b", "3"), panel("c", "4")]);
        let version = Version { panels, title: "t".to_owned() };
        let update: serde_json::Value =
            serde_json::from_str(&version.update_of(&[panel("a", "1"), panel("b", "2"), panel("d", "5")]))
                .expect("JSON");
        let changed: Vec<&str> = update["changed"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|panel| panel["id"].as_str().expect("a name"))
            .collect();
        assert_eq!((changed, &update["order"]), (vec!["b", "c"], &json!(["a", "b", "c"])));
    }

    #[test]
    fn runs_that_come_later_are_found_and_keep_their_order() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let given = [folder.path().to_owned()];
        assert!(Followed::find(&given).is_err(), "there is no run");
        let begin = |name: &str| {
            std::fs::create_dir_all(folder.path().join(name)).expect("created");
            std::fs::write(folder.path().join(name).join(".lock"), "").expect("written");
        };
        begin("b");
        let mut followed = Followed::find(&given).expect("a run that has begun");
        assert!(!followed.search().expect("found"));
        begin("a");
        assert!(followed.search().expect("found"));
        let names: Vec<_> =
            followed.runs.iter().map(|run| run.folder().file_name().expect("a name")).collect();
        assert_eq!(names, ["a", "b"]);
        (0..20).for_each(|i| begin(&format!("c{i}")));
        followed.search().expect("found");
        assert_eq!((followed.runs.len(), followed.num_left_out), (MOST_RUNS, 22 - MOST_RUNS));
    }

    #[test]
    fn a_folder_that_is_deleted_hides_no_other() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let given = ["a", "b"].map(|name| folder.path().join(name));
        for path in &given {
            std::fs::create_dir_all(path).expect("created");
            std::fs::write(path.join(".lock"), "").expect("written");
        }
        let mut followed = Followed::find(&given).expect("two runs");
        std::fs::remove_dir_all(&given[1]).expect("deleted");
        assert!(followed.search().expect("found"));
        assert_eq!(followed.runs.iter().map(RunHistory::folder).collect::<Vec<_>>(), [&given[0]]);
        assert!(Followed::find(&given).is_err(), "what is missing at first is told");
    }
}
