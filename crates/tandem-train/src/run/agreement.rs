//! Agreement: processes compare program, config, model and data before they train, and whether they
//! see one run folder.
//!
//! Ranks that train with different learning rates end with a model that no config describes, and
//! nothing else would notice. So they exchange a hash of these facts; where one differs, every rank
//! fails with the first fact that does and both values.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use tandem_comm::ProcessGroup;

use super::provenance::{InputFile, weight_files};
use super::run_dir::RunDir;
use crate::config::Config;
use crate::disk;
use crate::inputs::RunInputs;
use crate::{Result, TrainError};

/// Keys that may differ between ranks: a machine's own resources, and paths, whose contents are
/// compared instead.
pub(super) const OWN_KEYS: [&str; 18] = [
    "model",
    "weights",
    "output",
    // Their defaults are made from `output`; rank 0 alone uses them.
    "logging.run",
    "logging.tensorboard",
    "online.server.adapters",
    "adapter.start",
    "reference.model",
    "reference.adapter",
    "data.train",
    "data.eval",
    "data.cache",
    "data.chat_template",
    "compute.devices",
    "compute.threads",
    "compute.memory",
    "compute.offload_dir",
    "compute.meeting_deadline",
];
/// Longest file that is hashed whole; of a longer one, [`SAMPLES`] pieces are.
const WHOLE: u64 = 1 << 30;
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: u64 = 64 << 10;
/// Beginning of the name of a file that shows whether ranks share a folder and may write there; a time follows.
const MARK: &str = ".seen-";
/// Between the fields of a fact; no path or value contains it.
const SEPARATOR: char = '\u{1f}';

/// Something that all ranks have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Fact {
    name: String,
    value: String,
    /// Where this rank has it from; may differ.
    place: String,
}

impl Fact {
    fn new(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self { name: name.into(), value: value.into(), place: String::new() }
    }

    fn encode(&self) -> String {
        format!("{}{SEPARATOR}{}{SEPARATOR}{}", self.name, self.value, self.place)
    }

    fn decode(text: &str) -> Self {
        let mut fields = text.split(SEPARATOR).map(str::to_owned);
        let mut next = || fields.next().unwrap_or_default();
        Self { name: next(), value: next(), place: next() }
    }

    fn shown(&self) -> String {
        if self.place.is_empty() { self.value.clone() } else { format!("{} ({})", self.value, self.place) }
    }
}

/// Compares program and config; before anything that depends on them.
pub(super) fn on_config(config: &Config, group: &mut ProcessGroup) -> Result<()> {
    if is_alone(group) {
        return Ok(());
    }
    let mut facts = vec![Fact::new("version", env!("CARGO_PKG_VERSION"))];
    let keys = config.entries().into_iter().filter(|(key, _)| !OWN_KEYS.contains(&key.as_str()));
    facts.extend(keys.map(|(key, value)| Fact::new(key, value)));
    compare(&facts, group)
}

/// Compares the contents of models and data.
pub(super) fn on_inputs(config: &Config, prepared: &RunInputs, group: &mut ProcessGroup) -> Result<()> {
    if is_alone(group) {
        return Ok(());
    }
    let mut facts = vec![Fact::new("tokenizer", short(prepared.tokenizer.fingerprint()))];
    let tokens = [("data.train", Some(&prepared.train)), ("data.eval", prepared.eval.as_ref())];
    for (name, cache) in tokens.into_iter().filter_map(|(name, cache)| Some((name, cache?))) {
        let value = format!("{} rows, tokens with hash {}", cache.num_rows(), short(cache.content_hash()));
        facts.push(Fact::new(name, value));
    }
    for InputFile { name, path } in weight_files(config, prepared)? {
        facts.push(fact_of(&name, &path)?);
    }
    compare(&facts, group)
}

