//! Judge over a user's program: lines of JSON in, lines of JSON out.
//!
//! The program is kept running and receives several items at a time ([`CommandClient`]). A failure
//! costs the scores of the items that it concerns and no others; [`round`] keeps account of that.

mod answer;
mod client;
mod config;
mod process;
mod round;

use std::sync::atomic::AtomicBool;

use serde_json::{Value, json};

pub(crate) use answer::Reply;
pub(crate) use client::CommandClient;
pub use config::CommandConfig;
pub use process::StderrLine;

use crate::{Counts, Judge, Prompt, PromptWithCompletions, Result, Verdict};

/// Judge that asks a program.
pub struct CommandJudge {
    name: String,
    client: CommandClient,
    counts: Counts,
}

impl CommandJudge {
    /// Starts the program, so that it is ready early. `on_stderr` is called on a thread of the
    /// judge.
    pub fn new(name: impl Into<String>, config: CommandConfig, on_stderr: StderrLine) -> Result<Self> {
        let name = name.into();
        config.check(&name)?;
        let client = CommandClient::new(format!("judge `{name}`"), config, on_stderr)?;
        Ok(Self { name, client, counts: Counts::default() })
    }
}

impl Judge for CommandJudge {
    fn name(&self) -> &str {
        &self.name
    }

    fn judge(
        &mut self,
        groups: &[PromptWithCompletions<'_>],
        stop: &AtomicBool,
    ) -> Result<Vec<Vec<Verdict>>> {
        let of = |(group, answers): (usize, usize)| (0..answers).map(move |answer| (group, answer));
        let places: Vec<(usize, usize)> =
            groups.iter().map(|group| group.answers.len()).enumerate().flat_map(of).collect();
        let item = |index: usize, id: u64| {
            let (group, answer) = places[index];
            self::item(&groups[group], answer, id)
        };
        let verdicts = self.client.ask(places.len(), item, stop);
        (self.counts.retries, self.counts.restarts) = (self.client.retries, self.client.restarts);
        let mut verdicts = verdicts?.into_iter();
        let verdicts: Vec<Vec<_>> =
            groups.iter().map(|group| verdicts.by_ref().take(group.answers.len()).collect()).collect();
        self.counts.add_verdicts(&verdicts);
        Ok(verdicts)
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

/// Returns the item of a response.
fn item(group: &PromptWithCompletions<'_>, answer: usize, id: u64) -> Value {
    let (prompt, messages) = fields(&group.prompt);
    json!({
        "id": id,
        "prompt": prompt,
        "messages": messages,
        "answer": group.answers[answer].text,
        "row": group.row,
    })
}

/// Returns a prompt as an item has it: its text, or its messages.
pub(crate) fn fields<'a>(prompt: &Prompt<'a>) -> (Option<&'a str>, Option<&'a [Value]>) {
    match prompt {
        Prompt::Text(text) => (Some(text), None),
        Prompt::Messages(messages) => (None, Some(messages)),
    }
}
