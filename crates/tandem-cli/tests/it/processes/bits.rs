//! Processes give the bits of one rank, or of as many threads.

use serde_json::{Value, json};

use super::{configure, same_runs};
use crate::workshop::Workshop;

/// A run's plan without the buffers between its processes, which threads do not have.
fn plan(shop: &Workshop, run: &str) -> Value {
    let mut plan: Value = serde_json::from_slice(&shop.bytes(&format!("{run}/plan.json"))).unwrap();
    let buffers = plan["bytes_of_exchange_buffers"].as_u64().unwrap();
    let outside = plan["bytes_outside_the_arena"].as_u64().unwrap();
    plan["bytes_outside_the_arena"] = (outside - buffers).into();
    plan["bytes_of_exchange_buffers"] = 0.into();
    plan
}

#[test]
fn processes_give_the_same_as_one() {
    let shop = Workshop::new();
    let whole = configure(&shop, "whole", 20);
    shop.run(&["train", &whole]).expect(0);
    for (ranks, sharding, replicate) in [
        ("2", "ddp", 1),
        ("3", "zero1", 1),
        ("2", "zero2", 1),
        ("3", "zero3", 1),
        ("4", "zero2", 2),
        ("4", "zero3", 2),
        ("8", "zero3", 1),
    ] {
        let run = format!("run{ranks}{sharding}");
        let config = configure(&shop, &run, 20);
        let [sharding, replicas] =
            [format!("compute.sharding={sharding}"), format!("compute.replicate={replicate}")];
        let settings = ["--set", &sharding, "--set", &replicas, "--set", "compute.threads=1"];
        shop.run(&[&["launch", "-n", ranks, "train", &config][..], &settings].concat()).expect(0);
        same_runs(&shop, &run, "whole");
        // Ranks that are threads need as much memory, and send as much.
        let config = configure(&shop, &format!("{run}threads"), 20);
        let devices = format!("compute.devices=cpu:{ranks}");
        shop.run(&[&["train", &config, "--set", &devices][..], &settings].concat()).expect(0);
        assert_eq!(plan(&shop, &run), plan(&shop, &format!("{run}threads")));
    }
}

#[test]
fn processes_give_the_same_as_one_in_every_recipe() {
    let shop = Workshop::new();
    let answer = |i: usize| json!({"prompt": format!("Count to {i}."), "completion": format!(" {i} is enough{}", ".".repeat(i % 7))});
    shop.write_rows("completions.jsonl", 24, answer);
    for (name, recipe) in [
        ("model", &["reference.kind=model"][..]),
        ("ipo", &["reference.kind=model", "objective.loss=ipo"]),
        ("none", &["reference.kind=none", "objective.reference_free=true"]),
        ("sft", &["method=sft", "data.train=completions.jsonl"]),
    ] {
        let settings: Vec<&str> = recipe.iter().flat_map(|setting| ["--set", *setting]).collect();
        let config = configure(&shop, name, 20);
        shop.run(&[&["train", &config][..], &settings].concat()).expect(0);
        for (ranks, sharding, replicate) in [("3", "zero3", 1), ("4", "zero2", 2), ("2", "ddp", 1)] {
            let run = format!("{name}{ranks}");
            let config = configure(&shop, &run, 20);
            let [sharding, replicas] =
                [format!("compute.sharding={sharding}"), format!("compute.replicate={replicate}")];
            let mesh = ["--set", &sharding, "--set", &replicas];
            shop.run(&[&["launch", "-n", ranks, "train", &config][..], &settings, &mesh].concat()).expect(0);
            same_runs(&shop, &run, name);
        }
    }
}

/// A sum of two has one order, so two processes that hold a model in slices give the bits of two threads that do.
#[test]
fn processes_hold_a_model_in_slices_as_threads_do() {
    let shop = Workshop::new();
    let mut model = shop.write_config("model");
    model["num_key_value_heads"] = 2.into();
    shop.write("model/config.json", &model.to_string());
    for (ranks, sharding) in [("2", "ddp"), ("4", "zero3")] {
        let sharding = format!("compute.sharding={sharding}");
        let settings = ["--set", &sharding, "--set", "compute.tensor=2", "--set", "weights=random"];
        let threads = configure(&shop, &format!("threads{ranks}"), 4);
        let devices = format!("compute.devices=cpu:{ranks}");
        shop.run(&[&["train", &threads, "--set", &devices][..], &settings].concat()).expect(0);
        let processes = configure(&shop, &format!("processes{ranks}"), 4);
        shop.run(&[&["launch", "-n", ranks, "train", &processes][..], &settings].concat()).expect(0);
        same_runs(&shop, &format!("processes{ranks}"), &format!("threads{ranks}"));
        let plans = ["processes", "threads"].map(|run| plan(&shop, &format!("{run}{ranks}")));
        assert_eq!(plans[0], plans[1]);
    }
    let config = configure(&shop, "refused", 4);
    let refused = shop.run(&["launch", "-n", "3", "train", &config, "--set", "compute.tensor=2"]);
    refused.expect(2).says(&["compute.tensor = 2, but there are 3 ranks"]);
}

