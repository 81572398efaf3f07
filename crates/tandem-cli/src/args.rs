//! Command line definition for clap. Every doc comment here is part of the manual.

use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use tandem_comm::Launch;
use tandem_kernels::DType;
use tandem_model::Sampling;
use tandem_train::size;

use crate::commands::serve::limits::LimitArguments;
use crate::exit::mistake;
use crate::log::LogArguments;

/// Preference optimisation for language models: SFT, then DPO.
#[derive(Debug, Parser)]
#[command(name = "tandem", version, after_help = EXIT_CODES, max_term_width = 110, arg_required_else_help = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub log: LogArguments,
}

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    a fault of Tandem's own, or of the machine (a full disk, no memory)
  2    a mistake in the command, the configuration, the model or the data
  75   a peer was lost; start again with --resume
  129  stopped by SIGHUP after saving, when the terminal closed; start again with --resume
  130  stopped by Ctrl-C after saving; start again with --resume
  143  stopped by SIGTERM after saving; start again with --resume";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a model as run.toml says.
    Train(TrainArguments),
    /// Show the memory, placement and time of a run, without running it.
    Plan(PlanArguments),
    /// Explain keys of a configuration, print a resolved one, or write its JSON schema.
    Config(ConfigArguments),
    /// Show the data as the model sees it: tokens, the trained ones in colour.
    Data(DataArguments),
    /// Evaluate the model of run.toml on its held-out data, or with --judge the win rate of a
    /// model's completions.
    Eval(EvalArguments),
    /// List runs with their last metrics, and the keys in which they differ.
    Runs(RunsArguments),
    /// Show curves, advice and samples of runs in a browser, while they go on.
    Watch(WatchArguments),
    /// Write curves, advice and samples of runs as one HTML file.
    Report(ReportArguments),
    /// Continue prompts with a model.
    Generate(GenerateArguments),
    /// Talk with a model in the terminal.
    Chat(ChatArguments),
    /// Serve a model through OpenAI's HTTP interface.
    Serve(ServeArguments),
    /// Merge an adapter into its base model.
    Merge(MergeArguments),
    /// Write a model in another program's format.
    Export(ExportArguments),
    /// Make a model's or an adapter's folder of a checkpoint.
    Checkpoint(CheckpointArguments),
    /// Compute steps of a run again, on any ranks, and tell whether they give the same bits.
    Verify(VerifyArguments),
    /// Write the first run.toml: from answers, or from another program's settings.
    Init(InitArguments),
    /// Create a model of random weights from a config.json.
    InitWeights(InitWeightsArguments),
    /// Start several ranks of a run, one process each, on this machine or on several.
    Launch(LaunchArguments),
    /// List this machine's devices and libraries, and which ones are missing.
    Doctor(DoctorArguments),
    /// Print a shell's completions of this command.
    Completions(CompletionsArguments),
    /// Write the manual pages of this command and its subcommands.
    Man(ManArguments),
    /// See it work: create a small corpus, train a tiny model by SFT and DPO, and judge it. Takes
    /// two minutes.
    Quickstart(QuickstartArguments),
}

/// A configuration file, and changes to it.
#[derive(Debug, Args)]
pub(crate) struct RunArguments {
    /// The run's configuration. Paths in it are relative to it.
    #[arg(value_name = "RUN.TOML")]
    pub config: PathBuf,
    /// Change a key of the configuration, for example --set train.learning_rate=1e-5. May be
    /// repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct TrainArguments {
    #[command(flatten)]
    pub run: RunArguments,
    /// Continue from the newest complete checkpoint in the output folder.
    #[arg(long, conflicts_with = "overwrite")]
    pub resume: bool,
    /// Delete what an earlier run left in the output folder.
    #[arg(long)]
    pub overwrite: bool,
    /// Memory limit of each rank, for example 24GiB: short for --set compute.memory=24GiB.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<String>,
    /// Print metrics, checkpoints, warnings and the end on stdout, one JSON object a line.
    #[arg(long)]
    pub json: bool,
    /// Profile five steps after two warm-up steps: time of each phase and operation beside the
    /// machine's rate, and memory traffic. Shown at the end; each rank writes a table, the same as
    /// JSON, and a trace for Perfetto or chrome://tracing into profile/ of the run's folder.
    /// Results stay the same bits; measuring the machine takes two seconds before training.
    #[arg(long)]
    pub profile: bool,
}