/// Checks that every rank sees the run folder of the first one, which alone has it open, and may write into it: each
/// writes its part of a checkpoint.
pub(super) fn on_run_folder(output: &Path, run_dir: Option<&RunDir>, group: &mut ProcessGroup) -> Result<()> {
    if is_alone(group) {
        return Ok(());
    }
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mark = text_of(&format!("{MARK}{:x}", since.as_nanos()), 0, group)?;
    let of_first = text_of(&output.display().to_string(), 0, group)?;
    let file = output.join(&mark);
    if run_dir.is_some() {
        fs::write(&file, b"").map_err(TrainError::io("write", &file))?;
    }
    group.barrier()?;
    let is_seen = disk::appears(|| file.exists());
    let seen = group.gather(&[u8::from(is_seen)], &vec![1; group.size()])?;
    if run_dir.is_some() {
        fs::remove_file(&file).map_err(TrainError::io("remove", &file))?;
    }
    if let Some(reader) = seen.iter().position(|&seen| seen == 0) {
        await_all(group);
        return Err(TrainError::NotShared { path: of_first.into(), writer: 0, reader });
    }
    // Another mark of each rank. A number of a rank has four digits, so no two are one file.
    let own = output.join(format!("{mark}{:04x}", group.rank()));
    let written = fs::write(&own, b"").and_then(|()| fs::remove_file(&own));
    let reason = written.err().map_or_else(String::new, |error| format!("{}: {error}", own.display()));
    let could = group.gather(&[u8::from(reason.is_empty())], &vec![1; group.size()])?;
    let Some(rank) = could.iter().position(|&could| could == 0) else { return Ok(()) };
    let reason = text_of(&reason, rank, group)?;
    await_all(group);
    Err(TrainError::NotWritable { rank, reason })
}

