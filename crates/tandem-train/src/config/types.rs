//! Types of config values that other rooms act on.

/// Offload target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Offload {
    /// Nothing.
    #[default]
    None,
    /// Weights, states and gradient sums, to host memory.
    Host,
    /// Weights and states to a file, gradient sums to host memory.
    Nvme,
}

impl Offload {
    /// Every choice with its name in the config.
    pub const NAMES: [(&'static str, Self); 3] =
        [("none", Self::None), ("host", Self::Host), ("nvme", Self::Nvme)];
}

/// State that is sharded over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sharding {
    /// Nothing: every rank holds everything.
    #[default]
    Ddp,
    /// Optimiser states.
    Zero1,
    /// Also gradient sums.
    Zero2,
    /// Also weights, the reference's too: a layer is gathered when it runs.
    Zero3,
}

impl Sharding {
    /// Every choice with its name in the config.
    pub const NAMES: [(&'static str, Self); 4] =
        [("ddp", Self::Ddp), ("zero1", Self::Zero1), ("zero2", Self::Zero2), ("zero3", Self::Zero3)];
}

/// State that the ranks of a shard group divide among them: the meaning of `compute.sharding`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardedState {
    /// Optimiser states, and with them each rank's part of an update.
    pub optimizer: bool,
    /// Gradient sums: a layer's are reduced during backward.
    pub gradients: bool,
    /// Weights, the reference's too: a layer is gathered when it runs.
    pub weights: bool,
}

impl From<Sharding> for ShardedState {
    fn from(sharding: Sharding) -> Self {
        Self {
            optimizer: sharding >= Sharding::Zero1,
            gradients: sharding >= Sharding::Zero2,
            weights: sharding == Sharding::Zero3,
        }
    }
}

impl ShardedState {
    /// Whether nothing is divided, as under DDP.
    pub fn is_none(self) -> bool {
        !self.optimizer
    }

    /// Whether ranks meet in the middle of a walk, so that one without a batch has to walk along.
    pub fn meets_in_walk(self) -> bool {
        self.gradients
    }
}

/// Kernels of bf16 attention on GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionKernels {
    /// Products of a warp, which every GPU has.
    #[default]
    Mma,
    /// Products of four warps: Hopper's.
    Wgmma,
    /// Kernels that a timing before the first step finds faster.
    Auto,
}

impl AttentionKernels {
    /// Every choice with its name in the config.
    pub const NAMES: [(&'static str, Self); 3] =
        [("mma", Self::Mma), ("wgmma", Self::Wgmma), ("auto", Self::Auto)];
}

/// How gradients are added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SumForm {
    /// In fixed point: the same bits on any number of ranks.
    #[default]
    Exact,
    /// In f32.
    Fast,
}

impl SumForm {
    /// Every choice with its name in the config.
    pub const NAMES: [(&'static str, Self); 2] = [("exact", Self::Exact), ("fast", Self::Fast)];
}
