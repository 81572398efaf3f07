//! Reductions that go on while backward does: what they give, and a rank that is lost meanwhile.
//!
//! One thread plays all ranks, one after the other: it would wait for ever in a call that waits for the
//! others.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tandem_comm::{CommError, ProcessGroup, threads};
use tandem_kernels::ops::Gradient;
use tandem_kernels::{DType, Device, MemoryKind, ops};
use tandem_model::LayerId::{Block, Embedding, Head};
use tandem_model::{Decoder, GradientSink, LayerId, ModelError, ModelFolder, Result as ModelResult};

use super::*;
use crate::TrainError;
use crate::config::{ShardedState, SumForm};
use crate::parallel::{DeviceMesh, Partition};
use crate::placement::MemoryPlacement;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(600);
const BACKWARD: [LayerId; 4] = [Head, Block(1), Block(0), Embedding];

/// Ranks whose sums have one form, in one process.
struct Ranks {
    decoder: Arc<Decoder>,
    device: Device,
    form: SumForm,
    wire: DType,
    single_micro_batches: bool,
}

impl Ranks {
    fn new(form: SumForm, wire: DType) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small/model");
        let decoder = Decoder::new(ModelFolder::open(&folder).unwrap().spec().clone(), 16).unwrap();
        let device = Device::cpu(1, 64 << 20).unwrap();
        Self { decoder: Arc::new(decoder), device, form, wire, single_micro_batches: false }
    }

    fn accumulator(&self, partition: Partition, groups: ReductionGroups) -> Accumulator {
        let placement = MemoryPlacement::all_in(self.device.clone());
        let (decoder, partition) = (self.decoder.clone(), Arc::new(partition));
        let frozen = vec![Vec::new(); partition.num_layers()];
        let Self { form, wire, single_micro_batches, .. } = *self;
        let options = SumOptions { form, wire, single_micro_batches };
        let mut sums = Accumulator::new(&placement, decoder, partition, groups, options, frozen).unwrap();
        sums.begin(2).unwrap();
        sums
    }

    /// Two ranks that hold parts of the sums, each layer by itself.
    fn pair_of_parts(&self) -> [Accumulator; 2] {
        let both = threads::groups(2, PATIENCE).into_iter().map(|group| {
            let partition = Partition::new(&self.decoder, group.rank(), 2);
            let groups = ReductionGroups { of_parts: Some(group), of_all: None, replicas: None };
            self.accumulator(partition, groups)
        });
        both.collect::<Vec<_>>().try_into().ok().unwrap()
    }

    /// Two ranks that hold all sums, and reduce them once a step; `joins` layers in buckets.
    fn pair_of_wholes(&self, divides: bool, joins: bool) -> [Accumulator; 2] {
        self.pair_of_wholes_in(divides, joins, None)
    }

    /// [`Ranks::pair_of_wholes`], with a `unit` in equal parts as on GPUs.
    fn pair_of_wholes_in(&self, divides: bool, joins: bool, unit: Option<usize>) -> [Accumulator; 2] {
        let both = threads::groups(2, PATIENCE).into_iter().map(|group| {
            let place = if divides { (group.rank(), 2) } else { (0, 1) };
            let sharded = ShardedState { optimizer: divides, gradients: false, weights: !joins };
            let partition = Partition::divided(sharded, &self.decoder, place, unit);
            assert_eq!(partition.buckets().len(), if joins { 2 } else { 4 });
            let groups = ReductionGroups { of_parts: None, of_all: Some(group), replicas: None };
            self.accumulator(partition, groups)
        });
        both.collect::<Vec<_>>().try_into().ok().unwrap()
    }

    /// Gives a layer a gradient whose first parameter is `value` everywhere.
    fn emit(&self, sums: &mut Accumulator, layer: LayerId, value: f32) -> ModelResult<()> {
        let part = self.decoder.layout(layer).params[0].part;
        let mut gradients = sums.open(layer).unwrap();
        if let Some(limit) = gradients.term_limit() {
            // As a look-up of every token adds.
            let table = gradients.get_mut(part).unwrap();
            let ids: Vec<u32> = (0..table.rows() as u32).collect();
            let mut dx =
                self.device.zeros(MemoryKind::Scratch, table.rows(), table.cols(), DType::F32).unwrap();
            dx.view_mut().into_slice::<f32>().fill(value);
            ops::embedding_backward_exact(&self.device, &ids, 1.0, dx.view(), table, limit).unwrap();
            return sums.emit(layer);
        }
        let (view, adds) = gradients.product_mut(part).unwrap();
        view.into_slice::<f32>().iter_mut().for_each(|x| *x = if adds { *x + value } else { value });
        sums.emit(layer)
    }

    /// Squares of what a rank owns, per layer.
    fn squares(&self, sums: &Accumulator) -> Vec<f64> {
        let of = |index| ops::block_squares(&self.device, &[sums.owned(index)]).unwrap().value();
        (0..self.decoder.layers().len()).map(of).collect()
    }

    /// [`Ranks::squares`] of layers whose first parameter is `values` everywhere, in walk order.
    fn expected(&self, values: [f64; 4]) -> Vec<f64> {
        let layers = self.decoder.layers().into_iter().zip(values);
        layers.map(|(layer, x)| self.decoder.layout(layer).params[0].len() as f64 * x * x).collect()
    }
}

