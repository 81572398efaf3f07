//! Files of other programs become runs that train as they would have there.

use std::f64::consts::PI;
use std::fs;

use serde_json::Value;
use tandem_train::Config;

use super::{files, shop};

/// A translated file, and the numbers that its own program would have used.
struct Case {
    /// Name of the expected run.toml.
    name: &'static str,
    /// Arguments after `init`.
    arguments: &'static [&'static str],
    output: &'static str,
    /// Rows of a step over all ranks.
    batch: usize,
    steps: usize,
    /// Learning rate of a 0-based step, as the program's scheduler gives it.
    rate: fn(f64) -> f64,
    /// Rank, alpha and modules of the adapter.
    adapter: Option<(u64, f64, &'static [&'static str])>,
}

const ALL_LINEAR: &[&str] = &["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"];

fn linear(peak: f64, warmup: f64, total: f64, step: f64) -> f64 {
    if step < warmup { peak * step / warmup } else { peak * (total - step) / (total - warmup) }
}

fn cosine(peak: f64, warmup: f64, total: f64, step: f64) -> f64 {
    if step < warmup {
        return peak * step / warmup;
    }
    peak * 0.5 * (1.0 + (PI * (step - warmup) / (total - warmup)).cos())
}

fn constant(peak: f64, warmup: f64, step: f64) -> f64 {
    if step < warmup { peak * step / warmup } else { peak }
}

const CASES: [Case; 9] = [
    // 2 × 3 of 24 rows: 4 steps an epoch. 10 % of 8 steps, rounded up, is 1.
    Case {
        name: "trl_sft",
        arguments: &["--from", "trl_sft.yaml", "--ranks", "1"],
        output: "runs/trl-sft",
        batch: 6,
        steps: 8,
        rate: |step| cosine(3e-4, 1.0, 8.0, step),
        adapter: None,
    },
    // TRL's default rate of DPO, its default schedule; 34 % of 3 steps, rounded up, is 2.
    Case {
        name: "trl_dpo",
        arguments: &["--from", "trl_dpo.yaml"],
        output: "runs/trl-dpo",
        batch: 4,
        steps: 3,
        rate: |step| linear(1e-6, 2.0, 3.0, step),
        adapter: None,
    },
    // PEFT's default modules of a Llama; 2 × 2 on each of two processes.
    Case {
        name: "trl_dpo_lora",
        arguments: &["--from", "trl_dpo_lora.sh"],
        output: "runs/trl dpo lora",
        batch: 8,
        steps: 3,
        rate: |step| constant(5e-5, 1.0, step),
        adapter: Some((4, 12.0, &["q_proj", "v_proj"])),
    },
    Case {
        name: "axolotl_dpo_lora",
        arguments: &["--from", "axolotl_dpo_lora.yaml", "--ranks", "2"],
        output: "runs/axolotl-dpo",
        batch: 12,
        steps: 2,
        rate: |step| cosine(4e-4, 2.0, 2.0, step),
        adapter: Some((6, 9.0, &["down_proj", "q_proj", "v_proj"])),
    },
    // The schedule "constant" of transformers has no warm-up, whatever warmup_ratio says.
    Case {
        name: "axolotl_qlora_sft",
        arguments: &["--from", "axolotl_qlora_sft.yml", "--ranks", "1"],
        output: "runs/axolotl-qlora",
        batch: 4,
        steps: 3,
        rate: |_| 2e-4,
        adapter: Some((8, 16.0, ALL_LINEAR)),
    },
    // 18 rows in batches of 6; alpha is twice the rank; 10 % of 3 steps, rounded up, is 1.
    Case {
        name: "llama_factory_dpo",
        arguments: &["--from", "llama_factory_dpo.yaml"],
        output: "runs/llama-factory-dpo",
        batch: 6,
        steps: 3,
        rate: |step| cosine(5e-6, 1.0, 3.0, step),
        adapter: Some((3, 6.0, &["q_proj", "v_proj"])),
    },
    // 24 rows in batches of 2 × 2 on each of two devices; 25 % of 3 steps, rounded up, is 1.
    Case {
        name: "llama_factory_sft",
        arguments: &["--from", "llama_factory_sft.yaml", "--ranks", "2"],
        output: "runs/llama-factory-sft",
        batch: 8,
        steps: 3,
        rate: |step| linear(1e-4, 1.0, 3.0, step),
        adapter: None,
    },
    // The script's number of steps, the launcher's processes, and DeepSpeed's own batch.
    Case {
        name: "accelerate",
        arguments: &["--from", "accelerate.yaml", "--from", "with_accelerate.yaml"],
        output: "runs/accelerate",
        batch: 6,
        steps: 3,
        rate: |step| linear(2e-4, 2.0, 3.0, step),
        adapter: None,
    },
    // 24 examples in batches of 8 over all GPUs.
    Case {
        name: "mitchell",
        arguments: &["--from", "mitchell.sh", "--data", "preferences.jsonl", "--ranks", "4"],
        output: "runs/dpo",
        batch: 8,
        steps: 3,
        rate: |step| constant(1e-4, 2.0, step),
        adapter: None,
    },
];