impl TrainArguments {
    /// Returns the changes to the configuration.
    ///
    /// # Errors
    /// See [`overrides`].
    pub(crate) fn overrides(&self) -> anyhow::Result<Vec<String>> {
        overrides(&self.run.overrides, &[("--memory", "compute.memory", self.memory.as_deref())])
    }
}

/// Returns the changes to the configuration by `--set`, and those by options that are short for one: name of
/// the option, key, value if given.
///
/// # Errors
/// An option and `--set` give a key two values.
pub(crate) fn overrides(
    set: &[String],
    options: &[(&str, &str, Option<&str>)],
) -> anyhow::Result<Vec<String>> {
    let mut all = set.to_vec();
    for (option, key, value) in options {
        let Some(value) = value else { continue };
        let same = set.iter().filter_map(|text| text.split_once('=')).filter(|(name, _)| name.trim() == *key);
        for (_, other) in same {
            if other.trim().trim_matches(['"', '\'']) != *value {
                return Err(mistake(format!(
                    "{option} {value} and --set {key}={other} give `{key}` two values; remove one of the two"
                )));
            }
        }
        all.push(format!("{key}={value}"));
    }
    Ok(all)
}

#[derive(Debug, Args)]
pub(crate) struct PlanArguments {
    /// The run's configuration. Paths in it are relative to it.
    #[arg(value_name = "RUN.TOML", required_unless_present_any = ["measure", "model"])]
    pub config: Option<PathBuf>,
    /// Plan a run of this model without a configuration: a folder with config.json, or a name of the hub, of
    /// which no weights are downloaded. It is DPO of every weight with 16 pairs a step unless --method,
    /// --train or --set say otherwise, and micro-batches have 4096 tokens unless --assume-tokens does.
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["config", "measure"])]
    pub model: Option<String>,
    /// Training method of --model. Default: dpo. The teacher of distill is as large as the model unless
    /// --set reference.model=TEACHER says otherwise.
    #[arg(long, value_enum, conflicts_with_all = ["config", "measure"])]
    pub method: Option<InitMethod>,
    /// Parameters of --model that train. Default: all of them.
    #[arg(long, value_enum, conflicts_with_all = ["config", "measure"])]
    pub train: Option<Trained>,
    /// Change a key of the configuration, for example --set compute.sharding=zero3. May be
    /// repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Plan for other devices than the configuration's, one per rank: 2xA10, 8xH100, 64xH100-80GB,
    /// 4xcpu. They compute in bf16 unless compute.dtype says f32.
    #[arg(long, value_name = "NxNAME")]
    pub devices: Option<String>,
    /// A device table of your own; its rows override built-in rows of the same name.
    #[arg(long, value_name = "FILE")]
    pub device_table: Option<PathBuf>,
    /// Measure this machine's CPU in a few seconds, write it as a device table, and stop.
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    pub measure: Option<PathBuf>,
    /// Memory limit of each rank, for example 24GiB: short for --set compute.memory=24GiB.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<String>,
    /// Memory of a machine, for what its devices offload, for example 256GiB. Default: for --devices, not
    /// known; else this machine's. With --devices of a cpu, the memory that its ranks share.
    #[arg(long, value_name = "SIZE", conflicts_with = "measure", value_parser = memory_size)]
    pub host_memory: Option<u64>,
    /// Plan without data and tokenizer: only config.json of the model folder is read, and every
    /// micro-batch has this many tokens. Rows are as long as data.max_length allows. A pair is a
    /// prompt and two completions of the same length, the prompt computed once; an SFT row is a
    /// prompt and a completion.
    #[arg(long, value_name = "TOKENS", value_parser = tokens)]
    pub assume_tokens: Option<usize>,
    /// Number of these tokens in completions. Default: two thirds of a pair, half of another row.
    #[arg(long, value_name = "TOKENS", requires = "assume_tokens", value_parser = tokens)]
    pub assume_scored: Option<usize>,
    /// Search for the fastest plans that fit, over shardings and memory-saving changes.
    #[arg(long)]
    pub search: bool,
    /// Also list the operations of the slowest rank's step: calls, arithmetic, bytes, estimated time and
    /// what bounds it. With --json it is the key "operations".
    #[arg(long)]
    pub operations: bool,
    /// Print the plan as JSON.
    #[arg(long, conflicts_with = "search")]
    pub json: bool,
    /// Also write the plan as an HTML page.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

