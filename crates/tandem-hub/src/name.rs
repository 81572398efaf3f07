//! Names of repositories, as users write them.

use std::fmt;
use std::path::Path;

/// Prefix of an explicit name.
const SCHEME: &str = "hf://";

/// Endings of files, which no bare name has.
const FILE_ENDINGS: [&str; 14] = [
    ".gguf",
    ".safetensors",
    ".pt",
    ".bin",
    ".json",
    ".jsonl",
    ".toml",
    ".parquet",
    ".csv",
    ".arrow",
    ".tsv",
    ".txt",
    ".gz",
    ".zst",
];

/// Name of a repository of the hub, or of a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubName {
    /// `owner/name`.
    pub(crate) repo: String,
    /// Branch, tag or commit.
    pub(crate) revision: String,
    /// Path after the repository: a split, a config and a split, or a file; may be empty.
    pub(crate) rest: String,
}

impl HubName {
    /// Returns whether the text has the prefix `hf://`.
    pub fn is_explicit(text: &str) -> bool {
        text.starts_with(SCHEME)
    }

    /// Reads `hf://owner/name[@revision][/rest]`. `hf://models/…` and `hf://datasets/…` are accepted
    /// too. A `/` in a revision is written `%2F`, except in `refs/pr/1` and `refs/convert/parquet`.
    ///
    /// # Errors
    /// The reason why this is no such name.
    pub fn explicit(text: &str) -> Result<Self, String> {
        let like = "expected hf://owner/name, then @revision and /split as needed";
        let body = text.strip_prefix(SCHEME).ok_or(like)?;
        let typed = ["models/", "datasets/"].iter().find_map(|kind| body.strip_prefix(kind));
        let body = typed.filter(|body| body.contains('/')).unwrap_or(body);
        let (owner, after) = body.split_once('/').ok_or(like)?;
        let end = after.find(['@', '/']).unwrap_or(after.len());
        let (name, after) = after.split_at(end);
        let (revision, rest) = match after.strip_prefix('@') {
            None => ("main".to_owned(), after),
            Some(after) => {
                let special = ["refs/pr/", "refs/convert/"].iter().find(|start| after.starts_with(*start));
                let from = special.map_or(0, |start| start.len());
                let end = after[from..].find('/').map_or(after.len(), |end| from + end);
                let (revision, rest) = after.split_at(end);
                (revision.replace("%2F", "/").replace("%2f", "/"), rest)
            }
        };
        let rest = rest.trim_matches('/');
        if !is_part(owner) || !is_part(name) {
            return Err(format!("{owner}/{name} is no name of the hub; {like}"));
        }
        check_path(&revision).map_err(|reason| format!("the revision {revision:?} {reason}"))?;
        if !rest.is_empty() {
            check_path(rest).map_err(|reason| format!("the path {rest:?} {reason}"))?;
        }
        Ok(Self { repo: format!("{owner}/{name}"), revision, rest: rest.to_owned() })
    }

    /// Reads `owner/name[@revision]`; `None` for any other text. Whether a path of that name exists
    /// is for the caller to check.
    pub fn bare(text: &str) -> Option<Self> {
        let (repo, _) = text.split_once('@').unwrap_or((text, ""));
        let is_file = FILE_ENDINGS.iter().any(|ending| text.ends_with(ending));
        if repo.matches('/').count() != 1 || is_file || text.ends_with('/') {
            return None;
        }
        Self::explicit(&format!("{SCHEME}{text}")).ok().filter(|name| name.rest.is_empty())
    }

    /// Reads a text as [`HubName::bare`], unless something has the path that it may also mean. What cannot be looked at,
    /// for want of a permission, may be there.
    pub fn in_place_of(path: &Path, text: &str) -> Option<Self> {
        Self::bare(text).filter(|_| path.try_exists().is_ok_and(|exists| !exists))
    }

    /// Returns owner and name.
    pub fn repository(&self) -> &str {
        &self.repo
    }

    /// Returns the path after the repository, empty if there is none.
    pub fn rest(&self) -> &str {
        &self.rest
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { repo, revision, rest } = self;
        write!(f, "{repo}@{revision}")?;
        if rest.is_empty() { Ok(()) } else { write!(f, "/{rest}") }
    }
}

/// Returns whether a text may be an owner's or a repository's name (`huggingface_hub`'s rules).
fn is_part(text: &str) -> bool {
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !text.is_empty()
        && text.len() <= 96
        && text.chars().all(legal)
        && !text.starts_with(['-', '.'])
        && !text.ends_with(['-', '.'])
        && !text.contains("--")
        && !text.contains("..")
        && !text.ends_with(".git")
}

/// Checks a relative path of the server or the user: it must stay within its folder on any system.
pub(crate) fn check_path(path: &str) -> Result<(), &'static str> {
    if path.contains('\\') || path.chars().any(char::is_control) {
        return Err("has a backslash or a control character");
    }
    let is_bad = |part: &str| part.is_empty() || part == "." || part == "..";
    match path.len() > 1024 || path.split('/').any(is_bad) {
        true => Err("is no relative path within the repository"),
        false => Ok(()),
    }
}

/// Returns whether a revision is a full commit hash.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit() && !byte.is_ascii_uppercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(text: &str) -> (String, String, String) {
        let HubName { repo, revision, rest } =
            HubName::explicit(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        (repo, revision, rest)
    }

    #[test]
    fn explicit_names_have_revision_and_rest() {
        let cases = [
            ("hf://a/b", "a/b", "main", ""),
            ("hf://a/b/train", "a/b", "main", "train"),
            ("hf://a/b@v1.0/de/train", "a/b", "v1.0", "de/train"),
            (
                "hf://datasets/a/b@refs/convert/parquet/default/train",
                "a/b",
                "refs/convert/parquet",
                "default/train",
            ),
            ("hf://a/b@refs%2Fpr%2F3/train", "a/b", "refs/pr/3", "train"),
            ("hf://a/b@feature%2Fx", "a/b", "feature/x", ""),
            ("hf://models/a/b", "a/b", "main", ""),
        ];
        for (text, repo, revision, rest) in cases {
            assert_eq!(parts(text), (repo.to_owned(), revision.to_owned(), rest.to_owned()), "{text}");
        }
    }

    #[test]
    fn names_that_leave_the_cache_are_refused() {
        for text in
            ["hf://a", "hf://../b", "hf://a/..", "hf://a/b@../x", "hf://a/b@", "hf://a/b/../c", "hf://a--b/c"]
        {
            assert!(HubName::explicit(text).is_err(), "{text}");
        }
    }

    #[test]
    fn bare_names_are_owner_and_name() {
        assert_eq!(
            HubName::bare("Qwen/Qwen2.5-0.5B-Instruct").expect("a name").repo,
            "Qwen/Qwen2.5-0.5B-Instruct"
        );
        assert_eq!(HubName::bare("a/b@refs/pr/1").expect("a name").revision, "refs/pr/1");
        for text in
            ["gpt2", "./a/b", "../b", "/a/b", "~/b", "a/b/c", "a/b/", "a/m.gguf", "a\\b/c", "a b/c", ""]
        {
            assert_eq!(HubName::bare(text), None, "{text}");
        }
    }
}
