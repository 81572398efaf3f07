//! Links between the repository's pages.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use super::blocks::{pages, read, root};

/// Pages outside the book whose links are checked too.
fn other_pages() -> Vec<String> {
    let mut pages: Vec<String> =
        ["CHANGELOG.md", "CONTRIBUTING.md", "bench/README.md", "goldens/README.md"].map(str::to_owned).into();
    for folder in ["examples", "crates"] {
        let found = std::fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap());
        let names = found.map(|entry| format!("{folder}/{}/README.md", entry.file_name().to_string_lossy()));
        pages.extend(names.filter(|name| root().join(name).exists()));
    }
    pages.push("examples/README.md".to_owned());
    pages
}

/// A page's text without blocks and code, and its anchors.
struct Page {
    prose: Vec<String>,
    anchors: BTreeSet<String>,
}

impl Page {
    fn new(text: &str) -> Self {
        let (mut prose, mut anchors) = (Vec::new(), BTreeSet::new());
        let mut count = BTreeMap::new();
        let mut in_block = false;
        for line in text.lines() {
            if line.trim_start().starts_with("```") {
                in_block = !in_block;
            }
            if in_block {
                prose.push(String::new());
                continue;
            }
            if let Some(id) = line.strip_prefix("<a id=\"").and_then(|rest| rest.split('"').next()) {
                anchors.insert(id.to_owned());
            }
            let heading = line.trim_start_matches('#');
            if heading.len() < line.len() && heading.starts_with(' ') {
                let slug = slug(heading.trim());
                let seen = count.entry(slug.clone()).or_insert(0);
                anchors.insert(if *seen == 0 { slug } else { format!("{slug}-{seen}") });
                *seen += 1;
            }
            prose.push(line.split('`').step_by(2).collect());
        }
        Self { prose, anchors }
    }

    /// Targets of links and pictures with their 1-based lines.
    fn links(&self) -> impl Iterator<Item = (usize, &str)> {
        self.prose.iter().enumerate().flat_map(|(index, line)| {
            let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            targets.map(move |target| (index + 1, target))
        })
    }
}

/// The anchor of a heading, as GitHub and mdBook make it.
fn slug(heading: &str) -> String {
    let text: String = heading
        .split("](")
        .enumerate()
        .map(|(index, part)| {
            let rest = if index == 0 { part } else { part.split_once(')').map_or("", |(_, rest)| rest) };
            rest.replace('[', "")
        })
        .collect();
    let kept = text.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// A path without `.` and `..`.
fn normalised(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(parts.pop()),
            Component::CurDir => {}
            part => parts.push(part),
        }
    }
    parts
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let mut wrong = Vec::new();
    let mut followed = 0;
    for name in pages().into_iter().chain(other_pages()) {
        let page = Page::new(&read(&name));
        for (line, target) in page.links() {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            followed += 1;
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let file = match file {
                "" => name.clone(),
                file => {
                    let beside = Path::new(&name).parent().unwrap().join(file);
                    normalised(&beside).to_string_lossy().into_owned()
                }
            };
            let exists = root().join(&file).exists();
            let found = exists
                && (anchor.is_empty()
                    || !file.ends_with(".md")
                    || Page::new(&read(&file)).anchors.contains(anchor));
            if !found {
                wrong.push(format!("{name}:{line}: {target}"));
            }
        }
    }
    assert!(followed > 300, "{followed} links only");
    assert!(wrong.is_empty(), "broken links:\n{}", wrong.join("\n"));
}

#[test]
fn every_page_has_one_place_in_the_book() {
    let summary = Page::new(&read("docs/SUMMARY.md"));
    let listed: Vec<String> = summary.links().map(|(_, target)| format!("docs/{target}")).collect();
    let mut wrong: Vec<String> = pages()
        .into_iter()
        .filter(|page| !matches!(&**page, "README.md" | "docs/SUMMARY.md"))
        .filter(|page| listed.iter().filter(|name| *name == page).count() != 1)
        .collect();
    wrong.extend(listed.into_iter().filter(|name| !root().join(name).exists()));
    assert!(wrong.is_empty(), "not once in docs/SUMMARY.md, or not there: {wrong:?}");
}

/// A page that a message or a comment of the program names.
#[test]
fn pages_that_the_program_names_exist() {
    let mut wrong = Vec::new();
    for (file, text) in super::errors::sources() {
        for rest in text.split("docs/").skip(1) {
            let end =
                rest.find(|c: char| !c.is_ascii_alphanumeric() && !"-_/.".contains(c)).unwrap_or(rest.len());
            let name = rest[..end].trim_end_matches('.');
            if name.ends_with(".md") && !root().join("docs").join(name).exists() {
                wrong.push(format!("{}: docs/{name}", file.display()));
            }
        }
    }
    // The format's own page, in the repository of ggml.
    wrong.retain(|found| !found.ends_with("docs/gguf.md"));
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn headings_have_the_anchors_of_github() {
    for (heading, anchor) in [
        ("`[online.server]`", "onlineserver"),
        ("Coming from TRL, or from Mitchell's code", "coming-from-trl-or-from-mitchells-code"),
        ("On [one](a.md) page", "on-one-page"),
        ("`kind = \"json\"`", "kind--json"),
    ] {
        assert_eq!(slug(heading), anchor, "{heading}");
    }
}
