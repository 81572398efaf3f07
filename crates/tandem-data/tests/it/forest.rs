//! Forests contain exactly the sequences and predictions of the rows, however much responses share.

use proptest::prelude::*;
use tandem_data::forest::{ForestBuilder, PairTokens, RowCounts, ScoredTokens};
use tandem_data::order::{MicroBatchSize, cut};
use tandem_kernels::Forest;

/// A sequence and its scored positions.
type Sequence = (Vec<u32>, Vec<usize>);

/// Random ids from a small alphabet, so that rows share prefixes often.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn ids(&mut self, longest: u64) -> Vec<u32> {
        (0..self.below(longest + 1)).map(|_| self.below(2) as u32).collect()
    }
}

/// Checks a forest as its constructor does.
fn holds_its_invariants(forest: &Forest) {
    let Forest { tokens, segments, predictions, num_sequences, lengths, .. } = forest.clone();
    let rebuilt =
        Forest::new(tokens, segments, predictions, num_sequences).and_then(|f| f.with_lengths(lengths));
    assert_eq!(rebuilt.expect("the invariants hold"), *forest);
}

/// Returns the tokens on the path to a row, its own included.
fn text_up_to(forest: &Forest, row: u32) -> Vec<u32> {
    let segment = forest.segments.iter().position(|s| s.range.contains(&row)).unwrap();
    let mut path: Vec<_> = forest.ancestors(segment).map(|s| s.range.clone()).collect();
    path.reverse();
    path.push(forest.segments[segment].range.start..row + 1);
    path.into_iter().flatten().map(|r| forest.tokens[r as usize]).collect()
}

/// Reads the sequences back: the tokens on the path to each prediction's row, then its target.
fn check(forest: &Forest, expected: &[Sequence]) {
    holds_its_invariants(forest);
    assert_eq!(forest.num_sequences as usize, expected.len());
    let mut found: Vec<Vec<usize>> = vec![Vec::new(); expected.len()];
    for prediction in &forest.predictions {
        let row = prediction.hidden_row;
        let mut tokens = text_up_to(forest, row);
        assert_eq!(forest.positions[row as usize] as usize, tokens.len() - 1);
        tokens.push(prediction.target);
        let (sequence, _) = &expected[prediction.sequence as usize];
        assert_eq!(tokens, sequence[..tokens.len()], "context and target of {prediction:?}");
        found[prediction.sequence as usize].push(tokens.len() - 1);
    }
    for (found, (_, scored)) in found.iter().zip(expected) {
        assert_eq!(found, scored);
    }
}

/// Checks the counted sizes against the forest's.
fn check_counts(forest: &Forest, counts: RowCounts, expected: &[Sequence]) {
    let sequence_tokens = expected.iter().map(|(tokens, _)| tokens.len() as u64).sum();
    let (tokens, scored_rows) = (forest.num_tokens(), forest.scored_rows().0.len());
    let found = RowCounts { tokens, scored_rows, trees: forest.groups().len(), sequence_tokens };
    assert_eq!(counts, found, "{forest:?}");
}

fn answer_of(prompt: &[u32], answer: &[u32]) -> Sequence {
    let whole = [prompt, answer].concat();
    let scored = (prompt.len().max(1)..whole.len()).collect();
    (whole, scored)
}

