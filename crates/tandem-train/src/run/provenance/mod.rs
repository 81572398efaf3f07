//! Provenance of a run, `provenance.json`: program, arithmetic, config and inputs by hash.
//!
//! A run has one entry for its start and one for each resumption with another program, arithmetic, config or
//! input. Files of weights and rows are hashed on a thread while training goes on.

mod files;

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};

use serde::{Deserialize, Serialize};
use tandem_comm::ProcessGroup;
use tandem_kernels::cuda;
use tandem_kernels::cuda::driver::{Algorithm, MatmulChoice};
use tandem_kernels::{DType, Device};

pub(super) use files::{InputFile, different_files, hashes_in_words, input_files, is_place, weight_files};

use crate::config::{AttentionKernels, Config, RESOLVED_HEADER};
use crate::disk::replace;
use crate::inputs::RunInputs;
use crate::placement::MemoryPlacement;
use crate::{Result, TrainError};

/// Name in the run folder.
pub(super) const PROVENANCE: &str = "provenance.json";
/// Version of the written layout.
const FORMAT: u32 = 1;
/// Bytes read at once.
const BUFFER: usize = 1 << 20;
/// Longest name of an arithmetic that ranks exchange, in bytes.
const NAME: usize = 192;

/// `provenance.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Provenance {
    format: u32,
    /// The start and the resumptions that changed something, in the order of their steps.
    pub starts: Vec<Start>,
}

/// A start of the run, from the beginning or from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Steps done before it.
    pub step: u64,
    /// Program.
    pub program: Program,
    /// Arithmetic of the devices, [`Device::arithmetic`]: one, unless ranks had different ones.
    pub arithmetic: Vec<String>,
    /// Algorithms of matmuls on GPUs that were chosen by timing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub matmuls: Vec<MatmulRecord>,
    /// Type of matmuls and activations.
    pub dtype: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Resolved config.
    pub config: ConfigRecord,
    /// Hashes of the tokenizer and of the tokens of each split.
    pub tokens: Vec<HashedInput>,
    /// Files of weights and rows; `None` if the run ended before they were read.
    pub files: Option<Vec<HashedInput>>,
}

/// Algorithm of the matmuls of a rounded shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MatmulRecord {
    /// Size, types, strides and alignments.
    pub shape: String,
    /// cuBLASLt's description of the algorithm.
    #[serde(with = "algorithm")]
    pub algorithm: Algorithm,
}

/// An algorithm as text.
mod algorithm {
    use serde::de::{Deserialize, Deserializer, Error};
    use serde::ser::Serializer;

    use super::Algorithm;

    pub(super) fn serialize<S: Serializer>(algorithm: &Algorithm, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(algorithm)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Algorithm, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// Program of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Version of Tandem.
    pub version: String,
    /// BLAKE3 hash of the executable; `None` where the system does not tell its file.
    pub executable: Option<String>,
    /// BLAKE3 hash of the system's mathematical library; `None` where the executable contains it.
    #[serde(default)]
    pub math_library: Option<String>,
}

/// Config of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigRecord {
    /// BLAKE3 hash of the keys that change the bits of a run, without paths.
    pub blake3: String,
    /// The resolved config.
    pub text: String,
}

/// Something that a run has read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashedInput {
    /// Key of the config, or `tokenizer`.
    pub name: String,
    /// Name of the file; empty for tokens.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub file: String,
    /// BLAKE3 hash of the content.
    pub blake3: String,
}

impl Program {
    /// Returns this program, whose files are hashed once per process.
    pub(super) fn current() -> Self {
        static CURRENT: OnceLock<Program> = OnceLock::new();
        let hash = |path: PathBuf| hash_file(&path, &AtomicBool::new(false)).ok().flatten();
        let hashed = || {
            // The file may have been replaced since the program was started.
            let own = Path::new("/proc/self/exe");
            let path = if own.exists() { Some(own.to_owned()) } else { std::env::current_exe().ok() };
            let (executable, math_library) = (path.and_then(hash), math_library().and_then(hash));
            Self { executable, math_library, ..Self::unhashed() }
        };
        CURRENT.get_or_init(hashed).clone()
    }

    /// Returns this program without hashes, which take a moment.
    fn unhashed() -> Self {
        Self { version: env!("CARGO_PKG_VERSION").to_owned(), executable: None, math_library: None }
    }
}

/// Returns the file of the system's mathematical library, whose `exp` and `ln` losses use.
fn math_library() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).map(PathBuf::from);
    let is_wanted = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libm.so") || name.starts_with("libm-")
    };
    paths.into_iter().find(is_wanted)
}

impl ConfigRecord {
    fn new(config: &Config) -> Self {
        Self { blake3: config_hash(config), text: config.to_toml() }
    }

    /// Returns the text as a file that [`Config::load`] reads.
    pub fn file_text(&self) -> String {
        format!("{RESOLVED_HEADER}{}", self.text)
    }
}