/// Returns whether a file of a run's folder is a mark of [`on_run_folder`]. A killed process leaves it.
pub(super) fn is_mark(name: &str) -> bool {
    name.strip_prefix(MARK)
        .is_some_and(|id| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Waits until every rank has what this one has. A rank that ends with its error earlier would end the calls
/// in which others still learn it, and they would report a lost rank.
fn await_all(group: &mut ProcessGroup) {
    // A rank that leaves the barrier ends it for others, who know enough by then.
    let _ = group.barrier();
}

/// Returns whether there is nothing to compare: threads of one process have the same config and files.
fn is_alone(group: &ProcessGroup) -> bool {
    group.size() == 1 || group.is_one_process()
}

fn compare(facts: &[Fact], group: &mut ProcessGroup) -> Result<()> {
    let mut hasher = blake3::Hasher::new();
    for Fact { name, value, .. } in facts {
        hasher.update(name.as_bytes()).update(b"\0").update(value.as_bytes()).update(b"\0");
    }
    let own = hasher.finalize();
    let all = group.gather(own.as_bytes(), &vec![blake3::OUT_LEN; group.size()])?;
    let mut hashes = all.chunks_exact(blake3::OUT_LEN);
    let first = hashes.next().unwrap_or_default();
    let Some(rank) = hashes.position(|hash| hash != first).map(|index| index + 1) else { return Ok(()) };
    let [of_first, of_other] = [facts_of(facts, 0, group)?, facts_of(facts, rank, group)?];
    await_all(group);
    let (name, first, other) = first_difference(&of_first, &of_other);
    Err(TrainError::Disagreement { name, first, rank, other })
}

/// Sends a rank's facts to all.
fn facts_of(own: &[Fact], rank: usize, group: &mut ProcessGroup) -> Result<Vec<Fact>> {
    let text = text_of(&own.iter().map(Fact::encode).collect::<Vec<_>>().join("\n"), rank, group)?;
    Ok(text.split('\n').map(Fact::decode).collect())
}

/// Sends a rank's text to all.
pub(super) fn text_of(own: &str, rank: usize, group: &mut ProcessGroup) -> Result<String> {
    let mut text = own.as_bytes().to_vec();
    let mut length = [text.len() as i64];
    group.broadcast(&mut length, rank)?;
    text.resize(length[0] as usize, 0);
    group.broadcast(&mut text, rank)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Returns the name and both values of the first fact that differs, in the order of the first rank's.
fn first_difference(first: &[Fact], other: &[Fact]) -> (String, String, String) {
    let find = |facts: &[Fact], name: &str| facts.iter().find(|fact| fact.name == name).cloned();
    let names = first.iter().chain(other).map(|fact| &fact.name);
    for name in names {
        let (a, b) = (find(first, name), find(other, name));
        if a.as_ref().map(|fact| &fact.value) != b.as_ref().map(|fact| &fact.value) {
            let shown = |fact: Option<Fact>| fact.map_or("not there".to_owned(), |fact| fact.shown());
            return (name.clone(), shown(a), shown(b));
        }
    }
    ("order of the facts".to_owned(), "one".to_owned(), "another".to_owned())
}

fn fact_of(name: &str, file: &Path) -> Result<Fact> {
    let hashed = hash(file).map_err(TrainError::io("read", file))?;
    let (length, hash) = hashed;
    Ok(Fact {
        name: format!("{name}, file {}", file.file_name().unwrap_or_default().to_string_lossy()),
        value: format!("{length} bytes with hash {}", short(hash)),
        place: file.display().to_string(),
    })
}

/// Returns the length of a file and a hash of its content; of a long one, of pieces from its beginning to
/// its end.
fn hash(path: &Path) -> std::io::Result<(u64, blake3::Hash)> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut hasher = blake3::Hasher::new();
    if length <= WHOLE {
        hasher.update_reader(file)?;
        return Ok((length, hasher.finalize()));
    }
    let mut piece = vec![0; SAMPLE_BYTES as usize];
    for sample in 0..SAMPLES {
        file.seek(SeekFrom::Start((length - SAMPLE_BYTES) / (SAMPLES - 1) * sample))?;
        file.read_exact(&mut piece)?;
        hasher.update(&piece);
    }
    Ok((length, hasher.finalize()))
}

fn short(hash: blake3::Hash) -> String {
    hash.to_hex()[..16].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named_with_both_values() {
        let facts = |rate: &str| vec![Fact::new("version", "1"), Fact::new("train.learning_rate", rate)];
        let found = first_difference(&facts("1e-5"), &facts("2e-5"));
        assert_eq!(found, ("train.learning_rate".into(), "1e-5".into(), "2e-5".into()));
        let file = Fact { place: "/a/model.safetensors".into(), ..Fact::new("model", "3 bytes") };
        let more = [facts("1e-5"), vec![file.clone()]].concat();
        let found = first_difference(&facts("1e-5"), &more);
        assert_eq!(found, ("model".into(), "not there".into(), "3 bytes (/a/model.safetensors)".into()));
        assert_eq!(Fact::decode(&file.encode()), file);
    }

    #[test]
    fn keys_that_may_differ_are_keys() {
        let page = crate::config::reference_page();
        for key in OWN_KEYS {
            let name = key.rsplit('.').next().unwrap();
            assert!(page.contains(&format!("| `{name}`")), "{key} is no key any more");
        }
    }

    #[test]
    fn a_long_file_is_told_from_another_by_its_pieces() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("long");
        let file = File::create(&path).unwrap();
        file.set_len(WHOLE + 12345).unwrap();
        let before = hash(&path).unwrap();
        assert_eq!(before, hash(&path).unwrap());
        fs::File::options().write(true).open(&path).unwrap().set_len(WHOLE + 12344).unwrap();
        assert_ne!(before, hash(&path).unwrap());
        fs::write(&path, b"short").unwrap();
        let short = hash(&path).unwrap();
        fs::write(&path, b"Short").unwrap();
        assert_ne!(short, hash(&path).unwrap());
    }
}
