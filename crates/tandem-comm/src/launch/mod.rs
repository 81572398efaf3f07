//! Rank and world size, read from the variables that launchers set.
//!
//! | launcher | variables |
//! |---|---|
//! | torchrun, accelerate, DeepSpeed, Ray Train | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` |
//! | Kubeflow PyTorchJob v1 | the same without `LOCAL_RANK`, one process a pod |
//! | Kubeflow Trainer v2 | `PET_NNODES`, `PET_NPROC_PER_NODE`, `PET_NODE_RANK`, `PET_MASTER_ADDR`, `PET_MASTER_PORT` |
//! | `srun` | `SLURM_STEP_ID`, `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID`, `SLURM_STEP_NODELIST`, `SLURM_JOB_ID` |
//! | Open MPI's `mpirun` | `OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}` |
//! | MPICH's and Intel's `mpiexec` | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
//! | `prterun` and other PMIx launchers | `PMIX_RANK`, and the variables of one of the others for the size |
//! | `flux run` | `FLUX_TASK_RANK`, `FLUX_JOB_SIZE`, `FLUX_TASK_LOCAL_ID`, `FLUX_JOB_NNODES`, or `PMI_RANK`, `PMI_SIZE` |
//! | LSF's `jsrun` | `JSM_NAMESPACE_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}` |
//! | Cray PALS | `PMI_RANK`, `PMI_SIZE`; `PALS_RANKID` alone is refused |
//! | Kubernetes Indexed Job, JobSet | `JOB_COMPLETION_INDEX`, and `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` from the manifest |
//!
//! A partial environment (a rank without a world size) or a contradictory one (two launchers that
//! disagree) is an error that names the variables. Continuing with a world size of 1 would train N
//! separate models into one folder.

mod addresses;
pub mod meeting;
pub mod mpi;
pub mod open_files;
pub mod processes;

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv6Addr;

use crate::launch::LaunchError::{Contradictory, Malformed, Partial};

/// Environment variables by name; an empty string counts as unset.
pub type Environment = BTreeMap<String, String>;

/// Returns the environment of this process.
pub fn environment() -> Environment {
    let text = |os: std::ffi::OsString| os.to_string_lossy().into_owned();
    std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect()
}

/// Program that started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// No launcher: a plain command.
    None,
    /// torchrun's elastic agent, which serves the store at `MASTER_ADDR:MASTER_PORT`.
    Torchrun,
    /// Another program that sets `RANK` and `WORLD_SIZE`.
    RankVariables,
    /// Kubeflow Trainer v2's `PET_*` variables, without torchrun.
    Pet,
    /// A Slurm job step.
    Slurm,
    /// Open MPI.
    OpenMpi,
    /// MPICH, Intel MPI, or another PMI implementation.
    Pmi,
    /// Flux.
    Flux,
    /// The job step manager of IBM's LSF.
    Jsm,
    /// A Kubernetes Indexed Job or a JobSet.
    IndexedJob,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "no launcher",
            Self::Torchrun => "torchrun",
            Self::RankVariables => "RANK and WORLD_SIZE",
            Self::Pet => "PET_* variables",
            Self::Slurm => "Slurm",
            Self::OpenMpi => "Open MPI",
            Self::Pmi => "PMI",
            Self::Flux => "Flux",
            Self::Jsm => "jsrun",
            Self::IndexedJob => "an Indexed Job",
        })
    }
}

/// Number of ranks in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalRanks {
    /// One: the launcher starts one process per rank.
    One,
    /// This many: the launcher starts one process per machine.
    Count(usize),
    /// One per device: the launcher starts one process per machine.
    PerDevice,
}

/// Address of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RendezvousEndpoint {
    /// Host name or address.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Whether the launcher serves the store, so that no rank may bind the port.
    pub served: bool,
}

/// Position of this process in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The launcher.
    pub launcher: Launcher,
    /// Index of this process among all processes, from 0.
    pub process: usize,
    /// Number of processes.
    pub num_processes: usize,
    /// Index among the processes of this machine, if the launcher sets it.
    pub local_process: Option<usize>,
    /// Number of ranks in this process.
    pub ranks_here: LocalRanks,
    /// Address of the store; `None` for a single process, and where MPI alone can tell it: `mpirun` on
    /// several machines without `MASTER_ADDR` and `MASTER_PORT`.
    pub meeting_point: Option<RendezvousEndpoint>,
    /// Name that the launcher gives this job alone, if it does. Ranks of two jobs that find one store by
    /// mistake are kept apart by it.
    pub job: Option<String>,
}

