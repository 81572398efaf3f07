//! Decoder language models from HF folders: description, weights, forward and backward, generation.
//!
//! The rooms of the crate, from the ground floor up; a room imports from rooms above it in this
//! list, never from one below:
//!
//! | room | contents |
//! |---|---|
//! | [`spec`] | [`DecoderSpec`], the parts of a decoder; [`Config`], typed access to a `config.json` |
//! | [`layout`] | [`LayerLayout`] of a layer's flat buffer; [`TensorParallelShard`] (tensor parallel) and [`PipelineStage`] (pipeline) of a decoder |
//! | [`families`] | one file per architecture: `config.json` → spec, HF tensor names → layout |
//! | [`lora`] | [`Adapter`], the low-rank terms that train beside frozen matrices |
//! | [`decoder`] | [`Decoder`]: a spec with its layouts, adapter, slice and stage |
//! | [`weights`] | [`WeightSource`] and [`GradientSink`], the two traits between layers and storage; packed and resident weights |
//! | [`init`](mod@init) | fresh weights from a seed |
//! | [`io`] | [`ModelFolder`] and [`Save`]: HF folders, safetensors, files of `torch.save` and of bitsandbytes |
//! | [`adapter`] | fresh adapters, folders of the `peft` library, merging |
//! | [`layers`] | [`LayerExecutor`]: forward and backward over the layers |
//! | [`decode`] | [`Generator`]: generation with a key/value cache |
//!
//! Shape suffixes: `T` tokens, `D` hidden size, `H` query heads, `K` key/value heads, `d` head
//! width, `F` feed-forward width, `V` vocabulary, `R` scored rows, `P` predictions, `r` rank of a
//! low-rank term.
//!
//! Dropout rates in a `config.json` are ignored: policy and reference must be the same function of
//! the same weights.

#![warn(unreachable_pub)]

#[cfg(test)]
extern crate self as tandem_model;

pub mod adapter;
pub mod decode;
pub mod decoder;
mod error;
pub mod families;
pub mod init;
pub mod io;
pub mod layers;
pub mod layout;
pub mod lora;
mod names;
mod random;
pub mod spec;
pub mod weights;

pub use adapter::{AdapterFiles, Merged, PeftFolder};
pub use decode::{Generator, GeneratorOptions, Request, Sampling};
pub use decoder::{Decoder, Fp8Matmul};
pub use error::ModelError;
pub use io::{ModelFolder, Save, WeightFiles, is_checkpoint, save, write_policy};
pub use layers::{
    BatchCapacity, Checkpointing, DivergencePass, Gradient, LayerExecutor, PipelineOps,
    PolicyAndReferenceScores, RankOrder, SavedActivations, TeacherHead, TeacherRows, TensorParallelOps,
};
pub use layout::{LayerId, LayerLayout, ParamKind, ParamSpec, PipelineStage, TensorParallelShard};
pub use lora::{Adapter, AdapterConfig, AdapterKind, Targets};
pub use names::{TrainedTensor, trained_names, trained_tensors};
pub use spec::{Config, DecoderSpec};
pub use weights::{
    AdapterWeights, FlatLayer, FlatWeights, GradientSink, LayerGradients, LayerWeights, PackedLayer,
    PackedMatrix, Packing, ResidentGradients, ResidentWeights, WeightSource, WholeMatrix,
};

/// Result of an operation on a model.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;
