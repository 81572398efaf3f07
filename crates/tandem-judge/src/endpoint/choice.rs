//! Choice between two responses.

/// A model's choice between two responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// The first response.
    A,
    /// The second response.
    B,
    /// Neither response.
    Tie,
}

impl Choice {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::A => "A",
            Self::B => "B",
            Self::Tie => "tie",
        }
    }

    /// Parses exactly the forms of [`as_str`](Self::as_str).
    pub(super) fn parse(text: &str) -> Option<Self> {
        [Self::A, Self::B, Self::Tie].into_iter().find(|choice| choice.as_str() == text)
    }

    /// Reads the last non-blank line of a reply. It must name exactly one choice: `A is better than
    /// B` is not understood, because word order is no reliable sign.
    pub(super) fn from_reply(reply: &str) -> Option<Self> {
        let line = reply.lines().rev().find(|line| !line.trim().is_empty())?;
        let words = || line.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
        // A lower-case `a` is an article, unless it stands alone.
        let is_alone = words().count() == 1;
        let mut found = words().filter_map(|word| match word {
            "a" if is_alone => Some(Self::A),
            "b" if is_alone => Some(Self::B),
            _ if word.eq_ignore_ascii_case("tie") => Some(Self::Tie),
            _ => Self::parse(word),
        });
        let first = found.next()?;
        found.all(|other| other == first).then_some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::Choice;

    #[test]
    fn one_choice_in_the_last_line_is_understood() {
        let cases = [
            ("A", Some(Choice::A)),
            ("b.", Some(Choice::B)),
            ("**B**", Some(Choice::B)),
            ("Tie", Some(Choice::Tie)),
            ("[[A]]\n\n", Some(Choice::A)),
            ("A says more, B is right.\nVerdict: B", Some(Choice::B)),
            ("The better answer is A. So: A", Some(Choice::A)),
            ("A is better than B", None),
            ("A tie", None),
            ("a good question", None),
            ("Both are fine.", None),
            ("", None),
            ("Verdict: B\nI hope this helps.", None),
        ];
        for (reply, expected) in cases {
            assert_eq!(Choice::from_reply(reply), expected, "{reply:?}");
        }
    }
}
