//! Folder of a thread, in memory where the system has a file system there.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

thread_local! {
    static FOLDER: TempDir = make();
}

fn make() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = match memory.is_dir() {
        true => tempfile::tempdir_in(memory).or_else(|_| tempfile::tempdir()),
        false => tempfile::tempdir(),
    };
    made.expect("a temporary folder")
}

/// Returns a folder of this thread and this name, which is made once.
pub(crate) fn folder(name: &str) -> PathBuf {
    let path = FOLDER.with(|folder| folder.path().join(name));
    std::fs::create_dir_all(&path).expect("a folder below a temporary one");
    path
}

/// Writes a file into the folder `name` of this thread, and returns the folder.
pub(crate) fn with_file(name: &str, file: &str, bytes: &[u8]) -> PathBuf {
    let folder = folder(name);
    std::fs::write(folder.join(file), bytes).expect("a file in a temporary folder");
    folder
}
