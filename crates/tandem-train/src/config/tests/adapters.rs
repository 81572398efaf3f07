//! `[adapter]`, the references that need one, and formats of what it leaves frozen.

use std::path::Path;

use tandem_kernels::Format;
use tandem_model::{AdapterConfig, AdapterKind, Targets};

use super::{EXAMPLE, load, refusal, set};
use crate::config::{AdapterSection, AdapterStart, Config, ReferenceKind, Sync};

/// The example with its reference's keys replaced.
fn with_reference(reference: &str) -> String {
    let lines = EXAMPLE
        .lines()
        .filter(|line| !line.starts_with("kind =") && !line.starts_with("model = \"models/llama-small-ref"));
    let text: Vec<&str> = lines.collect();
    text.join("\n").replace("[reference]", &format!("[reference]\n{reference}"))
}

fn new(config: &Config) -> &AdapterConfig {
    match config.adapter.as_ref().map(|adapter| &adapter.start) {
        Some(AdapterStart::New(adapter)) => adapter,
        other => panic!("{other:?} is no new adapter"),
    }
}

#[test]
fn an_empty_table_is_lora_of_every_linear_layer() {
    let text = format!("{EXAMPLE}\n[adapter]\n");
    let expected = AdapterConfig {
        kind: AdapterKind::Lora,
        rank: 16,
        alpha: 32.0,
        rank_stabilized: false,
        dropout: 0.0,
        targets: Targets::AllLinear,
        modules_to_save: Vec::new(),
        file: None,
    };
    assert_eq!(new(&load(&text)), &expected);
    assert_eq!(load(EXAMPLE).adapter, None, "without it everything trains");
}

#[test]
fn every_key_arrives_and_is_written_out_again() {
    let configs = [
        set(&[
            "adapter.kind=dora",
            "adapter.rank=8",
            "adapter.alpha=4",
            "adapter.rslora=true",
            "adapter.dropout=0.05",
        ]),
        set(&["adapter.targets=[\"q_proj\", \"mlp.up_proj\"]", "adapter.modules_to_save=[\"lm_head\"]"]),
        set(&["adapter.targets=.*_proj", "compute.format=nf4"]),
        set(&["adapter.start=/adapters/sft", "adapter.dropout=0.1"]),
        load(&with_reference("kind = \"adapter\"\nadapter = \"ref\"\n[adapter]\nrank = 4")),
        load(&with_reference("kind = \"sync\"\nsync_steps = 7\nsync_alpha = 1")),
    ];
    for config in &configs {
        let text = config.to_toml();
        assert_eq!(load(&text), *config, "{text}");
    }
    let start = set(&["adapter.start=/adapters/sft"]).adapter;
    assert_eq!(start.unwrap().dropout, None, "the folder's own");
    let dora = new(&configs[0]);
    assert_eq!(
        (dora.kind, dora.rank, dora.alpha, dora.rank_stabilized, dora.dropout),
        (AdapterKind::Dora, 8, 4.0, true, 0.05)
    );
    let names = ["q_proj", "mlp.up_proj"].map(str::to_owned).to_vec();
    assert_eq!(
        (&new(&configs[1]).targets, &new(&configs[1]).modules_to_save[..]),
        (&Targets::Names(names), &["lm_head".to_owned()][..])
    );
    assert_eq!(new(&configs[2]).targets, Targets::Pattern(".*_proj".to_owned()));
    assert_eq!(configs[2].compute.format, Some(Format::Nf4));
    let started = AdapterSection { start: AdapterStart::Folder("/adapters/sft".into()), dropout: Some(0.1) };
    assert_eq!(configs[3].adapter, Some(started));
    assert_eq!(configs[4].reference.adapter.as_deref().and_then(Path::file_name), Some("ref".as_ref()));
    assert_eq!(configs[5].reference.sync, Sync { steps: 7, alpha: 1.0 });
}

#[test]
fn what_a_started_adapter_is_cannot_be_said_again() {
    for key in
        ["kind=lora", "rank=8", "alpha=1", "rslora=false", "targets=all-linear", "modules_to_save=[\"norm\"]"]
    {
        let error = refusal(EXAMPLE, &["adapter.start=/a", &format!("adapter.{key}")]);
        assert!(error.contains("the adapter in adapter.start defines it"), "{key}: {error}");
    }
}

