//! The plan of a run as bars: memory of each phase by kind.

use std::fmt::Write;

use plotters::prelude::*;
use serde_json::Value;
use tandem_kernels::MemoryKind;
use tandem_train::plan::show::page::colour;
use tandem_train::plan::show::text::grouped;
use tandem_train::size::in_words;

use super::chart::{GRID, SCALE, TEXT, byte_unit, short};
use super::html::{escaped, table};
use super::{RunHistory, name_of};

const WIDTH: i32 = 640;
const ROW: i32 = 30;
const LABELS: (i32, i32) = (100, 26);
/// Memories of a rank: field of a phase with their bytes, and name.
const MEMORIES: [(&str, &str); 3] = [
    ("bytes_at_peak", "memory of the device"),
    ("host_bytes_at_peak", "host memory"),
    ("file_bytes_at_peak", "mapped file"),
];

/// Returns the plans of all runs that have one.
pub(super) fn plans(runs: &[RunHistory]) -> Option<String> {
    let plans: String = runs
        .iter()
        .filter_map(|run| Some((run, run.plan.as_ref()?)))
        .map(|(run, plan)| {
            let is_open = if runs.len() == 1 { " open" } else { "" };
            let name = escaped(&name_of(run));
            format!(
                "<details data-key=\"plan {name}\"{is_open}><summary>{name}</summary>{}</details>",
                of_run(plan)
            )
        })
        .collect();
    (!plans.is_empty()).then_some(plans)
}

fn of_run(plan: &Value) -> String {
    let mut html = format!("<p>{}</p>", escaped(&sentence(plan)));
    let phases = plan["phases"].as_array().map_or(&[][..], Vec::as_slice);
    for (field, memory) in MEMORIES {
        let phases: Vec<Phase> = phases.iter().map(|phase| Phase::read(phase, field)).collect();
        let bars = bars(&phases);
        if !bars.is_empty() {
            let _ = write!(html, "<h3>{memory}</h3>{bars}");
        }
    }
    let row = |phase: &Value| {
        let phase = Phase::read(phase, MEMORIES[0].0);
        vec![phase.name, in_words(phase.peak as u64), phase.moment]
    };
    let rows: Vec<Vec<String>> = phases.iter().map(row).collect();
    html + &table(&["phase", "at its peak", "when"], &rows)
}

/// The plan's numbers in words.
fn sentence(plan: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let mut parts = vec![format!("{} in {}", text(&plan["model"]), text(&plan["dtype"]))];
    let counts = [
        ("num_trained_parameters", "trained parameters"),
        ("num_frozen_parameters", "frozen ones"),
        ("ranks", "ranks"),
        ("steps", "steps"),
        ("batch_size", "rows a step"),
        ("train_rows", "training rows"),
        ("eval_rows", "held out"),
    ];
    for (name, words) in counts {
        let shown = plan[name].as_u64().filter(|count| *count > u64::from(name == "ranks"));
        parts.extend(shown.map(|count| format!("{} {words}", grouped(count as usize))));
    }
    parts.join("; ")
}

/// A phase and its memory at the fullest moment.
struct Phase {
    name: String,
    peak: f64,
    kinds: Vec<(String, f64)>,
    moment: String,
}

impl Phase {
    fn read(phase: &Value, field: &str) -> Self {
        let kinds = phase[field].as_object().into_iter().flatten();
        let kinds = kinds.filter_map(|(name, bytes)| Some((name.clone(), bytes.as_f64()?)));
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let moment = [&phase["moment"]["place"], &phase["moment"]["operation"]].map(text);
        let kinds: Vec<(String, f64)> = kinds.filter(|(_, bytes)| *bytes > 0.0).collect();
        Self {
            name: text(&phase["name"]),
            peak: kinds.iter().map(|(_, bytes)| bytes).sum(),
            kinds,
            moment: moment.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", "),
        }
    }
}

/// Draws the bars and their legend.
fn bars(phases: &[Phase]) -> String {
    let largest = phases.iter().map(|phase| phase.peak).fold(0.0, f64::max);
    if largest <= 0.0 {
        return String::new();
    }
    let height = ROW * phases.len() as i32 + LABELS.1;
    let mut svg = String::new();
    draw(&mut svg, phases, 1.05 * largest, height).expect("a text takes all that is drawn");
    let (_, elements) = svg.split_once('>').expect("an element");
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in phases.iter().flat_map(|phase| &phase.kinds) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    let key = |name: &&str| {
        let fill = hex_colour(name);
        format!(
            "<span><svg class=\"key\" viewBox=\"0 0 1 1\"><rect width=\"1\" height=\"1\" fill=\"{fill}\"/></svg>{}</span>",
            escaped(name)
        )
    };
    let keys: String = names.iter().map(key).collect();
    format!(
        "<div class=\"wide\"><svg class=\"bars\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"memory by phase\">{elements}</div>\
         <p class=\"keys\">{keys}</p>",
        WIDTH * SCALE,
        height * SCALE
    )
}

fn draw(
    svg: &mut String,
    phases: &[Phase],
    end: f64,
    height: i32,
) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
    let (divisor, unit) = byte_unit(end);
    let units = |bytes: f64| bytes / divisor;
    let root =
        SVGBackend::with_string(svg, ((WIDTH * SCALE) as u32, (height * SCALE) as u32)).into_drawing_area();
    let mut chart = ChartBuilder::on(&root)
        .margin_right(16 * SCALE)
        .x_label_area_size(LABELS.1 * SCALE)
        .y_label_area_size(LABELS.0 * SCALE)
        .build_cartesian_2d(0.0..units(end), phases.len() as f64..0.0)?;
    let font = ("system-ui, sans-serif", 15 * SCALE).into_font();
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .x_labels(6)
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID.stroke_width(SCALE as u32))
        .axis_style(GRID.stroke_width(SCALE as u32))
        .label_style(font.clone().color(&TEXT))
        .x_label_formatter(&|size| format!("{} {unit}", short(*size, units(end))))
        .draw()?;
    for (index, phase) in phases.iter().enumerate() {
        let (top, mut left) = (index as f64, 0.0);
        for (name, bytes) in &phase.kinds {
            let right = left + units(*bytes);
            let corners = [(left, top + 0.15), (right, top + 0.85)];
            chart.draw_series([Rectangle::new(corners, rgb(&hex_colour(name)).filled())])?;
            left = right;
        }
    }
    drop(chart);
    for (index, phase) in phases.iter().enumerate() {
        let at = (2 * SCALE, (index as i32 * ROW + ROW / 3) * SCALE);
        root.draw(&Text::new(phase.name.clone(), at, font.clone().color(&TEXT)))?;
    }
    root.present()
}

/// Returns the colour of a kind of memory by its name.
fn hex_colour(name: &str) -> String {
    MemoryKind::ALL.into_iter().find(|kind| kind.name() == name).map_or_else(|| "#808080".to_owned(), colour)
}

fn rgb(hex: &str) -> RGBColor {
    let number = u32::from_str_radix(&hex[1..], 16).unwrap_or(0);
    let [_, red, green, blue] = number.to_be_bytes();
    RGBColor(red, green, blue)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_and_colours_read() {
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(grouped(12), "12");
        assert_eq!(rgb("#0a14ff"), RGBColor(10, 20, 255));
    }
}
