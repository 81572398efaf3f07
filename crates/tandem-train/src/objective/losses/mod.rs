//! Losses of one pair, a file each; [`super::registry`] lists them.

pub(super) mod apo;
pub(super) mod discopop;
pub(super) mod exo;
pub(super) mod hinge;
pub(super) mod ipo;
pub(super) mod logistic;
pub(super) mod pointwise;
pub(super) mod sft;
pub(super) mod sppo;
