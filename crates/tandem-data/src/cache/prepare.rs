//! Parallel tokenisation of a data set into a cache that later runs and all ranks map.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use rayon::prelude::*;

use crate::cache::cache_file::{CacheWriter, FORMAT_VERSION, RowEntry};
use crate::cache::checksum;
use crate::cache::token_cache::{PLACES, TokenCache};
use crate::error::DataError;
use crate::place::{Place, Places};
use crate::progress::Progress;
use crate::report::{Reason, Report};
use crate::rows::row::{Outcome, RowOptions, TokenRow, tokenise};
use crate::source::reader::{RawRow, RowReader, format_of};
use crate::source::record::{Record, Shape};
use crate::source::{Source, Sources, files};
use crate::text::tokenizer::Tokenizer;

/// Bytes of text that are read, tokenised and written at once, which bounds memory.
const PORTION_BYTES: usize = 4 << 20;
/// Rows of a block, in which the chosen completions of pairs come before the rejected ones: the batch of
/// `datasets`' `map`, and so the order of TRL's `unpair_preference_dataset`.
const BLOCK_ROWS: u64 = 1000;

/// Tokenises `sources` into the folder `cache`, or maps the cache of an earlier call.
///
/// The cache is keyed by the files' content and weights, the tokenizer, its chat template,
/// `options` and the format version. It is written under a temporary name and renamed when
/// complete. Concurrent processes wait for the first one; on a file system without locks each
/// writes its own and the last rename wins, with the same content. A damaged cache is rebuilt.
///
/// Rows are tokenised on the current rayon pool; `pool.install(|| prepare(…))` selects another.
///
/// # Errors
/// A pattern without a match; the first invalid row in file order, with file and line; no rows; a
/// file that changes meanwhile; a full disk, with nothing left behind.
pub fn prepare(
    sources: &Sources,
    tokenizer: &Tokenizer,
    options: &RowOptions,
    cache: &Path,
    progress: &dyn Progress,
) -> Result<TokenCache, DataError> {
    if options.max_length == Some(0) {
        return Err(DataError::Option("max_length is 0: expected at least 1".into()));
    }
    let sources = &files::expand(sources)?;
    let key = key(sources, tokenizer, options)?;
    let name = key.to_hex()[..32].to_string();
    let path = cache.join(format!("{name}.tokens"));
    if let Found::Whole(cache) = find(&path, &key, sources)? {
        return Ok(*cache);
    }
    fs::create_dir_all(cache).map_err(DataError::io("creating", cache))?;
    let lock = Lock::take(&cache.join(format!("{name}.lock")), progress)?;
    // Another process may have finished since.
    match find(&path, &key, sources)? {
        Found::Whole(cache) => return Ok(*cache),
        Found::Damaged(reason) => {
            progress.note(&format!("{}: {reason}; tokenising again", path.display()));
        }
        Found::Nothing => {}
    }
    if lock.held {
        remove_abandoned(cache, &name);
    }
    let (tokens, places) = (Temporary::new(cache, &name), Temporary::new(cache, &name));
    let built = Builder::new(sources, tokenizer, options, progress).build(&tokens.0, &places.0, &key);
    progress.finish();
    built?;
    // The tokens must match the files that the key was computed from.
    if self::key(sources, tokenizer, options)? != key {
        return Err(DataError::Changed { files: sources.names() });
    }
    // The tokens come last: their file makes the cache.
    for (temporary, path) in [(places, path.with_extension(PLACES)), (tokens, path.clone())] {
        fs::rename(&temporary.0, &path).map_err(DataError::io("renaming", &path))?;
    }
    match find(&path, &key, sources)? {
        Found::Whole(cache) => Ok(cache.just_built()),
        Found::Damaged(reason) => Err(DataError::io("reading back", &path)(std::io::Error::other(reason))),
        Found::Nothing => Err(DataError::io("reading back", &path)(std::io::ErrorKind::NotFound.into())),
    }
}

/// State of the cache's file.
enum Found {
    Nothing,
    Damaged(String),
    Whole(Box<TokenCache>),
}

