//! Measured rates of GPUs, as rows of a table that plans read. Their speed is not tested.

use std::sync::Arc;
use std::time::Duration;

use tandem_kernels::DType;
use tandem_kernels::ops::AttentionShape;
use tandem_train::plan::estimate::device::{DeviceKind, DeviceTable};
use tandem_train::plan::estimate::measure::{self, GpuSizes, Sizes};

use crate::has_gpus;

/// Little enough for the emulation.
const SMALL: GpuSizes = GpuSizes {
    common: Sizes {
        product: (64, 48, 32),
        heads: AttentionShape {
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            scale: 0.125,
            window: None,
            softcap: None,
        },
        dtype: DType::Bf16,
        copied: 1 << 12,
        exchanged: 1 << 12,
        patience: Duration::ZERO,
    },
    layers: &[(64, 48, 32), (16, 32, 64)],
    attention: &[(2, 48)],
    tokens: 32,
    hidden: 64,
    feed_forward: 96,
    vocabulary: 300,
};

/// The rows of these GPUs as a plan reads them, which must be of one kind.
fn measured(ordinals: &[usize]) -> (DeviceKind, DeviceKind) {
    let device = measure::gpus(ordinals, &SMALL).unwrap_or_else(|error| panic!("{error}"));
    let built_in = DeviceTable::built_in().gpu(&device[0].name);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("devices.toml");
    std::fs::write(&file, DeviceTable { device: device.clone() }.to_toml()).unwrap();
    let read = DeviceTable::read(&file).unwrap();
    assert_eq!(device.len(), 1, "one row for GPUs of one kind");
    assert_eq!(read.device[0], device[0]);
    (read.devices(&format!("{}x{}", ordinals.len(), device[0].name)).unwrap().kind, built_in)
}

/// Compares two rates to a table's precision.
fn same(rate: f64, other: f64) {
    assert!((rate - other).abs() <= 0.05e9, "{rate} and {other}");
}

#[test]
fn a_gpu_alone_keeps_the_links_of_the_table() {
    if !has_gpus(1, "a_gpu_alone_keeps_the_links_of_the_table") {
        return;
    }
    let (kind, built_in) = measured(&[0]);
    assert_eq!(kind.devices_per_box, 1);
    // Of a box and of the network, as plans have counted with them before.
    let near = DeviceKind { devices_per_box: 8, ..kind.clone() };
    same(near.link_rate((0, 1)), built_in.link_rate((0, 1)));
    same(kind.link_rate((0, 1)), built_in.link_rate((0, built_in.devices_per_box)));
    // And what was measured as it was measured.
    assert_eq!(kind.host_rate(), kind.host_link_gbs * 1e9);
    assert!(kind.host_link_gbs > 0.0 && kind.call_us.is_some());
    // Four matmuls of each layer, told apart by shape, and eleven other operations.
    let of = |operation: &str| kind.rate.iter().filter(|rate| rate.operation == operation).count();
    for operation in ["linear", "linear_low_rank", "linear_backward_input", "linear_backward_weight"] {
        assert_eq!(of(operation), SMALL.layers.len(), "{operation}: {:?}", kind.rate);
    }
    for operation in [
        "attention",
        "attention_backward",
        "head",
        "head_backward",
        "rms_norm",
        "rms_norm_backward",
        "gated",
        "gated_backward",
        "rope",
        "exact_sum",
        "adamw",
    ] {
        assert_eq!(of(operation), 1, "{operation}: {:?}", kind.rate);
    }
}

#[test]
fn attention_has_rates_of_both_its_kernels_where_a_gpu_has_both() {
    let measured = |capability| {
        let driver = tandem_cuda_emulator::Emulated::new(256 << 20).with_capability(capability);
        let kind = measure::gpu(Arc::new(driver), &SMALL).unwrap_or_else(|error| panic!("{error}"));
        let of = |operation: &str| kind.rate.iter().filter(|rate| rate.operation == operation).count();
        let names = ["attention", "attention_backward", "attention_wgmma", "attention_backward_wgmma"];
        (names.map(of), kind.wgmma_speedup())
    };
    let (counts, speedup) = measured((9, 0));
    assert_eq!(counts, [1; 4]);
    assert!(speedup.is_some_and(|speedup| speedup > 0.0));
    assert_eq!(measured((8, 0)), ([1, 1, 0, 0], None));
}

#[test]
fn two_gpus_are_measured_together() {
    if !has_gpus(2, "two_gpus_are_measured_together") {
        return;
    }
    let (kind, built_in) = measured(&[0, 1]);
    assert_eq!(kind.devices_per_box, 2);
    assert_eq!(kind.link_rate((0, 1)), kind.link_gbs * 1e9);
    same(kind.link_rate((1, 2)), built_in.link_rate((0, built_in.devices_per_box)));
    assert!(kind.link_gbs != measured(&[0]).0.link_gbs, "the link was measured, and is no more the table's");
}
