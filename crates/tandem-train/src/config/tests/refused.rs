//! Refused configs and their messages.

use std::path::Path;

use super::{EXAMPLE, SMALL_SFT, changed, fs, load_with, online, refusal, set};
use crate::config::*;

#[test]
fn a_missing_file_is_named() {
    let error = Config::load::<&str>(Path::new("no/such/run.toml"), &[]).expect_err("no file").to_string();
    assert!(error.starts_with("no/such/run.toml: cannot read the config file"), "{error}");
}

#[test]
fn broken_toml_names_file_and_line() {
    let text = refusal(&changed("seed = 42", "seed = 4 2"), &[]);
    assert!(text.starts_with("run.toml:4: not valid TOML"), "{text}");
}

#[test]
fn a_key_given_twice_is_refused() {
    let text = refusal(&changed("seed = 42", "seed = 42\nseed = 43"), &[]);
    assert!(text.starts_with("run.toml:5: not valid TOML"), "{text}");
}

#[test]
fn an_unknown_key_is_refused_with_the_nearest_known_one() {
    assert_eq!(
        refusal(&changed("seed = 42", "sed = 42"), &[]),
        "run.toml:4: unknown key `sed`; did you mean `seed`?"
    );
    assert_eq!(
        refusal(&changed("eval_every = 10", "evaluate_every = 10"), &[]),
        "run.toml:27: unknown key `train.evaluate_every`; did you mean `train.eval_every`?"
    );
    assert_eq!(
        refusal(EXAMPLE, &["train.zzz=1e-3"]),
        "--set train.zzz=1e-3: unknown key `train.zzz`; known here: batch_size, micro_batch_tokens, micro_batch_size, \
         steps, epochs, learning_rate, optimizer, betas, alpha, eps, momentum, dampening, nesterov, adjust_lr_fn, optimizer_state, schedule, min_lr_rate, num_cycles, \
         lr_end, power, timescale, decay_steps, decay_ratio, decay_type, warmup_steps, warmup_ratio, max_grad_norm, weight_decay, ema_decay, neftune_noise_alpha, groups, save_every, async_checkpoints, eval_every, eval_first, samples, \
         sample_tokens, keep_best, early_stopping_patience, early_stopping_threshold, keep, max_skipped, record_rows"
    );
}

#[test]
fn a_key_that_has_moved_is_refused_with_its_new_name() {
    assert_eq!(
        refusal(EXAMPLE, &["train.checkpointing=none"]),
        "--set train.checkpointing=none: `train.checkpointing`: it was renamed to `compute.checkpointing`; use that name"
    );
}

#[test]
fn former_names_are_refused_with_the_new_ones_but_in_a_runs_own_config() {
    let former = [("base_url", "address"), ("api_key_env", "key_variable"), ("timeout_s", "seconds")];
    let given = ["adapter.rank=4", "online.server.model=m"];
    let new = [&given[..], &["online.server.base_url=http://a/v1", "online.server.api_key_env=K"]].concat();
    let (folder, config) = load_with(online::ONLINE, &new);
    let config = config.unwrap_or_else(|e| panic!("{e}"));
    let mut resolved = config.to_toml();
    for (now, old) in former {
        let set = format!("online.server.{old}=x");
        let text =
            refusal(online::ONLINE, &[&given[..], &["online.server.base_url=http://a/v1", &set]].concat());
        assert!(text.contains(&format!("it was renamed to `online.server.{now}`; use that name")), "{text}");
        resolved = resolved.replace(&format!("\n{now} = "), &format!("\n{old} = "));
    }
    let path = folder.path().join("config.toml");
    fs::write(&path, format!("{RESOLVED_HEADER}{resolved}")).expect("written");
    assert_eq!(Config::load::<&str>(&path, &[]).unwrap_or_else(|e| panic!("{e}")), config);
    let text = Config::load(&path, &["online.server.seconds=3"]).expect_err("an override").to_string();
    assert!(text.contains("`online.server.timeout_s`"), "{text}");
}

#[test]
fn tf32_is_for_products_of_f32_on_gpus() {
    assert_eq!(
        refusal(EXAMPLE, &["compute.devices=cuda", "compute.dtype=auto", "compute.tf32=true"]),
        "--set compute.tf32=true: `compute.tf32`: it is only for f32 matmuls; set compute.dtype to \"f32\", or remove this: \
         bf16 is faster still"
    );
    assert_eq!(
        refusal(EXAMPLE, &["compute.devices=cpu", "compute.tf32=true"]),
        "--set compute.tf32=true: `compute.tf32`: a CPU has no TF32; name GPUs with compute.devices, or remove this"
    );
}

