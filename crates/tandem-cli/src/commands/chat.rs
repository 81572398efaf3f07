//! `tandem chat`: a conversation with a model, in the terminal.

use std::io::{self, BufRead, IsTerminal, Write, stdin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::Context;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};
use signal_hook::consts::SIGINT;
use tandem_data::record::Message;
use tandem_data::text_stream::TextStream;
use tandem_model::decode::Flow;
use tandem_model::{Generator, Request, Sampling};

use crate::args::{ChatArguments, SamplingArguments};
use crate::exit::Exit;
use crate::generation::loaded::{encode_chat, message, positions_of, tokenizer_of};
use crate::generation::{GenerationLimits, Loaded, new_seed};
use crate::hub;
use crate::output::printable;

const HELP: &str = "\
/reset          begin a new conversation
/system TEXT    begin a new one with this system message; without TEXT, with none
/undo           take the last question and its answer back
/exit           end, as Ctrl-D does
Ctrl-C stops a completion, or drops a line. A \\ at the end of a line continues it on the next.";

pub(crate) fn run(arguments: &ChatArguments) -> anyhow::Result<Exit> {
    let weights = &hub::weights(&arguments.weights)?;
    let tokenizer = tokenizer_of(weights)?;
    tokenizer.chat_template()?;
    let positions = positions_of(&weights.model, arguments.context)?;
    let room = GenerationLimits { positions, cache_tokens: positions, max_batch: 1, log_probs: false };
    let model = Loaded::open(weights, tokenizer, room, &arguments.compute)?;
    let SamplingArguments { max_new_tokens, ref stop, seed, .. } = arguments.sampling;
    let sampling = arguments.sampling.sampling(0.7, seed.unwrap_or_else(new_seed))?;
    let mut lines = Lines::new()?;
    let interrupted = Arc::new(AtomicBool::new(false));
    // After the terminal's reader, which takes the signal for itself.
    signal_hook::flag::register(SIGINT, Arc::clone(&interrupted)).context("cannot catch Ctrl-C")?;
    let mut chat = Chat {
        generator: model.generator()?,
        model: &model,
        context: arguments.context,
        sampling,
        max_new_tokens,
        stop,
        interrupted,
        messages: Vec::new(),
        turns: 0,
    };
    chat.begin(arguments.system.as_deref());
    if lines.is_terminal() {
        eprintln!("A conversation of up to {positions} tokens. /help lists the commands.");
    }
    while let Some(line) = lines.next()? {
        if chat.take(&line)?.is_none() {
            break;
        }
    }
    Ok(Exit::Done)
}

struct Chat<'a> {
    model: &'a Loaded,
    /// The given limit of a conversation; the model's own may be lower.
    context: usize,
    generator: Generator<'a>,
    sampling: Sampling,
    max_new_tokens: usize,
    stop: &'a [String],
    /// Ctrl-C was typed.
    interrupted: Arc<AtomicBool>,
    messages: Vec<Message>,
    /// Number of questions so far; part of the sampling seed.
    turns: u64,
}

