//! Which rank am I, of how many: read from the variables that launchers set.
//!
//! | launcher | variables |
//! |---|---|
//! | torchrun, accelerate, DeepSpeed, Ray Train | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` |
//! | Kubeflow PyTorchJob v1 | the same without `LOCAL_RANK`, one process a pod |
//! | Kubeflow Trainer v2 | `PET_NNODES`, `PET_NPROC_PER_NODE`, `PET_NODE_RANK`, `PET_MASTER_ADDR`, `PET_MASTER_PORT` |
//! | `srun` | `SLURM_STEP_ID`, `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID`, `SLURM_STEP_NODELIST`, `SLURM_JOB_ID` |
//! | Open MPI's `mpirun` | `OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}` |
//! | MPICH's and Intel's `mpiexec` | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
//! | Kubernetes Indexed Job, JobSet | `JOB_COMPLETION_INDEX`, and `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` from the manifest |
//!
//! A partial environment (a rank without a world) or a contradictory one (two launchers that disagree) is an
//! error that names the variables. The alternative, carrying on as a world of one, trains N separate models into
//! the same folder and tells nobody.

pub mod open_files;
#[cfg(feature = "gloo")]
pub mod processes;

use std::collections::BTreeMap;
use std::fmt;

use crate::launch::LaunchError::{Contradictory, Malformed, Partial};

/// Environment variables by name. Variables that are set to the empty string count as unset.
pub type Environment = BTreeMap<String, String>;

/// Who started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// Nobody: a plain command.
    None,
    /// torchrun's elastic agent, which serves the store at `MASTER_ADDR:MASTER_PORT` itself.
    Torchrun,
    /// Anything else that sets `RANK` and `WORLD_SIZE`.
    RankVariables,
    /// Kubeflow Trainer v2's `PET_*` variables, with no torchrun in between.
    Pet,
    /// A Slurm job step.
    Slurm,
    /// Open MPI.
    OpenMpi,
    /// MPICH, Intel MPI, or another that speaks PMI.
    Pmi,
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
            Self::IndexedJob => "an Indexed Job",
        })
    }
}

/// How many ranks this one process stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RanksHere {
    /// The launcher started one process a rank.
    One,
    /// The launcher started one process a machine, which starts this many ranks.
    Count(usize),
    /// One process a machine, which starts as many ranks as it has devices.
    PerDevice,
}

/// The address of the store at which the ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeetingPoint {
    /// Host name or address.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Whether the launcher already serves a store there, so that no rank may bind the port.
    pub served: bool,
}

/// This process's place among those that were started together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Who started it.
    pub launcher: Launcher,
    /// Index of this process among all processes, from 0.
    pub process: usize,
    /// Number of processes.
    pub num_processes: usize,
    /// Index among the processes on this machine, where the launcher says so.
    pub local_process: Option<usize>,
    /// How many ranks this process stands for.
    pub ranks_here: RanksHere,
    /// Where they meet; `None` for a process that is alone.
    pub meeting_point: Option<MeetingPoint>,
}

/// The environment does not say one clear thing.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// Some of a launcher's variables are set and others are missing.
    #[error("{} set, but {} not: {hint}", list(found), list(missing))]
    Partial {
        /// What is set, as `NAME=value`.
        found: Vec<String>,
        /// What should be set too.
        missing: Vec<String>,
        /// What to do.
        hint: &'static str,
    },
    /// Two variables, or two launchers, disagree.
    #[error("{first} contradicts {second}: {hint}")]
    Contradictory {
        /// One side, as `NAME=value`.
        first: String,
        /// The other side.
        second: String,
        /// What to do.
        hint: &'static str,
    },
    /// A variable is not what it should be.
    #[error("{variable}={value} is not {expected}")]
    Malformed {
        /// The variable.
        variable: String,
        /// What it holds.
        value: String,
        /// What it should hold.
        expected: &'static str,
    },
}

fn list(names: &[String]) -> String {
    let verb = if names.len() == 1 { "is" } else { "are" };
    format!("{} {verb}", names.join(", "))
}

const UNSET: &str = "unset what is left over from another job, or start all ranks through one launcher";

impl Launch {
    /// Reads the environment of this process.
    ///
    /// # Errors
    /// See [`Launch::from_environment`].
    pub fn detect() -> Result<Self, LaunchError> {
        let text = |os: std::ffi::OsString| os.to_string_lossy().into_owned();
        Self::from_environment(&std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect())
    }