#[test]
fn a_residual_stream_of_bf16_is_for_bf16_on_gpus_without_stages() {
    let text = refusal(EXAMPLE, &["compute.devices=cpu", "compute.residual=bf16"]);
    assert!(text.contains("`compute.residual`: a CPU adds the residual stream in f32"), "{text}");
    let text = refusal(EXAMPLE, &["compute.devices=cuda", "compute.dtype=f32", "compute.residual=bf16"]);
    assert!(text.contains("`compute.residual`: matmuls of f32 add to a stream of f32"), "{text}");
    let staged =
        ["compute.devices=cuda", "compute.dtype=bf16", "compute.residual=bf16", "compute.pipeline=2"];
    let text = refusal(EXAMPLE, &staged);
    assert!(text.contains("`compute.pipeline`: stages exchange a residual stream of f32"), "{text}");
}

#[test]
fn a_home_folder_is_not_guessed() {
    assert_eq!(
        refusal(EXAMPLE, &["output=~/runs/first"]),
        "--set output=~/runs/first: `output`: expected a path without `~`, which only a shell replaces; write the home \
         folder's name, found the string \"~/runs/first\""
    );
}

#[test]
fn threads_of_all_ranks_are_as_many_as_a_process_may_have() {
    assert_eq!(
        refusal(EXAMPLE, &["compute.devices=cpu:4", "compute.threads=4096"]),
        "--set compute.threads=4096: `compute.threads`: 4 ranks would have 16384 threads in one process, expected at most 8192; \
         lower it, or leave it out"
    );
}

#[test]
fn products_by_warpgroups_are_for_attention_of_bf16_on_gpus() {
    assert_eq!(
        refusal(EXAMPLE, &["compute.devices=cpu", "compute.attention=wgmma"]),
        "--set compute.attention=wgmma: `compute.attention`: a CPU has no warpgroups; name GPUs with compute.devices, or \
         remove this"
    );
    assert_eq!(
        refusal(EXAMPLE, &["compute.devices=cuda", "compute.dtype=f32", "compute.attention=wgmma"]),
        "--set compute.attention=wgmma: `compute.attention`: it is for attention of bf16; set compute.dtype to \"bf16\", or \
         remove this"
    );
}

#[test]
fn fp8_products_are_of_fp8_weights_on_gpus() {
    let adapter = ["adapter.rank=4", "compute.devices=cuda", "compute.fp8_matmul=true", "compute.format=fp8"];
    for (more, key, expected) in [
        (
            "compute.devices=cpu",
            "fp8_matmul",
            "a CPU multiplies no FP8; name GPUs with compute.devices, or remove this",
        ),
        (
            "compute.format=int8",
            "fp8_matmul",
            "it is for frozen matrices of FP8; set compute.format to \"fp8\", or remove this",
        ),
        (
            "compute.tensor=2",
            "tensor",
            "a shard has a part of a product's sums, which FP8 products have not; divide the model with compute.sharding \
             or compute.pipeline, or remove compute.fp8_matmul",
        ),
        (
            "compute.sum_blocks=true",
            "sum_blocks",
            "FP8 products have no sums in blocks; remove compute.fp8_matmul, or this",
        ),
        (
            "compute.fp8_backward=true compute.fp8_matmul=false",
            "fp8_backward",
            "it is for the backward pass of FP8 products; set compute.fp8_matmul = true, or remove this",
        ),
    ] {
        let more: Vec<&str> = more.split(' ').collect();
        let error = refusal(EXAMPLE, &[&adapter[..], &more].concat());
        assert!(error.contains(&format!("`compute.{key}`: {expected}")), "{error}");
    }
}

#[test]
fn offloading_says_where_to_and_what_it_goes_with() {
    assert_eq!(
        refusal(EXAMPLE, &["compute.offload=nvme"]),
        "run.toml:28: `compute.offload_dir` is missing: give a folder on the disk that weights and states are offloaded to"
    );
    assert_eq!(
        refusal(EXAMPLE, &["compute.offload=host", "compute.offload_dir=/scratch"]),
        "--set compute.offload_dir=/scratch: `compute.offload_dir`: it is only for offloading to a disk; set \
         compute.offload to \"nvme\", or remove this"
    );
    for checkpointing in ["none", "selective"] {
        let checkpointing = format!("compute.checkpointing={checkpointing}");
        let text = refusal(EXAMPLE, &["compute.offload_activations=true", &checkpointing]);
        assert!(text.contains("set compute.checkpointing to \"block\""), "{text}");
    }
}

