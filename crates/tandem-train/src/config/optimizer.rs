//! The optimiser of `[train]` and its constants.

use tandem_kernels::Backend;
use toml::Value;

use super::Config;
use super::error::Result;
use super::form::{Form, POSITIVE, boolean, choice, custom, number};
use super::keys::{Keys, keys};
use super::reader::Entry;
use super::tree::Places;

/// The optimiser and its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// `torch.optim.AdamW`.
    AdamW {
        /// Decay rate of the first moment.
        beta1: f64,
        /// Decay rate of the second moment.
        beta2: f64,
        /// Term added to the root of the second moment.
        eps: f64,
    },
    /// `torch.optim.RMSprop`, which the original DPO code used.
    RmsProp {
        /// Decay rate of the squared gradient.
        alpha: f64,
        /// Term added to the root.
        eps: f64,
    },
    /// Lion (arXiv 2302.06675).
    Lion {
        /// Weight of the momentum in the direction.
        beta1: f64,
        /// Decay rate of the momentum.
        beta2: f64,
    },
    /// Schedule-free AdamW (arXiv 2405.15682).
    ScheduleFreeAdamW {
        /// Share of the average in the weights that train.
        beta1: f64,
        /// Decay rate of the second moment.
        beta2: f64,
        /// Term added to the root of the second moment.
        eps: f64,
    },
    /// `torch.optim.Muon` for the matrices of blocks, AdamW for everything else.
    Muon {
        /// Decay rate of the average of gradients.
        momentum: f64,
        /// Whether the direction is between the gradient and the new average.
        nesterov: bool,
        /// Ratio of a matrix's learning rate.
        adjust_lr: AdjustLr,
        /// Decay rate of AdamW's first moment.
        beta1: f64,
        /// Decay rate of AdamW's second moment.
        beta2: f64,
        /// Term added to the root of AdamW's second moment.
        eps: f64,
    },
    /// Adafactor (arXiv 1804.04235), with the constants that `optim="adafactor"` has in `transformers`.
    Adafactor,
    /// `torch.optim.SGD`.
    Sgd {
        /// Decay rate of the buffer; without momentum there is none.
        momentum: f64,
        /// Share of a gradient that does not enter the buffer.
        dampening: f64,
        /// Whether the gradient is added to the decayed new buffer.
        nesterov: bool,
    },
}

/// Ratio of a matrix's learning rate with Muon, by the names of `torch.optim.Muon`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdjustLr {
    /// √max(1, rows / columns).
    Original,
    /// 0.2 · √max(rows, columns): steps are about as large as AdamW's.
    #[default]
    MatchRmsAdamW,
}

