//! Gradients, summed over the micro-batches of a step and over ranks.
//!
//! The calls of a step, in their order. Weights ([`tandem_model::WeightSource`]) take part in a
//! pass as gradients do, so they stand beside them.
//!
//! | call | by | effect |
//! |---|---|---|
//! | [`Accumulator::begin`] | step | forgets the last step |
//! | `prefetch(layer)` | pass | pages of the layer are announced where they lie; it travels to the device meanwhile |
//! | `fetch(layer)` | pass | the layer is on the device; its pages elsewhere are let go |
//! | `open(layer)` | backward | lends a buffer for the layer's gradient; once more for the same layer, to add to it |
//! | [`Accumulator::begin_last_pass`] | step | before this rank's last backward pass: from then on buckets are reduced |
//! | `emit(layer)` | backward | the gradient is complete: added to the sums, or, in parts, its bucket's reduction begins |
//! | (`finish_pending`) | `emit` in the next bucket | the reduction that is under way ends, and this rank's part is added |
//! | `release(layer)` | pass | the layer is not read any more in this pass |
//! | `release_all()` | step | after each pass: layers on the device are forgotten |
//! | [`Accumulator::take_in_range`] | step | after the last micro-batch: whether every gradient was finite |
//! | [`Accumulator::begin_reduction`] | step | begins the reduction of the remaining buckets |
//! | [`Accumulator::reduce`] | step | waits for all; adds up the stages of a tied table |
//! | `ReducedGradients::norm` | step | the norm of what is reduced |
//! | [`Accumulator::owned`] | optimiser | this rank's part, layer by layer; states are announced before and let go after |
//! | [`Accumulator::release`] | step | frees the gradients of a run whose steps have one micro-batch, on one rank |
//!
//! `open` to `emit` go from the last layer to the first, each layer once a micro-batch; a tied
//! table is emitted twice. Ranks that meet in the walk make the same calls, also with nothing to
//! compute. A layer is emitted before another is opened. One reduction of a micro-batch's gradient may
//! be under way, and any number of reductions of sums.

mod accumulator;
mod buffer;
mod reducer;
#[cfg(test)]
mod tests;
mod tied;

pub(crate) use accumulator::{Accumulator, ReductionGroups, SumOptions};
