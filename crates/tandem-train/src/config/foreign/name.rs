//! A setting of another program, and its meaning here.

use serde_json::Value;

/// A setting of another program, under all its names.
pub(super) struct Name {
    /// Names, dotted where the program nests them.
    pub names: &'static [&'static str],
    pub meaning: Meaning,
}

/// Meaning of another program's setting here.
#[derive(Clone, Copy)]
pub(super) enum Meaning {
    /// A key of ours.
    Key {
        /// Full key.
        key: &'static str,
        /// Conversion of a value.
        convert: fn(&Value) -> Converted,
        /// Difference to know; may be empty.
        remark: &'static str,
    },
    /// One of several settings that together give keys of ours.
    Part {
        part: Part,
        /// Sentence for a user who wrote the name into a configuration of ours.
        advice: &'static str,
    },
    /// Nothing to write, and why.
    NotNeeded(&'static str),
    /// A feature that is missing here, and why or what to do.
    Missing(&'static str),
}

/// A value of ours.
pub(super) enum Converted {
    /// The value.
    Value(toml::Value),
    /// The value, which is not quite the same, and the difference.
    Changed(toml::Value, &'static str),
    /// No value: the default says the same, and why.
    Same(&'static str),
    /// No value has this meaning.
    Missing(&'static str),
    /// A value of another type than expected.
    Wrong(&'static str),
}

/// A setting that only together with others gives keys of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    // Method and data.
    Method,
    Dataset,
    Datasets,
    DatasetConfig,
    TrainSplit,
    TestSplit,
    EvalDataset,
    EvalShare,
    DatasetFolder,
    MaxRows,
    CompletionOnly,
    AssistantOnly,
    TextColumn,
    TrainOnPrompt,
    Packing,
    Shuffle,
    // Batches and steps.
    DeviceBatch,
    Accumulation,
    Batch,
    Processes,
    ContextRanks,
    SequenceRanks,
    Epochs,
    MaxSteps,
    EvalStrategy,
    EvalSteps,
    EvalsPerEpoch,
    SaveStrategy,
    SaveSteps,
    SavesPerEpoch,
    EvalExamples,
    Examples,
    EvalRows,
    EvalFirst,
    KeepsBest,
    BestMetric,
    Patience,
    PatienceThreshold,
    // Optimiser and schedule.
    LearningRate,
    Optimizer,
    Beta1,
    Beta2,
    Betas,
    Schedule,
    ScheduleOptions,
    WarmupType,
    WarmupSteps,
    WarmupRatio,
    // Adapter and formats.
    UseAdapter,
    NewAdapter,
    Rank,
    Alpha,
    Dropout,
    DisableDropout,
    Targets,
    TargetLinear,
    Dora,
    Load4Bit,
    Load8Bit,
    Bits,
    QuantType,
    // Objective and reference.
    Loss,
    LossWeights,
    SftWeight,
    CpoAlpha,
    Exploration,
    LabelSmoothing,
    Sync,
    RefModel,
    OwnAnswers,
    TeachersAnswers,
    StepsPerGeneration,
    GenerationBatch,
    GenerationOptions,
    // Precision and devices.
    Bf16,
    Fp16,
    Tf32,
    MixedPrecision,
    Checkpointing,
    ZeroStage,
    OffloadOptimizer,
    OffloadWeights,
    OffloadFolder,
    WeightsFolder,
    OffloadActivations,
    Fsdp,
    FsdpFile,
    FsdpStrategy,
    FsdpReshard,
    DeepSpeed,
    Machines,
    Distributed,
    // Trackers.
    ReportTo,
    EventFolder,
    UseTensorboard,
    UseMlflow,
    MlflowUri,
    MlflowExperiment,
    UseWandb,
    WandbProject,
    WandbEntity,
    UseTrackio,
    UseComet,
}

/// Sentence for settings of Weights & Biases.
pub(super) const WANDB: &str = "it is `logging.command` here, with tools/trackers/wandb.py of the repository";

impl Name {
    /// Returns the sentence for a user who wrote the name into a configuration of ours.
    pub(super) fn advice(&self) -> String {
        match self.meaning {
            Meaning::Key { key, remark: "", .. } => format!("it is `{key}` here"),
            Meaning::Key { key, remark, .. } => format!("it is `{key}` here; {remark}"),
            Meaning::Part { advice, .. } => advice.to_owned(),
            Meaning::NotNeeded(reason) => format!("it is not needed: {reason}"),
            Meaning::Missing(reason) => format!("it cannot be had: {reason}"),
        }
    }
}

/// A setting that is a key of ours.
pub(super) const fn key(
    names: &'static [&'static str],
    key: &'static str,
    convert: fn(&Value) -> Converted,
) -> Name {
    key_but(names, key, convert, "")
}

/// A setting that is a key of ours, with a difference to know.
pub(super) const fn key_but(
    names: &'static [&'static str],
    key: &'static str,
    convert: fn(&Value) -> Converted,
    remark: &'static str,
) -> Name {
    Name { names, meaning: Meaning::Key { key, convert, remark } }
}

/// A setting that is a part of keys of ours.
pub(super) const fn part(names: &'static [&'static str], part: Part, advice: &'static str) -> Name {
    Name { names, meaning: Meaning::Part { part, advice } }
}

/// A setting that has nothing to say here.
pub(super) const fn not_needed(names: &'static [&'static str], reason: &'static str) -> Name {
    Name { names, meaning: Meaning::NotNeeded(reason) }
}

/// A setting of a feature that is missing here.
pub(super) const fn missing(names: &'static [&'static str], reason: &'static str) -> Name {
    Name { names, meaning: Meaning::Missing(reason) }
}