/// A partial, contradictory or malformed environment.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "fields are explained by the messages that print them")]
pub enum LaunchError {
    /// A launcher's variables of which some are missing.
    #[error("{} set, but {} not: {hint}", list(found), list(missing))]
    Partial { found: Vec<String>, missing: Vec<String>, hint: &'static str },
    /// Two variables or launchers that disagree.
    #[error("{first} contradicts {second}: {hint}")]
    Contradictory { first: String, second: String, hint: &'static str },
    /// A variable with an invalid value.
    #[error("{variable}={value} is not {expected}")]
    Malformed { variable: String, value: String, expected: &'static str },
}

fn list(names: &[String]) -> String {
    let verb = if names.len() == 1 { "is" } else { "are" };
    format!("{} {verb}", names.join(", "))
}

/// Remedy for ranks on several machines that do not meet over MPI.
pub(crate) const NO_ADDRESS: &str = "the launcher gives ranks on several machines no rendezvous address; set both for every rank (mpirun: -x or -genv)";
/// Variable by which `tandem launch` tells its ranks its process. What Slurm or MPI, which may have started the launcher,
/// says of ranks is not about them.
pub const LAUNCHER_PROCESS: &str = "TANDEM_LAUNCHER_PROCESS";

const UNSET: &str = "unset variables left over from another job, or start all ranks through one launcher";

impl Launch {
    /// Reads the environment of this process.
    pub fn detect() -> Result<Self, LaunchError> {
        Self::from_environment(&environment())
    }

    /// Creates the launch of a process without a launcher.
    pub fn alone() -> Self {
        Self {
            launcher: Launcher::None,
            process: 0,
            num_processes: 1,
            local_process: None,
            ranks_here: LocalRanks::One,
            meeting_point: None,
            job: None,
        }
    }

    /// Returns whether the launcher asks for more than one rank.
    pub fn is_distributed(&self) -> bool {
        self.num_processes > 1 || matches!(self.ranks_here, LocalRanks::Count(n) if n > 1)
    }

    /// Reads a map of variables.
    ///
    /// The innermost launcher wins: torchrun or `tandem launch`, `RANK`, then the `PET_*` variables that configure torchrun,
    /// then Slurm or MPI, which may have started torchrun. If `RANK` was not set by torchrun and an
    /// MPI or Slurm world of several ranks exists, the two must agree.
    pub fn from_environment(environment: &Environment) -> Result<Self, LaunchError> {
        let vars = Variables(environment);
        if vars.has("TORCHELASTIC_RUN_ID") {
            return rank_variables(&vars, Launcher::Torchrun);
        }
        if vars.has(LAUNCHER_PROCESS) {
            return rank_variables(&vars, Launcher::RankVariables);
        }
        let outer = outer_launcher(&vars)?;
        if vars.has("JOB_COMPLETION_INDEX")
            && !vars.has("RANK")
            && !vars.has("PET_NODE_RANK")
            && outer.is_none()
        {
            return indexed_job(&vars);
        }
        if vars.has("RANK") || vars.has("WORLD_SIZE") || vars.has("LOCAL_RANK") {
            let inner = rank_variables(&vars, Launcher::RankVariables)?;
            if let Some((outer, rank_name, size_name)) = outer.filter(|(outer, ..)| outer.num_processes > 1) {
                for (a, b, agree) in [
                    ("WORLD_SIZE", size_name, inner.num_processes == outer.num_processes),
                    ("RANK", rank_name, inner.process == outer.process),
                ] {
                    if !agree {
                        return Err(Contradictory { first: vars.show(a), second: vars.show(b), hint: UNSET });
                    }
                }
            }
            return Ok(inner);
        }
        if vars.has("PET_NNODES") || vars.has("PET_NODE_RANK") {
            return pet(&vars);
        }
        Ok(outer.map_or_else(Self::alone, |(launch, ..)| launch))
    }
}

/// A launch by MPI or Slurm, with the names of the variables of its rank and size.
type Outer = (Launch, &'static str, &'static str);

fn outer_launcher(vars: &Variables) -> Result<Option<Outer>, LaunchError> {
    let open_mpi = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"];
    if open_mpi.iter().any(|name| vars.has(name)) {
        let local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
        return Ok(Some((mpi(vars, Launcher::OpenMpi, open_mpi, local)?, open_mpi[0], open_mpi[1])));
    }
    let pmi = ["PMI_RANK", "PMI_SIZE"];
    // Slurm's PMI plug-in sets PMI_RANK too; the Slurm step is preferred because it knows the
    // hosts.
    if pmi.iter().any(|name| vars.has(name)) && !vars.has("SLURM_STEP_ID") {
        let local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS");
        return Ok(Some((mpi(vars, Launcher::Pmi, pmi, local)?, pmi[0], pmi[1])));
    }
    let flux = ["FLUX_TASK_RANK", "FLUX_JOB_SIZE"];
    if flux.iter().any(|name| vars.has(name)) {
        return Ok(Some((mpi(vars, Launcher::Flux, flux, ("FLUX_TASK_LOCAL_ID", ""))?, flux[0], flux[1])));
    }
    let jsm = ["JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"];
    if jsm.iter().any(|name| vars.has(name)) {
        let local = ("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE");
        return Ok(Some((mpi(vars, Launcher::Jsm, jsm, local)?, jsm[0], jsm[1])));
    }
    let ranks_alone = ["PMIX_RANK", "PALS_RANKID"];
    if let Some(rank) = ranks_alone.iter().find(|name| vars.has(name))
        && !vars.has("SLURM_STEP_ID")
        // A wrapper that told all of it.
        && !(vars.has("RANK") && vars.has("WORLD_SIZE"))
    {
        return Err(Partial {
            found: vec![vars.show(rank)],
            missing: vec!["OMPI_COMM_WORLD_SIZE".into(), "PMI_SIZE".into(), "SLURM_STEP_ID".into()],
            hint: "the number of ranks is unknown; start them with mpirun, mpiexec or srun --mpi=pmix, or set RANK and \
                   WORLD_SIZE",
        });
    }
    if vars.has("SLURM_JOB_ID") {
        return Ok(slurm(vars)?.map(|launch| (launch, "SLURM_PROCID", "SLURM_NTASKS")));
    }
    Ok(None)
}

fn rank_variables(vars: &Variables, launcher: Launcher) -> Result<Launch, LaunchError> {
    vars.require(
        &["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"],
        &["RANK", "WORLD_SIZE"],
        "a launcher sets all of them; unset variables left over from another job",
    )?;
    let (process, num_processes) = vars.place("RANK", "WORLD_SIZE")?;
    let meeting_point = if num_processes == 1 {
        None
    } else {
        vars.require(
            &["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"],
            &["MASTER_ADDR", "MASTER_PORT"],
            "ranks need a rendezvous address",
        )?;
        // torchrun's agent says whether it serves the store; before torch 1.9 it says nothing and
        // does not.
        let served = vars.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v.eq_ignore_ascii_case("true"));
        vars.meeting_point("MASTER_ADDR", "MASTER_PORT", served)?
    };
    let local_process = vars.number("LOCAL_RANK")?;
    if let Some(local) = local_process.filter(|&local| local > process) {
        return Err(Contradictory {
            first: format!("LOCAL_RANK={local}"),
            second: format!("RANK={process}"),
            hint: "the local rank cannot exceed the global rank",
        });
    }
    let ranks_here = LocalRanks::One;
    Ok(Launch { launcher, process, num_processes, local_process, ranks_here, meeting_point, job: None })
}

fn pet(vars: &Variables) -> Result<Launch, LaunchError> {
    let all = ["PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"];
    vars.require(&all, &["PET_NNODES", "PET_NODE_RANK"], "the trainer's pod template sets all of them")?;
    // "2:4" is torchrun's elastic range, which only its own agent can negotiate.
    let (process, num_processes) = vars.place("PET_NODE_RANK", "PET_NNODES")?;
    let meeting_point = if num_processes == 1 {
        None
    } else {
        vars.require(&all, &all[3..], "nodes need a rendezvous address")?;
        vars.meeting_point("PET_MASTER_ADDR", "PET_MASTER_PORT", false)?
    };
    let ranks_here = match vars.get("PET_NPROC_PER_NODE") {
        None => LocalRanks::One,
        Some("auto" | "gpu" | "cpu") => LocalRanks::PerDevice,
        Some(_) => match vars.number("PET_NPROC_PER_NODE")? {
            Some(0) => {
                return Err(vars.malformed("PET_NPROC_PER_NODE", "a positive number, auto, gpu or cpu"));
            }
            Some(count) => LocalRanks::Count(count),
            None => LocalRanks::One,
        },
    };
    let (launcher, local_process) = (Launcher::Pet, Some(0));
    Ok(Launch { launcher, process, num_processes, local_process, ranks_here, meeting_point, job: None })
}

/// Reads a Slurm step. `None` inside an allocation of one task without a step: a plain command in a
/// batch script.
fn slurm(vars: &Variables) -> Result<Option<Launch>, LaunchError> {
    if !vars.has("SLURM_STEP_ID") {
        return match vars.number("SLURM_NTASKS")? {
            None | Some(1) => Ok(None),
            Some(_) => Err(Partial {
                found: vec![vars.show("SLURM_JOB_ID"), vars.show("SLURM_NTASKS")],
                missing: vec!["SLURM_STEP_ID".into()],
                hint: "start the ranks with srun, or ask for one task (srun -n1, --ntasks=1)",
            }),
        };
    }
    let names = ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS"];
    vars.require(&names, &names[2..], "srun sets all of them")?;
    let (process, num_processes) = vars.place("SLURM_PROCID", "SLURM_NTASKS")?;
    let job = vars.number("SLURM_JOB_ID")?.unwrap_or_default();
    let step = vars.number("SLURM_STEP_ID")?.unwrap_or_default();
    let meeting_point = match (num_processes, vars.get("MASTER_ADDR"), vars.get("MASTER_PORT")) {
        (1, ..) => None,
        (_, Some(_), Some(_)) => vars.meeting_point("MASTER_ADDR", "MASTER_PORT", false)?,
        _ => {
            vars.require(
                &["SLURM_STEP_NODELIST"],
                &["SLURM_STEP_NODELIST"],
                "srun sets it; or set MASTER_ADDR, MASTER_PORT",
            )?;
            let hosts = vars.get("SLURM_STEP_NODELIST").unwrap_or_default();
            let host = first_host(hosts)
                .ok_or_else(|| vars.malformed("SLURM_STEP_NODELIST", "a Slurm host list"))?;
            Some(RendezvousEndpoint { host, port: slurm_port(job, step), served: false })
        }
    };
    let (launcher, local_process) = (Launcher::Slurm, vars.number("SLURM_LOCALID")?);
    let ranks_here = LocalRanks::One;
    let job = Some(format!("{job}.{step}"));
    Ok(Some(Launch { launcher, process, num_processes, local_process, ranks_here, meeting_point, job }))
}

/// Returns one of the highest 4096 ports. Jobs on one host need different ones, also consecutive jobs such
/// as an array's, and so do steps of a job that run at once: steps are far apart.
fn slurm_port(job: usize, step: usize) -> u16 {
    u16::MAX - 4095 + ((job % 4096 + step % 4096 * 509) % 4096) as u16
}

/// Returns the first name of a Slurm host list such as `gpu[07-09,12],login1`.
fn first_host(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let mut host = list[..end].to_owned();
    if let Some(inside) = list[end..].strip_prefix('[') {
        let number = inside.split([',', '-', ']']).next()?;
        host.push_str(number);
        // The text behind the bracket belongs to every name: `rack[1-2]-a`.
        let rest = &inside[inside.find(']')? + 1..];
        host.push_str(rest.split(',').next().unwrap_or_default());
    }
    (!host.is_empty() && !host.contains('[')).then_some(host)
}

fn mpi(
    vars: &Variables,
    launcher: Launcher,
    names: [&'static str; 2],
    (local_rank, local_size): (&str, &str),
) -> Result<Launch, LaunchError> {
    vars.require(&names, &names, "mpirun sets both")?;
    let (process, num_processes) = vars.place(names[0], names[1])?;
    let all_here = match launcher {
        Launcher::Flux => vars.number("FLUX_JOB_NNODES")? == Some(1),
        _ => vars.number(local_size)? == Some(num_processes),
    };
    let job = ["PMIX_NAMESPACE", "I_MPI_HYDRA_UUID", "FLUX_JOB_ID"]
        .iter()
        .find_map(|name| vars.get(name))
        .map(str::to_owned);
    let meeting_point = match (vars.get("MASTER_ADDR"), vars.get("MASTER_PORT")) {
        _ if num_processes == 1 => None,
        (None, None) if all_here => {
            let port = job.as_deref().map_or(29500, job_port);
            Some(RendezvousEndpoint { host: "127.0.0.1".into(), port, served: false })
        }
        (None, None) => None,
        _ => {
            let needed = ["MASTER_ADDR", "MASTER_PORT"];
            vars.require(&[names[1], needed[0], needed[1]], &needed, NO_ADDRESS)?;
            vars.meeting_point(needed[0], needed[1], false)?
        }
    };
    let (local_process, ranks_here) = (vars.number(local_rank)?, LocalRanks::One);
    Ok(Launch { launcher, process, num_processes, local_process, ranks_here, meeting_point, job })
}

/// Returns one of the highest 4096 ports for a job's name, as jobs of one machine need different ones
/// (FNV-1a).
fn job_port(job: &str) -> u16 {
    let hash =
        job.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    u16::MAX - 4095 + ((hash ^ (hash >> 16)) % 4096) as u16
}

fn indexed_job(vars: &Variables) -> Result<Launch, LaunchError> {
    vars.require(
        &["JOB_COMPLETION_INDEX", "WORLD_SIZE"],
        &["WORLD_SIZE"],
        "Kubernetes does not tell a pod the number of completions; set WORLD_SIZE in the manifest, to 1 for separate runs",
    )?;
    if vars.number("WORLD_SIZE")? == Some(1) {
        // Separate runs, one per index: each is a single process.
        return Ok(Launch { launcher: Launcher::IndexedJob, ..Launch::alone() });
    }
    let (process, num_processes) = vars.place("JOB_COMPLETION_INDEX", "WORLD_SIZE")?;
    vars.require(
        &["JOB_COMPLETION_INDEX", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"],
        &["MASTER_ADDR", "MASTER_PORT"],
        "set them in the manifest: the first pod's name is <job>-0.<subdomain>",
    )?;
    let meeting_point = vars.meeting_point("MASTER_ADDR", "MASTER_PORT", false)?;
    let (launcher, local_process, ranks_here) = (Launcher::IndexedJob, Some(0), LocalRanks::One);
    Ok(Launch { launcher, process, num_processes, local_process, ranks_here, meeting_point, job: None })
}

/// Lookups with errors.
struct Variables<'a>(&'a Environment);

impl Variables<'_> {
    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|value| value.trim()).filter(|value| !value.is_empty())
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn show(&self, name: &str) -> String {
        format!("{name}={}", self.get(name).unwrap_or_default())
    }

    fn malformed(&self, name: &str, expected: &'static str) -> LaunchError {
        Malformed { variable: name.into(), value: self.get(name).unwrap_or_default().into(), expected }
    }

    fn number(&self, name: &str) -> Result<Option<usize>, LaunchError> {
        let parse = |value: &str| value.parse().map_err(|_| self.malformed(name, "a whole number"));
        self.get(name).map(parse).transpose()
    }

    /// Fails unless all of `needed` are set; the error also names the launcher's variables that
    /// are.
    fn require(&self, all: &[&str], needed: &[&str], hint: &'static str) -> Result<(), LaunchError> {
        let missing: Vec<_> = needed.iter().filter(|name| !self.has(name)).map(ToString::to_string).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let found = all.iter().filter(|name| self.has(name)).map(|name| self.show(name)).collect();
        Err(Partial { found, missing, hint })
    }

    /// Returns a rank and its world size.
    fn place(&self, rank_name: &str, size_name: &str) -> Result<(usize, usize), LaunchError> {
        let number = |name| self.number(name)?.ok_or_else(|| self.malformed(name, "a whole number"));
        let (rank, size) = (number(rank_name)?, number(size_name)?);
        if rank >= size {
            let hint = "a rank is at least 0 and less than the world size";
            return Err(Contradictory { first: self.show(rank_name), second: self.show(size_name), hint });
        }
        Ok((rank, size))
    }

    fn meeting_point(
        &self,
        host: &str,
        port: &str,
        served: bool,
    ) -> Result<Option<RendezvousEndpoint>, LaunchError> {
        let number = self.get(port).and_then(|value| value.parse().ok()).filter(|&port| port != 0);
        let port = number.ok_or_else(|| self.malformed(port, "a TCP port"))?;
        let given = self.get(host).unwrap_or_default();
        // An IPv6 address may come in the brackets of an address with a port.
        let name = match given.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']').unwrap_or_default(),
            None => given,
        };
        let is_name = !name.is_empty() && !name.contains(['[', ']', '/', ' ']);
        // A colon belongs to an IPv6 address alone, and the port has a variable of its own.
        if !is_name
            || name.contains(':') && name.split('%').next().is_none_or(|ip| ip.parse::<Ipv6Addr>().is_err())
        {
            return Err(self.malformed(host, "a host name or an address, without a port"));
        }
        Ok(Some(RendezvousEndpoint { host: name.to_owned(), port, served }))
    }
}