#[test]
fn random_pairs_are_read_back_with_and_without_sharing() {
    let mut random = Random(1);
    let mut builders = [ForestBuilder::new(true), ForestBuilder::new(false)];
    let mut without_root = 0;
    for _ in 0..2000 {
        let mut expected = Vec::new();
        let mut counts = [RowCounts::default(); 2];
        for _ in 0..1 + random.below(4) {
            let (prompt, chosen, rejected) = (random.ids(4), random.ids(5), random.ids(5));
            // Truncation that keeps the end may cut one prompt more than the other.
            let mut unseen = [0, 0];
            unseen[random.below(2) as usize] = prompt.len().min((random.below(4) as usize).saturating_sub(1));
            let pair = PairTokens { prompt: &prompt, unseen, chosen: &chosen, rejected: &rejected };
            without_root += usize::from(pair.shared() == 0);
            let [first, second] = pair.prompts();
            expected.extend([answer_of(first, &chosen), answer_of(second, &rejected)]);
            for builder in &mut builders {
                builder.push_pair(&pair);
            }
            for (counts, share) in counts.iter_mut().zip([true, false]) {
                let answers = [chosen.len(), rejected.len()];
                let prompts = [first.len(), second.len()];
                let pair_counts = RowCounts::for_pair(prompts, answers, pair.shared(), share);
                assert_eq!(pair_counts.tokens, pair.num_tokens(share));
                *counts = [*counts, pair_counts].into_iter().sum();
            }
        }
        for (builder, counts) in builders.iter_mut().zip(counts) {
            assert_eq!(builder.num_tokens(), counts.tokens);
            if counts.tokens == 0 {
                assert!(builder.finish().is_err(), "a batch without tokens is refused");
                builder.clear();
            } else {
                let forest = builder.finish().unwrap();
                check(&forest, &expected);
                check_counts(&forest, counts, &expected);
            }
        }
    }
    assert!(without_root > 20, "pairs that share nothing were among them: {without_root}");
}

#[test]
fn sharing_reaches_into_the_answers_and_makes_no_empty_segment() {
    let segments = |chosen: &[u32], rejected: &[u32]| {
        let mut builder = ForestBuilder::new(true);
        builder.push_pair(&PairTokens { prompt: &[1, 2], unseen: [0, 0], chosen, rejected });
        let forest = builder.finish().unwrap();
        let shape: Vec<_> = forest.segments.iter().map(|s| (s.range.len(), s.parent)).collect();
        (shape, forest.predictions.len())
    };
    assert_eq!(segments(&[3, 4], &[3, 5, 6]), (vec![(3, None), (1, Some(0)), (2, Some(0))], 5));
    assert_eq!(segments(&[3, 4], &[3, 4]), (vec![(4, None)], 4), "identical answers");
    assert_eq!(segments(&[3], &[3, 4]), (vec![(3, None), (1, Some(0))], 3), "one begins the other");
    assert_eq!(segments(&[], &[3]), (vec![(2, None), (1, Some(0))], 1), "an empty answer");
}

/// Rotary embeddings may depend on these lengths: of a pair its own alone, and of generated responses the limit.
#[test]
fn texts_of_a_row_have_one_length_whatever_they_share() {
    let lengths = |builder: &mut ForestBuilder| builder.finish().unwrap().lengths;
    for share_prefix in [true, false] {
        let mut builder = ForestBuilder::new(share_prefix);
        let (chosen, rejected) = (&[3, 4, 5][..], &[9][..]);
        let copies = if share_prefix { 6 } else { 8 };
        builder.push_pair(&PairTokens { prompt: &[1, 2], unseen: [0, 0], chosen, rejected });
        builder.push_ends(&[1, 2], &[chosen, rejected], None);
        builder.push_scored(&ScoredTokens { tokens: &[1, 2, 3], scored: &[0, 1, 1] });
        // A prompt that truncation cut in one sequence alone: two trees.
        builder.push_pair(&PairTokens { prompt: &[1, 2], unseen: [0, 1], chosen, rejected });
        let expected = [vec![5; 2 * copies], vec![3; 3], vec![5; 7]].concat();
        assert_eq!(lengths(&mut builder), expected, "share_prefix = {share_prefix}");
        builder.push_answers(&[1, 2], &[chosen, rejected], 9);
        builder.push_answers(&[1, 2], &[chosen, rejected], 0);
        let expected = [vec![11; copies], vec![5; copies]].concat();
        assert_eq!(lengths(&mut builder), expected, "share_prefix = {share_prefix}");
    }
}

