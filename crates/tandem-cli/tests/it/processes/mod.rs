//! Ranks that are processes: the same bits as one, whoever starts them, and whoever is killed.

mod agreement;
mod bits;
mod failures;
mod faults;
mod hosts;
mod injected;
mod job;
mod launch;
mod launchers;
#[path = "../../../../tandem-train/tests/it/run/meshes.rs"]
#[allow(dead_code, reason = "some parts are for the tests of tandem-train")]
mod meshes;
mod on_meshes;
pub mod pty;
mod random;
pub mod starts;
mod terminal;

use crate::workshop::Workshop;

/// A run of `steps` steps of two micro-batches each.
fn configure(shop: &Workshop, output: &str, steps: u64) -> String {
    let name = format!("{output}.toml");
    let toml = shop.dpo_toml(output).replace("steps = 6", &format!("steps = {steps}\nmicro_batch_size = 2"));
    shop.write(&name, &toml);
    name
}

/// As [`configure`], of a model with four key/value heads and a micro-batch for each row, which more meshes can divide.
fn configure_divisible(shop: &Workshop, output: &str, steps: u64) -> String {
    if !shop.path("divisible").exists() {
        let mut config = shop.write_config("source");
        config["num_attention_heads"] = 4.into();
        config["num_key_value_heads"] = 4.into();
        shop.write("source/config.json", &config.to_string());
        shop.run(&["init-weights", "source", "divisible", "--seed", "3"]).expect(0);
    }
    let name = configure(shop, output, steps);
    let toml = shop.read(&name).replace("model = \"model\"", "model = \"divisible\"");
    shop.write(&name, &toml.replace("micro_batch_size = 2", "micro_batch_size = 1"));
    name
}

/// A workshop in which the run `whole` of [`configure`], with six steps, has ended.
fn shop_with_whole_run() -> Workshop {
    let shop = Workshop::new();
    let whole = configure(&shop, "whole", 6);
    shop.run(&["train", &whole]).expect(0);
    shop
}

fn same_runs(shop: &Workshop, first: &str, second: &str) {
    assert_eq!(shop.metrics(first), shop.metrics(second));
    let weights = |run| shop.bytes(&format!("{run}/final/model.safetensors"));
    assert!(weights(first) == weights(second), "{first} and {second} end with other weights");
}
