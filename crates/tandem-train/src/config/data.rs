//! `[data]`: rows and their order.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::path::PathBuf;

use tandem_data::columns::KEYS;
use tandem_data::record::RowKind;
use tandem_data::row::{LossMask, Truncation};
use tandem_data::shapes::NamedShape;
use toml::{Table, Value};

use super::Method;
use super::error::Result;
use super::form::{Form, boolean, choice, custom, integer, number, path, path_value, texts_value};
use super::keys::keys;
use super::reader::{Entry, nearest};

keys! {
    /// Source of rows, and limits on their length.
    #[derive(Clone, Debug, PartialEq)]
    pub struct DataConfig(method: Method) {
        /// Training rows: a file, a pattern such as `"data/*.parquet"`, a folder of `save_to_disk`,
        /// a split of the [hub](hub.md) (`hf://owner/name/split`), a list of them, or a list of tables
        /// with `path` and `weight`. [Formats](data.md#files) are JSONL, JSON, CSV, TSV, Parquet and
        /// Arrow, also with `.gz` or `.zst`. Weight 2 puts every row of the file into an epoch twice,
        /// 0.5 every second row.
        train: Vec<DataSource> = sources().required(SOURCES),
        /// Held-out rows, in the same formats. Online runs answer their prompts, and report the mean reward.
        eval: Vec<DataSource> = sources().or(Vec::new()).free(),
        /// Shape of the rows; without it, it is recognised from the columns. See [data](data.md#shapes).
        shape: Option<NamedShape> = choice(NamedShape::NAMES).optional().methods_because(
            method,
            |method| !method.generates(),
            "an online run reads prompts alone; map their column with data.columns = { prompt = \"…\" }",
        ),
        /// Columns by the key that they are read as: `{ prompt = "question" }`.
        columns: BTreeMap<String, String> = columns().or(BTreeMap::new()),
        /// Columns that are left out on purpose. A column that looks like a part of the prompt is
        /// refused otherwise.
        ignore_columns: Vec<String> = ignored().or(Vec::new()),
        /// Side of preferences to train on as demonstrations.
        take: Option<Side> = choice([("chosen", Side::Chosen)]).optional().methods_because(
            method,
            |method| method.rows() == RowKind::Supervised,
            "only method = \"sft\" trains on one side; remove `take`",
        ),
        /// Number of training rows to use, from the first file on.
        train_rows: Option<usize> = integer(1..=1 << 40).optional(),
        /// Number of held-out rows to use.
        eval_rows: Option<usize> = integer(1..=1 << 40)
            .optional()
            .free()
            .only(!eval.is_empty(), "data.eval names no held-out rows; remove `eval_rows`"),
        /// Longest prompt in tokens; rows with a longer one are dropped.
        max_prompt_length: Option<usize> = integer(1..=1 << 24).optional(),
        /// Longest sequence in tokens, prompt and completion together.
        max_length: usize = integer(2..=1 << 24).or(1024),
        /// The part of a longer sequence that is kept. `"keep_start"`: its beginning; a row whose
        /// prompt alone fills it is dropped. `"keep_end"`: its end, separately for each completion.
        /// Reward models drop a pair with a longer text. Online runs drop a prompt that leaves no
        /// room for `online.max_new_tokens`.
        truncation: Truncation = choice([
            ("keep_start", Truncation::KeepStart),
            ("keep_end", Truncation::KeepEnd),
        ])
        .or(Truncation::KeepStart)
        .methods_because(
            method,
            |method| method.untruncated().is_none(),
            format!("{}; remove it", method.untruncated().unwrap_or_default()),
        ),
        /// Order of the rows within an epoch. `"shuffled"`: a new permutation each epoch, from
        /// `seed` + epoch. `"sequential"`: file order.
        order: Order = choice(Order::NAMES).or(Order::Shuffled),
        /// Folder of the cache of tokens and reference log-probabilities.
        cache: Option<PathBuf> = path().optional().shown("the user's cache folder").free(),
        /// Compute the common prefix of a pair's completions once. The loss is the same.
        share_prefix: bool = boolean().or(true),
        /// Chat template instead of that of the model or of `adapter.start`: a path, or the text itself (with `{{` or
        /// `{%`). The saved model has it as `chat_template.jinja`.
        chat_template: Option<TemplateSource> = template().optional(),
        /// Tokens that enter the loss. `"answer"`: the completion or the assistant's turns; all of a
        /// `text`. `"all"`: every token; for DPO, also the prompt's in the likelihood of its `sft` term,
        /// as ORPO has it.
        loss_on: LossMask = choice([("answer", LossMask::Answer), ("all", LossMask::All)])
            .or(LossMask::Answer)
            .methods_because(
                method,
                |method| method.rows() == RowKind::Supervised || method == Method::Dpo,
                "the loss is always on the completions; remove `loss_on`",
            ),
    }
}