#[test]
fn random_supervised_rows_are_read_back() {
    let mut random = Random(2);
    let mut builder = ForestBuilder::default();
    for _ in 0..300 {
        let (mut expected, mut counts) = (Vec::new(), RowCounts::default());
        for _ in 0..1 + random.below(4) {
            let tokens: Vec<u32> = (0..1 + random.below(9)).map(|_| random.below(5) as u32).collect();
            let scored: Vec<u8> = tokens.iter().map(|_| random.below(2) as u8).collect();
            let row = ScoredTokens { tokens: &tokens, scored: &scored };
            builder.push_scored(&row);
            counts = [counts, row.counts()].into_iter().sum();
            let positions = (1..tokens.len()).filter(|&t| scored[t] == 1).collect();
            expected.push((tokens, positions));
        }
        let forest = builder.finish().unwrap();
        check(&forest, &expected);
        check_counts(&forest, counts, &expected);
    }
}

#[test]
fn a_recycled_forest_keeps_its_memory() {
    let row = |n: u32| (0..n).collect::<Vec<_>>();
    let mut builder = ForestBuilder::default();
    let mut forest = Forest::default();
    let mut round = |length: u32| {
        let (prompt, chosen) = (row(length), row(7));
        builder.push_pair(&PairTokens { prompt: &prompt, unseen: [0, 0], chosen: &chosen, rejected: &[9] });
        builder.finish_into(&mut forest).unwrap();
        (forest.tokens.as_ptr(), forest.positions.as_ptr(), forest.predictions.as_ptr())
    };
    // Builder and forest swap their buffers, so each is seen every second time.
    let first = [round(100), round(100)];
    for _ in 0..3 {
        assert_eq!([round(60), round(99)], first);
    }
}

/// A prompt with two responses, and the index of each text's end.
type Ends = (&'static [u32], [&'static [u32]; 2], [usize; 2]);

/// Token 0 is padding; the positions are those at which `transformers` pools.
#[test]
fn a_sequence_ends_before_its_padding() {
    let cases: [Ends; 6] = [
        (&[5, 6], [&[7, 8], &[7, 9, 9]], [3, 4]),
        // The rejected response is a prefix of the chosen one.
        (&[5, 6], [&[7, 8], &[7]], [3, 2]),
        // Trailing padding, in the response and up to the prompt.
        (&[5, 6], [&[7, 0], &[8, 0, 0]], [2, 2]),
        (&[5, 0], [&[0, 0], &[7, 0, 1]], [0, 4]),
        (&[], [&[0, 0], &[7]], [0, 0]),
        (&[5, 6], [&[7], &[7]], [2, 2]),
    ];
    for share_prefix in [true, false] {
        let mut builder = ForestBuilder::new(share_prefix);
        cases.iter().for_each(|(prompt, answers, _)| builder.push_ends(prompt, answers, Some(0)));
        let forest = builder.finish().unwrap();
        holds_its_invariants(&forest);
        let mut ends = vec![None; forest.num_sequences as usize];
        for prediction in &forest.predictions {
            let tokens = text_up_to(&forest, prediction.hidden_row);
            assert!(ends[prediction.sequence as usize].replace(tokens).is_none(), "one end each");
        }
        let expected = cases.iter().flat_map(|(prompt, answers, ends)| {
            answers.iter().zip(ends).map(|(answer, &end)| Some([prompt, *answer].concat()[..=end].to_vec()))
        });
        assert_eq!(ends, expected.collect::<Vec<_>>(), "share_prefix = {share_prefix}");
    }
}

