//! From a config to a run that is ready: everything is opened and checked, planned, and loaded.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use tandem_comm::{Phase, ProcessGroup};
use tandem_judge::{Environment, Panel};
use tandem_kernels::cuda::driver::MatmulChoice;
use tandem_kernels::{Backend, Profile, release_free_heap};

use super::memory::{explained, refuse_too_large};
use super::{Files, Options, Trainer};
use crate::checkpoint::{Cursor, Saver, record_state, snapshot};
use crate::config::{Aggregation, Config, EnvironmentConfig, Length};
use crate::events::{Event, Observer};
use crate::inputs::RunInputs;
use crate::judges::{self, JudgeLine};
use crate::metrics::{Advisor, MetricsFile, Split, records};
use crate::online::conversation::ENVIRONMENT;
use crate::online::generate::LockstepGroup;
use crate::online::judging::Judging;
use crate::online::{
    AsyncRound, BackgroundGenerator, Generation, GenerationBackend, GenerationMode, Online, Server,
    check_state,
};
use crate::parallel::{DeviceMesh, Partition};
use crate::placement::MemoryPlacement;
use crate::plan::{Plan, PlanInputs};
use crate::profile::Profiler;
use crate::run::provenance::{ProvenanceWriter, Start, input_files};
use crate::run::run_dir::{RunDir, RunDirPolicy, is_file_of};
use crate::run::{agreement, attention, matmuls, resume};
use crate::samples::Sampler;
use crate::step::{TrainState, TrainStep};
use crate::trackers::{self, Trackers};
use crate::{Result, TrainError, reference, weights};

impl Trainer {
    /// [`Trainer::on_rank`], alone.
    pub fn new(config: Config, options: impl Into<Options>, observer: &mut dyn Observer) -> Result<Self> {
        Self::on_rank(config, options, ProcessGroup::alone(), observer)
    }

    /// Opens everything, checks it, plans, and loads weights: from the model, or from the newest
    /// checkpoint. Nothing is written into the run folder before all of the user's input has been
    /// checked.
    ///
    /// # Errors
    /// An input is missing or wrong, the run folder is in use, memory does not suffice, another
    /// rank failed, or only some ranks want a profile.
    pub fn on_rank(
        config: Config,
        options: impl Into<Options>,
        mut group: ProcessGroup,
        observer: &mut dyn Observer,
    ) -> Result<Self> {
        let Options { start, profile, until, matmuls } = options.into();
        agreement::on_config(&config, &mut group)?;
        if group.rank() == 0 {
            trackers::check(&config)?;
        }
        let recorder = Profiler::recorder(profile, &mut group)?;
        let progress = group.progress().clone();
        let mut mesh = DeviceMesh::new(group, &config.compute)?;
        let group = mesh.world();
        refuse_written_rows(&config)?;
        let run_dir = if group.rank() == 0 { Some(RunDir::open(&config.output, start)?) } else { None };
        // The first rank tokenises; the others find the tokens in the cache.
        if run_dir.is_none() {
            progress.begin_phase(Phase::Wait);
            group.barrier()?;
        }
        progress.begin_phase(Phase::Tokenize);
        if run_dir.is_some() {
            weights::check_all(&config)?;
        }
        let prepared = Arc::new(RunInputs::open(&config, observer)?);
        if run_dir.is_some() {
            group.barrier()?;
        }
        refuse_idle_warmup(&config, config.total_steps(prepared.train.num_rows()))?;
        agreement::on_run_folder(&config.output, run_dir.as_ref(), group)?;
        agreement::on_inputs(&config, &prepared, group)?;
        let outline = PlanInputs::new(&prepared);
        let plan = Plan::new(&config, &outline, group.rank(), group.size())?;
        observer.event(&Event::Plan(&plan));
        if let Some(idle) = plan.idle_ranks() {
            observer.event(&Event::Warning(&idle));
        }
        for note in config.notes(config.total_steps(prepared.train.num_rows())) {
            observer.event(&Event::Warning(&note));
        }
        let earlier = match &run_dir {
            Some(run_dir) if start == RunDirPolicy::Resume => resume::saved_config(run_dir)?,
            _ => None,
        };

        refuse_too_large(&config, &prepared, &plan, group)?;
        let place = (group.rank(), group.size());
        let opening = TrainerBuilder {
            config: &config,
            prepared: &prepared,
            outline: &outline,
            plan: &plan,
            start,
            earlier,
            matmuls,
        };
        let loaded = opening.load(&mut mesh, run_dir, recorder, observer);
        let Loaded { profiler, scorer, learner, saver, files, samples, cursor, resumed_from } =
            loaded.map_err(|error| explained(error, &config, &prepared, place, 0))?;
        let total_steps = config.total_steps(prepared.train.num_rows());
        // What opening and loading needed is not needed any more.
        release_free_heap();
        Ok(Self {
            online: online(&config, &prepared, &scorer, &cursor, samples, total_steps, &mut mesh)?,
            batches: prepared.batches(&config),
            batcher: prepared.batcher(&config),
            schedule: config.train.schedule(total_steps),
            sampler: Sampler::new(&config, &prepared),
            first_step: cursor.step,
            until,
            is_stopping: false,
            saved: resumed_from.clone().map(|path| (cursor.step, Some(path))),
            seconds_before: cursor.seconds,
            started: Instant::now(),
            config,
            mesh,
            prepared,
            saver,
            files,
            scorer,
            learner,
            cursor,
            resumed_from,
            profiler,
        })
    }
}

