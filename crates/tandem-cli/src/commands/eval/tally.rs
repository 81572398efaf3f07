//! Wins, losses, ties and their confidence interval.

/// Standard deviations on either side that hold 95 % of a normal distribution.
const Z: f64 = 1.959_963_984_540_054;

/// Result of a comparison, from the model's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Win,
    Loss,
    Tie,
    /// A side has no score.
    Unscored,
}

impl Outcome {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Win => "win",
            Self::Loss => "loss",
            Self::Tie => "tie",
            Self::Unscored => "unscored",
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Tally {
    pub wins: u64,
    pub losses: u64,
    pub ties: u64,
    pub unscored: u64,
    /// Sums of both sides' scores over scored comparisons.
    scores: [f64; 2],
}

impl Tally {
    pub(crate) fn add(&mut self, totals: [Option<f64>; 2]) -> Outcome {
        let [Some(ours), Some(theirs)] = totals else {
            self.unscored += 1;
            return Outcome::Unscored;
        };
        self.scores = [self.scores[0] + ours, self.scores[1] + theirs];
        let (count, outcome) = match ours.total_cmp(&theirs) {
            _ if ours == theirs => (&mut self.ties, Outcome::Tie),
            std::cmp::Ordering::Greater => (&mut self.wins, Outcome::Win),
            _ => (&mut self.losses, Outcome::Loss),
        };
        *count += 1;
        outcome
    }

    pub(crate) fn scored(&self) -> u64 {
        self.wins + self.losses + self.ties
    }

    /// Win rate, ties counted as half; NaN without scores.
    pub(crate) fn win_rate(&self) -> f64 {
        (self.wins as f64 + 0.5 * self.ties as f64) / self.scored() as f64
    }

    /// Both sides' mean scores.
    pub(crate) fn mean_scores(&self) -> [f64; 2] {
        self.scores.map(|sum| sum / self.scored() as f64)
    }

    /// Wilson's interval of the win rate at 95 %.
    pub(crate) fn interval(&self) -> [f64; 2] {
        wilson(self.win_rate(), self.scored() as f64)
    }
}

/// Wilson's score interval of `successes` in `n` trials: E. B. Wilson, "Probable inference, the law
/// of succession, and statistical inference", J. Am. Stat. Assoc. 22 (1927), 209–212.
fn wilson(share: f64, n: f64) -> [f64; 2] {
    let center = share + Z * Z / (2.0 * n);
    let spread = Z * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt();
    let whole = 1.0 + Z * Z / n;
    [(center - spread) / whole, (center + spread) / whole].map(|bound| bound.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R. G. Newcombe, "Two-sided confidence intervals for the single proportion", Stat. Med. 17
    /// (1998), 857–872, table I, method 3, in the four digits that are printed there.
    #[test]
    fn intervals_are_newcombes() {
        for (successes, n, expected) in [
            (81.0, 263.0, [0.2553, 0.3662]),
            (15.0, 148.0, [0.0624, 0.1605]),
            (0.0, 20.0, [0.0, 0.1611]),
            (1.0, 29.0, [0.0061, 0.1718]),
        ] {
            let found = wilson(successes / n, n);
            for (found, expected) in found.iter().zip(expected) {
                assert!(
                    (found - expected).abs() <= 0.5e-4 + 1e-9,
                    "{successes} of {n}: {found}, not {expected}"
                );
            }
        }
        let [low, high] = wilson(1.0, 20.0);
        assert!((1.0 - low - 0.1611).abs() < 1e-4 && high == 1.0, "as none of 20, mirrored: {low} {high}");
    }

    #[test]
    fn ties_are_halves_and_what_has_no_score_is_counted_apart() {
        let mut tally = Tally::default();
        let outcomes = [
            tally.add([Some(1.0), Some(0.5)]),
            tally.add([Some(-1.0), Some(3.5)]),
            tally.add([Some(0.0), Some(-0.0)]),
            tally.add([Some(2.0), None]),
            tally.add([None, None]),
        ];
        use Outcome::{Loss, Tie, Unscored, Win};
        assert_eq!(outcomes, [Win, Loss, Tie, Unscored, Unscored]);
        assert_eq!((tally.scored(), tally.unscored, tally.win_rate()), (3, 2, 0.5));
        assert_eq!(tally.mean_scores(), [0.0, 4.0 / 3.0]);
    }
}
