//! `tandem eval --judge`: two sets of completions and judges that compare them.
//!
//! Options, rows, model folders and judges are checked before anything is generated. The two models
//! are in memory one after the other.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use tandem_data::prompts::{self, PromptRow};
use tandem_data::record::Text;
use tandem_hub::ModelFiles;
use tandem_judge::{Assessment, Candidate, JudgeError, Panel, Prompt, PromptWithCompletions};
use tandem_kernels::DType;
use tandem_model::decode::Flow;
use tandem_model::{Decoder, ModelFolder};
use tandem_train::config::{JudgeKind, JudgeSection, RewardSection};
use tandem_train::{TrainError, judges};

use super::report::{Lengths, Report, Samples, counts};
use super::side::Side;
use super::tally::Tally;
use crate::args::{ComputeArguments, ComputeType, JudgedArguments, SamplingArguments, WeightArguments};
use crate::exit::{Exit, mistake};
use crate::generation::loaded::{address_space, open};
use crate::generation::{CompletionText, Wanted};
use crate::hub;
use crate::output::print_lines;
use crate::signals::stop_flag;

/// Prompts per judging batch.
const PORTION: usize = 64;

pub(crate) fn run(arguments: &JudgedArguments) -> anyhow::Result<Exit> {
    let sections = hub::judges(given(&arguments.judge))?;
    let rows = prompts::read(given(&arguments.prompts)).map_err(TrainError::from)?;
    let mut samples = arguments.samples.as_deref().map(Samples::new).transpose()?;
    let sides = sides(arguments, &rows)?;
    let stop = stop_flag()?;
    let mut panel = panel(&sections, &arguments.compute)?;
    let names = names(arguments);
    let mut answers = Vec::with_capacity(2);
    for (side, name) in sides.into_iter().zip(&names) {
        match answers_of(side, name, arguments, &stop)? {
            Some(side) => answers.push(side),
            None => return Ok(stopped()),
        }
    }
    let answers = [&answers[0][..], &answers[1][..]];
    let mut comparison = Comparison { rows: &rows, answers, tally: Tally::default(), reason: None };
    let result = comparison.judge(&mut panel, &stop, samples.as_mut());
    // Keep the samples judged before an error, too.
    samples.as_mut().map_or(Ok(()), Samples::flush)?;
    if !result? {
        return Ok(stopped());
    }
    let tally = comparison.tally;
    if tally.scored() == 0 {
        let (rows, reason) = (rows.len(), comparison.reason.unwrap_or_default());
        return Err(mistake(format!(
            "none of {rows} prompts has two answers with a score; the last reason: {reason}"
        )));
    }
    let lengths = answers.map(Lengths::new);
    let report = Report { tally, names, lengths, judges: counts(&panel) };
    let lines = if arguments.json { vec![report.to_json().to_string()] } else { report.lines() };
    print_lines(&lines)?;
    Ok(Exit::Done)
}

/// Requires an option that belongs to `--judge`.
fn given(path: &Option<PathBuf>) -> &Path {
    path.as_deref().expect("the command line is refused without it")
}

fn stopped() -> Exit {
    tracing::warn!("stopped: there is no win rate");
    Exit::Interrupted
}

/// Opens the model and its opponent.
fn sides(arguments: &JudgedArguments, rows: &[PromptRow]) -> anyhow::Result<[Side; 2]> {
    let JudgedArguments { model, adapter, against, against_adapter, against_column, .. } = arguments;
    let side = |model: &Option<PathBuf>, adapter: &Option<PathBuf>| {
        let weights = WeightArguments { model: given(model).to_owned(), adapter: adapter.clone() };
        Side::model(hub::weights(&weights)?, rows)
    };
    let theirs = match against_column {
        Some(column) => {
            let folder = hub::model(&hub::made_by_run(given(model))?, ModelFiles::WithoutWeights)?;
            Side::column(column, rows, &folder)
        }
        None => side(against, against_adapter),
    };
    Ok([side(model, adapter)?, theirs?])
}

/// Names of the two sides.
fn names(arguments: &JudgedArguments) -> [String; 2] {
    let JudgedArguments { model, adapter, against, against_adapter, against_column, .. } = arguments;
    let name = |model: &Option<PathBuf>, adapter: &Option<PathBuf>| match adapter {
        None => given(model).display().to_string(),
        Some(adapter) => format!("{} with {}", given(model).display(), adapter.display()),
    };
    let theirs = match against_column {
        Some(column) => format!("`{column}` of {}", given(&arguments.prompts).display()),
        None => name(against, against_adapter),
    };
    [name(model, adapter), theirs]
}

/// Generates a side's completions; `None` if stopped.
fn answers_of(
    side: Side,
    name: &str,
    arguments: &JudgedArguments,
    stop: &AtomicBool,
) -> anyhow::Result<Option<Vec<CompletionText>>> {
    let SamplingArguments { max_new_tokens, stop: ref ends, seed, .. } = arguments.sampling;
    let sampling = arguments.sampling.sampling(0.0, seed.unwrap_or_default())?;
    let wanted = Wanted { sampling, max_new_tokens, stop: ends, continues: false };
    let bar = progress(&format!("answers of {name}"), side.len());
    let answers = side.answers(&wanted, &arguments.compute, &mut |done: usize| {
        bar.set_position(done as u64);
        if stop.load(Ordering::Relaxed) { Flow::End } else { Flow::Continue }
    });
    bar.finish_and_clear();
    Ok(answers?)
}

