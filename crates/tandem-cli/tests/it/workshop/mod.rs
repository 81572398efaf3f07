//! A folder with a tiny model and data, and the built command to run there.

#![allow(dead_code, reason = "each test uses some parts")]

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};
use tandem_data::tokenizer_train::TokenizerRecipe;
use tempfile::TempDir;

const TEMPLATE: &str = "{%- for m in messages -%}{{ '<|' + m['role'] + '|>' + m['content'] + '</s>' }}{%- endfor -%}\
                        {%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}";

/// Outcome of a command.
#[derive(Debug)]
pub struct Outcome {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    /// Fails the test with everything that was printed unless the exit code is `code`.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// Fails the test unless stderr holds every one of `texts`.
    #[track_caller]
    pub fn says(self, texts: &[&str]) -> Self {
        for text in texts {
            assert!(self.stderr.contains(text), "no {text:?} in:\n{}", self.stderr);
        }
        self
    }
}

/// A temporary folder with `model/` (random weights), `preferences.jsonl` and `dpo.toml`.
pub struct Workshop {
    folder: TempDir,
}

impl Workshop {
    pub fn new() -> Self {
        let workshop = Self { folder: tempfile::tempdir().expect("a temporary folder") };
        workshop.write_config("source");
        let recipe = TokenizerRecipe {
            vocab_size: 300,
            extra_tokens: vec!["<|user|>".into(), "<|assistant|>".into(), "<|system|>".into()],
            chat_template: Some(TEMPLATE.into()),
            ..TokenizerRecipe::default()
        };
        recipe
            .train(["the quick brown fox", "jumps over the lazy dog"].iter(), &workshop.path("source"))
            .unwrap();
        workshop.run(&["init-weights", "source", "model", "--seed", "3"]).expect(0);
        workshop.write_rows("preferences.jsonl", 24, |i| {
            json!({
                "prompt": format!("Count to {i}:"),
                "chosen": format!(" {} and then stop", "one ".repeat(1 + i % 5)),
                "rejected": format!(" {} never stop", "two ".repeat(1 + i % 3)),
            })
        });
        workshop.write("dpo.toml", &workshop.dpo_toml("run"));
        workshop
    }

    /// A small DPO run into the folder `output`.
    pub fn dpo_toml(&self, output: &str) -> String {
        format!(
            r#"method = "dpo"
model = "model"
output = "{output}"
[data]
train = "preferences.jsonl"
cache = "cache"
max_length = 128
[train]
batch_size = 4
steps = 6
learning_rate = 1e-3
save_every = 2
[compute]
devices = "cpu"
dtype = "f32"
threads = 1
"#
        )
    }

    /// `prompts.jsonl` and `online.toml`, a small online run into the folder `output`.
    pub fn write_online(&self, output: &str) {
        self.write_rows("prompts.jsonl", 12, |i| json!({ "prompt": format!("Count to {i}:") }));
        let toml = self.dpo_toml(output).replace("\"dpo\"", "\"online\"").replace("preferences", "prompts");
        self.write(
            "online.toml",
            &format!("{toml}[online]\nmax_new_tokens = 12\n[[judges]]\nkind = \"length\"\nper_unit = 1.0\nunit = \"characters\"\n"),
        );
    }

    /// `folder/config.json` of a Llama with two narrow layers.
    pub fn write_config(&self, folder: &str) -> Value {
        let config = json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 300,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": false,
            "bos_token_id": 1,
            "eos_token_id": 2,
        });
        fs::create_dir_all(self.path(folder)).unwrap();
        self.write(&format!("{folder}/config.json"), &config.to_string());
        config
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    pub fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// Sets every element of a tensor of a model's file, which must be in f32.
    pub fn fill_tensor(&self, file: &str, tensor: &str, value: f32) {
        let mut bytes = self.bytes(file);
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let found: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
        assert_eq!(found[tensor]["dtype"], "F32", "{tensor}");
        let [begin, end] =
            [0, 1].map(|i| 8 + header + found[tensor]["data_offsets"][i].as_u64().unwrap() as usize);
        bytes[begin..end].as_chunks_mut::<4>().0.iter_mut().for_each(|four| *four = value.to_le_bytes());
        fs::write(self.path(file), bytes).unwrap();
    }

    pub fn write_rows(&self, name: &str, count: usize, row: impl Fn(usize) -> Value) {
        let lines: Vec<String> = (0..count).map(|i| row(i).to_string()).collect();
        self.write(name, &(lines.join("\n") + "\n"));
    }

    /// The command in this folder, in an environment without a launcher.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.program(env!("CARGO_BIN_EXE_tandem"));
        command.args(arguments);
        command
    }

    /// Another program in this folder, in an environment without a launcher.
    pub fn program(&self, program: impl AsRef<OsStr>) -> Command {
        program_in(self.folder.path(), program)
    }

    pub fn run(&self, arguments: &[&str]) -> Outcome {
        let output = self.command(arguments).output().expect("the built command runs");
        Outcome {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Starts the command with its output thrown away.
    pub fn start(&self, arguments: &[&str]) -> Child {
        self.command(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the built command runs")
    }

    /// The lines of a run's `metrics.jsonl` without what depends on the clock and the machine.
    pub fn metrics(&self, run: &str) -> Vec<Value> {
        let text = self.read(&format!("{run}/metrics.jsonl"));
        let strip = |line: &str| {
            let mut value: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
            let object = value.as_object_mut().expect("a line is an object");
            for name in ["time", "time_generate", "time_judge", "tokens_per_second", "memory", "arena"] {
                object.remove(name);
            }
            value
        };
        text.lines().map(strip).collect()
    }
}

/// A program in `folder`, in an environment without a launcher.
pub fn program_in(folder: &Path, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(folder).stdin(Stdio::null());
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"] {
        command.env_remove(name);
    }
    // A name that is no path is looked for on the hub: no test but the hub's own may reach it.
    command.env("HF_HUB_OFFLINE", "1").env("HF_HOME", folder.join("home"));
    command.env("XDG_CACHE_HOME", folder.join("user-cache"));
    command
}

/// Says why a test does nothing, past the capture of what tests print: in a log, a test that was skipped must not look like one
/// that passed.
pub fn skip(reason: &str) {
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    // A log that cannot be written cannot be complained to.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {name}: {reason}");
}

/// The Python that has torchrun; `None`, said aloud, where none was named.
pub fn python_with_torchrun() -> Option<OsString> {
    let python = std::env::var_os("TANDEM_TEST_PYTHON");
    if python.is_none() {
        skip("TANDEM_TEST_PYTHON names no Python with torch");
    }
    python
}

/// A free port for a program that is started with it. The system gives such low ports to nobody who asks for any port, so none
/// of the other tests' takes it meanwhile; each process and each call looks for its own.
pub fn free_port() -> u16 {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(16).wrapping_add(CALLS.fetch_add(1, Ordering::Relaxed));
    let mut ports = (0..).map(|i| 20_000 + (first.wrapping_add(i) % 12_000) as u16);
    ports.find(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok()).unwrap()
}

/// Files and folders in `folder`, sorted.
pub fn entries(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
