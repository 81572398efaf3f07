//! Plans of models that are no more than a config.json: pictures, advice, devices, caps.

mod advice;
mod cap;
mod classes;
mod exact;
mod large;
mod measured;
mod show;
mod sketch;
