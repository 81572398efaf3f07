//! The reference page `docs/config.md`, written from the declarations of the keys.

use std::fmt::Write;

use super::judges::KINDS;
use super::keys::{KeyRow, Keys, Resume, Table};
use super::resolved::sorted;
use super::{Config, JudgeKind, JudgeSection};

const INTRODUCTION: &str = "\
# The configuration file

<!-- Generated from crates/tandem-train/src/config: do not edit.
     TANDEM_BLESS=1 cargo test -p tandem-train config_page writes this file. -->

One TOML file describes a run. Unknown keys are refused with the nearest known key. A relative path
is relative to the file. `--set train.learning_rate=1e-5` on the command line changes a key; a
relative path given there is relative to the current folder. The run's folder holds the resolved
configuration, `config.toml`, with every default written out; it is itself a valid configuration.

`tandem init` writes the first one. These explain keys and tables of this page, print a resolved
configuration, and write a JSON schema: with the line `#:schema tandem.schema.json` editors check a file.

```sh
tandem config train.batch_size adapter
tandem config show runs/quickstart/dpo.toml
tandem config schema > tandem.schema.json
```

Names of TRL, Axolotl and others are refused with their translation: [coming-from.md](coming-from.md).

A key with the default *required* must be given. A key marked *free* may change when a run is
resumed. Any other change makes the resumed run differ from one that never stopped, and a warning
says so. A change that the checkpoint does not fit is refused: of the model, the method, the adapter,
the optimizer's states, or the reference.
";

/// Heading and introduction of each table.
pub(super) const SECTIONS: [(&str, &str, &str); 14] = [
    ("", "At the top", ""),
    (
        "adapter",
        "`[adapter]`",
        "With this table, even an empty one, the model's own weights stay frozen and an adapter trains: see
[adapters.md](adapters.md). Without it every weight trains.",
    ),
    (
        "reference",
        "`[reference]`",
        "The model that the policy is compared with, or learns from (`method = \"distill\"`). SFT, reward models and reference-free losses have none.",
    ),
    ("data", "`[data]`", "The formats are in [data.md](data.md)."),
    (
        "online",
        "`[online]`",
        "For `method = \"online\"` and `\"grpo\"`, and for `\"distill\"` with `distill.lmbda` above 0: generation of completions,
and the pairs made from them. See [online.md](online.md).",
    ),
    (
        "online.server",
        "`[online.server]`",
        "For online runs with an `[adapter]` of kind `\"lora\"`. With this table a vLLM or SGLang server generates
instead of this process: see [online-server.md](online-server.md).",
    ),
    (
        "online.environment",
        "`[online.environment]`",
        "For `method = \"grpo\"`, in place of `[[judges]]`: a program that continues conversations and rewards them. See
[grpo.md](grpo.md#environments).",
    ),
    (
        "grpo",
        "`[grpo]`",
        "For `method = \"grpo\"`: policy gradients from the rewards of a group of completions. See
[grpo.md](grpo.md).",
    ),
    (
        "distill",
        "`[distill]`",
        "For `method = \"distill\"`: the divergence of the policy from a teacher. See
[distill.md](distill.md).",
    ),
    ("objective", "`[objective]`", "Losses and their strength."),
    ("train", "`[train]`", "Batches, steps, optimiser, evaluation and checkpoints."),
    ("compute", "`[compute]`", "Devices, arithmetic, and the division of work among ranks."),
    (
        "logging",
        "`[logging]`",
        "Trackers that receive the records of a run: see [trackers.md](trackers.md). `metrics.jsonl` is written
without this table too.",
    ),
    (
        "logging.mlflow",
        "`[logging.mlflow]`",
        "With this table the records go to an [MLflow server](trackers.md#mlflow). MLFLOW_TRACKING_TOKEN, or
MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, are read from the environment.",
    ),
];

const JUDGES: &str = "
## `[[judges]]`

Judges of generated completions: one table for each; together they form a panel. Each kind is
described with an example in [judges.md](judges.md). `tandem eval --judge` takes a file of such tables
and nothing else. Online runs need at least one judge; other methods have none.
";

/// Returns the reference page of all keys, `docs/config.md`.
pub fn reference_page() -> String {
    let mut page = INTRODUCTION.to_owned();
    let tables = list(|keys| Config::visit(None, keys).map(drop));
    let mut renamed = Vec::new();
    for table in sorted(tables) {
        let (_, heading, text) = SECTIONS
            .iter()
            .find(|(name, ..)| *name == table.name)
            .unwrap_or_else(|| panic!("[{}] has no heading", table.name));
        let level = if table.name.contains('.') { "###" } else { "##" };
        let _ = write!(page, "\n{level} {heading}\n\n");
        if !text.is_empty() {
            let _ = write!(page, "{text}\n\n");
        }
        page += &rows(&table.keys);
        let full = |row: &KeyRow| Some((format!("`{}.{}`", table.name, row.former?), row.name));
        renamed.extend(table.keys.iter().filter_map(full));
    }
    page += JUDGES;
    let _ = write!(page, "\n{}", rows(&judge_keys()));
    for kind in KINDS {
        let keys = keys_of_judge(kind);
        let _ = write!(page, "\n### `kind = \"{kind}\"`\n\n{}", rows(&keys));
        let full = |row: &KeyRow| Some((format!("`judges[].{}` ({kind})", row.former?), row.name));
        renamed.extend(keys.iter().filter_map(full));
    }
    page += "\n## Renamed keys\n\nA former name is refused with a hint, except in the `config.toml` of an older run.\n\n";
    page += "| former | now |\n|---|---|\n";
    for (former, now) in renamed {
        let _ = writeln!(page, "| {former} | `{now}` |");
    }
    page
}

/// Keys that every judge has.
pub(super) fn judge_keys() -> Vec<KeyRow> {
    let mut keys = list(|keys| JudgeSection::visit(None, keys).map(drop)).remove(0).keys;
    // Those of the default kind follow.
    keys.truncate(4);
    keys
}

/// Keys of one kind of judge.
pub(super) fn keys_of_judge(kind: &str) -> Vec<KeyRow> {
    list(|keys| JudgeKind::visit(kind, None, keys).map(drop)).remove(0).keys
}

pub(super) fn list(visit: impl FnOnce(&mut Keys) -> super::error::Result<()>) -> Vec<Table<KeyRow>> {
    let mut keys = Keys::list();
    visit(&mut keys).expect("only reading fails");
    let Keys::List(tables) = keys else { unreachable!("as created") };
    tables
}

fn rows(rows: &[KeyRow]) -> String {
    let mut text = "| key | type | default | on resume | meaning |\n|---|---|---|---|---|\n".to_owned();
    for row in rows {
        let default = row.default.as_deref().unwrap_or("*required*");
        let resume = if row.resume == Resume::Free { "free" } else { "" };
        let methods = match &row.methods[..] {
            [] => String::new(),
            methods => {
                let names: Vec<_> = methods.iter().map(|method| format!("`{method}`")).collect();
                format!(" Only for {}.", names.join(", "))
            }
        };
        let KeyRow { name, kind, doc, .. } = row;
        let _ = writeln!(text, "| `{name}` | {kind} | {default} | {resume} | {doc}{methods} |");
    }
    text
}
