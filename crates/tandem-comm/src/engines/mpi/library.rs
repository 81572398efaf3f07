//! Search for an MPI library that belongs to the launcher.

use std::ffi::c_int;
use std::path::{Path, PathBuf};

use tandem_dlopen::{Found, Library, functions, text};

use super::abi::{Abi, Constants};
use super::raw::{MAX_TEXT, MpiFunctions, SUCCESS};
use crate::launch::Environment;
use crate::launch::mpi::MpiLauncher;

/// Variable that names the library's file.
pub const PATH: &str = "TANDEM_MPI_LIBRARY";
const STANDARD: &str = "libmpi_abi.so.1";
const MPICH: &str = "libmpi.so.12";
const OPEN_MPI: &str = "libmpi.so.40";
/// Sources of an MPI.
const PACKAGES: &str =
    "an MPI comes with the cluster (`module load`), as PyPI's mpich or impi-rt, or as Debian's openmpi-bin";
/// Number of a process's ancestors among which the launcher is looked for: wrappers stand between.
const MAX_ANCESTORS: usize = 6;

functions! {
    struct AbiFunctions { version = c"MPI_Abi_get_version" (*mut c_int, *mut c_int) -> c_int; }
}

/// An open MPI library, not yet initialised.
pub(super) struct MpiLibrary {
    pub(super) functions: MpiFunctions,
    pub(super) constants: Constants,
    pub(super) found: Found,
    pub(super) abi: Abi,
    pub(super) library: Library,
    /// Whether ranks may be in different collectives until they find out: a message that is longer than its
    /// receive is an error and no more. Open MPI may fetch the whole message and overwrite what lies behind
    /// the receive, and Intel MPI ends the process.
    pub(super) bears_differences: bool,
}

/// Names and folders of libraries, in the order in which they are tried.
#[derive(Debug)]
struct Search {
    /// File that the environment names; nothing else is then tried.
    named: Option<String>,
    names: &'static [&'static str],
    /// Folders before the loader's.
    first: Vec<PathBuf>,
    /// Folders after the loader's.
    last: Vec<PathBuf>,
}

impl MpiLibrary {
    /// Opens the library for a launcher.
    pub(super) fn find(launcher: MpiLauncher, environment: &Environment) -> Result<Self, String> {
        let library = Search::new(launcher, environment, &ancestors()).open()?;
        Self::load(library)
    }

    fn load(library: Library) -> Result<Self, String> {
        if cfg!(not(all(target_endian = "little", target_pointer_width = "64"))) {
            return Err("MPI is supported on 64-bit little-endian machines alone".to_owned());
        }
        let abi = abi(&library)?;
        let is_none = |why: String| format!("{} is no MPI 3 library: {why}; {PACKAGES}", library.name());
        let functions = MpiFunctions::load(&library).map_err(is_none)?;
        let constants = Constants::new(abi, &library).map_err(is_none)?;
        let mut words = vec![0; MAX_TEXT];
        let mut len = 0;
        // SAFETY: the function may be called before MPI_Init; there is room for the longest text.
        let outcome = unsafe { (functions.library_version)(words.as_mut_ptr(), &raw mut len) };
        let words = if outcome == SUCCESS {
            // SAFETY: MPI has written a text that ends in zero; before, all was zero.
            unsafe { text(words.as_ptr()) }
        } else {
            String::new()
        };
        let bears_differences = words.starts_with("MPICH Version");
        let version = format!("{}, {abi}", short(&words));
        let found = library.found(version, c"MPI_Init_thread");
        Ok(Self { functions, constants, found, abi, library, bears_differences })
    }
}

