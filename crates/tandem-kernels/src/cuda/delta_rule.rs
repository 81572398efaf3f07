//! The gated delta rule: blocks of threads walk over runs, each with some columns of one state.

use super::driver::{Arg, Grid};
use super::{Cuda, WIDEST_HEAD, args, by_type, driver, source};
use crate::batch::runs::{After, Runs};
use crate::ops::{DeltaRule, DeltaRuleBackward, DeltaShape};
use crate::{DType, KernelError, Result, Tensor};

pub(super) static SOURCE: driver::Source = source!("delta_rule.cu");

/// Threads of a block, columns or rows of a state that it has, and tokens of a chunk, as in
/// `delta_rule.cu`.
const THREADS: u32 = 128;
const SIDE: usize = 32;
const CHUNK: usize = 128;

/// Bytes of scratch of a backward pass above which it takes a few key heads after the others.
const SCRATCH: usize = 512 << 20;

/// Kinds of predecessors of a run, and the mark of an absent number, as in `delta_rule.cu`.
const NOTHING: u32 = 0;
const SLOT: u32 = 1;
const END: u32 = 2;
const CONTINUES: u32 = 3;
const NONE: u32 = u32::MAX;

/// Runs as blocks of threads walk over them. A walk's runs continue one another and nothing else
/// continues any but its last. So walks are independent but for that of which they continue the last
/// run.
struct Walks {
    /// Runs in the order of walks, as `Piece` in `delta_rule.cu`.
    pieces: Vec<[u32; 10]>,
    /// First piece and number of pieces of each walk, in the order of levels.
    walks: Vec<[u32; 2]>,
    /// Number of walks of each level. A level continues walks of the one before.
    levels: Vec<usize>,
    /// First row and number of rows of each chunk.
    chunks: Vec<[u32; 2]>,
    /// Runs that several others continue, whose last states are kept for them.
    num_ends: usize,
    /// Runs that continue those; the gradients of the states that they begin with are kept.
    num_begins: usize,
}

impl Walks {
    fn new(runs: &Runs) -> Self {
        let runs = runs.as_slice();
        let mut children = vec![Vec::new(); runs.len()];
        for (index, run) in runs.iter().enumerate() {
            if let After::Run(before) = run.after {
                children[before as usize].push(index);
            }
        }
        let mut this = Self {
            pieces: Vec::with_capacity(runs.len()),
            walks: Vec::new(),
            levels: Vec::new(),
            chunks: Vec::new(),
            num_ends: 0,
            num_begins: 0,
        };
        // First run of each walk of a level, and its `from`, `number` and `head`.
        let mut level: Vec<(usize, [u32; 3])> = Vec::new();
        for (index, run) in runs.iter().enumerate() {
            match run.after {
                After::Nothing => level.push((index, [NOTHING, 0, NONE])),
                After::Slot(slot) => level.push((index, [SLOT, slot, NONE])),
                After::Run(_) => {}
            }
        }
        while !level.is_empty() {
            this.levels.push(level.len());
            let mut next = Vec::new();
            for (mut index, mut beginning) in level {
                let first = this.pieces.len();
                loop {
                    let (run, children) = (&runs[index], &children[index]);
                    let first_chunk = this.chunks.len() as u32;
                    let rows = run.rows.clone().step_by(CHUNK);
                    this.chunks.extend(rows.map(|row| [row, (run.rows.end - row).min(CHUNK as u32)]));
                    let several = children.len() > 1;
                    let save = if several { this.num_ends as u32 } else { NONE };
                    let [from, number, head] = beginning;
                    let keep = run.keep.unwrap_or(NONE);
                    let first_child = this.num_begins as u32;
                    let num_begins = if several { children.len() } else { 0 };
                    this.pieces.push([
                        run.rows.start,
                        run.rows.end,
                        from,
                        number,
                        save,
                        keep,
                        first_chunk,
                        head,
                        first_child,
                        num_begins as u32,
                    ]);
                    if several {
                        next.extend(
                            children.iter().zip(first_child..).map(|(&c, head)| (c, [END, save, head])),
                        );
                        this.num_ends += 1;
                        this.num_begins += num_begins;
                    }
                    match children[..] {
                        [child] => (index, beginning) = (child, [CONTINUES, 0, NONE]),
                        _ => break,
                    }
                }
                this.walks.push([first as u32, (this.pieces.len() - first) as u32]);
            }
            level = next;
        }
        this
    }

