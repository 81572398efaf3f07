//! Every operation beside an f64 reference, forward and backward, f32 and bf16, at odd sizes; and the same bits for
//! every number of threads.

mod activation;
mod attention;
mod decode;
mod embedding;
mod head;
mod matrix;
mod norm;
mod rope;