/// A planned run before loading.
struct TrainerBuilder<'a> {
    config: &'a Config,
    prepared: &'a RunInputs,
    outline: &'a PlanInputs<'a>,
    plan: &'a Plan,
    start: RunDirPolicy,
    /// Config of the folder's last run, if resumed.
    earlier: Option<Config>,
    /// Algorithms of matmuls, if given.
    matmuls: Option<Vec<MatmulChoice>>,
}

/// Loaded state.
struct Loaded {
    profiler: Option<Profiler>,
    scorer: TrainStep,
    learner: TrainState,
    saver: Saver,
    files: Option<Files>,
    /// Samples file of an online run, on rank 0.
    samples: Option<MetricsFile>,
    cursor: Cursor,
    resumed_from: Option<PathBuf>,
}

impl TrainerBuilder<'_> {
    fn load(
        self,
        mesh: &mut DeviceMesh,
        run_dir: Option<RunDir>,
        recorder: Option<Arc<Profile>>,
        observer: &mut dyn Observer,
    ) -> Result<Loaded> {
        let Self { config, prepared, outline, plan, start, earlier, matmuls } = self;
        let progress = mesh.world().progress().clone();
        let make = |recorder| Profiler::new(recorder, config, mesh.world());
        let profiler = recorder.map(make).transpose()?;
        progress.begin_phase(Phase::Reference);
        let newest = match &run_dir {
            Some(run_dir) => resume::newest_checkpoint(run_dir, start, observer)?,
            None => None,
        };
        // A run that goes on keeps its algorithms, and has the library's first choice if it has no record.
        let (recorded, recorded_attention) = run_dir
            .as_ref()
            .zip(newest.as_ref())
            .map(|(run_dir, checkpoint)| resume::recorded_kernels(run_dir, checkpoint.cursor().step))
            .unzip();
        let part = mesh.part(&prepared.decoder)?;
        let attention =
            attention::choose(config, outline, part.spec(), recorded_attention, mesh.world(), observer)?;
        let proposed = matmuls::propose(config, outline, matmuls.or(recorded), mesh.world(), observer)?;
        let rank = mesh.world().rank();
        let mut placement = MemoryPlacement::open(config, attention, plan.needs(), plan.rooms, rank)?;
        if mesh.world().size() > 1 && placement.device.backend() == Backend::Cuda {
            placement.load_ahead(&head_dims(config, prepared)?)?;
        }
        proposed.agree(config, outline, &mut placement, mesh.world(), observer)?;
        if let Some(profiler) = &profiler {
            placement = placement.profiled(profiler.recording());
        }
        let splits = [Split::Train, Split::Eval];
        let (policy, reference) = reference::load(config, prepared, &placement, mesh, &splits, observer)?;
        progress.begin_phase(Phase::Load);
        let decoder = &mesh.part(&prepared.decoder)?;
        let partition = Arc::new(Partition::for_run(&config.compute, decoder, mesh));
        let single = outline.survey(config)?.single_micro_batches;
        let mut learner = TrainState::new(config, decoder, &placement, mesh, partition, single)?;
        let mut scorer = TrainStep::new(config, placement, decoder.clone(), policy, reference);
        scorer.progress = progress;
        learner.optimizer.start(&scorer.policy)?;

        let (mut cursor, mut resumed_from) = (Cursor::default(), None);
        if let Some(checkpoint) = resume::agree_on(newest, mesh.world())? {
            let data_hash = prepared.train.content_hash().to_string();
            let TrainStep { policy, reference, .. } = &mut scorer;
            let (optimizer, follower) = (&mut learner.optimizer, reference.ema_reference());
            snapshot::restore(&checkpoint, &data_hash, decoder, policy, optimizer, follower)
                .map_err(|error| resume::of_changed_model(error, config))?;
            scorer.refresh()?;
            cursor = checkpoint.cursor().clone();
            let (done, steps) = (cursor.step, config.total_steps(prepared.train.num_rows()));
            if done > steps {
                let reason = format!(
                    "{}: {done} steps are done, and train.steps or train.epochs asks for {steps} in all: ask for at least {done}, or \
                     start another run with another output",
                    checkpoint.path().display()
                );
                return Err(TrainError::Mismatch { reason });
            }
            scorer.rewards = cursor.rewards.unwrap_or_default();
            learner.optimizer.restore_weighting(cursor.schedule_free);
            resumed_from = Some(checkpoint.path().to_path_buf());
            resume::warn_of_changes(config, earlier.as_ref(), observer);
        }
        scorer.placement.reserve()?;
        let begun = Start::new(config, prepared, &scorer.placement, cursor.step, mesh.world())?;
        // Only now: a run that is refused leaves the folder, and the config to compare the next
        // attempt with, as it was.
        let mut samples = None;
        let files = match run_dir {
            None => None,
            Some(run_dir) => {
                run_dir.begin(config, &format!("{:#}\n", plan.to_json()))?;
                let mut damaged = Vec::new();
                let mut open = |path: &Path| {
                    if resumed_from.is_none() {
                        return MetricsFile::create(path);
                    }
                    let (file, lines) = MetricsFile::resume(path, cursor.step, cursor.is_evaluation_due)?;
                    damaged.extend(lines.iter().map(|line| format!("{}:{line}", path.display())));
                    Ok(file)
                };
                let metrics = open(&run_dir.metrics_path())?;
                if let Some(last) = metrics.last_step().filter(|&last| last < cursor.step) {
                    observer.event(&Event::Warning(&format!(
                        "{} ends with step {last}, and the checkpoint is of step {}: the lines between were lost, as in a power \
                         failure",
                        run_dir.metrics_path().display(),
                        cursor.step
                    )));
                }
                // The writer of checkpoints appends to it, and may have been killed before it did.
                let states = open(&run_dir.states_path())?;
                if let Some(path) = resumed_from.as_ref().filter(|_| states.last_step() != Some(cursor.step))
                {
                    record_state(&run_dir.states_path(), path, &AtomicBool::new(false))?;
                }
                let inputs = input_files(config, prepared)?;
                let recorded = resume::provenance(&run_dir, resumed_from.is_some(), &begun, observer);
                let provenance = ProvenanceWriter::begin(run_dir.path(), recorded, begun, inputs)?;
                let rows = config.train.record_rows.then(|| open(&run_dir.rows_path())).transpose()?;
                let is_sampled = match &config.online {
                    Some(online) => online.samples_every.is_some(),
                    None => config.num_samples() > 0,
                };
                let mut file = is_sampled.then(|| open(&run_dir.samples_path())).transpose()?;
                if config.online.is_some() {
                    samples = file.take();
                }
                if !damaged.is_empty() {
                    observer.event(&Event::Warning(&format!(
                        "lines that cannot be read, for they are no JSON object with a `step`: {}. They stay as they are, and \
                         reports leave them out",
                        damaged.join(", ")
                    )));
                }
                let mut advisor = Advisor::new(config);
                for record in records(&run_dir.metrics_path())? {
                    let record = record?;
                    // What an earlier process has said is not said again.
                    advisor.see(&record);
                }
                let step = (start == RunDirPolicy::Resume).then_some(cursor.step);
                // A tracker says nothing of what cannot be read: metrics.jsonl has it.
                let earlier = Box::new(records(&run_dir.metrics_path())?.map_while(Result::ok));
                let trackers = Trackers::start(config, run_dir.path(), step, earlier);
                Some(Files { trackers, provenance, run_dir, metrics, rows, samples: file, advisor })
            }
        };
        let saver = Saver::new(config, decoder, mesh, learner.snapshot.take());
        Ok(Loaded { profiler, scorer, learner, saver, files, samples, cursor, resumed_from })
    }
}