    /// A process that nobody launched.
    pub fn alone() -> Self {
        Self {
            launcher: Launcher::None,
            process: 0,
            num_processes: 1,
            local_process: None,
            ranks_here: RanksHere::One,
            meeting_point: None,
        }
    }

    /// Whether more than one rank is asked for, as far as the launcher knows.
    pub fn is_distributed(&self) -> bool {
        self.num_processes > 1 || matches!(self.ranks_here, RanksHere::Count(n) if n > 1)
    }

    /// Reads a map of variables.
    ///
    /// The nearest launcher speaks first: `RANK` before the `PET_*` variables that configured the torchrun which
    /// set it, and both before Slurm or MPI, which may have started that torchrun. Where `RANK` was not set by
    /// torchrun and an MPI or Slurm world of several is around as well, the two must agree.
    ///
    /// # Errors
    /// If the environment is partial, contradictory or malformed.
    pub fn from_environment(environment: &Environment) -> Result<Self, LaunchError> {
        let vars = Variables(environment);
        if vars.has("TORCHELASTIC_RUN_ID") {
            return rank_variables(&vars, Launcher::Torchrun);
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

/// A launch found by MPI's or Slurm's variables, with the names that hold its rank and its size.
type Outer = (Launch, &'static str, &'static str);

fn outer_launcher(vars: &Variables) -> Result<Option<Outer>, LaunchError> {
    let open_mpi = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"];
    if open_mpi.iter().any(|name| vars.has(name)) {
        let local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
        return Ok(Some((mpi(vars, Launcher::OpenMpi, open_mpi, local)?, open_mpi[0], open_mpi[1])));
    }
    let pmi = ["PMI_RANK", "PMI_SIZE"];
    // Slurm's PMI plug-in sets PMI_RANK too; then the Slurm step is the better source (it knows the hosts).
    if pmi.iter().any(|name| vars.has(name)) && !vars.has("SLURM_STEP_ID") {
        let local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS");
        return Ok(Some((mpi(vars, Launcher::Pmi, pmi, local)?, pmi[0], pmi[1])));
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
        "a launcher sets all of them; unset what is left over from another job",
    )?;
    let (process, num_processes) = vars.place("RANK", "WORLD_SIZE")?;
    let meeting_point = if num_processes == 1 {
        None
    } else {
        vars.require(
            &["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"],
            &["MASTER_ADDR", "MASTER_PORT"],
            "ranks need an address at which to meet",
        )?;
        // torchrun's agent says whether it serves the store; where it says nothing, as before torch 1.9, it does not.
        let served = vars.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v.eq_ignore_ascii_case("true"));
        vars.meeting_point("MASTER_ADDR", "MASTER_PORT", served)?
    };
    let local_process = vars.number("LOCAL_RANK")?;
    if let Some(local) = local_process.filter(|&local| local > process) {
        return Err(Contradictory {
            first: format!("LOCAL_RANK={local}"),
            second: format!("RANK={process}"),
            hint: "a rank on this machine cannot be higher than the rank among all",
        });
    }
    Ok(Launch { launcher, process, num_processes, local_process, ranks_here: RanksHere::One, meeting_point })
}

fn pet(vars: &Variables) -> Result<Launch, LaunchError> {
    let all = ["PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"];
    vars.require(&all, &["PET_NNODES", "PET_NODE_RANK"], "the trainer's pod template sets all of them")?;
    // "2:4" is torchrun's elastic range, which only its own agent can negotiate.
    let (process, num_processes) = vars.place("PET_NODE_RANK", "PET_NNODES")?;
    let meeting_point = if num_processes == 1 {
        None
    } else {
        vars.require(&all, &all[3..], "nodes need an address at which to meet")?;
        vars.meeting_point("PET_MASTER_ADDR", "PET_MASTER_PORT", false)?
    };
    let ranks_here = match vars.get("PET_NPROC_PER_NODE") {
        None => RanksHere::One,
        Some("auto" | "gpu" | "cpu") => RanksHere::PerDevice,
        Some(_) => match vars.number("PET_NPROC_PER_NODE")? {
            Some(0) => {
                return Err(vars.malformed("PET_NPROC_PER_NODE", "a positive number, auto, gpu or cpu"));
            }
            Some(count) => RanksHere::Count(count),
            None => RanksHere::One,
        },
    };
    Ok(Launch {
        launcher: Launcher::Pet,
        process,
        num_processes,
        local_process: Some(0),
        ranks_here,
        meeting_point,
    })
}

/// `None` inside an allocation of one task in which no step was started: a plain command in a batch script.
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
            let job = vars.number("SLURM_JOB_ID")?.unwrap_or_default();
            // Two jobs on one host must not meet at the same port: the highest 4096 are dealt out by job id.
            let port = u16::MAX - 4095 + (job % 4096) as u16;
            Some(MeetingPoint { host, port, served: false })
        }
    };
    Ok(Some(Launch {
        launcher: Launcher::Slurm,
        process,
        num_processes,
        local_process: vars.number("SLURM_LOCALID")?,
        ranks_here: RanksHere::One,
        meeting_point,
    }))
}

