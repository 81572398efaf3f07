//! Mistakes in other programs' files, and texts of theirs in the file that is written.

use tandem_train::Config;

use super::shop;

#[test]
fn mistakes_name_file_line_and_setting() {
    let shop = shop();
    let base = "model_name_or_path: model\ndataset_name: preferences.jsonl\noutput_dir: o\nbeta: 0.1\n";
    for (name, line, said) in [
        (
            "number.yaml",
            "learning_rate: fast",
            "number.yaml:5: `learning_rate`: expected a number, found fast",
        ),
        (
            "loss.yaml",
            "loss_type: spin",
            "loss.yaml:5: `loss_type`: \"spin\" cannot be had; losses here are sigmoid",
        ),
        ("batch.yaml", "per_device_train_batch_size: 0", "batch.yaml:5: `per_device_train_batch_size`"),
        ("switch.yaml", "bf16: perhaps", "switch.yaml:5: `bf16`: expected true or false"),
        ("broken.yaml", "a: [", "broken.yaml:6: not valid YAML"),
    ] {
        shop.write(name, &format!("{base}{line}\n"));
        shop.run(&["init", "x.toml", "--from", name]).expect(2).says(&[said]);
    }
    shop.write("data.yaml", &base.replace("preferences.jsonl", "nowhere"));
    shop.run(&["init", "x.toml", "--from", "data.yaml"])
        .expect(2)
        .says(&["data.yaml:2: `dataset_name`: \"nowhere\" is no file here", "--data FILE"]);
    assert!(!shop.path("x.toml").exists());
    // The model may be elsewhere: what could be translated is written all the same.
    shop.write("model.yaml", &base.replace(": model\n", ": ./nowhere\n"));
    let outcome =
        shop.run(&["init", "x.toml", "--from", "model.yaml"]).expect(2).says(&["no such model folder"]);
    assert!(outcome.stdout.contains("x.toml: written") && shop.read("x.toml").contains("./nowhere"));
}

#[test]
fn values_that_no_run_can_have_are_refused_before_anything_is_written() {
    let shop = shop();
    let command = "trl dpo --model_name_or_path model --dataset_name preferences.jsonl";
    for (options, said) in [
        ("--learning_rate -1", "x.toml: not written: `train.learning_rate`: expected"),
        ("--learning_rate -1 --beta 0", "x.toml: not written: `objective.beta`: expected"),
        ("--max_steps $STEPS", "q.sh:1: `--max_steps $STEPS`: no line before it assigns `$STEPS`"),
    ] {
        shop.write("q.sh", &format!("{command} {options}\n"));
        for rest in [&[][..], &["--no-plan"]] {
            shop.run(&[&["init", "x.toml", "--from", "q.sh"], rest].concat()).expect(2).says(&[said]);
            assert!(!shop.path("x.toml").exists());
        }
    }
}

#[test]
fn methods_that_cannot_be_had_are_refused() {
    let shop = shop();
    shop.write("q.sh", "trl ppo --model_name_or_path model --dataset_name preferences.jsonl\n");
    shop.run(&["init", "x.toml", "--from", "q.sh"])
        .expect(2)
        .says(&["q.sh:1: `method`: \"ppo\" cannot be had; methods here are \"sft\", \"dpo\", "]);
    let factory = shop.read("llama_factory_dpo.yaml");
    shop.write("ppo.yaml", &factory.replace("stage: dpo", "stage: ppo"));
    shop.run(&["init", "x.toml", "--from", "ppo.yaml"])
        .expect(2)
        .says(&["ppo.yaml:6: `stage`: \"ppo\" cannot be had"]);
    let axolotl = shop.read("axolotl_dpo_lora.yaml");
    shop.write("grpo.yaml", &axolotl.replace("rl: dpo", "rl: grpo"));
    shop.run(&["init", "x.toml", "--from", "grpo.yaml"]).expect(2).says(&["`rl`: \"grpo\" cannot be had"]);
    shop.write("names.yaml", &factory.replace("pairs_small", "elsewhere"));
    shop.run(&["init", "x.toml", "--from", "names.yaml"])
        .expect(2)
        .says(&["`dataset`: \"elsewhere\" is a name of data/dataset_info.json", "--data FILE"]);
}

