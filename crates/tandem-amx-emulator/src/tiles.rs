//! Tile registers and what the instructions do to them.

/// Rows of the largest tile, and words of its rows.
const SIDE: usize = 16;

/// Registers.
const COUNT: usize = 8;

/// Tile registers of a thread.
pub(crate) struct Tiles {
    /// Configured rows, and bytes in each.
    shapes: [(u8, u16); COUNT],
    words: [[[u32; SIDE]; SIDE]; COUNT],
}

impl Tiles {
    /// Registers without a configuration.
    pub(crate) const NONE: Self = Self { shapes: [(0, 0); COUNT], words: [[[0; SIDE]; SIDE]; COUNT] };

    /// Configures and zeroes the registers.
    ///
    /// # Safety
    /// 64 bytes are readable.
    pub(crate) unsafe fn configure(&mut self, from: *const u8) {
        // SAFETY: the caller's promise.
        let bytes = unsafe { from.cast::<[u8; 64]>().read_unaligned() };
        if bytes[0] != 1 {
            fault("the configuration is not of palette 1");
        }
        *self = Self::NONE;
        for (tile, shape) in self.shapes.iter_mut().enumerate() {
            let columns = u16::from_le_bytes([bytes[16 + 2 * tile], bytes[17 + 2 * tile]]);
            *shape = (bytes[48 + tile], columns);
            if usize::from(shape.0) > SIDE || usize::from(columns) > 4 * SIDE || !columns.is_multiple_of(4) {
                fault("a tile has at most 16 rows of 64 bytes");
            }
        }
    }

    /// Returns the rows and the words of a row.
    fn shape(&self, tile: usize) -> (usize, usize) {
        match self.shapes[tile] {
            (0, _) | (_, 0) => fault("the tile is not configured"),
            (rows, bytes) => (rows.into(), usize::from(bytes) / 4),
        }
    }

    pub(crate) fn zero(&mut self, tile: usize) {
        self.shape(tile);
        self.words[tile] = [[0; SIDE]; SIDE];
    }

    /// # Safety
    /// The tile's rows are readable, `stride` bytes apart.
    pub(crate) unsafe fn load(&mut self, tile: usize, from: *const u8, stride: usize) {
        let (rows, words) = self.shape(tile);
        self.words[tile] = [[0; SIDE]; SIDE];
        for (row, to) in self.words[tile][..rows].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                let from = from.wrapping_add(row.wrapping_mul(stride));
                std::ptr::copy_nonoverlapping(from, to.as_mut_ptr().cast(), 4 * words);
            }
        }
    }

    /// # Safety
    /// The tile's rows are writable, `stride` bytes apart.
    pub(crate) unsafe fn store(&self, tile: usize, to: *mut u8, stride: usize) {
        let (rows, words) = self.shape(tile);
        for (row, from) in self.words[tile][..rows].iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                let to = to.wrapping_add(row.wrapping_mul(stride));
                std::ptr::copy_nonoverlapping(from.as_ptr().cast(), to, 4 * words);
            }
        }
    }

    /// Adds the product of pairs of bf16. First and second elements of the pairs are summed apart from zero by
    /// fused products, in order; then both sums are added. Numbers too small for f32's exponent are zero.
    ///
    /// # Safety
    /// The CPU has FMA.
    #[target_feature(enable = "avx2,fma")]
    pub(crate) unsafe fn multiply(&mut self, sums: usize, first: usize, second: usize) {
        let ((rows, columns), (first_rows, depth)) = (self.shape(sums), self.shape(first));
        if first_rows != rows || self.shape(second) != (depth, columns) {
            fault("the tiles of a product do not fit one another");
        }
        for row in 0..rows {
            let mut halves = [[0.0_f32; SIDE]; 2];
            for k in 0..depth {
                let a = self.words[first][row][k];
                let b = &self.words[second][k];
                for (half, shift) in halves.iter_mut().zip([16, 0]) {
                    let a = element(a << shift);
                    for (sum, b) in half.iter_mut().zip(b) {
                        *sum = flushed(a.mul_add(element(b << shift), *sum));
                    }
                }
            }
            let [evens, odds] = halves;
            for (sum, (even, odd)) in self.words[sums][row].iter_mut().zip(evens.into_iter().zip(odds)) {
                *sum = flushed(flushed(f32::from_bits(*sum)) + flushed(even + odd)).to_bits();
            }
        }
    }
}

/// Returns the number whose bf16 is the upper half of a word.
#[inline(always)]
fn element(word: u32) -> f32 {
    flushed(f32::from_bits(word & 0xffff_0000))
}

/// Returns zero for a number below the smallest normal one.
#[inline(always)]
fn flushed(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0_f32.copysign(x) } else { x }
}

/// Ends the process where a CPU would raise a fault: a signal's handler cannot panic.
fn fault(reason: &str) -> ! {
    let text = ["AMX emulation: ", reason, "\n"];
    for part in text {
        // SAFETY: the bytes are readable.
        unsafe { libc::write(libc::STDERR_FILENO, part.as_ptr().cast(), part.len()) };
    }
    // SAFETY: it has no condition.
    unsafe { libc::abort() }
}
