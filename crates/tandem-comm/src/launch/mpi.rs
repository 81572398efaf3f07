//! Recognition of an MPI launcher, under which `MPI_Init` finds the other ranks.
//!
//! | launcher | variables |
//! |---|---|
//! | Open MPI's `mpirun` | `OMPI_COMM_WORLD_RANK` |
//! | MPICH's, Intel's, MVAPICH's `mpiexec`; Cray PALS; Flux; `srun --mpi=pmi2` | `PMI_RANK` |
//! | `srun --mpi=pmix`, `prterun` | `PMIX_RANK` |
//!
//! Elsewhere `MPI_Init` makes each process a world of one, so MPI is refused there.

use crate::launch::Environment;

/// Process manager that MPI's libraries speak with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MpiLauncher {
    /// Open MPI's own.
    OpenMpi,
    /// PMI, of MPICH and its relatives.
    Pmi,
    /// PMIx, which Open MPI and MPICH speak.
    Pmix,
}

/// Returns the MPI launcher of a process.
///
/// # Errors
/// Why `MPI_Init` would not find the other ranks, and what to start them with.
pub fn launcher(environment: &Environment) -> Result<MpiLauncher, String> {
    const REMEDY: &str = "start the ranks with mpirun, mpiexec, or srun --mpi=pmix (or pmi2)";
    let has = |name: &str| environment.get(name).is_some_and(|value| !value.trim().is_empty());
    if has("TORCHELASTIC_RUN_ID") || has("TORCHELASTIC_USE_AGENT_STORE") {
        return Err(format!(
            "torchrun or `tandem launch` started this process, in which MPI_Init would make a world of one rank; {REMEDY}"
        ));
    }
    if has("OMPI_COMM_WORLD_RANK") {
        return Ok(MpiLauncher::OpenMpi);
    }
    if has("PMIX_RANK") {
        return Ok(MpiLauncher::Pmix);
    }
    if has("PMI_RANK") {
        return Ok(MpiLauncher::Pmi);
    }
    let found = if has("SLURM_STEP_ID") {
        "srun started this process without a plug-in for MPI (`srun --mpi=list` shows those there are)"
    } else {
        "no MPI launcher started this process: none of OMPI_COMM_WORLD_RANK, PMI_RANK, PMIX_RANK is set"
    };
    Err(format!("{found}, so MPI_Init would make a world of one rank; {REMEDY}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Result<MpiLauncher, String> {
        let pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
        launcher(&pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }

    #[test]
    fn launchers_of_mpi_are_recognised() {
        for (variables, launcher) in [
            ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMIX_RANK=1", MpiLauncher::OpenMpi),
            ("PMI_RANK=0 PMI_SIZE=2", MpiLauncher::Pmi),
            ("SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=1 PMIX_RANK=1", MpiLauncher::Pmix),
            ("SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=1 PMI_RANK=1", MpiLauncher::Pmi),
            // A wrapper that translated the variables.
            ("RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1", MpiLauncher::OpenMpi),
        ] {
            assert_eq!(found(variables), Ok(launcher), "{variables}");
        }
    }

    #[test]
    fn a_world_of_one_is_refused() {
        for (variables, reason) in [
            ("RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none", "torchrun"),
            // torchrun inside of mpirun: its ranks are not MPI's.
            ("RANK=0 TORCHELASTIC_RUN_ID=none OMPI_COMM_WORLD_RANK=0", "torchrun"),
            ("RANK=0 TORCHELASTIC_USE_AGENT_STORE=True", "tandem launch"),
            ("SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=1", "srun --mpi=list"),
            ("RANK=0 WORLD_SIZE=2", "none of OMPI_COMM_WORLD_RANK, PMI_RANK, PMIX_RANK"),
            ("PMI_RANK=", "none of"),
        ] {
            let error = found(variables).unwrap_err();
            assert!(error.contains(reason) && error.contains("world of one"), "{variables}: {error}");
        }
    }
}