fn comm(error: ModelError) -> CommError {
    TrainError::from(error).comm().expect("a rank is lost").clone()
}

fn sum(of: [Vec<f64>; 2]) -> Vec<f64> {
    of[0].iter().zip(&of[1]).map(|(a, b)| a + b).collect()
}

#[test]
fn a_reduction_is_under_way_until_the_next_layer_and_a_lost_rank_is_missed_there() {
    for form in [SumForm::Exact, SumForm::Fast] {
        let ranks = Ranks::new(form, DType::F32);
        let mut both = ranks.pair_of_parts();
        for (layer, value) in [(Head, 1.0), (Block(1), 2.0), (Head, 4.0), (Block(0), 8.0), (Embedding, 16.0)]
        {
            for (rank, sums) in both.iter_mut().enumerate() {
                ranks.emit(sums, layer, value * (1.0 + rank as f32)).unwrap();
            }
        }
        both.iter_mut().for_each(|sums| assert!(sums.reduce(&DeviceMesh::alone()).is_ok()));
        let found = sum(both.each_ref().map(|sums| ranks.squares(sums)));
        assert_eq!(found, ranks.expected([48.0, 24.0, 6.0, 15.0]), "{form:?}");

        let [mut a, b] = ranks.pair_of_parts();
        ranks.emit(&mut a, Head, 1.0).unwrap();
        drop(b);
        let error = ranks.emit(&mut a, Block(1), 1.0).unwrap_err();
        assert_eq!(comm(error), CommError::PeerLost { rank: 1 }, "{form:?}");
        let [mut a, b] = ranks.pair_of_parts();
        ranks.emit(&mut a, Embedding, 1.0).unwrap();
        drop(b);
        let error = a.reduce(&DeviceMesh::alone()).err().unwrap();
        assert_eq!(error.comm(), Some(&CommError::PeerLost { rank: 1 }), "{form:?}");
        // And one with a reduction under way does not wait for it.
        let [mut a, _b] = ranks.pair_of_parts();
        ranks.emit(&mut a, Head, 1.0).unwrap();
        drop(a);
    }
}

/// A rank that has completed its last pass has begun all reductions, and waits in none of them.
#[test]
fn sums_are_reduced_while_the_last_pass_goes_on() {
    for (form, wire) in
        [(SumForm::Exact, DType::F32), (SumForm::Fast, DType::F32), (SumForm::Fast, DType::Bf16)]
    {
        let ranks = Ranks::new(form, wire);
        for (divides, joins, unit) in [
            (false, false, None),
            (false, true, None),
            (true, false, None),
            (true, true, None),
            (true, false, Some(2)),
            (true, true, Some(4)),
        ] {
            let what = format!("{form:?} in {wire:?}, divided: {divides}, joined: {joins}, unit: {unit:?}");
            let mut both = ranks.pair_of_wholes_in(divides, joins, unit);
            for step in 0..2 {
                for (rank, sums) in both.iter_mut().enumerate() {
                    sums.begin(3).unwrap();
                    // The second rank has one micro-batch less.
                    for pass in 0..2 - rank {
                        if pass + rank == 1 {
                            sums.begin_last_pass();
                        }
                        // The head's gradient of a tied table comes before all.
                        ranks.emit(sums, Embedding, 1.0).unwrap();
                        for (layer, value) in BACKWARD.into_iter().zip([1.0, 2.0, 4.0, 8.0]) {
                            ranks.emit(sums, layer, value).unwrap();
                        }
                    }
                }
                let norms: Vec<_> = both
                    .iter_mut()
                    .map(|sums| {
                        sums.reduce(&DeviceMesh::alone()).unwrap().norm(&mut DeviceMesh::alone()).unwrap()
                    })
                    .collect();
                let found = both.each_ref().map(|sums| ranks.squares(sums));
                let expected = ranks.expected([27.0, 12.0, 6.0, 3.0]);
                let all = if divides { sum(found.clone()) } else { found[0].clone() };
                assert_eq!(all, expected, "{what}, step {step}");
                assert!(divides || found[0] == found[1] && norms[0] == norms[1], "{what}, step {step}");
            }
        }
    }
}

