//! Every operation on every device: the CPU at each instruction level, the CUDA emulator, and a GPU where there is one.

mod conformance;
mod convert;
mod dropout;
mod dry_run;
mod elementwise;
mod exact;
mod linear;
mod low_rank;
mod optimizer;
mod packing;
mod places;
mod repeated;
mod states;
mod support;