#[test]
fn keys_of_other_programs_are_answered_with_ours() {
    let cases = [
        ("train.lr=1e-3", "unknown key `train.lr`; it is `train.learning_rate` here"),
        ("learning_rate=1e-3", "unknown key `learning_rate`; it is `train.learning_rate`"),
        ("objective.learning_rate=1e-3", "it is `train.learning_rate`"),
        ("beta=0.1", "it is `distill.beta` or `objective.beta`"),
        ("train.max_length=9", "it is `data.max_length`"),
        ("train.seed=9", "it is `seed` at the top"),
        ("output_dir=x", "it is `output` here"),
        ("train.gradient_accumulation_steps=4", "`train.batch_size`"),
        ("per_device_train_batch_size=4", "`train.batch_size`"),
        ("lora_r=8", "it is `adapter.rank` here"),
        ("bf16=true", "`compute.dtype`"),
        ("report_to=wandb", "`logging.command`"),
        ("compute.deepspeed=ds.json", "`compute.sharding`"),
        ("fsdp=full_shard", "compute.sharding"),
        ("use_vllm=true", "[online.server]"),
        ("data.padding_free=true", "without padding"),
        ("finetuning_type=lora", "`[adapter]`"),
        ("data.template=qwen", "`data.chat_template`"),
        ("num_train_epochs=3", "`train.epochs`"),
        ("train.gradient_checkpointing=true", "`compute.checkpointing`"),
    ];
    for (set, expected) in cases {
        let text = refusal(EXAMPLE, &[set]);
        assert!(
            text.starts_with(&format!("--set {set}: unknown key `")) && text.contains(expected),
            "{text}"
        );
    }
    // Before a key that is missing because of it.
    let text = refusal(&changed("learning_rate", "lr"), &[]);
    assert!(text.contains("unknown key `train.lr`; it is `train.learning_rate` here"), "{text}");
}

#[test]
fn a_table_of_another_name_is_named_rather_than_the_keys_that_are_missing() {
    let text = refusal(&changed("[train]", "[Train]"), &[]);
    assert!(text.ends_with("unknown key `Train`; did you mean `train`?"), "{text}");
    let text = refusal(&changed("seed = 42", "seed = 18446744073709551615"), &[]);
    assert!(text.ends_with("expected one from -9223372036854775808 to 9223372036854775807"), "{text}");
}

#[test]
fn an_unknown_table_is_refused() {
    let text = refusal(&changed("[compute]", "[computer]"), &[]);
    assert_eq!(text, "run.toml:28: unknown key `computer`; did you mean `compute`?");
}

#[test]
fn an_unknown_key_in_a_nested_table_is_refused() {
    let text = refusal(EXAMPLE, &["data.train=[{path='a', wieght=2}]"]);
    assert!(
        text.ends_with("unknown key `data.train[0].wieght`; did you mean `data.train[0].weight`?"),
        "{text}"
    );
}

#[test]
fn a_wrong_type_is_refused_with_key_expected_and_found() {
    assert_eq!(
        refusal(&changed("batch_size = 8 ", "batch_size = \"8\" "), &[]),
        "run.toml:17: `train.batch_size`: expected an integer from 1 to 16777216, found the string \"8\""
    );
    assert_eq!(
        refusal(&changed("[compute]\n", "[[compute]]\n"), &[]),
        "run.toml:28: `compute`: expected a table, found a list"
    );
    assert_eq!(
        refusal(EXAMPLE, &["model=3"]),
        "--set model=3: `model`: expected a string, found the integer 3"
    );
    assert_eq!(
        refusal(EXAMPLE, &["compute.memory=10"]),
        "--set compute.memory=10: `compute.memory`: expected a size with its unit, for example \"24GiB\" or \"800MB\", \
         found the integer 10"
    );
    let date = refusal(EXAMPLE, &["seed=2026-01-01"]);
    assert_eq!(
        date,
        "--set seed=2026-01-01: `seed`: expected an integer of at least 0, found the date 2026-01-01"
    );
}