    /// Returns for each level its walks, as the first and their number.
    fn levels(&self) -> impl DoubleEndedIterator<Item = (usize, usize)> {
        let mut first = 0;
        let ranges: Vec<_> = self
            .levels
            .iter()
            .map(|&count| {
                first += count;
                (first - count, count)
            })
            .collect();
        ranges.into_iter()
    }
}

/// Returns the f32 that [`forward`] needs for states that several runs continue.
pub(crate) fn forward_scratch(runs: &Runs, shape: &DeltaShape) -> usize {
    Walks::new(runs).num_ends * shape.state_len()
}

/// Memory of a backward pass, in f32.
struct Scratch {
    /// Key heads that are treated at once.
    key_heads: usize,
    /// Lengths of: states that several runs continue, gradients of states that runs begin with, states
    /// before chunks, gradients after them, `u`, `d`, terms of `dg`, and those of chunks' ends.
    lengths: [usize; 8],
}

impl Scratch {
    fn new(walks: &Walks, rows: usize, shape: &DeltaShape) -> Self {
        let group = shape.value_heads / shape.key_heads;
        let (state, blocks, chunks) =
            (shape.key_dim * shape.value_dim, shape.key_dim.div_ceil(SIDE), walks.chunks.len());
        let of_head = [
            walks.num_ends * state,
            walks.num_begins * state,
            chunks * state,
            chunks * state,
            rows * shape.value_dim,
            rows * shape.value_dim,
            rows * blocks,
            chunks * blocks,
        ];
        let bytes = of_head.iter().sum::<usize>() * group * size_of::<f32>();
        let key_heads = (SCRATCH / bytes.max(1)).clamp(1, shape.key_heads);
        // All launches but the last take as many.
        let key_heads = shape.key_heads.div_ceil(shape.key_heads.div_ceil(key_heads));
        Self { key_heads, lengths: of_head.map(|len| len * group * key_heads) }
    }
}

/// Returns the f32 that [`backward`] needs.
pub(crate) fn backward_scratch(runs: &Runs, shape: &DeltaShape) -> usize {
    Scratch::new(&Walks::new(runs), runs.num_rows(), shape).lengths.iter().sum()
}

/// Selects a kernel by type, and by the elements of a line of the state that each of four lanes has:
/// a quarter of 64, 128 or 256.
macro_rules! by_size {
    ($name:literal, $f32:literal, $bf16:literal of $dtype:expr) => {
        match $dtype {
            DType::F32 => concat!($name, $f32),
            DType::Bf16 => concat!($name, $bf16),
        }
    };
    ($name:literal, $length:expr, $dtype:expr) => {
        match $length {
            ..=64 => by_size!($name, "_16_f32", "_16_bf16" of $dtype),
            65..=128 => by_size!($name, "_32_f32", "_32_bf16" of $dtype),
            _ => by_size!($name, "_64_f32", "_64_bf16" of $dtype),
        }
    };
}

/// Checks that kernels have room for a state's columns and rows.
fn check(shape: &DeltaShape) -> Result<()> {
    match shape.key_dim.max(shape.value_dim) {
        ..=WIDEST_HEAD => Ok(()),
        width => Err(KernelError::invalid(
            "delta_rule",
            format!("head size {width}; GPU kernels support at most {WIDEST_HEAD}"),
        )),
    }
}

fn blocks_of(length: usize) -> usize {
    length.div_ceil(SIDE)
}

