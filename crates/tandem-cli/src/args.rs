//! The command line, as clap reads it. Every text here is part of the manual.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use tandem_comm::Launch;
use tandem_model::Sampling;

/// Preference optimisation for language models: SFT, then DPO.
#[derive(Debug, Parser)]
#[command(name = "tandem", version, after_help = EXIT_CODES, max_term_width = 110, arg_required_else_help = true)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    a fault of Tandem's own, or of the machine (a full disk, no memory)
  2    a mistake in the command, the configuration, the model or the data
  75   a peer was lost; start again with --resume
  143  stopped by SIGTERM or Ctrl-C after saving; start again with --resume";

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model as run.toml says.
    Train(TrainArguments),
    /// Show what a run would put where, without running it.
    Plan(PlanArguments),
    /// Show the data as the model will see it: tokens, with those in the loss in colour.
    Data(DataArguments),
    /// Evaluate the model of run.toml on its held-out data; or tell, with --judge, how often a model's answers are better than others.
    Eval(EvalArguments),
    /// Continue prompts with a model.
    Generate(GenerateArguments),
    /// Talk with a model in the terminal.
    Chat(ChatArguments),
    /// Serve a model through OpenAI's HTTP interface.
    Serve(ServeArguments),
    /// Make one model of a base model and an adapter.
    Merge(MergeArguments),
    /// Make a model of random weights from a config.json.
    Init(InitArguments),
    /// Start several ranks of a run on this machine, one process each.
    Launch(LaunchArguments),
    /// Say what this machine has to train with, what is missing, and who has it.
    Doctor(DoctorArguments),
    /// See it work: make a small corpus, train a tiny model by SFT and DPO, and judge it. Takes two minutes.
    Quickstart(QuickstartArguments),
}

/// A configuration file, and changes to it.
#[derive(Debug, Args)]
pub struct RunArguments {
    /// The run's configuration. Paths in it are relative to it.
    #[arg(value_name = "RUN.TOML")]
    pub config: PathBuf,
    /// Change a key of the configuration, for example --set train.learning_rate=1e-5. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
}

#[derive(Debug, Args)]
pub struct TrainArguments {
    #[command(flatten)]
    pub run: RunArguments,
    /// Continue from the newest complete checkpoint in the output folder.
    #[arg(long, conflicts_with = "overwrite")]
    pub resume: bool,
    /// Delete what an earlier run left in the output folder.
    #[arg(long)]
    pub overwrite: bool,
    /// The most memory that each rank may take, for example 24GiB: short for --set compute.memory=24GiB.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<String>,
    /// Profile five steps, after two to warm up: the time of each phase and operation beside what this machine can do, and what
    /// was taken from memory. Shown at the end; each rank writes a table, the same as JSON, and a trace for Perfetto or
    /// chrome://tracing into profile/ of the run's folder. Results stay the same bits; measuring the machine takes two seconds
    /// before training.
    #[arg(long)]
    pub profile: bool,
}

