//! What ranks call, from dry runs: the same everywhere, and as much as the documentation says.

use tandem_comm::Operation;
use tandem_train::dry_run;
use tandem_train::events::Silent;
use tandem_train::prepare::Prepared;

use crate::small::Small;

const SHARDINGS: [&str; 4] = ["ddp", "zero1", "zero2", "zero3"];

#[test]
fn every_rank_of_up_to_1024_makes_the_same_calls_in_the_same_order() {
    let small = Small::new("dpo");
    for sharding in SHARDINGS {
        let sharding = format!("compute.sharding={sharding}");
        for dtype in ["compute.dtype=f32", "compute.dtype=bf16"] {
            let config = small.config("run", &["reference.kind=model", &sharding, dtype]);
            let prepared = Prepared::open(&config, &mut Silent).unwrap();
            for num_ranks in [2, 3, 8, 64, 1024] {
                let first = dry_run::calls(&config, &prepared, 0, num_ranks).unwrap();
                assert!(first.len() >= 5, "{sharding}: {first:?}");
                for rank in 1..num_ranks {
                    let found = dry_run::calls(&config, &prepared, rank, num_ranks).unwrap();
                    assert!(found == first, "{sharding} {dtype}: rank {rank} of {num_ranks}");
                }
            }
        }
    }
}

/// The formulas of docs/ranks.md, in bytes for each parameter; a layer's padding counts as parameters.
#[test]
fn ranks_send_what_the_documentation_says() {
    let small = Small::new("dpo");
    for (sharding, reduction, expected) in [
        ("ddp", "exact", 2.0 * 8.0),
        ("ddp", "fast", 2.0 * 4.0),
        ("zero1", "exact", 8.0 + 4.0),
        ("zero1", "fast", 4.0 + 4.0),
        ("zero2", "exact", 8.0 + 4.0),
        ("zero2", "fast", 4.0 + 4.0),
    ] {
        let [sharding, reduction] =
            [format!("compute.sharding={sharding}"), format!("compute.reduction={reduction}")];
        // One micro-batch on each of two ranks.
        let one_round = ["reference.kind=model", "train.micro_batch_size=4"];
        let config = small.config("run", &[&one_round[..], &[&sharding, &reduction]].concat());
        let prepared = Prepared::open(&config, &mut Silent).unwrap();
        let calls = dry_run::calls(&config, &prepared, 0, 2).unwrap();
        let decoder = &prepared.decoder;
        let elements: usize = decoder.layers().into_iter().map(|layer| decoder.layout(layer).len).sum();
        // Metrics and norms are all-reduced in f64 and do not grow with the model.
        let large =
            calls.iter().map(|(_, call)| call).filter(|call| call.kind != tandem_comm::ElementKind::F64);
        let sent: u64 = large.map(|call| call.bytes_sent(2)).sum();
        // Two ranks: (N - 1) / N is a half.
        let found = 2.0 * sent as f64 / elements as f64;
        assert!(
            (found - expected).abs() < 0.01,
            "{sharding} {reduction}: {found} bytes, expected {expected}"
        );
    }
}

#[test]
fn a_sharded_layer_is_gathered_once_on_the_way_there_and_once_on_the_way_back() {
    let small = Small::new("dpo");
    let overrides = ["reference.kind=model", "train.micro_batch_size=4", "compute.sharding=zero3"];
    let config = small.config("run", &overrides);
    let prepared = Prepared::open(&config, &mut Silent).unwrap();
    let calls = dry_run::calls(&config, &prepared, 1, 2).unwrap();
    let gathers = calls.iter().filter(|(_, call)| call.operation == Operation::AllGather).count();
    // Embedding, two blocks and the head for the reference; the same for the policy, which then goes back through the
    // blocks: the head is still there, and the embedding's backward needs no weights.
    assert_eq!(gathers, 4 + 4 + 2);
    let reduced = calls.iter().filter(|(_, call)| matches!(call.operation, Operation::ReduceScatter(_)));
    assert_eq!(reduced.count(), 4, "each layer once");
}
