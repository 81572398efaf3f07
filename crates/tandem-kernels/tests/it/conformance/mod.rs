//! Every operation beside an f64 reference, forward and backward, f32 and bf16, at odd sizes; and the same bits for
//! every number of threads.

mod activation;
mod attention;
mod causal_conv;
mod decode;
mod delta_rule;
mod embedding;
mod head;
mod head_gate;
mod matrix;
mod norm;
mod rope;
mod sampling;
