//! A micro-batch: one flat token axis, cut into segments that form trees, and the tokens that the
//! head scores.

use std::ops::Range;

use crate::{KernelError, Result};

/// A run of consecutive tokens that continues its parent's text. A token sees its own segment up to
/// itself and every token of every ancestor segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Rows of the flat token axis.
    pub range: Range<u32>,
    /// Index of the segment that this one continues; parents precede children.
    pub parent: Option<u32>,
    /// Position of the first token (for RoPE and learned positions): the summed length of all
    /// ancestors.
    pub first_position: u32,
}

/// One token that the head must score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prediction {
    /// Row of the token axis whose hidden state predicts the target. Predictions may share a row:
    /// the last token of a shared prompt predicts the first token of both completions.
    pub hidden_row: u32,
    /// Token to predict.
    pub target: u32,
    /// Sequence whose log-probability sums this token.
    pub sequence: u32,
}

/// A micro-batch as a forest of token trees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forest {
    /// Token ids, tree after tree.
    pub tokens: Vec<u32>,
    /// Segments in the order of the token axis; they cover it without gaps, and none is empty.
    pub segments: Vec<Segment>,
    /// Tokens to score, sorted by `hidden_row`.
    pub predictions: Vec<Prediction>,
    /// Number of sequences that predictions refer to.
    pub num_sequences: u32,
    /// Position of each token, derived from the segments by [`Forest::new`].
    pub positions: Vec<u32>,
    /// Tokens of each token's text, on which some rotary embeddings depend: the longest path of its tree,
    /// unless the forest was [told otherwise](Forest::with_lengths).
    pub lengths: Vec<u32>,
}

impl Forest {
    /// Builds a forest and checks its invariants.
    ///
    /// # Errors
    /// If segments do not cover the tokens in order, one is empty, a parent does not precede its
    /// child, a first position is not the summed length of the ancestors, or predictions are
    /// unsorted or out of range.
    pub fn new(
        tokens: Vec<u32>,
        segments: Vec<Segment>,
        predictions: Vec<Prediction>,
        num_sequences: u32,
    ) -> Result<Self> {
        let invalid = |reason: String| KernelError::invalid("forest", reason);
        let mut next = 0;
        let mut positions = Vec::with_capacity(tokens.len());
        for (index, segment) in segments.iter().enumerate() {
            let Range { start, end } = segment.range;
            if start != next || end <= start {
                return Err(invalid(format!(
                    "segment {index} covers {start}..{end}; segments must be non-empty and the next token is {next}"
                )));
            }
            next = end;
            let expected = match segment.parent {
                None => 0,
                Some(p) if (p as usize) < index => {
                    let parent: &Segment = &segments[p as usize];
                    parent.first_position + (parent.range.end - parent.range.start)
                }
                Some(p) => {
                    return Err(invalid(format!(
                        "segment {index} has parent {p}, which does not precede it"
                    )));
                }
            };
            if segment.first_position != expected {
                return Err(invalid(format!(
                    "segment {index} starts at position {}, its ancestors hold {expected} tokens",
                    segment.first_position
                )));
            }
            positions.extend((0..end - start).map(|i| expected + i));
        }
        if next as usize != tokens.len() {
            return Err(invalid(format!("segments cover {next} of {} tokens", tokens.len())));
        }
        if !predictions.is_sorted_by_key(|p| p.hidden_row) {
            return Err(invalid("predictions are not sorted by hidden row".into()));
        }
        if let Some(p) = predictions.iter().find(|p| p.hidden_row >= next || p.sequence >= num_sequences) {
            return Err(invalid(format!(
                "prediction {p:?} points outside {next} tokens, {num_sequences} sequences"
            )));
        }
        let lengths = longest_paths(&segments);
        Ok(Self { tokens, segments, predictions, num_sequences, positions, lengths })
    }

    /// Sets the length of each token's text: of texts that belong together though they share no segment,
    /// or that are yet to grow.
    ///
    /// # Errors
    /// If there is not one length for each token, or a token's position is beyond its text.
    pub fn with_lengths(self, lengths: Vec<u32>) -> Result<Self> {
        let inside = |(length, position): (&u32, &u32)| position < length;
        if lengths.len() != self.tokens.len() || !lengths.iter().zip(&self.positions).all(inside) {
            let (found, tokens) = (lengths.len(), self.tokens.len());
            let reason =
                format!("{found} lengths for {tokens} tokens; expected one each, beyond its position");
            return Err(KernelError::invalid("forest", reason));
        }
        Ok(Self { lengths, ..self })
    }

