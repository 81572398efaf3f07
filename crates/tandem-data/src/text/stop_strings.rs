//! Stop strings: strings that end a text.

/// Search for the first stop string in a text that arrives in pieces.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    /// Text that may begin a stop string.
    held: String,
}

impl StopStrings {
    /// Creates a search; empty strings are ignored.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        Self { stops, held: String::new() }
    }

    /// Adds a piece. Returns text that precedes any stop string, and whether one was found; the
    /// text ends before it.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let may_begin = |at: &usize| {
            let rest = &self.held[*at..];
            self.stops.iter().any(|stop| stop.starts_with(rest))
        };
        let places = self.held.char_indices().map(|(at, _)| at);
        let kept = places.into_iter().find(may_begin).unwrap_or(self.held.len());
        let rest = self.held.split_off(kept);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// Ends the text and returns the rest.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut watch = StopStrings::new(stops.iter().map(|&stop| stop.to_owned()));
        let mut text = String::new();
        for piece in pieces {
            let (shown, ended) = watch.push(piece);
            text += &shown;
            if ended {
                return (text, true);
            }
        }
        (text + &watch.finish(), false)
    }

    #[test]
    fn a_stop_string_is_found_across_pieces() {
        assert_eq!(run(&["\n\n", "User:"], &["a\n", "b Us", "er", ": c"]), ("a\nb ".to_owned(), true));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), ("a".to_owned(), true));
        assert_eq!(run(&["é!"], &["caf", "é", "é", "!"]), ("café".to_owned(), true));
    }

    #[test]
    fn the_first_in_the_text_counts() {
        assert_eq!(run(&["c", "b"], &["abc"]), ("a".to_owned(), true));
    }

    #[test]
    fn what_was_held_back_comes_in_the_end() {
        assert_eq!(run(&["stop", ""], &["st", "st", "o"]), ("ststo".to_owned(), false));
        let mut watch = StopStrings::new(["stop".to_owned()]);
        assert_eq!(watch.push("a st"), ("a ".to_owned(), false));
        assert_eq!(watch.push("x"), ("stx".to_owned(), false));
    }
}
