//! Two ranks on one GPU: what they exchange, and a run of both, which has the bits of a run of one.
//!
//! NCCL allows that from 2.30.3 on, where `NCCL_MULTI_RANK_GPU_ENABLE=1` asks for it, and may hang where the GPU has no room for the kernels of
//! both. So on it a test starts itself as another process, which is killed when it takes too long. Without NCCL numbers go through
//! host memory; that shows on the emulation that the tests are right.

use std::path::Path;
use std::process::{Child, Command};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use tandem_comm::nccl::Libraries;
use tandem_comm::{ProcessGroup, Reduction, threads};
use tandem_kernels::cuda::Options;
use tandem_kernels::{DType, Device, MemoryKind, Tensor};
use tandem_train::events::Silent;
use tandem_train::parallel::collective_buffer::tensor;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::spawn;

use crate::small::Small;
use crate::{machine, skipped};

/// The oldest NCCL that allows it.
const OLDEST: [u32; 3] = [2, 30, 3];

/// Longest wait of ranks for each other.
const DEADLINE: Duration = Duration::from_secs(120);

/// When the process is killed.
const PATIENCE: Duration = Duration::from_secs(200);

/// Names the file that the process writes when it is done.
const DONE: &str = "TANDEM_TEST_DONE";

#[test]
fn two_ranks_exchange_through_host_memory() {
    in_a_process("one_gpu::two_ranks_exchange_through_host_memory", || {
        machine();
        on_two_ranks(exchange);
    });
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn two_ranks_train_through_host_memory() {
    machine();
    train(&["ddp", "zero3"], |group| group);
}

#[test]
fn nccl_exchanges_numbers_of_one_gpu() {
    on_nccl("one_gpu::nccl_exchanges_numbers_of_one_gpu", |nccl| {
        on_two_ranks(|control| exchange(carried(nccl, control)));
    });
}

/// Not where numbers travel while others are computed: the driver may load a rank's next kernel only when the GPU is idle, which it is
/// not while the other rank's half of a collective waits for this one's.
#[test]
fn two_ranks_train_over_nccl_on_one_gpu() {
    on_nccl("one_gpu::two_ranks_train_over_nccl_on_one_gpu", |nccl| {
        train(&["ddp", "zero1"], |control| carried(nccl, control));
    });
}

#[test]
fn a_process_that_hangs_fails_or_does_nothing_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let done = folder.path().join("done");
    let outcome = |program: &str, argument: &str, patience| {
        let child = Command::new(program).arg(argument).spawn().unwrap();
        watch(child, &done, patience).unwrap_err()
    };
    assert_eq!(outcome("sleep", "1000", Duration::from_millis(100)), "killed after 0 s");
    assert!(outcome("test", "", PATIENCE).contains("exit status: 1"));
    assert_eq!(outcome("sleep", "0", PATIENCE), "the process did nothing");
}

fn carried(nccl: &Libraries, control: ProcessGroup) -> ProcessGroup {
    nccl.group(control, Some(0), DEADLINE).unwrap_or_else(|error| panic!("{error}"))
}

fn on_two_ranks(rank: impl Fn(ProcessGroup) + Sync) {
    let rank = &rank;
    std::thread::scope(|scope| {
        for group in threads::groups(2, DEADLINE) {
            scope.spawn(move || rank(group));
        }
    });
}

/// Numbers of a rank, no two neighbours alike. A sum of two has one rounding, whoever adds.
fn numbers(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + rank * 104_729) % 65_537) as f32 / 257.0 - 100.0).collect()
}

