//! Curves of a metric as an SVG picture.
//!
//! Plotters rounds to whole pixels and knows no style sheets. So a picture is drawn several times larger than
//! it is shown, in colours that nobody would choose, which `page.css` replaces by those of the light or the
//! dark page.

use plotters::prelude::*;
use serde_json::json;

use super::curve::{Point, downsampled, is_noisy, smoothed};
use super::metric::Unit;

/// Pixels of a picture for one that is shown.
pub(super) const SCALE: i32 = 4;
/// Size as shown, in pixels.
const SIZE: (i32, i32) = (440, 220);
/// Room for the labels of the axes, as shown.
const LABELS: (i32, i32) = (50, 24);
pub(super) const GRID: RGBColor = RGBColor(10, 0, 0);
pub(super) const TEXT: RGBColor = RGBColor(10, 0, 1);
/// Colour of a line that is of no run.
const NO_RUN: RGBColor = RGBColor(10, 0, 2);
/// Colours of runs; `page.css` has as many.
pub(super) const COLOURS: usize = 8;
/// Buckets of a curve: two pixels of a picture as it is shown.
const BUCKETS: usize = 250;
/// Least number of points of a curve whose noise is shown with its mean.
const SMOOTHED: usize = 150;
/// Most points of an evaluation that have a mark each.
const MARKED: usize = 40;
/// Largest value that is drawn.
const LARGEST: f64 = 1e30;

/// A line of a picture.
pub(super) struct Line<'a> {
    /// Index of the run, and so of the colour; `None` for what is of no run.
    pub run: Option<usize>,
    /// True for held-out rows.
    pub is_eval: bool,
    pub points: &'a [Point],
}

/// A picture with the numbers behind it, as elements.
pub(super) struct Picture {
    pub svg: String,
    /// Unit of the axis, if it was chosen for the numbers.
    pub unit: &'static str,
}