#[test]
fn values_out_of_range_are_refused() {
    for (text, expected) in [
        ("adapter.rank=0", "an integer from 1 to 4096"),
        ("adapter.alpha=0", "a positive number"),
        ("adapter.dropout=1", "at least 0 and below 1"),
        ("adapter.kind=ia3", "\"lora\", \"dora\""),
        ("adapter.targets=[]", "names of modules"),
        ("adapter.targets=[1]", "names of modules"),
        ("compute.format=int4", "\"f32\", \"bf16\", \"int8\", \"fp8\", \"nf4\""),
        ("adapter.ranks=3", "did you mean `adapter.rank`?"),
    ] {
        let error = refusal(EXAMPLE, &[text]);
        assert!(error.contains(expected), "{text}: {error}");
    }
    for (reference, expected) in
        [("sync_steps = 0", "an integer of at least 1"), ("sync_alpha = 0", "above 0, at most 1")]
    {
        let error = refusal(&with_reference(&format!("kind = \"sync\"\n{reference}")), &[]);
        assert!(error.contains(expected), "{reference}: {error}");
    }
}

#[test]
fn combinations_that_cannot_be_are_refused_with_a_way_out() {
    let cases = [
        ("kind = \"base\"", "", "full training changes the weights that the reference would share"),
        ("kind = \"adapter\"\nadapter = \"a\"", "", "full training changes the weights"),
        ("kind = \"adapter\"", "[adapter]", "no adapter is named; set reference.adapter, or adapter.start"),
        ("kind = \"base\"\nmodel = \"m\"", "[adapter]", "set kind = \"model\""),
        ("kind = \"model\"\nadapter = \"a\"", "[adapter]", "needs kind = \"adapter\" or \"precompute\""),
        (
            "kind = \"precompute\"\nadapter = \"a\"",
            "",
            "needs kind = \"adapter\" or \"precompute\", and the base",
        ),
        (
            "kind = \"model\"",
            "[adapter]\nstart = \"a\"",
            "kind = \"adapter\" keeps a copy of it on the same base",
        ),
        ("kind = \"base\"\nsync_steps = 3", "[adapter]", "only kind = \"sync\" has it"),
    ];
    for (reference, adapter, expected) in cases {
        let error = refusal(&format!("{}\n{adapter}", with_reference(reference)), &[]);
        assert!(error.contains(expected), "{reference} {adapter}: {error}");
    }
    for format in ["int8", "fp8", "nf4"] {
        let error = refusal(EXAMPLE, &[&format!("compute.format={format}")]);
        assert!(error.contains("full training changes every weight"), "{error}");
    }
    let own = "adapter.start=runs/first/final";
    let error = refusal(
        EXAMPLE,
        &[own, &format!("output={}", std::env::current_dir().unwrap().join("runs/first").display())],
    );
    assert!(error.contains("this run writes to that folder"), "{error}");
}

#[test]
fn references_that_share_the_base_are_accepted() {
    for (reference, adapter, kind) in [
        ("kind = \"base\"", "[adapter]", ReferenceKind::Base),
        ("kind = \"adapter\"", "[adapter]\nstart = \"a\"", ReferenceKind::Adapter),
        ("kind = \"adapter\"\nadapter = \"b\"", "[adapter]", ReferenceKind::Adapter),
        ("kind = \"precompute\"\nadapter = \"b\"", "[adapter]", ReferenceKind::Precompute),
        ("kind = \"sync\"", "[adapter]", ReferenceKind::Sync),
        ("kind = \"sync\"", "", ReferenceKind::Sync),
        ("kind = \"model\"", "[adapter]", ReferenceKind::Model),
    ] {
        let config = load(&format!("{}\n{adapter}", with_reference(reference)));
        assert_eq!(config.reference.kind, kind);
    }
}

#[test]
fn weights_that_the_bases_folder_does_not_have_are_refused() {
    let error = refusal(EXAMPLE, &["adapter.rank=4", "weights=policy.pt"]);
    assert!(error.contains("`weights`"), "{error}");
    assert!(error.contains("would name the base model") && error.contains("as policy.pt"), "{error}");
}
