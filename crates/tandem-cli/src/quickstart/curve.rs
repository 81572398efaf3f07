//! Text plot of a curve for a terminal or a log.

/// Draws `values` over their index (from 1) in at most `width` columns and `height` rows. With more
/// values than columns, a column shows the mean of its range. The scale includes 0.
///
/// Values that are not finite are left out of the picture.
pub(crate) fn draw(values: &[f64], width: usize, height: usize) -> String {
    let columns = columns(values, width);
    let finite = columns.iter().copied().filter(|v| v.is_finite());
    let (low, high) = finite.fold((0.0f64, 0.0f64), |(low, high), v| (low.min(v), high.max(v)));
    let span = if high > low { high - low } else { 1.0 };
    let row_of = |value: f64| ((high - value) / span * (height - 1) as f64).round() as usize;

    let mut picture = String::new();
    for row in 0..height {
        let label = match row {
            0 => format!("{high:8.2}"),
            _ if row == height - 1 => format!("{low:8.2}"),
            _ => " ".repeat(8),
        };
        let points: String =
            columns.iter().map(|&v| if v.is_finite() && row_of(v) == row { '*' } else { ' ' }).collect();
        picture.push_str(format!("{label} |{points}").trim_end());
        picture.push('\n');
    }
    let last = values.len().to_string();
    let gap = columns.len().saturating_sub(1 + last.len());
    picture.push_str(&format!("{:8} +{}\n{:10}1{:gap$}{last}\n", "", "-".repeat(columns.len()), "", ""));
    picture
}

fn columns(values: &[f64], width: usize) -> Vec<f64> {
    let width = width.min(values.len());
    (0..width)
        .map(|column| {
            let share = &values[column * values.len() / width..(column + 1) * values.len() / width];
            share.iter().sum::<f64>() / share.len() as f64
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rising_line_rises() {
        let expected =
            "    3.00 |   *\n         |  *\n         | *\n    0.00 |*\n         +----\n          1  4\n";
        assert_eq!(draw(&[0.0, 1.0, 2.0, 3.0], 10, 4), expected);
    }

    #[test]
    fn columns_are_means_of_equal_shares() {
        assert_eq!(columns(&[0.0, 2.0, 4.0, 6.0], 2), [1.0, 5.0]);
        assert_eq!(columns(&[1.0, 2.0, 3.0], 2).len(), 2);
    }

    #[test]
    fn zero_is_on_the_scale_and_what_is_not_finite_is_not_drawn() {
        let picture = draw(&[f64::NAN, -1.0, -2.0], 10, 3);
        assert!(picture.starts_with("    0.00 |"), "{picture}");
        assert_eq!(picture.matches('*').count(), 2, "{picture}");
        assert!(draw(&[], 10, 3).starts_with("    0.00 |\n"));
    }
}
