//! Directories with NVIDIA's libraries unknown to the loader: from the environment, a toolkit, or
//! Python packages.

use std::path::{Path, PathBuf};

use crate::Library;

/// Environment variable of directories to search first, separated by colons.
pub const FOLDERS: &str = "TANDEM_CUDA_LIBRARIES";

/// Search path: the first directories, the loader, the last directories.
#[derive(Clone, Debug, Default)]
pub struct Folders {
    /// Directories named by the user.
    pub first: Vec<PathBuf>,
    /// Usual directories of toolkits and packages.
    pub last: Vec<PathBuf>,
}

impl Folders {
    /// Reads the environment and lists the usual directories.
    pub fn from_environment() -> Self {
        let folders = |name| std::env::var_os(name).map(|list| std::env::split_paths(&list).collect());
        let given = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let first: Vec<PathBuf> = folders(FOLDERS).unwrap_or_default();
        let first = first.into_iter().filter(|folder| !folder.as_os_str().is_empty()).collect();
        let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(given);
        let mut last: Vec<PathBuf> =
            toolkits.chain(["/usr/local/cuda".into()]).map(|home| home.join("lib64")).collect();
        let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(given);
        let home = given("HOME").map(|home| home.join(".local"));
        let prefixes = environments.chain(home).chain(["/usr/local".into(), "/usr".into()]);
        for prefix in prefixes {
            last.extend(python_folders(&prefix.join("lib")));
            last.push(prefix.join("lib"));
        }
        Self { first, last }
    }

    /// Opens the first of these names found in one place before trying the next place.
    ///
    /// # Errors
    /// Why existing files cannot be opened, and the loader's message for the first name.
    pub fn open(&self, names: &[&str]) -> Result<Library, String> {
        let mut reasons = Vec::new();
        let mut there = |folders: &[PathBuf]| {
            let paths = folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
            paths.filter(|path| path.exists()).find_map(|path| {
                let path = path.to_string_lossy().into_owned();
                Library::open(&path).map_err(|why| reasons.push(why)).ok()
            })
        };
        if let Some(library) = there(&self.first) {
            return Ok(library);
        }
        let mut unknown = Vec::new();
        let known = names.iter().find_map(|name| Library::open(name).map_err(|why| unknown.push(why)).ok());
        if let Some(library) = known.or_else(|| there(&self.last)) {
            return Ok(library);
        }
        Err(reasons.into_iter().chain(unknown.into_iter().take(1)).collect::<Vec<_>>().join("; "))
    }
}

/// Lists the directories of NVIDIA's PyPI packages of each Python below a `lib` directory.
fn python_folders(lib: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(lib) else { return Vec::new() };
    let is_python = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("python3");
    let mut pythons: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().filter(|entry| is_python(&entry.file_name())))
        .map(|entry| entry.path())
        .collect();
    pythons.sort();
    let packages =
        pythons.iter().flat_map(|python| ["site-packages", "dist-packages"].map(|p| python.join(p)));
    let folders = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cublas/lib", "nvidia/nccl/lib"];
    packages.flat_map(|package| folders.map(|folder| package.join(folder))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_of_every_python_are_looked_into() {
        let folder = tempfile::tempdir().unwrap();
        let lib = folder.path().join("lib");
        for name in ["python3.11", "python3.9", "perl5"] {
            std::fs::create_dir_all(lib.join(name)).unwrap();
        }
        let found = python_folders(&lib);
        std::fs::remove_dir_all(&lib).unwrap();
        assert_eq!(found.len(), 2 * 2 * 4);
        assert!(found.contains(&lib.join("python3.9/dist-packages/nvidia/nccl/lib")), "{found:?}");
        assert!(python_folders(&lib).is_empty());
    }
}
