//! Keys of runs side by side.

use super::html::{escaped, table};
use super::{RunHistory, name_of};
use crate::run_folder::{Keys, compare, differences};

/// Returns the keys in which runs differ, and all keys.
pub(super) fn keys(runs: &[RunHistory]) -> Option<String> {
    let keys: Vec<&Keys> = runs.iter().map(|run| &run.keys).collect();
    let all = compare(&keys);
    if all.is_empty() {
        return None;
    }
    let names: Vec<String> = runs.iter().map(name_of).collect();
    let header: Vec<&str> = std::iter::once("key").chain(names.iter().map(String::as_str)).collect();
    let rows = |rows: Vec<(String, Vec<String>)>| -> Vec<Vec<String>> {
        rows.into_iter().map(|(name, values)| std::iter::once(name).chain(values).collect()).collect()
    };
    let different = differences(&keys);
    let mut html = String::new();
    if runs.len() > 1 {
        html += &match different.is_empty() {
            true => "<p>The runs differ in no key but their folders.</p>".to_owned(),
            false => table(&header, &rows(different)),
        };
    }
    let title = format!("all {} keys", all.len());
    html += &format!(
        "<details data-key=\"keys\"><summary>{}</summary>{}</details>",
        escaped(&title),
        table(&header, &rows(all))
    );
    Some(html)
}
