//! End of a run in words: changes of answers, places of files, and the next command.

use std::path::Path;

use tandem_train::config::Method;
use tandem_train::metrics::Sample;

use crate::shell::quote;

/// Samples that are shown.
const SHOWN: usize = 3;

/// Answers to the same prompts, by step.
#[derive(Default)]
pub(crate) struct Samples {
    first: Option<(u64, Vec<Sample>)>,
    later: Vec<(u64, Vec<Sample>)>,
}

impl Samples {
    /// Takes the answers after `step`.
    pub(crate) fn take(&mut self, step: u64, samples: &[Sample]) {
        let taken = (step, samples.iter().take(SHOWN).cloned().collect());
        match self.first {
            None => self.first = Some(taken),
            Some(_) => self.later.push(taken),
        }
    }

    /// Leaves out what came after `step`, whose weights the run returns to.
    pub(crate) fn return_to(&mut self, step: u64) {
        self.later.retain(|(later, _)| *later <= step);
    }

    /// Returns prompts with the first and the last answers, in lines of `width` columns.
    pub(crate) fn lines(&self, width: usize) -> Vec<String> {
        let (Some((before, first)), Some((after, last))) = (&self.first, self.later.last()) else {
            return Vec::new();
        };
        let room = width.saturating_sub(11).max(20);
        let row = |name: &str, text: String| format!("  {name:<8} {text}");
        let of = |(first, last): (&Sample, &Sample)| {
            [
                row("prompt", last_of(&first.prompt, room)),
                row("before", one_line(&first.answer, room)),
                row("after", one_line(&last.answer, room)),
            ]
        };
        let before = if *before == 0 { "before training".to_owned() } else { format!("after step {before}") };
        let title = format!("answers {before} and after step {after}; samples.jsonl has all of them:");
        std::iter::once(title).chain(first.iter().zip(last).flat_map(of)).collect()
    }
}

/// A text on one line of at most `room` characters; of a longer one its beginning.
fn one_line(text: &str, room: usize) -> String {
    let shown = printable(text);
    match shown.len() <= room {
        true => shown.into_iter().collect(),
        false => shown[..room - 1].iter().chain(&['…']).collect(),
    }
}

/// The same with the end of a longer text: the beginning of a prompt is a template's.
fn last_of(text: &str, room: usize) -> String {
    let shown = printable(text);
    match shown.len() <= room {
        true => shown.into_iter().collect(),
        false => ['…'].iter().chain(&shown[shown.len() - room + 1..]).collect(),
    }
}

/// The characters of a text for one line. What a terminal would obey is replaced.
fn printable(text: &str) -> Vec<char> {
    let shown = |c: char| match c {
        '\n' => '⏎',
        c if c.is_control() => '·',
        c => c,
    };
    text.trim().chars().map(shown).collect()
}

/// Names the files of a run that is done, and the next command.
pub(crate) fn places(method: Option<Method>, model: &Path) -> Vec<String> {
    let run = model.parent().unwrap_or(model);
    let in_shell = |path: &Path| quote(&path.display().to_string());
    let mut lines = vec![
        format!("the model is in {}", model.display()),
        format!("metrics, samples, checkpoints and this log are in {}", run.display()),
    ];
    let next = match method {
        None => return lines,
        Some(Method::Reward) if model.join("adapter_config.json").is_file() => format!(
            "next: tandem merge {} MERGED, then name MERGED in a [[judges]] table of an online run, with kind = \"reward\"",
            in_shell(model)
        ),
        Some(Method::Reward) => format!(
            "next: name it in a [[judges]] table of an online run, with kind = \"reward\" and model = \"{}\"",
            model.display()
        ),
        Some(_) => format!("next: tandem chat {}, tandem watch {}", in_shell(model), in_shell(run)),
    };
    lines.push(next);
    lines
}

#[cfg(test)]
mod tests {
    use tandem_train::metrics::Split;

    use super::*;

    fn sample(answer: &str) -> Sample {
        Sample {
            split: Split::Eval,
            place: "rows.jsonl:1".to_owned(),
            row: 0,
            prompt: "user\nWhat?\n".to_owned(),
            answer: answer.to_owned(),
            num_tokens: 3,
            is_ended: true,
            chosen: String::new(),
            rejected: None,
        }
    }

    #[test]
    fn the_next_commands_are_quoted_for_a_shell() {
        let next = |model: &str| places(Some(Method::Dpo), Path::new(model)).pop().unwrap();
        assert_eq!(next("o/final"), "next: tandem chat o/final, tandem watch o");
        assert_eq!(next("my run/final"), "next: tandem chat 'my run/final', tandem watch 'my run'");
    }

    #[test]
    fn the_first_and_the_last_answers_stand_beside_each_other() {
        let mut samples = Samples::default();
        assert_eq!(samples.lines(80), [] as [&str; 0]);
        samples.take(0, &[sample("one")]);
        assert_eq!(samples.lines(80), [] as [&str; 0]);
        samples.take(5, &[sample("two")]);
        samples.take(9, &[sample("three \x1b[31mred\nline")]);
        assert_eq!(
            samples.lines(80),
            [
                "answers before training and after step 9; samples.jsonl has all of them:",
                "  prompt   user⏎What?",
                "  before   one",
                "  after    three ·[31mred⏎line",
            ]
        );
        samples.return_to(5);
        assert_eq!(samples.lines(80)[3], "  after    two");
    }

    #[test]
    fn a_long_answer_is_cut_to_the_line() {
        assert_eq!(one_line("abcdef", 4), "abc…");
        assert_eq!(one_line("abcd", 4), "abcd");
        assert_eq!([last_of("abcdef", 4), last_of("abcd", 4)], ["…def", "abcd"]);
    }
}
