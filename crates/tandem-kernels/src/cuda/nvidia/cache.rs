//! Disk cache of compiled kernels and of chosen algorithms: a machine compiles a file once per compiler
//! and kind of GPU, and times a GEMM once per library and kind of GPU.
//!
//! A file that is unreadable or damaged is made anew; a cache never causes a failure.

use std::ffi::OsString;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::compiler::Compiler;
use crate::cuda::HEADERS;
use crate::cuda::autotune::CANDIDATES;
use crate::cuda::driver::{Algorithm, MatmulChoice, Source};

/// Start of a cache file, before the checksum of the rest.
const MAGIC: &[u8; 8] = b"tandemk1";

/// Directory of compiled kernels and chosen algorithms, if there is one.
#[derive(Clone)]
pub(super) struct Cache {
    folder: Option<PathBuf>,
}

/// Everything that a compiled file depends on.
#[derive(Clone, Copy)]
pub(super) struct Key(blake3::Hash);

impl Key {
    pub(super) fn new(source: &Source, target: &str, compiler: (u32, u32)) -> Self {
        let mut hasher = blake3::Hasher::new();
        let mut add = |part: &str| {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        };
        add(&format!("NVRTC {}.{}", compiler.0, compiler.1));
        Compiler::options(source, target).iter().for_each(|option| add(option));
        for file in std::iter::once(source).chain(HEADERS) {
            add(file.name);
            add(file.text);
        }
        Self(hasher.finalize())
    }
}

impl Cache {
    /// Uses `TANDEM_CACHE`, else the user's cache directory.
    pub(super) fn from_environment() -> Self {
        Self { folder: folder(|name| std::env::var_os(name).filter(|value| !value.is_empty())) }
    }

    /// Uses a given directory.
    #[cfg(test)]
    pub(super) fn at(folder: &Path) -> Self {
        Self { folder: Some(folder.to_owned()) }
    }

    /// Disables the cache.
    #[cfg(test)]
    pub(super) fn none() -> Self {
        Self { folder: None }
    }

    fn path(&self, source: &Source, key: Key) -> Option<PathBuf> {
        let stem = source.name.strip_suffix(".cu").unwrap_or(source.name);
        Some(self.folder.as_ref()?.join(format!("{stem}-{}", &key.0.to_hex()[..32])))
    }

    /// Returns the intact image of a key.
    pub(super) fn get(&self, source: &Source, key: Key) -> Option<Vec<u8>> {
        read(&self.path(source, key)?)
    }

    /// Stores an image, if possible.
    pub(super) fn put(&self, source: &Source, key: Key, image: &[u8]) {
        let Some(path) = self.path(source, key) else { return };
        let _ = write(&path, image, |temporary| fs::rename(temporary, &path));
    }

    /// Path of the algorithm of a shape, on this kind of GPU and library.
    fn path_of_algorithm(&self, kind: &str, shape: &str) -> Option<PathBuf> {
        let key = blake3::hash(format!("{kind}\n{shape}\nbest of {CANDIDATES}").as_bytes());
        Some(self.folder.as_ref()?.join(format!("matmul-{}", &key.to_hex()[..32])))
    }

    /// Returns the algorithm that was kept for a shape.
    pub(super) fn algorithm(&self, kind: &str, shape: &str) -> Option<Algorithm> {
        let text = String::from_utf8(read(&self.path_of_algorithm(kind, shape)?)?).ok()?;
        // The rest of the file says to a reader what it is for.
        text.lines().next()?.parse().ok()
    }

    /// Keeps the algorithm of a shape, and returns it; or that of a process which was first, so that both
    /// go on with the same. `None` if nothing can be written.
    pub(super) fn keep_algorithm(&self, kind: &str, choice: &MatmulChoice) -> Option<Algorithm> {
        let MatmulChoice { shape, algorithm } = choice;
        let path = self.path_of_algorithm(kind, shape)?;
        let text = format!("{algorithm}\n{kind}\n{shape}\n");
        let publish = |temporary: &Path| {
            // Unlike a rename, a link replaces nothing.
            if fs::hard_link(temporary, &path).is_ok() {
                return fs::remove_file(temporary);
            }
            match self.algorithm(kind, shape) {
                Some(_) => fs::remove_file(temporary),
                // Damaged, or a file system without links.
                None => fs::rename(temporary, &path),
            }
        };
        write(&path, text.as_bytes(), publish).ok()?;
        self.algorithm(kind, shape)
    }
}

/// Returns the content of an intact file.
fn read(path: &Path) -> Option<Vec<u8>> {
    let file = fs::read(path).ok()?;
    let (checksum, content) = file.strip_prefix(MAGIC)?.split_first_chunk::<32>()?;
    (blake3::hash(content) == *checksum).then(|| content.to_vec())
}