/// The first name of a Slurm host list such as `gpu[07-09,12],login1`.
fn first_host(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let mut host = list[..end].to_owned();
    if let Some(inside) = list[end..].strip_prefix('[') {
        let number = inside.split([',', '-', ']']).next()?;
        host.push_str(number);
        // What stands behind the bracket belongs to every name: `rack[1-2]-a`.
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
    let all_here = vars.number(local_size)? == Some(num_processes);
    let meeting_point = match (vars.get("MASTER_ADDR"), vars.get("MASTER_PORT")) {
        _ if num_processes == 1 => None,
        (None, None) if all_here => {
            Some(MeetingPoint { host: "127.0.0.1".into(), port: 29500, served: false })
        }
        _ => {
            let needed = ["MASTER_ADDR", "MASTER_PORT"];
            vars.require(
                &[names[1], needed[0], needed[1]],
                &needed,
                "mpirun does not say where the ranks of several machines meet; pass both with -x or -genv",
            )?;
            vars.meeting_point(needed[0], needed[1], false)?
        }
    };
    Ok(Launch {
        launcher,
        process,
        num_processes,
        local_process: vars.number(local_rank)?,
        ranks_here: RanksHere::One,
        meeting_point,
    })
}

fn indexed_job(vars: &Variables) -> Result<Launch, LaunchError> {
    vars.require(
        &["JOB_COMPLETION_INDEX", "WORLD_SIZE"],
        &["WORLD_SIZE"],
        "Kubernetes does not tell a pod the number of completions; set WORLD_SIZE in the manifest, to 1 for separate runs",
    )?;
    if vars.number("WORLD_SIZE")? == Some(1) {
        // Separate runs, one an index: each is alone whatever its index.
        return Ok(Launch { launcher: Launcher::IndexedJob, ..Launch::alone() });
    }
    let (process, num_processes) = vars.place("JOB_COMPLETION_INDEX", "WORLD_SIZE")?;
    vars.require(
        &["JOB_COMPLETION_INDEX", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"],
        &["MASTER_ADDR", "MASTER_PORT"],
        "set them in the manifest: the first pod's name is <job>-0.<subdomain>",
    )?;
    Ok(Launch {
        launcher: Launcher::IndexedJob,
        process,
        num_processes,
        local_process: Some(0),
        ranks_here: RanksHere::One,
        meeting_point: vars.meeting_point("MASTER_ADDR", "MASTER_PORT", false)?,
    })
}

/// Lookups that know how to complain.
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

    /// An error unless all of `needed` are set; it also names which of the launcher's other variables are.
    fn require(&self, all: &[&str], needed: &[&str], hint: &'static str) -> Result<(), LaunchError> {
        let missing: Vec<_> = needed.iter().filter(|name| !self.has(name)).map(ToString::to_string).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let found = all.iter().filter(|name| self.has(name)).map(|name| self.show(name)).collect();
        Err(Partial { found, missing, hint })
    }

    /// A rank and the size of its world.
    fn place(&self, rank_name: &str, size_name: &str) -> Result<(usize, usize), LaunchError> {
        let number = |name| self.number(name)?.ok_or_else(|| self.malformed(name, "a whole number"));
        let (rank, size) = (number(rank_name)?, number(size_name)?);
        if rank >= size {
            let hint = "ranks count from 0 to one less than the number of them";
            return Err(Contradictory { first: self.show(rank_name), second: self.show(size_name), hint });
        }
        Ok((rank, size))
    }

    fn meeting_point(
        &self,
        host: &str,
        port: &str,
        served: bool,
    ) -> Result<Option<MeetingPoint>, LaunchError> {
        let number = self.get(port).and_then(|value| value.parse().ok()).filter(|&port| port != 0);
        let port = number.ok_or_else(|| self.malformed(port, "a TCP port"))?;
        Ok(Some(MeetingPoint { host: self.get(host).unwrap_or_default().into(), port, served }))
    }
}
