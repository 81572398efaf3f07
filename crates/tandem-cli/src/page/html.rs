//! Text in HTML.

pub(super) use tandem_train::plan::show::page::escaped;

/// Returns JSON for a `<script type="application/json">`: no text in it can end the element.
pub(super) fn json_in_script(value: &serde_json::Value) -> String {
    // A `<` is only in strings, where this means the same.
    value.to_string().replace('<', "\\u003c")
}

/// Returns at most `most` characters of a text.
pub(super) fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Returns a table whose cells are escaped here; the first column holds names.
pub(super) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let row = |tag: &str, cells: &mut dyn Iterator<Item = &str>| -> String {
        let cells: String = cells.map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell))).collect();
        format!("<tr>{cells}</tr>")
    };
    let body: String = rows.iter().map(|cells| row("td", &mut cells.iter().map(String::as_str))).collect();
    let head = row("th", &mut header.iter().copied());
    format!("<div class=\"wide\"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_stay_texts() {
        let evil = "</script><script>alert(1)</script>";
        assert!(!json_in_script(&serde_json::json!({ "a": evil })).contains('<'));
        assert!(!table(&[evil], &[vec![evil.to_owned()]]).contains("<script"));
        assert_eq!(cut("añb", 2), "añ…");
        assert_eq!(cut("añb", 3), "añb");
    }
}
