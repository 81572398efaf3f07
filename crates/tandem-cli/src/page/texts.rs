//! Texts of the page: advice, samples, and the last lines of the logs.

use std::fmt::Write;

use super::chart::{COLOURS, short};
use super::html::{cut, escaped};
use super::samples::{Answer, Prompt, Sample};
use super::{RunHistory, name_of};

/// Most prompts that are shown, and how many of them are open.
const PROMPTS: usize = 20;
const OPEN: usize = 2;
/// Characters of a prompt in its heading.
const HEADING: usize = 110;

/// Returns what the metrics of each run show, with the sources.
pub(super) fn advice(runs: &[RunHistory]) -> Option<String> {
    let mut html = String::new();
    for (index, run) in runs.iter().enumerate() {
        for advice in run.advice() {
            let sources: Vec<String> = advice
                .trouble
                .sources()
                .iter()
                .map(|[name, address]| {
                    format!("<a href=\"{address}\" rel=\"noreferrer\">{}</a>", escaped(name))
                })
                .collect();
            let _ = write!(
                html,
                "<li><b>{}{}, step {}:</b> {}. <em>{}.</em> <span class=\"source\">{}</span></li>",
                swatch(index),
                escaped(&name_of(run)),
                advice.step,
                escaped(&advice.finding),
                escaped(&advice.remedy),
                sources.join(", ")
            );
        }
    }
    (!html.is_empty()).then(|| format!("<ul>{html}</ul>"))
}

/// Returns the answers to each prompt at several steps, side by side over all runs.
pub(super) fn samples(runs: &[RunHistory]) -> Option<String> {
    let mut prompts: Vec<&Prompt> = Vec::new();
    for prompt in runs.iter().flat_map(|run| run.samples.prompts()) {
        if prompts.iter().all(|known| known.key != prompt.key) {
            prompts.push(prompt);
        }
    }
    prompts.sort_by_key(|prompt| !prompt.is_eval);
    if prompts.is_empty() {
        return None;
    }
    let mut html = String::new();
    for (index, prompt) in prompts.iter().take(PROMPTS).enumerate() {
        html += &answers_to(prompt, runs, index < OPEN);
    }
    if prompts.len() > PROMPTS {
        let _ = write!(html, "<p>{} more prompts are in samples.jsonl.</p>", prompts.len() - PROMPTS);
    }
    Some(html)
}

fn answers_to(prompt: &Prompt, runs: &[RunHistory], is_open: bool) -> String {
    let heading = prompt.text.lines().next_back().unwrap_or_default();
    let split = if prompt.is_eval { "held out" } else { "training" };
    let mut html = format!(
        "<details data-key=\"{:x}\"{}><summary><span class=\"split\">{split}</span> {}</summary><div class=\"answers\">\
         <article><h4>prompt <span>{}</span></h4><pre>{}</pre>",
        prompt.key,
        if is_open { " open" } else { "" },
        escaped(&cut(heading, HEADING)),
        escaped(&prompt.place),
        escaped(&prompt.text)
    );
    for (name, text) in [("chosen", &prompt.chosen), ("rejected", &prompt.rejected)] {
        if let Some(text) = text {
            let _ = write!(html, "<h4>{name}</h4><pre class=\"{name}\">{}</pre>", escaped(text));
        }
    }
    html += "</article>";
    for (index, run) in runs.iter().enumerate() {
        let own = run.samples.find(prompt.key);
        for sample in own.iter().flat_map(|prompt| &prompt.samples) {
            html += &of_step(sample, index, runs);
        }
    }
    html + "</div></details>"
}

fn of_step(sample: &Sample, index: usize, runs: &[RunHistory]) -> String {
    let when = if sample.step == 0 { "before training".to_owned() } else { format!("step {}", sample.step) };
    let run = match runs {
        [_] => String::new(),
        _ => format!(" <span>{}</span>", escaped(&name_of(&runs[index]))),
    };
    let mut html = format!("<article><h4>{}{when}{run}</h4>", swatch(index));
    for answer in &sample.answers {
        let _ =
            write!(html, "<pre>{}</pre><p class=\"judged\">{}</p>", escaped(&answer.text), judged(answer));
    }
    if sample.left_out > 0 {
        let _ = write!(html, "<p>and {} more</p>", sample.left_out);
    }
    html + "</article>"
}

/// Length, score and judges of an answer.
fn judged(answer: &Answer) -> String {
    let number = |value: f64| short(value, value.abs() / 10.0);
    let mut parts: Vec<String> = Vec::new();
    parts.extend(
        answer
            .tokens
            .map(|tokens| format!("{tokens} tokens{}", if answer.is_ended { "" } else { ", cut off" })),
    );
    parts.extend(answer.score.map(|score| format!("<b>score {}</b>", number(score))));
    for (name, score, said) in &answer.judges {
        let score = score.map_or_else(|| "-".to_owned(), number);
        let said = if said.is_empty() { String::new() } else { format!(" <q>{}</q>", escaped(said)) };
        parts.push(format!("{} {score}{said}", escaped(name)));
    }
    parts.join(" · ")
}

/// Returns the last lines of each run's log.
pub(super) fn logs(runs: &[RunHistory]) -> Option<String> {
    let mut html = String::new();
    for (index, run) in runs.iter().enumerate().filter(|(_, run)| !run.log.is_empty()) {
        let name = escaped(&name_of(run));
        let is_open = if runs.len() == 1 { " open" } else { "" };
        let _ = write!(
            html,
            "<details data-key=\"log {name}\"{is_open}><summary>{}{name}/log.txt</summary><pre>{}</pre></details>",
            swatch(index),
            escaped(&run.log.join("\n"))
        );
    }
    (!html.is_empty()).then_some(html)
}

fn swatch(index: usize) -> String {
    format!("<i class=\"colour run-{}\"></i>", index % COLOURS)
}
