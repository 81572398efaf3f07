//! `[online.server]`: a server of the user's that answers instead of this process.

use std::path::PathBuf;

use tandem_judge::http;
use tandem_model::{AdapterConfig, AdapterKind};

use super::error::ConfigError;
use super::online::{Around, OnlineConfig};
use super::reader::Entry;
use super::resolved::{Entries, integer, path};
use super::{AdapterSection, AdapterStart};

/// What a server speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerKind {
    /// vLLM's version of OpenAI's interface.
    Vllm,
    /// SGLang's own interface.
    Sglang,
}

impl ServerKind {
    const NAMES: [(&str, Self); 2] = [("vllm", Self::Vllm), ("sglang", Self::Sglang)];

    /// The name in a config.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, kind)| *kind == self).expect("every kind has a name").0
    }
}

/// A server that answers, and how it is asked.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    /// What it speaks.
    pub kind: ServerKind,
    /// The address: vLLM's up to the version, as `http://127.0.0.1:8000/v1`, SGLang's without, as `http://127.0.0.1:30000`.
    pub address: String,
    /// The name under which the server serves the base.
    pub model: String,
    /// The environment variable that holds the key, where one is needed.
    pub key_variable: Option<String>,
    /// How long a request may take.
    pub seconds: f64,
    /// How often a request is sent again.
    pub retries: usize,
    /// How many requests are under way at once.
    pub concurrency: usize,
    /// The folder where the server finds each round's adapter, at the same path as this process.
    pub adapters: PathBuf,
}

/// The table, in a run that `around` describes.
pub(super) fn parse(entry: Entry, around: &Around<'_>) -> Result<ServerConfig, ConfigError> {
    refuse(&entry, around)?;
    let mut section = entry.section()?;
    let kind = kind(section.take("kind"), around)?;
    let address = section.required(
        "address",
        "the server's address, as http://127.0.0.1:8000/v1 for vLLM or http://127.0.0.1:30000 for SGLang",
    )?;
    let text = address.string()?.trim_end_matches('/').to_owned();
    if let Some(reason) = http::wrong_with(&text, "online.server.key_variable") {
        return Err(address.conflict(format!("it {reason}")));
    }
    if kind == ServerKind::Sglang && text.ends_with("/v1") {
        return Err(address.conflict("SGLang's own paths are not under /v1; give the address without it"));
    }
    let config = ServerConfig {
        kind,
        address: text,
        model: filled(
            &section
                .required("model", "the name under which the server serves the base (--served-model-name)")?,
            "a name",
        )?,
        key_variable: section
            .take("key_variable")
            .map(|entry| filled(&entry, "the name of an environment variable"))
            .transpose()?,
        seconds: section.take("seconds").map_or(Ok(600.0), |e| {
            e.number("a number of seconds above 0, at most 30000000", |s| s > 0.0 && s <= 3e7)
        })?,
        retries: section.take("retries").map_or(Ok(5), |e| e.integer(0..=1000))? as usize,
        concurrency: section.take("concurrency").map_or(Ok(32), |e| e.integer(1..=4096))? as usize,
        adapters: match section.take("adapters") {
            Some(entry) => entry.path()?,
            None => around.output.join("adapters"),
        },
    };
    section.finish()?;
    Ok(config)
}

/// The kind, which must not read the adapter as another.
fn kind(entry: Option<Entry>, around: &Around<'_>) -> Result<ServerKind, ConfigError> {
    let Some(entry) = entry else { return Ok(ServerKind::Vllm) };
    let kind = entry.one_of(&ServerKind::NAMES)?;
    let misread = match around.adapter {
        Some(AdapterSection { start: AdapterStart::New(adapter), .. }) => misread(adapter, kind),
        // Its folder is opened later.
        _ => None,
    };
    misread.map_or(Ok(kind), |reason| Err(entry.conflict(reason)))
}

fn filled(entry: &Entry, expected: &str) -> Result<String, ConfigError> {
    match entry.string()? {
        "" => Err(entry.wrong(expected)),
        text => Ok(text.to_owned()),
    }
}

/// Refuses what a server cannot be told.
fn refuse(entry: &Entry, around: &Around<'_>) -> Result<(), ConfigError> {
    let no = |reason: &str| Err(entry.conflict(reason));
    match around.adapter {
        None => {
            return no(
                "a server is given each round's weights as a LoRA adapter, and here every weight trains; add an [adapter] \
                       table, or remove this one",
            );
        }
        Some(AdapterSection { start: AdapterStart::New(adapter), .. }) => {
            if let Some(reason) = unloadable(adapter) {
                return no(&reason);
            }
        }
        // What it is its folder says, which is opened later.
        Some(AdapterSection { start: AdapterStart::Folder(_), .. }) => {}
    }
    if around.tensor > 1 {
        return no(
            "a model in slices (compute.tensor) is not brought to a server yet; remove compute.tensor, or this table",
        );
    }
    Ok(())
}

/// Why a server does not load an adapter, or not as it is, if so.
pub fn unservable(adapter: &AdapterConfig, server: ServerKind) -> Option<String> {
    unloadable(adapter).or_else(|| misread(adapter, server))
}

/// Why no server loads an adapter.
fn unloadable(adapter: &AdapterConfig) -> Option<String> {
    if adapter.kind != AdapterKind::Lora {
        return Some(
            "servers load LoRA adapters and no others; set adapter.kind = \"lora\", or remove [online.server]"
                .to_owned(),
        );
    }
    (!adapter.modules_to_save.is_empty()).then(|| {
        format!(
            "servers load no adapter with modules that train whole ({}); remove adapter.modules_to_save, or [online.server]",
            adapter.modules_to_save.join(", ")
        )
    })
}

/// Why a server would answer with other weights than the adapter's.
fn misread(adapter: &AdapterConfig, server: ServerKind) -> Option<String> {
    (adapter.rank_stabilized && server == ServerKind::Sglang).then(|| {
        "SGLang scales every adapter by alpha / rank, also one that says alpha / √rank, and would answer with other weights than \
         those that train; remove adapter.rslora and choose adapter.alpha for it, or remove [online.server]"
            .to_owned()
    })
}

/// What else of `[online]` contradicts a server.
pub(super) fn contradicts(config: &OnlineConfig) -> Option<String> {
    if config.algorithm.asks_reference() {
        return Some(format!(
            "online.algorithm = \"{}\" has the reference answer too, which a server does not have; set \"dpo\", or remove this table",
            config.algorithm.name()
        ));
    }
    (config.temperature == 0.0).then(|| {
        "online.temperature = 0 gives the same answer again and again, which servers refuse; raise it, or remove this table".to_owned()
    })
}

pub(super) fn entries(server: &ServerConfig) -> Entries {
    let ServerConfig { kind, address, model, key_variable, seconds, retries, concurrency, adapters } = server;
    let mut out: Entries = vec![
        ("kind", kind.name().into()),
        ("address", address.clone().into()),
        ("model", model.clone().into()),
    ];
    out.extend(key_variable.iter().map(|name| ("key_variable", name.clone().into())));
    out.extend([
        ("seconds", (*seconds).into()),
        ("retries", integer(*retries as u64)),
        ("concurrency", integer(*concurrency as u64)),
        ("adapters", path(adapters)),
    ]);
    out
}
