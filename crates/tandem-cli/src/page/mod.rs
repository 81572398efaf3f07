//! The page of `tandem watch` and `tandem report`: curves, advice, samples and plans of runs.
//!
//! A page is a document with named rooms, and panels of HTML that stand in them. The report writes all panels
//! into the document; the watching page gets the ones that have changed. Both are made here, in Rust: what
//! comes from data is escaped once, and scripts only place panels and answer the pointer.

mod cards;
mod chart;
mod curve;
mod document;
mod follow;
mod history;
mod html;
mod machine;
mod metric;
mod plan;
mod samples;
mod tables;
mod texts;

use std::collections::BTreeMap;

pub(crate) use self::document::{CONTENT_POLICY, LIVE_SCRIPT, SCRIPT, STYLE, live, report};
pub(crate) use self::history::RunHistory;
pub(crate) use self::machine::Machine;

use self::chart::{COLOURS, Line, Picture};
use self::html::escaped;
use self::metric::About;

/// Most runs of a page: each has a colour.
pub(crate) const MOST_RUNS: usize = COLOURS;

/// A part of the page that is replaced as a whole.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Panel {
    /// Name that stays the same over updates.
    pub id: String,
    /// Element of the document that holds the panel.
    pub room: &'static str,
    pub html: String,
}

/// Returns all panels in the order of the page.
pub(crate) fn panels(runs: &[RunHistory], machine: Option<&Machine>) -> Vec<Panel> {
    let mut panels = quick_panels(runs, machine);
    panels.extend(texts::advice(runs).map(|html| panel("advice", "advice", html)));
    panels.extend(curves(runs));
    panels.extend(texts::samples(runs).map(|html| panel("samples", "samples", html)));
    panels.extend(plan::plans(runs).map(|html| panel("plans", "plans", html)));
    panels.extend(tables::keys(runs).map(|html| panel("keys", "keys", html)));
    panels.extend(texts::logs(runs).map(|html| panel("logs", "logs", html)));
    panels
}

/// Returns the panels that change without a new line: ages, and the memory of the machine.
pub(crate) fn quick_panels(runs: &[RunHistory], machine: Option<&Machine>) -> Vec<Panel> {
    let mut panels = vec![panel("runs", "runs", cards::cards(runs, machine.is_some()))];
    panels.extend(machine.and_then(Machine::picture).map(|html| panel("machine", "speed", html)));
    panels
}

fn panel(id: &str, room: &'static str, html: String) -> Panel {
    Panel { id: id.to_owned(), room, html }
}

/// Returns a panel for each metric, in the order of [`About`].
fn curves(runs: &[RunHistory]) -> Vec<Panel> {
    let mut names: BTreeMap<(usize, &str), About> = BTreeMap::new();
    for name in runs.iter().flat_map(|run| run.curves.keys()) {
        let about = About::metric(name);
        names.insert((about.place, name), about);
    }
    let drawn = |((_, name), about): (&(usize, &str), &About)| {
        let mut lines = Vec::new();
        for (index, run) in runs.iter().enumerate() {
            let Some(curve) = run.curves.get(*name) else { continue };
            for (is_eval, points) in [(false, &curve.train), (true, &curve.eval)] {
                if !points.is_empty() {
                    lines.push(Line { run: Some(index), is_eval, points });
                }
            }
        }
        let html = figure(name, about.meaning, &chart::draw(&lines, about.unit)?);
        Some(Panel { id: format!("curve {name}"), room: about.section.id(), html })
    };
    names.iter().filter_map(drawn).collect()
}

fn figure(name: &str, meaning: &str, Picture { svg, unit }: &Picture) -> String {
    let (name, mut meaning) = (escaped(name), escaped(meaning));
    if !unit.is_empty() {
        meaning += &format!(", {unit}");
    }
    format!(
        "<figure aria-label=\"{name}\"><figcaption><b>{name}</b> <span>{meaning}</span><output></output></figcaption>{svg}</figure>"
    )
}

/// Name of a run in the page: its folder as it was given.
fn name_of(run: &RunHistory) -> String {
    run.folder.display().to_string()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn nothing_from_data_becomes_an_element() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let evil = "<img src=x onerror=alert(1)>";
        let path = folder.path().join(evil);
        fs::create_dir_all(&path).expect("created");
        let metrics = format!(r#"{{"step":1,"split":"train","loss":0.5,"judges/{evil}":0.5,"time":1}}"#);
        fs::write(path.join("metrics.jsonl"), metrics + "\n").expect("written");
        let sample = serde_json::json!({
            "step": 1, "place": evil, "row": 0, "prompt": [{ "role": evil, "content": evil }], "chosen": evil, "rejected": evil,
            "answers": [{ "text": evil, "judges": { evil: { "score": 1.0, "said": evil } } }],
        });
        fs::write(path.join("samples.jsonl"), format!("{sample}\n")).expect("written");
        fs::write(path.join("log.txt"), evil).expect("written");
        let config = format!("method = \"{evil}\"\n[data]\ntrain = \"{evil}\"\n");
        fs::write(path.join("config.toml"), config).expect("written");
        let phase = serde_json::json!({
            "name": evil, "bytes_at_peak": { evil: 5 }, "moment": { "place": evil, "operation": evil },
        });
        let plan = serde_json::json!({ "model": evil, "dtype": evil, "phases": [phase] });
        fs::write(path.join("plan.json"), plan.to_string()).expect("written");
        let mut run = RunHistory::new(&path);
        run.update().expect("read");
        let page = report(&panels(&[run], None));
        assert!(page.contains("&lt;img src=x"), "the text is shown");
        assert!(!page.contains("<img"), "{}", &page[page.find("<img").unwrap_or(0)..][..200]);
    }

    #[test]
    fn curves_of_several_runs_share_a_picture() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let runs: Vec<RunHistory> = ["a", "b"]
            .iter()
            .map(|name| {
                let path = folder.path().join(name);
                fs::create_dir_all(&path).expect("created");
                let lines: String = (1..9)
                    .map(|step| {
                        format!("{{\"step\":{step},\"split\":\"train\",\"loss\":{step},\"new\":1}}\n")
                    })
                    .collect();
                fs::write(path.join("metrics.jsonl"), lines).expect("written");
                let mut run = RunHistory::new(&path);
                run.update().expect("read");
                run
            })
            .collect();
        let panels = panels(&runs, None);
        let loss = panels.iter().find(|panel| panel.id == "curve loss").expect("a curve");
        assert_eq!(loss.room, "learning");
        assert!(loss.html.contains("#0B0000") && loss.html.contains("#0B0001"), "{}", loss.html);
        let order: Vec<&str> = panels.iter().map(|panel| panel.id.as_str()).collect();
        assert_eq!(order, ["runs", "curve loss", "curve new", "keys"][..order.len()], "the important first");
    }
}
