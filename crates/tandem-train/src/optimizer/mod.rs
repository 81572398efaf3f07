//! The optimiser, over flat buffers with each rank's part of every layer.

pub(crate) mod adafactor;
pub(crate) mod average;
#[cfg(test)]
mod golden;
pub(crate) mod groups;
mod muon;
mod rule;
mod schedule;
mod whole;

use std::ops::Range;
use std::sync::Arc;

use tandem_comm::ProcessGroup;
use tandem_kernels::ops;
use tandem_kernels::{AdamMoment, Device, MemoryKind, StateForm, States, StochasticRounding, Tensor};
use tandem_model::{Decoder, LayerId, LayerLayout, ParamKind, ParamSpec};

use crate::Result;
use crate::config::{self, TrainConfig};
use crate::gradients::Accumulator;
use crate::parallel::Partition;
use crate::weights::Policy;

use adafactor::FactoredMoments;
use average::{MovingAverage, own, starts};
use groups::{ParameterGroups, ParameterSettings};
use rule::{StateSpec, StepNumbers};
use whole::WholeParameter;

pub(crate) use average::EvaluationWeights;
pub(crate) use average::Weighting;
pub(crate) use rule::BASE_SEQUENCE;
pub(crate) use rule::{Has, every, first_element};
pub(crate) use schedule::{Schedule, clip_coefficient};

/// Optimiser states: laid out like this rank's part of the masters, in the form that the config
/// asks for.
pub struct Optimizer {
    /// Device that holds and updates the states.
    home: Device,
    partition: Arc<Partition>,
    rule: config::Optimizer,
    /// Each state by layer.
    states: Vec<State>,
    /// Moments of Adafactor, whole on every rank.
    factored: Option<FactoredMoments>,
    /// Average of the masters, if that is asked for.
    average: Option<MovingAverage>,
    /// Weights of the average of schedule-free AdamW so far.
    weighting: Weighting,
    /// Weights that train, while others are evaluated that are not stored.
    trained: Option<Vec<Tensor>>,
    /// Per layer, then per state: the first element from which it is kept.
    firsts: Vec<Vec<usize>>,
    /// Per layer, the parameters that are updated whole.
    whole: Vec<Vec<WholeParameter>>,
    /// Per layer, the runs of this rank's part that are updated element by element.
    runs: Vec<Vec<Run>>,
}

/// A state of elements that this rank owns.
struct State {
    spec: StateSpec,
    layers: Vec<States>,
}

/// A state of all layers that a rank holds.
pub struct StateGroup<'a> {
    /// Name in checkpoints.
    pub name: &'static str,
    /// By layer: the rank's elements from [`first_element`] on.
    pub layers: &'a [States],
    /// Parameters that have the state.
    pub has: Has,
}

/// The elements of a range from `first` on.
pub(crate) fn from(range: &Range<usize>, first: usize) -> Range<usize> {
    range.start.max(first)..range.end.max(first)
}

/// Contiguous range of one parameter that this rank owns. Stochastic rounding is keyed on the
/// offset within the parameter, so results do not depend on sharding.
#[derive(Clone, Debug, PartialEq)]
struct Run {
    /// Elements of the layer's flat buffer.
    range: Range<usize>,
    layer: LayerId,
    part: ParamKind,
    /// The first one's place in the whole parameter.
    first: usize,
    /// Columns of a tensor-parallel shard by columns: their number, the whole matrix's, and the elements of
    /// the shard before the first one; `first` is then the shard's first.
    columns: Option<[usize; 3]>,
    settings: ParameterSettings,
}

impl Run {
    /// Stochastic rounding of one state in one update.
    fn dither(&self, update: u64, moment: AdamMoment) -> StochasticRounding {
        let layer = match self.layer {
            LayerId::Embedding => 0,
            LayerId::Head => 1,
            LayerId::Block(index) => 2 + index as u64,
        };
        let dither = StochasticRounding::new(&[update, layer, self.part as u64, moment as u64], self.first);
        match self.columns {
            Some([width, stride, skipped]) => dither.in_columns(width, stride, skipped),
            None => dither,
        }
    }
}