fn find(path: &Path, key: &blake3::Hash, sources: &Sources) -> Result<Found, DataError> {
    if !path.exists() {
        return Ok(Found::Nothing);
    }
    Ok(match TokenCache::open(path, key, sources.paths())? {
        Ok(cache) => Found::Whole(Box::new(cache)),
        Err(reason) => Found::Damaged(reason),
    })
}

/// Hashes everything that determines the cache's content.
fn key(sources: &Sources, tokenizer: &Tokenizer, options: &RowOptions) -> Result<blake3::Hash, DataError> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&FORMAT_VERSION.to_le_bytes());
    hasher.update(tokenizer.fingerprint().as_bytes());
    let options = serde_json::to_vec(options).map_err(|e| DataError::Option(e.to_string()))?;
    hasher.update(blake3::hash(&options).as_bytes());
    // Files are hashed whole: size and time can be equal for files that differ.
    for Source { path, weight } in &sources.0 {
        let content =
            tandem_files::open(path).and_then(checksum::hash).map_err(DataError::io("reading", path))?;
        hasher.update(content.as_bytes()).update(&weight.to_bits().to_le_bytes());
        // A name says how text is read, and must agree with the content.
        hasher.update(format_of(path)?.name().as_bytes());
    }
    Ok(hasher.finalize())
}

/// One pass over the files.
struct Builder<'a> {
    sources: &'a Sources,
    tokenizer: &'a Tokenizer,
    options: &'a RowOptions,
    progress: &'a dyn Progress,
    report: Report,
    places: Places,
    /// Shape and place of the first row.
    first: Option<(Shape, Place)>,
    block: Block,
}

/// Completions of the last [`BLOCK_ROWS`] rows.
#[derive(Default)]
struct Block {
    /// Index of the first one.
    start: usize,
    /// Whether each is the rejected one of a pair.
    is_rejected: Vec<bool>,
}

impl Block {
    /// Moves the rejected completions behind the others, and begins another block.
    fn close(&mut self, rows: &mut [RowEntry]) {
        let rows = &mut rows[self.start..];
        if self.is_rejected.contains(&true) {
            let mut block: Vec<_> = self.is_rejected.iter().zip(rows.iter().copied()).collect();
            block.sort_by_key(|(is_rejected, _)| **is_rejected);
            rows.iter_mut().zip(block).for_each(|(row, (_, entry))| *row = entry);
        }
        self.start += rows.len();
        self.is_rejected.clear();
    }
}

/// Line, number of copies, and content of a row.
type Tokenised = (u64, u64, Result<Made, DataError>);

/// Columns of a row, and the outcomes of the records that it makes.
#[derive(Default)]
struct Made {
    columns: Vec<String>,
    outcomes: Vec<(Option<Shape>, Outcome)>,
}

impl<'a> Builder<'a> {
    fn new(
        sources: &'a Sources,
        tokenizer: &'a Tokenizer,
        options: &'a RowOptions,
        progress: &'a dyn Progress,
    ) -> Self {
        let (report, places) = (Report::default(), Places::new(sources.paths()));
        Self { sources, tokenizer, options, progress, report, places, first: None, block: Block::default() }
    }

    fn build(mut self, path: &Path, places: &Path, key: &blake3::Hash) -> Result<(), DataError> {
        let size = |source: &Source| fs::metadata(&source.path).map_or(0, |m| m.len());
        self.progress.start("tokenising", self.sources.0.iter().map(size).sum());
        let written = |e| DataError::io("writing the token cache", path)(e);
        let file = File::create_new(path).map_err(written)?;
        let mut writer = CacheWriter::new(file, self.options.kind).map_err(written)?;
        for file in 0..self.sources.0.len() {
            self.read_file(file, &mut writer, path)?;
            if self.is_full(&writer) {
                break;
            }
        }
        self.block.close(&mut writer.rows);
        // Repetitions by weight may exceed it.
        writer.rows.truncate(self.options.max_rows.unwrap_or(usize::MAX));
        let names = self.sources.names();
        if self.report.rows_read == 0 {
            return Err(DataError::Empty { files: names });
        }
        self.report.rows_kept = writer.rows.len() as u64;
        if self.report.rows_kept == 0 {
            return Err(DataError::NothingLeft {
                files: names,
                report: self.report.lines(&self.places).join("\n"),
            });
        }
        let (file, checksum) = writer.finish(&self.report).map_err(written)?;
        // Some file systems report a full disk only here.
        file.sync_all().map_err(written)?;
        self.places.write(places, key, &checksum).map_err(written)
    }

