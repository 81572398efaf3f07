//! Products against plain loops, with layouts taken literally by a stand-in for cuBLASLt.

use half::bf16;

use crate::DType;
use crate::cuda::driver::{Drivers, Factor, FactorType, Matmul, Region, Stream};
use crate::cuda::nvidia::fake::{
    Fake, Kind, VERSION, num_chosen, num_described, refuse_algorithms, set_version,
};
use crate::numerics::e4m3;

/// A GPU's memory that the host can look into.
struct Bench {
    driver: Drivers,
    stream: Stream,
    region: Box<dyn Region>,
    used: u64,
    seed: u32,
}

/// A matrix in it, rows of memory first.
#[derive(Clone, Copy)]
struct Matrix {
    address: u64,
    stride: usize,
    dtype: FactorType,
}

impl Bench {
    fn new(fake: &Fake) -> Self {
        let driver = fake.open();
        let (stream, region) = (driver.new_stream().unwrap(), driver.reserve(1 << 22).unwrap());
        region.grow(1 << 22).unwrap();
        Self { driver, stream, region, used: 0, seed: 1 }
    }

    /// A matrix of small numbers, whose products and sums are exact: `offset` bytes from a boundary
    /// of 256.
    fn matrix(
        &mut self,
        rows: usize,
        cols: usize,
        stride: usize,
        dtype: impl Into<FactorType>,
        offset: u64,
    ) -> Matrix {
        let dtype = dtype.into();
        let matrix = Matrix { address: self.region.base() + self.used + offset, stride, dtype };
        let bytes = (rows * stride.max(cols) * dtype.size()) as u64 + offset;
        self.used = (self.used + bytes).next_multiple_of(256);
        assert!(self.used <= 1 << 22);
        for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
            self.seed = self.seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            matrix.write(row, col, ((self.seed >> 24) % 9) as f32 - 4.0);
        }
        matrix
    }

    fn multiply(&self, product: &Matmul) -> crate::Result<()> {
        // SAFETY: the tests' matrices are there.
        unsafe { self.driver.matmul(self.stream, product) }
    }
}

impl Matrix {
    fn place<T>(self, row: usize, col: usize) -> *mut T {
        let address = self.address as usize + (row * self.stride + col) * self.dtype.size();
        std::ptr::with_exposed_provenance_mut(address)
    }

    fn read(self, row: usize, col: usize) -> f32 {
        // SAFETY: the tests' matrices are there.
        unsafe {
            match self.dtype {
                FactorType::F32 => self.place::<f32>(row, col).read(),
                FactorType::Bf16 => self.place::<bf16>(row, col).read().to_f32(),
                FactorType::E4m3 => e4m3::to_f32(self.place::<u8>(row, col).read()),
            }
        }
    }

    fn write(self, row: usize, col: usize, value: f32) {
        // SAFETY: as above.
        unsafe {
            match self.dtype {
                FactorType::F32 => self.place::<f32>(row, col).write(value),
                FactorType::Bf16 => self.place::<bf16>(row, col).write(bf16::from_f32(value)),
                FactorType::E4m3 => self.place::<u8>(row, col).write(e4m3::from_f32(value)),
            }
        }
    }

    /// An element by its place beside the depth, and in it.
    fn at(self, along_depth: bool, i: usize, depth: usize) -> f32 {
        if along_depth { self.read(i, depth) } else { self.read(depth, i) }
    }
}

/// Addend.
#[derive(Clone, Copy, PartialEq)]
enum Added {
    Nothing,
    Itself,
    Another,
}