/// Writes a temporary file and publishes it: other processes may read or write the same file.
fn write(path: &Path, image: &[u8], publish: impl Fn(&Path) -> std::io::Result<()>) -> std::io::Result<()> {
    // Containers that share a cache have processes of one number.
    let own = RandomState::new().hash_one(std::process::id());
    let temporary = path.with_extension(format!("{own:016x}.tmp"));
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let written = || {
        let mut file = fs::File::create(&temporary)?;
        file.write_all(MAGIC)?;
        file.write_all(blake3::hash(image).as_bytes())?;
        file.write_all(image)?;
        drop(file);
        publish(&temporary)
    };
    written().inspect_err(|_| {
        let _ = fs::remove_file(&temporary);
    })
}

fn folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if let Some(own) = variable("TANDEM_CACHE") {
        return Some(Path::new(&own).join("kernels"));
    }
    let user = variable("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| variable("HOME").map(|home| Path::new(&home).join(".cache")));
    user.map(|user| user.join("tandem/kernels"))
}

#[cfg(test)]
mod tests {
    use super::*;

    static SOURCE: Source = Source { name: "sum.cu", text: "a text", fused: true, only: None };

    fn in_temporary_folder<T>(name: &str, act: impl FnOnce(&Path) -> T) -> T {
        act(&tempfile::tempdir().unwrap().path().join(name))
    }

    #[test]
    fn what_is_kept_is_found_again_under_its_key_alone() {
        in_temporary_folder("cache-keys", |folder| {
            let (cache, key) = (Cache::at(folder), Key::new(&SOURCE, "sm_80", (12, 9)));
            assert!(cache.get(&SOURCE, key).is_none());
            cache.put(&SOURCE, key, b"code");
            assert_eq!(cache.get(&SOURCE, key).unwrap(), b"code");
            let other_text = Source { text: "another text", ..SOURCE };
            let other_rounding = Source { fused: false, ..SOURCE };
            for key in [
                Key::new(&SOURCE, "sm_86", (12, 9)),
                Key::new(&SOURCE, "sm_80", (13, 0)),
                Key::new(&other_text, "sm_80", (12, 9)),
                Key::new(&other_rounding, "sm_80", (12, 9)),
            ] {
                assert!(cache.get(&SOURCE, key).is_none());
            }
            let left = fs::read_dir(folder).unwrap().count();
            assert_eq!(left, 1, "nothing but the file stays");
        });
    }

    #[test]
    fn damage_is_noticed_and_mended() {
        in_temporary_folder("cache-damage", |folder| {
            let (cache, key) = (Cache::at(folder), Key::new(&SOURCE, "sm_80", (12, 9)));
            cache.put(&SOURCE, key, b"code of a kernel");
            let path = cache.path(&SOURCE, key).unwrap();
            let whole = fs::read(&path).unwrap();
            let mut changed = whole.clone();
            *changed.last_mut().unwrap() ^= 1;
            for damaged in [&whole[..whole.len() - 1], &whole[..9], b"", &changed] {
                fs::write(&path, damaged).unwrap();
                assert!(cache.get(&SOURCE, key).is_none(), "{} bytes", damaged.len());
            }
            cache.put(&SOURCE, key, b"code of a kernel");
            assert_eq!(cache.get(&SOURCE, key).unwrap(), b"code of a kernel");
        });
    }

    #[test]
    fn a_place_that_cannot_be_written_is_no_error() {
        in_temporary_folder("cache-place", |folder| {
            fs::write(folder, "a file where the folder would be").unwrap();
            let (cache, key) = (Cache::at(folder), Key::new(&SOURCE, "sm_80", (12, 9)));
            cache.put(&SOURCE, key, b"code");
            assert!(cache.get(&SOURCE, key).is_none());
            fs::remove_file(folder).unwrap();
        });
        let nowhere = Cache::none();
        let key = Key::new(&SOURCE, "sm_80", (12, 9));
        nowhere.put(&SOURCE, key, b"code");
        assert!(nowhere.get(&SOURCE, key).is_none());
    }

    #[test]
    fn the_environment_says_where() {
        let with = |known: &'static [(&'static str, &'static str)]| {
            folder(move |name| known.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()))
        };
        let all = &[("HOME", "/home/a"), ("XDG_CACHE_HOME", "/cache"), ("TANDEM_CACHE", "/own")];
        assert_eq!(with(all), Some("/own/kernels".into()));
        assert_eq!(with(&all[..2]), Some("/cache/tandem/kernels".into()));
        assert_eq!(with(&all[..1]), Some("/home/a/.cache/tandem/kernels".into()));
        assert_eq!(with(&[]), None);
    }
}