fn tokens(text: &str) -> Result<usize, String> {
    number(text, 1 << 30)
}

fn threads(text: &str) -> Result<usize, String> {
    number(text, 4096)
}

fn completions(text: &str) -> Result<usize, String> {
    number(text, 1 << 16)
}

/// Parses a number of at least 1.
pub(crate) fn count(text: &str) -> Result<NonZeroUsize, &'static str> {
    text.parse().map_err(|_| "expected a number of at least 1")
}

/// Parses a number from 1 to `most`.
fn number(text: &str, most: usize) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=most).contains(number));
    number.ok_or_else(|| format!("expected a number from 1 to {most}"))
}

fn memory_size(text: &str) -> Result<u64, &'static str> {
    size::parse(text).ok_or("expected a size with its unit, for example 256GiB")
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, arg_required_else_help = true)]
pub(crate) struct ConfigArguments {
    /// Keys or tables to explain, for example train.batch_size, or adapter.
    #[arg(value_name = "KEY")]
    pub keys: Vec<String>,
    #[command(subcommand)]
    pub command: Option<ConfigCommand>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print a configuration with every default written out and absolute paths. Names of the hub are
    /// downloaded without weights.
    Show(RunArguments),
    /// Print the JSON schema of configurations. An editor with taplo takes it from a first line
    /// `#:schema FILE`.
    Schema,
}

#[derive(Debug, Args)]
pub(crate) struct LaunchArguments {
    /// Ranks to start on this machine, or on each of --hosts.
    #[arg(long, short = 'n', value_name = "RANKS", required_unless_present = "hostfile")]
    pub ranks: Option<usize>,
    /// Number of machines of the job; start this command on each.
    #[arg(long, default_value_t = 1)]
    pub nodes: usize,
    /// Index of this machine, from 0.
    #[arg(long, default_value_t = 0)]
    pub node: usize,
    /// Rendezvous address: host name and free port of the first machine.
    #[arg(long, value_name = "HOST:PORT")]
    pub address: Option<String>,
    /// Start the ranks on these machines over ssh, without a login of yours on each: names as ssh
    /// takes them. This folder and this program must be at the same paths there.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', group = "machines", conflicts_with_all = ["nodes", "node", "hostfile"])]
    pub hosts: Vec<String>,
    /// A file with the machines, one per line: NAME, or NAME slots=RANKS.
    #[arg(long, value_name = "FILE", group = "machines", conflicts_with_all = ["nodes", "node"])]
    pub hostfile: Option<PathBuf>,
    /// Program that runs a command on a machine, in place of ssh; words are split at spaces.
    #[arg(long, value_name = "COMMAND", default_value = "ssh -o BatchMode=yes", requires = "machines")]
    pub ssh: String,
    /// Start all ranks again, with --resume, after a failure that is no mistake of the user's; at most
    /// so often.
    #[arg(long, value_name = "TIMES", default_value_t = 0)]
    pub max_restarts: usize,
    /// Start again without the ranks that failed, while so many are left. The bits stay the same.
    #[arg(long, value_name = "RANKS", requires = "max_restarts")]
    pub min_ranks: Option<usize>,
    /// Also write each rank's output into a file of this folder.
    #[arg(long, value_name = "FOLDER")]
    pub log_dir: Option<PathBuf>,
    /// First rank here and number of all ranks, where another launcher started this one.
    #[arg(long, value_name = "FIRST:ALL", hide = true, requires = "address")]
    pub part: Option<Part>,
    /// Command that each rank runs, for example: train run.toml
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// A part of a job's ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// First rank.
    pub first: usize,
    /// Number of all ranks.
    pub all: usize,
}