    /// Creates one segment in which every token after the first is predicted.
    pub fn sequence(tokens: Vec<u32>) -> Result<Self> {
        let length = tokens.len() as u32;
        let predictions = (1..length)
            .map(|t| Prediction { hidden_row: t - 1, target: tokens[t as usize], sequence: 0 })
            .collect();
        Self::new(tokens, vec![Segment { range: 0..length, parent: None, first_position: 0 }], predictions, 1)
    }

    /// Returns the number of tokens.
    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the ancestors of a segment, nearest first.
    pub fn ancestors(&self, segment: usize) -> impl Iterator<Item = &Segment> {
        let mut next = self.segments[segment].parent;
        std::iter::from_fn(move || {
            let segment = &self.segments[next? as usize];
            next = segment.parent;
            Some(segment)
        })
    }

    /// Splits the segments into the smallest ranges that do not see each other: one tree each, if
    /// trees follow one another.
    pub fn groups(&self) -> Vec<Range<usize>> {
        let mut groups = Vec::new();
        // From the end: a segment starts a group if no later one, nor itself, has a parent before
        // it.
        let (mut end, mut reach) = (self.segments.len(), self.segments.len());
        for (index, segment) in self.segments.iter().enumerate().rev() {
            reach = reach.min(segment.parent.map_or(index, |p| p as usize));
            if reach == index {
                groups.push(index..end);
                end = index;
            }
        }
        groups.reverse();
        groups
    }

    /// Writes the row of each position in `positions` on the path from the root to the end of a
    /// segment.
    ///
    /// # Panics
    /// If the path has no such position or `rows` is shorter than the range.
    pub fn path_rows(&self, segment: usize, positions: Range<u32>, rows: &mut [u32]) {
        let mut end = positions.end;
        let mut on_path = Some(&self.segments[segment]);
        while end > positions.start {
            let segment = on_path.expect("the root starts at position 0");
            let first = segment.first_position;
            assert!(end <= first + segment.range.len() as u32, "position {end} is beyond the path");
            let start = first.max(positions.start);
            for position in start..end {
                rows[(position - positions.start) as usize] = segment.range.start + position - first;
            }
            end = end.min(start);
            on_path = segment.parent.map(|p| &self.segments[p as usize]);
        }
    }

    /// Returns the distinct rows that the head scores, ascending, and for each prediction its index
    /// among them.
    pub fn scored_rows(&self) -> (Vec<u32>, Vec<u32>) {
        let mut rows: Vec<u32> = Vec::with_capacity(self.predictions.len());
        let mut index = Vec::with_capacity(self.predictions.len());
        for p in &self.predictions {
            if rows.last() != Some(&p.hidden_row) {
                rows.push(p.hidden_row);
            }
            index.push(rows.len() as u32 - 1);
        }
        (rows, index)
    }
}