    fn read_file(
        &mut self,
        file: usize,
        writer: &mut CacheWriter<File>,
        path: &Path,
    ) -> Result<(), DataError> {
        let source = &self.sources.0[file];
        let mut reader = RowReader::open(&source.path, &self.options.columns)?;
        let is_repeated = source.weight > 1.0;
        if is_repeated {
            self.block.close(&mut writer.rows);
        }
        let (first_row, first_kept) = (self.report.rows_read, writer.rows.len());
        let mut index = 0;
        let mut portion = read_portion(&mut reader);
        let mut bytes = 0;
        loop {
            let (rows, broken) = portion;
            if rows.is_empty() {
                broken?;
                break;
            }
            let done = reader.bytes_read() - std::mem::replace(&mut bytes, reader.bytes_read());
            let count = rows.len() as u64;
            // The next portion is read while this one is tokenised; its errors come after this
            // one's.
            let (tokenised, next) =
                rayon::join(|| self.tokenise(source, index, rows), || read_portion(&mut reader));
            index += count;
            for (line, copies, row) in tokenised {
                let number = self.report.rows_read;
                if number.is_multiple_of(BLOCK_ROWS) {
                    self.block.close(&mut writer.rows);
                }
                self.places.push(number, file, line);
                self.report.rows_read += 1;
                let Made { columns, outcomes } = row?;
                self.note_columns(columns);
                if copies == 0 {
                    self.report.note(Reason::LeftOutByWeight, number);
                }
                let mut noted = Vec::new();
                for (shape, outcome) in outcomes {
                    if let Some(shape) = shape {
                        self.check_shape(shape, number)?;
                    }
                    for &reason in &outcome.reasons {
                        // Both completions of a pair may be cut: it is one row.
                        if !noted.contains(&reason) {
                            self.report.note(reason, number);
                            noted.push(reason);
                        }
                    }
                    let Some(row) = &outcome.row else { continue };
                    self.report.keep(row.parts(), row.longest());
                    writer.push(row, number).map_err(DataError::io("writing the token cache", path))?;
                    let is_bad = matches!(row, TokenRow::Unpaired { label: false, .. });
                    self.block.is_rejected.push(is_bad && shape.is_some_and(Shape::is_pair));
                    if self.is_full(writer) {
                        return Ok(());
                    }
                }
            }
            self.progress.advance(done, count);
            broken?;
            portion = next;
        }
        if !is_repeated {
            return Ok(());
        }
        self.block.close(&mut writer.rows);
        let copies = |row: &RowEntry| source.copies(row.row - first_row);
        let repeated: Vec<(RowEntry, u64)> =
            writer.rows[first_kept..].iter().map(|row| (*row, copies(row))).collect();
        let passes = repeated.iter().map(|&(_, copies)| copies).max().unwrap_or(1);
        for pass in 1..passes {
            writer.rows.extend(repeated.iter().filter(|(_, copies)| *copies > pass).map(|(row, _)| *row));
        }
        self.block.start = writer.rows.len();
        Ok(())
    }

    /// Keeps columns until every ignored one was seen.
    fn note_columns(&mut self, columns: Vec<String>) {
        let seen = &mut self.report.columns;
        if self.options.columns.ignored.iter().any(|ignored| !seen.contains(ignored)) {
            seen.extend(columns);
        }
    }

    fn is_full(&self, writer: &CacheWriter<File>) -> bool {
        self.options.max_rows.is_some_and(|max| writer.rows.len() >= max)
    }