impl FromStr for Part {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let numbers = text.split_once(':').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        numbers.map(|(first, all)| Self { first, all }).ok_or("expected FIRST:ALL, as in 4:8")
    }
}

impl LaunchArguments {
    /// Launch options for a launcher that started one process per machine, to start `ranks` there.
    pub(crate) fn for_ranks(launch: &Launch, ranks: usize, command: Vec<String>) -> Self {
        let Launch { num_processes, process, meeting_point, .. } = launch;
        let address = meeting_point.as_ref().map(|point| format!("{}:{}", point.host, point.port));
        Self {
            ranks: Some(ranks),
            nodes: *num_processes,
            node: *process,
            address,
            hosts: Vec::new(),
            hostfile: None,
            ssh: String::new(),
            max_restarts: 0,
            min_ranks: None,
            log_dir: None,
            part: None,
            command,
        }
    }
}

/// Options that only apply with `--judge`.
const JUDGED: [&str; 18] = [
    "model",
    "adapter",
    "against",
    "against_adapter",
    "against_column",
    "prompts",
    "samples",
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "stop",
    "seed",
    "device",
    "threads",
    "dtype",
];

#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("judged").args(JUDGED).multiple(true).requires("judge"),
    group = ArgGroup::new("opponent").args(["against", "against_column"]),
)]
pub(crate) struct EvalArguments {
    /// The run's configuration. Paths in it are relative to it.
    #[arg(value_name = "RUN.TOML", required_unless_present = "judge")]
    pub config: Option<PathBuf>,
    /// Change a key of the configuration, for example --set data.max_length=512. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Evaluate the weights of a checkpoint of this run instead of the model that it starts from.
    #[arg(long, value_name = "FOLDER")]
    pub checkpoint: Option<PathBuf>,
    #[command(flatten)]
    pub judged: JudgedArguments,
}

/// Two sets of completions and the judges that compare them.
#[derive(Debug, Args)]
#[command(next_help_heading = "How often a model's answers are better than others")]
pub(crate) struct JudgedArguments {
    /// Instead of a run, report how often the completions of --model beat those of --against, by
    /// the judges of this file: see docs/judges.md. Both answer every prompt once.
    #[arg(long, value_name = "JUDGES.TOML", requires_all = ["model", "prompts", "opponent"])]
    pub judge: Option<PathBuf>,
    /// The model's folder.
    #[arg(long, value_name = "FOLDER")]
    pub model: Option<PathBuf>,
    /// Adapter folder, merged into the model in memory.
    #[arg(long, value_name = "FOLDER")]
    pub adapter: Option<PathBuf>,
    /// Folder of the model to compare with.
    #[arg(long, value_name = "FOLDER")]
    pub against: Option<PathBuf>,
    /// Adapter folder, merged into that model in memory.
    #[arg(long, value_name = "FOLDER", requires = "against")]
    pub against_adapter: Option<PathBuf>,
    /// Compare with given completions: the name of their column in the prompts file.
    #[arg(long, value_name = "NAME")]
    pub against_column: Option<String>,
    /// A JSONL or JSON file of rows with a `prompt`: a string, continued as it is, or messages for
    /// the chat template. The judges get the other fields.
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Write prompts, completions, scores and judges' replies to this file, one JSON line per
    /// prompt.
    #[arg(long, value_name = "FILE")]
    pub samples: Option<PathBuf>,
    /// Print the result as JSON. Without --judge it always is.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub sampling: SamplingArguments,
    #[command(flatten)]
    pub compute: ComputeArguments,
}

