//! Launch environments, the store, and collectives: on threads and on processes.

mod conformance;
mod disagreement;
mod launch;
mod mpi;
mod nccl;
mod processes;
mod store;
mod tcp;
mod threads;
mod watchdog;
