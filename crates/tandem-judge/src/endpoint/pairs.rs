//! Pairs of responses: prompts for comparing them, and the scores that follow.

use serde_json::{Value, json};

use super::EndpointConfig;
use super::cache::Reply;
use super::choice::Choice;
use crate::{PromptWithCompletions, Verdict};

/// Two responses of a group.
#[derive(Debug)]
pub(super) struct Pair {
    group: usize,
    answers: [usize; 2],
    /// Outcome of the comparison.
    pub said: PairVerdict,
}

/// Outcome of comparing a pair.
#[derive(Debug, PartialEq)]
pub(super) enum PairVerdict {
    /// Both are the same text; nothing was asked.
    Same,
    /// Choice of each order's reply, of A and B in that order.
    Chosen([Choice; 2]),
    /// An order without a reply.
    Failed(String),
}

pub(super) fn all_pairs(groups: &[PromptWithCompletions<'_>]) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for (group, answers) in groups.iter().map(|group| group.answers.len()).enumerate() {
        for first in 0..answers {
            for second in first + 1..answers {
                pairs.push(Pair { group, answers: [first, second], said: PairVerdict::Same });
            }
        }
    }
    pairs
}

impl Pair {
    /// Returns whether both are the same text.
    pub(super) fn is_same(&self, groups: &[PromptWithCompletions<'_>]) -> bool {
        let [first, second] = self.answers.map(|answer| groups[self.group].answers[answer].text);
        first == second
    }

    /// Returns the requests of both orders.
    pub(super) fn bodies(
        &self,
        groups: &[PromptWithCompletions<'_>],
        config: &EndpointConfig,
    ) -> [String; 2] {
        let [first, second] = self.answers.map(|answer| groups[self.group].answers[answer].text);
        let prompt = groups[self.group].prompt.to_text();
        [[first, second], [second, first]].map(|[a, b]| {
            let content = render(&config.prompt, &[("{prompt}", &prompt), ("{a}", a), ("{b}", b)]);
            json!({
                "model": config.model,
                "messages": [{ "role": "user", "content": content }],
                "temperature": 0,
                "max_tokens": config.max_tokens,
            })
            .to_string()
        })
    }
}

/// Fills a template's placeholders; placeholders inside the texts stay.
fn render(template: &str, places: &[(&str, &str)]) -> String {
    let mut rendered = String::new();
    let mut rest = template;
    while let Some(at) = rest.find('{') {
        rendered.push_str(&rest[..at]);
        rest = &rest[at..];
        let place = places.iter().find(|(place, _)| rest.starts_with(place));
        let (place, text) = place.copied().unwrap_or(("{", "{"));
        rendered.push_str(text);
        rest = &rest[place.len()..];
    }
    rendered + rest
}

impl PairVerdict {
    pub(super) fn from_replies(both: &[Result<Reply, String>; 2]) -> Self {
        match both {
            [Ok(forward), Ok(backward)] => Self::Chosen([forward.choice, backward.choice]),
            [Err(reason), _] | [_, Err(reason)] => Self::Failed(reason.clone()),
        }
    }

    /// Returns why there is no outcome.
    pub(super) fn failure(&self) -> Option<&str> {
        match self {
            Self::Failed(reason) => Some(reason),
            Self::Same | Self::Chosen(_) => None,
        }
    }

    /// Returns the first response's share of the win: 1 if both orders prefer it, a half for a tie
    /// or a disagreement.
    fn share(&self) -> Option<f64> {
        match self {
            Self::Failed(_) => None,
            Self::Chosen([Choice::A, Choice::B]) => Some(1.0),
            Self::Chosen([Choice::B, Choice::A]) => Some(0.0),
            Self::Same | Self::Chosen(_) => Some(0.5),
        }
    }

    fn to_json(&self) -> Value {
        match self {
            Self::Same => "the same text".into(),
            Self::Chosen(choices) => choices.map(Choice::as_str).as_slice().into(),
            Self::Failed(reason) => json!({ "failed": reason }),
        }
    }
}

/// Returns each response's mean share against the other responses that it was compared with.
pub(super) fn verdicts(groups: &[PromptWithCompletions<'_>], pairs: &[Pair]) -> Vec<Vec<Verdict>> {
    let mut tallies: Vec<Vec<Tally>> =
        groups.iter().map(|group| vec![Tally::default(); group.answers.len()]).collect();
    for Pair { group, answers: [first, second], said } in pairs {
        let share = said.share();
        let others = share.map(|share| 1.0 - share);
        for (answer, other, share) in [(*first, *second, share), (*second, *first, others)] {
            let tally = &mut tallies[*group][answer];
            tally.shares.extend(share);
            tally.said.push(json!({ "other": other, "pair": [first, second], "said": said.to_json() }));
        }
    }
    tallies.into_iter().map(|group| group.into_iter().map(Tally::verdict).collect()).collect()
}

/// Comparisons of one response.
#[derive(Clone, Default)]
struct Tally {
    shares: Vec<f64>,
    said: Vec<Value>,
}

impl Tally {
    fn verdict(self) -> Verdict {
        let Self { shares, said } = self;
        let score = (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64);
        let said = match said.is_empty() {
            true => "there is no other answer to compare it with".into(),
            false => said.into(),
        };
        Verdict { score, said }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_inside_texts_are_left_alone() {
        let places = [("{prompt}", "p{a}"), ("{a}", "{b}"), ("{b}", "x")];
        assert_eq!(render("{prompt}|{a}|{b}|{c}{", &places), "p{a}|{b}|x|{c}{");
    }

    #[test]
    fn only_agreement_wins() {
        use Choice::{A, B, Tie};
        let share = |choices| PairVerdict::Chosen(choices).share();
        assert_eq!([[A, B], [B, A]].map(share), [Some(1.0), Some(0.0)]);
        for choices in [[A, A], [B, B], [A, Tie], [Tie, A], [B, Tie], [Tie, B], [Tie, Tie]] {
            assert_eq!(share(choices), Some(0.5), "{choices:?}");
        }
        assert_eq!(PairVerdict::Same.share(), Some(0.5));
        assert_eq!(PairVerdict::Failed(String::new()).share(), None);
    }
}