impl Optimizer {
    /// Zero states in the memory of `home`.
    pub fn new(
        home: &Device,
        decoder: &Decoder,
        partition: Arc<Partition>,
        config: &TrainConfig,
        groups: &ParameterGroups,
    ) -> Result<Self> {
        let zeros = |moment, form, has| -> Result<Vec<States>> {
            let of = |(index, layer)| {
                let first = first_element(decoder.trained(layer), layer, has);
                let len = from(&partition.owned(index), first).len();
                States::zeros(home, MemoryKind::Optimizer, moment, form, len)
            };
            let layers = decoder.layers().into_iter().enumerate().map(of);
            let layers = layers.inspect(|layer| layer.iter().for_each(States::evict_pages));
            Ok(layers.collect::<Result<_, _>>()?)
        };
        let state = |spec: StateSpec| -> Result<State> {
            let form = if spec.holds_weights { StateForm::F32 } else { config.optimizer_state };
            Ok(State { layers: zeros(spec.moment, form, spec.has)?, spec })
        };
        let average = |decay| -> Result<MovingAverage> {
            Ok(MovingAverage { decay, layers: zeros(AdamMoment::First, StateForm::F32, every)? })
        };
        let layers = decoder.layers().into_iter().enumerate();
        Ok(Self {
            home: home.clone(),
            rule: config.optimizer,
            states: rule::states(&config.optimizer).into_iter().map(state).collect::<Result<_>>()?,
            average: config.ema_decay.map(average).transpose()?,
            factored: match config.optimizer {
                config::Optimizer::Adafactor => Some(FactoredMoments::new(home, decoder)?),
                _ => None,
            },
            weighting: Weighting::default(),
            trained: None,
            firsts: layers
                .clone()
                .map(|(_, layer)| states_begin(&config.optimizer, decoder, layer))
                .collect(),
            whole: layers
                .clone()
                .map(|(index, layer)| {
                    let is_whole = |part| rule::is_whole(&config.optimizer, layer, part);
                    WholeParameter::of_layer(decoder, layer, groups, (&partition, index), is_whole)
                })
                .collect(),
            runs: layers
                .map(|(index, layer)| {
                    let owned = partition.owned(index);
                    let mut runs = match config.optimizer_state {
                        StateForm::Bf16 => runs_of_whole(decoder, layer, groups, &owned),
                        StateForm::F32 | StateForm::EightBit => {
                            runs(layer, decoder.trained(layer), groups, &owned)
                        }
                    };
                    runs.retain(|run| !rule::is_whole(&config.optimizer, layer, run.part));
                    runs
                })
                .collect(),
            partition,
        })
    }

    /// Weights of the average of schedule-free AdamW so far; no average has none.
    pub fn weighting(&self) -> Option<Weighting> {
        Some(self.weighting).filter(|weighting| *weighting != Weighting::default())
    }

    /// Goes on with weights of an average that were saved.
    pub fn restore_weighting(&mut self, saved: Option<Weighting>) {
        self.weighting = saved.unwrap_or_default();
    }

    /// Device that holds and updates the states.
    pub fn home(&self) -> &Device {
        &self.home
    }

