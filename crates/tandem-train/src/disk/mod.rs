//! File operations of crash-safe writes, as a trait so that tests can make any of them fail.

#[cfg(test)]
pub(crate) mod failing;

use std::fmt::Debug;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Result, TrainError};

/// A file system. Several threads use it.
pub(crate) trait Disk: Debug + Send + Sync {
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Creates a file that is not there yet.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Renames; a file at `to` is replaced, a folder must be empty.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Makes renames and creations within a folder durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Removes a folder with everything in it.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
}

/// A file being written.
pub(crate) trait DiskFile: Write {
    /// Makes the content durable.
    fn sync(&mut self) -> io::Result<()>;
}

/// The real one.
#[derive(Debug)]
pub(crate) struct RealDisk;

impl Disk for RealDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(File::create_new(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }
}

/// Most links that lead to a file, one after the other.
const MOST_LINKS: usize = 40;

/// Writes a file that a user has named, so that a reader sees the old content or the new one. Where the name
/// is a link, its target is written.
///
/// # Errors
/// Something is there that is no regular file, a file cannot be created beside it, or not be renamed; the
/// error names the path.
pub fn replace_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut target = path.to_path_buf();
    for _ in 0..MOST_LINKS {
        let Ok(link) = fs::read_link(&target) else { break };
        target = target.parent().unwrap_or(Path::new("")).join(link);
    }
    match fs::metadata(&target) {
        Ok(facts) if !facts.is_file() => {
            let reason = "no regular file is there: expected a new name or a file to replace";
            return Err(TrainError::io("write", path)(io::Error::new(ErrorKind::InvalidInput, reason)));
        }
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(TrainError::io("write", path)(error));
        }
        _ => {}
    }
    let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (temporary, mut file) = new_file_beside(&target, &name).map_err(TrainError::io("write", path))?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    let replaced = written.and_then(|()| fs::rename(&temporary, &target));
    if replaced.is_err() {
        // The error that is reported came first.
        let _ = fs::remove_file(&temporary);
    }
    replaced.map_err(TrainError::io("write", path))
}

/// Creates a hidden file in the folder of `target`, under a name that nothing has.
fn new_file_beside(target: &Path, name: &str) -> io::Result<(PathBuf, File)> {
    for number in 0u32.. {
        let path = target.with_file_name(format!(".{name}.writing-{}-{number}", std::process::id()));
        match File::create_new(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            created => return created.map(|file| (path, file)),
        }
    }
    unreachable!("a name is free")
}

/// Time for a file to appear on the other machines of a shared file system.
const VISIBLE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);

/// Waits until what another machine has written is here, for 10 s at most; returns whether it is.
pub(crate) fn appears(is_here: impl Fn() -> bool) -> bool {
    let until = Instant::now() + VISIBLE;
    loop {
        if is_here() {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Removes an empty folder. One with files and a link to a folder stay.
///
/// # Errors
/// The folder cannot be removed for another reason; the error names it.
pub(crate) fn remove_if_empty(folder: &Path) -> Result<()> {
    const WELL: [ErrorKind; 3] =
        [ErrorKind::NotFound, ErrorKind::DirectoryNotEmpty, ErrorKind::NotADirectory];
    match fs::remove_dir(folder) {
        Err(error) if !WELL.contains(&error.kind()) => Err(TrainError::io("remove", folder)(error)),
        _ => Ok(()),
    }
}

/// Writes a file of a run's folder so that a reader sees the old content or the new one.
///
/// # Errors
/// A file `PATH.tmp` cannot be written beside it, or not be renamed; the error names the path.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    let temporary = PathBuf::from(temporary);
    let mut file = File::create(&temporary).map_err(TrainError::io("create", &temporary))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(TrainError::io("write", &temporary))?;
    fs::rename(&temporary, path).map_err(TrainError::io("rename to", path))
}

impl DiskFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_link_stays_and_its_target_is_written() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (file, link) = (folder.path().join("a.html"), folder.path().join("link"));
        symlink("a.html", &link).expect("a link");
        // First it leads nowhere.
        for text in ["first", "second"] {
            replace_file(&link, text.as_bytes()).expect("written");
            assert!(link.is_symlink() && !file.is_symlink());
            assert_eq!(fs::read_to_string(&file).expect("a file"), text);
        }
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 2, "a temporary file is left");
    }

    #[test]
    fn a_users_other_files_stay() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let [file, theirs] = ["a.html", "a.html.tmp"].map(|name| folder.path().join(name));
        fs::write(&theirs, "mine").expect("written");
        replace_file(&file, b"ours").expect("written");
        assert_eq!(fs::read_to_string(&theirs).expect("a file"), "mine");
    }

    #[test]
    fn what_is_no_regular_file_is_refused_and_stays() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let socket = folder.path().join("socket");
        let _listener = UnixListener::bind(&socket).expect("a socket");
        symlink(&socket, folder.path().join("link")).expect("a link");
        for path in [socket.clone(), folder.path().join("link"), folder.path().to_owned()] {
            let error = replace_file(&path, b"ours").expect_err("no regular file");
            assert!(crate::chain(&error).contains("no regular file"), "{error}");
            assert_eq!(error.exit_code(), 2);
        }
        assert!(!fs::metadata(&socket).expect("a socket").is_file());
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 2);
    }
}
