//! `policy_pt` of `tandem-fuzz` under libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| (tandem_fuzz::target("policy_pt").run)(bytes));
