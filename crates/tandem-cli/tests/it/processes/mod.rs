//! Ranks that are processes: the same bits as one, whoever starts them, and whoever is killed.

mod agreement;
mod bits;
mod failures;
mod hosts;
mod job;
mod launch;
mod launchers;

use crate::workshop::Workshop;

/// A run of `steps` steps of two micro-batches each.
fn configure(shop: &Workshop, output: &str, steps: u64) -> String {
    let name = format!("{output}.toml");
    let toml = shop.dpo_toml(output).replace("steps = 6", &format!("steps = {steps}\nmicro_batch_size = 2"));
    shop.write(&name, &toml);
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
