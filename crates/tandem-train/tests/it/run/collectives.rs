//! Collective calls of ranks, from dry runs: the same everywhere, and as documented.

use tandem_comm::{Call, Operation};
use tandem_kernels::{DType, Format};
use tandem_model::{Decoder, LayerId, Packing};
use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::plan::dry_run;

use super::tensor::{config_of, write_model};
use crate::small::Small;

/// The group of those that hold the same part, where there is no tensor axis.
const REPLICAS: usize = 2;

/// Sharding and replicas, which every number of ranks below is a multiple of.
const MESHES: [(&str, usize); 7] =
    [("ddp", 1), ("zero1", 1), ("zero2", 1), ("zero3", 1), ("zero1", 2), ("zero2", 4), ("zero3", 2)];

#[test]
fn every_rank_of_up_to_1024_makes_the_same_calls_in_the_same_order() {
    let small = Small::new("dpo");
    for (sharding, replicate) in MESHES {
        let [sharding, replicas_of] =
            [format!("compute.sharding={sharding}"), format!("compute.replicate={replicate}")];
        for (dtype, most) in [("compute.dtype=f32", 1024), ("compute.dtype=bf16", 64)] {
            let config = small.config("run", &["reference.kind=model", &sharding, &replicas_of, dtype]);
            let prepared = RunInputs::open(&config, &mut Silent).unwrap();
            for num_ranks in [2, 3, 8, 64, 1024] {
                if num_ranks % replicate != 0 || num_ranks > most {
                    continue;
                }
                let calls = |rank| dry_run::calls(&config, &prepared, rank, num_ranks).unwrap();
                let first = calls(0);
                assert!(first.len() >= 4, "{sharding}: {first:?}");
                // Replicas hold the same part; parts may differ in length, and so do calls about them.
                let shards = num_ranks / replicate;
                let but_for_replicas = |calls: &[(usize, Call)]| -> Vec<(usize, Call)> {
                    let twin = second_group(calls, REPLICAS);
                    let is_other = |group| replicate == 1 || group != REPLICAS && Some(group) != twin;
                    calls.iter().filter(|(group, _)| is_other(*group)).copied().collect()
                };
                let replicas = if replicate == 1 { Vec::new() } else { (0..shards).map(calls).collect() };
                for rank in 1..num_ranks {
                    let found = calls(rank);
                    let place = format!("{sharding} {replicas_of} {dtype}: rank {rank} of {num_ranks}");
                    assert!(but_for_replicas(&found) == but_for_replicas(&first), "{place}");
                    assert!(replicas.get(rank % shards).is_none_or(|alike| found == *alike), "{place}");
                }
            }
        }
    }
}

/// A step of one rank in groups of up to 4,096: the same calls however many ranks there are.
#[test]
fn calls_of_a_step_do_not_grow_with_the_ranks() {
    let small = Small::new("dpo");
    let mut config = config_of("llama");
    (config["num_hidden_layers"], config["num_key_value_heads"]) = (4.into(), 8.into());
    let model = write_model(&small, "four", &config);
    for (sharding, more) in [
        ("ddp", &[][..]),
        ("zero1", &[]),
        ("zero2", &["compute.replicate=2"]),
        ("zero3", &[]),
        ("zero3", &["compute.tensor=8", "compute.pipeline=2"]),
        ("ddp", &["compute.tensor=4", "compute.pipeline=4"]),
    ] {
        let sharding = format!("compute.sharding={sharding}");
        let settings = [&[model.as_str(), "reference.kind=model", &sharding], more].concat();
        let config = small.config("run", &settings);
        let prepared = RunInputs::open(&config, &mut Silent).unwrap();
        let calls = |rank, ranks| dry_run::calls(&config, &prepared, rank, ranks).unwrap();
        // A rank's first group is the world, which exchanges metrics. A rank of the last group has no micro-batch.
        let counts = |ranks: usize| [0, ranks - 1].map(|rank| calls(rank, ranks).len());
        let expected = counts(64);
        for ranks in [256, 1024, 4096] {
            assert_eq!(counts(ranks), expected, "{sharding} {more:?} on {ranks} ranks");
        }
        // Nor do bytes, up to the part (N - 1) / N of a ring.
        let bytes = |ranks: usize| -> u64 {
            calls(0, ranks).iter().map(|(_, call)| call.bytes_sent(ranks)).sum::<u64>()
        };
        assert!(bytes(4096) * 100 <= bytes(64) * 103, "{sharding} {more:?}: {} bytes", bytes(4096));
    }
}

/// The group that was split off a group for calls beside its own.
fn second_group(calls: &[(usize, Call)], of: usize) -> Option<usize> {
    let splits = calls.iter().filter(|(_, call)| call.operation == Operation::Split);
    splits.map(|(group, _)| *group).position(|group| group == of).map(|index| index + 1)
}