/// Refuses rows in a file that the run writes: it would be emptied before it is read.
fn refuse_written_rows(config: &Config) -> Result<()> {
    for (key, sources) in [("data.train", &config.data.train), ("data.eval", &config.data.eval)] {
        let path = sources.iter().map(|source| &source.path).find(|path| is_file_of(&config.output, path));
        if let Some(path) = path {
            let reason =
                format!("{key}: the run writes {} itself; change `output`, or move the rows", path.display());
            return Err(TrainError::Mismatch { reason });
        }
    }
    Ok(())
}

/// Refuses epochs whose only step has a learning rate of 0, the first of its warm-up. One step that was asked for is a
/// trial, which is told.
fn refuse_idle_warmup(config: &Config, total_steps: u64) -> Result<()> {
    let is_asked_for = matches!(config.train.length, Length::Steps(_));
    if is_asked_for || !config.is_all_warmup(total_steps) {
        return Ok(());
    }
    let reason = "the run has one step, which is the first of its warm-up and has a learning rate of 0: nothing would be \
                  learned; set train.warmup_ratio = 0 (or train.warmup_steps = 0), or train for more steps"
        .to_owned();
    Err(TrainError::Mismatch { reason })
}

/// Creates the source of pairs of an online run.
fn online(
    config: &Config,
    prepared: &Arc<RunInputs>,
    scorer: &TrainStep,
    cursor: &Cursor,
    samples: Option<MetricsFile>,
    total_steps: u64,
    mesh: &mut DeviceMesh,
) -> Result<Option<Online>> {
    let Some(options) = &config.online else { return Ok(None) };
    let state = cursor.online.clone().unwrap_or_default();
    check_state(&state, options)?;
    let (on_line, lines) = mpsc::channel();
    let is_first = mesh.world().rank() == 0;
    let (mut environment, mut judges) = (None, None);
    match &options.environment {
        // A distillation asks nobody but its teacher.
        _ if !is_first || config.distill.is_some() => {}
        Some(section) => environment = Some(Box::new(self::environment(section, on_line)?)),
        None => judges = Some(panel(config, &scorer.placement, on_line)?),
    }
    let longest = prepared.longest_prompt;
    let generation = |mesh: &mut DeviceMesh| Generation::from_config(config, longest, mesh.data().size());
    let answerer = if options.server.is_some() {
        let server = Server::from_config(config, mesh.world().rank() == 0)?;
        Some(GenerationBackend::Server(Box::new(server), mesh.world().split(0)?))
    } else if let Some(device) = scorer.placement.background_device() {
        let device = device.clone();
        let borrower = BackgroundGenerator::new(generation(mesh), config, scorer, device, mesh)?;
        Some(GenerationBackend::Borrower(Box::new(borrower)))
    } else {
        None
    };
    let names: Option<Vec<String>> = environment.is_some().then(|| vec![ENVIRONMENT.to_owned()]);
    let answering = match answerer {
        Some(answerer) => GenerationMode::Aside(AsyncRound::new(answerer, &options.stop)),
        None => {
            let (generation, together) =
                (Box::new(generation(mesh)), LockstepGroup::from_config(config, mesh.shard())?);
            GenerationMode::Before { generation, together, environment }
        }
    };
    let normalizes = config
        .online
        .as_ref()
        .and_then(|online| online.algorithm.grpo())
        .is_some_and(|grpo| grpo.aggregation == Aggregation::NormalizeThenSum);
    let (judging, prepared) = (Judging::new(judges, lines, normalizes), prepared.clone());
    let judging = match names {
        Some(names) => judging.with_names(names),
        None => judging,
    };
    Ok(Some(Online::new(config, prepared, answering, judging, samples, state, total_steps)))
}

