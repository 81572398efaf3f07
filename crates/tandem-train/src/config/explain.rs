//! Explanation of keys, for `tandem config`.

use std::path::Path;

use super::Config;
use super::error::{ConfigError, Place, Problem};
use super::foreign;
use super::judges::KINDS;
use super::keys::{KeyRow, Resume};
use super::page::{SECTIONS, judge_keys, keys_of_judge, list};
use super::reader::nearest;
use super::tree::Node;

/// Returns what the reference page says about a key or a table, as plain text.
///
/// A key is given whole (`train.batch_size`) or, if several tables have it, by its last part.
///
/// # Errors
/// For an unknown key, with its translation if another program has it, or the nearest known one.
pub fn explain(asked: &str) -> Result<String, Problem> {
    let keys = all_keys();
    let of_table: Vec<_> = keys
        .iter()
        .filter(|(full, _)| full.rsplit_once('.').is_some_and(|(table, _)| table == asked))
        .collect();
    if !of_table.is_empty() {
        return Ok(table(asked, &of_table));
    }
    let is_asked = |full: &str| full == asked || full.rsplit('.').next() == Some(asked);
    let mut found: Vec<_> = keys.iter().filter(|(full, _)| full == asked).collect();
    if found.is_empty() {
        found = keys.iter().filter(|(full, _)| is_asked(full)).collect();
    }
    if !found.is_empty() {
        let texts: Vec<_> = found.into_iter().map(|(full, row)| key(full, row)).collect();
        return Ok(texts.join("\n\n"));
    }
    Err(unknown(asked, keys))
}

/// Every key with its full name; keys of judges are `judges.KIND.KEY`.
fn all_keys() -> Vec<(String, KeyRow)> {
    let full = |table: &str, row: KeyRow| match table {
        "" => (row.name.to_owned(), row),
        table => (format!("{table}.{}", row.name), row),
    };
    let tables = list(|keys| Config::visit(None, keys).map(drop));
    let mut keys: Vec<_> = super::resolved::sorted(tables)
        .into_iter()
        .flat_map(|table| table.keys.into_iter().map(move |row| full(&table.name, row)))
        .collect();
    keys.extend(judge_keys().into_iter().map(|row| full("judges", row)));
    for kind in KINDS {
        keys.extend(keys_of_judge(kind).into_iter().map(|row| full(&format!("judges.{kind}"), row)));
    }
    keys
}

/// The mistake of a configuration with this key.
fn unknown(asked: &str, keys: Vec<(String, KeyRow)>) -> Problem {
    let mut tree = Node::parse("", Path::new("")).expect("an empty document");
    if let Err(error) = tree.set(&format!("{asked}=0")).and_then(|()| foreign::check(&tree)) {
        return error.problem;
    }
    let names: Vec<&'static str> = keys.iter().map(|(_, row)| row.name).collect();
    let (table, name) = asked.rsplit_once('.').unwrap_or(("", asked));
    let near = nearest(name, &names);
    let of_table = |(full, row): &(String, KeyRow)| {
        full.rsplit_once('.').is_some_and(|(of, _)| of == table).then_some(row.name)
    };
    let mut known: Vec<_> = keys.iter().filter_map(of_table).collect();
    if known.is_empty() {
        known = tables().collect();
    }
    let nearest = keys.into_iter().find(|(_, row)| Some(row.name) == near).map(|(full, _)| full);
    Problem::UnknownKey { key: asked.to_owned(), nearest, known }
}

/// Names of the tables.
fn tables() -> impl Iterator<Item = &'static str> {
    SECTIONS.iter().map(|(table, ..)| *table).filter(|table| !table.is_empty())
}

/// Returns the error for the first of a document's tables that no configuration has.
pub(super) fn unknown_table(tables_there: &[(String, Place)]) -> Option<ConfigError> {
    let known: Vec<_> = tables().chain(["judges"]).filter(|table| !table.contains('.')).collect();
    let (name, place) = tables_there.iter().find(|(name, _)| !known.contains(&name.as_str()))?;
    let nearest = nearest(name, &known).map(str::to_owned);
    let problem = Problem::UnknownKey { key: name.clone(), nearest, known };
    Some(ConfigError { place: place.clone(), problem })
}

fn table(name: &str, keys: &[&(String, KeyRow)]) -> String {
    let about = SECTIONS.iter().find(|(table, ..)| *table == name).map_or("", |(.., about)| *about);
    let width = keys.iter().map(|(_, row)| row.name.len()).max().unwrap_or(0);
    let mut lines = vec![format!("[{name}]")];
    if !about.is_empty() {
        lines.push(plain(&about.replace('\n', " ")));
    }
    for (_, row) in keys {
        lines.push(format!("  {:width$}  {}.", row.name, first_sentence(&row.doc)));
    }
    lines.join("\n")
}