/// The gradient of a step's only micro-batch is never summed, and is that of a sum of one term. That of a
/// tied table has two. Where no step has more, no gradient takes memory before backward or after the update.
#[test]
fn one_micro_batch_gives_the_bits_of_a_sum() {
    let value = 1.0 / 3.0 + f32::powi(2.0, -30);
    let mut ranks = Ranks::new(SumForm::Exact, DType::F32);
    for tied in [false, true] {
        let mut spec = ranks.decoder.spec().clone();
        spec.head.tied = tied;
        ranks.decoder = Arc::new(Decoder::new(spec, 16).unwrap());
        let mut step = |num_micro_batches: usize, single_micro_batches: bool| {
            ranks.single_micro_batches = single_micro_batches;
            let held = || ranks.device.memory().total();
            let before = held();
            let alone = || ReductionGroups { of_parts: None, of_all: None, replicas: None };
            let mut sums = ranks.accumulator(Partition::new(&ranks.decoder, 0, 1), alone());
            // What an earlier step left must not matter.
            for value in [7.0, value] {
                sums.release();
                assert_eq!(held() == before, single_micro_batches, "tied: {tied}");
                sums.begin(num_micro_batches).unwrap();
                sums.begin_last_pass();
                if tied {
                    ranks.emit(&mut sums, Embedding, 0.1).unwrap();
                }
                BACKWARD.into_iter().for_each(|layer| ranks.emit(&mut sums, layer, value).unwrap());
            }
            assert!(sums.take_in_range().unwrap());
            let norm = sums.reduce(&DeviceMesh::alone()).unwrap().norm(&mut DeviceMesh::alone()).unwrap();
            let is_term = |index| matches!(sums.owned(index), Gradient::Terms(_));
            let terms: Vec<_> = (0..ranks.decoder.layers().len()).map(is_term).collect();
            (norm.to_bits(), ranks.squares(&sums).into_iter().map(f64::to_bits).collect::<Vec<_>>(), terms)
        };
        let (summed, single, transient) = (step(2, false), step(1, false), step(1, true));
        assert_eq!((summed.0, &summed.1), (single.0, &single.1), "tied: {tied}");
        assert_eq!((summed.0, &summed.1), (transient.0, &transient.1), "tied: {tied}");
        assert!(summed.2.iter().all(|is_term| !is_term));
        let expected: Vec<_> =
            ranks.decoder.layers().iter().map(|layer| !tied || *layer != Embedding).collect();
        assert_eq!(single.2, expected, "tied: {tied}");
        assert!(transient.2.iter().all(|is_term| *is_term));
    }
}

/// A step of several micro-batches in a run that was not expected to have one.
#[test]
fn sums_are_there_where_they_were_not_expected() {
    for form in [SumForm::Exact, SumForm::Fast] {
        let mut ranks = Ranks::new(form, DType::F32);
        let squares = [false, true].map(|single_micro_batches| {
            ranks.single_micro_batches = single_micro_batches;
            let alone = ReductionGroups { of_parts: None, of_all: None, replicas: None };
            let mut sums = ranks.accumulator(Partition::new(&ranks.decoder, 0, 1), alone);
            for num_micro_batches in [1, 2] {
                sums.begin(num_micro_batches).unwrap();
                for pass in 1..=num_micro_batches {
                    if pass == num_micro_batches {
                        sums.begin_last_pass();
                    }
                    BACKWARD.into_iter().for_each(|layer| ranks.emit(&mut sums, layer, 3.0).unwrap());
                }
            }
            assert!(sums.reduce(&DeviceMesh::alone()).is_ok());
            ranks.squares(&sums)
        });
        assert_eq!(squares, [ranks.expected([6.0; 4]), ranks.expected([6.0; 4])], "{form:?}");
    }
}