#[derive(Debug, Args)]
pub(crate) struct DataArguments {
    #[command(flatten)]
    pub run: RunArguments,
    /// Number of rows to show.
    #[arg(long, short = 'n', default_value_t = 3)]
    pub rows: usize,
    /// Index of the first row to show.
    #[arg(long, default_value_t = 0)]
    pub from: usize,
    /// Show the evaluation data instead of the training data.
    #[arg(long)]
    pub eval: bool,
    /// Show each token's id after it.
    #[arg(long)]
    pub ids: bool,
    /// Most tokens to show of the start and the end of each part; 0 shows all.
    #[arg(long, default_value_t = 0)]
    pub limit: usize,
    /// Print the rows as JSON, one object a line, with the text and the ids of each part.
    #[arg(long, conflicts_with_all = ["ids", "limit"])]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    #[command(flatten)]
    pub weights: WeightArguments,
    /// Prompts. Without any, each line of standard input is a prompt.
    #[arg(value_name = "PROMPT")]
    pub prompts: Vec<String>,
    /// Continue the prompt as it is, without the chat template.
    #[arg(long)]
    pub raw: bool,
    /// A system message before each prompt.
    #[arg(long, conflicts_with = "raw")]
    pub system: Option<String>,
    /// Print prompts and completions as JSON, one object a line.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub sampling: SamplingArguments,
    #[command(flatten)]
    pub compute: ComputeArguments,
}

#[derive(Debug, Args)]
pub(crate) struct ChatArguments {
    #[command(flatten)]
    pub weights: WeightArguments,
    /// A system message at the beginning.
    #[arg(long)]
    pub system: Option<String>,
    /// Most tokens of a conversation; not more than the model has positions.
    #[arg(long, default_value_t = 4096, value_parser = tokens)]
    pub context: usize,
    #[command(flatten)]
    pub sampling: SamplingArguments,
    #[command(flatten)]
    pub compute: ComputeArguments,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArguments {
    #[command(flatten)]
    pub weights: WeightArguments,
    /// Model name of requests; default: the folder's name.
    #[arg(long)]
    pub name: Option<String>,
    /// Listen address; by default only programs of this machine can connect.
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    pub host: IpAddr,
    /// Listen port; 0 takes a free one.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Environment variable that holds the API key; requests must send it.
    #[arg(long, value_name = "NAME")]
    pub key_env: Option<String>,
    /// Most tokens of a prompt and its completion, within the model's context length.
    #[arg(long, default_value_t = 4096, value_parser = tokens)]
    pub context: usize,
    /// Most completions in progress at once.
    #[arg(long, default_value_t = 16, value_parser = completions)]
    pub max_batch: usize,
    /// Most tokens of all prompts and completions in progress; default: four times --context.
    /// Further requests wait.
    #[arg(long)]
    pub cache_tokens: Option<usize>,
    #[command(flatten)]
    pub limits: LimitArguments,
    #[command(flatten)]
    pub compute: ComputeArguments,
}

/// Model for generation.
#[derive(Clone, Debug, Args)]
pub(crate) struct WeightArguments {
    /// The model's folder, or its name on the Hugging Face hub: owner/name or owner/name@revision. Also an
    /// adapter's folder, whose base model is found by the name in it, a run's folder, or a checkpoint's.
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// Adapter folder, merged into the model in memory.
    #[arg(long, value_name = "FOLDER")]
    pub adapter: Option<PathBuf>,
}

/// Device and type of the computation.
#[derive(Debug, Args)]
pub(crate) struct ComputeArguments {
    /// Device: auto (the first GPU, else the CPU), cpu, cuda, or cuda:1 for the second GPU.
    #[arg(long, default_value = "auto")]
    pub device: Place,
    /// Number of CPU threads; default: all cores.
    #[arg(long, value_parser = threads)]
    pub threads: Option<usize>,
    /// Compute type.
    #[arg(long, value_enum, default_value_t = ComputeType::F32)]
    pub dtype: ComputeType,
}

/// A compute type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ComputeType {
    F32,
    Bf16,
}

/// Device of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The first GPU, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this ordinal.
    Cuda(usize),
}