fn case(bench: &mut Bench, size: [usize; 3], along: [bool; 2], types: [DType; 2], added: Added) {
    let ([m, n, k], [dtype, d_type]) = (size, types);
    let mut factor = |n: usize, along_depth: bool, more: usize| {
        let (rows, cols) = if along_depth { (n, k) } else { (k, n) };
        bench.matrix(rows, cols, cols + more, dtype, 0)
    };
    let (a, b) = (factor(m, along[0], 3), factor(n, along[1], 8));
    let (c, d) = (bench.matrix(m, n, n + 2, d_type, 0), bench.matrix(m, n, n + 5, d_type, 0));
    let before: Vec<f32> = (0..m * n).map(|i| d.read(i / n, i % n)).collect();
    let factor = |of: Matrix, along_depth| Factor { address: of.address, stride: of.stride, along_depth };
    let product = Matmul {
        size,
        dtype: dtype.into(),
        a: factor(a, along[0]),
        b: factor(b, along[1]),
        c: match added {
            Added::Nothing => None,
            Added::Itself => Some((d.address, d.stride)),
            Added::Another => Some((c.address, c.stride)),
        },
        d: (d.address, d.stride),
        d_type,
        tf32: true,
    };
    bench.multiply(&product).unwrap();
    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
        let sum: f32 = (0..k).map(|depth| a.at(along[0], i, depth) * b.at(along[1], j, depth)).sum();
        let sum = sum
            + match added {
                Added::Nothing => 0.0,
                Added::Itself => before[i * n + j],
                Added::Another => c.read(i, j),
            };
        assert_eq!(d.read(i, j), sum, "{size:?}, along the depth {along:?}, row {i}, column {j}");
    }
}

#[test]
fn every_layout_gives_the_plain_product() {
    let fake = Fake::new(Kind::default());
    let described = num_described();
    for size in [[4, 3, 5], [1, 6, 2], [7, 1, 9], [2, 5, 1], [1, 1, 1], [16, 8, 24]] {
        let mut bench = Bench::new(&fake);
        for along in [[true, true], [true, false], [false, true], [false, false]] {
            for types in [[DType::F32, DType::F32], [DType::Bf16, DType::F32], [DType::Bf16, DType::Bf16]] {
                for added in [Added::Nothing, Added::Itself, Added::Another] {
                    case(&mut bench, size, along, types, added);
                }
            }
        }
        bench.driver.end_stream(bench.stream);
    }
    assert_eq!((fake.held(), num_described()), ([0; 8], described), "everything is given back");
}

/// FP8 factors go to the library as it wants them, also where a row of weights is longer than the depth.
#[test]
fn fp8_factors_give_the_plain_product() {
    let mut bench = Bench::new(&Fake::new(Kind { capability: (9, 0), ..Kind::default() }));
    for [m, n, k] in [[1, 16, 16], [5, 32, 48], [40, 16, 144]] {
        let (a, b) =
            (bench.matrix(m, k, k, FactorType::E4m3, 0), bench.matrix(n, k, k + 64, FactorType::E4m3, 0));
        let d = bench.matrix(m, n, n, DType::F32, 0);
        let factor = |of: Matrix, along_depth| Factor { address: of.address, stride: of.stride, along_depth };
        let product = Matmul {
            size: [m, n, k],
            dtype: FactorType::E4m3,
            a: factor(a, true),
            b: factor(b, true),
            c: None,
            d: (d.address, d.stride),
            d_type: DType::F32,
            tf32: false,
        };
        bench.multiply(&product).unwrap();
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let sum: f32 = (0..k).map(|depth| a.read(i, depth) * b.read(j, depth)).sum();
            assert_eq!(d.read(i, j), sum, "{m}x{n}x{k}, row {i}, column {j}");
        }
        for wrong in [
            Matmul { size: [m, n, k - 8], ..product },
            Matmul { b: factor(b, false), ..product },
            Matmul { d_type: DType::Bf16, ..product },
        ] {
            let error = bench.multiply(&wrong).unwrap_err().to_string();
            assert!(error.contains("of e4m3 into"), "{error}");
        }
    }
}

#[test]
fn fp8_needs_a_gpu_and_a_library_that_have_it() {
    for (capability, version, expected) in [
        ((8, 9), 120_000, Ok(())),
        ((9, 0), 130_000, Ok(())),
        ((8, 6), 130_000, Err("its compute capability is 8.6, and FP8 needs 8.9 (Ada) or later")),
        ((9, 0), 111_103, Err("its cuBLASLt is 11.11.3, and FP8 needs that of CUDA 12 or later")),
    ] {
        let fake = Fake::new(Kind { capability, ..Kind::default() });
        set_version(version);
        let found = fake.open().check_fp8();
        assert_eq!(found, expected.map_err(str::to_owned), "{capability:?} {version}");
    }
    set_version(VERSION);
}