/// Returns for each token the number of tokens on the longest path of its tree.
fn longest_paths(segments: &[Segment]) -> Vec<u32> {
    let mut roots: Vec<usize> = Vec::with_capacity(segments.len());
    let mut longest = vec![0; segments.len()];
    for (index, Segment { range, parent, first_position }) in segments.iter().enumerate() {
        let root = parent.map_or(index, |parent| roots[parent as usize]);
        roots.push(root);
        longest[root] = longest[root].max(first_position + range.len() as u32);
    }
    let of_segment =
        |(segment, root): (&Segment, usize)| std::iter::repeat_n(longest[root], segment.range.len());
    segments.iter().zip(roots).flat_map(of_segment).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From `(length, parent)` per segment.
    fn forest(segments: &[(u32, Option<u32>)]) -> Result<Forest> {
        let mut built: Vec<Segment> = Vec::new();
        let mut start = 0;
        for &(length, parent) in segments {
            let first_position = parent
                .and_then(|p| built.get(p as usize))
                .map_or(0, |parent: &Segment| parent.first_position + parent.range.end - parent.range.start);
            built.push(Segment { range: start..start + length, parent, first_position });
            start += length;
        }
        Forest::new(vec![0; start as usize], built, vec![], 0)
    }

    #[test]
    fn positions_continue_the_parents() {
        let forest = forest(&[(3, None), (2, Some(0)), (1, Some(1)), (2, Some(0)), (2, None)]).unwrap();
        assert_eq!(forest.positions, [0, 1, 2, 3, 4, 5, 3, 4, 0, 1]);
        let ancestors: Vec<u32> = forest.ancestors(2).map(|s| s.range.start).collect();
        assert_eq!(ancestors, [3, 0]);
    }

    #[test]
    fn a_text_is_as_long_as_the_longest_path_of_its_tree() {
        let interleaved = forest(&[(1, None), (2, None), (2, Some(0)), (1, Some(2)), (3, Some(1))]).unwrap();
        assert_eq!(interleaved.lengths, [4, 5, 5, 4, 4, 4, 5, 5, 5]);
        let trees = forest(&[(3, None), (2, Some(0)), (4, Some(0)), (2, None)]).unwrap();
        assert_eq!(trees.lengths, [7, 7, 7, 7, 7, 7, 7, 7, 7, 2, 2]);
        let lengths = vec![7, 7, 7, 8, 8, 9, 9, 9, 9, 5, 5];
        assert_eq!(trees.clone().with_lengths(lengths.clone()).unwrap().lengths, lengths);
        let refusal = |lengths| trees.clone().with_lengths(lengths).unwrap_err().to_string();
        assert!(refusal(vec![9; 10]).contains("10 lengths for 11 tokens"));
        assert!(refusal(vec![6; 11]).contains("beyond its position"), "a text of 6 has no seventh token");
    }

    #[test]
    fn an_empty_segment_is_refused() {
        let error = forest(&[(3, None), (0, Some(0))]).unwrap_err().to_string();
        assert!(error.contains("segment 1 covers 3..3; segments must be non-empty"), "{error}");
    }

    #[test]
    fn a_parent_must_precede_its_child() {
        let error = forest(&[(3, None), (1, Some(1))]).unwrap_err().to_string();
        assert!(error.contains("segment 1 has parent 1, which does not precede it"), "{error}");
    }

    #[test]
    fn segments_must_cover_the_tokens() {
        let segment = |range: Range<u32>| Segment { range, parent: None, first_position: 0 };
        let build = |segments| Forest::new(vec![0; 5], segments, vec![], 0).map_err(|e| e.to_string());
        assert!(build(vec![segment(0..4)]).unwrap_err().contains("segments cover 4 of 5 tokens"));
        assert!(build(vec![segment(0..2), segment(3..5)]).unwrap_err().contains("the next token is 2"));
        let shifted = Segment { first_position: 1, ..segment(2..5) };
        let error = build(vec![segment(0..2), shifted]).unwrap_err();
        assert!(error.contains("segment 1 starts at position 1, its ancestors hold 0 tokens"), "{error}");
    }

    #[test]
    fn predictions_must_be_sorted_and_inside() {
        let segment = Segment { range: 0..3, parent: None, first_position: 0 };
        let build = |rows: &[u32], sequences| {
            let predictions =
                rows.iter().map(|&hidden_row| Prediction { hidden_row, target: 0, sequence: 1 }).collect();
            Forest::new(vec![0; 3], vec![segment.clone()], predictions, sequences).map_err(|e| e.to_string())
        };
        assert!(build(&[0, 0, 2], 2).is_ok());
        assert!(build(&[1, 0], 2).unwrap_err().contains("not sorted"));
        assert!(build(&[3], 2).unwrap_err().contains("points outside 3 tokens"));
        assert!(build(&[0], 1).unwrap_err().contains("1 sequences"));
    }

    #[test]
    fn a_sequence_predicts_all_but_its_first_token() {
        let forest = Forest::sequence(vec![7, 8, 9]).unwrap();
        let predicted: Vec<(u32, u32)> =
            forest.predictions.iter().map(|p| (p.hidden_row, p.target)).collect();
        assert_eq!(predicted, [(0, 8), (1, 9)]);
        assert!(Forest::sequence(vec![]).is_err());
    }

    #[test]
    fn scored_rows_are_distinct() {
        let segment = Segment { range: 0..5, parent: None, first_position: 0 };
        let predictions =
            [1, 1, 4].map(|hidden_row| Prediction { hidden_row, target: 0, sequence: 0 }).to_vec();
        let forest = Forest::new(vec![0; 5], vec![segment], predictions, 1).unwrap();
        assert_eq!(forest.scored_rows(), (vec![1, 4], vec![0, 0, 1]));
    }

    #[test]
    fn path_rows_pass_through_the_ancestors() {
        let forest = forest(&[(3, None), (2, Some(0)), (4, Some(0)), (3, Some(2))]).unwrap();
        let rows = |segment, positions: Range<u32>| {
            let mut rows = vec![99; positions.len()];
            forest.path_rows(segment, positions, &mut rows);
            rows
        };
        assert_eq!(rows(3, 0..10), [0, 1, 2, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(rows(3, 2..8), [2, 5, 6, 7, 8, 9]);
        assert_eq!(rows(1, 4..5), [4]);
        assert_eq!(rows(2, 3..3), [0; 0]);
    }

    #[test]
    fn groups_are_trees_or_what_interleaved_trees_share() {
        assert_eq!(
            forest(&[(1, None), (1, Some(0)), (1, None), (1, None), (1, Some(3))]).unwrap().groups(),
            [0..2, 2..3, 3..5]
        );
        assert_eq!(forest(&[(1, None), (1, None), (1, Some(0)), (1, None)]).unwrap().groups(), [0..3, 3..4]);
        assert!(Forest::default().groups().is_empty());
    }
}