/// Computes the outputs. `ends` has [`forward_scratch`] numbers.
pub(crate) fn forward(cuda: &Cuda, call: DeltaRule, ends: Option<Tensor>) -> Result<()> {
    let DeltaRule { q, k, v, a, b, decay_log, decay_bias, shape, runs, states, out } = call;
    check(shape)?;
    let walks = Walks::new(runs);
    let ends_len = ends.as_ref().map_or(0, |ends| ends.rows() * ends.cols());
    assert!(ends_len >= walks.num_ends * shape.state_len(), "room for {} states", walks.num_ends);
    let tables = [cuda.table(&walks.pieces)?, cuda.table(&walks.walks)?];
    let ends = ends.as_ref().map(Tensor::view);
    let name = by_size!("delta_rule", shape.key_dim, v.dtype());
    let operands = args![
        q,
        q.stride(),
        k,
        k.stride(),
        v,
        v.stride(),
        a,
        a.stride(),
        b,
        b.stride(),
        decay_log,
        decay_bias
    ];
    let memory = args![states.as_ref(), shape.state_len(), ends, Arg::address(0), &out, out.stride()];
    let all_heads = heads(shape, 0, shape.key_heads);
    for (first, count) in walks.levels() {
        let own = args![tables[1] + (first * size_of::<[u32; 2]>()) as u64, tables[0]];
        let args = [own, operands, &all_heads, memory].concat();
        let grid = [count, shape.value_heads * blocks_of(shape.value_dim), 1];
        // SAFETY: the operation has checked shapes and types, that the runs cover the rows, and that
        // there are the slots that they name; there is room for the states that are continued.
        unsafe { cuda.launch(&SOURCE, name, Grid::with_dims(grid, THREADS), &args)? };
    }
    Ok(())
}

/// Returns the arguments that describe the value heads of some key heads: first value head, number,
/// value heads of a key head, sizes, and the factor on outputs.
fn heads(shape: &DeltaShape, first: usize, count: usize) -> [Arg; 6] {
    let group = shape.value_heads / shape.key_heads;
    let numbers = [first * group, count * group, group, shape.key_dim, shape.value_dim].map(|n| n as i32);
    let [first, count, group, key_dim, value_dim] = numbers.map(Arg::from);
    [first, count, group, key_dim, value_dim, shape.scale.into()]
}

