//! Order of a sum along k that tensor-parallel ranks can divide.
//!
//! The sum is formed over blocks of k: a block's products in sequence, then the blocks in a binary
//! tree, `((b0 + b1) + (b2 + b3)) + …`. A rank that holds a power of two of neighbouring blocks
//! computes a subtree; the sum of all ranks' subtrees by pairs, neighbours first, is the sum of one
//! rank that holds all blocks, bit for bit.

use std::ops::Range;

/// Blocks of k, each some ranges of it, and the tree in which they are added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DepthTree {
    blocks: Vec<Vec<Range<usize>>>,
}

/// Product of one piece of k, and its place among the partial sums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TreeStep {
    pub piece: Range<usize>,
    /// Position of the piece's block: a stack of partial sums of which the result is the lowest.
    pub position: usize,
    /// Whether earlier pieces of the block lie at `position`.
    pub adds_block: bool,
    /// Partial sums below `position` that are added in turn, if this is a block's last piece; the sum
    /// then replaces the last of them.
    pub merges: usize,
}

impl DepthTree {
    /// Creates the tree of these blocks, in order. Ranges of a block are added in sequence, also where
    /// they are neighbours: on another rank they may not be.
    ///
    /// # Panics
    /// If the number of blocks is not a power of two, or a range is empty.
    pub fn new(blocks: Vec<Vec<Range<usize>>>) -> Self {
        assert!(blocks.len().is_power_of_two(), "a tree of {} blocks", blocks.len());
        let ranges = |block: &Vec<Range<usize>>| !block.is_empty() && !block.iter().any(Range::is_empty);
        assert!(blocks.iter().all(ranges), "an empty block of k");
        Self { blocks }
    }

    /// Returns the tree of the part of k within `range`, counted from its start.
    ///
    /// # Panics
    /// If a block has no element there.
    #[must_use]
    pub fn within(&self, range: &Range<usize>) -> Self {
        let clip = |part: &Range<usize>| {
            let clipped = part.start.max(range.start)..part.end.min(range.end);
            (clipped.start < clipped.end).then(|| clipped.start - range.start..clipped.end - range.start)
        };
        Self::new(self.blocks.iter().map(|block| block.iter().filter_map(clip).collect()).collect())
    }

    /// Returns the number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Lists the blocks of a projection back, of which each is one range of columns.
    ///
    /// # Panics
    /// If a block has more than one range.
    pub fn columns(&self) -> impl Iterator<Item = Range<usize>> {
        self.blocks.iter().map(|block| {
            let [columns] = &block[..] else { panic!("a block of {} ranges of columns", block.len()) };
            columns.clone()
        })
    }

    /// Returns the length of k.
    pub(crate) fn depth(&self) -> usize {
        self.blocks.iter().flatten().map(Range::len).sum()
    }

    /// Returns whether the sum is not that of k from its start to its end.
    pub(crate) fn is_divided(&self) -> bool {
        self.blocks.len() > 1 || self.blocks[0].len() > 1
    }

    /// Returns the most partial sums beside the result that exist at a time.
    pub(crate) fn levels(&self) -> usize {
        self.blocks.len().ilog2() as usize
    }

    /// Lists the steps of the sum. `cut` divides a range into pieces.
    pub(crate) fn steps<C: Iterator<Item = Range<usize>>>(
        &self,
        cut: impl Fn(Range<usize>) -> C,
    ) -> Vec<TreeStep> {
        let mut steps = Vec::new();
        for (index, block) in self.blocks.iter().enumerate() {
            let position = index.count_ones() as usize;
            let first = steps.len();
            steps.extend(block.iter().cloned().flat_map(&cut).enumerate().map(|(i, piece)| TreeStep {
                piece,
                position,
                adds_block: i > 0,
                merges: 0,
            }));
            if let Some(last) = steps[first..].last_mut() {
                last.merges = index.trailing_ones() as usize;
            }
        }
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "a block of one range")]
    fn blocks_are_added_in_a_binary_tree() {
        let tree = DepthTree::new((0..8).map(|b| vec![2 * b..2 * b + 2]).collect());
        let mut stack: Vec<String> = Vec::new();
        for (index, step) in tree.steps(std::iter::once).into_iter().enumerate() {
            assert_eq!((step.position, step.piece.start), (stack.len(), 2 * index));
            assert!(!step.adds_block);
            let mut sum = format!("{index}");
            for _ in 0..step.merges {
                sum = format!("({}+{sum})", stack.pop().unwrap());
            }
            stack.push(sum);
        }
        assert_eq!(stack, ["(((0+1)+(2+3))+((4+5)+(6+7)))"]);
        assert_eq!((tree.levels(), tree.depth()), (3, 16));
    }

    #[test]
    fn neighbouring_ranges_of_a_block_stay_apart() {
        assert!(DepthTree::new(vec![vec![0..4, 4..6]]).is_divided());
        assert!(!DepthTree::new(vec![vec![0..4; 1]]).is_divided());
    }
}