/// Shortens the text of `MPI_Get_library_version`: MPICH's has a page, whose first line is enough.
fn short(words: &str) -> String {
    let line = words.lines().find(|line| !line.trim().is_empty()).unwrap_or("an MPI without a version");
    let words: Vec<&str> = line.split(',').next().unwrap_or(line).split_whitespace().collect();
    words.join(" ").replace("Version:", "").split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the ABI of a library.
fn abi(library: &Library) -> Result<Abi, String> {
    let file = library.file_of(c"MPI_Init_thread").unwrap_or_else(|| PathBuf::from(library.name()));
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let file = file.canonicalize().unwrap_or(file);
    // An MPICH or Open MPI with several ABIs has a library for each, and symbols do not tell which.
    if name(&file).starts_with("libmpi_abi.") || name(Path::new(library.name())).starts_with("libmpi_abi.") {
        let (mut major, mut minor) = (-1, -1);
        let functions = AbiFunctions::load(library)
            .map_err(|why| format!("{} is not of the MPI 5 standard ABI: {why}", library.name()))?;
        // SAFETY: MPI may be asked before it is initialised, and writes both numbers.
        unsafe { (functions.version)(&raw mut major, &raw mut minor) };
        return match major {
            1 => Ok(Abi::Standard),
            _ => Err(format!(
                "{} has version {major}.{minor} of MPI's standard ABI, and 1.x is supported; {PATH} names another",
                library.name()
            )),
        };
    }
    Ok(match library.symbol(super::abi::OPEN_MPI_SYMBOLS[0]) {
        Ok(_) => Abi::OpenMpi,
        Err(_) => Abi::Mpich,
    })
}

impl Search {
    fn new(launcher: MpiLauncher, environment: &Environment, ancestors: &[PathBuf]) -> Self {
        let given = |name: &str| environment.get(name).filter(|value| !value.is_empty());
        // A launcher's own library first: another one would not find the other ranks.
        let names: &[&str] = match launcher {
            MpiLauncher::OpenMpi => &[OPEN_MPI, STANDARD, MPICH],
            // Open MPI speaks PMIx; under `srun --mpi=pmi2` its MPI_Init ends the process.
            MpiLauncher::Pmi => &[STANDARD, MPICH],
            MpiLauncher::Pmix => &[STANDARD, OPEN_MPI, MPICH],
        };
        // The launcher's installation: bin/mpiexec or bin/hydra_pmi_proxy beside lib.
        let of_launcher = ancestors.iter().filter_map(|program| program.parent()?.parent());
        let first = of_launcher.flat_map(|prefix| [prefix.join("lib"), prefix.join("lib64")]).collect();
        let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(given);
        let last = environments.map(|prefix| Path::new(prefix).join("lib")).collect();
        Self { named: given(PATH).cloned(), names, first, last }
    }

    /// Opens the first library that is there.
    fn open(&self) -> Result<Library, String> {
        if let Some(path) = &self.named {
            return Library::open_global(path).map_err(|why| {
                format!("{PATH} names {path}, which cannot be opened as an MPI ({why}); {PACKAGES}")
            });
        }
        let mut reasons = Vec::new();
        let mut there = |folders: &[PathBuf], names: &[&str]| {
            let paths = folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
            paths.filter(|path| path.exists()).find_map(|path| {
                Library::open_global(&path.to_string_lossy()).map_err(|why| reasons.push(why)).ok()
            })
        };
        if let Some(library) = there(&self.first, self.names) {
            return Ok(library);
        }
        let mut unknown = Vec::new();
        // An environment's library of the launcher's ABI comes before the system's of another.
        for name in self.names {
            match Library::open_global(name) {
                Ok(library) => return Ok(library),
                Err(why) => unknown.push(why),
            }
            if let Some(library) = there(&self.last, &[name]) {
                return Ok(library);
            }
        }
        let folders: Vec<_> =
            self.first.iter().chain(&self.last).map(|path| path.display().to_string()).collect();
        let places =
            if folders.is_empty() { String::new() } else { format!(" or in {}", folders.join(", ")) };
        reasons.extend(unknown);
        Err(format!(
            "no MPI library was found: none of {} with the loader{places} ({}); {PACKAGES}; {PATH}=/path/to/{STANDARD} \
             names its place",
            self.names.join(", "),
            reasons.join("; ")
        ))
    }
}

/// Returns the programs of this process's ancestors, the nearest first.
fn ancestors() -> Vec<PathBuf> {
    let mut process = "self".to_owned();
    let mut programs = Vec::new();
    for _ in 0..MAX_ANCESTORS {
        let Some(parent) = parent(&process) else { break };
        // A process of another user hides its program; its own parent may be seen.
        programs.extend(std::fs::read_link(format!("/proc/{parent}/exe")).ok());
        process = parent;
    }
    programs
}

/// Returns the parent's number of a process, unless it is the first.
fn parent(process: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim();
    (parent != "0").then(|| parent.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(pairs: &[(&str, &str)]) -> Environment {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn every_name_and_place_that_was_tried_is_named() {
        let folder = std::env::temp_dir().join(format!("tandem-mpi-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("lib")).unwrap();
        // A file that is there and is no library is named with the loader's reason.
        std::fs::write(folder.join("lib/libmpi.so.12"), "no library").unwrap();
        let search = Search {
            names: &["libmpi.so.12", "libtandem-has-none.so.7", "libtandem-has-none.so.8"],
            ..Search::new(
                MpiLauncher::Pmi,
                &environment(&[("VIRTUAL_ENV", "/a/venv")]),
                &[folder.join("bin/mpiexec")],
            )
        };
        let found = search.open();
        std::fs::remove_dir_all(&folder).unwrap();
        let Err(error) = found else {
            // This machine's loader knows an MPICH.
            return assert_eq!(found.unwrap().name(), "libmpi.so.12");
        };
        for text in [
            "libtandem-has-none.so.7",
            "libtandem-has-none.so.8",
            "lib/libmpi.so.12: ",
            "/a/venv/lib",
            "TANDEM_MPI_LIBRARY=",
        ] {
            assert!(error.contains(text), "no {text:?} in: {error}");
        }
    }

    #[test]
    fn an_environments_library_comes_before_the_systems_of_a_later_name() {
        let prefix = std::env::temp_dir().join(format!("tandem-mpi-environment-{}", std::process::id()));
        std::fs::create_dir_all(prefix.join("lib")).unwrap();
        // Any library will do, under a name that the loader does not know.
        let name = "libtandem-of-environment.so.1";
        let libm =
            ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/libm.so.6", "/lib/aarch64-linux-gnu/libm.so.6"];
        let Some(libm) = libm.iter().find(|path| Path::new(path).exists()) else { return };
        std::os::unix::fs::symlink(libm, prefix.join("lib").join(name)).unwrap();
        let variables = environment(&[("VIRTUAL_ENV", &prefix.to_string_lossy())]);
        let names = &["libtandem-of-environment.so.1", "libc.so.6"];
        let found = Search { names, ..Search::new(MpiLauncher::Pmi, &variables, &[]) }.open();
        std::fs::remove_dir_all(&prefix).unwrap();
        assert!(found.unwrap().name().ends_with(name));
    }

    #[test]
    fn a_named_library_is_the_only_one_tried() {
        let named = environment(&[(PATH, "/nowhere/libmpi.so.12")]);
        let error = MpiLibrary::find(MpiLauncher::OpenMpi, &named).err().unwrap();
        assert!(error.starts_with("TANDEM_MPI_LIBRARY names /nowhere/libmpi.so.12"), "{error}");
        let named = environment(&[(PATH, "libc.so.6")]);
        let error = MpiLibrary::find(MpiLauncher::OpenMpi, &named).err().unwrap();
        assert!(
            error.starts_with("libc.so.6 is no MPI 3 library: libc.so.6 has no MPI_Init_thread"),
            "{error}"
        );
    }

    #[test]
    fn the_launchers_own_library_comes_first() {
        let first = |launcher| Search::new(launcher, &Environment::new(), &[]).names[0];
        assert_eq!(first(MpiLauncher::OpenMpi), OPEN_MPI);
        assert_eq!((first(MpiLauncher::Pmi), first(MpiLauncher::Pmix)), (STANDARD, STANDARD));
        let of_pmi = Search::new(MpiLauncher::Pmi, &Environment::new(), &[]).names;
        assert!(!of_pmi.contains(&OPEN_MPI), "Open MPI finds no other rank by PMI");
        let of_launcher =
            Search::new(MpiLauncher::Pmi, &Environment::new(), &["/opt/m/bin/hydra_pmi_proxy".into()]);
        assert_eq!(of_launcher.first, [PathBuf::from("/opt/m/lib"), "/opt/m/lib64".into()]);
    }

    #[test]
    fn a_process_has_ancestors() {
        let parent = parent("self").unwrap();
        assert_eq!(parent, std::os::unix::process::parent_id().to_string());
        assert!(!ancestors().is_empty());
    }

    #[test]
    fn versions_are_short() {
        assert_eq!(short("MPICH Version:      5.0.2\nMPICH Release date: x"), "MPICH 5.0.2");
        assert_eq!(short("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4"), "Open MPI v4.1.4");
        assert_eq!(short(""), "an MPI without a version");
    }
}