#[derive(Debug, Args)]
pub struct PlanArguments {
    /// The run's configuration. Paths in it are relative to it.
    #[arg(value_name = "RUN.TOML", required_unless_present = "measure")]
    pub config: Option<PathBuf>,
    /// Change a key of the configuration, for example --set compute.sharding=zero3. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Plan for other devices than the configuration's, one a rank: 2xA10, 8xH100, 64xH100-80GB, 4xcpu. Products are in bf16 there
    /// unless compute.dtype says f32.
    #[arg(long, value_name = "NxNAME")]
    pub devices: Option<String>,
    /// A table of devices of your own; its rows come before the built-in ones of the same name.
    #[arg(long, value_name = "FILE")]
    pub device_table: Option<PathBuf>,
    /// Measure this machine's processor in a few seconds, write it as a table of devices, and stop there.
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    pub measure: Option<PathBuf>,
    /// The most memory that each rank may take, for example 24GiB: short for --set compute.memory=24GiB.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<String>,
    /// Plan without data and tokenizer: of the model's folder only config.json is read, and every micro-batch has so many
    /// tokens. Its rows are as long as data.max_length allows: a pair is a prompt and two answers of the same length, the prompt
    /// computed once; a row of SFT is a prompt and an answer.
    #[arg(long, value_name = "TOKENS")]
    pub assume_tokens: Option<usize>,
    /// How many of these the answers have. By default two thirds of a pair, half of another row.
    #[arg(long, value_name = "TOKENS", requires = "assume_tokens")]
    pub assume_scored: Option<usize>,
    /// Look for the fastest plans that fit: ways to divide the ranks, and changes that save memory.
    #[arg(long)]
    pub search: bool,
    /// Print the plan as JSON.
    #[arg(long, conflicts_with = "search")]
    pub json: bool,
    /// Write the plan as a page for a browser, too.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct LaunchArguments {
    /// Ranks to start on this machine.
    #[arg(long, short = 'n', value_name = "RANKS")]
    pub ranks: usize,
    /// Machines of the job; start this command on each.
    #[arg(long, default_value_t = 1)]
    pub nodes: usize,
    /// Which of them this is, from 0.
    #[arg(long, default_value_t = 0)]
    pub node: usize,
    /// Where the ranks meet: the first machine's name and a free port of it.
    #[arg(long, value_name = "HOST:PORT")]
    pub address: Option<String>,
    /// What each rank runs, for example: train run.toml
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

impl LaunchArguments {
    /// For a launcher that started one process on each machine, to start `ranks` there.
    pub fn of(launch: &Launch, ranks: usize, command: Vec<String>) -> Self {
        let Launch { num_processes, process, meeting_point, .. } = launch;
        let address = meeting_point.as_ref().map(|point| format!("{}:{}", point.host, point.port));
        Self { ranks, nodes: *num_processes, node: *process, address, command }
    }
}

/// What means something with `--judge` alone.
const JUDGED: [&str; 19] = [
    "model",
    "adapter",
    "against",
    "against_adapter",
    "against_column",
    "prompts",
    "samples",
    "json",
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
pub struct EvalArguments {
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

/// A model's answers beside others, and who judges them.
#[derive(Debug, Args)]
#[command(next_help_heading = "How often a model's answers are better than others")]
pub struct JudgedArguments {
    /// Instead of a run: how often the answers of --model are better than those of --against, as the judges of this file say:
    /// see docs/judges.md. Both answer every prompt once.
    #[arg(long, value_name = "JUDGES.TOML", requires_all = ["model", "prompts", "opponent"])]
    pub judge: Option<PathBuf>,
    /// The model's folder.
    #[arg(long, value_name = "FOLDER")]
    pub model: Option<PathBuf>,
    /// The folder of an adapter, to be merged into it in memory.
    #[arg(long, value_name = "FOLDER")]
    pub adapter: Option<PathBuf>,
    /// The folder of the model that it is compared with.
    #[arg(long, value_name = "FOLDER")]
    pub against: Option<PathBuf>,
    /// The folder of an adapter, to be merged into that one.
    #[arg(long, value_name = "FOLDER", requires = "against")]
    pub against_adapter: Option<PathBuf>,
    /// Compare with answers that are there: the name of their column among the prompts.
    #[arg(long, value_name = "NAME")]
    pub against_column: Option<String>,
    /// A JSONL or JSON file of rows with a `prompt`: a text, which is continued as it is, or messages, for the chat template. The other
    /// fields are for the judges.
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Write prompts, answers, scores and what the judges said to this file, a line of JSON for each prompt.
    #[arg(long, value_name = "FILE")]
    pub samples: Option<PathBuf>,
    /// Print the result as JSON.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub sampling: SamplingArguments,
    #[command(flatten)]
    pub compute: ComputeArguments,
}

#[derive(Debug, Args)]
pub struct DataArguments {
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
    /// Show each token's id behind it.
    #[arg(long)]
    pub ids: bool,
    /// Most tokens to show of each part, from its beginning and its end; 0 shows all.
    #[arg(long, default_value_t = 0)]
    pub limit: usize,
}

#[derive(Debug, Args)]
pub struct GenerateArguments {
    #[command(flatten)]
    pub weights: WeightArguments,
    /// Prompts. Without any, each line of standard input is one.
    #[arg(value_name = "PROMPT")]
    pub prompts: Vec<String>,
    /// Continue the prompt as it is, without the chat template.
    #[arg(long)]
    pub raw: bool,
    /// A system message before each prompt.
    #[arg(long, conflicts_with = "raw")]
    pub system: Option<String>,
    #[command(flatten)]
    pub sampling: SamplingArguments,
    #[command(flatten)]
    pub compute: ComputeArguments,
}

#[derive(Debug, Args)]
pub struct ChatArguments {
    #[command(flatten)]
    pub weights: WeightArguments,
    /// A system message at the beginning.
    #[arg(long)]
    pub system: Option<String>,
    /// Most tokens of a conversation; not more than the model has positions.
    #[arg(long, default_value_t = 4096)]
    pub context: usize,
    #[command(flatten)]
    pub sampling: SamplingArguments,
    #[command(flatten)]
    pub compute: ComputeArguments,
}

#[derive(Debug, Args)]
pub struct ServeArguments {
    #[command(flatten)]
    pub weights: WeightArguments,
    /// The name that requests ask for; by default, the folder's.
    #[arg(long)]
    pub name: Option<String>,
    /// The address to listen at; by default, only programs of this machine reach it.
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    pub host: IpAddr,
    /// The port to listen at; 0 takes a free one.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// A variable of the environment that holds a key, which requests must have.
    #[arg(long, value_name = "NAME")]
    pub key_env: Option<String>,
    /// Most tokens of a prompt and its answer; not more than the model has positions.
    #[arg(long, default_value_t = 4096)]
    pub context: usize,
    /// Answers under way at once, at most.
    #[arg(long, default_value_t = 16)]
    pub max_batch: usize,
    /// Tokens of all prompts and answers under way; by default, four times --context. What does not fit waits.
    #[arg(long)]
    pub cache_tokens: Option<usize>,
    #[command(flatten)]
    pub compute: ComputeArguments,
}

/// What generates.
#[derive(Clone, Debug, Args)]
pub struct WeightArguments {
    /// The model's folder.
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// The folder of an adapter, to be merged into the model in memory.
    #[arg(long, value_name = "FOLDER")]
    pub adapter: Option<PathBuf>,
}

/// Where and in what a model computes.
#[derive(Debug, Args)]
pub struct ComputeArguments {
    /// Where to compute: auto (the first GPU, or the processor if there is none), cpu, cuda, or cuda:1 for the second GPU.
    #[arg(long, default_value = "auto")]
    pub device: Place,
    /// Number of the processor's threads; by default, all cores.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Type of the numbers that are computed with.
    #[arg(long, value_enum, default_value_t = ComputeType::F32)]
    pub dtype: ComputeType,
}

/// A type to compute with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ComputeType {
    F32,
    Bf16,
}

/// Where one rank computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The first GPU, or the processor if there is none.
    Auto,
    /// The processor.
    Cpu,
    /// That GPU.
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
pub struct SamplingArguments {
    /// Most tokens to generate for a prompt.
    #[arg(long, default_value_t = 256)]
    pub max_new_tokens: usize,
    /// 0 always takes the most likely token, as `generate` does by default; 1 samples from the model's distribution; `chat` has 0.7.
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Sample among this many most likely tokens only.
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Sample among the most likely tokens whose probabilities add up to this.
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Sample among the tokens that are at least this part as likely as the likeliest.
    #[arg(long)]
    pub min_p: Option<f32>,
    /// Makes tokens that prompt or answer hold less likely; 1 leaves them.
    #[arg(long, default_value_t = 1.0)]
    pub repetition_penalty: f32,
    /// A string that ends an answer, and is no part of it; may be given several times.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Seed of the sampling; by default, 0 in `generate`, and another each time in `chat`.
    #[arg(long)]
    pub seed: Option<u64>,
}

impl SamplingArguments {
    /// How tokens are drawn, at this temperature unless another was asked for.
    pub fn sampling(&self, temperature: f32, seed: u64) -> Sampling {
        Sampling {
            repetition_penalty: self.repetition_penalty,
            temperature: self.temperature.unwrap_or(temperature),
            top_k: self.top_k,
            top_p: self.top_p.unwrap_or(1.0),
            min_p: self.min_p.unwrap_or(0.0),
            seed,
        }
    }
}

#[derive(Debug, Args)]
pub struct MergeArguments {
    /// The adapter's folder, as the peft library or a run of ours wrote it.
    #[arg(value_name = "ADAPTER")]
    pub adapter: PathBuf,
    /// The folder to make.
    #[arg(value_name = "OUTPUT")]
    pub output: PathBuf,
    /// The base model's folder; by default, what base_model_name_or_path of the adapter says.
    #[arg(long, value_name = "MODEL")]
    pub base: Option<PathBuf>,
    /// Type of the stored weights; by default, the base model's.
    #[arg(long, value_enum)]
    pub dtype: Option<StoredType>,
}

/// A type to store weights in.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum StoredType {
    F32,
    Bf16,
}

#[derive(Debug, Args)]
pub struct InitArguments {
    /// A config.json, or a folder with one. Tokenizer files that stand beside it are copied.
    #[arg(value_name = "CONFIG")]
    pub config: PathBuf,
    /// The folder to make.
    #[arg(value_name = "OUTPUT")]
    pub output: PathBuf,
    /// Seed of the weights.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

#[derive(Debug, Args)]
pub struct DoctorArguments {
    /// Measure the processor and the GPUs, a few seconds each, and write a table of devices for `tandem plan --device-table`.
    #[arg(long, value_name = "FILE")]
    pub measure: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct QuickstartArguments {
    /// Where to put everything. What an earlier quickstart left there is deleted.
    #[arg(long, default_value = "runs/quickstart")]
    pub output: PathBuf,
    /// Number of threads.
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Make the corpus, the tokenizer, the model and the configurations, and stop there.
    #[arg(long)]
    pub prepare_only: bool,
}