/// Every file becomes the committed run.toml; `TANDEM_BLESS=1` writes it.
#[test]
fn files_of_other_programs_become_these_runs() {
    let shop = shop();
    for case in &CASES {
        let file = format!("{}.toml", case.name);
        shop.run(&[&["init", &file], case.arguments, &["--no-plan"]].concat()).expect(0);
        let committed = files().join("expected").join(&file);
        let written = shop.read(&file);
        if std::env::var_os("TANDEM_BLESS").is_some() {
            fs::create_dir_all(committed.parent().unwrap()).unwrap();
            fs::write(&committed, written).unwrap();
            continue;
        }
        let expected =
            fs::read_to_string(&committed).unwrap_or_else(|e| panic!("{}: {e}", committed.display()));
        assert_eq!(written, expected, "{file}: TANDEM_BLESS=1 writes it");
    }
}

/// Batch, number of steps, learning rates and adapter of the run itself.
#[test]
fn translated_runs_train_with_the_numbers_of_their_program() {
    let shop = shop();
    for case in &CASES {
        let file = format!("{}.toml", case.name);
        shop.run(&[&["init", &file], case.arguments].concat()).expect(0);
        // A test has neither other programs nor networks.
        let sets = ["compute.devices=cpu", "compute.threads=1", "data.cache=cache", "logging.command=[]"];
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        shop.run(&[&["train", &file], &sets[..]].concat()).expect(0);
        let config = Config::load::<&str>(&shop.path(&format!("{}/config.toml", case.output)), &[]).unwrap();
        assert_eq!(config.train.batch_size, case.batch, "{file}");
        let steps: Vec<Value> =
            shop.metrics(case.output).into_iter().filter(|line| line["split"] == "train").collect();
        assert_eq!(steps.len(), case.steps, "{file}");
        for (index, step) in steps.iter().enumerate() {
            let (found, expected) = (step["learning_rate"].as_f64().unwrap(), (case.rate)(index as f64));
            assert!(
                (found - expected).abs() <= 1e-12 + 1e-9 * expected,
                "{file}: step {index}: {found}, {expected}"
            );
        }
        let adapter = shop.path(&format!("{}/final/adapter_config.json", case.output));
        match case.adapter {
            None => assert!(!adapter.exists(), "{file}"),
            Some((rank, alpha, modules)) => {
                let adapter: Value = serde_json::from_slice(&fs::read(&adapter).unwrap()).unwrap();
                assert_eq!(adapter["r"], rank, "{file}");
                assert_eq!(adapter["lora_alpha"].as_f64(), Some(alpha), "{file}");
                let mut found: Vec<_> = adapter["target_modules"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|name| name.as_str().unwrap())
                    .collect();
                found.sort_unstable();
                assert_eq!(found, modules, "{file}");
            }
        }
    }
}

/// A pair is two completions of a batch, as TRL's `KTOTrainer` unpairs them.
#[test]
fn pairs_for_kto_are_counted_as_completions() {
    let shop = shop();
    shop.write(
        "kto.yaml",
        "base_model: model\nrl: kto\ndatasets:\n  - path: preferences.jsonl\noutput_dir: o\nmicro_batch_size: 4\n\
         num_epochs: 1\nlearning_rate: 1e-5\nsaves_per_epoch: 2\n",
    );
    let outcome = shop.run(&["init", "kto.toml", "--from", "kto.yaml", "--ranks", "1"]).expect(0);
    assert!(outcome.stdout.contains("rows: 48,"), "{outcome:?}");
    let written = shop.read("kto.toml");
    assert!(written.contains("an epoch has 12 steps"), "{written}");
}

/// An epoch of packed rows has the steps of the batch that is written, not of the packed one.
#[test]
fn checkpoints_of_packed_rows_are_due_by_epochs() {
    let shop = shop();
    shop.write(
        "packed.yaml",
        "model_name_or_path: model\ndataset_name: demonstrations.jsonl\noutput_dir: o\n\
         per_device_train_batch_size: 1\npacking: true\nmax_length: 64\nnum_train_epochs: 1\n\
         learning_rate: 1e-5\nsave_strategy: epoch\n",
    );
    shop.run(&["init", "packed.toml", "--from", "packed.yaml", "--ranks", "1"]).expect(0);
    let written: toml::Table = shop.read("packed.toml").parse().unwrap();
    let number = |key: &str| written["train"][key].as_integer().unwrap() as u64;
    assert!(number("batch_size") > 1, "{written}");
    assert_eq!(number("save_every"), 24u64.div_ceil(number("batch_size")), "{written}");
}