    /// Partition of the states.
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// The states by name, then by layer; the average of the weights is one of them.
    pub fn states(&self) -> Vec<StateGroup<'_>> {
        let of = |(name, layers, has)| StateGroup { name, layers, has };
        let states = self.states.iter().map(|state| (state.spec.name, &state.layers[..], state.spec.has));
        let average =
            self.average.iter().map(|average| (average::AVERAGE, &average.layers[..], every as Has));
        states.chain(average).map(of).collect()
    }

    /// Moments that every rank holds whole.
    pub fn factored(&self) -> Option<&FactoredMoments> {
        self.factored.as_ref()
    }

    /// The same, for restoring.
    pub fn factored_mut(&mut self) -> Option<&mut FactoredMoments> {
        self.factored.as_mut()
    }

    /// Mutable states, for restoring.
    pub fn states_mut(&mut self) -> Vec<(&'static str, &mut [States], Has)> {
        let states =
            self.states.iter_mut().map(|state| (state.spec.name, &mut state.layers[..], state.spec.has));
        let average =
            self.average.iter_mut().map(|average| (average::AVERAGE, &mut average.layers[..], every as Has));
        states.chain(average).collect()
    }

    /// Applies the accumulated gradient times `grad_scale`; `update` is the 1-based count of
    /// updates, for Adam's bias correction. Master weights and compute copies are written in the
    /// same pass. For states in a file, one layer is prefetched while the one before it is updated.
    /// Gradients must be complete: the CPU does not wait for a GPU. With Muon and states in parts it is
    /// collective among the ranks of `group`, which hold the parts.
    pub fn step(
        &mut self,
        learning_rate: f64,
        grad_scale: f32,
        update: u64,
        gradients: &Accumulator,
        weights: &mut Policy,
        group: &mut ProcessGroup,
    ) -> Result<()> {
        let starts = starts(weights);
        let mut room = whole::room(&self.home, &self.whole)?;
        let share = match self.rule {
            config::Optimizer::ScheduleFreeAdamW { .. } => self.weighting.share(learning_rate),
            _ => 0.0,
        };
        let mut layers = weights.layers_mut();
        for index in 0..layers.len() {
            if let Some((next, _)) = layers.get(index + 1) {
                next.prefetch_pages();
                self.layer(index + 1).for_each(States::prefetch_pages);
            }
            let (master, copy) = &mut layers[index];
            let start = self.partition.owned(index).start;
            for run in &self.runs[index] {
                let range = &run.range;
                let ParameterSettings { learning_rate_factor, weight_decay, .. } = run.settings;
                let own = range.start - start..range.end - start;
                let grad = gradients.owned(index).range(own.clone());
                let copy = copy
                    .as_mut()
                    .filter(|copy| range.end <= copy.cols())
                    .map(|copy| copy.view_mut().col_range(range.clone()));
                let held = range.start - starts[index]..range.end - starts[index];
                let master = master.view_mut().col_range(held);
                let firsts = &self.firsts[index];
                let states = self.states.iter_mut().zip(firsts).map(|(State { spec, layers }, &first)| {
                    let start = start.max(first);
                    let own = range.start - start..range.end - start;
                    layers[index].range_mut(own, run.dither(update, spec.moment))
                });
                let learning_rate = learning_rate * learning_rate_factor;
                let numbers = StepNumbers { learning_rate, weight_decay, update, share };
                let operands = ops::Update::new(grad, grad_scale, master, copy);
                rule::step(&self.rule, &self.home, numbers, operands, states.collect())?;
            }
            if let Some(room) = &mut room {
                let numbers = StepNumbers { learning_rate, weight_decay: 0.0, update, share };
                let operands = whole::Operands {
                    grad: gradients.owned(index),
                    grad_scale,
                    owned: self.partition.owned(index),
                    master,
                    master_start: starts[index],
                    copy: copy.as_deref_mut(),
                };
                let (home, whole) = (&self.home, &self.whole[index]);
                match &mut self.factored {
                    Some(moments) => {
                        let moments = &mut moments.layers[index];
                        adafactor::step(home, numbers, whole, moments, operands, room, group)?;
                    }
                    None => {
                        let averages = &mut self.states[0].layers[index];
                        muon::step(&self.rule, home, numbers, whole, averages, operands, room, group)?;
                    }
                }
            }
            if let Some(average) = &mut self.average {
                let masters = own(layers[index].0, &self.partition.owned(index), starts[index]);
                average.update(&self.home, index, masters, update)?;
            }
            layers[index].0.evict_pages();
            self.layer(index).for_each(States::evict_pages);
        }
        Ok(())
    }

    /// Tells that the states are not needed for now, as [`States::evict_pages`].
    pub fn evict_pages(&self) {
        self.states().into_iter().flat_map(|group| group.layers).for_each(States::evict_pages);
    }

    /// The states of a layer.
    fn layer(&self, index: usize) -> impl Iterator<Item = &States> {
        let states = self.states.iter().map(move |state| &state.layers[index]);
        states.chain(self.average.iter().map(move |average| &average.layers[index]))
    }
}

/// First element of a layer from which each state is kept.
fn states_begin(rule: &config::Optimizer, decoder: &Decoder, layer: LayerId) -> Vec<usize> {
    let first = |spec: StateSpec| first_element(decoder.trained(layer), layer, spec.has);
    rule::states(rule).into_iter().map(first).collect()
}

/// Owned range of each parameter that is not frozen; a whole number of state blocks precedes it.
fn runs(layer: LayerId, layout: &LayerLayout, groups: &ParameterGroups, owned: &Range<usize>) -> Vec<Run> {
    let run = |param: &ParamSpec| {
        let (start, end) = (param.offset.max(owned.start), param.range().end.min(owned.end));
        let settings = groups.of(layer, param);
        (start < end && !settings.frozen).then(|| Run {
            range: start..end,
            layer,
            part: param.part,
            first: start - param.offset,
            columns: None,
            settings,
        })
    };
    layout.params.iter().filter_map(run).collect()
}

/// [`runs`] that know their places in the whole parameters, of which a tensor-parallel shard has some
/// rows or columns.
fn runs_of_whole(
    decoder: &Decoder,
    layer: LayerId,
    groups: &ParameterGroups,
    owned: &Range<usize>,
) -> Vec<Run> {
    let mut runs = Vec::new();
    for (whole, own) in decoder.whole().trained(layer).params.iter().zip(&decoder.trained(layer).params) {
        let settings = groups.of(layer, own);
        if settings.frozen {
            continue;
        }
        let mut add = |place: Range<usize>, first: usize, columns: Option<[usize; 2]>| {
            let (start, end) = (place.start.max(owned.start), place.end.min(owned.end));
            if start < end {
                let skipped = start - place.start;
                runs.push(Run {
                    range: start..end,
                    layer,
                    part: own.part,
                    first: if columns.is_some() { first } else { first + skipped },
                    columns: columns.map(|[width, stride]| [width, stride, skipped]),
                    settings,
                });
            }
        };
        let columns = decoder.columns(whole);
        if columns.len() < whole.cols {
            add(own.range(), columns.start, Some([columns.len(), whole.cols]));
            continue;
        }
        for run in decoder.runs(whole) {
            let start = own.offset + run.start;
            add(start..start + run.whole.len(), run.whole.start, None);
        }
    }
    runs
}