/// Returns the first sentence of a documentation as plain text, without its full stop.
fn first_sentence(doc: &str) -> String {
    let text = plain(doc);
    let end = text.find(". ").unwrap_or(text.trim_end_matches('.').len());
    text[..end].to_owned()
}

fn key(full: &str, row: &KeyRow) -> String {
    let default = match &row.default {
        Some(default) => format!("default: {}", plain(default).replace('*', "")),
        None => "required".to_owned(),
    };
    let mut lines = vec![full.to_owned(), format!("  {}; {default}", plain(&row.kind)), String::new()];
    lines.extend(wrapped(&plain(&row.doc)));
    if !row.methods.is_empty() {
        let names: Vec<_> = row.methods.iter().map(ToString::to_string).collect();
        lines.push(format!("  Only for {}.", names.join(", ")));
    }
    lines.push(match row.resume {
        Resume::Free => "  It may change when a run is resumed.".to_owned(),
        Resume::Alters => {
            "  A resumed run with another value differs from one that never stopped.".to_owned()
        }
    });
    lines.join("\n")
}

/// Breaks a text into indented lines of at most 96 characters.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines = vec![" ".to_owned()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("at least one");
        if line.chars().count() + word.chars().count() + 1 > 96 {
            lines.push(format!("  {word}"));
        } else {
            line.push(' ');
            line.push_str(word);
        }
    }
    lines
}

/// Markdown as plain text: links keep their words, and their page in brackets if it is another.
fn plain(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find('[') {
        let link = rest[start..].find("](").and_then(|middle| {
            let end = rest[start + middle..].find(')')?;
            Some((
                &rest[start + 1..start + middle],
                &rest[start + middle + 2..start + middle + end],
                middle + end + 1,
            ))
        });
        match link {
            Some((words, page, length)) if !words.contains('[') => {
                out.push_str(&rest[..start]);
                out.push_str(words);
                let file = page.split('#').next().unwrap_or(page);
                if !file.is_empty() && !words.contains(file) {
                    out.push_str(&format!(" (docs/{file})"));
                }
                rest = &rest[start + length..];
            }
            _ => {
                out.push_str(&rest[..=start]);
                rest = &rest[start + 1..];
            }
        }
    }
    out.push_str(rest);
    out.replace('`', "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_explained_with_type_default_and_meaning() {
        let text = explain("train.batch_size").unwrap();
        assert!(text.starts_with("train.batch_size\n  integer, 1 to 16777216; required\n"), "{text}");
        assert!(text.contains("Pairs per optimiser step"), "{text}");
        assert_eq!(explain("batch_size").unwrap(), text);
        assert!(explain("adapter.rank").unwrap().contains("default: 16"));
        assert!(explain("train.steps").unwrap().contains("default: this or epochs"));
        assert!(explain("data.train").unwrap().contains("data/*.parquet"));
    }

    #[test]
    fn a_name_of_several_tables_is_explained_for_each() {
        let text = explain("alpha").unwrap();
        for full in ["adapter.alpha\n", "train.alpha\n", "online.alpha\n"] {
            assert!(text.contains(full), "{text}");
        }
    }

    #[test]
    fn a_table_lists_its_keys() {
        let text = explain("adapter").unwrap();
        assert!(text.starts_with("[adapter]\n") && text.contains("\n  rank "), "{text}");
        assert!(explain("judges.regex").unwrap().contains("pattern"));
    }

    #[test]
    fn an_unknown_key_has_its_translation_or_the_nearest() {
        let error = |key| explain(key).unwrap_err().to_string();
        assert!(error("lora_r").contains("it is `adapter.rank` here"), "{}", error("lora_r"));
        assert!(
            error("train.batchsize").contains("did you mean `train.batch_size`?"),
            "{}",
            error("train.batchsize")
        );
    }

    #[test]
    fn an_unknown_key_gets_the_keys_of_its_table() {
        let error = |key| explain(key).unwrap_err().to_string();
        assert!(
            error("data.zzz").starts_with("unknown key `data.zzz`; known here: train, "),
            "{}",
            error("data.zzz")
        );
        assert!(error("zzz.zzz").contains("known here: adapter, reference, data"), "{}", error("zzz.zzz"));
    }

    #[test]
    fn every_key_reads_as_plain_text() {
        for (full, row) in all_keys() {
            let text = key(&full, &row);
            assert!(!text.contains("](") && !text.contains('`'), "{text}");
        }
    }
}
