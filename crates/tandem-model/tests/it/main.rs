//! Folders, forward and backward passes, generation and adapters beside numbers of transformers and peft.

mod adapters;
mod folders;
mod generate;
mod gguf;
mod goldens;
mod models_page;
mod peft;
mod quantised;
mod rewards;
mod rotary;
mod split;
mod stages;
mod support;
mod vision;
mod walk;
