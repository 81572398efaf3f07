//! A model in memory, with its tokenizer.

use std::path::Path;

use tandem_data::chat_template::RenderOptions;
use tandem_data::record::Message;
use tandem_data::tokenizer::Tokenizer;
use tandem_kernels::{DType, Device, KernelError, Kind, cuda};
use tandem_model::{
    Decoder, FlatWeights, Generator, GeneratorOptions, Merged, ModelFolder, PeftFolder, ResidentWeights,
};

use crate::args::{ComputeArguments, ComputeType, Place, WeightArguments};

/// Tokens of prompts that are computed at once, at most.
const PREFILL_TOKENS: usize = 4096;

/// How much text a model is loaded for.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Tokens of a prompt and its answer, at most.
    pub positions: usize,
    /// Tokens of all prompts and answers under way, at most.
    pub cache_tokens: usize,
    /// Answers under way, at most.
    pub max_batch: usize,
    /// Whether log-probabilities are told.
    pub log_probs: bool,
}

/// A model in memory.
pub struct Loaded {
    tokenizer: Tokenizer,
    decoder: Decoder,
    device: Device,
    dtype: DType,
    weights: FlatWeights,
    /// In the compute type, if that is not the weights'.
    copy: Option<FlatWeights>,
    room: Room,
}

impl Loaded {
    /// Loads a model, with its tokenizer, for texts that fit the room.
    ///
    /// # Errors
    /// If the model, its adapter or its tokenizer cannot be read, or the device is not there or too small.
    pub fn open(
        WeightArguments { model: folder, adapter }: &WeightArguments,
        tokenizer: Tokenizer,
        room: Room,
        compute: &ComputeArguments,
    ) -> tandem_train::Result<Self> {
        let model = ModelFolder::open(folder)?;
        let adapter = adapter.as_deref().map(PeftFolder::open).transpose()?;
        let merged = adapter.map(|adapter| Merged::open(&model, &adapter, room.positions)).transpose()?;
        let decoder = match &merged {
            Some(merged) => merged.decoder().clone(),
            None => Decoder::new(model.spec().clone(), room.positions)?,
        };
        // Of few texts at a time: nothing compares their bits with those of other batches.
        let device = open(compute, address_space(&decoder, room.cache_tokens))?.for_few_rows();
        let weights = match &merged {
            Some(merged) => merged.load(&device, Kind::Master)?,
            None => model.weights(&decoder)?.load(&decoder, &device, Kind::Master)?,
        };
        let (dtype, copy) = match compute.dtype {
            ComputeType::F32 => (DType::F32, None),
            ComputeType::Bf16 => {
                let copy = weights.compute_copy(&decoder, &device, Kind::Weights, DType::Bf16)?;
                (DType::Bf16, Some(copy))
            }
        };
        Ok(Self { tokenizer, decoder, device, dtype, weights, copy, room })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// How much text it is loaded for.
    pub fn room(&self) -> Room {
        self.room
    }

    /// The weights, for [`Generator::step`].
    pub fn source(&self) -> ResidentWeights<'_> {
        ResidentWeights::new(&self.decoder, &self.weights, self.copy.as_ref())
    }

    /// A generator with a cache of its own.
    ///
    /// # Errors
    /// If the device's memory does not suffice.
    pub fn generator(&self) -> tandem_model::Result<Generator<'_>> {
        let Room { cache_tokens, max_batch, log_probs, .. } = self.room;
        let options = GeneratorOptions { max_batch, cache_tokens, prefill_tokens: PREFILL_TOKENS, log_probs };
        Generator::new(&self.decoder, &self.device, self.dtype, options)
    }
}

/// So many positions, or those that the model of a folder has.
///
/// # Errors
/// If there is no such folder, or the model is not supported.
pub fn positions_of(folder: &Path, wanted: usize) -> tandem_model::Result<usize> {
    Ok(ModelFolder::open(folder)?.spec().max_positions.min(wanted))
}

/// A conversation as the model reads it, up to where its answer begins.
///
/// # Errors
/// If there is no chat template, or it refuses the messages.
pub fn encode_chat(tokenizer: &Tokenizer, messages: &[Message]) -> tandem_data::Result<Vec<u32>> {
    tokenizer.encode_chat(messages, RenderOptions { add_generation_prompt: true, ..RenderOptions::default() })
}

/// A message of a conversation.
pub fn message(role: &str, content: &str) -> Message {
    [("role", role), ("content", content)]
        .map(|(key, value)| (key.to_owned(), value.into()))
        .into_iter()
        .collect()
}

/// The device, with an address space of `capacity` bytes.
///
/// # Errors
/// If it is not there, or the system refuses.
pub fn open(compute: &ComputeArguments, capacity: usize) -> Result<Device, KernelError> {
    let gpu = match compute.device {
        Place::Cpu => None,
        Place::Auto => cuda::list().is_ok_and(|gpus| !gpus.is_empty()).then_some(0),
        Place::Cuda(ordinal) => Some(ordinal),
    };
    let threads =
        || compute.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    match gpu {
        Some(ordinal) => Device::open_cuda(ordinal, capacity, cuda::Options::default()),
        None => Device::cpu(threads(), capacity),
    }
}

/// Bytes of address space for weights, cache and activations. It costs nothing until it is touched.
pub fn address_space(decoder: &Decoder, cache_tokens: usize) -> usize {
    let spec = decoder.spec();
    let per_token = 16 * spec.hidden_size * (decoder.layers().len() + 8) + 8 * spec.vocab_size;
    8 * decoder.num_parameters() + cache_tokens * per_token + (4 << 30)
}
