//! A model in memory, with its tokenizer.

use std::path::Path;

use tandem_data::chat_template::RenderOptions;
use tandem_data::record::Message;
use tandem_data::tokenizer::Tokenizer;
use tandem_kernels::{Backend, DType, Device, MemoryKind, cuda};
use tandem_model::{
    Decoder, FlatWeights, Generator, GeneratorOptions, Merged, ModelFolder, PeftFolder, ResidentWeights,
};
use tandem_train::{TrainError, chain};

use crate::args::{ComputeArguments, ComputeType, Place, WeightArguments};

/// Limits that a model is loaded for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GenerationLimits {
    /// Most tokens of a prompt and its completion.
    pub positions: usize,
    /// Most tokens of all prompts and completions in progress.
    pub cache_tokens: usize,
    /// Most completions in progress.
    pub max_batch: usize,
    /// Whether log-probabilities are reported.
    pub log_probs: bool,
}

pub(crate) struct Loaded {
    tokenizer: Tokenizer,
    decoder: Decoder,
    device: Device,
    dtype: DType,
    weights: FlatWeights,
    /// Copy in the compute type, if it differs from the stored type.
    copy: Option<FlatWeights>,
    room: GenerationLimits,
}

impl Loaded {
    /// Loads a model and its tokenizer within the limits of `room`.
    pub(crate) fn open(
        WeightArguments { model: folder, adapter }: &WeightArguments,
        tokenizer: Tokenizer,
        room: GenerationLimits,
        compute: &ComputeArguments,
    ) -> tandem_train::Result<Self> {
        let model = ModelFolder::open(folder)?;
        let adapter = adapter.as_deref().map(PeftFolder::open).transpose()?;
        let merged = adapter.map(|adapter| Merged::open(&model, &adapter, room.positions)).transpose()?;
        let decoder = match &merged {
            Some(merged) => merged.decoder().clone(),
            None => Decoder::new(model.spec().clone(), room.positions)?,
        };
        let device = open(compute, address_space(&decoder, room.cache_tokens))?;
        let decoder = decoder.alone_on(device.backend());
        let weights = match &merged {
            Some(merged) => merged.load(&device, MemoryKind::Master)?,
            None => model.weights(&decoder)?.load(&decoder, &device, MemoryKind::Master)?,
        };
        let (dtype, copy) = match compute.dtype {
            ComputeType::F32 => (DType::F32, None),
            ComputeType::Bf16 => {
                let copy = weights.compute_copy(&decoder, &device, MemoryKind::Weights, DType::Bf16)?;
                (DType::Bf16, Some(copy))
            }
        };
        Ok(Self { tokenizer, decoder, device, dtype, weights, copy, room })
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Number of token ids.
    pub(crate) fn vocabulary(&self) -> usize {
        self.decoder.spec().vocab_size
    }

    pub(crate) fn room(&self) -> GenerationLimits {
        self.room
    }

    /// The weights, for [`Generator::step`].
    pub(crate) fn source(&self) -> ResidentWeights<'_> {
        ResidentWeights::new(&self.decoder, &self.weights, self.copy.as_ref())
    }

    /// Creates a generator with its own KV cache.
    pub(crate) fn generator(&self) -> tandem_model::Result<Generator<'_>> {
        let GenerationLimits { cache_tokens, max_batch, log_probs, .. } = self.room;
        // Other completions wait for a pass over prompts.
        let prefill_tokens = match self.device.backend() {
            Backend::Cpu => 1024,
            Backend::Cuda => 8192,
        };
        let options =
            GeneratorOptions { max_batch, cache_tokens, prefill_tokens, log_probs, planned_prefill: None };
        Generator::new(&self.decoder, &self.device, self.dtype, options)
    }
}

/// Returns the smaller of `wanted` and the model's context length.
pub(crate) fn positions_of(folder: &Path, wanted: usize) -> tandem_model::Result<usize> {
    Ok(ModelFolder::open(folder)?.spec().context().min(wanted))
}

/// Loads the tokenizer of a model and its adapter.
pub(crate) fn tokenizer_of(weights: &WeightArguments) -> tandem_train::Result<Tokenizer> {
    Ok(Tokenizer::from_model(&weights.model, weights.adapter.as_deref())?)
}

/// Encodes a conversation up to the start of the next completion.
pub(crate) fn encode_chat(tokenizer: &Tokenizer, messages: &[Message]) -> tandem_data::Result<Vec<u32>> {
    tokenizer.encode_chat(messages, RenderOptions { add_generation_prompt: true, ..RenderOptions::default() })
}

pub(crate) fn message(role: &str, content: &str) -> Message {
    [("role", role), ("content", content)]
        .map(|(key, value)| (key.to_owned(), value.into()))
        .into_iter()
        .collect()
}

/// Opens the device with an address space of `capacity` bytes.
///
/// # Errors
/// The machine lacks the GPU of `--device`, or it cannot be opened.
pub(crate) fn open(compute: &ComputeArguments, capacity: usize) -> tandem_train::Result<Device> {
    let gpu = match compute.device {
        Place::Cpu => None,
        Place::Auto => cuda::list().is_ok_and(|gpus| !gpus.is_empty()).then_some(0),
        Place::Cuda(ordinal) => {
            let missing = |why| TrainError::Mismatch { reason: format!("--device cuda:{ordinal}: {why}") };
            let num_gpus = cuda::list().map_err(|error| missing(chain(&error)))?.len();
            if ordinal >= num_gpus {
                return Err(missing(format!("this process may use {num_gpus} GPUs, counted from 0")));
            }
            Some(ordinal)
        }
    };
    let threads =
        || compute.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    Ok(match gpu {
        Some(ordinal) => Device::open_cuda(ordinal, capacity, cuda::Options::default())?,
        None => Device::cpu(threads(), capacity)?,
    })
}

/// Address space in bytes for weights, KV cache and activations. Pages cost nothing until they are
/// touched.
pub(crate) fn address_space(decoder: &Decoder, cache_tokens: usize) -> usize {
    let spec = decoder.spec();
    let per_token = 16 * spec.hidden_size * (decoder.layers().len() + 8) + 8 * spec.vocab_size;
    8 * decoder.num_parameters() + cache_tokens * per_token + (4 << 30)
}