#[test]
fn values_out_of_range_are_refused() {
    let cases = [
        ("train.batch_size=0", "an integer from 1 to 16777216, found the integer 0"),
        ("train.steps=-1", "an integer from 1 to 10000000, found the integer -1"),
        ("train.epochs=0.0", "a positive number, found the number 0.0"),
        ("train.learning_rate=nan", "a number of at least 0, found the number NaN"),
        ("train.learning_rate=inf", "a number of at least 0, found the number inf"),
        (
            "train.learning_rate=1e-50",
            "a number that f32 holds, 0 or from 1e-45 to 3e38 in size, found the number 1e-50",
        ),
        ("train.eps=1e39", "a number that f32 holds, 0 or from 1e-45 to 3e38 in size, found the number 1e39"),
        ("train.weight_decay=-0.1", "a number of at least 0, found the number -0.1"),
        ("train.warmup_ratio=1.5", "a number from 0 to 1, found the number 1.5"),
        ("train.betas=[0.9]", "two numbers in [0, 1), for example [0.9, 0.999], found a list"),
        ("train.betas=[0.9, 1.0]", "a number of at least 0 and below 1, found the number 1.0"),
        ("objective.beta=0", "a positive number, found the integer 0"),
        ("objective.label_smoothing=2", "a number from 0 to 1, found the integer 2"),
        ("data.max_length=1", "an integer from 2 to 16777216, found the integer 1"),
        ("data.columns=3", "a table of key = \"column\""),
        ("data.columns={ prompt = 3 }", "the name of a column, found the integer 3"),
        ("data.shape='shp '", "one of \"sharegpt\""),
        ("data.train_rows=0", "an integer from 1 to"),
        ("data.ignore_columns=[3]", "a string, found the integer 3"),
        ("seed=-3", "an integer of at least 0, found the integer -3"),
        ("compute.threads=-1", "an integer from 0 to 4096, found the integer -1"),
        (
            "data.train=[]",
            "a path, a list of paths, or a list of tables with `path` and `weight`, found a list",
        ),
        (
            "data.train=3",
            "a path, a list of paths, or a list of tables with `path` and `weight`, found the integer 3",
        ),
        ("model=''", "a path, found the string \"\""),
    ];
    for (set, expected) in cases {
        let text = refusal(EXAMPLE, &[set]);
        assert!(text.contains(&format!("expected {expected}")), "{set}: {text}");
    }
}

#[test]
fn an_integer_too_large_is_refused_and_not_wrapped() {
    let text = refusal(EXAMPLE, &["seed=99999999999999999999"]);
    assert!(text.contains("99999999999999999999"), "{text}");
}

#[test]
fn an_unknown_choice_lists_the_known_ones() {
    assert_eq!(
        refusal(EXAMPLE, &["train.schedule=linaer"]),
        "--set train.schedule=linaer: `train.schedule`: expected one of \"linear\", \"cosine\", \
         \"cosine_with_min_lr\", \"cosine_with_restarts\", \"polynomial\", \"inverse_sqrt\", \
         \"warmup_stable_decay\", \"constant\" (did you mean \"linear\"?), found the string \"linaer\""
    );
    assert_eq!(
        refusal(EXAMPLE, &["train.optimizer_state=int8"]),
        "--set train.optimizer_state=int8: `train.optimizer_state`: expected one of \"f32\", \"bf16\", \"8bit\", found the \
         string \"int8\""
    );
    let loss = refusal(EXAMPLE, &["objective.loss={sigmod=1}"]);
    assert!(loss.contains("`objective.loss.sigmod`") && loss.contains("did you mean \"sigmoid\"?"), "{loss}");
}

#[test]
fn missing_keys_say_what_to_give() {
    let cases = [
        ("method = \"dpo\"", "`method` is missing: give how to train"),
        ("model = \"models/llama-small\" ", "`model` is missing: give an HF model folder"),
        ("output = \"runs/first\"", "`output` is missing"),
        ("train = \"data/pref_conv.jsonl\"", "`data.train` is missing: give a path, a list of paths"),
        ("batch_size = 8 ", "`train.batch_size` is missing"),
        ("learning_rate = 1e-4", "`train.learning_rate` is missing"),
        ("steps = 20 ", "`train.steps` is missing: give `steps` or `epochs`"),
    ];
    for (line, expected) in cases {
        let text = refusal(&changed(line, "#"), &[]);
        assert!(text.starts_with("run.toml") && text.contains(expected), "{line}: {text}");
    }
}

