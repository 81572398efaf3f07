//! A card per run: how far it is, its last numbers, and its colour.

use std::fmt::Write;
use std::time::SystemTime;

use tandem_train::metrics::Split;
use tandem_train::size;

use super::RunHistory;
use super::chart::{COLOURS, short};
use super::html::escaped;
use super::name_of;
use crate::run_folder::method;
use crate::step_line::{ACCURACIES, MARGINS, SCORES, in_words};

/// Seconds without a line after which a run may have ended.
const SILENCE: u64 = 120;

/// Returns the cards, which are the legend of the curves too. Only a live page tells how old they are.
pub(super) fn cards(runs: &[RunHistory], is_live: bool) -> String {
    runs.iter().enumerate().map(|(index, run)| card(index, run, is_live)).collect()
}

fn card(index: usize, run: &RunHistory, is_live: bool) -> String {
    let colour = index % COLOURS;
    let name = escaped(&name_of(run));
    let mut html = format!(
        "<article class=\"run\"><label><input type=\"checkbox\" checked data-run=\"{colour}\" data-name=\"{name}\"/>\
         <i class=\"colour run-{colour}\"></i><b>{name}</b></label> <span class=\"method\">{}</span>",
        escaped(method(&run.keys)),
    );
    let state = state(run, is_live);
    let _ = match run.planned_steps() {
        Some(steps) => write!(
            html,
            "<progress value=\"{}\" max=\"{}\"></progress><p>step {} of {steps}, {state}</p>",
            run.step,
            steps.max(1),
            run.step
        ),
        None => write!(html, "<p>step {}, {state}</p>", run.step),
    };
    html.push_str("<dl>");
    for (name, value) in facts(run) {
        let _ = write!(html, "<div><dt>{name}</dt><dd>{}</dd></div>", escaped(&value));
    }
    html.push_str("</dl>");
    if let Some(problem) = &run.problem {
        let _ = write!(html, "<p class=\"bad\">cannot read the run's files: {}</p>", escaped(problem));
    }
    if run.unreadable > 0 {
        let _ = write!(html, "<p class=\"bad\">{} lines could not be read</p>", run.unreadable);
    }
    html + "</article>"
}

/// State of the run, as far as its files tell.
fn state(run: &RunHistory, is_live: bool) -> String {
    if run.is_finished {
        return "finished".to_owned();
    }
    if !is_live {
        return "unfinished".to_owned();
    }
    if run.step == 0 {
        return "waiting for the first step".to_owned();
    }
    let age = run.written.and_then(|at| SystemTime::now().duration_since(at).ok()).unwrap_or_default();
    if age.as_secs() >= SILENCE {
        return format!("silent for {}", in_words(age));
    }
    match run.seconds_left() {
        Some(seconds) => format!("left {}", in_words(std::time::Duration::from_secs_f64(seconds.min(1e9)))),
        None => "running".to_owned(),
    }
}

/// The last numbers of a run that has them.
fn facts(run: &RunHistory) -> Vec<(&'static str, String)> {
    let (train, eval) = (Split::Train, Split::Eval);
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    let number = |value: f64| short(value, value.abs() / 10.0);
    let mut facts = Vec::new();
    let mut fact = |name, value: Option<f64>, show: &dyn Fn(f64) -> String| {
        facts.extend(value.map(|value| (name, show(value))));
    };
    fact("loss", run.last(train, "loss"), &number);
    fact("held-out loss", run.last(eval, "loss"), &number);
    fact("margin", MARGINS.iter().find_map(|name| run.last(train, name)), &number);
    fact("score", SCORES.iter().find_map(|name| run.last(train, name)), &number);
    fact("accuracy", ACCURACIES.iter().find_map(|name| run.last(train, name)), &percent);
    fact("tokens/s", run.last(train, "tokens_per_second"), &number);
    fact("memory", run.last(train, "memory"), &|bytes| size::in_words(bytes as u64));
    facts
}
