//! Collectives: calls, element types, volume, and the interfaces of engines and observers.

pub(crate) mod call;
pub(crate) mod call_chain;
pub(crate) mod element;
pub(crate) mod engine;
pub(crate) mod observer;
pub(crate) mod volume;