/// Starts the environment; `lines` receives its stderr.
fn environment(section: &EnvironmentConfig, lines: mpsc::Sender<String>) -> Result<Environment> {
    let on_line = Arc::new(move |line: &str| {
        // The receiver is gone when the run is over.
        let _ = lines.send(format!("environment: {line}"));
    });
    Ok(Environment::new(section.command.clone(), on_line)?)
}

/// Lists the head sizes of all models that a run computes with.
fn head_dims(config: &Config, prepared: &RunInputs) -> Result<Vec<usize>> {
    let own = std::iter::once(&prepared.decoder).chain(&prepared.teacher);
    let mut head_dims: Vec<_> = own.map(|decoder| decoder.spec().attention.head_dim).collect();
    head_dims.extend(judges::head_dims(&config.judges)?);
    Ok(head_dims)
}

/// Opens the judges; `lines` receives their commands' stderr.
fn panel(config: &Config, placement: &MemoryPlacement, lines: mpsc::Sender<String>) -> Result<Panel> {
    let on_line: JudgeLine = Arc::new(move |judge, line| {
        // The receiver is gone when the run is over.
        let _ = lines.send(format!("judge `{judge}`: {line}"));
    });
    let device = placement.judges().unwrap_or(&placement.device);
    judges::panel(&config.judges, device, config.compute.compute_type(), &on_line)
}
