//! Causal language models from HF folders, as one decoder described by its parts.
//!
//! * [`DecoderSpec`] says what a model is made of: kind of norm, residual form, rotary embedding, feed-forward, head.
//!   [`families`] turns a `config.json` into it and says what HF calls each parameter: one file per architecture.
//! * [`Decoder`] adds what follows from a spec: the [`LayerLayout`] of each layer's flat parameter buffer and the
//!   rotary table.
//! * [`Walk`] runs forward and backward over the layers. It takes weights from a [`WeightSource`] and gives gradients
//!   to a [`GradientSink`]; where these keep them is not its business.
//! * A [`Slice`] of a decoder is what one of several ranks holds of every layer; a [`Split`] is how they add up. A [`Stage`]
//!   is which layers a rank holds.
//! * A decoder's head gives log-probabilities of tokens, or scores of sequences: then it is a reward model.
//! * [`ModelFolder`] reads a folder, [`save`] writes one, [`init`] makes weights from a seed.
//! * [`decode`] generates text with a key/value cache.
//!
//! Shape suffixes: `T` tokens, `D` hidden size, `H` query heads, `K` key/value heads, `d` head width, `F`
//! feed-forward size, `V` vocabulary, `R` rows the head scores, `P` predictions.
//!
//! Dropout rates in a `config.json` are ignored: preference training runs without dropout, because policy and
//! reference must be the same function of the same weights.

pub mod adapter;
pub mod archive;
pub mod config;
pub mod decode;
pub mod decoder;
pub mod error;
pub mod families;
pub mod folder;
pub mod init;
pub mod layout;
pub mod load;
mod new_folder;
mod order;
pub mod packing;
mod quantised;
mod random;
pub mod resident;
pub mod rotary;
pub mod save;
pub mod slice;
pub mod spec;
pub mod stage;
mod tensor_file;
pub mod torch;
pub mod walk;
pub mod weights;

pub use adapter::{Adapter, AdapterConfig, AdapterFiles, AdapterKind, Merged, PeftFolder, Targets};
pub use config::Config;
pub use decode::{Generator, GeneratorOptions, Request, Sampling};
pub use decoder::Decoder;
pub use error::ModelError;
pub use folder::ModelFolder;
pub use layout::{LayerId, LayerLayout, ParamSpec, Part};
pub use load::WeightFiles;
pub use packing::{PackedLayer, Packing};
pub use resident::{FlatWeights, ResidentGradients, ResidentWeights};
pub use save::Save;
pub use slice::Slice;
pub use spec::DecoderSpec;
pub use stage::Stage;
pub use walk::{Checkpointing, Gradient, Room, SavedWalk, Split, Streams, Walk};
pub use weights::{AdapterWeights, FlatLayer, GradientSink, LayerGradients, LayerWeights, WeightSource};

/// The result of an operation on a model.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;