#[test]
fn answers_to_a_prompt_are_segments_of_their_own() {
    let cases: [(&[u32], &[&[u32]]); 3] =
        [(&[5, 6], &[&[7, 8], &[7, 8, 9], &[4]]), (&[3], &[&[7], &[7]]), (&[1, 2, 3], &[&[4, 5, 6, 7]])];
    for share_prefix in [true, false] {
        let mut builder = ForestBuilder::new(share_prefix);
        cases.iter().for_each(|(prompt, answers)| builder.push_answers(prompt, answers, 0));
        let forest = builder.finish().unwrap();
        holds_its_invariants(&forest);
        // Every response token is predicted once, from all tokens before it.
        let mut texts = vec![Vec::new(); forest.num_sequences as usize];
        for prediction in &forest.predictions {
            let before = text_up_to(&forest, prediction.hidden_row);
            texts[prediction.sequence as usize].push([before, vec![prediction.target]].concat());
        }
        let all =
            cases.iter().flat_map(|(prompt, answers)| answers.iter().map(move |answer| (prompt, answer)));
        for ((prompt, answer), found) in all.zip(&texts) {
            let whole = [*prompt, *answer].concat();
            let expected: Vec<_> =
                (prompt.len() + 1..=whole.len()).map(|end| whole[..end].to_vec()).collect();
            assert_eq!(*found, expected, "share_prefix = {share_prefix}");
        }
        let lengths = |answers: &[&[u32]]| answers.iter().map(|answer| answer.len()).collect::<Vec<_>>();
        let counts: RowCounts = cases
            .iter()
            .map(|(prompt, answers)| RowCounts::for_answers(prompt.len(), &lengths(answers), share_prefix))
            .sum();
        let found = (forest.num_tokens(), forest.scored_rows().0.len(), forest.groups().len());
        assert_eq!((counts.tokens, counts.scored_rows, counts.trees), found);
    }
}

/// Tokens that others wrote within an answer are a part of the text, and nothing predicts them.
#[test]
fn only_the_turns_of_an_answer_are_predicted() {
    let (prompt, answers): (&[u32], [&[u32]; 3]) =
        (&[5, 6], [&[7, 8, 9, 10, 11, 12], &[20, 21, 22], &[30, 31, 32, 33]]);
    let turns: [&[[u32; 2]]; 3] = [&[[0, 2], [4, 6]], &[], &[[0, 1], [3, 4]]];
    let expected = [vec![7, 8, 11, 12], vec![20, 21, 22], vec![30, 33]];
    for share_prefix in [true, false] {
        let mut builder = ForestBuilder::new(share_prefix);
        builder.push_answers(&[1], &[&[2, 3]], 0);
        builder.push_conversations(prompt, &answers, &turns, 0);
        builder.push_answers(&[1], &[&[4]], 0);
        let forest = builder.finish().unwrap();
        holds_its_invariants(&forest);
        let mut targets = vec![Vec::new(); forest.num_sequences as usize];
        for prediction in &forest.predictions {
            let before = text_up_to(&forest, prediction.hidden_row);
            let found = &mut targets[prediction.sequence as usize];
            if let Some(answer) = (prediction.sequence as usize).checked_sub(1).and_then(|i| answers.get(i)) {
                let whole = [prompt, answer].concat();
                assert_eq!(whole[..before.len()], before, "share_prefix = {share_prefix}");
                assert_eq!(whole[before.len()], prediction.target);
            }
            found.push(prediction.target);
        }
        let all = [vec![vec![2, 3]], expected.to_vec(), vec![vec![4]]].concat();
        assert_eq!(targets, all, "share_prefix = {share_prefix}");
    }
}

/// Their sequences follow those of all completions, and their rows come first in their trees.
#[test]
fn scored_prompts_are_sequences_of_their_own() {
    for share in [true, false] {
        let mut builder = ForestBuilder::new(share);
        builder.push_pair_and_prompt(&PairTokens {
            prompt: &[1, 2, 3],
            unseen: [0, 0],
            chosen: &[4, 5],
            rejected: &[6],
        });
        builder.push_pair_and_prompt(&PairTokens {
            prompt: &[7],
            unseen: [0, 0],
            chosen: &[8],
            rejected: &[8, 9],
        });
        let forest = builder.finish().unwrap();
        assert_eq!(forest.num_sequences, 6);
        let of = |sequence: u32| -> Vec<u32> {
            forest.predictions.iter().filter(|p| p.sequence == sequence).map(|p| p.target).collect()
        };
        let expected: [&[u32]; 6] = [&[4, 5], &[6], &[8], &[8, 9], &[2, 3], &[]];
        assert_eq!([0, 1, 2, 3, 4, 5].map(of), expected.map(<[u32]>::to_vec));
        assert!(forest.predictions.is_sorted_by_key(|p| p.hidden_row));
        for prediction in forest.predictions.iter().filter(|p| p.sequence >= 4) {
            assert_eq!(forest.tokens[prediction.hidden_row as usize + 1], prediction.target);
        }
        // The builder is empty again.
        builder.push_pair(&PairTokens { prompt: &[1], unseen: [0, 0], chosen: &[2], rejected: &[3] });
        assert_eq!(builder.finish().unwrap().num_sequences, 2);
    }
}