impl AdjustLr {
    /// Every rule with its name in the config.
    pub const NAMES: [(&'static str, Self); 2] =
        [("original", Self::Original), ("match_rms_adamw", Self::MatchRmsAdamW)];

    /// Returns the ratio of a matrix of this shape.
    pub fn ratio(self, rows: usize, columns: usize) -> f64 {
        let (rows, columns) = (rows as f64, columns as f64);
        match self {
            Self::Original => (rows / columns).max(1.0).sqrt(),
            Self::MatchRmsAdamW => 0.2 * rows.max(columns).sqrt(),
        }
    }
}

/// The optimiser that needs no schedule.
pub(super) const SCHEDULE_FREE_ADAMW: &str = "schedule_free_adamw";

impl Optimizer {
    /// Names of all optimisers in the config.
    pub const NAMES: [&'static str; 7] =
        ["adamw", "rmsprop", "lion", "sgd", SCHEDULE_FREE_ADAMW, "muon", "adafactor"];

    /// Name in the config.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::AdamW { .. } => "adamw",
            Self::RmsProp { .. } => "rmsprop",
            Self::Lion { .. } => "lion",
            Self::Sgd { .. } => "sgd",
            Self::ScheduleFreeAdamW { .. } => SCHEDULE_FREE_ADAMW,
            Self::Muon { .. } => "muon",
            Self::Adafactor => "adafactor",
        }
    }

    pub(super) fn visit(now: Option<&Self>, keys: &mut Keys) -> Result<Self> {
        let belongs = |to: &[&str]| {
            let names: Vec<_> = to.iter().map(|name| format!("{name:?}")).collect();
            format!("it belongs to {}; remove it, or set `train.optimizer`", names.join(", "))
        };
        const BETAS: &[&str] = &["adamw", "lion", SCHEDULE_FREE_ADAMW, "muon"];
        const EPS: &[&str] = &["adamw", "rmsprop", SCHEDULE_FREE_ADAMW, "muon"];
        const MOMENTUM: &[&str] = &["sgd", "muon"];
        keys! { let keys, now;
            /// The optimiser: see [optimizers.md](optimizers.md).
            optimizer = choice(Self::NAMES.map(|name| (name, name))).or("adamw"), now.name();
            /// Decay rates of "adamw" and "lion". The first of "schedule_free_adamw" is the share of the average
            /// in the weights that train. With "muon" they are those of the parameters that AdamW moves.
            betas = betas()
                .unless(|betas| {
                    (optimizer == SCHEDULE_FREE_ADAMW && betas[0] == 0.0).then(|| {
                        "the weights that train would have no share of the average, which could not be computed from \
                         them; take a first number above 0, for example 0.9"
                            .to_owned()
                    })
                })
                .or(if optimizer == "lion" { [0.9, 0.99] } else { [0.9, 0.999] })
                .shown("`[0.9, 0.999]`; `[0.9, 0.99]` for \"lion\"")
                .only(BETAS.contains(&optimizer), belongs(BETAS)),
                match *now {
                    Self::AdamW { beta1, beta2, .. }
                    | Self::ScheduleFreeAdamW { beta1, beta2, .. }
                    | Self::Muon { beta1, beta2, .. }
                    | Self::Lion { beta1, beta2 } => [beta1, beta2],
                    _ => [0.0; 2],
                };
            /// RMSprop's decay rate.
            alpha = number(0.0..1.0).or(0.99).only(optimizer == "rmsprop", belongs(&["rmsprop"])),
                if let Self::RmsProp { alpha, .. } = *now { alpha } else { 0.0 };
            /// Term added to the root in "adamw", "rmsprop" and "schedule_free_adamw"; of AdamW's in "muon".
            eps = number(POSITIVE).or(1e-8).only(EPS.contains(&optimizer), belongs(EPS)),
                match *now {
                    Self::AdamW { eps, .. }
                    | Self::RmsProp { eps, .. }
                    | Self::ScheduleFreeAdamW { eps, .. }
                    | Self::Muon { eps, .. } => eps,
                    _ => 0.0,
                };
            /// Decay rate of SGD's buffer of gradients; 0 has no buffer. Of Muon's average of gradients.
            momentum = number(0.0..1.0)
                .or(if optimizer == "muon" { 0.95 } else { 0.0 })
                .shown("0; 0.95 for \"muon\"")
                .only(MOMENTUM.contains(&optimizer), belongs(MOMENTUM)),
                match *now { Self::Sgd { momentum, .. } | Self::Muon { momentum, .. } => momentum, _ => 0.0 };
            /// Share of a gradient that does not enter SGD's buffer. The first one enters whole.
            dampening = number(0.0..=1.0)
                .or(0.0)
                .only(optimizer == "sgd", belongs(&["sgd"]))
                .only(momentum != 0.0, "without `train.momentum` SGD has no buffer; set one, or remove it"),
                if let Self::Sgd { dampening, .. } = *now { dampening } else { 0.0 };
            /// Nesterov's momentum: the gradient is added to the decayed new buffer.
            nesterov = boolean()
                .unless(|&nesterov| {
                    let suits = optimizer == "muon" || (momentum != 0.0 && dampening == 0.0);
                    (nesterov && !suits).then(|| {
                        "Nesterov's momentum needs `train.momentum` above 0 and `train.dampening` of 0, as in PyTorch".into()
                    })
                })
                .or(optimizer == "muon")
                .shown("false; true for \"muon\"")
                .only(MOMENTUM.contains(&optimizer), belongs(MOMENTUM)),
                match *now { Self::Sgd { nesterov, .. } | Self::Muon { nesterov, .. } => nesterov, _ => false };
            /// Ratio of a matrix's learning rate with Muon, by the names of PyTorch. "original":
            /// √max(1, rows / columns). "match_rms_adamw": 0.2 · √max(rows, columns), which suits rates and
            /// weight decays of AdamW.
            adjust_lr_fn = choice(AdjustLr::NAMES)
                .or(AdjustLr::MatchRmsAdamW)
                .only(optimizer == "muon", belongs(&["muon"])),
                if let Self::Muon { adjust_lr, .. } = *now { adjust_lr } else { AdjustLr::default() };
        }
        let [beta1, beta2] = betas;
        Ok(match optimizer {
            "adamw" => Self::AdamW { beta1, beta2, eps },
            "rmsprop" => Self::RmsProp { alpha, eps },
            "lion" => Self::Lion { beta1, beta2 },
            SCHEDULE_FREE_ADAMW => Self::ScheduleFreeAdamW { beta1, beta2, eps },
            "adafactor" => Self::Adafactor,
            "muon" => Self::Muon { momentum, nesterov, adjust_lr: adjust_lr_fn, beta1, beta2, eps },
            _ => Self::Sgd { momentum, dampening, nesterov },
        })
    }
}

/// Rules that need later keys.
pub(super) fn check(config: &Config, places: &Places) -> super::error::Result<()> {
    let (optimizer, compute) = (&config.train.optimizer, &config.compute);
    let conflict = |reason: String| Err(places.conflict("train.optimizer", reason));
    match optimizer {
        Optimizer::Muon { .. } | Optimizer::Adafactor if compute.tensor > 1 => conflict(format!(
            "{:?} needs whole matrices, and compute.tensor = {} divides them; use compute.sharding or compute.pipeline, \
             or another optimiser",
            optimizer.name(),
            compute.tensor
        )),
        Optimizer::Adafactor if compute.devices.backend() == Backend::Cuda => conflict(
            "\"adafactor\" has no kernels for GPUs yet; take \"adamw\" with train.optimizer_state = \"8bit\", or \
             compute.devices = \"cpu\""
                .to_owned(),
        ),
        _ => Ok(()),
    }
}

fn betas<'a>() -> Form<'a, [f64; 2]> {
    let read = |entry: Entry| {
        let wrong = entry.wrong("two numbers in [0, 1), for example [0.9, 0.999]");
        let values = entry
            .items()
            .into_iter()
            .map(|item| (number(0.0..1.0).read)(item))
            .collect::<Result<Vec<_>>>()?;
        values.try_into().map_err(|_| wrong)
    };
    custom("two numbers, ≥ 0, < 1", read, |betas: &[f64; 2]| Value::from(betas.to_vec()))
}