#[test]
fn what_is_not_there_yet_is_refused_and_never_ignored() {
    let cases = [
        ("compute.devices=cuda:0,1,0", "GPU 0 is named twice"),
        ("objective.loss=kto", "set method = \"kto\""),
        ("objective.ld_alpha=1.5", "ld_alpha"),
        ("data.loss_on=all", "add an `sft` term"),
        ("compute.devices=cuda:64", "numbers of GPUs, which count from 0, below 64"),
    ];
    for (set, expected) in cases {
        let text = refusal(EXAMPLE, &[set]);
        assert!(text.contains(expected), "{set}: {text}");
    }
    assert_eq!(set(&["compute.devices=cpu:1"]).compute.devices, Devices::Cpu(1));
    for (text, gpus) in [("cuda", GpuSet::All), ("cuda:0", GpuSet::Of(1)), ("cuda:1,3", GpuSet::Of(10))] {
        let devices = set(&[&format!("compute.devices={text}")]).compute.devices;
        assert_eq!((devices, &devices.name()[..]), (Devices::Cuda(gpus), text));
    }
    for (nonsense, expected) in [
        ("cuda:x", "expected \"auto\", \"cpu\""),
        ("cpu:0", "expected 1 to 256 ranks"),
        ("cpu:1000", "expected 1 to 256 ranks"),
        ("cpu:1,2", "expected \"auto\", \"cpu\""),
    ] {
        let text = refusal(EXAMPLE, &[&format!("compute.devices={nonsense}")]);
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn contradictions_are_refused() {
    let both = refusal(&changed("steps = 20 ", "epochs = 1\nsteps = 20 "), &[]);
    assert_eq!(both, "run.toml:19: `train.epochs`: `train.steps` is given too; remove one of the two");
    let cases: [(&[&str], &str); 35] = [
        (
            &["compute.devices=cpu:4", "compute.engine=nccl"],
            "the ranks of devices = \"cpu:4\" are threads, but NCCL connects processes",
        ),
        (&["compute.devices=cpu:2", "compute.engine=tcp"], "TCP connects processes"),
        (&["compute.devices=cpu:2", "compute.engine=mpi"], "MPI connects processes"),
        (&["train.epochs=1", "train.steps=2"], "`train.steps` is given too"),
        (&["method=sft"], "with method = \"sft\" the only loss is \"sft\""),
        (&["method=sft", "objective.loss=sft"], "no effect with method = \"sft\""),
        (&["objective.reference_free=true"], "leaves the reference unused"),
        (&["reference.kind=none"], "needs objective.reference_free = true"),
        (&["objective.loss=hinge", "objective.label_smoothing=0.1"], "hinge does not use it"),
        (&["objective.discopop_tau=0.1"], "only the loss \"discopop\" has it"),
        (&["objective.f_alpha_divergence_coef=0.3"], "only f_divergence_type = \"alpha_divergence\" has it"),
        (
            &["objective.loss=bco_pair", "objective.f_divergence_type=forward_kl"],
            "\"bco_pair\" is derived for",
        ),
        (&["method=sft", "objective.loss=sft", "objective.f_divergence_type=forward_kl"], "no effect with"),
        (&["train.groups=[{ frozen = true }]"], "`train.groups[0].parameters` is missing"),
        (
            &["train.groups=[{ parameters = '(' }]"],
            "`train.groups[0].parameters`: expected a regular expression",
        ),
        (&["train.groups=[{ parameters = 'a', frozen = true, weight_decay = 0 }]"], "the group is frozen"),
        (&["train.groups=[{ parameters = 'a', lr = 0 }]"], "unknown key `train.groups[0].lr`"),
        (&["train.min_lr_rate=0.1"], "the key belongs to \"cosine_with_min_lr\" and \"warmup_stable_decay\""),
        (&["train.schedule=cosine_with_min_lr"], "`train.min_lr_rate` is missing"),
        (&["train.schedule=warmup_stable_decay"], "`train.decay_steps` is missing"),
        (&["train.schedule=polynomial", "train.lr_end=1"], "it is not below train.learning_rate"),
        (&["train.schedule=polynomial", "train.learning_rate=0"], "falls to train.lr_end = 1e-7"),
        (&["train.schedule=polynomial", "train.learning_rate=1e-8"], "not below train.learning_rate = 1e-8"),
        (&["train.schedule=polynomial", "train.num_cycles=2"], "the key belongs to \"cosine_with_restarts\""),
        (&["train.alpha=0.9"], "it belongs to \"rmsprop\"; remove it"),
        (&["train.optimizer=rmsprop", "train.betas=[0.9, 0.99]"], "it belongs to \"adamw\", \"lion\""),
        (&["train.optimizer=lion", "train.eps=1e-6"], "it belongs to \"adamw\", \"rmsprop\""),
        (&["train.optimizer=adafactor", "train.optimizer_state=8bit"], "which are few and f32"),
        (
            &["train.optimizer=adafactor", "compute.devices=cpu:2", "compute.tensor=2"],
            "\"adafactor\" needs whole",
        ),
        (&["train.optimizer=adafactor", "compute.devices=cuda:0"], "has no kernels for GPUs"),
        (&["train.adjust_lr_fn=original"], "it belongs to \"muon\""),
        (
            &["train.optimizer=muon", "compute.devices=cpu:2", "compute.tensor=2"],
            "\"muon\" needs whole matrices",
        ),
        (&["train.optimizer=sgd", "train.nesterov=true"], "needs `train.momentum` above 0"),
        (&["train.optimizer=sgd", "train.dampening=0.5"], "without `train.momentum` SGD has no buffer"),
        (&["train.momentum=0.9"], "it belongs to \"sgd\", \"muon\""),
    ];
    for (overrides, expected) in cases {
        let text = refusal(EXAMPLE, overrides);
        assert!(text.contains(expected), "{overrides:?}: {text}");
    }
    let sft = refusal(&format!("{SMALL_SFT}\n[reference]\nkind = \"precompute\""), &[]);
    assert!(sft.contains("method = \"sft\" has no reference"), "{sft}");
    let unused = refusal(EXAMPLE, &["reference.kind=none", "objective.reference_free=true"]);
    assert!(unused.contains("a reference model is given, but this run has no reference"), "{unused}");
}

#[test]
fn a_model_inside_the_runs_own_output_is_refused() {
    for (key, value) in
        [("model", "r/final"), ("reference.model", "r/final/"), ("weights", "r/checkpoints/policy.pt")]
    {
        let text = refusal(EXAMPLE, &["output=r", &format!("{key}={value}")]);
        assert!(text.contains(&format!("`{key}`: this run writes to that folder")), "{text}");
    }
    // A sibling run's result is the ordinary case.
    assert!(set(&["output=r", "model=r2/final"]).model.ends_with("r2/final"));
}

#[test]
fn label_smoothing_is_held_to_what_each_loss_can_take() {
    let half = refusal(EXAMPLE, &["objective.loss=robust", "objective.label_smoothing=0.5"]);
    assert!(half.contains("[0, 0.5)"), "{half}");
    let missing = refusal(EXAMPLE, &["objective.loss=exo_pair"]);
    assert!(missing.contains("`objective.label_smoothing` is missing"), "{missing}");
    let zero = refusal(EXAMPLE, &["objective.loss=exo_pair", "objective.label_smoothing=0"]);
    assert!(zero.contains("(0, 1)"), "{zero}");
    assert_eq!(set(&["objective.label_smoothing=0.5"]).objective.label_smoothing, 0.5);
}

#[test]
fn an_override_that_is_not_key_value_is_refused() {
    let cases = [
        ("train", "expected key=value"),
        ("=3", "is not a dotted key"),
        ("train..steps=3", "is not a dotted key"),
        ("seed.x=1", "is a value, not a table"),
        ("train.betas=[0.9", "not valid TOML"),
    ];
    for (set, expected) in cases {
        let text = refusal(EXAMPLE, &[set]);
        assert!(text.starts_with(&format!("--set {set}: ")) && text.contains(expected), "{set}: {text}");
    }
}

#[test]
fn keys_of_rows_are_refused_where_nothing_reads_them() {
    for (set, expected) in [
        ("data.columns={ promt = 'question' }", "did you mean `prompt`?"),
        ("data.take=chosen", "only method = \"sft\" trains on one side"),
    ] {
        let text = refusal(EXAMPLE, &[set]);
        assert!(text.contains(expected), "{set}: {text}");
    }
    let text = refusal(SMALL_SFT, &["data.eval_rows=3"]);
    assert!(text.contains("data.eval names no held-out rows"), "{text}");
}
