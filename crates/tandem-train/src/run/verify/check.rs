//! Checks before a stretch is computed again: parts that must be equal to the run's.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use tandem_kernels::cpu::Isa;

use super::mismatch;
use crate::Result;
use crate::config::{AdapterSection, Change, Config, JudgeKind, SumForm, TemplateSource, Weights};
use crate::events::Observer;
use crate::inputs::RunInputs;
use crate::placement::gpus;
use crate::run::provenance::{
    HashedInput, Program, Start, arithmetic_in_words, config_hash, different_files, dtype_name, hash_all,
    hashes_in_words, input_files, is_place, token_hashes,
};

/// Bytes of the device that is opened to learn its arithmetic.
const SMALL: usize = 1 << 20;

/// Refuses runs of which a part is outside this program.
pub(super) fn external(config: &Config, runs_commands: bool) -> Result<()> {
    if let Some(server) = config.server() {
        return Err(mismatch(format!(
            "the completions of this run came from servers ({:?}), which promise no bits: the run cannot be computed again. \
             samples.jsonl has some of its completions with their scores",
            server.kind
        )));
    }
    let mut programs = Vec::new();
    for judge in &config.judges {
        match &judge.kind {
            JudgeKind::Endpoint(_) => {
                return Err(mismatch(format!(
                    "judge `{}` of this run is a model behind an endpoint, which promises no scores: the run cannot be \
                     computed again. samples.jsonl has some of its completions with their scores",
                    judge.name
                )));
            }
            JudgeKind::Command(command) => programs.push((format!("judge `{}`", judge.name), command)),
            // A function of the program is here, or the config were refused.
            JudgeKind::Rule(_) | JudgeKind::Reward(_) | JudgeKind::Own(_) => {}
        }
    }
    let environment = config.online.as_ref().and_then(|online| online.environment.as_ref());
    programs.extend(environment.map(|section| ("the environment".to_owned(), &section.command)));
    match programs.first() {
        Some((owner, command)) if !runs_commands => Err(mismatch(format!(
            "{owner} of this run is a program, {:?}: it would run here with your rights, and its files are not part of \
             the record. --run-commands allows it",
            command.command
        ))),
        _ => Ok(()),
    }
}

/// Refuses overrides that make another run.
pub(super) fn overrides(recorded: &Config, config: &Config) -> Result<()> {
    match altering(recorded, config) {
        Some(change) => Err(mismatch(format!(
            "--set {}: the run had {}, and {} makes another run; only paths and what leaves the bits as they are can be \
             given",
            change.key,
            shown(&change.saved),
            shown(&change.now)
        ))),
        None => Ok(()),
    }
}

/// Refuses a config file that was changed after the run.
pub(super) fn unchanged(recorded: &Config, found: &Config, path: &Path) -> Result<()> {
    match altering(recorded, found) {
        Some(change) => Err(mismatch(format!(
            "{} was changed after the run: {} is {} there, and the run was made with {}",
            path.display(),
            change.key,
            shown(&change.now),
            shown(&change.saved)
        ))),
        None => Ok(()),
    }
}

/// Returns the first key that changes the bits of a run.
fn altering(recorded: &Config, found: &Config) -> Option<Change> {
    let changes = found.changes_since(recorded).into_iter();
    let mut changes = changes.filter(|change| change.alters_run && !is_place(recorded, &change.key));
    changes.next()
}

fn shown(value: &Option<String>) -> String {
    value.clone().unwrap_or_else(|| "nothing".to_owned())
}

/// Refuses a record whose config was changed.
pub(super) fn config_hash_is(config: &Config, start: &Start, path: &Path) -> Result<()> {
    let found = config_hash(config);
    // Another version may know other keys.
    if start.program.version == env!("CARGO_PKG_VERSION") && found != start.config.blake3 {
        return Err(mismatch(format!(
            "{}: the config of the start after step {} has the hash {found}, and the record says {}: one of the two was \
             changed",
            path.display(),
            start.step,
            start.config.blake3
        )));
    }
    Ok(())
}

