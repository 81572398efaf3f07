//! Policies as they train: an adapter beside a base, whole or packed.

use tandem_kernels::{DType, Device, Format, MemoryKind};
use tandem_model::{Adapter, AdapterConfig, AdapterKind, Decoder, FlatWeights, ResidentWeights, Targets};

use super::check_log_probs;
use crate::support::adapted::{Adapted, adapter_weights, config};
use crate::support::packed::Packed;
use crate::support::{Golden, all, cpu};

/// A policy of which no factor is zero: its decoder, and what trains.
fn policy(
    golden: &Golden,
    device: &Device,
    base: &FlatWeights,
    config: AdapterConfig,
) -> (Decoder, FlatWeights) {
    let adapter = Adapter::new(config, golden.decoder.spec()).unwrap();
    let decoder = golden.decoder.clone().with_adapter(adapter);
    let weights = adapter_weights(&decoder, device, base);
    (decoder, weights)
}

fn check(name: &'static str, config: AdapterConfig) {
    let (golden, device) = (Golden::new(name), cpu());
    let base = golden.load(&device);
    let (decoder, weights) = policy(&golden, &device, &base, config.clone());
    for dtype in [DType::F32, DType::Bf16] {
        let copy_of = |decoder: &Decoder, weights: &FlatWeights| {
            (dtype != DType::F32)
                .then(|| weights.compute_copy(decoder, &device, MemoryKind::Weights, dtype).unwrap())
        };
        let copies = [copy_of(&golden.decoder, &base), copy_of(&decoder, &weights)];
        let mut policy = Adapted {
            decoder: &decoder,
            base: ResidentWeights::new(&golden.decoder, &base, copies[0].as_ref()),
            weights: &weights,
            copy: copies[1].as_ref(),
            fetched: Vec::new(),
        };
        let with = check_log_probs(&golden, &decoder, &device, dtype, &mut policy);
        let without = check_log_probs(&golden, &golden.decoder, &device, dtype, &mut policy.base);
        assert_ne!(with, without, "{name} {config:?} {dtype}: the adapter is part of it");
    }
}

#[test]
fn an_adapters_log_probs_are_those_of_a_training_pass() {
    for &name in all() {
        for kind in [AdapterKind::Lora, AdapterKind::Dora] {
            check(name, config(kind, Targets::AllLinear, &[]));
        }
    }
    let names = |names: &[&str]| Targets::Names(names.iter().map(|&n| n.to_owned()).collect());
    let tables = names(&["embed_tokens", "lm_head", "q_proj", "down_proj"]);
    check("llama", config(AdapterKind::Lora, tables, &["norm", "o_proj"]));
    check("llama", config(AdapterKind::Lora, names(&["up_proj"]), &["embed_tokens", "lm_head"]));
}

#[test]
fn a_packed_bases_log_probs_are_those_of_a_training_pass() {
    let lora = config(AdapterKind::Lora, Targets::AllLinear, &[]);
    for &name in all() {
        for format in [Format::Bf16, Format::Int8, Format::Fp8, Format::Nf4] {
            for dtype in [DType::F32, DType::Bf16] {
                let (golden, device) = (Golden::new(name), cpu());
                let base = golden.load(&device);
                let (decoder, weights) = policy(&golden, &device, &base, lora.clone());
                let copy = (dtype != DType::F32)
                    .then(|| weights.compute_copy(&decoder, &device, MemoryKind::Weights, dtype).unwrap());
                let mut policy = Adapted {
                    decoder: &decoder,
                    base: Packed::new(&decoder, &device, &base, format, dtype),
                    weights: &weights,
                    copy: copy.as_ref(),
                    fetched: Vec::new(),
                };
                check_log_probs(&golden, &decoder, &device, dtype, &mut policy);
            }
        }
    }
}