/// Returns a hash of the keys that change the bits of a run. Paths are left out: the content of files has
/// hashes of its own.
pub(super) fn config_hash(config: &Config) -> String {
    let mut hasher = blake3::Hasher::new();
    for (key, value) in config.altering_entries().iter().filter(|(key, _)| !is_place(config, key)) {
        for text in [key, value] {
            hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
        }
    }
    hasher.finalize().to_hex().to_string()
}

impl Start {
    /// Creates the record of a start after `step` steps, without the hashes of files. Collective.
    pub(super) fn new(
        config: &Config,
        prepared: &RunInputs,
        placement: &MemoryPlacement,
        step: u64,
        group: &mut ProcessGroup,
    ) -> Result<Self> {
        let record =
            |choice: &MatmulChoice| MatmulRecord { shape: choice.shape.clone(), algorithm: choice.algorithm };
        Ok(Self {
            step,
            program: Program::unhashed(),
            arithmetic: arithmetic_of_all(&placement.device, group)?,
            matmuls: placement.matmuls.iter().map(record).collect(),
            dtype: dtype_name(config.compute.compute_type()).to_owned(),
            ranks: group.size(),
            config: ConfigRecord::new(config),
            tokens: token_hashes(prepared),
            files: None,
        })
    }

    /// Returns the type of matmuls and activations, if this version knows it.
    pub(super) fn dtype(&self) -> Option<DType> {
        [DType::F32, DType::Bf16].into_iter().find(|dtype| dtype_name(*dtype) == self.dtype)
    }

    /// Returns the algorithms of matmuls.
    pub(super) fn matmul_choices(&self) -> Vec<MatmulChoice> {
        let choice =
            |record: &MatmulRecord| MatmulChoice { shape: record.shape.clone(), algorithm: record.algorithm };
        self.matmuls.iter().map(choice).collect()
    }

    /// Returns the kernels of attention, by which the names of arithmetics differ.
    pub(super) fn attention(&self) -> AttentionKernels {
        let is_wgmma = self.arithmetic.iter().any(|name| cuda::names_wgmma(name));
        if is_wgmma { AttentionKernels::Wgmma } else { AttentionKernels::Mma }
    }

    /// Returns whether the run computed on GPUs.
    pub(super) fn is_on_gpus(&self) -> bool {
        self.arithmetic.iter().any(|name| name.starts_with("cuda"))
    }

    /// Returns whether another start changed nothing that this one records; what is not known of one of the
    /// two is no change.
    fn continues(&self, earlier: &Self) -> bool {
        let is_known = |program: &Program| program.executable.is_some();
        let (own, other) = (&self.program, &earlier.program);
        own.version == other.version
            && (own == other || !is_known(own) || !is_known(other))
            && self.arithmetic == earlier.arithmetic
            && self.matmuls == earlier.matmuls
            && self.dtype == earlier.dtype
            && self.config.blake3 == earlier.config.blake3
            && self.tokens == earlier.tokens
            && (self.files.is_none() || earlier.files.is_none() || self.files == earlier.files)
    }
}

impl Provenance {
    /// Reads the record of a run; `None` if there is none.
    ///
    /// # Errors
    /// The file cannot be read, or is of another version.
    pub(super) fn read(run: &Path) -> Result<Option<Self>> {
        let path = run.join(PROVENANCE);
        let text = match tandem_files::read_text(&path, tandem_files::MAX_TABLE) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            read => read.map_err(TrainError::io("read", &path))?,
        };
        let wrong = |reason: String| TrainError::Mismatch { reason: format!("{}: {reason}", path.display()) };
        let read: Self = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        match read.format {
            FORMAT if !read.starts.is_empty() => Ok(Some(read)),
            FORMAT => Err(wrong("it records no start of the run".to_owned())),
            found => Err(wrong(format!("format {found}; this version reads format {FORMAT}"))),
        }
    }

    /// Says which files are others than those of the start before `step` that knows them. Rows for training are not
    /// named: other ones are refused.
    fn changed_files(&self, step: u64, files: &[InputFile], hashed: &[HashedInput]) -> Vec<String> {
        let known = self.starts.iter().rfind(|earlier| earlier.step < step && earlier.files.is_some());
        let recorded = known.and_then(|start| start.files.as_deref()).unwrap_or_default();
        different_files(recorded, files, hashed, |name| name != "data.train")
    }

    /// Adds a start. Those of steps that it repeats are forgotten; one that changes nothing fills in what
    /// the one before it lacks.
    fn add(&mut self, start: Start) {
        self.starts.retain(|earlier| earlier.step < start.step);
        match self.starts.last_mut().filter(|earlier| start.continues(earlier)) {
            Some(earlier) => {
                earlier.files = earlier.files.take().or(start.files);
                if earlier.program.executable.is_none() {
                    earlier.program = start.program;
                }
                earlier.config = start.config;
            }
            None => self.starts.push(start),
        }
    }
}

/// Writer of `provenance.json`, on the first rank.
#[derive(Debug)]
pub(super) struct ProvenanceWriter {
    /// Hashes the inputs, and returns those that are others than an earlier start's.
    thread: Option<JoinHandle<Result<Vec<String>>>>,
    give_up: Arc<AtomicBool>,
}

