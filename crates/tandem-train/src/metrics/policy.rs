//! Metrics of policy gradients: their sums as numbers, and as means.

use super::record::Record;
use crate::objective::{CorrectionStats, PolicyLoss, PolicyStats};

impl PolicyStats {
    /// Numbers in [`PolicyStats::to_numbers`].
    pub(super) const WIDTH: usize = 21;

    /// The sums as plain numbers.
    pub(super) fn to_numbers(self) -> [f64; Self::WIDTH] {
        let place = |loss| PolicyLoss::NAMES.iter().position(|(_, other)| *other == loss);
        let loss = self.loss.and_then(place).map_or(0, |place| place + 1);
        let Self {
            answers,
            tokens,
            ratios,
            kl,
            clipped,
            clipped_range,
            phi,
            known,
            difference,
            ratio,
            correction,
            ..
        } = self;
        [
            answers[0],
            answers[1],
            tokens,
            ratios,
            kl,
            clipped[0],
            clipped[1],
            clipped_range[0],
            clipped_range[1],
            phi,
            difference[0],
            difference[1],
            ratio,
            self.entropy,
            loss as f64,
            f64::from(u8::from(self.has_reference)),
            correction.count,
            correction.sum,
            correction.range[0],
            correction.range[1],
            known,
        ]
    }

    /// The opposite of [`PolicyStats::to_numbers`].
    pub(super) fn from_numbers(n: &[f64; Self::WIDTH]) -> Self {
        Self {
            answers: [n[0], n[1]],
            tokens: n[2],
            ratios: n[3],
            kl: n[4],
            clipped: [n[5], n[6]],
            clipped_range: [n[7], n[8]],
            phi: n[9],
            difference: [n[10], n[11]],
            ratio: n[12],
            entropy: n[13],
            loss: (n[14] as usize).checked_sub(1).map(|place| PolicyLoss::NAMES[place].1),
            has_reference: n[15] != 0.0,
            correction: CorrectionStats { count: n[16], sum: n[17], range: [n[18], n[19]] },
            known: n[20],
        }
    }

    /// Adds another's sums.
    pub(super) fn merge(&mut self, other: &Self) {
        let (mine, theirs) = (self, other);
        mine.clipped_range = match (mine.answers[1] > 0.0, theirs.answers[1] > 0.0) {
            (true, true) => {
                let ([a, b], [c, d]) = (mine.clipped_range, theirs.clipped_range);
                [a.min(c), b.max(d)]
            }
            (false, true) => theirs.clipped_range,
            _ => mine.clipped_range,
        };
        mine.difference =
            [mine.difference[0] + theirs.difference[0], mine.difference[1].max(theirs.difference[1])];
        for side in 0..2 {
            mine.answers[side] += theirs.answers[side];
            mine.clipped[side] += theirs.clipped[side];
        }
        mine.tokens += theirs.tokens;
        mine.ratios += theirs.ratios;
        mine.kl += theirs.kl;
        mine.phi += theirs.phi;
        mine.known += theirs.known;
        mine.ratio += theirs.ratio;
        mine.entropy += theirs.entropy;
        mine.loss = mine.loss.or(theirs.loss);
        mine.has_reference |= theirs.has_reference;
        mine.correction.merge(&theirs.correction);
    }

    /// Writes the means into a record under TRL's names.
    pub(super) fn report(&self, record: &mut Record) {
        let (Some(loss), stats) = (self.loss, self) else { return };
        // TRL, too, divides by 1 where there is nothing.
        let of_tokens = |sum: f64| sum / stats.tokens.max(1.0);
        let of_ratios = |sum: f64| sum / stats.ratios.max(1.0);
        record.set("entropy", of_tokens(self.entropy));
        if self.has_reference {
            record.set("kl", of_tokens(stats.kl));
        }
        let [low, high] = stats.clipped;
        match loss {
            PolicyLoss::Cispo => record.set("cispo_clip_ratio", of_ratios(high)),
            PolicyLoss::Vespo => record.set("vespo/phi_seq_mean", stats.phi / stats.answers[0].max(1.0)),
            PolicyLoss::Sapo => {}
            _ => {
                record.set("clip_ratio/low_mean", of_ratios(low));
                record.set("clip_ratio/low_min", stats.clipped_range[0]);
                record.set("clip_ratio/high_mean", of_ratios(high));
                record.set("clip_ratio/high_max", stats.clipped_range[1]);
                record.set("clip_ratio/region_mean", of_ratios(low + high));
            }
        }
        // Nothing is said of tokens that a server gave no log-probability for.
        if stats.known > 0.0 || stats.tokens == 0.0 {
            let ratio = if stats.known > 0.0 { stats.ratio / stats.known } else { 1.0 };
            record.set("sampling/ratio", ratio);
            record.set("sampling/sampling_logp_difference/mean", stats.difference[0] / stats.known.max(1.0));
            record.set("sampling/sampling_logp_difference/max", stats.difference[1]);
        }
        let CorrectionStats { count, sum, range: [least, most] } = stats.correction;
        if count > 0.0 {
            record.set("sampling/importance_sampling_ratio/min", least);
            record.set("sampling/importance_sampling_ratio/mean", sum / count);
            record.set("sampling/importance_sampling_ratio/max", most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Split;

    fn sums(clipped: f64, difference: f64) -> PolicyStats {
        PolicyStats {
            loss: Some(PolicyLoss::Dapo),
            has_reference: true,
            entropy: 3.0,
            answers: [2.0, 2.0],
            tokens: 4.0,
            ratios: 4.0,
            kl: 0.5,
            clipped: [clipped, 1.0],
            clipped_range: [clipped / 4.0, 0.5],
            phi: 0.0,
            known: 4.0,
            difference: [difference; 2],
            ratio: 4.0 + difference,
            correction: CorrectionStats { count: 1.0, sum: difference, range: [difference; 2] },
        }
    }

    #[test]
    fn micro_batches_and_ranks_report_the_whole() {
        let mut whole = PolicyStats::default();
        for part in [sums(2.0, 0.25), PolicyStats::default(), sums(1.0, 0.5)] {
            whole.merge(&PolicyStats::from_numbers(&part.to_numbers()));
        }
        let mut record = Record::new(1, Split::Train);
        whole.report(&mut record);
        for (name, expected) in [
            ("entropy", 6.0 / 8.0),
            ("kl", 1.0 / 8.0),
            ("clip_ratio/low_mean", 3.0 / 8.0),
            ("clip_ratio/low_min", 0.25),
            ("clip_ratio/high_max", 0.5),
            ("clip_ratio/region_mean", 5.0 / 8.0),
            ("sampling/ratio", 8.75 / 8.0),
            ("sampling/sampling_logp_difference/max", 0.5),
            ("sampling/importance_sampling_ratio/min", 0.25),
            ("sampling/importance_sampling_ratio/mean", 0.375),
        ] {
            assert_eq!(record.get(name), Some(expected), "{name}");
        }
        let mut nothing = Record::new(1, Split::Train);
        PolicyStats::default().report(&mut nothing);
        assert_eq!(nothing.get("entropy"), None);
    }
}