/// Collectives of numbers in the GPU's memory, in parts that are alike and in parts that are not.
fn exchange(mut group: ProcessGroup) {
    const LEN: usize = 1 << 20;
    let device = Device::open_cuda(0, 64 << 20, Options::default()).unwrap();
    let (rank, both) = (group.rank(), [0, 1].map(|rank| numbers(rank, LEN)));
    let mut x = device.zeros(MemoryKind::Scratch, 1, LEN, DType::F32).unwrap();
    let fill =
        |x: &mut Tensor| device.host_write(x.view_mut(), |x: &mut [f32]| x.copy_from_slice(&both[rank]));
    let read = |x: &Tensor| device.host_read(x.view(), |x: &[f32]| x.to_vec()).unwrap().unwrap();
    let sum: Vec<f32> = both[0].iter().zip(&both[1]).map(|(a, b)| a + b).collect();
    let largest: Vec<f32> = both[0].iter().zip(&both[1]).map(|(a, b)| a.max(*b)).collect();
    for (reduction, reduced) in [(Reduction::Sum, &sum), (Reduction::Max, &largest)] {
        fill(&mut x).unwrap();
        group.all_reduce_numbers(tensor(&device, &mut x), reduction).unwrap();
        assert!(read(&x) == *reduced, "all_reduce({reduction}) on rank {rank}");
    }
    for first in [LEN / 2, 1, LEN - 77, LEN] {
        let counts = [first, LEN - first];
        let own = if rank == 0 { 0..first } else { first..LEN };
        fill(&mut x).unwrap();
        group.reduce_scatter_numbers(tensor(&device, &mut x), &counts, Reduction::Sum).unwrap();
        assert!(read(&x)[own.clone()] == sum[own], "reduce_scatter by {counts:?} on rank {rank}");
        fill(&mut x).unwrap();
        group.all_gather_numbers(tensor(&device, &mut x), &counts).unwrap();
        let gathered = [&both[0][..first], &both[1][first..]].concat();
        assert!(read(&x) == gathered, "all_gather by {counts:?} on rank {rank}");
    }
}

/// A run of two ranks on the first GPU beside a run of one.
fn train(shardings: &[&str], carried: impl Fn(ProcessGroup) -> ProcessGroup + Sync) {
    let small = Small::new("dpo");
    let settings =
        ["compute.devices=cuda:0", "train.micro_batch_size=2", "reference.kind=model", "train.steps=3"];
    small.finish("one", RunDirPolicy::Fresh, &settings);
    for sharding in shardings {
        let sharding_key = format!("compute.sharding={sharding}");
        let config = small.config(sharding, &[&settings[..], &[sharding_key.as_str()]].concat());
        on_two_ranks(|control| {
            let stop = AtomicBool::new(false);
            let trained = spawn::train_as(&config, RunDirPolicy::Fresh, carried(control), &mut Silent, &stop);
            trained.unwrap_or_else(|error| panic!("{sharding}: {error}"));
        });
        assert!(small.weights(sharding) == small.weights("one"), "{sharding}");
    }
}

/// Does `work` in a process of its own, where there is a GPU and an NCCL that allows two ranks on it.
fn on_nccl(test: &str, work: impl FnOnce(&Libraries)) {
    let nccl = match Libraries::open() {
        Ok(nccl) => nccl,
        Err(error) => return skipped(test, &error.to_string()),
    };
    let version: Vec<u32> = nccl.version().split('.').map(|part| part.parse().unwrap()).collect();
    if version[..] < OLDEST[..] {
        let reason = format!("NCCL {} refuses two ranks on one GPU, 2.30.3 allows them", nccl.version());
        return skipped(test, &reason);
    }
    in_a_process(test, || work(&nccl));
}

/// Does `work` in a process of its own, which runs the test of that name alone.
fn in_a_process(test: &str, work: impl FnOnce()) {
    if let Some(done) = std::env::var_os(DONE) {
        work();
        std::fs::write(done, "done").unwrap();
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let done = folder.path().join("done");
    // With few blocks, the kernels of both ranks run at once.
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env(DONE, &done)
        .env("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        .env("NCCL_MAX_CTAS", "2")
        .env("NCCL_NVLS_ENABLE", "0")
        .env("CUDA_MODULE_LOADING", "EAGER")
        .spawn()
        .unwrap();
    watch(child, &done, PATIENCE).unwrap_or_else(|error| panic!("{test}: {error}"));
}

/// Waits for a process to end well with its file written, and kills it when it takes too long.
fn watch(mut child: Child, done: &Path, patience: Duration) -> Result<(), String> {
    let began = Instant::now();
    while began.elapsed() < patience {
        match child.try_wait().unwrap() {
            None => std::thread::sleep(Duration::from_millis(20)),
            Some(status) if !status.success() => return Err(status.to_string()),
            Some(_) if !done.exists() => return Err("the process did nothing".to_owned()),
            Some(_) => return Ok(()),
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    Err(format!("killed after {} s", patience.as_secs()))
}
