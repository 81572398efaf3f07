//! Every mesh over processes, whoever starts them: the bits of one rank.

use super::meshes::{Mesh, all};
use super::starts::{Job, Start};
use super::{configure_divisible, same_runs};
use crate::workshop::{Workshop, python_with_torchrun};

/// Eight micro-batches a step.
const BATCH: [&str; 4] = ["--set", "train.batch_size=8", "--set", "train.save_every=1000"];

fn same_as_one_rank(meshes: &[Mesh], start: &Start) {
    let shop = Workshop::new();
    let whole = configure_divisible(&shop, "whole", 3);
    shop.run(&[&["train", &whole][..], &BATCH].concat()).expect(0);
    for (number, mesh) in meshes.iter().enumerate() {
        let run = format!("run{number}");
        let config = configure_divisible(&shop, &run, 3);
        let settings = mesh.settings();
        let settings = settings.iter().flat_map(|setting| ["--set", setting.as_str()]);
        let arguments: Vec<&str> = ["train", &config].into_iter().chain(BATCH).chain(settings).collect();
        let mut job = Job::start(&shop, start.command(&shop, mesh.ranks, &arguments));
        let status = job.await_end(|| shop.read("stderr.txt"));
        assert!(status.success(), "{start:?} on {mesh:?}: {status}\n{}", shop.read("stderr.txt"));
        println!("{start:?} on {mesh:?}");
        same_runs(&shop, &run, "whole");
    }
}

#[test]
fn a_launch_on_a_few_meshes_gives_the_bits_of_one_rank() {
    let few = [
        Mesh::data(3, "zero1", 1),
        Mesh::data(4, "zero3", 2),
        Mesh { tensor: 2, ..Mesh::data(4, "zero2", 1) },
        Mesh { tensor: 2, pipeline: 2, ..Mesh::data(4, "ddp", 1) },
    ];
    same_as_one_rank(&few, &Start::Launch);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_launch_on_every_mesh_gives_the_bits_of_one_rank() {
    same_as_one_rank(&all(), &Start::Launch);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_launch_without_shared_memory_on_every_mesh_gives_the_bits_of_one_rank() {
    same_as_one_rank(&all(), &Start::LaunchWithoutSharedMemory);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn torchrun_on_every_mesh_gives_the_bits_of_one_rank() {
    let Some(python) = python_with_torchrun() else { return };
    same_as_one_rank(&all(), &Start::Torchrun(python));
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn mpiexec_on_every_mesh_gives_the_bits_of_one_rank() {
    let Some(mpiexec) = Start::mpiexec() else { return };
    same_as_one_rank(&all(), &mpiexec);
}