impl FromStr for Place {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let ordinal = text.strip_prefix("cuda:").map(str::parse);
        match (text, ordinal) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(0)),
            (_, Some(Ok(ordinal))) => Ok(Self::Cuda(ordinal)),
            _ => Err("expected auto, cpu, cuda, or cuda: with the number of a GPU"),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct SamplingArguments {
    /// Most tokens to generate for a prompt. A completion also ends where the model's context ends.
    #[arg(long, default_value_t = 256, value_parser = tokens)]
    pub max_new_tokens: usize,
    /// Sampling temperature. 0 takes the most likely token, the default of `generate`; 1 samples
    /// from the model's distribution; `chat` has 0.7.
    #[arg(long, allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Sample among this many most likely tokens only.
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Sample among the most likely tokens whose probabilities add up to this.
    #[arg(long, allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Sample among tokens at least this fraction as likely as the most likely one.
    #[arg(long, allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Penalty on tokens that the prompt or completion already holds; 1 is none.
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub repetition_penalty: f32,
    /// Stop string, not part of the completion; may be repeated.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Sampling seed; default: 0 in `generate`, a new one each time in `chat`.
    #[arg(long)]
    pub seed: Option<u64>,
}

impl SamplingArguments {
    /// Sampling options, with this default temperature.
    ///
    /// # Errors
    /// An option was given that has no effect at temperature 0.
    pub(crate) fn sampling(&self, temperature: f32, seed: u64) -> anyhow::Result<Sampling> {
        let temperature = self.temperature.unwrap_or(temperature);
        let given = [
            ("--top-k", self.top_k.is_some()),
            ("--top-p", self.top_p.is_some()),
            ("--min-p", self.min_p.is_some()),
            ("--seed", self.seed.is_some()),
        ];
        if let Some((option, _)) = given.iter().find(|(_, is_given)| *is_given && temperature == 0.0) {
            return Err(mistake(format!(
                "{option} has no effect at temperature 0, which takes the most likely token: give --temperature too, such as \
                 --temperature 1, or remove {option}"
            )));
        }
        Ok(Sampling {
            repetition_penalty: self.repetition_penalty,
            temperature,
            top_k: self.top_k,
            top_p: self.top_p.unwrap_or(1.0),
            min_p: self.min_p.unwrap_or(0.0),
            seed,
        })
    }
}

#[derive(Debug, Args)]
pub(crate) struct MergeArguments {
    /// Adapter folder in peft's format.
    #[arg(value_name = "ADAPTER")]
    pub adapter: PathBuf,
    /// Folder to create.
    #[arg(value_name = "OUTPUT")]
    pub output: PathBuf,
    /// Folder of the base model; default: base_model_name_or_path of the adapter.
    #[arg(long, value_name = "MODEL")]
    pub base: Option<PathBuf>,
    /// Type of the stored weights; default: the base model's.
    #[arg(long, value_enum)]
    pub dtype: Option<StoredType>,
}