/// Computes `d[m,n] = a · bᵀ` of contiguous rows, where `a` begins `offset` bytes from a boundary.
fn plain(bench: &mut Bench, [m, n, k]: [usize; 3], offset: u64) -> Matmul {
    let (a, b) = (bench.matrix(m, k, k, DType::Bf16, offset), bench.matrix(n, k, k, DType::Bf16, 0));
    let d = bench.matrix(m, n, n, DType::F32, 0);
    let factor = |of: Matrix| Factor { address: of.address, stride: of.stride, along_depth: true };
    let (a, b) = (factor(a), factor(b));
    let size = [m, n, k];
    Matmul {
        size,
        dtype: FactorType::Bf16,
        a,
        b,
        c: None,
        d: (d.address, d.stride),
        d_type: DType::F32,
        tf32: false,
    }
}

#[test]
fn an_algorithm_is_chosen_once_for_a_shape_and_an_alignment() {
    let mut bench = Bench::new(&Fake::new(Kind::default()));
    let mut chosen = |size, offset| {
        let before = num_chosen();
        let product = plain(&mut bench, size, offset);
        bench.multiply(&product).unwrap();
        num_chosen() - before
    };
    assert_eq!([chosen([4, 8, 8], 0), chosen([4, 8, 8], 0)], [1, 0]);
    assert_eq!(chosen([4, 8, 8], 32), 0, "elsewhere, but aligned");
    assert_eq!([chosen([4, 8, 8], 2), chosen([4, 8, 8], 6)], [1, 0], "aligned to two bytes");
    assert_eq!(chosen([5, 8, 8], 0), 1);
    assert_eq!([chosen([33, 8, 8], 0), chosen([35, 8, 8], 0)], [1, 0], "both as 40 rows");
    refuse_algorithms(true);
    assert_eq!(chosen([34, 8, 8], 0), 1, "for itself alone");
    refuse_algorithms(false);
}

#[test]
fn each_stream_has_room_of_its_own_until_it_ends() {
    let fake = Fake::new(Kind::default());
    let mut bench = Bench::new(&fake);
    let product = plain(&mut bench, [2, 2, 16], 0);
    let other = bench.driver.new_stream().unwrap();
    let allocated = |fake: &Fake| fake.held()[2];
    assert_eq!(allocated(&fake), 1, "the matrices");
    for _ in 0..2 {
        bench.multiply(&product).unwrap();
        assert_eq!(allocated(&fake), 2);
    }
    bench.driver.prepare_matmuls(other).unwrap();
    assert_eq!(allocated(&fake), 3, "ahead of the first");
    // SAFETY: the matrices are there.
    unsafe { bench.driver.matmul(other, &product).unwrap() };
    assert_eq!(allocated(&fake), 3);
    bench.driver.end_stream(other);
    assert_eq!(allocated(&fake), 2);
    bench.driver.end_stream(bench.stream);
    assert_eq!(allocated(&fake), 1);
}

#[test]
fn nothing_is_multiplied_into_nothing_and_what_cannot_be_is_told() {
    let mut bench = Bench::new(&Fake::new(Kind::default()));
    let product = plain(&mut bench, [2, 3, 4], 0);
    let before = num_chosen();
    for size in [[0, 3, 4], [2, 0, 4]] {
        bench.multiply(&Matmul { size, ..product }).unwrap();
    }
    assert_eq!(num_chosen(), before);
    let error =
        bench.multiply(&Matmul { dtype: FactorType::F32, d_type: DType::Bf16, ..product }).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cuBLASLt: finding out how to multiply [2,4] by [4,3] of f32 into bf16: CUBLAS_STATUS_NOT_SUPPORTED: it cannot do this"
    );
}