/// Draws the lines; returns nothing if no line has a number.
pub(super) fn draw(lines: &[Line<'_>], unit: Unit) -> Option<Picture> {
    let factor = Factor::new(unit, lines);
    let lines: Vec<(&Line<'_>, Vec<Point>)> = lines.iter().map(|line| (line, factor.scaled(line))).collect();
    let axes = Axes::around(lines.iter().flat_map(|(_, points)| points), unit)?;
    let mut svg = String::new();
    let plot = picture(&mut svg, &lines, &axes).expect("a text takes all that is drawn");
    // The page's own document gives the name space.
    let (_, elements) = svg.split_once('>').expect("an element");
    let (width, height) = (SIZE.0 * SCALE, SIZE.1 * SCALE);
    let svg = format!(
        "<svg viewBox=\"0 0 {width} {height}\" role=\"img\">{elements}<script type=\"application/json\">{}</script>",
        numbers(&lines, &axes, plot, factor.unit),
    );
    Some(Picture { svg, unit: factor.unit })
}

/// Divisor of bytes for an axis up to `largest`, and its unit.
pub(super) fn byte_unit(largest: f64) -> (f64, &'static str) {
    let (bits, unit) = if largest < (1 << 30) as f64 { (20, "MiB") } else { (30, "GiB") };
    ((1u64 << bits) as f64, unit)
}

/// Divisor of values for the axis, and its unit.
struct Factor {
    divisor: f64,
    unit: &'static str,
}

impl Factor {
    fn new(unit: Unit, lines: &[Line<'_>]) -> Self {
        if unit != Unit::Bytes {
            return Self { divisor: 1.0, unit: "" };
        }
        let largest = lines.iter().flat_map(|line| line.points).map(|point| point.1).fold(0.0, f64::max);
        let (divisor, unit) = byte_unit(largest);
        Self { divisor, unit }
    }

    fn scaled(&self, line: &Line<'_>) -> Vec<Point> {
        let value = |value: f64| if value.abs() <= LARGEST { value / self.divisor } else { f64::NAN };
        line.points.iter().map(|point| (point.0, value(point.1))).collect()
    }
}

/// Ranges of the axes.
struct Axes {
    x: [f64; 2],
    y: [f64; 2],
}

impl Axes {
    fn around<'a>(points: impl Iterator<Item = &'a Point>, unit: Unit) -> Option<Self> {
        let (mut x, mut y) = ([f64::INFINITY, f64::NEG_INFINITY], [f64::INFINITY, f64::NEG_INFINITY]);
        for (step, value) in points.filter(|point| point.1.is_finite()) {
            x = [x[0].min(*step), x[1].max(*step)];
            y = [y[0].min(*value), y[1].max(*value)];
        }
        if x[0] > x[1] {
            return None;
        }
        if x[0] == x[1] {
            x = [x[0] - 1.0, x[1] + 1.0];
        }
        if matches!(unit, Unit::Amount | Unit::Bytes) {
            y[0] = y[0].min(0.0);
        }
        let (size, magnitude) = (y[1] - y[0], y[0].abs().max(y[1].abs()).max(1e-30));
        // Ticks need a range that the numbers can tell apart.
        let size = if size < 1e-6 * magnitude { magnitude } else { size };
        let has_floor = y[0] == 0.0 && unit != Unit::Plain;
        let has_ceiling = y[1] == 1.0 && unit == Unit::Share;
        y[0] -= if has_floor { 0.0 } else { 0.06 * size };
        y[1] += if has_ceiling { 0.02 * size } else { 0.06 * size };
        Some(Self { x, y })
    }
}

type Drawn<T> = Result<T, DrawingAreaErrorKind<std::io::Error>>;

/// Draws into `svg`; returns left, right, top and bottom of the plot in pixels of the picture.
fn picture(svg: &mut String, lines: &[(&Line<'_>, Vec<Point>)], axes: &Axes) -> Drawn<[i32; 4]> {
    let root =
        SVGBackend::with_string(svg, ((SIZE.0 * SCALE) as u32, (SIZE.1 * SCALE) as u32)).into_drawing_area();
    let mut chart = ChartBuilder::on(&root)
        .margin_top(8 * SCALE)
        .margin_right(16 * SCALE)
        .x_label_area_size(LABELS.1 * SCALE)
        .y_label_area_size(LABELS.0 * SCALE)
        .build_cartesian_2d(axes.x[0]..axes.x[1], axes.y[0]..axes.y[1])?;
    let label = ("system-ui, sans-serif", 15 * SCALE).into_font().color(&TEXT);
    let size = axes.y[1] - axes.y[0];
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(5)
        .y_labels(4)
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID.stroke_width(SCALE as u32))
        .axis_style(GRID.stroke_width(SCALE as u32))
        .set_all_tick_mark_size(4 * SCALE)
        .label_style(label)
        .x_label_formatter(&|step| short(*step, axes.x[1] - axes.x[0]))
        .y_label_formatter(&|value| short(*value, size))
        .draw()?;
    // Noise of one run must not hide the others.
    let noise = if lines.iter().any(|(line, _)| line.run != lines[0].0.run) { 0.18 } else { 0.3 };
    for (line, points) in lines {
        let colour = line.run.map_or(NO_RUN, |run| RGBColor(11, 0, (run % COLOURS) as u8));
        let dense = points.len() >= SMOOTHED && !line.is_eval && is_noisy(points);
        let (opacity, width) = if dense { (noise, 1.0) } else { (1.0, 1.8) };
        let style =
            |opacity: f64, width: f64| colour.mix(opacity).stroke_width((width * f64::from(SCALE)) as u32);
        for part in unbroken(&downsampled(points, BUCKETS)) {
            chart.draw_series(LineSeries::new(part.iter().copied(), style(opacity, width)))?;
        }
        if dense {
            let mean = smoothed(points, points.len() / 60);
            for part in unbroken(&downsampled(&mean, BUCKETS)) {
                chart.draw_series(LineSeries::new(part.iter().copied(), style(1.0, 1.8)))?;
            }
        }
        let is_marked = (line.is_eval && points.len() <= MARKED) || points.len() == 1;
        if is_marked {
            let marks = points.iter().filter(|point| point.1.is_finite());
            chart.draw_series(marks.map(|point| Circle::new(*point, 3 * SCALE, colour.filled())))?;
        }
    }
    let (x, y) = chart.plotting_area().get_pixel_range();
    root.present()?;
    drop(chart);
    Ok([x.start, x.end, y.start, y.end])
}

/// Returns the stretches of numbers between gaps.
fn unbroken(points: &[Point]) -> impl Iterator<Item = &[Point]> {
    points.split(|point| !point.1.is_finite()).filter(|part| !part.is_empty())
}

/// Returns the numbers behind the picture for the pointer, as JSON that ends no element.
fn numbers(lines: &[(&Line<'_>, Vec<Point>)], axes: &Axes, plot: [i32; 4], unit: &str) -> String {
    let lines: Vec<_> = lines
        .iter()
        .map(|(line, points)| {
            let points = downsampled(points, BUCKETS);
            let (x, y): (Vec<f64>, Vec<f64>) = points
                .iter()
                .filter(|point| point.1.is_finite())
                .map(|point| (point.0, rounded(point.1)))
                .unzip();
            json!({ "run": line.run.map_or(-1, |run| run as i64), "eval": line.is_eval, "x": x, "y": y })
        })
        .collect();
    let [left, right, ..] = plot.map(|pixel| f64::from(pixel) / f64::from(SIZE.0 * SCALE));
    super::html::json_in_script(
        &json!({ "x": axes.x, "plot": [rounded(left), rounded(right)], "unit": unit, "lines": lines }),
    )
}

/// Rounds to five digits.
fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

/// Writes a number of an axis whose range is `size`, without zeros at its end.
pub(super) fn short(value: f64, size: f64) -> String {
    if value.abs() <= 1e-9 * size {
        return "0".to_owned();
    }
    let magnitude = value.abs();
    // All numbers of an axis have the same suffix.
    let (scaled, suffix) = match magnitude.max(size) {
        1e15.. => return format!("{value:.1e}"),
        1e9.. => (value / 1e9, "G"),
        1e6.. => (value / 1e6, "M"),
        1e4.. => (value / 1e3, "k"),
        _ if magnitude >= 0.000_999 => (value, ""),
        _ => return trimmed_exponent(value),
    };
    // Two digits beyond the range's first one.
    let digits = (2.0 - (size * scaled.abs() / magnitude).log10().floor()).clamp(0.0, 9.0) as usize;
    let text = format!("{scaled:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{suffix}")
}

fn trimmed_exponent(value: f64) -> String {
    let text = format!("{value:.2e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    format!("{}e{exponent}", digits.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(points: &[Point], unit: Unit) -> Option<String> {
        draw(&[Line { run: Some(0), is_eval: false, points }], unit).map(|picture| picture.svg)
    }

    #[test]
    fn numbers_of_an_axis_are_short() {
        for (value, size, expected) in [
            (0.1 + 0.2, 1.0, "0.3"),
            (1e-17, 1.0, "0"),
            (250.0, 1000.0, "250"),
            (12_500.0, 50_000.0, "12.5k"),
            (5000.0, 10_000.0, "5k"),
            (2e6, 4e6, "2M"),
            (5e-5, 1e-4, "5e-5"),
            (0.001, 0.004, "0.001"),
            (-1.5, 4.0, "-1.5"),
            (0.0, 0.0, "0"),
        ] {
            assert_eq!(short(value, size), expected, "{value} in a range of {size}");
        }
    }

    #[test]
    fn values_that_cannot_be_drawn_leave_gaps() {
        let points =
            [(1.0, 1.0), (2.0, f64::NAN), (3.0, 2.0), (4.0, 1.0), (5.0, f64::INFINITY), (6.0, 1e300)];
        let svg = drawn(&points, Unit::Plain).expect("numbers");
        assert_eq!(
            svg.matches("stroke=\"#0B0000\"").count(),
            2,
            "one line before the gap and one after it: {svg}"
        );
        assert!(svg.contains(r#""x":[1.0,3.0,4.0],"y":[1.0,2.0,1.0]"#), "{svg}");
        assert_eq!(drawn(&points[1..2], Unit::Plain), None);
    }

    /// Ticks of such ranges must not be too many.
    #[test]
    fn ranges_of_every_size_have_few_ticks() {
        for (low, high) in
            [(1e17, 1e17 + 16.0), (0.0, 0.0), (-1e29, 1e29), (1e-300, 2e-300), (3.0, 3.0 + 1e-12)]
        {
            for unit in [Unit::Plain, Unit::Share, Unit::Amount, Unit::Bytes] {
                let svg = drawn(&[(1.0, low), (2.0, high)], unit).expect("numbers");
                assert!(svg.matches("<text").count() < 16, "{low} to {high}: {svg}");
            }
        }
    }

    #[test]
    fn long_curves_stay_small() {
        let points: Vec<Point> = (1..=10_000).map(|i| (f64::from(i), (f64::from(i) * 0.7).sin())).collect();
        let svg = drawn(&points, Unit::Plain).expect("numbers");
        assert!(svg.len() < 40_000, "{} bytes", svg.len());
    }
}