/// Stages change no bit, whoever carries what goes between them; the plan tells each.
#[test]
fn processes_hold_a_model_in_stages_and_give_the_same_as_one() {
    let shop = Workshop::new();
    let mut model = shop.write_config("model");
    model["num_hidden_layers"] = 3.into();
    model["tie_word_embeddings"] = true.into();
    shop.write("model/config.json", &model.to_string());
    let random = ["--set", "weights=random", "--set", "compute.threads=1"];
    let whole = configure(&shop, "whole", 4);
    shop.run(&[&["train", &whole][..], &random].concat()).expect(0);
    for (ranks, stages, sharding) in [("3", "3", "ddp"), ("4", "2", "zero3")] {
        let [stages, sharding] =
            [format!("compute.pipeline={stages}"), format!("compute.sharding={sharding}")];
        let settings = [&["--set", &stages, "--set", &sharding][..], &random].concat();
        let threads = configure(&shop, &format!("threads{ranks}"), 4);
        let devices = format!("compute.devices=cpu:{ranks}");
        let on_threads = [&["--set", &devices][..], &settings].concat();
        shop.run(&[&["train", &threads][..], &on_threads].concat()).expect(0);
        let processes = configure(&shop, &format!("processes{ranks}"), 4);
        shop.run(&[&["launch", "-n", ranks, "train", &processes][..], &settings].concat()).expect(0);
        same_runs(&shop, &format!("processes{ranks}"), "whole");
        same_runs(&shop, &format!("threads{ranks}"), "whole");
        let plans = ["processes", "threads"].map(|run| plan(&shop, &format!("{run}{ranks}")));
        assert_eq!(plans[0], plans[1]);
        if ranks == "3" {
            let planned = shop.run(&[&["plan", &threads][..], &on_threads].concat()).expect(0);
            for stage in
                ["stage 1 of 3, with blocks 0 to 0", "stage 2 of 3", "stage 3 of 3, with blocks 2 to 2"]
            {
                assert!(planned.stdout.contains(stage), "{}", planned.stdout);
            }
        }
    }
    let config = configure(&shop, "refused", 4);
    let refused = shop.run(&["launch", "-n", "3", "train", &config, "--set", "compute.pipeline=2"]);
    refused.expect(2).says(&["compute.pipeline = 2, but there are 3 ranks"]);
}

/// Each rank profiles itself, and the first one shows its table.
#[test]
fn processes_profile_themselves_and_give_the_same_bits() {
    let shop = Workshop::new();
    let plain = configure(&shop, "plain", 9);
    shop.run(&["launch", "-n", "2", "train", &plain]).expect(0);
    let config = configure(&shop, "profiled", 9);
    let table = "rank 0 of 2, steps 3 to 7: ";
    let outcome = shop.run(&["launch", "-n", "2", "train", &config, "--profile"]).expect(0).says(&[table]);
    assert!(!outcome.stderr.contains("rank 1 of 2, steps"), "{}", outcome.stderr);
    same_runs(&shop, "profiled", "plain");
    for rank in 0..2 {
        let text = shop.read(&format!("profiled/profile/rank-{rank}.txt"));
        assert!(text.starts_with(&format!("rank {rank} of 2, steps 3 to 7: ")), "{text}");
        for row in ["linear_backward_weight", "adamw", "all_reduce", "outside operations"] {
            assert!(text.contains(&format!("  {row} ")), "no {row} in\n{text}");
        }
        for file in ["json", "trace.json"] {
            let text = shop.read(&format!("profiled/profile/rank-{rank}.{file}"));
            serde_json::from_str::<serde_json::Value>(&text).unwrap_or_else(|e| panic!("{file}: {e}"));
        }
    }
}