#[test]
fn what_is_no_training_file_is_refused_with_a_way_out() {
    let shop = shop();
    shop.write("notes.txt", "Buy milk.\n");
    shop.run(&["init", "--from", "notes.txt"]).expect(2).says(&["expected YAML, JSON or the command line"]);
    shop.write("other.yaml", "colour: red\n");
    shop.run(&["init", "--from", "other.yaml"]).expect(2).says(&["--kind", "llama-factory"]);
    shop.run(&["init", "--from", "zero3.json"]).expect(2).says(&["another --from", "--method"]);
    shop.run(&["init", "--from", "missing.yaml"]).expect(2).says(&["missing.yaml: cannot read the file"]);
    shop.write("two.sh", "trl dpo --beta 0.1\ntrl dpo --beta 0.2\n");
    shop.run(&["init", "--from", "two.sh"])
        .expect(2)
        .says(&["two.sh:2: a second training command", "line 1"]);
    shop.write("bare.yaml", "model_name_or_path: model\ndataset_name: preferences.jsonl\noutput_dir: o\n");
    shop.run(&["init", "--from", "bare.yaml"]).expect(2).says(&["`method` is missing", "--method sft"]);
    shop.run(&["init", "--from", "bare.yaml", "--method", "dpo", "--no-plan"]).expect(0);
}

/// Ranks that contradict DeepSpeed's batch are a mistake, not a guess.
#[test]
fn a_batch_that_does_not_add_up_is_refused() {
    let shop = shop();
    let arguments = ["init", "--from", "accelerate.yaml", "--from", "with_accelerate.yaml", "--ranks", "2"];
    shop.run(&arguments).expect(2).says(&["`train_batch_size`: it is not 4", "--ranks"]);
}

/// A text of another file never becomes a key: not in a value, not in a comment.
#[test]
fn texts_of_other_files_stay_texts() {
    let shop = shop();
    shop.write(
        "evil.yaml",
        "model_name_or_path: \"m\\\"\\nseed = 9\\n#\"\ndataset_name: preferences.jsonl\noutput_dir: \"o\\n[train]\"\nbeta: 0.1\n\
         run_name: \"x\\nseed = 8\"\n\"odd\\nseed = 7\": 1\n",
    );
    shop.run(&["init", "evil.toml", "--from", "evil.yaml", "--no-plan"]).expect(0);
    let text = shop.read("evil.toml");
    let config = Config::load::<&str>(&shop.path("evil.toml"), &[]).unwrap_or_else(|e| panic!("{e}\n{text}"));
    assert_eq!(config.seed, 42, "{text}");
    assert!(config.model.ends_with("m\"\nseed = 9\n#"), "{:?}", config.model);
}

/// Settings that are unknown are left out and said.
#[test]
fn unknown_settings_are_said_and_not_guessed() {
    let shop = shop();
    let text = shop.read("trl_dpo.yaml");
    shop.write("slip.yaml", &format!("{text}leraning_rate: 1e-3\n"));
    let outcome = shop.run(&["init", "slip.toml", "--from", "slip.yaml", "--no-plan"]).expect(0);
    assert!(outcome.stdout.contains("not known, left out: leraning_rate = 0.001"), "{outcome:?}");
    assert!(shop.read("slip.toml").contains("leraning_rate"));
}

/// `packing` makes a batch of sequences: the rows that they hold are counted.
#[test]
fn packed_sequences_are_counted_as_rows() {
    let shop = shop();
    let text = shop.read("trl_sft.yaml").replace("packing: false", "packing: true");
    shop.write("packed.yaml", &text);
    let outcome = shop.run(&["init", "packed.toml", "--from", "packed.yaml", "--ranks", "1"]).expect(0);
    let config = Config::load::<&str>(&shop.path("packed.toml"), &[]).unwrap();
    assert!(config.train.batch_size > 6, "{}", config.train.batch_size);
    assert!(outcome.stdout.contains(&format!("holds about {} rows", config.train.batch_size)), "{outcome:?}");
    // Rows of 24 texts are summed by `tandem data`, whose first line has the tokens of all of them.
    let tokens = shop.run(&["data", "packed.toml", "-n", "0"]).expect(0).stdout;
    let tokens: f64 = tokens.split(" tokens").next().unwrap().rsplit(' ').next().unwrap().parse().unwrap();
    let expected = (6.0 * 96.0 * 24.0 / tokens).round();
    assert_eq!(config.train.batch_size as f64, expected);
}
