//! RMSNorm and LayerNorm: threads per row by its width, and blocks of rows for the weight
//! gradients.

use super::driver::{Arg, Grid};
use super::rows::{FEWER_LANES, MOST_LANES, Rows};
use super::{Cuda, args, by_type, driver, source};
use crate::ops::{LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward};
use crate::{Result, ViewMut};

pub(super) static RMS_NORM: driver::Source = source!("rms_norm.cu");
pub(super) static LAYER_NORM: driver::Source = source!("layer_norm.cu");
pub(super) static SUMS: driver::Source = source!("norm_sums.cu");

/// Returns the most blocks of rows of a backward pass: as many as run at once on a large GPU, so
/// that few rows still fill it and many leave few partial sums. Short rows have smaller blocks, and
/// more of them.
fn most_blocks(width: usize) -> usize {
    512 * (2048 / width.max(1)).clamp(1, 4)
}

/// Fewest rows per block.
const FEWEST_ROWS: usize = 4;

/// Most shared memory for a block's sums, in bytes; every supported GPU has it.
const SHARED: usize = 96 << 10;

/// Returns the most blocks for a number of rows; monotonic in it.
pub(crate) fn blocks(rows: usize, width: usize) -> usize {
    rows.div_ceil(FEWEST_ROWS).min(most_blocks(width))
}

pub(crate) fn rms_norm(cuda: &Cuda, call: RmsNorm) -> Result<()> {
    let RmsNorm { x, w, offset, eps, y, inverse_rms } = call;
    let way = Rows::forward(x, &[w], y.view());
    let name = by_type!("rms_norm", x.dtype(), y.dtype());
    let operands = args![x, x.stride(), w, offset, eps, &y, y.stride(), &inverse_rms];
    let shape = args![way.rows, way.width, way.lanes, way.wide];
    // SAFETY: the operands are those of the kernel, of the shapes that the operation has checked.
    unsafe { cuda.launch(&RMS_NORM, name, way.grid(way.groups), &[operands, shape].concat()) }
}

pub(crate) fn layer_norm(cuda: &Cuda, call: LayerNorm) -> Result<()> {
    let LayerNorm { x, w, b, eps, y, mean_inverse } = call;
    let way = Rows::forward(x, &[w, b.unwrap_or(w)], y.view());
    let name = by_type!("layer_norm", x.dtype(), y.dtype());
    let kept = args![&mean_inverse, mean_inverse.stride()];
    let operands = args![x, x.stride(), w, b, eps, &y, y.stride()];
    let shape = args![way.rows, way.width, way.lanes, way.wide];
    // SAFETY: as above.
    unsafe { cuda.launch(&LAYER_NORM, name, way.grid(way.groups), &[operands, kept, shape].concat()) }
}

pub(crate) fn rms_norm_backward(cuda: &Cuda, call: RmsNormBackward, partial: ViewMut) -> Result<()> {
    let RmsNormBackward { x, w, offset, inverse_rms, dy, dx, dw } = call;
    let way = Rows::backward(x, w, dy, dx.view(), MOST_LANES);
    let sums = Sums::new(way, x.cols(), dw.as_ref().map(|_| &partial));
    let name = by_type!("rms_norm_backward", x.dtype(), dy.dtype());
    let operands = args![x, x.stride(), w, offset, inverse_rms, dy, dy.stride(), &dx, dx.stride()];
    // SAFETY: as above; `partial` has one row per block, and a group's sums fit in shared memory or
    // there.
    unsafe { cuda.launch(&RMS_NORM, name, sums.grid(), &[operands, &sums.args()].concat())? };
    dw.map_or(Ok(()), |dw| sums.add(cuda, dw, None))
}

pub(crate) fn layer_norm_backward(cuda: &Cuda, call: LayerNormBackward, partial: ViewMut) -> Result<()> {
    let LayerNormBackward { x, w, mean_inverse, dy, dx, dw_db } = call;
    let way = Rows::backward(x, w, dy, dx.view(), FEWER_LANES);
    let sums = Sums::new(way, 2 * x.cols(), dw_db.as_ref().map(|_| &partial));
    let name = by_type!("layer_norm_backward", x.dtype(), dy.dtype());
    let kept = args![mean_inverse, mean_inverse.stride()];
    let (head, tail) = (args![x, x.stride(), w], args![dy, dy.stride(), &dx, dx.stride()]);
    // SAFETY: as above.
    unsafe { cuda.launch(&LAYER_NORM, name, sums.grid(), &[head, kept, tail, &sums.args()].concat())? };
    dw_db.map_or(Ok(()), |(dw, db)| sums.add(cuda, dw, db))
}

/// Iteration of a backward pass over rows, and its sums of weight gradients.
struct Sums<'a> {
    way: Rows,
    columns: usize,
    /// One row per block of rows; none without weight gradients.
    partial: Option<&'a ViewMut<'a>>,
    block_rows: usize,
    in_shared: bool,
}

impl<'a> Sums<'a> {
    fn new(way: Rows, columns: usize, partial: Option<&'a ViewMut<'a>>) -> Self {
        let most_blocks = most_blocks(way.width as usize);
        let fewest = if partial.is_some() { way.rows.div_ceil(most_blocks).max(FEWEST_ROWS) } else { 1 };
        let in_shared = way.groups * columns * size_of::<f32>() <= SHARED;
        Self { way, columns, partial, block_rows: fewest.next_multiple_of(way.groups), in_shared }
    }

    fn grid(&self) -> Grid {
        let wanted = self.in_shared && self.partial.is_some();
        let shared = if wanted { self.way.groups * self.columns * size_of::<f32>() } else { 0 };
        self.way.grid(self.block_rows).with_shared(shared)
    }

    fn args(&self) -> Vec<Arg> {
        let Rows { rows, width, wide, lanes, .. } = self.way;
        args![self.partial, self.in_shared, rows, width, lanes, self.block_rows as i32, wide].to_vec()
    }

    /// Adds the blocks' sums to the gradients.
    fn add(&self, cuda: &Cuda, first: ViewMut, second: Option<ViewMut>) -> Result<()> {
        const THREADS: u32 = 1024;
        const COLUMNS: usize = 32;
        let blocks = self.grid().blocks[0] as i32;
        let to = args![&first, second.as_ref(), self.way.width];
        let from = args![self.partial, blocks, self.columns as i32];
        let grid = Grid::new(self.columns.div_ceil(COLUMNS), THREADS);
        // SAFETY: as above; every block has written its row.
        unsafe { cuda.launch(&SUMS, "add_norm_sums", grid, &[from, to].concat()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device, MemoryKind};

    #[test]
    fn every_block_has_room_for_its_sums() {
        let device = Device::meta();
        let matrix = |rows, cols| {
            device.alloc(MemoryKind::Scratch, rows, cols, DType::F32).expect("a dry run has room")
        };
        for width in [1, 8, 100, 128, 300, 1024, 4096, 20_000] {
            let mut before = 0;
            for rows in [1, 4, 5, 100, 2047, 2049, 8191, 8192, 16_385, 300_000] {
                let (x, w, mut partial) = (matrix(rows, width), matrix(1, width), matrix(1, width));
                let way = Rows::backward(x.view(), w.view(), x.view(), x.view(), MOST_LANES);
                let sums = Sums::new(way, width, Some(&partial.view_mut())).grid();
                let room = blocks(rows, width);
                assert!(sums.blocks[0] as usize <= room, "{rows}x{width}");
                assert!(sums.shared <= SHARED, "{rows}x{width}");
                assert!(room >= before, "what many rows take is enough for fewer");
                before = room;
            }
        }
    }
}
