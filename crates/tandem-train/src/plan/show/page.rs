//! Self-contained HTML page of a plan: SVG bars and tables.

use std::fmt::Write;

use tandem_kernels::MemoryKind;

use crate::plan::show::picture::fill;
use crate::plan::show::text::rank_names;
use crate::plan::{PhasePlan, Plan, RunPlan};
use crate::size::in_words;

/// Pixels of the longest bar, and of a row.
const WIDTH: f64 = 720.0;
const ROW: usize = 28;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:64em;margin:2em auto;padding:0 1em;color:#222}\
table{border-collapse:collapse;margin:1em 0}th,td{padding:.15em .8em;text-align:right;border-bottom:1px solid #ddd}\
th:first-child,td:first-child{text-align:left}.key{display:inline-block;width:.9em;height:.9em;margin:0 .4em 0 1em}\
pre{background:#f4f4f4;padding:1em;overflow:auto}.no{color:#b00020}.yes{color:#1b6e2e}";

impl RunPlan {
    /// Renders the page. `advice` is for a run that does not fit.
    pub fn page(&self, advice: Option<&str>) -> String {
        let plan = self.fullest();
        let title = escaped(&format!("Plan of {}", plan.model));
        let mut text = format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/><title>{title}</title>\n<style>{STYLE}</style></head>\n\
             <body>\n<h1>{title}</h1>\n<p>{}</p>\n",
            escaped(&plan.headline()).replace('\n', "<br/>")
        );
        let class = if self.fits() { "yes" } else { "no" };
        let _ =
            writeln!(text, "<p class=\"{class}\">{}</p>", escaped(&self.verdict()).replace('\n', "<br/>"));
        if let Some(advice) = advice {
            let _ = writeln!(text, "<pre>{}</pre>", escaped(advice));
        }
        let limit = self.fit().limit.map(|limit| limit as usize);
        let largest = plan.phases.iter().map(|phase| phase.memory.peak).max().unwrap_or(0);
        let shown = limit.filter(|&limit| limit < 3 * largest);
        let scale = WIDTH / shown.unwrap_or(0).max(largest).max(1) as f64;
        for (ranks, plan) in &self.ranks {
            let _ = writeln!(text, "<h2>{}</h2>", escaped(&rank_names(ranks)));
            bars(&mut text, plan, scale, shown);
            table(&mut text, plan);
        }
        text += "</body></html>\n";
        text
    }
}

fn bars(text: &mut String, plan: &Plan, scale: f64, limit: Option<usize>) {
    let height = plan.phases.len() * ROW;
    let _ = writeln!(
        text,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"100%\" viewBox=\"0 0 {} {height}\" font-size=\"13\">",
        WIDTH + 200.0
    );
    for (index, phase) in plan.phases.iter().enumerate() {
        let y = index * ROW;
        let _ = writeln!(text, "<text x=\"0\" y=\"{}\">{}</text>", y + 18, escaped(phase.name));
        let mut x = 80.0;
        for kind in MemoryKind::ALL {
            let bytes = phase.memory.at_peak[kind as usize];
            if bytes > 0 {
                let width = bytes as f64 * scale;
                let _ = writeln!(
                    text,
                    "<rect x=\"{x:.1}\" y=\"{}\" width=\"{width:.1}\" height=\"20\" fill=\"{}\"><title>{}: {}</title></rect>",
                    y + 4,
                    colour(kind),
                    escaped(kind.name()),
                    in_words(bytes as u64)
                );
                x += width;
            }
        }
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{}\">{}</text>",
            x + 6.0,
            y + 18,
            in_words(phase.memory.peak as u64)
        );
    }
    if let Some(limit) = limit {
        let x = 80.0 + limit as f64 * scale;
        let _ = writeln!(
            text,
            "<line x1=\"{x:.1}\" y1=\"0\" x2=\"{x:.1}\" y2=\"{height}\" stroke=\"#b00020\" stroke-width=\"2\"><title>limit: {}</title></line>",
            in_words(limit as u64)
        );
    }
    text.push_str("</svg>\n<p>");
    for kind in plan.kinds() {
        let _ = write!(
            text,
            "<span class=\"key\" style=\"background:{}\"></span>{}",
            colour(kind),
            escaped(kind.name())
        );
    }
    text.push_str("</p>\n");
}

fn table(text: &mut String, plan: &Plan) {
    let mut row = |tag: &str, name: &str, value: &dyn Fn(&PhasePlan) -> String| {
        let cells: String =
            plan.phases.iter().map(|phase| format!("<{tag}>{}</{tag}>", escaped(&value(phase)))).collect();
        let _ = writeln!(text, "<tr><{tag}>{}</{tag}>{cells}</tr>", escaped(name));
    };
    row("th", "at the peak", &|phase| phase.name.to_owned());
    for kind in plan.kinds() {
        row("td", kind.name(), &|phase| in_words(phase.memory.at_peak[kind as usize] as u64));
    }
    row("th", "together", &|phase| in_words(phase.memory.peak as u64));
    row("td", "arena", &|phase| in_words(phase.high_water as u64));
    row("td", "when", &|phase| phase.in_words());
    let start = text.rfind("</p>\n").map_or(0, |at| at + 5);
    text.insert_str(start, "<table>\n");
    text.push_str("</table>\n");
}

/// Returns the colour of a kind, that of the terminal's picture, as `#rrggbb`.
pub fn colour(kind: MemoryKind) -> String {
    let number = fill(kind).1;
    let [red, green, blue] = match number {
        232.. => [8 + 10 * (number - 232); 3],
        _ => {
            let level = |n: u8| if n == 0 { 0 } else { 55 + 40 * n };
            let cube = number - 16;
            [level(cube / 36), level(cube / 6 % 6), level(cube % 6)]
        }
    };
    format!("#{red:02x}{green:02x}{blue:02x}")
}

/// Returns text of an element or a double-quoted attribute, in which nothing is a tag. HTML has no NUL.
pub fn escaped(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