impl Chat<'_> {
    fn begin(&mut self, system: Option<&str>) {
        self.messages = system.map(|text| message("system", text)).into_iter().collect();
    }

    /// Reads a command or question; `None` at the end of input.
    fn take(&mut self, line: &str) -> anyhow::Result<Option<()>> {
        let line = line.trim();
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match command {
            "" => {}
            "/exit" | "/quit" => return Ok(None),
            "/help" => eprintln!("{HELP}"),
            "/reset" => {
                let system = self.messages.first().filter(|first| first["role"] == "system").cloned();
                self.messages = system.into_iter().collect();
                eprintln!("A new conversation.");
            }
            "/system" => {
                self.begin(Some(rest.trim()).filter(|text| !text.is_empty()));
                eprintln!("A new conversation.");
            }
            "/undo" => {
                let last = self.messages.iter().rposition(|message| message["role"] == "user");
                self.messages.truncate(last.unwrap_or(self.messages.len()));
            }
            _ if command.starts_with('/') => eprintln!("unknown command {command}.\n{HELP}"),
            _ => self.ask(line)?,
        }
        Ok(Some(()))
    }

    /// Answers a question. It stays in the conversation unless it does not fit.
    fn ask(&mut self, question: &str) -> anyhow::Result<()> {
        self.messages.push(message("user", question));
        let room = self.model.room().positions;
        let prompt = match encode_chat(self.model.tokenizer(), &self.messages) {
            Ok(prompt) if prompt.len() < room => prompt,
            Ok(prompt) => {
                let limit = match room < self.context {
                    true => "the limit is the model's context",
                    false => "--context raises the limit",
                };
                eprintln!(
                    "The conversation has {} tokens, but only {room} fit: /reset starts a new one, {limit}.",
                    prompt.len()
                );
                self.messages.pop();
                return Ok(());
            }
            Err(error) => {
                eprintln!("{}", tandem_train::chain(&error));
                self.messages.pop();
                return Ok(());
            }
        };
        let answer = self.answer(prompt)?;
        self.messages.push(message("assistant", &answer));
        Ok(())
    }

    /// Streams the completion to stdout and returns it.
    fn answer(&mut self, prompt: Vec<u32>) -> anyhow::Result<String> {
        let tokenizer = self.model.tokenizer();
        let request = self.generator.submit(Request {
            prompt,
            number: self.turns,
            num_answers: 1,
            sampling: self.sampling,
            max_new_tokens: self.max_new_tokens,
            stop: tokenizer.eos_ids().to_vec(),
        })?;
        self.turns += 1;
        self.interrupted.store(false, Ordering::Relaxed);
        let mut text = TextStream::new(tokenizer, self.stop);
        let (mut source, mut answer, mut tokens) = (self.model.source(), String::new(), 0);
        let (mut failure, began) = (None, Instant::now());
        while !self.generator.is_idle() {
            self.generator.step(&mut source, &mut |new| {
                tokens += 1;
                let shown = text.push(new.token).map_err(anyhow::Error::from);
                if let Err(error) = shown.and_then(|piece| show(&mut answer, &piece)) {
                    failure = Some(error);
                }
                if text.is_ended() || failure.is_some() { Flow::End } else { Flow::Continue }
            })?;
            if self.interrupted.load(Ordering::Relaxed) {
                self.generator.cancel(request);
            }
        }
        if let Some(error) = failure {
            return Err(error);
        }
        show(&mut answer, &text.finish()?)?;
        println!();
        if io::stderr().is_terminal() {
            eprintln!("[{tokens} tokens, {:.1} a second]", f64::from(tokens) / began.elapsed().as_secs_f64());
        }
        Ok(answer)
    }
}

fn show(answer: &mut String, piece: &str) -> anyhow::Result<()> {
    answer.push_str(piece);
    let mut out = io::stdout().lock();
    let shown = if out.is_terminal() { printable(piece) } else { piece.into() };
    out.write_all(shown.as_bytes()).and_then(|()| out.flush()).context("cannot write to stdout")
}

enum Lines {
    Terminal(Box<DefaultEditor>),
    Piped(io::Lines<io::StdinLock<'static>>),
}

impl Lines {
    fn new() -> anyhow::Result<Self> {
        if !stdin().is_terminal() {
            return Ok(Self::Piped(stdin().lock().lines()));
        }
        let config = Config::builder().auto_add_history(true).build();
        let editor = DefaultEditor::with_config(config).context("cannot use the terminal")?;
        Ok(Self::Terminal(Box::new(editor)))
    }

    fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// Reads the next line with its continuation lines; `None` at the end.
    fn next(&mut self) -> anyhow::Result<Option<String>> {
        let mut whole = String::new();
        loop {
            let prompt = if whole.is_empty() { "> " } else { ". " };
            let line = match self {
                Self::Piped(lines) => lines.next().transpose().context("cannot read standard input")?,
                Self::Terminal(editor) => match editor.readline(prompt) {
                    Ok(line) => Some(line),
                    Err(ReadlineError::Eof) => None,
                    // As in a shell: the line is dropped, the conversation stays.
                    Err(ReadlineError::Interrupted) => {
                        whole.clear();
                        eprintln!("/exit or Ctrl-D ends.");
                        continue;
                    }
                    Err(error) => return Err(error).context("cannot read the terminal"),
                },
            };
            let Some(line) = line else {
                return Ok(Some(whole).filter(|whole| !whole.is_empty()));
            };
            match line.strip_suffix('\\') {
                Some(first) => {
                    whole.push_str(first);
                    whole.push('\n');
                }
                None => return Ok(Some(whole + &line)),
            }
        }
    }
}
