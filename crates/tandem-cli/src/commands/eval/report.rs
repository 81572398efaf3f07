//! Result of a comparison for people and programs, and its samples.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Map, Value, json};
use tandem_data::prompts::PromptRow;
use tandem_data::record::Text;
use tandem_judge::{Assessment, Counts, Panel};

use super::tally::{Outcome, Tally};
use crate::exit::mistake;
use crate::generation::CompletionText;

/// The model and its opponent.
pub(crate) struct Report {
    pub tally: Tally,
    /// Names of the sides.
    pub names: [String; 2],
    pub lengths: [Lengths; 2],
    /// Statistics per judge.
    pub judges: Vec<(String, Counts)>,
}

/// Mean length of a side's completions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Lengths {
    tokens: f64,
    characters: f64,
    /// Share that ended without the length limit.
    ended: f64,
}

impl Lengths {
    pub(crate) fn new(answers: &[CompletionText]) -> Self {
        let mean = |number: fn(&CompletionText) -> f64| {
            answers.iter().map(number).sum::<f64>() / answers.len() as f64
        };
        Self {
            tokens: mean(|answer| answer.tokens as f64),
            characters: mean(|answer| answer.text.chars().count() as f64),
            ended: mean(|answer| f64::from(answer.is_ended)),
        }
    }
}

impl Report {
    /// Formats the result for people.
    pub(crate) fn lines(&self) -> Vec<String> {
        let Self { tally: Tally { wins, losses, ties, unscored, .. }, names, lengths, judges } = self;
        let [low, high] = self.tally.interval();
        let [ours, theirs] = self.tally.mean_scores();
        let [own, other] = lengths;
        let mut lines = vec![
            format!("model     {}", names[0]),
            format!("against   {}", names[1]),
            format!("win rate  {:.3}, 95 % between {low:.3} and {high:.3}", self.tally.win_rate()),
            format!("prompts   {wins} wins, {losses} losses, {ties} ties, {unscored} unscored"),
            format!("score     {ours:.4} against {theirs:.4}"),
            format!("tokens    {:.1} against {:.1}", own.tokens, other.tokens),
            format!("ended     {:.3} against {:.3}", own.ended, other.ended),
        ];
        for (name, counts) in judges {
            let Counts { judged, unscored, retries, restarts, cache_hits, spent } = counts;
            lines.push(format!(
                "judge     {name}: {judged} judged, {unscored} unscored, {retries} retries, {restarts} restarts, \
                 {cache_hits} cache hits, {spent} spent"
            ));
        }
        lines
    }

    pub(crate) fn to_json(&self) -> Value {
        let Self { tally, names, lengths, judges } = self;
        let scores = tally.mean_scores();
        let side = |index: usize| {
            let Lengths { tokens, characters, ended } = lengths[index];
            json!({
                "name": names[index],
                "mean_score": scores[index],
                "mean_tokens": tokens,
                "mean_characters": characters,
                "ended": ended,
            })
        };
        let judge = |(name, counts): &(String, Counts)| {
            let Counts { judged, unscored, retries, restarts, cache_hits, spent } = counts;
            json!({
                "name": name,
                "judged": judged,
                "unscored": unscored,
                "retries": retries,
                "restarts": restarts,
                "cache_hits": cache_hits,
                "spent": spent,
            })
        };
        json!({
            "win_rate": tally.win_rate(),
            "interval": tally.interval(),
            "wins": tally.wins,
            "losses": tally.losses,
            "ties": tally.ties,
            "unscored": tally.unscored,
            "model": side(0),
            "against": side(1),
            "judges": judges.iter().map(judge).collect::<Vec<_>>(),
        })
    }
}

/// Samples file, one line per prompt, created with the first line.
pub(crate) struct Samples {
    path: PathBuf,
    file: Option<BufWriter<File>>,
}

impl Samples {
    /// Checks the path.
    ///
    /// # Errors
    /// The file exists, or its folder does not.
    pub(crate) fn new(path: &Path) -> anyhow::Result<Self> {
        if path.exists() {
            return Err(mistake(format!(
                "{} already exists: name another file with --samples",
                path.display()
            )));
        }
        let folder = std::path::absolute(path)?;
        if !folder.parent().is_some_and(Path::is_dir) {
            return Err(mistake(format!("{}: the folder of --samples does not exist", path.display())));
        }
        Ok(Self { path: path.to_owned(), file: None })
    }

    /// Writes a prompt, both completions and the named judges' scores.
    pub(crate) fn write(
        &mut self,
        row: &PromptRow,
        answers: [&CompletionText; 2],
        said: &[Assessment],
        outcome: Outcome,
        names: &[String],
    ) -> anyhow::Result<()> {
        let answer = |(answered, Assessment { total, verdicts }): (&CompletionText, &Assessment)| {
            let CompletionText { text, tokens, is_ended } = answered;
            let judges: Map<_, _> = names
                .iter()
                .zip(verdicts)
                .map(|(name, verdict)| {
                    (name.clone(), json!({ "score": verdict.score, "said": verdict.said }))
                })
                .collect();
            json!({ "text": text, "tokens": tokens, "ended": is_ended, "score": total, "judges": judges })
        };
        let prompt = match row.prompt() {
            Text::Plain(text) => json!(text),
            Text::Chat(messages) => json!(messages),
        };
        let line = json!({
            "row": row.place.to_string(),
            "prompt": prompt,
            "outcome": outcome.name(),
            "model": answer((answers[0], &said[0])),
            "against": answer((answers[1], &said[1])),
        });
        let failed = || format!("cannot write {}", self.path.display());
        let file = match &mut self.file {
            Some(file) => file,
            file => file.insert(BufWriter::new(File::create_new(&self.path).with_context(failed)?)),
        };
        writeln!(file, "{line}").with_context(failed)
    }

    pub(crate) fn flush(&mut self) -> anyhow::Result<()> {
        let path = &self.path;
        self.file
            .as_mut()
            .map_or(Ok(()), BufWriter::flush)
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

pub(crate) fn counts(panel: &Panel) -> Vec<(String, Counts)> {
    panel.counts().map(|(name, counts)| (name.to_owned(), counts)).collect()
}