    /// Parses and tokenises a portion in parallel; results are in file order. Rows after one that fails are
    /// left out, for nobody looks at them: a template may take seconds for each.
    fn tokenise(&self, source: &Source, index: u64, rows: Vec<RawRow>) -> Vec<Tokenised> {
        let first_failed = AtomicUsize::new(usize::MAX);
        let one = |(i, raw): (usize, RawRow)| -> Tokenised {
            if i > first_failed.load(Ordering::Relaxed) {
                return (raw.line, 0, Ok(Made::default()));
            }
            let copies = source.copies(index + i as u64);
            let place = Place { path: source.path.clone(), line: raw.line };
            let work = || -> Result<Made, DataError> {
                if copies == 0 {
                    return Ok(Made::default());
                }
                let parsed = Record::parse_row(&raw.text, self.options.kind, &self.options.columns, &place)?;
                let columns = parsed.columns;
                if let Some(reason) = parsed.dropped {
                    let outcomes = vec![(None, Outcome { row: None, reasons: vec![reason] })];
                    return Ok(Made { columns, outcomes });
                }
                let one = |record: Record| {
                    let outcome = tokenise(&record, self.tokenizer, self.options);
                    Ok((Some(record.shape), outcome.map_err(|e| e.at(place.clone()))?))
                };
                let outcomes = parsed.records.into_iter().map(one).collect::<Result<_, DataError>>()?;
                Ok(Made { columns, outcomes })
            };
            let made = work();
            if made.is_err() {
                first_failed.fetch_min(i, Ordering::Relaxed);
            }
            (raw.line, copies, made)
        };
        rows.into_par_iter().enumerate().with_min_len(16).map(one).collect()
    }

    fn check_shape(&mut self, shape: Shape, number: u64) -> Result<(), DataError> {
        let place = || self.places.place(number);
        match &self.first {
            None => self.first = Some((shape, place())),
            Some((first, _)) if *first == shape => {}
            Some((expected, first)) => {
                return Err(DataError::MixedShapes {
                    place: place(),
                    found: shape.to_string(),
                    first: first.clone(),
                    expected: expected.to_string(),
                });
            }
        }
        Ok(())
    }
}

/// Reads rows up to the portion's size, and the error that follows them.
fn read_portion(reader: &mut RowReader) -> (Vec<RawRow>, Result<(), DataError>) {
    let (mut rows, mut bytes) = (Vec::new(), 0);
    while bytes < PORTION_BYTES {
        match reader.next_row() {
            Ok(Some(row)) => {
                bytes += row.text.len();
                rows.push(row);
            }
            Ok(None) => break,
            Err(e) => return (rows, Err(e)),
        }
    }
    (rows, Ok(()))
}

/// Lock against duplicate work by other processes. Released on drop and when the process dies.
struct Lock {
    _file: File,
    held: bool,
}

impl Lock {
    fn take(path: &Path, progress: &dyn Progress) -> Result<Self, DataError> {
        let file = File::options().create(true).append(true).open(path);
        let file = file.map_err(DataError::io("creating", path))?;
        match file.try_lock() {
            Ok(()) => return Ok(Self { _file: file, held: true }),
            Err(fs::TryLockError::WouldBlock) => {
                progress.note("another process is tokenising the same data; waiting for it");
            }
            // Without locks on this file system, processes may repeat the work.
            Err(fs::TryLockError::Error(_)) => return Ok(Self { _file: file, held: false }),
        }
        let held = file.lock().is_ok();
        Ok(Self { _file: file, held })
    }
}

/// Removes files that dead processes left. Requires the lock, so that no process is writing one.
fn remove_abandoned(cache: &Path, name: &str) {
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let file = entry.file_name();
        let file = file.to_string_lossy();
        if file.starts_with(name) && file.ends_with(".tmp") {
            // A file that stays only takes disk space.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Temporary file, removed unless it was renamed.
struct Temporary(PathBuf);

impl Temporary {
    fn new(cache: &Path, name: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Self(cache.join(format!("{name}.{}-{count}.tmp", std::process::id())))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // After a rename this name does not exist.
        let _ = fs::remove_file(&self.0);
    }
}