/// A prompt, what its responses do not see of it, and the responses.
type AnyPair = (Vec<u32>, [usize; 2], [Vec<u32>; 2]);

/// Rows of a batch: prompt, tokens that truncation hid of one prompt, chosen and rejected.
fn any_pairs() -> impl Strategy<Value = Vec<AnyPair>> {
    // Two tokens, so that texts begin alike often.
    let ids = |longest| prop::collection::vec(0..2_u32, 0..=longest);
    let pair =
        (ids(5), 0..2_usize, 0..5_usize, [ids(6), ids(6)]).prop_map(|(prompt, side, hidden, answers)| {
            let mut unseen = [0, 0];
            unseen[side] = prompt.len().min(hidden.saturating_sub(2));
            (prompt, unseen, answers)
        });
    prop::collection::vec(pair, 1..6)
}

/// Tokens of rows, and a limit.
fn any_batch() -> impl Strategy<Value = (Vec<usize>, MicroBatchSize)> {
    let limit = prop_oneof![
        (1..40_usize).prop_map(MicroBatchSize::Tokens),
        (1..9_usize).prop_map(MicroBatchSize::Rows),
    ];
    (prop::collection::vec(0..50_usize, 0..40), limit)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_pairs_are_read_back_with_and_without_sharing(pairs in any_pairs(), share in any::<bool>()) {
        let mut builder = ForestBuilder::new(share);
        let (mut expected, mut counts) = (Vec::new(), RowCounts::default());
        for (prompt, unseen, [chosen, rejected]) in &pairs {
            let pair = PairTokens { prompt, unseen: *unseen, chosen, rejected };
            builder.push_pair(&pair);
            let [first, second] = pair.prompts();
            expected.extend([answer_of(first, chosen), answer_of(second, rejected)]);
            let answers = [chosen.len(), rejected.len()];
            let pair = RowCounts::for_pair([first.len(), second.len()], answers, pair.shared(), share);
            counts = [counts, pair].into_iter().sum();
        }
        prop_assume!(counts.tokens > 0);
        let forest = builder.finish().unwrap();
        check(&forest, &expected);
        check_counts(&forest, counts, &expected);
        let separate: usize = expected.iter().map(|(tokens, _)| tokens.len()).sum();
        let is_right = forest.num_tokens() == separate || share && forest.num_tokens() < separate;
        prop_assert!(is_right, "{} tokens of {}", forest.num_tokens(), separate);
    }

    /// Every row is in one micro-batch, in order; none is over its limit with more than one row, and none
    /// could have taken the row after it.
    #[test]
    fn any_cut_covers_the_rows_and_is_greedy((tokens, budget) in any_batch()) {
        let cuts = cut(&tokens, budget);
        let rows: Vec<usize> = cuts.iter().cloned().flatten().collect();
        prop_assert_eq!(rows, (0..tokens.len()).collect::<Vec<_>>());
        let (limit, cost): (usize, fn(usize) -> usize) = match budget {
            MicroBatchSize::Tokens(limit) => (limit, |tokens| tokens),
            MicroBatchSize::Rows(limit) => (limit, |_| 1),
        };
        for range in &cuts {
            let used: usize = tokens[range.clone()].iter().map(|&tokens| cost(tokens)).sum();
            prop_assert!(used <= limit || range.len() == 1, "{:?} has {} of {}", range, used, limit);
            if let Some(&next) = tokens.get(range.end) {
                prop_assert!(used + cost(next) > limit, "{:?} could take another row", range);
            }
        }
    }
}