/// Side of a preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The better completion.
    Chosen,
}

/// A file of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct DataSource {
    /// A file, a pattern, or a folder of a saved data set.
    pub path: PathBuf,
    /// Number of times that each row is in an epoch; 0.5 takes every second row.
    pub weight: f64,
}

/// A chat template of the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplateSource {
    /// A file.
    Path(PathBuf),
    /// The template itself.
    Text(String),
}

/// Order of the rows within an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// A new permutation each epoch, from `seed + epoch`.
    Shuffled,
    /// File order.
    Sequential,
}

impl Order {
    const NAMES: [(&str, Self); 2] = [("shuffled", Self::Shuffled), ("sequential", Self::Sequential)];
}

const SOURCES: &str = "a path, a list of paths, or a list of tables with `path` and `weight`";

fn sources<'a>() -> Form<'a, Vec<DataSource>> {
    let read = |entry: Entry| {
        let empty = entry.wrong(SOURCES);
        let sources = entry.items().into_iter().map(source).collect::<Result<Vec<_>>>()?.concat();
        if sources.is_empty() { Err(empty) } else { Ok(sources) }
    };
    custom("path or list", read, |sources: &Vec<DataSource>| match &sources[..] {
        [] => None,
        [only] if only.weight == 1.0 => Some(path_value(&only.path)),
        many => Some(Value::Array(many.iter().map(source_value).collect())),
    })
}

fn template<'a>() -> Form<'a, TemplateSource> {
    let read = |entry: Entry| match entry.string()? {
        text if text.contains("{{") || text.contains("{%") => Ok(TemplateSource::Text(text.to_owned())),
        _ => entry.path().map(TemplateSource::Path),
    };
    custom("path or text", read, |source: &TemplateSource| match source {
        TemplateSource::Path(path) => path_value(path),
        TemplateSource::Text(text) => Value::from(text.clone()),
    })
}

fn columns<'a>() -> Form<'a, BTreeMap<String, String>> {
    const EXPECTED: &str = "a table of key = \"column\", for example { prompt = \"question\" }";
    let read = |entry: Entry| {
        let wrong = entry.wrong(EXPECTED);
        let mut columns = BTreeMap::new();
        for entry in entry.section().map_err(|_| wrong)?.drain() {
            let key = entry.name().to_owned();
            if !KEYS.contains(&key.as_str()) {
                let hint = match nearest(&key, &KEYS) {
                    Some(known) => format!("did you mean `{known}`?"),
                    None => format!("keys are {}", KEYS.join(", ")),
                };
                return Err(entry.conflict(format!("no key that rows are read by; {hint}")));
            }
            match entry.string() {
                Ok(column) if !column.is_empty() => columns.insert(key, column.to_owned()),
                _ => return Err(entry.wrong("the name of a column")),
            };
        }
        Ok(columns)
    };
    custom("table", read, |columns: &BTreeMap<String, String>| {
        let entries = columns.iter().map(|(key, column)| (key.clone(), column.clone().into()));
        (!columns.is_empty()).then(|| Value::Table(entries.collect()))
    })
}

fn ignored<'a>() -> Form<'a, Vec<String>> {
    let read = |entry: Entry| entry.items().iter().map(|item| item.string().map(str::to_owned)).collect();
    custom("list of strings", read, |names: &Vec<String>| (!names.is_empty()).then(|| texts_value(names)))
}

/// Weights of files; every copy of a row takes memory.
const WEIGHTS: (Bound<f64>, Bound<f64>) = (Bound::Excluded(0.0), Bound::Included(10_000.0));

/// Reads a source: a file, or the files of a split of the hub.
fn source(entry: Entry) -> Result<Vec<DataSource>> {
    let weighted =
        |paths: Vec<PathBuf>, weight| paths.into_iter().map(|path| DataSource { path, weight }).collect();
    if entry.string().is_ok() {
        return Ok(weighted(entry.rows_or_name()?, 1.0));
    }
    let wrong = entry.wrong(SOURCES);
    let mut table = entry.section().map_err(|_| wrong)?;
    let paths = match table.take("path") {
        Some(entry) => entry.rows_or_name()?,
        None => return Err(table.missing("path", "a file of rows")),
    };
    let weight = table.take("weight").map_or(Ok(1.0), |entry| (number(WEIGHTS).read)(entry))?;
    table.finish()?;
    Ok(weighted(paths, weight))
}

fn source_value(source: &DataSource) -> Value {
    if source.weight == 1.0 {
        return path_value(&source.path);
    }
    let entries = [("path", path_value(&source.path)), ("weight", source.weight.into())];
    Value::Table(Table::from_iter(entries.map(|(key, value)| (key.to_owned(), value))))
}