/// A progress bar on a terminal, hidden elsewhere.
fn progress(subject: &str, total: usize) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{prefix} {bar:24} {pos}/{len}").expect("the template is a constant");
    ProgressBar::new(total as u64).with_style(style).with_prefix(subject.to_owned())
}

/// Opens the judges. Reward models run on the generation device, one after the other, and stay in
/// memory.
fn panel(sections: &[JudgeSection], compute: &ComputeArguments) -> anyhow::Result<Panel> {
    let device = open(compute, sections.iter().map(memory_of).sum::<usize>().max(1 << 20))?;
    let dtype = match compute.dtype {
        ComputeType::F32 => DType::F32,
        ComputeType::Bf16 => DType::Bf16,
    };
    let on_line: judges::JudgeLine = Arc::new(|judge, line| tracing::info!("judge `{judge}`: {line}"));
    Ok(judges::panel(sections, &device, dtype, &on_line)?)
}

/// Address space of a reward model in bytes. The judge itself reports an unusable model.
fn memory_of(section: &JudgeSection) -> usize {
    let JudgeKind::Reward(RewardSection { model, max_length, micro_batch_tokens, .. }) = &section.kind else {
        return 0;
    };
    let decoder = |folder: ModelFolder| Decoder::new(folder.spec().clone(), 1);
    let tokens = *max_length.max(micro_batch_tokens);
    ModelFolder::open_reward(model, 0).and_then(decoder).map_or(0, |decoder| address_space(&decoder, tokens))
}

/// Pairs of completions per prompt, the model's first.
struct Comparison<'a> {
    rows: &'a [PromptRow],
    answers: [&'a [CompletionText]; 2],
    tally: Tally,
    /// Reason why the latest unscored completion has no score.
    reason: Option<String>,
}

impl Comparison<'_> {
    /// Scores all prompts; false if stopped.
    fn judge(
        &mut self,
        panel: &mut Panel,
        stop: &AtomicBool,
        mut samples: Option<&mut Samples>,
    ) -> anyhow::Result<bool> {
        let names: Vec<String> = panel.names().map(str::to_owned).collect();
        let bar = progress("judged", self.rows.len());
        for first in (0..self.rows.len()).step_by(PORTION) {
            let range = first..self.rows.len().min(first + PORTION);
            let said = match self.ask(panel, range.clone(), stop) {
                Ok(said) => said,
                Err(JudgeError::Stopped) => return Ok(false),
                Err(error) => return Err(TrainError::from(error).into()),
            };
            for (index, said) in range.clone().zip(&said) {
                let outcome = self.tally.add([said[0].total, said[1].total]);
                self.reason = reason(&names, said).or(self.reason.take());
                if let Some(samples) = &mut samples {
                    let answers = self.answers.map(|answers| &answers[index]);
                    samples.write(&self.rows[index], answers, said, outcome, &names)?;
                }
            }
            bar.set_position(range.end as u64);
        }
        bar.finish_and_clear();
        Ok(true)
    }

    /// Scores the completions of some prompts.
    fn ask(
        &self,
        panel: &mut Panel,
        range: Range<usize>,
        stop: &AtomicBool,
    ) -> Result<Vec<Vec<Assessment>>, JudgeError> {
        let rows = &self.rows[range.clone()];
        let places: Vec<String> = rows.iter().map(|row| row.place.to_string()).collect();
        let messages: Vec<Vec<Value>> = rows
            .iter()
            .map(|row| match row.prompt() {
                Text::Plain(_) => Vec::new(),
                Text::Chat(messages) => messages.iter().cloned().map(Value::Object).collect(),
            })
            .collect();
        let groups: Vec<PromptWithCompletions> = range
            .enumerate()
            .map(|(at, index)| PromptWithCompletions {
                place: &places[at],
                prompt: match rows[at].prompt() {
                    Text::Plain(text) => Prompt::Text(text),
                    Text::Chat(_) => Prompt::Messages(&messages[at]),
                },
                row: rows[at].row(),
                answers: self.answers.iter().map(|answers| candidate(&answers[index])).collect(),
            })
            .collect();
        panel.judge(&groups, stop)
    }
}

fn candidate(CompletionText { text, tokens, is_ended }: &CompletionText) -> Candidate<'_> {
    Candidate { text, tokens: *tokens, is_ended: *is_ended }
}

/// Reason why a completion has no score, if one has none.
fn reason(names: &[String], said: &[Assessment]) -> Option<String> {
    let unscored = said.iter().find(|assessment| assessment.total.is_none())?;
    let mut judges = names.iter().zip(&unscored.verdicts);
    let (name, verdict) = judges.find(|(_, verdict)| verdict.score.is_none())?;
    Some(format!("judge `{name}`: {}", verdict.said.as_str().map_or(verdict.said.to_string(), str::to_owned)))
}
