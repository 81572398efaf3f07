//! Words of a shell.

/// Quotes a word, if a shell would read it otherwise.
pub(crate) fn quote(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_a_shell_as_they_are() {
        assert_eq!(quote("it's $HOME"), r"'it'\''s $HOME'");
        assert_eq!([quote("runs/a-1.toml"), quote("")], ["runs/a-1.toml", "''"]);
    }
}