#[derive(Debug, Args)]
pub(crate) struct CheckpointArguments {
    #[command(subcommand)]
    pub command: CheckpointCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// Write the weights of a checkpoint as a model's folder, or as an adapter's.
    Export {
        /// Folder of the checkpoint, for example runs/dpo/checkpoints/step-000200.
        #[arg(value_name = "CHECKPOINT")]
        checkpoint: PathBuf,
        /// Folder to create.
        #[arg(long, value_name = "FOLDER")]
        out: PathBuf,
        /// Configuration of the run. Default: config.toml of the run's folder.
        #[arg(long, value_name = "RUN.TOML")]
        config: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArguments {
    /// Folder of the run. Nothing is written there.
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// Steps to compute again: from a checkpoint, or 0 for the start, to a checkpoint. Either end may be left
    /// out. Default: from the start to the newest checkpoint.
    #[arg(long, value_name = "A..B")]
    pub steps: Option<Steps>,
    /// Devices to compute on: short for --set compute.devices=cpu:2. Default: as many ranks as the run had.
    #[arg(long, value_name = "DEVICES")]
    pub devices: Option<String>,
    /// Sharding: short for --set compute.sharding=zero3. Default: that of the run.
    #[arg(long, value_name = "SHARDING")]
    pub sharding: Option<String>,
    /// Threads of each rank: short for --set compute.threads=1. Default: all cores, divided among the ranks.
    #[arg(long, value_name = "THREADS")]
    pub threads: Option<usize>,
    /// Change a key of the configuration that leaves the bits as they are, such as a path: for example --set
    /// model=FOLDER, where the model is elsewhere on this machine. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Compute although this machine's arithmetic gives other bits.
    #[arg(long)]
    pub force: bool,
    /// Start the programs that the run had as judges or environment. They run with your rights.
    #[arg(long)]
    pub run_commands: bool,
    /// Folder to create for the recomputed run, which is kept. Default: a temporary one, in which
    /// each checkpoint is deleted when it was compared.
    #[arg(long, value_name = "FOLDER")]
    pub out: Option<PathBuf>,
}

/// A stretch of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Steps {
    /// Steps done before it.
    pub from: Option<u64>,
    /// Steps done after it.
    pub to: Option<u64>,
}

impl FromStr for Steps {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let expected = "expected A..B with the numbers of steps, as in 20..40, ..40 or 20..";
        let (from, to) = text.split_once("..").ok_or(expected)?;
        let number = |text: &str| match text {
            "" => Ok(None),
            text => text.parse().map(Some).map_err(|_| expected),
        };
        Ok(Self { from: number(from)?, to: number(to)? })
    }
}

#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// Model folder, GGUF file, folder of a run (its final model), or a model's name on the hub.
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// File to create. A name that ends with .pt gets the format of Mitchell's DPO repository,
    /// policy.pt: step_idx 0, the state dict under the names of transformers 4, and no metrics.
    #[arg(long, value_name = "FILE")]
    pub to: PathBuf,
    /// Type of the stored weights; default: the model's.
    #[arg(long, value_enum)]
    pub dtype: Option<StoredType>,
}

/// A storage type.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum StoredType {
    F32,
    Bf16,
}

impl From<StoredType> for DType {
    fn from(stored: StoredType) -> Self {
        match stored {
            StoredType::F32 => Self::F32,
            StoredType::Bf16 => Self::Bf16,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct InitArguments {
    /// File to write. Relative paths in it are relative to its folder.
    #[arg(value_name = "RUN.TOML", default_value = "run.toml")]
    pub file: PathBuf,
    #[arg(value_name = "OUTPUT", hide = true)]
    pub second: Option<PathBuf>,
    /// Translate this file: a YAML file of TRL, Axolotl or LLaMA-Factory, an Accelerate or DeepSpeed
    /// configuration, or the command line of a training script; - reads standard input. May be repeated:
    /// the files of one run.
    #[arg(long, value_name = "FILE")]
    pub from: Vec<PathBuf>,
    /// The program that the files of --from are of, where their content does not tell.
    #[arg(long, value_enum, requires = "from")]
    pub kind: Option<ForeignProgram>,
    /// Ranks that the other program's run had, if none of its files says it.
    #[arg(long, value_name = "RANKS", requires = "from", value_parser = clap::value_parser!(u64).range(1..))]
    pub ranks: Option<u64>,
    /// Training method. Where it is missing, init says which ones the rows fit.
    #[arg(long, value_enum)]
    pub method: Option<InitMethod>,
    /// Model folder, GGUF file, or a name of the hub.
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Training rows: a file, a pattern, or a split of the hub as hf://owner/name/train. May be repeated.
    #[arg(long, value_name = "ROWS")]
    pub data: Vec<String>,
    /// Held-out rows. May be repeated.
    #[arg(long, value_name = "ROWS")]
    pub eval_data: Vec<String>,
    /// Judge of completions, for online and grpo: a reward model's folder or its name on the hub, or a
    /// file of judges as eval --judge takes it, which ends with .toml. May be repeated.
    #[arg(long, value_name = "JUDGE", conflicts_with = "from")]
    pub judge: Vec<String>,
    /// Teacher of distill: a model folder, or a name of the hub.
    #[arg(long, value_name = "MODEL", conflicts_with = "from")]
    pub teacher: Option<String>,
    /// Run folder; default: runs/METHOD.
    #[arg(long, value_name = "FOLDER")]
    pub output: Option<String>,
    /// Parameters that train: all of them, a LoRA adapter, or one on weights in 4 bits. Default: all.
    #[arg(long, value_enum, conflicts_with = "from")]
    pub train: Option<Trained>,
    /// Devices of the run: auto, cpu, cpu:4, cuda, cuda:0,1; or those of another machine, as 2xA10.
    #[arg(long, value_name = "DEVICES")]
    pub devices: Option<String>,
    /// Most memory that each rank may use, for example 24GiB.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<String>,
    /// Ask nothing: what no flag gives has its default, as without a terminal.
    #[arg(long, short)]
    pub yes: bool,
    /// Write the file without a look at model and rows and without a plan.
    #[arg(long)]
    pub no_plan: bool,
    /// Replace an existing file.
    #[arg(long)]
    pub overwrite: bool,
}

/// A program whose settings are translated.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ForeignProgram {
    Trl,
    Axolotl,
    LlamaFactory,
    Accelerate,
    Deepspeed,
    Mitchell,
}

/// A training method that `init` writes a run of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum InitMethod {
    /// Supervised fine-tuning on demonstrations.
    Sft,
    /// Direct preference optimisation on pairs.
    Dpo,
    /// Kahneman–Tversky optimisation on completions that are good or bad.
    Kto,
    /// A reward model from pairs.
    Reward,
    /// DPO on pairs of the policy's own completions, which judges score.
    Online,
    /// Policy gradients from the judges' scores of the policy's own completions.
    Grpo,
    /// Distillation from a teacher.
    Distill,
}

/// Parameters that train.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Trained {
    /// Every weight.
    Full,
    /// A LoRA adapter.
    Lora,
    /// A LoRA adapter on frozen weights in 4 bits.
    Qlora,
}

