//! Whole runs of a two-layer model on the committed small data: what must hold whatever happens in between.

mod adapters;
mod chat_template;
mod checkpoints;
mod collectives;
mod combinations;
mod data_formats;
mod equivalence;
mod exactness;
mod fake;
mod formats;
mod judges;
mod offload;
mod online;
mod online_judges;
mod pipeline;
mod profile;
mod ranks;
mod resume;
mod reward;
mod safety;
mod server;
mod server_sglang;
mod sglang;
mod states;
mod tensor;
mod vllm;
