//! `request` of `tandem-fuzz` under libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| (tandem_fuzz::target("request").run)(bytes));