#[test]
fn a_rank_without_a_micro_batch_makes_the_calls_of_the_others() {
    let ranks = Ranks::new(SumForm::Exact, DType::F32);
    let [mut a, mut b] = ranks.pair_of_wholes(true, false);
    a.begin_last_pass();
    BACKWARD.into_iter().for_each(|layer| ranks.emit(&mut a, layer, 3.0).unwrap());
    // Whichever settles first waits for the other.
    std::thread::scope(|scope| {
        let b = scope.spawn(|| b.reduce(&DeviceMesh::alone()).map(|_| ()).unwrap());
        a.reduce(&DeviceMesh::alone()).unwrap();
        b.join().unwrap();
    });
    assert_eq!(sum([ranks.squares(&a), ranks.squares(&b)]), ranks.expected([3.0; 4]));
}

#[test]
fn replicas_of_a_part_add_up_their_sums() {
    for (form, wire) in [(SumForm::Exact, DType::F32), (SumForm::Fast, DType::Bf16)] {
        let ranks = Ranks::new(form, wire);
        for holds_parts in [false, true] {
            // Four ranks: neighbours divide, and ranks two apart hold the same part.
            let neighbours =
                [threads::groups(2, PATIENCE), threads::groups(2, PATIENCE)].into_iter().flatten();
            let [even, odd] = [threads::groups(2, PATIENCE), threads::groups(2, PATIENCE)];
            let [mut even, mut odd] = [even.into_iter(), odd.into_iter()];
            let mut all: Vec<_> = neighbours
                .enumerate()
                .map(|(rank, group): (usize, ProcessGroup)| {
                    let replicas = if rank % 2 == 0 { even.next() } else { odd.next() };
                    let partition = Partition::new(&ranks.decoder, group.rank(), 2);
                    let (of_parts, of_all) =
                        if holds_parts { (Some(group), None) } else { (None, Some(group)) };
                    ranks.accumulator(partition, ReductionGroups { of_parts, of_all, replicas })
                })
                .collect();
            all.iter_mut().for_each(Accumulator::begin_last_pass);
            for layer in BACKWARD {
                for (rank, sums) in all.iter_mut().enumerate() {
                    ranks.emit(sums, layer, (1 << rank) as f32).unwrap();
                }
            }
            std::thread::scope(|scope| {
                for sums in &mut all {
                    scope.spawn(|| sums.reduce(&DeviceMesh::alone()).map(|_| ()).unwrap());
                }
            });
            let found: Vec<_> = all.iter().map(|sums| ranks.squares(sums)).collect();
            assert_eq!(sum([found[0].clone(), found[1].clone()]), ranks.expected([15.0; 4]), "{form:?}");
            assert_eq!(found[..2], found[2..], "{form:?}");
        }
    }
}

/// Sums of two ranks in bf16 have 8 bits, the same on both.
#[test]
fn what_travels_in_bf16_is_rounded() {
    let ranks = Ranks::new(SumForm::Fast, DType::Bf16);
    let mut both = ranks.pair_of_wholes(false, true);
    let value = 1.0 + f32::powi(2.0, -12);
    for sums in &mut both {
        sums.begin_last_pass();
        BACKWARD.into_iter().for_each(|layer| ranks.emit(sums, layer, value).unwrap());
    }
    both.iter_mut().for_each(|sums| assert!(sums.reduce(&DeviceMesh::alone()).is_ok()));
    let found = both.each_ref().map(|sums| ranks.squares(sums));
    assert_eq!(found, [ranks.expected([2.0; 4]), ranks.expected([2.0; 4])]);
}

#[test]
fn a_lost_rank_is_missed_where_sums_are_settled() {
    for form in [SumForm::Exact, SumForm::Fast] {
        let ranks = Ranks::new(form, DType::F32);
        let [mut a, b] = ranks.pair_of_wholes(false, false);
        a.begin_last_pass();
        BACKWARD.into_iter().for_each(|layer| ranks.emit(&mut a, layer, 1.0).unwrap());
        drop(b);
        let error = a.reduce(&DeviceMesh::alone()).err().unwrap();
        assert_eq!(error.comm(), Some(&CommError::PeerLost { rank: 1 }), "{form:?}");
        // And one with reductions under way does not wait for them.
        let [mut a, _b] = ranks.pair_of_wholes(true, false);
        a.begin_last_pass();
        ranks.emit(&mut a, Head, 1.0).unwrap();
        drop(a);
    }
}