/// The formulas of docs/ranks.md, in bytes for each parameter; a layer's padding counts as parameters.
#[test]
fn ranks_send_what_the_documentation_says() {
    let small = Small::new("dpo");
    for (sharding, replicate, reduction, expected) in [
        ("ddp", 1, "exact", 2.0 * 8.0),
        ("ddp", 1, "fast", 2.0 * 4.0),
        ("ddp", 1, "fast bf16", 2.0 * 2.0),
        ("zero1", 1, "exact", 8.0 + 4.0),
        ("zero1", 1, "fast", 4.0 + 4.0),
        ("zero2", 1, "exact", 8.0 + 4.0),
        ("zero2", 1, "fast", 4.0 + 4.0),
        ("zero2", 1, "fast bf16", 2.0 + 4.0),
        // Two groups of two: what is a rank's part, a half, goes once more between the groups, there and back.
        ("zero1", 2, "exact", 8.0 + 4.0 + 2.0 * 8.0 / 2.0),
        ("zero2", 2, "exact", 8.0 + 4.0 + 2.0 * 8.0 / 2.0),
        ("zero2", 2, "fast", 4.0 + 4.0 + 2.0 * 4.0 / 2.0),
        // Forward; the blocks, backward, and the reference below.
        ("zero3", 1, "exact", 8.0 + 4.0),
        ("zero3", 1, "fast", 4.0 + 4.0),
        ("zero3", 2, "exact", 8.0 + 4.0 + 2.0 * 8.0 / 2.0),
    ] {
        let (reduction, dtype) = reduction.split_once(' ').unwrap_or((reduction, "f32"));
        let [sharding, replicas, reduction, dtype] = [
            format!("compute.sharding={sharding}"),
            format!("compute.replicate={replicate}"),
            format!("compute.reduction={reduction}"),
            format!("compute.reduce_dtype={dtype}"),
        ];
        // One micro-batch on each of two ranks; where there are four, two walk along.
        let one_round = ["reference.kind=model", "train.micro_batch_size=4"];
        let config =
            small.config("run", &[&one_round[..], &[&sharding, &replicas, &reduction, &dtype]].concat());
        let prepared = RunInputs::open(&config, &mut Silent).unwrap();
        let calls = (0..2 * replicate)
            .flat_map(|rank| dry_run::calls(&config, &prepared, rank, 2 * replicate).unwrap());
        let decoder = &prepared.decoder;
        let len = |layer: &LayerId| decoder.layout(*layer).len;
        let elements: usize = decoder.layers().iter().map(len).sum();
        let in_blocks: usize =
            decoder.layers().iter().filter(|layer| matches!(layer, LayerId::Block(_))).map(len).sum();
        let reference: usize = decoder.layers().iter().map(|&layer| packed(decoder, layer)).sum();
        let gathered = (4 * in_blocks + reference) as f64 / elements as f64;
        let expected = expected + if sharding.ends_with("zero3") { gathered } else { 0.0 };
        // Metrics and norms are all-reduced in f64 and do not grow with the model.
        let large = calls.map(|(_, call)| call).filter(|call| call.kind != tandem_comm::ElementKind::F64);
        let sent: u64 = large.map(|call| call.bytes_sent(2)).sum();
        // Groups of two ranks: (N - 1) / N is a half. Parts are whole blocks, so the ranks' mean is what a rank sends.
        let found = 2.0 * sent as f64 / (2 * replicate * elements) as f64;
        assert!(
            (found - expected).abs() < 0.01,
            "{sharding} {replicas} {reduction} {dtype}: {found} bytes, expected {expected}"
        );
    }
}

/// Bytes of a frozen layer in f32.
fn packed(decoder: &Decoder, layer: LayerId) -> usize {
    Packing::new(decoder, layer, Format::F32, DType::F32).len()
}

#[test]
fn a_sharded_layer_is_gathered_once_on_the_way_there_and_once_on_the_way_back() {
    let small = Small::new("dpo");
    let overrides = ["reference.kind=model", "train.micro_batch_size=4", "compute.sharding=zero3"];
    let config = small.config("run", &overrides);
    let prepared = RunInputs::open(&config, &mut Silent).unwrap();
    let calls = dry_run::calls(&config, &prepared, 1, 2).unwrap();
    let gathers = calls.iter().filter(|(_, call)| call.operation == Operation::AllGather).count();
    // Embedding, two blocks and the head for the reference; the same for the policy, which then goes back through the
    // blocks: the head is still there, and the embedding's backward needs no weights.
    assert_eq!(gathers, 4 + 4 + 2);
    let reduced = calls.iter().filter(|(_, call)| matches!(call.operation, Operation::ReduceScatter(_)));
    assert_eq!(reduced.count(), 4, "each layer once");
}

/// A layer is gathered before the one that runs is done, and reduced before the next one is: each in a group of its own.
#[test]
fn gathers_run_ahead_and_reductions_behind() {
    let small = Small::new("dpo");
    let overrides = ["reference.kind=model", "train.micro_batch_size=4", "compute.sharding=zero3"];
    let config = small.config("run", &overrides);
    let prepared = RunInputs::open(&config, &mut Silent).unwrap();
    let calls = dry_run::calls(&config, &prepared, 0, 2).unwrap();
    let decoder = &prepared.decoder;
    let lengths: Vec<usize> = decoder.layers().into_iter().map(|layer| decoder.layout(layer).len).collect();
    let [embedding, block, other, head] = lengths[..] else { panic!("two blocks") };
    assert_eq!(block, other);
    let layers = calls.iter().filter_map(|(group, call)| match call.operation {
        Operation::AllGather => Some((*group, "gather", call.len)),
        Operation::ReduceScatter(_) => Some((*group, "reduce", call.len)),
        _ => None,
    });
    let layers: Vec<_> = layers.collect();
    // In the order in which they are made: the world, and split off it the policy's group, the reference's, the sums'.
    let (policy, reference, sums) = (1, 2, 3);
    let forward = [embedding, block, block, head].map(|len| (policy, "gather", len));
    // Frozen layers travel as bytes.
    let [first, middle, last] =
        [LayerId::Embedding, LayerId::Block(0), LayerId::Head].map(|layer| packed(decoder, layer));
    let of_reference = [first, middle, middle, last].map(|len| (reference, "gather", len));
    let backward = [
        (policy, "gather", block),
        (sums, "reduce", head),
        (policy, "gather", block),
        (sums, "reduce", block),
        (sums, "reduce", block),
        (sums, "reduce", embedding),
    ];
    assert_eq!(layers, [&of_reference[..], &forward, &backward].concat());
}