#[derive(Debug, Args)]
pub(crate) struct RunsArguments {
    /// Folders of runs, or folders that hold such folders.
    #[arg(value_name = "FOLDER", default_value = "runs")]
    pub folders: Vec<PathBuf>,
    /// Print a JSON object a line instead of a table.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct WatchArguments {
    /// Folders of runs, which may have no metrics yet, or folders that hold such folders; at most eight runs
    /// are shown.
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
    /// Listen port; 0 takes a free one. Default: 8420, or a free one if it is taken.
    #[arg(long)]
    pub port: Option<u16>,
    /// Listen address; by default only programs of this machine can connect.
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    pub address: IpAddr,
}

#[derive(Debug, Args)]
pub(crate) struct ReportArguments {
    /// Folders of runs, or folders that hold such folders; at most eight runs.
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
    /// File to write. One that is there is replaced.
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    pub out: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArguments {
    /// Shell. For bash: tandem completions bash > ~/.local/share/bash-completion/completions/tandem
    #[arg(value_enum)]
    pub shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArguments {
    /// Folder of the pages, created if it is missing; for example ~/.local/share/man/man1.
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct InitWeightsArguments {
    /// A config.json, a folder with one, or a model's name on the hub. Tokenizer files beside it are copied.
    #[arg(value_name = "CONFIG")]
    pub config: PathBuf,
    /// Folder to create.
    #[arg(value_name = "OUTPUT")]
    pub output: PathBuf,
    /// Seed of the weights.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArguments {
    /// Print what was found as one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Measure the CPU and GPUs, a few seconds each, and write a device table for `tandem plan
    /// --device-table`.
    #[arg(long, value_name = "FILE")]
    pub measure: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct QuickstartArguments {
    /// Output folder. Results of an earlier quickstart there are deleted.
    #[arg(long, default_value = "runs/quickstart")]
    pub output: PathBuf,
    /// Number of threads.
    #[arg(long, default_value_t = 2, value_parser = threads)]
    pub threads: usize,
    /// Create the corpus, tokenizer, model and configurations, and stop.
    #[arg(long)]
    pub prepare_only: bool,
}