impl ProvenanceWriter {
    /// Writes what is known of a start, and begins to hash the program and the files of its inputs.
    /// `earlier` is the record so far of a run that continues.
    pub(super) fn begin(
        run: &Path,
        earlier: Option<Provenance>,
        start: Start,
        files: Vec<InputFile>,
    ) -> Result<Self> {
        let path = run.join(PROVENANCE);
        let earlier = earlier.unwrap_or(Provenance { format: FORMAT, starts: Vec::new() });
        write(&path, earlier.clone(), start.clone())?;
        let give_up: Arc<AtomicBool> = Arc::default();
        let told = Arc::clone(&give_up);
        let hash = move || {
            let program = Program::current();
            let Some(hashed) = hash_all(&files, &told)? else { return Ok(Vec::new()) };
            let changed = earlier.changed_files(start.step, &files, &hashed);
            write(&path, earlier, Start { program, files: Some(hashed), ..start })?;
            Ok(changed)
        };
        let thread = thread::Builder::new().name("provenance".to_owned()).spawn(hash);
        let thread = thread.map_err(TrainError::io("start a thread to hash the inputs of", run))?;
        Ok(Self { thread: Some(thread), give_up })
    }

    /// Returns whether [`Self::finish`] has something to say, and would not wait.
    pub(super) fn is_done(&self) -> bool {
        self.thread.as_ref().is_some_and(JoinHandle::is_finished)
    }

    /// Waits until all files are hashed. Returns, once, those that have changed since the run read them before.
    ///
    /// # Errors
    /// An input cannot be read any more, or the record not be written.
    pub(super) fn finish(&mut self) -> Result<Vec<String>> {
        let Some(thread) = self.thread.take() else { return Ok(Vec::new()) };
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for ProvenanceWriter {
    /// A run that stops early leaves the record without hashes of files, unless they are there already.
    fn drop(&mut self) {
        self.give_up.store(true, Ordering::Relaxed);
        // After an error another one says nothing new.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn write(path: &Path, mut provenance: Provenance, start: Start) -> Result<()> {
    provenance.add(start);
    let text = serde_json::to_string_pretty(&provenance).expect("a record is plain data");
    replace(path, format!("{text}\n").as_bytes())
}

/// Hashes files; `None` soon after `give_up` is set.
pub(super) fn hash_all(files: &[InputFile], give_up: &AtomicBool) -> Result<Option<Vec<HashedInput>>> {
    let mut hashed = Vec::with_capacity(files.len());
    for InputFile { name, path } in files {
        let Some(blake3) = hash_file(path, give_up).map_err(TrainError::io("read", path))? else {
            return Ok(None);
        };
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        hashed.push(HashedInput { name: name.clone(), file, blake3 });
    }
    Ok(Some(hashed))
}

/// Hashes a file; `None` soon after `give_up` is set.
pub(super) fn hash_file(path: &Path, give_up: &AtomicBool) -> io::Result<Option<String>> {
    let (mut file, mut hasher) = (File::open(path)?, blake3::Hasher::new());
    let mut buffer = vec![0; BUFFER];
    while !give_up.load(Ordering::Relaxed) {
        match file.read(&mut buffer)? {
            0 => return Ok(Some(hasher.finalize().to_hex().to_string())),
            read => hasher.update(&buffer[..read]),
        };
    }
    Ok(None)
}

/// Returns the hashes of tokenizer and tokens, which are known when a run begins.
pub(super) fn token_hashes(prepared: &RunInputs) -> Vec<HashedInput> {
    let input = |name: &str, hash: blake3::Hash| HashedInput {
        name: name.to_owned(),
        file: String::new(),
        blake3: hash.to_hex().to_string(),
    };
    let mut tokens = vec![
        input("tokenizer", prepared.tokenizer.fingerprint()),
        input("data.train", prepared.train.content_hash()),
    ];
    tokens.extend(prepared.eval.as_ref().map(|eval| input("data.eval", eval.content_hash())));
    tokens
}

/// Name of a compute type in the config.
pub(super) fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::Bf16 => "bf16",
    }
}

/// Returns the different arithmetics of all ranks, in the order of ranks, on the first one. Collective.
fn arithmetic_of_all(device: &Device, group: &mut ProcessGroup) -> Result<Vec<String>> {
    let mut own = device.arithmetic().into_bytes();
    own.resize(NAME, 0);
    let all = if group.size() > 1 { group.gather(&own, &vec![NAME; group.size()])? } else { own };
    let mut names: Vec<String> = Vec::new();
    for name in all.chunks_exact(NAME) {
        let name = String::from_utf8_lossy(name).trim_end_matches('\0').to_owned();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    Ok(names)
}

/// Names arithmetics in words: `avx2 with kernels of revision 8`.
pub(super) fn arithmetic_in_words(names: &[String]) -> String {
    let in_words = |name: &String| match name.rsplit_once(' ') {
        Some((device, revision)) => format!("{device} with kernels of revision {revision}"),
        None => name.clone(),
    };
    names.iter().map(in_words).collect::<Vec<_>>().join(" and ")
}