/// Compares the arithmetic of a run with that of this machine, before anything is computed. Returns
/// remarks.
pub(super) fn arithmetic(config: &Config, start: &Start, force: bool) -> Result<Vec<String>> {
    let here = gpus::device(config, config.compute.attention, 0, SMALL)?.arithmetic();
    let mut reasons = Vec::new();
    if start.arithmetic.len() > 1 {
        reasons.push(format!(
            "the ranks of the run had different arithmetics, {}, so that its bits depend on which rank computed what",
            arithmetic_in_words(&start.arithmetic)
        ));
    } else if start.arithmetic[..] != [here.clone()] {
        reasons.push(format!(
            "the run was made with {}, and this machine has {}{}",
            arithmetic_in_words(&start.arithmetic),
            arithmetic_in_words(std::slice::from_ref(&here)),
            remedy(start.arithmetic.first().map_or("", String::as_str), &here)
        ));
    }
    let num_ranks = config.compute.devices.num_ranks();
    if config.compute.reduction == SumForm::Fast && num_ranks != start.ranks {
        reasons.push(format!(
            "compute.reduction = \"fast\" adds gradients in an order that depends on the number of ranks, of which the run had \
             {} and the recomputation has {num_ranks}; --devices cpu:{} gives the same",
            start.ranks, start.ranks
        ));
    }
    if config.compute.compute_type() != start.dtype().unwrap_or(config.compute.compute_type()) {
        reasons.push(format!(
            "the run computed in {}, and this machine would in {}",
            start.dtype,
            dtype_name(config.compute.compute_type())
        ));
    }
    if !reasons.is_empty() && !force {
        return Err(mismatch(format!(
            "other bits are expected: {}. --force computes nevertheless",
            reasons.join("; ")
        )));
    }
    let mut notes: Vec<String> =
        reasons.into_iter().map(|reason| format!("other bits are expected: {reason}")).collect();
    let own = Program::current();
    if start.program.math_library != own.math_library && start.program.executable.is_some() {
        let shown = |hash: Option<&str>| hash.unwrap_or("part of the program").to_owned();
        notes.push(format!(
            "the system's mathematical library (libm) has BLAKE3 {} here, and the run's had {}: `exp` and `ln` of another \
             version may give other bits",
            shown(own.math_library.as_deref()),
            shown(start.program.math_library.as_deref())
        ));
    }
    if start.program.version != own.version {
        notes.push(format!(
            "tandem {} made the run, and this is {}: another version may give other bits",
            start.program.version, own.version
        ));
    } else if start.program.executable.is_some() && start.program.executable != own.executable {
        let own = own.executable.as_deref().unwrap_or("not known");
        notes.push(format!("another build of the same version computes here: executable {own}"));
    }
    Ok(notes)
}

/// Says how this machine could have the arithmetic of a run, with a leading separator.
fn remedy(recorded: &str, here: &str) -> String {
    let parts = |name: &str| {
        let (device, revision) = name.rsplit_once(' ').unwrap_or((name, ""));
        (device.to_owned(), revision.to_owned())
    };
    let ((device, revision), (own, own_revision)) = (parts(recorded), parts(here));
    let isa = Isa::ALL.into_iter().find(|isa| isa.name() == device);
    match isa {
        _ if revision != own_revision => "; the version of Tandem that made it has its kernels".to_owned(),
        Some(_) if own.starts_with("cuda") => "; --devices cpu computes on the CPU".to_owned(),
        Some(isa) if isa.is_available() => format!("; TANDEM_ISA={device} gives the same"),
        Some(_) => format!("; it takes a CPU with {device}"),
        None => "; it takes a GPU of that kind and those libraries".to_owned(),
    }
}

/// Compares tokens and files with the record. Returns remarks.
pub(super) fn inputs(config: &Config, start: &Start, observer: &mut dyn Observer) -> Result<Vec<String>> {
    missing(config)?;
    let prepared = RunInputs::open(config, observer)?;
    let files = input_files(config, &prepared)?;
    let hashed = hash_all(&files, &AtomicBool::new(false))?.expect("nobody gives up");
    let mut found = Vec::new();
    let recorded_files = start.files.as_deref().unwrap_or_default();
    let is_rows = |name: &str| name.starts_with("data.");
    for (name, recorded, own) in pairs(&start.tokens, &token_hashes(&prepared)) {
        if recorded == own {
            continue;
        }
        found.push(format!("{name}: {}", hashes_in_words(&recorded, &own)));
        if is_rows(&name) {
            found.extend(different_files(recorded_files, &files, &hashed, |other| other == name));
        }
    }
    found.extend(different_files(recorded_files, &files, &hashed, |name| !is_rows(name)));
    if !found.is_empty() {
        return Err(mismatch(format!(
            "other inputs than the run had, so that it cannot be compared:\n  {}\nthe place of the right ones can be given \
             with --set, as --set model=FOLDER",
            found.join("\n  ")
        )));
    }
    Ok(match start.files {
        Some(_) => Vec::new(),
        None => vec![
            "the run ended before the files of its weights were hashed: that they are the same is not known"
                .to_owned(),
        ],
    })
}

/// Name, recorded hash and own hash of each input.
fn pairs(recorded: &[HashedInput], own: &[HashedInput]) -> Vec<(String, String, String)> {
    let hash = |inputs: &[HashedInput], name: &str| {
        inputs.iter().find(|input| input.name == name).map_or("none".to_owned(), |input| input.blake3.clone())
    };
    let mut names: Vec<&String> = recorded.iter().chain(own).map(|input| &input.name).collect();
    names.dedup();
    let mut seen = BTreeMap::new();
    for name in names {
        seen.entry(name.clone()).or_insert_with(|| (hash(recorded, name), hash(own, name)));
    }
    seen.into_iter().map(|(name, (recorded, own))| (name, recorded, own)).collect()
}

