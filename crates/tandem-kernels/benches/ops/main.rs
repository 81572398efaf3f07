//! `cargo bench -p tandem-kernels --bench ops [-- FILTER]`: every operation's rate beside what this machine can do.
//!
//! The peaks are measured in the same run: multiply-adds in registers, f32 and bf16, and passes over large arrays. Lines
//! whose name contains FILTER run. With `--features peer`, f32 products also run through the `gemm` crate, in turns with ours.
//! `TANDEM_BENCH_THREADS` is the number of threads, by default all; `TANDEM_ISA` lowers the vector instructions. On a
//! busy machine `TANDEM_BENCH_CLOCK=cpu TANDEM_BENCH_THREADS=1` gives rates per processor second.
//!
//! `-- --device cuda` times this machine's first GPU instead, at shapes of its own where a processor's are too small for it; `emulated` one
//! that the processor stands in for, which tells nothing but that a bench runs. `-- --json` prints lines of JSON.
//!
//! `-- --products f32 2048x256x688 …` times the three products of linear layers of these shapes (tokens, inputs, outputs) alone and
//! prints a line of JSON for each: what `bench/run` compares with other libraries.
//!
//! `-- --device cuda --algorithms` times up to 16 algorithms of cuBLASLt for each matmul of the linear layers of models with 1 and
//! 8 billion parameters, and prints the rate of the library's first choice beside the best; `--algorithms bf16 8192x4096x4096 …` those
//! of other layers.

mod algorithms;
mod attention;
mod harness;
mod head;
mod low_rank;
mod optimizer;
mod packing;
mod peak;
mod product;
mod rowwise;

use harness::Bench;

fn main() {
    let mut bench = Bench::from_arguments();
    if let Some(layers) = &bench.algorithms {
        algorithms::run(&bench.place.driver(), layers, bench.is_json);
        return;
    }
    if let Some(products) = &bench.products {
        product::training(&bench, &products.shapes, products.dtype);
        return;
    }
    peak::measure(&mut bench);
    product::run(&bench);
    low_rank::run(&bench);
    optimizer::run(&bench);
    attention::run(&bench);
    rowwise::run(&bench);
    head::run(&bench);
    packing::run(&bench);
}
