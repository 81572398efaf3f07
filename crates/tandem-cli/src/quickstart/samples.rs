//! Completions before and after DPO, side by side.

use crate::output::on_one_line;

/// A prompt and two completions.
pub(crate) struct Sample<'a> {
    pub prompt: &'a str,
    pub before: &'a str,
    pub after: &'a str,
}

/// Formats two columns of `width` characters with wrapped completions, each pair under its prompt.
pub(crate) fn side_by_side(samples: &[Sample<'_>], width: usize) -> String {
    let mut text = format!("    {:width$} | after DPO\n", "after SFT");
    for sample in samples {
        text.push_str(&format!("  > {}\n", sample.prompt));
        let (left, right) = (wrap(sample.before, width), wrap(sample.after, width));
        for row in 0..left.len().max(right.len()) {
            let cell = |lines: &[String]| lines.get(row).cloned().unwrap_or_default();
            text.push_str(format!("    {:width$} | {}", cell(&left), cell(&right)).trim_end());
            text.push('\n');
        }
    }
    text
}

/// Wraps text to `width` characters, at spaces where possible. Control characters are escaped.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let text = on_one_line(text);
    let mut lines = vec![String::new()];
    for word in text.split_inclusive(' ') {
        let room = width.saturating_sub(lines.last().map_or(0, |line| line.chars().count()));
        if word.trim_end().chars().count() <= room {
            lines.last_mut().expect("there is a line").push_str(word);
            continue;
        }
        let mut rest: Vec<char> = word.chars().collect();
        while !rest.is_empty() {
            let piece: String = rest.drain(..rest.len().min(width)).collect();
            lines.push(piece);
        }
    }
    if lines.len() > 1 && lines[0].is_empty() {
        lines.remove(0);
    }
    lines.into_iter().map(|line| line.trim_end().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_columns_wrap_independently() {
        let samples = [Sample { prompt: "Who?", before: "one two three", after: "{}" }];
        let expected = "    after SFT | after DPO\n  > Who?\n    one two   | {}\n    three     |\n";
        assert_eq!(side_by_side(&samples, 9), expected);
    }

    #[test]
    fn what_does_not_fit_is_cut_and_nothing_is_lost() {
        assert_eq!(wrap("abcdefgh", 3), ["abc", "def", "gh"]);
        assert_eq!(wrap("", 3), [""]);
        assert_eq!(wrap("a\nb", 9), ["a\\nb"]);
    }
}