/// Refuses paths of the config that are not there, with the key that gives another.
fn missing(config: &Config) -> Result<()> {
    let mut paths: Vec<(String, &Path)> = vec![("model".to_owned(), config.model.as_path())];
    if let Weights::File(path) = &config.weights {
        paths.push(("weights".to_owned(), path));
    }
    if let Some(TemplateSource::Path(path)) = &config.data.chat_template {
        paths.push(("data.chat_template".to_owned(), path));
    }
    let adapter = config.adapter.as_ref().and_then(AdapterSection::folder);
    let folders = [
        ("reference.model", config.reference.model.as_deref()),
        ("reference.adapter", config.reference.adapter.as_deref()),
        ("adapter.start", adapter.map(PathBuf::as_path)),
    ];
    paths.extend(folders.into_iter().filter_map(|(key, path)| Some((key.to_owned(), path?))));
    for (key, sources) in [("data.train", &config.data.train), ("data.eval", &config.data.eval)] {
        paths.extend(sources.iter().map(|source| (key.to_owned(), source.path.as_path())));
    }
    for (index, judge) in config.judges.iter().enumerate() {
        if let JudgeKind::Reward(reward) = &judge.kind {
            paths.push((format!("judges[{index}].model"), reward.model.as_path()));
        }
    }
    let is_gone = |path: &Path| !path.exists() && !path.to_string_lossy().contains('*');
    match paths.iter().find(|(_, path)| is_gone(path)) {
        Some((key, path)) => Err(mismatch(format!(
            "{key}: {} is not here; give its place on this machine with --set {key}=PATH",
            path.display()
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An online run that is judged by `judges`, with more tables.
    fn config(judges: &str, tables: &str) -> Config {
        let text = format!(
            "method = \"grpo\"\nmodel = \"/m\"\noutput = \"/o\"\ndata.train = \"/t.jsonl\"\ntrain = {{ batch_size = 2, \
             steps = 3, learning_rate = 1 }}\n{tables}\n{judges}"
        );
        Config::from_text(&text, Path::new("/run.toml")).unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn parts_outside_this_program_are_refused_with_a_reason() {
        let length = "[[judges]]\nkind = \"length\"\nmin = 3\n";
        assert!(external(&config(length, ""), false).is_ok());
        let endpoint =
            "[[judges]]\nkind = \"endpoint\"\nbase_url = \"http://127.0.0.1:1/v1\"\nmodel = \"m\"\n";
        let server =
            "[adapter]\nrank = 4\n[online.server]\nbase_url = \"http://127.0.0.1:1/v1\"\nmodel = \"m\"\n";
        for (judges, tables, part) in [
            (endpoint, "", "judge `endpoint` of this run is a model behind an endpoint"),
            (length, server, "came from servers"),
        ] {
            let error = external(&config(judges, tables), true).expect_err(part);
            assert!(error.to_string().contains(part) && error.exit_code() == 2, "{error}");
        }
        let environment = "[online.environment]\ncommand = [\"python3\", \"world.py\"]\n";
        let command = "[[judges]]\nkind = \"command\"\ncommand = [\"python3\", \"judge.py\"]\n";
        for (judges, tables, part) in [("", environment, "world.py"), (command, "", "judge.py")] {
            let config = config(judges, tables);
            let error = external(&config, false).expect_err(part).to_string();
            assert!(error.contains(part) && error.contains("--run-commands"), "{error}");
            assert!(external(&config, true).is_ok());
        }
    }

    /// Paths are no part of a run's bits; the content of their files is compared.
    #[test]
    fn the_hash_of_a_config_knows_no_paths_and_no_placement() {
        let reward = "[[judges]]\nkind = \"reward\"\nmodel = \"/r\"\n";
        let config = config(reward, "");
        let with = |overrides: &[&str]| config.with(overrides).unwrap_or_else(|e| panic!("{e}"));
        for key in ["model=/x", "data.train=/x.jsonl", "compute.devices=cpu:4", "compute.sharding=zero3"] {
            assert_eq!(config_hash(&with(&[key])), config_hash(&config), "{key}");
            assert!(overrides(&config, &with(&[key])).is_ok(), "{key}");
        }
        let moved =
            Config { judges: self::config(&reward.replace("/r", "/elsewhere"), "").judges, ..config.clone() };
        assert!(moved != config && config_hash(&moved) == config_hash(&config));
        for key in ["seed=7", "train.learning_rate=2", "online.temperature=0.5"] {
            assert_ne!(config_hash(&with(&[key])), config_hash(&config), "{key}");
            let name = key.split('=').next().expect("a key");
            assert!(overrides(&config, &with(&[key])).expect_err(key).to_string().contains(name));
        }
    }

    #[test]
    fn the_remedy_names_what_gives_the_same_arithmetic() {
        assert_eq!(remedy("portable 8", "avx2 8"), "; TANDEM_ISA=portable gives the same");
        assert_eq!(remedy("avx2 8", "cuda sm_90 x132 12.8 8"), "; --devices cpu computes on the CPU");
        assert!(remedy("cuda sm_90 x132 12.8 8", "avx2 8").contains("a GPU of that kind"));
        assert!(remedy("avx2 7", "avx2 8").contains("the version of Tandem"));
    }
}
