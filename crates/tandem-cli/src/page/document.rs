//! The document around the panels: of the live page, and of the report.

use std::fmt::Write;

use super::Panel;

const DOCUMENT: &str = include_str!("page.html");
/// Style sheet of both pages.
pub(crate) const STYLE: &str = include_str!("page.css");
/// Script of both pages: the pointer over curves, and boxes that hide runs.
pub(crate) const SCRIPT: &str = include_str!("page.js");
/// Script that receives panels.
pub(crate) const LIVE_SCRIPT: &str = include_str!("live.js");
/// `Content-Security-Policy` of the live page: nothing but what the server itself gives.
pub(crate) const CONTENT_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
     img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Returns the live page, whose rooms are empty.
pub(crate) fn live() -> String {
    let head = "<link rel=\"icon\" href=\"icon.svg\"/><link rel=\"stylesheet\" href=\"page.css\"/>";
    let scripts = "<script src=\"page.js\"></script><script src=\"live.js\"></script>";
    filled(head, "Connecting …", scripts, &[])
}

/// Returns the report, which needs no other file.
pub(crate) fn report(panels: &[Panel]) -> String {
    // Nothing in a panel can hold a hash of all panels, and so be taken for a script of ours.
    let mut hash = blake3::Hasher::new();
    for panel in panels {
        hash.update(panel.html.as_bytes());
    }
    let nonce = hash.finalize().to_hex();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'"
    );
    let head = format!(
        "<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\"/><style nonce=\"{nonce}\">{STYLE}</style>"
    );
    let script = format!("<script nonce=\"{nonce}\">{SCRIPT}</script>");
    let note = format!("Report of tandem {}", env!("CARGO_PKG_VERSION"));
    filled(&head, &note, &script, panels)
}

/// Fills the marks of the document.
fn filled(head: &str, note: &str, scripts: &str, panels: &[Panel]) -> String {
    let mut page = String::new();
    let mut rest = DOCUMENT;
    while let Some((before, after)) = rest.split_once("{{") {
        let (mark, after) = after.split_once("}}").expect("a mark ends");
        page += before;
        match mark {
            "head" => page += head,
            "note" => page += note,
            "scripts" => page += scripts,
            room => {
                for panel in panels.iter().filter(|panel| panel.room == room) {
                    let id = super::html::escaped(&panel.id);
                    let _ = write!(page, "<div class=\"panel\" data-panel=\"{id}\">{}</div>", panel.html);
                }
            }
        }
        rest = after;
    }
    page + rest
}

#[cfg(test)]
mod tests {
    use super::super::metric::Section;
    use super::*;

    #[test]
    fn the_document_has_every_room() {
        use Section::{Answers, Learning, Likelihoods, Optimizer, Other, Speed};
        let sections = [Learning, Answers, Likelihoods, Optimizer, Speed, Other].map(Section::id);
        for room in ["runs", "advice", "samples", "plans", "keys", "logs"].into_iter().chain(sections) {
            let mark = format!("data-room=\"{room}\">{{{{{room}}}}}</");
            assert_eq!(DOCUMENT.matches(&mark).count(), 1, "{mark}");
        }
    }

    #[test]
    fn the_report_loads_nothing() {
        let panel = Panel { id: "a".into(), room: "advice", html: "<p>{{keys}}</p>".into() };
        let page = report(&[panel]);
        assert!(page.contains("<p>{{keys}}</p>"), "marks are those of the document alone");
        for loads in ["src=", "@import", "url(", "fetch(", "EventSource", "<link"] {
            assert!(!page.contains(loads), "{loads}");
        }
        // A script or style sheet must not end its element.
        assert!(!SCRIPT.contains("</") && !STYLE.contains("</"));
    }
}