/// Computes the gradients. `scratch` has [`backward_scratch`] numbers.
pub(crate) fn backward(cuda: &Cuda, call: DeltaRuleBackward, scratch: Option<Tensor>) -> Result<()> {
    // There are no rows.
    let Some(mut scratch) = scratch else { return Ok(()) };
    let DeltaRuleBackward { q, k, v, a, b, decay_log, decay_bias, shape, runs, d_out, .. } = call;
    let DeltaRuleBackward { dq, dk, dv, da, db, d_decay_log, .. } = call;
    check(shape)?;
    let (walks, dtype) = (Walks::new(runs), v.dtype());
    let Scratch { key_heads, lengths } = Scratch::new(&walks, runs.num_rows(), shape);
    assert!(scratch.rows() * scratch.cols() >= lengths.iter().sum(), "room for {lengths:?}");
    let mut at = scratch.view_mut().address();
    let [ends, begins, starts, stops, us, ds, terms, bounds] = lengths.map(|len| {
        let address = Arg::address(at);
        at += (len * size_of::<f32>()) as u64;
        address
    });
    let group = shape.value_heads / shape.key_heads;
    let (pieces, walks_at, chunks) =
        (cuda.table(&walks.pieces)?, cuda.table(&walks.walks)?, cuda.table(&walks.chunks)?);
    let walks_at = |first: usize| walks_at + (first * size_of::<[u32; 2]>()) as u64;
    let gates = args![a, a.stride(), b, b.stride(), decay_log, decay_bias];
    let keys = args![q, q.stride(), k, k.stride()];
    for first_head in (0..shape.key_heads).step_by(key_heads) {
        let count = key_heads.min(shape.key_heads - first_head);
        let some_heads = heads(shape, first_head, count);
        let [columns, rows] = [shape.value_dim, shape.key_dim].map(blocks_of);
        let value_heads = count * group;

        let name = by_size!("delta_states", shape.key_dim, dtype);
        let memory = args![Arg::address(0), 0usize, ends, starts, us, value_heads * shape.value_dim];
        for (first, walks) in walks.levels() {
            let args =
                [args![walks_at(first), pieces], keys, args![v, v.stride()], gates, &some_heads, memory];
            let grid = Grid::with_dims([walks, value_heads * columns, 1], THREADS);
            // SAFETY: the operation has checked shapes and types, and that the runs cover the rows and
            // name no slot; the scratch has room for these heads.
            unsafe { cuda.launch(&SOURCE, name, grid, &args.concat())? };
        }

        let name = by_size!("delta_adjoints", shape.key_dim, dtype);
        let of_out = args![d_out, d_out.stride()];
        let memory = args![begins, stops, ds, &dv, dv.stride()];
        for (first, walks) in walks.levels().rev() {
            let args = [args![walks_at(first), pieces], keys, of_out, gates, &some_heads, memory];
            let grid = Grid::with_dims([walks, value_heads * columns, 1], THREADS);
            // SAFETY: as above.
            unsafe { cuda.launch(&SOURCE, name, grid, &args.concat())? };
        }

        let name = by_size!("delta_rows", shape.value_dim, dtype);
        let memory = args![starts, stops, us, ds, terms, bounds, &dq, dq.stride(), &dk, dk.stride()];
        let args = [args![chunks], keys, of_out, gates, &some_heads, memory];
        let grid = Grid::with_dims([walks.chunks.len(), count * rows, 1], THREADS);
        // SAFETY: as above; what the kernel reads comes earlier in the stream.
        unsafe { cuda.launch(&SOURCE, name, grid, &args.concat())? };

        let numbers = [first_head * group, value_heads, rows, shape.value_dim].map(|n| Arg::from(n as i32));
        let memory = args![
            us,
            ds,
            terms,
            bounds,
            &da,
            da.stride(),
            &db,
            db.stride(),
            &d_decay_log,
            d_decay_log.stride()
        ];
        let args = [args![chunks], gates, &numbers, memory];
        let grid = Grid::with_dims([walks.chunks.len(), value_heads, 1], THREADS);
        // SAFETY: as above.
        unsafe { cuda.launch(&SOURCE, by_type!("delta_gates", dtype), grid, &args.concat())? };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Run;

    fn walks(runs: &[(std::ops::Range<u32>, After)]) -> Walks {
        let run = |(rows, after): &(std::ops::Range<u32>, After)| Run {
            rows: rows.clone(),
            after: *after,
            keep: None,
        };
        Walks::new(&Runs::new(runs.iter().map(run).collect()).unwrap())
    }

    #[test]
    fn a_walk_ends_where_several_runs_continue_it() {
        use After::{Nothing, Run};
        let runs = [
            (0..130, Nothing),
            (130..131, Run(0)),
            (131..133, Run(1)),
            (133..134, Run(1)),
            (134..140, Nothing),
        ];
        let walks = walks(&runs);
        assert_eq!(walks.walks, [[0, 2], [2, 1], [3, 1], [4, 1]]);
        assert_eq!(walks.levels, [2, 2]);
        assert_eq!(walks.chunks, [[0, 128], [128, 2], [130, 1], [134, 6], [131, 2], [133, 1]]);
        assert_eq!((walks.num_ends, walks.num_begins), (1, 2));
        #[rustfmt::skip]
        assert_eq!(walks.pieces, [
            [0, 130, NOTHING, 0, NONE, NONE, 0, NONE, 0, 0],
            [130, 131, CONTINUES, 0, 0, NONE, 2, NONE, 0, 2],
            [134, 140, NOTHING, 0, NONE, NONE, 3, NONE, 2, 0],
            [131, 133, END, 0, NONE, NONE, 4, 0, 2, 0],
            [133, 134, END, 0, NONE, NONE, 5, 1, 2, 0],
        ]);
    }

    #[test]
    fn scratch_is_bounded_by_taking_some_heads_at_a_time() {
        let shape = DeltaShape { key_heads: 12, value_heads: 24, key_dim: 128, value_dim: 128, scale: 1.0 };
        let scratch = |rows| Scratch::new(&walks(&[(0..rows, After::Nothing)]), rows as usize, &shape);
        assert_eq!(scratch(1000).key_heads, 12);
        let long = scratch(20_000);
        assert_eq!(long.key_heads, 6);
        assert!(long.lengths.iter().sum::<usize>() * size_of::<f32>() <= SCRATCH);
        assert_eq!(scratch(10_000_000).key_heads, 1);
    }
}
